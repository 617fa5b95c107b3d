"""Being asked to stop: Ctrl-C, SIGTERM, a terminal that is closed."""

import signal

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))
"""SIGHUP is a closed terminal, SIGBREAK Ctrl-Break under Windows, which ends a process whose terminal is closed at once."""


class Stop:
    """The first request is noted in `asked`, so that no step is cut in two; a second one ends the run at once. What was
    ignored from the start (nohup) stays so."""

    def __enter__(self) -> "Stop":
        self.asked = False
        self._before = {s: signal.signal(s, self._note) for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN}
        return self

    def _note(self, signum, frame) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *failure) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
