"""The set-up picks the torch build that suits the card, and says in one line what is in its way."""

import glob
import json
import os
import shutil
import subprocess
import sys

import pytest
from helpers.made import ROOT

import bootstrap


@pytest.mark.parametrize(("capability", "windows", "index"), [
    ((6, 1), True, "cu126"), ((6, 1), False, "cu126"), ((7, 0), False, "cu126"), ((0, 0), False, "cu126"),
    ((7, 5), False, None), ((9, 0), False, None), ((8, 6), True, "cu130"), (None, True, None), (None, False, None)])
def test_the_build_follows_the_capability(capability, windows, index):
    """CUDA 13 builds start at 7.5; below, CUDA 12.6 builds up to torch 2.14 have the kernels. The default index has only
    processor builds for Windows."""
    arguments, why = bootstrap.choose_build(capability, windows)
    assert any(f"whl/{index}" in a for a in arguments) if index else not any("whl" in a for a in arguments)
    assert ("torch>=2.10,<2.15" in arguments) == (index == "cu126")
    assert why


@pytest.mark.parametrize(("text", "capabilities", "lowest"), [
    ("6.1\n", [(6, 1)], (6, 1)), ("9.0\n7.0\n8.9\n", [(9, 0), (7, 0), (8, 9)], (7, 0)), ("12.0\r\n", [(12, 0)], (12, 0)),
    ("3.5\n8.6\n", [(3, 5), (8, 6)], (8, 6)), ("3.5\n", [(3, 5)], (3, 5)), ("", [], None),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", [], None),
    ("No devices were found", [], None),
    ('Field "compute_cap" is not a valid field to query.', [bootstrap.UNKNOWN], bootstrap.UNKNOWN),
    ("[N/A]\n", [bootstrap.UNKNOWN], bootstrap.UNKNOWN), ("[Not Supported]\n8.6\n", [bootstrap.UNKNOWN, (8, 6)], (8, 6)),
    ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161", [bootstrap.UNKNOWN],
     bootstrap.UNKNOWN)])
def test_what_nvidia_smi_prints_is_read(text, capabilities, lowest):
    """A card that doesn't tell its capability is a card: without one, Windows would get a build for processors."""
    assert bootstrap.parse_capabilities(text) == capabilities
    assert bootstrap.lowest(capabilities) == lowest


@pytest.mark.parametrize(("capabilities", "words"), [
    ([(6, 1), (12, 0)], "12.6 build can't run the card of compute capability 12.0"), ([(7, 0), (10, 0)], "capability 10.0"),
    ([(6, 1), (9, 0)], None), ([(7, 5), (12, 0)], None), ([(3, 5), (8, 6)], "no build that this needs runs"),
    ([(3, 5)], "capability 3.5"), ([bootstrap.UNKNOWN], None), ([], None)])
def test_what_the_chosen_build_cant_run_is_said(capabilities, words):
    """No build has kernels for both 6.1 and 12.0."""
    for windows in (True, False):
        build, _ = bootstrap.choose_build(bootstrap.lowest(capabilities), windows)
        said = bootstrap.cant_run(build, capabilities)
        assert words in said if words else said == ""
        assert "\n" not in said


def fake_smi(folder, body):
    folder.mkdir()
    path = folder / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(sys.platform == "win32", reason="the imitations are scripts")
def test_nvidia_smi_is_found_where_it_is_kept_and_one_that_fails_is_passed_over(tmp_path, monkeypatch):
    """Under WSL it may be in /usr/lib/wsl/lib alone, beside one on the path that can't reach the driver."""
    broken = fake_smi(tmp_path / "path", "print('NVIDIA-SMI has failed'); raise SystemExit(9)")
    works = fake_smi(tmp_path / "wsl", "print('6.1')")
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path=None: which(
        name, path=str(tmp_path / "path") if path is None else path.replace("/usr/lib/wsl/lib", str(tmp_path / "wsl"))))
    assert bootstrap.nvidia_smis()[:2] == [broken, works]
    assert bootstrap.card_capabilities() == [(6, 1)]


@pytest.mark.skipif(sys.platform == "win32", reason="the imitations are scripts")
@pytest.mark.parametrize(("body", "answer", "said"), [
    ("import time\nprint('9.0', flush=True)\ntime.sleep(600)", [bootstrap.UNKNOWN], "did not answer within 1 s"),
    ("print('Failed to initialize NVML: Driver/library version mismatch'); raise SystemExit(18)", [bootstrap.UNKNOWN],
     "restart the machine"), ("raise SystemExit(3)", [], "")])
def test_a_driver_in_trouble_is_told_and_the_set_up_goes_on(tmp_path, capsys, body, answer, said):
    assert bootstrap.ask_nvidia_smi(fake_smi(tmp_path / "x", body), seconds=1) == answer
    out = capsys.readouterr().out
    assert said in out
    assert bool(out) == bool(said)
    assert bootstrap.ask_nvidia_smi(str(tmp_path / "not-there")) == []


def test_windows_keeps_it_in_several_places(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "name", "nt")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: asked.append(path))
    monkeypatch.setattr(glob, "glob", lambda pattern: ["C:\\store\\nv_dispi.inf"])
    assert bootstrap.nvidia_smis() == []
    for part in ("System32", "NVSMI", "nv_dispi.inf"):
        assert any(path and part in path for path in asked)


def test_a_driver_that_does_not_answer_changes_no_finished_set_up(tmp_path, monkeypatch):
    """Another build is 1 to 7 GB."""
    monkeypatch.setattr(bootstrap, "STAMP", str(tmp_path / "stamp.json"))
    monkeypatch.setattr(bootstrap, "PYTHON", sys.executable)
    (tmp_path / "stamp.json").write_text(json.dumps(bootstrap.wanted_stamp(["the build of old"])))
    for told, is_left in (([], True), ([bootstrap.UNKNOWN], True), ([(6, 1)], False)):
        monkeypatch.setattr(bootstrap, "card_capabilities", lambda told=told: told)
        monkeypatch.setattr(bootstrap, "make_venv", lambda: bootstrap.fail("set up anew"))
        if is_left:
            bootstrap.set_up()
        else:
            with pytest.raises(SystemExit):
                bootstrap.set_up()


@pytest.mark.parametrize(("log", "words"), [
    ("Retrying ... NewConnectionError ... Temporary failure in name resolution", "network"),
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
    ("ERROR: No matching distribution found for torch==2.13.0", "No matching distribution"), ("", "no reason")])
def test_a_failed_install_is_one_line_that_says_what_to_do(tmp_path, monkeypatch, log, words):
    path = tmp_path / "install.log"
    path.write_text(log)
    monkeypatch.setattr(bootstrap, "LOG", str(path))
    why = bootstrap.why_pip_failed()
    assert words in why
    assert "\n" not in why
    assert str(path) in why


def test_an_old_python_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "OLDEST", (99, 0))
    with pytest.raises(SystemExit) as stopped:
        bootstrap.set_up()
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert err.count("\n") == 1
    assert "99.0 or later" in err


def test_what_is_installed_is_left_alone_until_something_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "STAMP", str(tmp_path / "stamp.json"))
    monkeypatch.setattr(bootstrap, "PYTHON", sys.executable)
    stamp = bootstrap.wanted_stamp(["torch>=2.10"])
    assert not bootstrap.is_ready(stamp)
    (tmp_path / "stamp.json").write_text(json.dumps(stamp))
    assert bootstrap.is_ready(stamp)
    assert not bootstrap.is_ready(bootstrap.wanted_stamp(["torch<2.15"]))


def test_an_unknown_word_is_refused_before_anything_is_done():
    done = subprocess.run([sys.executable, str(ROOT / "bootstrap.py"), "dmeo"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "demo, test or nothing" in done.stderr
