"""What was observed of a job that runs, and what is found in it."""

from dataclasses import dataclass
from statistics import median
from typing import Literal

from probe.health.run_log import RunStatus
from probe.health.utilization import Sample
from spillcliff.units import format_bytes

IDLE_SHARE = 0.01
"""Of a core, below which a process does nothing: a dead stub used none, a loop that waits polls a little."""
STUB_BYTES = 32 << 20
"""Dead stubs and launchers held some 4 MB, a bare interpreter holds 10, one that has imported torch hundreds."""
LATE_TIMES = 3.0
"""So many usual times of an evaluation, or gaps between saves, are late; assumed."""

Relation = Literal["itself", "parent", "child", "other"]
State = Literal["running", "stopped", "gone"]
Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Peer:
    """The job itself, or a process of the same command line and folder, or the same run folder: the share of a core that it
    used while the job was observed, and what it is to the job."""

    pid: int
    cpu_share: float
    rss_bytes: int
    relation: Relation

    @property
    def is_stub(self) -> bool:
        return self.cpu_share < IDLE_SHARE and self.rss_bytes < STUB_BYTES

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.cpu_share:.1%} of a core, {format_bytes(self.rss_bytes)})"


@dataclass(frozen=True)
class Observation:
    """All that was observed of a job over `seconds`; None where it was not told. The fields are those of --json's
    `observed`.

    `reused` is the program that has its pid now, if another one; `page` what the folder of a run of ours says, `resume` how
    to go on with it, `held` whether a process has that folder locked; `cpu_s` the processor time that its tree used;
    `samples` in order of time; `newer` (source file, seconds it is younger than the process); `saves` (name, age in seconds)
    of the checkpoint-like files of another program, newest first; `fast_bytes` the card's cliff; the last fields are of the
    card and the busiest of its other users.
    """

    pid: int | None
    kind: Literal["cuda", "cpu"]
    seconds: float
    state: State
    cpu_s: float = 0.0
    samples: tuple[Sample, ...] = ()
    page: RunStatus | None = None
    resume: str = ""
    reused: str | None = None
    held: bool = False
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

    def readings(self, name: str) -> list[float]:
        """The values of one field of the samples, without those that were not told."""
        return [value for s in self.samples if (value := getattr(s, name)) is not None]

    def median(self, name: str) -> float | None:
        return median(values) if (values := self.readings(name)) else None

    def highest(self, name: str) -> float | None:
        return max(self.readings(name), default=None)

    def last(self, name: str) -> float | None:
        return values[-1] if (values := self.readings(name)) else None


@dataclass(frozen=True)
class Finding:
    """One verdict: `check` is alive, speed, checkpoints, doubled or sources, `what` its name, and `line` the evidence and
    what to do."""

    check: str
    level: Level
    what: str
    line: str
