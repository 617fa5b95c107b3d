"""Real file systems that don't take what a run writes: too small, read-only. Needs the right to mount, else skipped."""

import shutil
import subprocess
import sys

import pytest
from helpers.runs import log, make_home, train

from trainer import checkpoint


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("disks"))


@pytest.fixture
def mounted(home):
    """Mounts a file system in memory with the given options at home/NAME."""
    there = []

    def mount(name, options):
        path = home / name
        path.mkdir(exist_ok=True)
        done = sys.platform == "linux" and shutil.which("mount") and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True)
        if not done or done.returncode:
            pytest.skip(f"can't mount a file system here: {done.stderr.strip() if done else 'not Linux'}")
        there.append(path)
        return path

    yield mount
    for path in there:
        subprocess.run(["umount", path], check=True)


def test_a_disk_that_fills_up_costs_no_checkpoint_that_was_there(home, mounted):
    """Room for two checkpoints of 0.34 MB, not for the third that is written before the oldest goes: the run goes on."""
    small = mounted("small", "size=1m")
    done = train(home, "small/run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "but for its last checkpoint" in done.stderr
    assert "the run goes on, and the checkpoints before it are still there" in done.stdout
    facts, folder = checkpoint.newest(small / "run")
    assert facts["step"] >= 3 and not list((small / "run/checkpoints").glob("*.tmp"))
    assert [line["step"] for line in log(small / "run") if line["kind"] == "step"][-1] == 90
    subprocess.run(["mount", "-o", "remount,size=20m", small], check=True)
    again = train(home, "small/run", "--resume")
    assert again.returncode == 0 and f"resuming after step {facts['step']}" in again.stdout, again.stderr


def test_a_full_disk_refuses_the_start(home, mounted):
    small = mounted("full", "size=64k")
    done = train(home, "full/run")
    assert done.returncode in (2, 4) and done.stderr.count("\n") == 1, done.stderr
    assert "free" in done.stderr or "space" in done.stderr
    assert not (small / "run/receipt.json").exists()


def test_a_read_only_folder_refuses_the_start_and_leaves_it_as_it_is(home, mounted):
    locked = mounted("locked", "size=1m")
    (locked / "mine").write_text("kept")
    subprocess.run(["mount", "-o", "remount,ro", locked], check=True)
    done = train(home, "locked/run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "locked" in done.stderr, done.stderr
    assert "Read-only" in done.stderr and [p.name for p in locked.iterdir()] == ["mine"]
