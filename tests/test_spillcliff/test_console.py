"""Words go to people and one object to programs, a reader that has gone ends nothing, and a request to stop is heard."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time

import click
import pytest
from helpers.made import ROOT
from helpers.waiting import PATIENCE_S
from rich.console import Console

from spillcliff import console
from spillcliff.cli import run_command
from spillcliff.console import (
    LiveLine,
    Output,
    StopRequest,
    discard_output,
    has_reader,
    parse_option,
    survives_closed_pipe,
)
from spillcliff.errors import NoPlan, Refused, UserError

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals")


@pytest.fixture
def unread(monkeypatch):
    """A stream whose reader has gone."""
    monkeypatch.setattr(console, "_discarded", set())
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w", encoding="utf-8") as stream:
        yield stream


def test_what_nobody_reads_is_discarded_from_then_on(unread):
    assert has_reader(unread)
    for _ in range(3):
        with survives_closed_pipe(unread):
            print("words", file=unread, flush=True)
    assert not has_reader(unread)
    assert has_reader(sys.stderr)
    print("more words", file=unread, flush=True)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.EINVAL])
def test_each_error_of_a_reader_that_has_gone_is_known(unread, number):
    with survives_closed_pipe(unread):
        raise OSError(number, os.strerror(number))
    assert not has_reader(unread)


def test_any_other_failure_to_write_is_told(unread):
    with pytest.raises(OSError, match="No space left"), survives_closed_pipe(unread):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert has_reader(unread)
    discard_output(unread)  # what it has buffered is not written at its end


def test_everything_that_a_command_says_survives_a_reader_that_has_gone(unread, monkeypatch):
    monkeypatch.setattr(sys, "stdout", unread)
    out = Output(as_json=False)
    out.say("words")
    out.table(("name", "size"), [("a", "1")])
    out.csv("-", "a,b\n")
    with LiveLine(out.console(), every_s=0) as live:
        live.say("words")
        live.update("words")
    Output(as_json=True).result({"a": 1})
    assert not has_reader(unread)


@pytest.mark.parametrize(("options", "stdout", "stderr"), [
    ({"as_json": False}, "words\n", ""), ({"as_json": True}, '{"a": [1]}\n', "words\n"),
    ({"as_json": False, "stdout_is_taken": True}, "", "words\n"),
    ({"as_json": False, "is_silent": True}, "", ""), ({"as_json": True, "is_silent": True}, "", "")])
def test_words_and_results_go_where_they_belong(capsys, options, stdout, stderr):
    out = Output(**options)
    out.say("words")
    out.result({"a": [1]})
    assert tuple(capsys.readouterr()) == (stdout, stderr)


def test_a_csv_goes_to_a_file_or_to_stdout_and_not_beside_json(tmp_path, capsys):
    path = tmp_path / "out.csv"
    Output(as_json=False).csv(str(path), "a,b\n1,é\n")
    assert path.read_text(encoding="utf-8") == "a,b\n1,é\n"
    assert capsys.readouterr().out == f"written to {path}\n"
    Output(as_json=False, stdout_is_taken=True).csv("-", "a,b\n")
    assert tuple(capsys.readouterr()) == ("a,b\n", "")
    with pytest.raises(UserError, match="both want stdout"):
        Output(as_json=True).csv("-", "a,b\n")


def test_a_table_has_its_first_column_to_the_left_and_figures_to_the_right(capsys):
    Output(as_json=False).table(("name", "tok/s"), [("a", "1"), ("longer", "12,345"), ("[bold]", "3")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len({len(line) for line in lines}) == 1
    assert max(map(len, lines)) <= 80
    assert lines[-2].split() == ["longer", "12,345"]
    assert lines[-3].split() == ["a", "1"]
    assert lines[-3].rstrip().endswith(" 1")


def test_in_a_pipe_the_live_line_is_told_now_and_then(monkeypatch):
    stream, now = io.StringIO(), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with LiveLine(Console(file=stream, width=80), every_s=10) as live:
        for second in range(25):
            now = 1000.0 + second
            live.update(f"second {second}")
        live.say("[red]kept[/red] " + "x" * 100)
    assert stream.getvalue().splitlines() == ["second 0", "second 10", "second 20", "[red]kept[/red] " + "x" * 100]


def test_on_a_terminal_the_live_line_is_changed_in_place_and_gone_at_the_end():
    stream = io.StringIO()
    with LiveLine(Console(file=stream, width=80, force_terminal=True, legacy_windows=False)) as live:
        live.update("step [1]")
        live.say("kept")
    shown = stream.getvalue()
    assert "step [1]" in shown
    assert "kept\n" in shown
    assert shown.rindex("\x1b[2K") > shown.index("step [1]")


@POSIX
def test_the_first_request_to_stop_is_noted_and_the_second_ends_at_once():
    before = {number: signal.getsignal(number) for number in console.STOP_SIGNALS}
    for number in console.STOP_SIGNALS:
        with StopRequest() as stop:
            assert not stop.is_made
            signal.raise_signal(number)
            assert stop.is_made
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    assert {number: signal.getsignal(number) for number in console.STOP_SIGNALS} == before


@POSIX
def test_what_is_ignored_from_the_start_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_made
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_option_that_was_left_out_is_not_parsed_and_an_empty_one_is():
    assert parse_option(None, int) is None
    assert parse_option("11", int, 2) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        parse_option("", int)


@pytest.fixture
def leaves(monkeypatch, capsys):
    """Runs a command that ends by an exception, or returns a value; (exit code, stdout, stderr)."""
    def run(result):
        @click.command()
        def command():
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(sys, "argv", ["command"])
        monkeypatch.setattr(signal, "signal", lambda *arguments: None)
        with pytest.raises(SystemExit) as left:
            run_command(command, "command")
        return left.value.code, *capsys.readouterr()
    return run


@pytest.mark.parametrize(("result", "code"), [
    (None, 0), ("text", 0), (5, 5), (UserError("bad\n  input"), 2), (NoPlan("bad input"), 3), (Refused("bad input"), 4),
    (click.UsageError("bad\ninput"), 2), (click.BadParameter("bad input"), 2)])
def test_a_command_leaves_with_the_code_of_its_failure_told_in_one_line(leaves, result, code):
    left, out, err = leaves(result)
    assert left == code
    assert not out
    assert err.count("\n") == (1 if isinstance(result, Exception) else 0)
    if err:
        assert err.startswith("error: ")
        assert err.endswith("bad input\n")


def test_a_fault_of_our_own_is_no_user_s_error(leaves):
    with pytest.raises(ZeroDivisionError):
        leaves(ZeroDivisionError())


INTERRUPTED = """
import atexit, os, signal, click
from spillcliff.cli import run_command
atexit.register(lambda: print("cleaned up"))
@click.command()
def cli():
    print("begun")
    os.kill(os.getpid(), signal.{name})
    signal.pause()
run_command(cli, "command")
"""


@POSIX
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_command_leaves_with_130_and_without_a_traceback(name):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED.format(name=name)], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=PATIENCE_S)
    assert done.returncode == 130
    assert done.stdout == "begun\ncleaned up\n"
    assert not done.stderr.strip()


def test_json_is_what_a_program_reads_back(capsys):
    Output(as_json=True).result({"é": [1.5, None, "\u2028"]})
    (line,) = capsys.readouterr().out.split("\n")[:-1]
    assert json.loads(line) == {"é": [1.5, None, "\u2028"]}
