"""A run's log as a table and as a picture of its loss and tok/s."""

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from spillcliff.errors import UserError
from spillcliff.files import Say, ignore, parse_lines, read_lines, write_atomic
from spillcliff.units import format_count
from trainer.run_folder import RunFolder

COLUMNS = ("run", "step", "tokens", "loss", "val_loss", "lr", "norm", "tok_s", "step_s", "micro_s", "optimizer_s", "data_s",
           "log_s")
SMOOTH = 50
"""Of a run's steps, one in so many sets how far back its loss is averaged: a fiftieth shows the trend and not the noise."""
WINDOW = 21
"""Steps of which the median is a point of tok/s."""
SIZE_IN, DPI = (9.0, 6.5), 110


@dataclass(frozen=True)
class LearningCurve:
    """What a run's log says of its steps: {column: value} of each, in order, evaluations among them (those before the first
    step at step 0, without a loss)."""

    name: str
    rows: list[dict]

    def points(self, column: str) -> tuple[list[int], list[float]]:
        """(tokens so far, values) where the run has a finite one."""
        rows = [row for row in self.rows if _is_finite(row.get(column))]
        return [row["tokens"] for row in rows], [row[column] for row in rows]


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read(run: RunFolder, say: Say = ignore) -> LearningCurve:
    """A run's curve; a torn last line of its log is named by `say` and left out. UserError for a folder without a run."""
    tokens = run.load_plan().step.tokens
    lines = parse_lines(run.log, "log", read_lines(run.log, "log"), _line, say)
    rows = rows_of(lines, tokens)
    if not rows:
        raise UserError(f"log {run.log} has no step and no evaluation yet")
    name = run.path.resolve().name
    return LearningCurve(name, [{"run": name} | row for row in rows])


def _line(value: object) -> dict:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str) or type(value.get("step")) is not int:
        raise UserError("it must be an object with a kind and a step")
    return value


def rows_of(lines: list[dict], tokens_per_step: int) -> list[dict]:
    """The rows of a log's lines. Where a run went on from a checkpoint, what was logged past it is dropped, since those
    steps came again."""
    rows: dict[int, dict] = {}
    last = 0
    for line in lines:
        kind, step = line["kind"], line["step"]
        if kind == "step" and step <= last:
            rows = {n: row for n, row in rows.items() if n < step}
        if kind == "step":
            last = step
            row = {"step": step, "tokens": step * tokens_per_step}
            row |= {name: line.get(name) for name in COLUMNS if name not in (*row, "run", "tok_s", "val_loss")}
            if _is_finite(line.get("step_s")) and line["step_s"] > 0:
                row["tok_s"] = tokens_per_step / line["step_s"]
            rows[step] = row
        elif kind == "eval":
            row = rows.setdefault(step, {"step": step, "tokens": step * tokens_per_step})
            row["val_loss"] = line.get("val_loss")
    return [rows[step] for step in sorted(rows)]


def table(curves: list[LearningCurve]) -> str:
    """The rows of all as CSV, with a head; what there is none of is left empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for each in curves:
        writer.writerows(each.rows)
    return text.getvalue()


def smoothed(values: list[float], over: float) -> list[float]:
    """The mean of all values so far, those further back counting less by e for every `over` of them."""
    keep, total, weight, out = math.exp(-1 / max(over, 1e-9)), 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def middles(values: list[float]) -> list[float]:
    """The median of WINDOW values around each."""
    half = WINDOW // 2
    return [median(values[max(0, i - half):i + half + 1]) for i in range(len(values))]


def draw(curves: list[LearningCurve], path: Path) -> None:
    """The picture, a PNG: losses above and tok/s below, over the tokens seen; a colour for each run. UserError if it can't
    be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=SIZE_IN, layout="constrained")
    FigureCanvasAgg(figure)
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for i, each in enumerate(curves):
        colour = f"C{i % 10}"
        tokens, loss = each.points("loss")
        losses.plot(tokens, loss, color=colour, alpha=0.2, linewidth=0.8)
        losses.plot(tokens, smoothed(loss, len(loss) / SMOOTH), color=colour, linewidth=1.4, label=f"{each.name}: training")
        losses.plot(*each.points("val_loss"), color=colour, linestyle="none", marker="o", markersize=4,
                    label=f"{each.name}: validation")
        tokens, rate = each.points("tok_s")
        rates.plot(tokens, middles(rate), color=colour, linewidth=1.2)
    losses.set_ylabel("loss")
    losses.legend(fontsize=8, frameon=False)
    rates.set_ylabel("tok/s")
    rates.set_ylim(bottom=0)
    rates.set_xlabel("tokens")
    for axis in (losses, rates):
        axis.grid(color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    rates.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(max(0, value))))
    rates.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI)
    write_atomic(path, picture.getvalue())
