"""The energy that a card takes over a load: by its own counter, else by its mean power."""

import time
from collections.abc import Sequence
from statistics import fmean

from spillcliff.hardware import nvml

LEAST_S = 2.0
"""Of load, below which no figure is given: cells of 50M read 2.8 to 5.5 mJ a token by how long they ran. An H200's counter
moves every 0.1 s: of one steady load it gave 656 to 689 W over 2 s, and 629 to 774 over half a second."""


def energy_over(seconds: float, before_j: float | None, after_j: float | None, powers_w: Sequence[float]) -> float | None:
    """Joules of a load of `seconds`, by the counter before and after it, else by the power read during it; None for a short
    one and where nothing was read. A counter that went back has begun anew (a driver that was loaded again)."""
    if seconds < LEAST_S:
        return None
    if before_j is not None and after_j is not None and after_j > before_j:
        return after_j - before_j
    return fmean(powers_w) * seconds if powers_w else None


class EnergyMeter:
    """Of one card from now on: `look` now and then, since not every card has a counter (Pascal has none)."""

    def __init__(self, uuid: str) -> None:
        self._uuid, self._powers_w = uuid, list[float]()
        self._begin_s, self._before_j = time.perf_counter(), nvml.energy_j(uuid)

    def look(self) -> None:
        if (power_w := nvml.power_w(self._uuid)) is not None:
            self._powers_w.append(power_w)

    def joules(self) -> float | None:
        """So far; see energy_over."""
        self.look()
        return energy_over(time.perf_counter() - self._begin_s, self._before_j, nvml.energy_j(self._uuid), self._powers_w)
