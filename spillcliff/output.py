"""Where a command's words go: to people, or with --json to programs."""

import json
import os
import sys

from spillcliff.errors import UserError
from spillcliff.files import write_whole
from spillcliff.live import drop, unread


class Output:
    """Words go to stdout, or to stderr where stdout is one object (--json) or a file's content; of a team only the first
    speaks."""

    def __init__(self, as_json: bool, speaks: bool = True, is_taken: bool = False) -> None:
        self.as_json = as_json and speaks
        self.stream = sys.stderr if as_json or is_taken else sys.stdout
        if not speaks:
            self.stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def say(self, line: str = "", end: str = "\n") -> None:
        with unread(self.stream):
            print(line, end=end, file=self.stream, flush=True)

    def result(self, value: dict) -> None:
        if self.as_json:
            with unread(sys.stdout):
                print(json.dumps(value), flush=True)

    def console(self):
        """A rich console on the same stream; 80 columns where there is no terminal."""
        from rich.console import Console

        console = Console(file=self.stream, highlight=False, width=None if self.stream.isatty() else 80)
        console.on_broken_pipe = lambda: drop(self.stream)  # rich's own ends the process
        return console


def print_rows(out: Output, head: tuple[str, ...], rows) -> None:
    """A small table of text cells, the first column to the left and the others to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    with unread(out.stream):
        out.console().print(table)
        out.stream.flush()


def write_table(out: Output, path: str, text: str) -> None:
    """A CSV to a file, or to stdout for "-", where --json has no place then."""
    if path != "-":
        write_whole(path, text.encode())
        out.say(f"written to {path}")
        return
    if out.as_json:
        raise UserError("--csv - and --json both want stdout: name a file for --csv, or leave --json out")
    with unread(sys.stdout):
        print(text, end="", flush=True)


def given(text: str | None, parse, *names):
    """An option's value, parsed; None where it was not given (an empty one is given, and refused)."""
    return None if text is None else parse(text, *names)
