"""A device at hand: asked what it is and what it takes for itself, with the processes that measure on it."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from probe.cell import Cell
from probe.cliff import Cliff
from probe.estimate.peak import CardMemory, estimate
from probe.outcome import Outcome
from probe.records import Measurement
from probe.store import Store
from probe.tasks.table import DescribeDevice, MeasureCell, ScanMemory, Task, TimeCopies, TimeStartUp
from probe.tasks.worker import Workers
from probe.verdict import Card
from spillcliff.errors import UserError
from spillcliff.hardware.device import DeviceFacts
from spillcliff.hardware.fingerprints import multi_device_name

A = TypeVar("A")

QUESTION_S = 120
"""A question to the driver that takes longer is taken for a hang."""


@dataclass(frozen=True)
class Session:
    """One device, or several as one, its folder made. `device` is what torch calls it, `disk_write_bytes_s` what its disk
    takes of a checkpoint."""

    workers: Workers
    device: str
    facts: DeviceFacts
    store: Store
    disk_write_bytes_s: float | None


@contextlib.contextmanager
def open_session(results: Path, device: str | None, count: int = 1, is_sharded: bool = False) -> Iterator[Session]:
    """Of the device called `device`, or of `count` of its kind as one. UserError if it isn't there, or `results` can't be
    written to."""
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--results {results}: {e.strerror or e}; name a folder that can be written") from None
    with Workers() as workers:
        facts, disk_write_bytes_s = ask(workers, DescribeDevice(device, results))
        facts = dataclasses.replace(facts, fingerprint=multi_device_name(facts.fingerprint, count, is_sharded))
        store = Store(results, facts, {"disk_write_bytes_s": disk_write_bytes_s})
        name = device or (facts.kind if facts.kind == "cpu" else f"{facts.kind}:0")
        yield Session(workers, name, facts, store, disk_write_bytes_s)


def ask(workers: Workers, task: Task[A, Any], on_host: bool = False, seconds: float = QUESTION_S) -> A:
    """The task's answer; UserError with the reason if it did not end well."""
    return answer_of(workers.run(task, seconds, on_host))


def answer_of(outcome: Outcome[A, Any]) -> A:
    """UserError with the reason if it did not end well."""
    if outcome.answer is not None:
        return outcome.answer
    if outcome.error and outcome.error[0] == "UserError":
        raise UserError(outcome.error[1])
    last = outcome.printed.strip().splitlines()[-1:]
    why = ": ".join(outcome.error) if outcome.error else last[0] if last else f"code {outcome.exit_code}"
    raise UserError(f"the device could not be asked: {outcome.killed or why}")


def now() -> str:
    """ISO time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def find_cliff(workers: Workers, device: str, facts: DeviceFacts) -> Cliff:
    """Takes the card's memory block by block until it collapses or fails. UserError where there is no card."""
    if facts.kind != "cuda":
        raise UserError(f"a cliff is measured on a CUDA card, and {facts.name} is none: its limit is its free memory")
    scan = ask(workers, ScanMemory(device, facts.uuid))
    return Cliff(schema=1, at=now(), device=facts.fingerprint, software=facts.software, **scan._asdict())


def measure_overheads(workers: Workers, device: str, facts: DeviceFacts) -> dict[str, Any]:
    """What a run takes beside its step, for device.json: `memory`, and seconds and rates of what it does once in a while."""
    if facts.kind == "cpu":
        cell = Cell.of("1M", 2, 64, vocab=500)
        measured = _measure_small(workers, device, facts, cell)
        tensors = estimate(cell, CardMemory("cpu", process_bytes=0)).device_bytes
        return {"memory": {"process_bytes": (measured.device_peak_bytes or 0) - tensors}, "start_up_s": measured.start_up_s}
    overheads: dict[str, Any] = {}

    # a second process meanwhile: the first one read its libraries from disk, which a run no longer has to
    def start_another() -> None:
        with contextlib.suppress(UserError):  # then the hours leave start-up out, and say so
            overheads["start_up_s"] = ask(workers, TimeStartUp(), on_host=True)

    starter = threading.Thread(target=start_another, daemon=True)
    starter.start()
    overheads["memory"] = _context_memory(workers, device, facts)
    if facts.kind == "cuda":
        overheads |= ask(workers, TimeCopies(device))._asdict()
    starter.join()
    return overheads


def _measure_small(workers: Workers, device: str, facts: DeviceFacts, cell: Cell) -> Measurement:
    card = Card(facts.total_bytes, facts.kind != "cpu")
    return ask(workers, MeasureCell(cell, device, facts.uuid, 0.5, card), on_host=not card.is_card)


def _context_memory(workers: Workers, device: str, facts: DeviceFacts) -> dict[str, int]:
    """By a small cell of each kind: fields of CardMemory, in bytes. Empty where nothing can be read."""
    eager_context = _context_bytes(_measure_small(workers, device, facts, Cell.of("10M", 2, 128)))
    if eager_context is None:
        return {}
    cell = Cell.of("10M", 2, 128, engine="graph")
    graph_context = _context_bytes(_measure_small(workers, device, facts, cell))
    recorded = CardMemory(context_bytes=eager_context, graph_bytes=0).context(cell)
    return {"context_bytes": eager_context, "graph_bytes": max(0, (graph_context or 0) - recorded)}


def _context_bytes(measured: Measurement) -> int | None:
    """What a process claims beside its allocator; None where it can't be read."""
    device, reserved = measured.device_peak_bytes, measured.reserved_peak_bytes
    return None if device is None or reserved is None else device - reserved
