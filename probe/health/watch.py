"""Observes a job for a while, or until it ends, and shows how it is."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from probe.health.diagnose import diagnose, lines
from probe.health.observe import JobObserver, newest_running
from spillcliff.console import LiveLine, has_reader

EVERY_S, WATCH_EVERY_S = 0.25, 0.5
"""Between readings: a card's own are means over a sixth of a second to a second. A watch costs half as much."""
SHOW_S = 2.0
"""Between verdicts of a watch."""


def observer_of(run: Path | None, pid: int | None, device: str | None, results: Path, seconds: float,
                is_watch: bool) -> JobObserver:
    """Of the job that is meant: a run's, a process, or the newest run of ours that runs; UserError if there is none."""
    window = max(2, round(seconds / (WATCH_EVERY_S if is_watch else EVERY_S)))
    if pid is not None:
        return JobObserver(pid, None, device, results, window)
    return JobObserver.of_run(run or newest_running(results), device, results, window)


def watch_job(observer: JobObserver, seconds: float, is_watch: bool, live: LiveLine, width: int, stream: IO[str]) -> None:
    """Takes samples for `seconds`; in a watch until the job ends or nobody reads `stream` any more, with the verdicts
    shown."""
    live.say(observer.title)
    begin_s = shown_s = time.monotonic()
    for now_s in _ticks(WATCH_EVERY_S if is_watch else EVERY_S):
        observer.sample()
        if observer.ended or not has_reader(stream) or not (is_watch or now_s - begin_s < seconds):
            return
        if not is_watch:
            live.update(f"{now_s - begin_s:.0f} of {seconds:.0f} s")
        elif now_s - shown_s >= SHOW_S:
            shown_s = now_s
            head = f"{time.strftime('%H:%M:%S')}, the last {min(now_s - begin_s, seconds):.0f} s; Ctrl-C ends the watch"
            live.update("\n".join([head, *lines(diagnose(observer.observation()), width)]))


def _ticks(every_s: float) -> Iterator[float]:
    """The time at each tick; late ones are not made up for."""
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + every_s, time.monotonic())
        time.sleep(max(0.0, due_s - time.monotonic()))
        yield time.monotonic()
