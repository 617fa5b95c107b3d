"""A grid from its cells to its pick: measures, draws and tells."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from probe.cell import Cell
from probe.cliff import MARGIN, Cliff, default_limit
from probe.estimate.peak import CardMemory
from probe.grid import search
from probe.grid.bench import Bench, Show
from probe.grid.session import Session, ask, find_cliff, measure_overheads
from probe.records import Record
from probe.show import text
from probe.show.heatmap_png import draw_maps
from probe.tasks.table import CheckCustomStep
from spillcliff.console import Output
from spillcliff.errors import NoPlan, Refused, UserError
from spillcliff.hardware.device import ON_BATTERY, engine_refusal, on_battery
from spillcliff.hardware.host_memory import host_memory
from spillcliff.units import format_bytes


@dataclass(frozen=True)
class GridOptions:
    """How cells are measured: `seconds` for each, `every_cell` of them or those that the pick needs, `again` or only what is
    missing; `limit_bytes` as the user gave it; `with_accumulation` measures what a plan may pick with accumulation too;
    `allow_battery` marks what is measured on battery where it would be refused."""

    seconds: float
    every_cell: bool = False
    again: bool = False
    limit_bytes: int | None = None
    with_accumulation: bool = True
    allow_battery: bool = False


@dataclass(frozen=True)
class GridResult:
    """What a grid told; `limit_bytes` is the one that held."""

    records: list[Record]
    pick: Record | None
    limit_bytes: int | None
    cliff: Cliff | None


def run_grid(session: Session, cells: Sequence[Cell], options: GridOptions, out: Output) -> GridResult:
    """Measures the cells on the session's device. UserError for an engine that can't run here, Refused on battery."""
    facts, store = session.facts, session.store
    if on_battery(facts.uuid):
        if not options.allow_battery:
            raise Refused(f"power: {ON_BATTERY}, or add --allow-battery, which marks the records")
        out.say(f"warning: power: {ON_BATTERY}")
    for engine in dict.fromkeys(cell.step.engine for cell in cells):
        if refusal := engine_refusal(engine, facts.kind, facts.capability):
            raise UserError(refusal)
    is_custom = any(cell.is_custom for cell in cells)
    if is_custom:
        ask(session.workers, CheckCustomStep(cells[0].model))
    out.say(f"{facts.name}, torch {facts.torch}: {len(cells)} cells, about {options.seconds:.0f} s each at most; "
            f"records in {store.folder.records}")
    cliff = _cliff(session, options, out)
    limit = _limit(facts.kind, options, cliff)
    if limit:
        out.say(f"limit {format_bytes(limit[0])}: {limit[1]}")
    if not store.device.get("memory") and not is_custom:
        store.keep(measure_overheads(session.workers, session.device, facts))
    limit_bytes = limit[0] if limit else None
    bench = Bench(session.workers, session.device, facts, store.folder.records, seconds=options.seconds, cliff=cliff,
                  limit_bytes=limit_bytes, memory=CardMemory.of(store.device), say=out.say)
    out.say(text.ROW_HEAD)
    with _progress(len(cells), out) as show:
        measured = bench.run(cells, options.every_cell, options.again, show)
        if left := len(cells) - len(measured):
            out.say(f"{left} of {len(cells)} cells were left out; --every-cell measures them too")
        pick = search.best(measured, limit_bytes)
        if options.with_accumulation and not is_custom:
            accumulated = [r.cell.with_step(accum=2) for r in search.picks(measured, limit_bytes)]
            measured += bench.run(accumulated, True, options.again, show)
    return GridResult(measured, pick, limit_bytes, cliff)


def _limit(kind: str, options: GridOptions, cliff: Cliff | None) -> tuple[int, str] | None:
    """(bytes, where they come from); None for a card of which nothing is known. A processor's memory is the machine's, or
    what its container allows."""
    if options.limit_bytes:
        return options.limit_bytes, "as asked"
    if kind == "cpu":
        memory = host_memory()
        return int(memory.free_bytes * MARGIN), (
            f"{MARGIN:.0%} of the {format_bytes(memory.free_bytes)} that are free of {format_bytes(memory.total_bytes)}")
    return default_limit((), cliff)


def _cliff(session: Session, options: GridOptions, out: Output) -> Cliff | None:
    """The card's, measured if it is needed for the limit and was not before."""
    cliff = session.store.folder.load_cliff()
    if cliff is None and options.limit_bytes is None and session.facts.kind == "cuda":
        cliff = find_cliff(session.workers, session.device, session.facts)
        cliff.save(session.store.folder.cliff)
        out.say(text.cliff_line(cliff))
    return cliff


@contextlib.contextmanager
def _progress(total: int, out: Output) -> Iterator[Show]:
    """A function that shows a cell's record, or why there is none, over a bar where there is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = out.console()
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                  console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("cells", total=total)

        def show(cell: Cell, record: Record | None, note: str) -> None:
            progress.console.print(text.row(cell, record, note), markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)

        yield show


def tell(result: GridResult, session: Session, out: Output) -> None:
    """Draws what was measured and names the pick; NoPlan if nothing fits."""
    measured, pick, facts, folder = result.records, result.pick, session.facts, session.store.folder
    pictures = draw_maps(measured, facts.name, result.limit_bytes, result.cliff, folder)
    if pick:
        fitting = sum(r.fits for r in measured)
        out.say(f"pick: B={pick.cell.batch} L={pick.cell.length} with {pick.tok_s:,.0f} tok/s at "
                f"{format_bytes(pick.peak_bytes)}; {fitting} of the {len(measured)} cells measured fit")
        out.say(f"pictures: {', '.join(str(p) for p in pictures)}")
    out.result({"device": facts.fingerprint, "records": str(folder.records), "pictures": [str(p) for p in pictures],
                "limit_bytes": result.limit_bytes, "pick": pick and pick.cell.to_json(),
                "cells": [r.to_json() | {"tok_s": r.tok_s or None} for r in measured]})
    if not pick:
        under = f" under {format_bytes(result.limit_bytes)}" if result.limit_bytes else ""
        raise NoPlan(f"none of {len(measured)} measured cells fits on {facts.name}{under}; try a smaller --batch, --length "
                     f"or --model, or --recompute block")
