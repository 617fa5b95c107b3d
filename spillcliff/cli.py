"""What the commands share at their edge: how they begin and end, their common options, and `spillcliff`, which has them
all."""

import atexit
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from spillcliff import __version__
from spillcliff.console import CLOSED_PIPE_ERRORS, STOP_SIGNALS, survives_closed_pipe
from spillcliff.errors import UserError

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
PATH = click.Path(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, words on stderr.")
device_option = click.option("--device", metavar="D",
                             help="cuda, cuda:1, cpu, mps, xpu, or a name under results/.  [default: the best here]")
results_option = click.option("--results", default="results", show_default=True, type=PATH, metavar="DIR",
                              help="Where records are kept.")
dtype_option = click.option("--dtype", type=click.Choice(["uint16", "uint32"]),
                            help="Of a flat token file.  [default: told by its content]")
column_option = click.option("--column", metavar="NAME", help="Of a Parquet or Arrow file.  [default: input_ids, tokens, "
                                                              "ids or the only one of ids]")

COMMANDS = {"probe": "probe.cli", "plan": "planner.cli", "train": "trainer.cli"}
"""The modules of the three commands: named only, since they lie above this one."""


def run_command(command: click.Command, name: str) -> NoReturn:
    """Runs a command and leaves with the contract's exit code; an expected failure is one line on stderr."""
    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    for number in STOP_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:  # what is ignored from the start (nohup) stays so
            signal.signal(number, interrupt)
    for stream in (sys.stdout, sys.stderr):  # a console of an old code page must not end a run over one character
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except UserError as e:
        code = _fail(str(e), e.exit_code)
    except click.ClickException as e:
        code = _fail(e.format_message(), 2)
    except (KeyboardInterrupt, click.Abort):
        _leave_interrupted()
    except OSError as e:  # click ends the line on stderr after an interrupt: with the terminal closed it can't
        if e.errno not in CLOSED_PIPE_ERRORS or not isinstance(e.__context__, KeyboardInterrupt):
            raise
        _leave_interrupted()
    sys.exit(code if isinstance(code, int) else 0)


def _leave_interrupted() -> NoReturn:
    """Not by sys.exit: had it come in the middle of an exec (a dataclass being made), CPython would end by SIGINT."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with survives_closed_pipe(stream):
            stream.flush()
    os._exit(130)


def _fail(message: str, code: int) -> int:
    print("error: " + " ".join(line.strip() for line in message.splitlines()), file=sys.stderr)
    return code


class _Umbrella(click.Group):
    """Its commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return importlib.import_module(COMMANDS[name]).cli if name in COMMANDS else None


@click.command(cls=_Umbrella, context_settings=HELP)
@click.version_option(__version__, prog_name="spillcliff")
def cli() -> None:
    """Measure what fits on one card and how fast, plan the run, train it, and check the forecast."""


def main() -> None:
    run_command(cli, "spillcliff")


if __name__ == "__main__":
    main()
