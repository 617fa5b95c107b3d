"""Real file systems that don't take what a run writes: too small, read-only. Needs the right to mount, else skipped."""

import shutil
import subprocess
import sys

import pytest
from helpers.runs import STEPS, log, run_options

from trainer import checkpoint
from trainer.run_folder import RunFolder


@pytest.fixture
def mounted(home):
    """Mounts a file system in memory with the given options at home/NAME."""
    mounts = []

    def mount(name, options):
        path = home / name
        path.mkdir(exist_ok=True)
        done = sys.platform == "linux" and shutil.which("mount") and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True)
        if not done or done.returncode:
            pytest.skip(f"can't mount a file system here: {done.stderr.strip() if done else 'not Linux'}")
        mounts.append(path)
        return path

    yield mount
    for path in mounts:
        subprocess.run(["umount", path], check=True)


def test_a_disk_that_fills_up_costs_no_checkpoint_that_was_there(home, mounted, called):
    """Room for two checkpoints of 0.34 MB, not for the third that is written before the oldest goes: the run goes on."""
    small = mounted("small", "size=1m")
    code, out, err = called(home, "train", *run_options("small/run"))
    assert code == 2
    assert err.count("\n") == 1
    assert "but for its last checkpoint" in err
    assert "the run goes on, and the checkpoints before it are still there" in out
    run = RunFolder(small / "run")
    facts, _ = checkpoint.newest(run)
    assert facts["step"] >= 3
    assert not run.unfinished_checkpoints()
    assert log(run.path, "step")[-1]["step"] == STEPS
    subprocess.run(["mount", "-o", "remount,size=20m", small], check=True)
    code, out, err = called(home, "train", *run_options("small/run", "--resume"))
    assert code == 0, err
    assert f"resuming after step {facts['step']}" in out


def test_a_full_disk_refuses_the_start(home, mounted, called):
    small = mounted("full", "size=64k")
    code, _, err = called(home, "train", *run_options("full/run"))
    assert code in (2, 4)
    assert err.count("\n") == 1, err
    assert "free" in err or "space" in err
    assert not (small / "run/receipt.json").exists()


def test_a_read_only_folder_refuses_the_start_and_leaves_it_as_it_is(home, mounted, called):
    locked = mounted("locked", "size=1m")
    (locked / "mine").write_text("kept")
    subprocess.run(["mount", "-o", "remount,ro", locked], check=True)
    code, _, err = called(home, "train", *run_options("locked/run"))
    assert code == 2
    assert err.count("\n") == 1, err
    assert "locked" in err
    assert "Read-only" in err
    assert [p.name for p in locked.iterdir()] == ["mine"]
