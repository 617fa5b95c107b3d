"""A grid from its cells to its pick: asks the device, measures, draws and tells."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from probe.cell import Cell
from probe.cliff import Cliff, default_limit
from probe.estimate.peak import CardMemory
from probe.grid import search
from probe.grid.bench import Bench, ask, find_cliff, look, takes
from probe.records import Record
from probe.show import heatmap
from probe.show.text import cliff_line, draw
from probe.store import Store
from probe.tasks.worker import Workers
from spillcliff.errors import NoPlan, UserError
from spillcliff.hardware.device import DeviceFacts, refuse_engine, team_name
from spillcliff.output import Output
from spillcliff.units import format_bytes


@contextlib.contextmanager
def opened(results: Path, device: str | None, size: int = 1, is_sharded: bool = False):
    """(workers, facts, store, extra) of a device, or of `size` of its kind as one, its folder made."""
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--results {results}: {e.strerror or e}; name a folder that can be written") from None
    with Workers() as workers:
        facts, extra = look(workers, device, results)
        facts = dataclasses.replace(facts, fingerprint=team_name(facts.fingerprint, size, is_sharded))
        yield workers, facts, Store(results, facts, extra), extra


def name_of(device: str | None, facts: DeviceFacts) -> str:
    """What torch calls the device."""
    return device or (facts.kind if facts.kind == "cpu" else f"{facts.kind}:0")


@dataclasses.dataclass(frozen=True)
class Tour:
    """How cells are measured on one device: `seconds` for each, `every_cell` of them or those that the pick needs, `again`
    or only what is missing."""

    workers: Workers
    device: str
    facts: DeviceFacts
    store: Store
    seconds: float
    every_cell: bool
    again: bool
    out: Output

    def run(self, cells: Sequence[Cell], asked: int | None, step: str | None,
            with_twins: bool) -> tuple[list[Record], Record | None, int | None, Cliff | None]:
        """(records, the pick, limit in bytes, cliff): `asked` is the limit that the user gave, `step` their own step's name;
        `with_twins` measures with accumulation too what a plan may pick. UserError for an engine that can't run here."""
        facts, store, out = self.facts, self.store, self.out
        for engine in dict.fromkeys(cell.engine for cell in cells):
            if refusal := refuse_engine(engine, facts.kind, facts.capability):
                raise UserError(refusal)
        if step:
            ask(self.workers, "probe.tasks.custom_step:check", (step,))
        out.say(f"{facts.name}, torch {facts.torch}: {len(cells)} cells, about {self.seconds:.0f} s each at most; "
                f"records in {store.records}")
        known = store.cliff()
        if known is None and asked is None and facts.kind == "cuda":
            known = find_cliff(self.workers, self.device, facts)
            known.save(store.cliff_file)
            out.say(cliff_line(known))
        limit_bytes, source = (asked, "as asked") if asked else default_limit((), known) or (None, "")
        if limit_bytes:
            out.say(f"limit {format_bytes(limit_bytes)}: {source}")
        if not store.device.get("memory") and not step:
            store.keep(takes(self.workers, self.device, facts))
        bench = Bench(self.workers, self.device, facts, store.records, known, self.seconds, limit_bytes,
                      CardMemory.of(store.device), out.say)
        out.say(heatmap.ROW_HEAD)
        with self._progress(len(cells)) as show:
            measured = bench.run(cells, self.every_cell, self.again, show)
            pick = search.best(measured, limit_bytes)
            if with_twins and not step:
                twins = [dataclasses.replace(r.cell, accum=2) for r in search.picks(measured, limit_bytes)]
                measured += bench.run(twins, True, self.again, show)
        return measured, pick, limit_bytes, known

    @contextlib.contextmanager
    def _progress(self, total: int):
        """A function that shows a cell's record, or why there is none, over a bar where there is a terminal."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = self.out.console()
        with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                      console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("cells", total=total)

            def show(cell, record, note) -> None:
                progress.console.print(heatmap.row(cell, record, note), markup=False, highlight=False, soft_wrap=True)
                progress.advance(task)

            yield show


def tell(measured: list[Record], pick: Record | None, limit_bytes: int | None, known: Cliff | None, facts: DeviceFacts,
         store: Store, out: Output) -> None:
    """Draws what was measured and names the pick; NoPlan if nothing fits."""
    pictures = draw(measured, facts.name, limit_bytes, known, store.folder)
    if pick:
        fitting = sum(r.status == "fits" for r in measured)
        out.say(f"pick: B={pick.cell.batch} L={pick.cell.length} with {pick.tok_s:,.0f} tok/s at "
                f"{format_bytes(pick.peak_bytes)}; {fitting} of the {len(measured)} cells measured fit")
        out.say(f"pictures: {', '.join(str(p) for p in pictures)}")
    out.result({"device": facts.fingerprint, "records": str(store.records), "pictures": [str(p) for p in pictures],
                "limit_bytes": limit_bytes, "pick": pick and pick.to_json()["cell"],
                "cells": [r.to_json() | {"tok_s": r.tok_s} for r in measured]})
    if not pick:
        over = f" under {format_bytes(limit_bytes)}" if limit_bytes else ""
        raise NoPlan(f"none of {len(measured)} measured cells fits on {facts.name}{over}; try a smaller --batch, --length "
                     f"or --model, or --recompute block")
