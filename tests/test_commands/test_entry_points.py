"""Every way in is there: the commands by their names, and the packages by theirs."""

import configparser
import importlib
import os
import subprocess
import sys

import pytest
from helpers.made import ROOT
from helpers.waiting import PATIENCE_S

import spillcliff


def run(*arguments: str) -> str:
    """What a process of `python -m` says."""
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=PATIENCE_S,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_the_version_is_told():
    assert run("spillcliff", "--version") == f"spillcliff, version {spillcliff.__version__}\n"


@pytest.mark.parametrize(("arguments", "words"), [
    (("spillcliff", "--help"), ("probe", "plan", "train", "--version")),
    (("spillcliff", "plan", "--help"), ("Usage: spillcliff plan", "--corpus")),
    (("spillcliff", "train", "tokenize", "-h"), ("Usage: spillcliff train tokenize", "--vocab")),
    (("probe", "--help"), ("Usage: probe", "grid", "soak")), (("planner", "--help"), ("Usage: plan", "--hours")),
    (("trainer", "--help"), ("Usage: train", "tokenize", "audit"))], ids=lambda value: "-".join(value))
def test_help_is_given(arguments, words):
    text = run(*arguments)
    assert all(word in text for word in words)


def test_a_command_that_is_none_is_told_in_one_line():
    done = subprocess.run([sys.executable, "-m", "spillcliff", "measure"], capture_output=True, text=True,
                          timeout=PATIENCE_S, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_installed_commands_are_functions_that_exist():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].split("\n")
    scripts = {name.strip(): target.strip() for name, target in (line.split("=") for line in lines if line.strip())}
    assert scripts.keys() == {"spillcliff", "probe", "plan", "train"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
