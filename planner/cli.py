"""The command `plan`."""

import dataclasses
import glob
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from spillcliff.cli import HELP, PATH, column_option, dtype_option, json_option, results_option, run_command
from spillcliff.console import Output, parse_option
from spillcliff.errors import NoPlan, UserError
from spillcliff.files import Say
from trainer.plan import PairCounts

if TYPE_CHECKING:
    from planner.decide.build import Forecast, PlanRequest
    from planner.decide.inputs import PlanInputs
    from probe.records import Record

records_option = click.option("--records", "files", multiple=True, type=PATH, metavar="FILE",
                              help="Plan from these records; may be repeated.")


@click.group(invoke_without_command=True, context_settings=HELP, no_args_is_help=True)
@click.option("--corpus", metavar="100M|FILE", help="Tokens to train on, or a token file, folder or pattern to count.")
@dtype_option
@column_option
@click.option("--hours", metavar="H", help="Instead of --corpus: as many tokens as so many hours take (12, 90m).")
@click.option("--epochs", default=1.0, show_default=True, type=click.FloatRange(0, 1e5, min_open=True),
              help="Times that the corpus is seen.")
@click.option("--model", metavar="M[,M]", help="Size to plan for, or a measured model's config.json; several are shown side "
                                               "by side, and the first is planned.  [default: the one that was measured]")
@click.option("--vocab", metavar="N", help="Its vocabulary.  [default: the one that was measured]")
@click.option("--length", metavar="L", help="Tokens in a sequence.  [default: the longest within 5% of the fastest]")
@click.option("--tokens-per-step", metavar="N", help="Tokens in an optimizer step.  [default: by the corpus]")
@click.option("--limit", metavar="5GB", help="Memory that may be used.  [default: 97% of the cliff]")
@click.option("--device", metavar="NAME", help="Device to plan for: a folder under results/.  [default: this machine's]")
@click.option("--gpus", type=click.IntRange(1, 1024), metavar="N", help="Cards that share each step (train: torchrun).")
@click.option("--sharded", is_flag=True, help="With --gpus: each keeps a part of the weights and moments only.")
@records_option
@results_option
@click.option("--out", "out_path", default="results/plan.json", show_default=True, type=PATH,
              metavar="FILE", help="The plan to write.")
@json_option
@click.pass_context
def cli(ctx: click.Context, corpus: str | None, dtype: str | None, column: str | None, hours: str | None, epochs: float,
        model: str | None, vocab: str | None, length: str | None, tokens_per_step: str | None, limit: str | None,
        device: str | None, gpus: int | None, sharded: bool, files: tuple[Path, ...], results: Path, out_path: Path,
        as_json: bool) -> None:
    """Choose the sweet spot among measured cells, and forecast the hours of a corpus."""
    if ctx.invoked_subcommand:
        typed = [p.opts[0] for p in ctx.command.params
                 if p.name and ctx.get_parameter_source(p.name) == ParameterSource.COMMANDLINE]
        if typed:
            raise click.UsageError(f"{typed[0]} does not go with `plan {ctx.invoked_subcommand}`; put its own options after "
                                   f"it")
        return
    from planner.decide.inputs import read_inputs

    _check_options(corpus, hours, epochs, gpus, sharded)
    out = Output(as_json)
    request, entries = _request(corpus, dtype, column, hours, epochs, vocab, length, tokens_per_step, limit, out)
    records, inputs = read_inputs(results, files, device, out.say, gpus, sharded)
    forecast, forecasts = _forecast(records, model, entries, request, inputs, out)
    forecast.plan.save(out_path)
    _tell(forecast, inputs, out)
    out.say(f"written to {out_path}")
    out.result(forecast.plan.to_json() | {
        "out": str(out_path), "energy_kwh": forecast.energy_kwh,
        "hours": {str(size): dataclasses.asdict(span) for size, span in forecast.table().items()},
        "models": {name: f if isinstance(f, str) else f.plan.to_json() for name, f in forecasts.items()}})


def _check_options(corpus: str | None, hours: str | None, epochs: float, gpus: int | None, sharded: bool) -> None:
    if (corpus is None) == (hours is None):
        raise click.UsageError("a plan needs either --corpus (tokens, such as 100M, or a token file) or --hours")
    if sharded and (gpus or 1) == 1:
        raise click.UsageError("--sharded needs --gpus N, the cards to share the weights out to")
    if not math.isfinite(epochs):
        raise click.UsageError(f"--epochs {epochs} must be a number above 0")


def _request(corpus: str | None, dtype: str | None, column: str | None, hours: str | None, epochs: float, vocab: str | None,
             length: str | None, tokens_per_step: str | None, limit: str | None,
             out: Output) -> "tuple[PlanRequest, int | None]":
    """(what is asked of the plan, the vocabulary that is asked for)."""
    from planner.decide.build import PlanRequest
    from spillcliff.units import parse_bytes, parse_count, parse_hours

    entries = parse_option(vocab, parse_count, "--vocab")
    corpus_tokens, pairs = parse_option(corpus, _corpus, entries, dtype, column, out.say) or (None, None)
    sequence = parse_option(length, parse_count, "--length")
    if pairs and sequence not in (None, pairs.length):
        raise UserError(f"--length {sequence} is not that of the rows in {corpus}, {pairs.length}: leave it out, or "
                        f"tokenize again with --length {sequence}")
    return PlanRequest(
        corpus_tokens=corpus_tokens, hours=parse_option(hours, parse_hours, "--hours"), epochs=epochs,
        length=pairs.length if pairs else sequence, pairs=pairs,
        tokens_per_step=parse_option(tokens_per_step, parse_count, "--tokens-per-step"),
        limit_bytes=parse_option(limit, parse_bytes, "--limit")), entries


def _forecast(records: "list[Record]", model: str | None, vocab: int | None, request: "PlanRequest", inputs: "PlanInputs",
              out: Output) -> "tuple[Forecast, dict[str, Forecast | str]]":
    """(the forecast that is planned, those of every model where several are asked for)."""
    from planner.decide.build import build, side_by_side
    from planner.decide.inputs import of_model
    from planner.report import terminal

    models = [name.strip() for name in model.split(",")] if model else [None]
    if len(models) == 1:
        return build(of_model(records, models[0], vocab), request, inputs), {}
    records_of = {name: of_model(records, name, vocab) for name in dict.fromkeys(models) if name}
    forecasts = side_by_side(records_of, request, inputs)
    out.table(terminal.SIZE_HEAD, terminal.size_rows(forecasts))
    missing = {name: why for name, why in forecasts.items() if isinstance(why, str)}
    planned = next((name for name in forecasts if name not in missing), None)
    forecast = forecasts[planned] if planned else ""
    if isinstance(forecast, str):
        raise NoPlan("; ".join(f"{name}: {why}" for name, why in missing.items()))
    for name, why in missing.items():
        out.say(f"no plan for {name}: {why}" + f"; {planned} is planned" * (name == next(iter(forecasts))))
    return forecast, forecasts


def _tell(forecast: "Forecast", inputs: "PlanInputs", out: Output) -> None:
    from planner.report import terminal
    from spillcliff.hardware.software import installed_software

    plan = forecast.plan
    for line in terminal.lines(forecast):
        out.say(line)
    if changed := plan.other_software(installed_software(plan.device)):
        out.say(f"note: measured with {', '.join(changed)}; measure again with probe grid --again")
    if plan.runners_up:
        out.table(terminal.RUNNER_HEAD, terminal.runner_rows(forecast))
    if past := terminal.past_rows(forecast, inputs.past):
        out.table(terminal.PAST_HEAD, past)
    out.table(terminal.CORPUS_HEAD, terminal.hour_rows(forecast))


def _corpus(text: str, vocab: int | None, dtype: str | None, column: str | None, say: Say) -> tuple[int, PairCounts | None]:
    """Tokens of a count ("100M") or of token files; of a file of pairs all that an epoch steps over, and its counts."""
    from spillcliff.units import parse_count

    if text and (Path(text).exists() or glob.glob(text, recursive=True)):
        from trainer.data.formats import open_tokens
        from trainer.data.pairs import counts_of

        if pairs := counts_of(text):
            return pairs.rows * pairs.length, pairs
        count = len(open_tokens([text], vocab, dtype, column, say).ids)
        if not count:
            raise UserError(f"token file {text} is empty")
        return count, None
    try:
        return parse_count(text, "--corpus"), None
    except UserError:
        raise UserError(f"--corpus {text!r} is neither a number of tokens, such as 100M, nor a file that is there") from None


@cli.command("report", context_settings=HELP)
@click.option("--plan", "plan_path", type=PATH, metavar="FILE",
              help="The plan to show.  [default: results/plan.json; without one, what was measured]")
@click.option("--device", metavar="NAME", help="Without a plan, whose records to show.  [default: this machine's]")
@records_option
@results_option
@click.option("--out", "out_path", type=PATH, metavar="FILE",
              help="The page to write; pictures go beside it.  [default: report.html beside the plan]")
@json_option
def report_command(plan_path: Path | None, device: str | None, files: tuple[Path, ...], results: Path,
                   out_path: Path | None, as_json: bool) -> None:
    """Write a plan as one page that opens without a network, with its pictures as PNG beside it."""
    from planner.decide.inputs import read_inputs
    from planner.report.page import html_page
    from planner.report.page_data import page_data
    from planner.report.png import draw
    from spillcliff.files import write_atomic
    from spillcliff.hardware.software import installed_software
    from trainer.plan import Plan

    out = Output(as_json)
    wanted = plan_path or Path("results/plan.json")
    plan = Plan.load(wanted) if plan_path or (wanted.exists() and device is None) else None
    records, inputs = read_inputs(results, files, plan.device if plan else device, out.say)
    notes = []
    if plan and (changed := plan.other_software(installed_software(plan.device))):
        notes.append(f"measured with {', '.join(changed)}: the forecast is not for what runs here")
    data = page_data(plan, records, inputs, notes)
    out_path = out_path or wanted.with_name("report.html")
    write_atomic(out_path, html_page(data).encode())
    pictures = draw(data, out_path.parent)
    out.say(f"written to {out_path}; open it in a browser")
    for picture in pictures:
        out.say(f"picture {picture}")
    out.result({"out": str(out_path), "pictures": [str(p) for p in pictures]})


def main() -> None:
    run_command(cli, "plan")


if __name__ == "__main__":
    main()
