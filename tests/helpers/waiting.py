"""How long tests wait for what goes on in other processes."""

import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""Longest wait for a process, a hundred times what any takes: a machine that is busy with other programs fails no test."""


def wait_for(condition: Callable[[], object]) -> None:
    """Returns when the condition holds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < PATIENCE_S
        time.sleep(0.02)
