"""What a step asks of an allocator: requests in their order, cut into phases. Imports no torch."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

PARTS = ("weights", "gradients", "optimizer", "activations", "loss", "workspaces")
"""What a tensor is. Workspaces are what a kernel takes for itself: no operation returns them."""
START, FORWARD, BACKWARD, UPDATE, EVALUATION = "start", "forward", "backward", "update", "evaluation"
MOMENTS = (START, FORWARD, BACKWARD, UPDATE, EVALUATION)
FLOAT, LONG, INT, BOOL, COMPLEX = 4, 8, 4, 1, 8
"""Bytes of an element."""


@dataclass(frozen=True)
class Phase:
    """Events of one `moment` on one `stream`; those of a `recording` come from the graphs' own pool, and before the first
    the cache is emptied if `empties`. An event is (name, bytes, part): bytes above 0 make the tensor `name`, unless it is
    there already (optimizer state and workspaces are made once), 0 frees it."""

    moment: str
    events: list[tuple[int, int, str]]
    stream: int = 0
    recording: bool = False
    empties: bool = False


class AllocationTrace:
    """Takes events down. `workspace_bytes` is what cuBLAS takes per stream, 0 where there is none."""

    def __init__(self, workspace_bytes: int) -> None:
        self.names: dict[Hashable, int] = {}
        self._workspace_bytes, self._count = workspace_bytes, 0
        self._phases: list[Phase] = []
        self._events: list[tuple[int, int, str]] = []
        self._phase: dict[str, Any] = {"moment": START}

    def take(self, size: int, part: str = "activations") -> int:
        self._count += 1
        self._events.append((self._count, size, part))
        return self._count

    def keep(self, key: Hashable, size: int, part: str) -> int:
        """A tensor with a name of its own, made again only if it was freed."""
        name = self.names.setdefault(key, -1 - len(self.names))
        self._events.append((name, size, part))
        return name

    def drop(self, *names: int) -> None:
        self._events.extend((name, 0, "") for name in names)

    def matmul(self, size: int, part: str = "activations") -> int:
        """A product, whose first on a stream takes cuBLAS's workspace (getCurrentCUDABlasHandle, CublasHandlePool.cpp)."""
        name = self.take(size, part)
        if self._workspace_bytes and ("cublas", self.stream) not in self.names:
            self.keep(("cublas", self.stream), self._workspace_bytes, "workspaces")
        return name

    def at(self, moment: str, **where: Any) -> None:
        """Begins a phase; `where` as Phase's fields."""
        if self._events:
            self._phases.append(Phase(events=self._events, **self._phase))
        self._events, self._phase = [], {"moment": moment} | where

    def turn(self, moment: str) -> None:
        """Begins a phase where the last one was, on its stream and with its pool."""
        self.at(moment, **{k: v for k, v in self._phase.items() if k in ("stream", "recording")})

    @property
    def stream(self) -> int:
        return self._phase.get("stream", 0)

    @property
    def recording(self) -> bool:
        return self._phase.get("recording", False)

    def cut(self) -> list[Phase]:
        """The phases since the last cut."""
        self.at(START)
        done, self._phases = self._phases, []
        return done
