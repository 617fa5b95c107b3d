"""The line that changes while a command works: in place on a terminal, now and then in a pipe."""

import contextlib
import errno
import os
import time

EVERY_S = 10
"""Seconds between lines where there is no terminal, unless told otherwise, so that the log of hours stays short."""


_dropped = set()


def drop(stream) -> None:
    """Sends what is written from here on nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    _dropped.add(stream.fileno())


def is_read(stream) -> bool:
    """Whether what is written to a stream still goes where it went at the start."""
    return not _dropped or stream.fileno() not in _dropped


GONE = (errno.EPIPE, errno.EIO, errno.EINVAL)
"""What writing fails with when the other end is gone: a pipe, a terminal that was closed, a pipe under Windows."""


@contextlib.contextmanager
def unread(stream):
    """What is written inside is dropped from when nobody reads it any more (`plan | head`): no reason to end a run."""
    try:
        yield
    except OSError as e:
        if e.errno not in GONE:
            raise
        drop(stream)


class Live:
    """`say` prints a line that stays, `update` changes the one at the bottom. Takes a rich console."""

    def __init__(self, console, every_s: float = EVERY_S) -> None:
        from rich.live import Live as RichLive

        self._console = console
        self._live = RichLive(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._every_s = 0.1 if self._live else every_s
        self._at = 0.0

    def __enter__(self) -> "Live":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *failure) -> None:
        if self._live:
            with unread(self._console.file):
                self._live.stop()

    def update(self, line: str) -> None:
        from rich.text import Text

        now = time.monotonic()
        if now - self._at < self._every_s:
            return
        self._at = now
        if self._live:
            with unread(self._console.file):
                self._live.update(Text(line, no_wrap=True, overflow="crop"), refresh=True)
        else:
            self.say(line)

    def say(self, line: str) -> None:
        with unread(self._console.file):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._console.file.flush()
