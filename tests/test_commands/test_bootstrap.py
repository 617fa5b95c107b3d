"""The set-up picks the torch build that suits the card, and says in one line what is in its way."""

import json
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


@pytest.mark.parametrize(("code", "text", "capability"), [
    (0, "6.1\n", (6, 1)), (0, "9.0\n7.0\n8.9\n", (7, 0)), (0, "12.0\r\n", (12, 0)), (0, "", None),
    (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", None),
    (2, 'Field "compute_cap" is not a valid field to query.', (0, 0)), (0, "[N/A]\n", None)])
def test_what_nvidia_smi_prints_is_read(code, text, capability):
    assert bootstrap.parse_capability(code, text) == capability


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
