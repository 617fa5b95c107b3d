"""Where a command's words go: to people, or with --json to programs; and when a person or the system asks it to stop."""

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, TypeVar

from spillcliff.errors import UserError
from spillcliff.files import write_atomic

if TYPE_CHECKING:  # rich takes a tenth of a second, which no --help should
    from rich.console import Console

T = TypeVar("T")

UPDATE_EVERY_S = 10
"""Seconds between lines where there is no terminal, unless told otherwise, so that the log of hours stays short."""
CLOSED_PIPE_ERRORS = (errno.EPIPE, errno.EIO, errno.EINVAL)
"""What writing fails with when the other end is gone: a pipe, a terminal that was closed, a pipe under Windows."""
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))
"""SIGHUP is a closed terminal, SIGBREAK Ctrl-Break under Windows, which ends a process whose terminal is closed at once."""

_discarded: set[int] = set()


def discard_output(stream: IO[str]) -> None:
    """Sends what is written to `stream` from here on nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    _discarded.add(stream.fileno())


def has_reader(stream: IO[str]) -> bool:
    """Whether what is written to a stream still goes where it went at the start."""
    return not _discarded or stream.fileno() not in _discarded


@contextlib.contextmanager
def survives_closed_pipe(stream: IO[str]) -> Iterator[None]:
    """Inside, output is discarded from when nobody reads it any more (`plan | head`): that is no reason to end a run."""
    try:
        yield
    except OSError as e:
        if e.errno not in CLOSED_PIPE_ERRORS:
            raise
        discard_output(stream)


class Output:
    """Words go to stdout, or to stderr where stdout is one object (--json) or a file's content (`stdout_is_taken`). Of
    several processes only the main one speaks (`is_silent`)."""

    def __init__(self, as_json: bool, is_silent: bool = False, stdout_is_taken: bool = False) -> None:
        self.as_json = as_json and not is_silent
        self.stream = sys.stderr if as_json or stdout_is_taken else sys.stdout
        if is_silent:
            self.stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def say(self, line: str = "", end: str = "\n") -> None:
        with survives_closed_pipe(self.stream):
            print(line, end=end, file=self.stream, flush=True)

    def result(self, value: dict) -> None:
        """The one object of --json; nothing without it."""
        if self.as_json:
            with survives_closed_pipe(sys.stdout):
                print(json.dumps(value), flush=True)

    def console(self) -> "Console":
        """A rich console on the same stream; 80 columns where there is no terminal."""
        from rich.console import Console

        console = Console(file=self.stream, highlight=False, width=None if self.stream.isatty() else 80)
        # rich's own ends the process
        console.on_broken_pipe = lambda: discard_output(self.stream)
        return console

    def table(self, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
        """A small table of text cells, the first column to the left and the others to the right."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(head):
            table.add_column(name, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        with survives_closed_pipe(self.stream):
            self.console().print(table)
            self.stream.flush()

    def csv(self, path: str, text: str) -> None:
        """Writes a CSV to a file, or to stdout for "-". UserError for "-" with --json, which has stdout."""
        if path != "-":
            write_atomic(path, text.encode())
            self.say(f"written to {path}")
            return
        if self.as_json:
            raise UserError("--csv - and --json both want stdout: name a file for --csv, or leave --json out")
        with survives_closed_pipe(sys.stdout):
            print(text, end="", flush=True)


class LiveLine:
    """The line that changes while a command works: in place on a terminal, now and then in a pipe. `say` prints a line that
    stays, `update` changes the one at the bottom."""

    def __init__(self, console: "Console", every_s: float = UPDATE_EVERY_S) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._every_s = 0.1 if self._live else every_s
        self._updated_s = 0.0

    def __enter__(self) -> "LiveLine":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            with survives_closed_pipe(self._console.file):
                self._live.stop()

    def update(self, line: str) -> None:
        from rich.text import Text

        now = time.monotonic()
        if now - self._updated_s < self._every_s:
            return
        self._updated_s = now
        if self._live:
            with survives_closed_pipe(self._console.file):
                self._live.update(Text(line, no_wrap=True, overflow="crop"), refresh=True)
        else:
            self.say(line)

    def say(self, line: str) -> None:
        with survives_closed_pipe(self._console.file):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._console.file.flush()


class StopRequest:
    """Ctrl-C, SIGTERM or a closed terminal. The first is noted in `is_made`, so that no step is cut in two; a second one
    ends the run at once. What was ignored from the start (nohup) stays so."""

    def __enter__(self) -> "StopRequest":
        self.is_made = False
        self._before = {s: signal.signal(s, self._note) for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN}
        return self

    def _note(self, signum: int, frame: Any) -> None:
        if self.is_made:
            raise KeyboardInterrupt
        self.is_made = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def parse_option(text: str | None, parse: Callable[..., T], *arguments: Any) -> T | None:
    """An option's value, parsed; None where it was left out (an empty one was not, and is refused)."""
    return None if text is None else parse(text, *arguments)
