"""Is a job that runs well? From what was observed of it, from outside, to findings: pure. probe/vitals.py observes."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from probe.diary import Page, is_silent
from probe.rhythm import DIPS, STARVED, Rhythm, Sample, rhythm
from trainer.device import THROTTLED
from trainer.units import format_bytes, format_duration
from trainer.watch import AWAY_S, BUSY_PERCENT, DATA_SHARE, FALL, FREE_IT, MOVED_BYTES, Sight, trouble

IDLE = 0.01
"""Share of a core below which a process does nothing: a dead stub used none, a loop that waits polls a little."""
STUB_BYTES = 32 << 20
"""Dead stubs and launchers held some 4 MB, a bare interpreter 10, one that has imported torch hundreds."""
STILL_BYTES = 4 << 20
"""Memory that moved less than this has not moved."""
POWER_CAP = 0x4
"""NVML's bit for the power cap, which a card at full load may show all the time."""
CLOCK_SHARE = 0.8
"""Of the card's highest clock: below it a throttle costs more than the 9 to 14% a laptop loses when warm; assumed."""
FULL_SHARE, POWER_SHARE = 0.97, 0.5
"""Of memory, the part a plan takes of a cliff; of its power, what a busy card that waits for system memory stays below
(its units wait at the bus); the second is assumed."""
HELD_BYTES = 1 << 30
"""In system memory: a healthy process was seen to hold 480 to 940 MB there for its card."""
CROWDED = 90.0
"""Percent of all cores in use from which on a job may lack a core and not data; assumed."""
SOME = 0.05
"""Share of the time that is worth a name where the readings show gaps; assumed."""
LATE = 3.0
"""So many usual times for an evaluation, or gaps between two saves, are late; assumed."""
ADVICE = {
    "data": ("data bubble", "the tokens come too late: is the disk slow or busy, or the processor? Tokenize once and slice"),
    "logging": ("slow log", "its lines take that long to write: put the run's folder on a faster disk"),
    "evaluation": ("evaluation stall", "evaluate less often or less: a longer `eval` cadence in the plan"),
    "checkpoint": ("checkpoint stall", "save less often, or to a faster disk: a longer `checkpoint` cadence in the plan"),
}
CAUSES = {"data": "data bubble", "throttle": "throttling"}
"""watch.Trouble's words to this command's; the others are the same."""


@dataclass(frozen=True)
class Peer:
    """A process of the same command line and folder, or run folder: its share of a core meanwhile, and what it is to the
    job: "parent", "child" or "other"."""

    pid: int
    cpu_share: float
    rss_bytes: int
    relation: str
    started_at: float

    @property
    def is_stub(self) -> bool:
        return self.cpu_share < IDLE and self.rss_bytes < STUB_BYTES

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.cpu_share:.1%} of a core, {format_bytes(self.rss_bytes)})"


@dataclass(frozen=True)
class Observed:
    """All that was seen of a job over `seconds`. `state` is running, stopped or gone; `reused` what has its pid now, if
    another program; `samples` in order of time; `cpu_s` the seconds of processor time its tree used; `itself` and `peers`
    are None where not looked at. `newer` are (source file, seconds that it is younger than the process), own ones first;
    `saves` (name, age in seconds) of its checkpoint-like files, newest first; `page` what our run's folder says; the rest is
    of the card and its other users; None where not told."""

    pid: int | None
    kind: str
    seconds: float
    state: str
    cpu_s: float = 0.0
    samples: tuple[Sample, ...] = ()
    page: Page | None = None
    resume: str = ""
    reused: str | None = None
    itself: Peer | None = None
    peers: tuple[Peer, ...] = ()
    newer: tuple[tuple[str, float], ...] | None = None
    saves: tuple[tuple[str, float], ...] = ()
    on_battery: bool = False
    card_bytes: int | None = None
    fast_bytes: int | None = None
    clock_max_mhz: float | None = None
    power_limit_w: float | None = None
    other_pid: int | None = None
    other_percent: float | None = None


@dataclass(frozen=True)
class Finding:
    """One verdict: `check` is alive, speed, checkpoints, doubled or sources, `level` ok, warn or bad, `what` its name, and
    `line` the evidence and what to do."""

    check: str
    level: str
    what: str
    line: str


def judge(o: Observed) -> list[Finding]:
    """The findings, at least one on whether it is alive; the others as far as something was seen."""
    alive = _alive(o)
    if o.state == "gone":
        return [alive]
    speed = _speed(o) if alive.level == "ok" and o.samples else []
    return [alive, *speed, *_checkpoints(o), *_doubled(o), *_sources(o)]


def _alive(o: Observed) -> Finding:
    page = o.page
    if o.state == "gone":
        if page and page.finished:
            return Finding("alive", "ok", "finished", f"the run is through: {page.steps} steps, its receipt is in {page.run}")
        now = f"; pid {o.pid} is another program by now, {o.reused}" if o.reused else ""
        if page is None:
            return Finding("alive", "bad", "gone", f"pid {o.pid} has ended{now}")
        at = f"after step {page.step} of {page.steps}" if page.step else "before its first step was through"
        return Finding("alive", "bad", "gone", f"its process{f' {o.pid}' if o.pid else ''} has ended {at}{now}; {o.resume}")
    share = o.cpu_s / o.seconds if o.seconds else 0.0
    used = f"{o.cpu_s:.1f} s of processor time in {o.seconds:.0f} s"
    if o.state == "stopped":
        return Finding("alive", "bad", "stopped", f"pid {o.pid} is stopped ({used}): someone paused it (Ctrl-Z, a debugger); it "
                                                  f"goes on by `fg` in its terminal, or a SIGCONT")
    if o.itself and o.itself.is_stub and any(p.relation != "parent" and not p.is_stub for p in o.peers):
        return Finding("alive", "ok", "stub", f"{o.itself} only started or outlived the worker: see `doubled`")
    told = ""
    if page:
        told = f"{page.lines} log lines meanwhile, the last {format_duration(page.silent_s)} ago (step {page.step})"
        usual = "" if page.usual_s is None else f", which takes {page.usual_s:.3g} s as a rule"
        if is_silent(page):
            return Finding("alive", "bad", "stuck", f"no line in the log for {format_duration(page.silent_s)} in {_doing(page)}"
                                                    f"{usual}; {used}")
        if not page.lines and _is_still(o, share) and page.silent_s > 5 * (page.usual_s or AWAY_S):
            return Finding("alive", "bad", "stuck", f"nothing moves: {used}, memory unchanged, {told}, in {_doing(page)}{usual}")
    elif _is_still(o, share):
        return Finding("alive", "bad", "stuck", f"nothing moves: {used}, memory unchanged{_card_idle(o)}; it waits for something; "
                                                f"look longer with --seconds {max(60, 4 * o.seconds):.0f}")
    return Finding("alive", "ok", "running", "; ".join(filter(None, (used, told))))


def _doing(page: Page) -> str:
    return {"step": f"step {page.step + 1}", "start-up": "start-up or the first evaluation"}.get(page.phase, page.phase)


def _is_still(o: Observed, share: float) -> bool:
    memory = [s.memory_bytes for s in o.samples if s.memory_bytes is not None]
    return share < IDLE and (not memory or max(memory) - min(memory) <= STILL_BYTES) and all(
        (s.utilization or 0) < 5 for s in o.samples)


def _card_idle(o: Observed) -> str:
    return ", the card idle" if o.kind == "cuda" else ""


def _speed(o: Observed) -> list[Finding]:
    """What keeps it from its speed, most certain first; else that it is steady. On battery is told beside."""
    seen = rhythm(o.samples)
    found = (_by_log(o, seen) if o.page and o.page.tok_s else None) or _by_readings(o, seen)
    if o.on_battery and found.what != "battery":
        return [found, Finding("speed", "warn", "battery", "the machine is on battery, where a card runs at half its speed; "
                                                          "plug it in")]
    return [found]


def _by_log(o: Observed, seen: Rhythm) -> Finding | None:
    """From what our own run writes down, which is exact; None leaves it to the readings."""
    page, bits = o.page, _throttle(o)
    cause = trouble(Sight(o.kind, page.tok_s, page.planned_tok_s, page.data_s / page.mean_s, _moved(o), bits,
                          _temperature(o), o.on_battery, o.other_pid, o.other_percent, _most(o)), THROTTLED)
    if cause and cause.what != "slow":
        return Finding("speed", "bad", CAUSES.get(cause.what, cause.what), f"{cause.line} ({_readings(o, seen)})")
    shares = page.shares
    waits = sorted((shares[name], name) for name in ADVICE)
    share, worst = waits[-1]
    split = ", ".join(f"{name} {part:.0%}" for part, name in sorted(((p, n) for n, p in shares.items()), reverse=True)
                      if part >= 0.005)
    is_gapped = o.kind == "cuda" and seen.name not in ("steady", "middling") and share >= SOME
    if share >= DATA_SHARE or is_gapped:
        what, advice = ADVICE[worst]
        return Finding("speed", "bad" if share >= DATA_SHARE else "warn", what,
                       f"by its log the time goes to {split}{_aligned(page, seen, worst)}: {advice} ({_readings(o, seen)})")
    if page.phase == "evaluation" and page.usual_s and page.silent_s > max(LATE * page.usual_s, PLATEAUED_S):
        return Finding("speed", "warn", "evaluation stall", f"this evaluation has taken {page.silent_s:.0f} s where "
                                                            f"{page.usual_s:.1f} s are usual ({_readings(o, seen)})")
    if cause:
        return Finding("speed", "bad", cause.what, f"{cause.line} ({_readings(o, seen)})")
    if worse := _memory_or_heat(o, seen):
        return worse
    rate = f"{page.tok_s:,.0f} tok/s where at least {page.planned_tok_s:,.0f} were planned; the time goes to {split}"
    return Finding("speed", "ok", "steady", f"{rate} ({_readings(o, seen)})")


PLATEAUED_S = 10.0
"""An evaluation that has taken less is not called late yet; assumed."""


def _aligned(page: Page, seen: Rhythm, name: str) -> str:
    """How much of the low readings falls into evaluations and checkpoints, where that is the cause."""
    low = sum(end - begin for begin, end in seen.stretches)
    if name not in ("evaluation", "checkpoint") or not low:
        return ""
    inside = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in seen.stretches for since, until in page.pauses)
    return f" ({inside:.1f} of {low:.1f} s of low readings lie in them)" if inside else ""


def _by_readings(o: Observed, seen: Rhythm) -> Finding:
    """From the series alone: of another program, or where the log says nothing yet."""
    if worse := _memory_or_heat(o, seen):
        return worse
    if o.other_percent is not None and o.other_percent >= BUSY_PERCENT:
        return Finding("speed", "warn", "contended", f"another process (pid {o.other_pid}) keeps the card {o.other_percent:.0f}% "
                                                     f"busy: close it ({_readings(o, seen)})")
    if o.kind == "cuda" and max(s.utilization or 0 for s in o.samples) < 5:
        return Finding("speed", "bad", "idle card", f"the card did nothing ({_readings(o, seen)}): a long preparation or "
                                                    f"evaluation on the processor, or it waits for ever")
    if seen.name == "plateaus":
        return Finding("speed", "bad" if seen.low_share >= DATA_SHARE else "warn", "evaluation stall",
                       f"{_shape(o, seen)}: long low stretches, up to {seen.worst_s:.1f} s, as of an evaluation, sampled text or "
                       f"a checkpoint; batch it, do it less often")
    if seen.name in ("dips", "starved"):
        if o.kind != "cuda" and _lacks_cores(o):
            return Finding("speed", "warn", "contended", f"{_shape(o, seen)}, while everything together keeps "
                           f"{median(s.machine_percent for s in o.samples):.0f}% of the cores busy: close what else computes")
        how = "between steps" if seen.name == "dips" else "throughout"
        beside = "" if o.kind == "cuda" else "; if it computes on a card that can't be read from here, this says nothing"
        return Finding("speed", "bad" if seen.low_share >= DATA_SHARE else "warn", "data bubble",
                       f"{_shape(o, seen)}: it is starved {how}, most likely of data; tokenize once into one array, slice "
                       f"batches from it, no loops over rows, no loader workers under Windows{beside}")
    if seen.name == "middling":
        return Finding("speed", "warn", "unsaturated", f"{_shape(o, seen)}, at one level: a little of every step is a wait, for "
                                                       f"data or for launches of kernels that are too small")
    return Finding("speed", "ok", "steady", _readings(o, seen))


def _memory_or_heat(o: Observed, seen: Rhythm) -> Finding | None:
    """Spill and throttling, by what the card and the system count."""
    moved, held = _moved(o), _last(o, "non_local_bytes")
    if moved is not None and moved > MOVED_BYTES:
        return Finding("speed", "bad", "spill", f"{format_bytes(moved)} more of it lie in system memory than when the look began "
                                                f"({format_bytes(held)} in all): {FREE_IT}")
    edge, used = o.fast_bytes or o.card_bytes, _most(o)
    is_full = edge is not None and used is not None and used >= FULL_SHARE * edge
    if is_full and held is not None and held > HELD_BYTES:
        return Finding("speed", "bad", "spill", f"{format_bytes(used)} of {format_bytes(edge)} that are fast are taken and "
                                                f"{format_bytes(held)} lie in system memory: {FREE_IT}")
    bits, clock, power = _throttle(o), _typical(o, "clock_mhz"), _typical(o, "power_w")
    if bits:
        top = o.clock_max_mhz or max((s.clock_mhz for s in o.samples if s.clock_mhz), default=None)
        is_slow = clock is not None and top is not None and clock < CLOCK_SHARE * top
        if is_slow or bits & ~POWER_CAP:
            hot = "" if _temperature(o) is None else f" at {_temperature(o):.0f} degrees"
            at = "" if None in (clock, top) else f", {clock:,.0f} of {top:,.0f} MHz"
            return Finding("speed", "bad" if is_slow else "warn", "throttling",
                           f"the card throttles{hot} (bits {bits:#x} in most readings){at}: clear its vents, see to its supply")
    if is_full and not bits and power is not None and o.power_limit_w and seen.mean >= 80 \
            and power < POWER_SHARE * o.power_limit_w:
        return Finding("speed", "warn", "spill", f"the card reads {seen.mean:.0f}% busy at {power:.0f} of {o.power_limit_w:.0f} W "
                                                 f"with {format_bytes(used)} of {format_bytes(edge)} taken and no throttle: some "
                                                 f"has likely moved to system memory; {FREE_IT}")
    return None


def _lacks_cores(o: Observed) -> bool:
    """Whether the low readings of a processor's job are for want of cores: it would run, where a starved one sleeps."""
    return median(s.machine_percent for s in o.samples) >= CROWDED and sum(s.is_waiting for s in o.samples) < len(o.samples) / 4


def _moved(o: Observed) -> int | None:
    held = [s.non_local_bytes for s in o.samples if s.non_local_bytes is not None]
    return held[-1] - held[0] if held else None


def _most(o: Observed) -> int | None:
    return max((s.memory_bytes for s in o.samples if s.memory_bytes is not None), default=None) if o.kind == "cuda" else None


def _last(o: Observed, name: str):
    return next((v for s in reversed(o.samples) if (v := getattr(s, name)) is not None), None)


def _typical(o: Observed, name: str) -> float | None:
    values = [v for s in o.samples if (v := getattr(s, name)) is not None]
    return median(values) if values else None


def _temperature(o: Observed) -> float | None:
    return max((s.temperature_c for s in o.samples if s.temperature_c is not None), default=None)


def _throttle(o: Observed) -> int:
    """The throttle bits that are set in at least half of the readings."""
    read = [s.throttle for s in o.samples if s.throttle is not None]
    return sum(bit for bit in (1 << i for i in range(9)) if bit & THROTTLED and 2 * sum(bool(r & bit) for r in read) >= len(read) > 0)


def _shape(o: Observed, seen: Rhythm) -> str:
    """The series in words: levels, memory beside them, and how much of the time is low."""
    what = "card" if o.kind == "cuda" else "processor"
    if seen.high is None or seen.low is None or seen.name not in ("dips", "plateaus"):
        return f"the {what} is {seen.mean:.0f}% busy on average over {o.seconds:.0f} s"

    def level(busy, held) -> str:
        return f"{busy:.0f}%{'' if held is None else f' at {format_bytes(held)}'}"

    return (f"the {what} is {level(seen.high, seen.high_bytes)} busy, then {level(seen.low, seen.low_bytes)}: low for "
            f"{seen.low_share:.0%} of {o.seconds:.0f} s, {len(seen.stretches)} times, {seen.mean:.0f}% on average")


def _readings(o: Observed, seen: Rhythm) -> str:
    """The readings in short, as evidence beside a verdict that stands on something else."""
    what = "card" if o.kind == "cuda" else "processor"
    parts = [f"{what} {seen.mean:.0f}% busy in {len(o.samples)} readings"]
    parts += [f"{v:,.0f} {unit}" for name, unit in (("power_w", "W"), ("clock_mhz", "MHz")) if (v := _typical(o, name))]
    parts += [f"{t:.0f} degrees"] if (t := _temperature(o)) is not None else []
    held = _last(o, "memory_bytes")
    return ", ".join(parts + ([format_bytes(held)] if held is not None else []))


def _checkpoints(o: Observed) -> Iterator[Finding]:
    page = o.page
    if page is None:
        if o.saves:
            yield _foreign_saves(o.saves)
        return
    step_s = page.mean_s or page.step_s
    due = page.step // page.save_every * page.save_every
    span = "" if step_s is None else f" ({format_duration(page.save_every * step_s)})"
    every = f"every {page.save_every} steps{span}"
    ahead = min(due + page.save_every, page.steps) - page.step
    then = "" if step_s is None or ahead <= 0 else f"; the next in {ahead} steps, {format_duration(ahead * step_s)}"
    if page.kept is None and page.logged is None:
        behind = page.step > due >= page.save_every
        yield Finding("checkpoints", "bad" if behind else "ok", "missing" if behind else "none yet",
                      f"{every}, none so far at step {page.step}{then}")
        return
    newest = max(page.kept or 0, page.logged or 0)
    ago = "" if page.since_save_s is None else f", {format_duration(page.since_save_s)} ago"
    if page.step > due > newest:
        yield Finding("checkpoints", "bad", "late", f"{every}, but step {page.step} is done and the newest is of step {newest}{ago}")
    elif page.logged and (page.kept or 0) < page.logged and (page.since_save_s or 0) > AWAY_S + LATE * (page.save_s or 0):
        yield Finding("checkpoints", "bad", "not written", f"the log has one of step {page.logged}{ago}, the newest in its folder is "
                      f"of step {page.kept or 'none'}: its write failed or hangs; is the disk full? Its terminal says more")
    else:
        yield Finding("checkpoints", "ok", "on cadence", f"{every}; the newest is of step {newest}{ago}{then}")


def _foreign_saves(saves: tuple[tuple[str, float], ...]) -> Finding:
    name, age = saves[0]
    gaps = [b[1] - a[1] for a, b in zip(saves, saves[1:], strict=False)]
    newest = f"{name} was written {format_duration(age)} ago"
    if len(gaps) >= DIPS - 1 and age > LATE * max(gaps):
        return Finding("checkpoints", "warn", "late", f"{newest}, those before {format_duration(min(gaps))} to "
                       f"{format_duration(max(gaps))} apart: stuck in an evaluation, or it has not beaten its best since")
    return Finding("checkpoints", "ok", "seen", newest)


def _doubled(o: Observed) -> Iterator[Finding]:
    """Which of the processes of one command line works. Never which to end: what looks idle may hold the work of days."""
    if o.itself is None:
        return
    me, live = o.itself, [p for p in o.peers if not p.is_stub]
    workers = [p for p in live if p.relation == "child"]
    launchers = [p for p in o.peers if p.is_stub and p.relation == "parent"]
    dead = [p for p in o.peers if p.is_stub and p.relation == "other"]
    rivals = [p for p in live if p.relation == "other"]
    if me.is_stub and (workers or rivals):
        worker = max(workers or rivals, key=lambda p: p.cpu_share)
        what, why = ("launcher", "which started it and waits: as Windows' venv does, harmless") if workers else \
            ("stub", "a dead stub; leave the worker alone")
        yield Finding("doubled", "ok" if workers else "warn", what, f"the worker is {worker}, look at it with --pid {worker.pid}; "
                                                                    f"this one is {me}, {why}")
    elif rivals:
        yield Finding("doubled", "bad", "doubled", f"at work on the same: {me} and {', '.join(map(str, rivals))}; they share the card "
                      "and may overwrite each other's files. End neither from here: see which one is yours, and stop the other "
                      "in its own terminal with Ctrl-C")
    elif dead:
        yield Finding("doubled", "warn", "stubs", f"the worker is {me}, leave it alone; {', '.join(map(str, dead))} "
                      f"{'is a dead stub' if len(dead) == 1 else 'are dead stubs'} of the same command line and cost nothing")
    elif launchers:
        yield Finding("doubled", "ok", "launcher", f"the worker is {me}; {', '.join(map(str, launchers))} started it and waits, as "
                                                   "Windows' venv does: harmless")
    else:
        own = f"; {len(workers)} of the same command line are its own children" if workers else ""
        yield Finding("doubled", "ok", "alone", f"no other process does the same{own}")


def _sources(o: Observed) -> Iterator[Finding]:
    if o.newer is None:
        return
    if not o.newer:
        yield Finding("sources", "ok", "unchanged", "no source file is newer than the process")
        return
    named = ", ".join(f"{name} ({format_duration(after)} after the start)" for name, after in o.newer[:3])
    more = f" and {len(o.newer) - 3} more" if len(o.newer) > 3 else ""
    yield Finding("sources", "warn", "newer", f"{named}{more} changed: a running process does not see it until the next launch")


def lines(findings: list[Finding], width: int = 80) -> Iterator[str]:
    """The findings as a table of at most `width` columns."""
    for f in findings:
        level = f.level if f.level == "ok" else f.level.upper()
        yield from textwrap.wrap(f"{level:<4}  {f.check:<11}  {f.what}: {f.line}", width, subsequent_indent=" " * 19)


def is_low(seen: Rhythm) -> bool:
    return seen.mean < STARVED
