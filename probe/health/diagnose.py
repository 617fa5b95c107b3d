"""Is a job that runs well? From what was observed of it, from outside, to findings: pure. observe.py observes."""

import textwrap
from collections.abc import Iterator

from probe.health.bottleneck import IDLE_PERCENT, speed
from probe.health.observation import IDLE, LATE, Finding, Observed, Peer
from probe.health.run_log import Page, is_silent
from probe.health.utilization import DIPS
from spillcliff.units import format_duration
from trainer.run.slowdown import AWAY_S

STILL_BYTES = 4 << 20
"""Memory that moved less has not moved; assumed."""
STILL_TIMES = 5.0
"""So many usual steps without a line, while nothing moves, are no slow step; assumed."""
STARTED_IT = "started it and waits, as the launcher of a venv does under Windows: harmless"


def judge(o: Observed) -> list[Finding]:
    """The findings: one on whether it is alive, the others as far as they were looked at."""
    alive = _alive(o)
    if o.state == "gone":
        return [alive]
    pace = speed(o) if alive.what == "running" and o.samples else []
    return [alive, *pace, *_checkpoints(o), *_doubled(o), *_sources(o)]


def _alive(o: Observed) -> Finding:
    if o.state == "gone":
        return _gone(o, o.page)
    page, used = o.page, f"{o.cpu_s:.1f} s of processor time in {o.seconds:.0f} s"
    if o.state == "stopped":
        return _is("bad", "stopped", f"pid {o.pid} is paused (Ctrl-Z, a debugger, SIGSTOP; {used}): it goes on by `fg` in "
                                     f"its terminal or by SIGCONT, nothing is lost")
    if o.itself and o.itself.is_stub and {p.relation for p in o.peers if not p.is_stub} == {"other"}:
        return _is("ok", "stub", f"{o.itself} is not the worker: see doubled")
    still = _is_still(o)
    if page is None:
        if still:
            return _is("bad", "stuck", f"nothing moves: {used}, no change of memory{_idle(o)}. It may wait for a disk or a "
                                       f"network: look longer, --seconds {max(60, 4 * o.seconds):.0f}")
        return _is("ok", "running", used)
    usual = "" if page.usual_s is None else f", which takes {page.usual_s:.3g} s as a rule"
    if is_silent(page) or (still and not page.lines and page.silent_s > STILL_TIMES * (page.usual_s or AWAY_S)):
        moves = f"no change of memory{_idle(o)}" if still else "so it computes, or waits in a loop"
        return _is("bad", "stuck", f"no line in the log for {format_duration(page.silent_s)}, in {_doing(page)}{usual}; "
                                   f"{used}, {moves}. Its newest checkpoint is whole whatever becomes of it")
    return _is("ok", "running", f"{used}; {page.lines} log lines meanwhile, the last of step {page.step} of {page.steps}, "
                                f"{format_duration(page.silent_s)} ago")


def _gone(o: Observed, page: Page | None) -> Finding:
    if page and page.finished:
        return _is("ok", "finished", f"the run is through, all {page.steps} steps; its receipt is in {page.run}")
    if page and o.held:
        return _is("ok", "starting", f"a process has {page.run} and has not come to its first step: look again in a while")
    now = f"; pid {o.pid} is another program by now, {o.reused}" if o.reused else ""
    if page is None:
        return _is("bad", "gone", f"pid {o.pid} has ended{now}")
    if o.pid is None:
        return _is("bad", "gone", f"its start failed, or it ended before its first step; {o.resume}")
    at = f"after step {page.step} of {page.steps}" if page.step else "before its first step was through"
    return _is("bad", "gone", f"its process {o.pid} has ended {at}{now}; {o.resume}")


def _is(level: str, what: str, line: str) -> Finding:
    return Finding("alive", level, what, line)


def _is_still(o: Observed) -> bool:
    """Whether nothing of it moved: no processor time, no memory, no work on the card."""
    memory = o.told("memory_bytes")
    return (o.cpu_s < IDLE * o.seconds and (not memory or max(memory) - min(memory) <= STILL_BYTES)
            and (o.highest("utilization") or 0) < IDLE_PERCENT)


def _idle(o: Observed) -> str:
    return ", the card idle" if o.kind == "cuda" else ""


def _doing(page: Page) -> str:
    return {"step": f"step {page.step + 1}", "start-up": "its start or first evaluation",
            "evaluation": "an evaluation", "checkpoint": "a checkpoint"}[page.phase]


def _checkpoints(o: Observed) -> Iterator[Finding]:
    """Against the log's clock; of another program, against the gaps between its own."""
    page = o.page
    if page:
        yield Finding("checkpoints", *_cadence(page))
    elif o.saves:
        (name, age_s), gaps = o.saves[0], [b[1] - a[1] for a, b in zip(o.saves, o.saves[1:], strict=False)]
        newest = f"{name} was written {format_duration(age_s)} ago"
        if len(gaps) >= DIPS - 1 and age_s > LATE * max(gaps):
            yield Finding("checkpoints", "warn", "late", f"{newest}, where {format_duration(max(gaps))} at most lay between "
                          f"those before: it is stuck, in a long evaluation, or has not beaten its best since")
        else:
            yield Finding("checkpoints", "ok", "seen", newest)


def _cadence(page: Page) -> tuple[str, str, str]:
    """(level, what, line) of a run's checkpoints."""
    def after(steps) -> str:
        return f"{steps} steps" + (f" ({format_duration(steps * page.mean_s)})" if page.mean_s else "")

    due = page.step // page.save_every * page.save_every
    ahead = min(due + page.save_every, page.steps) - page.step
    line = f"every {after(page.save_every)}" + (f", the next in {after(ahead)}" if ahead else "")
    is_past = page.step > due > 0  # at the step itself it may be under way
    newest = max(page.kept or 0, page.logged or 0)
    if not newest:
        return ("bad", "missing", f"{line}; none so far at step {page.step}") if is_past else ("ok", "none yet", line)
    ago_s = page.since_save_s
    at = f"the newest is of step {newest}" + ("" if ago_s is None else f", {format_duration(ago_s)} ago")
    if is_past and newest < due:
        return "bad", "late", f"{line}; step {page.step} is done and {at}"
    if page.logged and (page.kept or 0) < page.logged and (ago_s or 0) > AWAY_S + LATE * (page.save_s or 0):
        return ("bad", "not written", f"{line}; {at} by the log, but its folder holds "
                                      f"{f'none after step {page.kept}' if page.kept else 'none'}: is the disk full?")
    return "ok", "on cadence", f"{line}; {at}"


def _doubled(o: Observed) -> Iterator[Finding]:
    """Which process of the same command line is the worker. Never which one to end: what looks idle may hold days' work."""
    if o.itself is None:
        return

    def named(peers: list[Peer]) -> str:
        return ", ".join(map(str, peers))

    def of(relation: str, is_stub: bool) -> list[Peer]:
        return [p for p in o.peers if p.relation == relation and p.is_stub is is_stub]

    me, children, rivals, dead = o.itself, of("child", False), of("other", False), of("other", True)
    if me.is_stub and (children or rivals):
        worker = max(children or rivals, key=lambda p: p.cpu_share)
        said = f"the worker is {worker}: leave it alone, look at it with --pid {worker.pid}; {me} "
        if children:
            yield Finding("doubled", "ok", "launcher", f"{said}{STARTED_IT}")
        else:
            yield Finding("doubled", "warn", "stub", f"{said}is a dead stub of the same command line")
    elif rivals:
        yield Finding("doubled", "bad", "doubled", f"several are at work on the same: {named([me, *rivals])}. They share "
                      f"the card and may overwrite each other's files; all are alive, so see first whose files grow")
    elif dead:
        yield Finding("doubled", "warn", "stubs", f"the worker is {me}: leave it alone; dead stubs of the same command "
                      f"line, which cost nothing: {named(dead)}")
    elif launchers := of("parent", True):
        yield Finding("doubled", "ok", "launcher", f"the worker is {me}; {named(launchers)} {STARTED_IT}")
    else:
        own = f" but {len(children)} children of its own" if children else ""
        yield Finding("doubled", "ok", "alone", f"no other process has its command line{own}")


def _sources(o: Observed) -> Iterator[Finding]:
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
