"""When a run goes on with a smaller step because its memory has spilled, and when it tries the planned one again: pure."""

from collections import deque
from statistics import median

SHOWN, OF = 18, 20
"""Of the latest steps, those that must have fallen before the first smaller one: a passing disturbance is over by then."""
AGAIN = 5
"""So many do, all of them, where the planned step has spilled before."""
FALL_TIMES = 2.0
"""A step that takes so many times the usual one has fallen: the smallest spill measured cost 3.2."""
MOST_HALVINGS = 2
KEPT = 200
"""Steps that say what is usual; fewer than OF say nothing."""


class SpillEscape:
    """Of one run. `halvings` is how often the step was made smaller; it is told of every step's seconds by `add`, of what
    was done by `halve`, and of each checkpoint by `is_retry_due`."""

    def __init__(self) -> None:
        self.halvings = 0
        self._usual: deque[float] = deque(maxlen=KEPT)
        self._latest: deque[float] = deque(maxlen=OF)
        self._wait, self._waited = 0, 0

    def add(self, step_s: float) -> None:
        """A finished step. Those of the planned size that are 20 steps old and had not fallen are what is usual."""
        if len(self._latest) == OF and not self.halvings and not self._has_fallen(self._latest[0]):
            self._usual.append(self._latest[0])
        self._latest.append(step_s)

    def fall(self) -> float | None:
        """How many times the usual seconds the latest steps took, where that may be a spill and a smaller step is left to
        take; else None. Two steps of half the size may rightly take twice as long, where the processor sets the pace."""
        if self.halvings >= MOST_HALVINGS or len(self._usual) < OF:
            return None
        fallen = sum(self._has_fallen(s) for s in self._latest)
        is_shown = len(self._latest) >= AGAIN and fallen == len(self._latest) if self._wait else fallen >= SHOWN
        return median(self._latest) / median(self._usual) if is_shown else None

    def _has_fallen(self, step_s: float) -> bool:
        return len(self._usual) >= OF and step_s > FALL_TIMES * 2**self.halvings * median(self._usual)

    def halve(self) -> None:
        """The step has been made smaller."""
        self.halvings += 1
        self._latest.clear()
        self._wait, self._waited = self._wait or 1, 0

    def look_again(self) -> None:
        """What fell had another cause, or the step's size was changed for another reason."""
        self._latest.clear()

    def is_retry_due(self) -> bool:
        """Asked at each checkpoint: whether the planned step is to be tried again, at the first one after it was left, then
        at the second, fourth and so on, since each try costs some slow steps."""
        self._waited += 1
        if not self.halvings or self._waited < self._wait:
            return False
        self.halvings, self._waited, self._wait = 0, 0, 2 * self._wait
        self._latest.clear()
        return True
