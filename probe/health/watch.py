"""Sits by a job for a while, or until it ends, and shows how it is."""

import time
from collections.abc import Iterator
from pathlib import Path

from probe.health.diagnose import judge, lines
from probe.health.observe import Job, running
from spillcliff.console import LiveLine, has_reader

EVERY_S, WATCH_EVERY_S = 0.25, 0.5
"""Between readings: a card's own are means over a sixth of a second to a second. A watch costs half as much."""
SHOW_S = 2.0
"""Between verdicts of a watch."""


def job(run: Path | None, pid: int | None, device: str | None, results: Path, seconds: float, is_watch: bool) -> Job:
    """The job that is meant: a run's, a process, or the newest run of ours that runs; UserError if there is none."""
    window = max(2, round(seconds / (WATCH_EVERY_S if is_watch else EVERY_S)))
    if pid is not None:
        return Job(pid, None, device, results, window)
    return Job.of_run(run or running(results), device, results, window)


def sit(this: Job, seconds: float, is_watch: bool, live: LiveLine, width: int, stream) -> None:
    """Takes readings for `seconds`; in a watch until the job ends or nobody reads any more, with the verdicts shown."""
    live.say(this.title)
    begin = shown = time.monotonic()
    for now in _ticks(WATCH_EVERY_S if is_watch else EVERY_S):
        if not this.ended:
            this.sample()
        if this.ended or not has_reader(stream) or not (is_watch or now - begin < seconds):
            return
        if not is_watch:
            live.update(f"{now - begin:.0f} of {seconds:.0f} s")
        elif now - shown >= SHOW_S:
            shown = now
            head = f"{time.strftime('%H:%M:%S')}, the last {min(now - begin, seconds):.0f} s; Ctrl-C ends the watch"
            live.update("\n".join([head, *lines(judge(this.observed()), width)]))


def _ticks(every_s: float) -> Iterator[float]:
    """The time at each tick; late ones are not made up for."""
    due = time.monotonic()
    while True:
        due = max(due + every_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        yield time.monotonic()
