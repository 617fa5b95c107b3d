"""Runs the cells of a grid, one process each, and writes each record before the next cell starts."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from probe import records
from probe.cell import Cell, cell_of, planes, shape
from probe.cliff import Cliff
from probe.estimate.peak import CardMemory, estimate
from probe.grid import search
from probe.records import SCHEMA, Record
from probe.soak import LEAST_WINDOWS, Soak, Window
from probe.soak import append as append_soak
from probe.tasks.worker import START_S, Workers
from probe.verdict import FIRST_S, Card, Outcome, judge, slow_step_s, stuck
from spillcliff.errors import NoPlan, UserError
from spillcliff.hardware.device import DeviceFacts, on_battery, team_size
from spillcliff.units import format_duration
from trainer.plan import Plan

LOOK_S = 120
"""A question to the driver that takes longer is taken for a hang."""

UNDECIDED = ("timeout", "crashed", "contended")
"""Verdicts that say nothing lasting of a cell: a grid that is started again measures it again."""


def ask(workers: Workers, function: str, args: tuple, host: bool = False, seconds: float = LOOK_S) -> dict:
    """What `function` measured; UserError with the reason if it did not end well."""
    return _answer(workers.run(function, args, seconds, host))


def _answer(outcome: Outcome) -> dict:
    if outcome.measured is not None:
        return outcome.measured
    if outcome.error and outcome.error[0] == "UserError":
        raise UserError(outcome.error[1])
    last = outcome.tail.strip().splitlines()[-1:]
    why = ": ".join(outcome.error) if outcome.error else last[0] if last else f"code {outcome.exit_code}"
    raise UserError(f"the device could not be asked: {outcome.killed or why}")


def look(workers: Workers, device: str | None, folder: Path) -> tuple[DeviceFacts, dict]:
    """(facts, {disk_write_bytes_s}) of a device; UserError if there is no such device here."""
    values = ask(workers, "probe.tasks.measure_cell:look", (device, str(folder)))
    return DeviceFacts(**{k: v for k, v in values.items() if k != "disk_write_bytes_s"}), {
        "disk_write_bytes_s": values["disk_write_bytes_s"]}


def find_cliff(workers: Workers, device: str, facts: DeviceFacts) -> Cliff:
    """Takes the card's memory block by block until it collapses or fails. UserError where there is no card."""
    if facts.kind != "cuda":
        raise UserError(f"a cliff is measured on a CUDA card, and {facts.name} is none: its limit is its free memory")
    found = ask(workers, "probe.tasks.memory_scan:measure", (device, facts.uuid))
    return Cliff(schema=1, at=_now(), device=facts.fingerprint, software=facts.software, **found)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def takes(workers: Workers, device: str, facts: DeviceFacts) -> dict:
    """What a run takes beside its step, for device.json: `memory`, and seconds and rates of what it does once in a while."""
    if facts.kind == "cpu":
        cell = Cell("1M", 2, 64, vocab=500)
        found = _small(workers, device, facts, cell)
        tensors = estimate(cell, CardMemory("cpu", process_bytes=0)).device_bytes
        return {"memory": {"process_bytes": found["device_peak_bytes"] - tensors}, "start_up_s": found["start_up_s"]}
    found = {}
    # a second process meanwhile: the first one read its libraries from disk, which a run no longer has to
    def start_another() -> None:
        with contextlib.suppress(UserError):  # then the hours leave start-up out, and say so
            found.update(ask(workers, "probe.tasks.measure_cell:started", (), host=True))

    starter = threading.Thread(target=start_another, daemon=True)
    starter.start()
    found["memory"] = _card_memory(workers, device, facts)
    if facts.kind == "cuda":
        found |= ask(workers, "probe.tasks.measure_cell:copy_rate", (device,))
    starter.join()
    return found


def _small(workers: Workers, device: str, facts: DeviceFacts, cell: Cell) -> dict:
    card = Card(facts.total_bytes, facts.kind != "cpu")
    return ask(workers, "probe.tasks.measure_cell:measure", (cell, device, facts.uuid, 0.5, card, None),
               host=not card.is_card)


def _card_memory(workers: Workers, device: str, facts: DeviceFacts) -> dict:
    """By a small cell of each kind: fields of CardMemory, in bytes. Empty where nothing can be read."""
    eager = _small(workers, device, facts, Cell("10M", 2, 128))
    if eager["device_peak_bytes"] is None:
        return {}
    context = eager["device_peak_bytes"] - eager["reserved_peak_bytes"]
    cell = Cell("10M", 2, 128, engine="graph")
    graph = _small(workers, device, facts, cell)
    recorded = CardMemory(context_bytes=context, graph_bytes=0)
    more = graph["device_peak_bytes"] - graph["reserved_peak_bytes"] - recorded.context(cell.step, shape(cell))
    return {"context_bytes": context, "graph_bytes": max(0, more)}


def soaked(workers: Workers, device: str, facts: DeviceFacts, plan: Plan, minutes: float, path: Path, live) -> Soak:
    """Runs a plan's step for `minutes`, or until it has settled, and puts what was seen on disk, also if it is interrupted
    or fails. UserError for another device's plan, NoPlan where it doesn't fit. `live` is a spillcliff.live.Live."""
    if facts.fingerprint != plan.device:
        raise UserError(f"the plan was made on {plan.device}, and this is {facts.fingerprint}; plan for this one")
    step, battery = plan.step, on_battery()
    cell = cell_of(plan.model, step)
    seen = []

    def watch(progress: dict) -> None:
        seen[:] = progress.get("windows", ())
        if seen:
            last = seen[-1]
            live.update(f"{last['at_s']:.0f} of {minutes * 60:.0f} s  {step.tokens / last['step_s']:,.0f} tok/s"
                        + (f"  {last['temperature_c']:.0f} degrees" if last["temperature_c"] is not None else ""))

    def keep(settled: bool) -> Soak:
        windows = tuple(Window(**w) for w in seen)
        soak = Soak(1, _now(), facts.fingerprint, facts.software, cell, minutes, windows[-1].at_s, windows, settled, battery)
        append_soak(path, soak)
        return soak

    def keep_broken_off() -> None:
        if len(seen) >= LEAST_WINDOWS:
            keep(settled=False)
            live.say(f"broken off: {format_duration(seen[-1]['at_s'])} of it kept in {path}, as not settled")
        else:
            live.say("broken off before there was enough to keep")

    try:
        outcome = workers.run("probe.tasks.run_soak:measure", (plan.model, cell, device, facts.uuid, minutes * 60),
                              LOOK_S + FIRST_S[step.engine] + minutes * 120, facts.kind == "cpu", watch)
    except KeyboardInterrupt:
        keep_broken_off()
        raise
    seen[:] = (outcome.measured or outcome.progress).get("windows", ())
    if outcome.measured is None and seen:
        keep_broken_off()
    status, why = judge(outcome, cell, Card(facts.total_bytes, is_card=False), ())
    if status == "oom":
        raise NoPlan(f"the plan's step does not fit on {facts.name} now: {why}; end what else holds memory, or plan with a "
                     f"smaller --limit")
    if not seen and (outcome.measured or outcome.killed == "timeout"):
        raise UserError(f"no step ended within {minutes * 60:.0f} s; give more --minutes")
    return keep(_answer(outcome)["settled"])


class Bench:
    """One device, what is known of it, and the file that what is measured goes to."""

    def __init__(self, workers: Workers, device: str, facts: DeviceFacts, path: Path, cliff: Cliff | None, seconds: float,
                 limit_bytes: int | None, memory: CardMemory, say: Callable[[str], None]) -> None:
        self.workers, self.device, self.facts, self.path, self.seconds = workers, device, facts, path, seconds
        self.limit_bytes, self.memory, self.size = limit_bytes, memory, team_size(facts.fingerprint)
        self._predicted: dict[Cell, int | None] = {}  # the search asks again and again, at 30 ms each
        self.card = Card(facts.total_bytes, facts.kind != "cpu", cliff)
        known = records.load(path, say) if path.exists() else []
        self.newest = {cell: r for (name, cell), r in records.latest(known).items() if name == facts.fingerprint}

    def predict(self, cell: Cell) -> int | None:
        """Bytes of the process's whole claim; None for somebody's own step, and where there is no estimate."""
        if cell not in self._predicted:
            known = not cell.is_foreign and self.facts.kind in ("cuda", "cpu") and self.size == 1
            self._predicted[cell] = estimate(cell, self.memory).device_bytes if known else None
        return self._predicted[cell]

    def measure(self, cell: Cell) -> Record:
        """Runs one cell, judges it and puts it on disk. Its process is ended when it takes half a minute, for the context
        and the first kernels, and twelve times `seconds`, or as soon as it has certainly spilled."""
        begin = time.monotonic()
        others = [r for r in self.newest.values() if r.cell != cell]
        slow_s = slow_step_s(cell, self.card, others)
        if self.size > 1:
            outcome = self.workers.run("probe.tasks.measure_distributed:measure",
                                       (cell, self.device, self.seconds, self.facts.fingerprint),
                                       START_S + 12 * self.seconds, not self.card.is_card)
        else:
            outcome = self.workers.run(
                "probe.tasks.measure_cell:measure", (cell, self.device, self.facts.uuid, self.seconds, self.card, slow_s),
                30 + 12 * self.seconds, not self.card.is_card, lambda progress: stuck(cell, slow_s, progress))
        status, why = judge(outcome, cell, self.card, others)
        fields = {f.name for f in dataclasses.fields(Record)}
        measured = {k: v for k, v in (outcome.measured or outcome.progress).items() if k in fields}
        measured |= {name: tuple(measured.get(name, ())) for name in ("warmup_s", "step_s")}
        record = Record(schema=SCHEMA, at=_now(), cell=cell, model=shape(cell), status=status, why=why,
                        device=self.facts.fingerprint, software=self.facts.software, cell_s=time.monotonic() - begin,
                        predicted_bytes=self.predict(cell), **measured)
        records.append(self.path, record)
        self.newest[cell] = record
        return record

    def run(self, cells: Sequence[Cell], every_cell: bool, again: bool,
            show: Callable[[Cell, Record | None, str], None]) -> list[Record]:
        """Measures what is missing of `cells`, all of it or what the pick needs; `show` is told of each: its record, or None
        and why it was not run. Returns the latest record of every cell that has one."""
        kept = {} if again else {c: r for c, r in self.newest.items() if r.status not in UNDECIDED}
        kept = {c: kept[c] for c in cells if c in kept}
        for cell, record in kept.items():
            show(cell, record, "measured before")
        for plane in planes(cells):
            known = {c: kept[c] for c in plane if c in kept}
            todo = iter([c for c in plane if c not in kept])
            while cell := next(todo, None) if every_cell else search.next_cell(
                    plane, known, self.limit_bytes, self.predict):
                kept[cell] = known[cell] = self.measure(cell)
                show(cell, known[cell], "")
            if not every_cell:
                for cell, why in search.left_out(plane, known, self.limit_bytes, self.predict).items():
                    show(cell, None, why)
        return [kept[cell] for cell in cells if cell in kept]
