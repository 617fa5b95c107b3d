"""Is a job that runs well? From what was observed of it, from outside, to findings: pure. observe.py observes."""

import textwrap
from collections.abc import Iterator
from itertools import pairwise

from probe.health.bottleneck import IDLE_PERCENT, find_bottleneck
from probe.health.observation import IDLE_SHARE, LATE_TIMES, Finding, Level, Observation, Peer, Relation
from probe.health.run_log import RunStatus, is_silent
from spillcliff.units import format_duration
from trainer.run.slowdown import AWAY_S

STILL_BYTES = 4 << 20
"""Memory that moved less has not moved; assumed."""
STILL_TIMES = 5.0
"""So many usual steps without a line, while nothing moves, are no slow step; assumed."""
FEWEST_GAPS = 2
"""Between a foreign program's saves, from which on they have a cadence; assumed."""
STARTED_IT = "started it and waits, as the launcher of a venv does under Windows: harmless"


def diagnose(o: Observation) -> list[Finding]:
    """The findings: one on whether it is alive, the others as far as there is something to go by."""
    alive = _alive(o)
    if o.state == "gone":
        return [alive]
    speed = find_bottleneck(o) if alive.what == "running" and o.samples else []
    return [alive, *speed, *_checkpoints(o), *_doubled(o), *_sources(o)]


def _alive(o: Observation) -> Finding:
    if o.state == "gone":
        return _gone(o, o.page)
    run, used = o.page, f"{o.cpu_s:.1f} s of processor time in {o.seconds:.0f} s"
    if o.state == "stopped":
        return _life("bad", "stopped", f"pid {o.pid} is paused (Ctrl-Z, a debugger, SIGSTOP; {used}): it goes on by `fg` in "
                                       f"its terminal or by SIGCONT, nothing is lost")
    if o.itself and o.itself.is_stub and {p.relation for p in o.peers if not p.is_stub} == {"other"}:
        return _life("ok", "stub", f"{o.itself} is not the worker: see doubled")
    is_still, card = _is_still(o), ", the card idle" if o.kind == "cuda" else ""
    if run is None:
        if is_still:
            return _life("bad", "stuck", f"nothing moves: {used}, no change of memory{card}. It may wait for a disk or a "
                                         f"network: look longer, --seconds {max(60, 4 * o.seconds):.0f}")
        return _life("ok", "running", used)
    has_stopped = is_still and not run.lines and run.silent_s > STILL_TIMES * (run.usual_s or AWAY_S)
    if has_stopped or is_silent(run):
        usual = "" if run.usual_s is None else f", which takes {run.usual_s:.3g} s as a rule"
        moves = f"no change of memory{card}" if is_still else "so it computes, or waits in a loop"
        return _life("bad", "stuck", f"no line in the log for {format_duration(run.silent_s)}, in {_doing(run)}{usual}; "
                                     f"{used}, {moves}. Its newest checkpoint stays whole whatever becomes of it")
    return _life("ok", "running", f"{used}; {run.lines} log lines meanwhile, the last of step {run.step} of {run.steps}, "
                                  f"{format_duration(run.silent_s)} ago")


def _gone(o: Observation, run: RunStatus | None) -> Finding:
    if run and run.finished:
        return _life("ok", "finished", f"all {run.steps} steps are done; its receipt is in {run.run}")
    if run and o.held:
        return _life("ok", "starting", f"a process has {run.run} and has not come to its first step: look again in a while")
    now = f"; pid {o.pid} is another program by now, {o.reused}" if o.reused else ""
    if run is None:
        return _life("bad", "gone", f"pid {o.pid} has ended{now}")
    if o.pid is None:
        return _life("bad", "gone", f"its start failed, or it ended before its first step; {o.resume}")
    at = f"after step {run.step} of {run.steps}" if run.step else "before its first step was done"
    return _life("bad", "gone", f"its process {o.pid} has ended {at}{now}; {o.resume}")


def _life(level: Level, what: str, line: str) -> Finding:
    return Finding("alive", level, what, line)


def _is_still(o: Observation) -> bool:
    """Whether nothing of it moved: no processor time, no memory, no work on the card."""
    memory_bytes = o.readings("memory_bytes")
    return (o.cpu_s < IDLE_SHARE * o.seconds
            and (not memory_bytes or max(memory_bytes) - min(memory_bytes) <= STILL_BYTES)
            and (o.kind == "cpu" or (100 if (busy := o.highest("utilization")) is None else busy) < IDLE_PERCENT))


def _doing(run: RunStatus) -> str:
    return {"step": f"step {run.step + 1}", "start-up": "its start or first evaluation",
            "evaluation": "an evaluation", "checkpoint": "a checkpoint"}[run.phase]


def _checkpoints(o: Observation) -> Iterator[Finding]:
    """Against the log's clock; of another program, against the gaps between its own."""
    if o.page:
        yield _cadence(o.page)
    elif o.saves:
        name, age_s = o.saves[0]
        gaps = [older_s - newer_s for (_, newer_s), (_, older_s) in pairwise(o.saves)]
        newest = f"{name} was written {format_duration(age_s)} ago"
        if len(gaps) >= FEWEST_GAPS and age_s > LATE_TIMES * max(gaps):
            yield _saves("warn", "late", f"{newest}, where {format_duration(max(gaps))} at most lay between those before: "
                                         f"it is stuck, in a long evaluation, or has not beaten its best since")
        else:
            yield _saves("ok", "seen", newest)


def _cadence(run: RunStatus) -> Finding:
    def duration(steps: int) -> str:
        return f"{steps} steps" + (f" ({format_duration(steps * run.mean_s)})" if run.mean_s else "")

    due = run.step // run.save_every * run.save_every
    ahead = min(due + run.save_every, run.steps) - run.step
    cadence = f"every {duration(run.save_every)}" + (f", the next in {duration(ahead)}" if ahead else "")
    is_past = run.step > due > 0  # at the step itself it may be under way
    newest = max(run.kept or 0, run.logged or 0)
    if not newest and is_past:
        return _saves("bad", "missing", f"{cadence}; none so far at step {run.step}")
    if not newest:
        return _saves("ok", "none yet", cadence)
    ago = "" if run.since_save_s is None else f", {format_duration(run.since_save_s)} ago"
    if is_past and newest < due:
        return _saves("bad", "late", f"{cadence}; step {run.step} is done and the newest is of step {newest}{ago}")
    if run.logged and (run.kept or 0) < run.logged and (run.since_save_s or 0) > AWAY_S + LATE_TIMES * (run.save_s or 0):
        return _saves("bad", "not written", f"{cadence}; the newest is of step {newest}{ago} by the log, but its folder "
                      f"holds {f'none after step {run.kept}' if run.kept else 'none'}: is the disk full?")
    return _saves("ok", "on cadence", f"{cadence}; the newest is of step {newest}{ago}")


def _saves(level: Level, what: str, line: str) -> Finding:
    return Finding("checkpoints", level, what, line)


def _doubled(o: Observation) -> Iterator[Finding]:
    """Which process of the same command line is the worker. Never which one to end: what looks idle may have computed for
    days."""
    if o.itself is None:
        return

    def peers(relation: Relation, is_stub: bool) -> list[Peer]:
        return [p for p in o.peers if p.relation == relation and p.is_stub is is_stub]

    itself, children, rivals, dead = o.itself, peers("child", False), peers("other", False), peers("other", True)
    if itself.is_stub and (children or rivals):
        worker = max(children or rivals, key=lambda p: p.cpu_share)
        line = f"the worker is {worker}: leave it alone, look at it with --pid {worker.pid}; {itself} "
        if children:
            yield _double("ok", "launcher", f"{line}{STARTED_IT}")
        else:
            yield _double("warn", "stub", f"{line}is a dead stub of the same command line")
    elif rivals:
        yield _double("bad", "doubled", f"several are at work on the same: {_listed([itself, *rivals])}. They share the "
                      f"card and may overwrite each other's files; all are alive, so see first whose files grow")
    elif dead:
        yield _double("warn", "stubs", f"the worker is {itself}: leave it alone; dead stubs of the same command line, which "
                                       f"cost nothing: {_listed(dead)}")
    elif launchers := peers("parent", True):
        yield _double("ok", "launcher", f"the worker is {itself}; {_listed(launchers)} {STARTED_IT}")
    else:
        own = f" but {len(children)} children of its own" if children else ""
        yield _double("ok", "alone", f"no other process has its command line{own}")


def _listed(peers: list[Peer]) -> str:
    return ", ".join(map(str, peers))


def _double(level: Level, what: str, line: str) -> Finding:
    return Finding("doubled", level, what, line)


def _sources(o: Observation) -> Iterator[Finding]:
    if o.newer:
        named = ", ".join(f"{name} ({format_duration(after_s)} after the start)" for name, after_s in o.newer[:3])
        more = f" and {len(o.newer) - 3} more" if len(o.newer) > 3 else ""
        yield Finding("sources", "warn", "newer", f"changed: {named}{more}; edits do nothing to a running process until the "
                                                  f"next launch")
    elif o.newer is not None:
        yield Finding("sources", "ok", "unchanged", "no source file is newer than the process")


def lines(findings: list[Finding], width: int = 80) -> Iterator[str]:
    """The findings as a table of at most `width` columns."""
    for f in findings:
        level = f.level if f.level == "ok" else f.level.upper()
        yield from textwrap.wrap(f"{level:<4}  {f.check:<11}  {f.what}: {f.line}", width, subsequent_indent=" " * 19)
