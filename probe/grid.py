"""Runs the cells of a grid, one process each, and writes each record before the next cell starts."""

import dataclasses
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from probe import records
from probe.cell import Cell, shape
from probe.cliff import FALL, smaller_best
from probe.records import SCHEMA, Record
from probe.verdict import hopeless, judge
from probe.worker import Workers
from trainer.device import DeviceFacts
from trainer.errors import UserError

LOOK_S = 120
"""A start of torch and driver that takes longer is taken for a hang."""


def look(workers: Workers, device: str | None, folder: Path) -> tuple[DeviceFacts, dict]:
    """(facts, {disk_write_bytes_s, start_up_s}) of a device; UserError if there is no such device here."""
    begin = time.monotonic()
    outcome = workers.run("look", (device, str(folder)), LOOK_S)
    if outcome.measured is None:
        if outcome.error and outcome.error[0] == "UserError":
            raise UserError(outcome.error[1])
        why = outcome.error or outcome.tail.strip().splitlines()[-1:] or f"code {outcome.exit_code}"
        raise UserError(f"the device could not be asked: {why}")
    values = dict(outcome.measured)
    extra = {"disk_write_bytes_s": values.pop("disk_write_bytes_s"), "start_up_s": time.monotonic() - begin}
    return DeviceFacts(**values), extra


def measure(workers: Workers, cell: Cell, device: str, facts: DeviceFacts, known: list[Record], seconds: float) -> Record:
    """Runs one cell and judges it. Its process is ended when it takes a minute, for the start of torch on a busy machine,
    and twelve times `seconds`."""
    is_card = facts.kind != "cpu"
    best = smaller_best(cell, known) if is_card else None
    slow_step_s = best and cell.step.tokens * FALL / best.tok_s
    outcome = workers.run("measure", (cell, device, facts.uuid, seconds, slow_step_s), 60 + 12 * seconds, not is_card)
    status, why = judge(outcome, cell, facts.total_bytes, is_card, known)
    fields = {f.name for f in dataclasses.fields(Record)}
    measured = {k: v for k, v in (outcome.measured or outcome.progress).items() if k in fields}
    measured |= {name: tuple(measured.get(name, ())) for name in ("warmup_s", "step_s")}
    return Record(schema=SCHEMA, at=datetime.now(timezone.utc).isoformat(timespec="seconds"), cell=cell,
                  model=shape(cell), status=status, why=why, device=facts.fingerprint, software=facts.software, **measured)


def run(workers: Workers, cells: list[Cell], device: str, facts: DeviceFacts, path: Path, seconds: float,
        limit_bytes: int | None, every_cell: bool, again: bool, say: Callable[[str], None],
        show: Callable[[Cell, Record | None, str], None]) -> list[Record]:
    """Measures what is missing of `cells`; `show` is told of each: its record, or None and why it was not run.

    Returns the latest record of every cell of the grid that has one.
    """
    known = records.load(path, say) if path.exists() else []
    newest = {cell: r for (_, cell), r in records.latest(known).items()}
    for cell in cells:
        why = None if every_cell else hopeless(cell, newest.values(), limit_bytes)
        if cell in newest and not again and newest[cell].status not in ("timeout", "crashed"):
            show(cell, newest[cell], "measured before")
        elif why:
            show(cell, None, why)
        else:
            record = measure(workers, cell, device, facts, [r for r in newest.values() if r.cell != cell], seconds)
            records.append(path, record)
            newest[cell] = record
            show(cell, record, "")
    return [newest[cell] for cell in cells if cell in newest]
