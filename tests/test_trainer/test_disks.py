"""Real file systems that don't take what a run writes: too small, read-only. Needs the right to mount, else skipped."""

import shlex
import shutil
import subprocess
import sys

import pytest
from helpers.runs import STEPS, before_step, log, receipt, run_options, train_with

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


def test_a_disk_that_others_fill_costs_no_checkpoint_that_was_there(home, mounted, called):
    """Room for three checkpoints of 0.34 MB until step 5, then for less than two: the run goes on."""
    small = mounted("small", "size=1100k")
    done = train_with(home, before_step(5, "open('small/others', 'wb').write(bytes(500_000))"), "small/run")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "but for its last checkpoint" in done.stderr
    assert "the run goes on, and the checkpoints before it are still there" in done.stdout
    run = RunFolder(small / "run")
    facts, _ = checkpoint.newest(run)
    assert facts["step"] == 3
    assert not run.unfinished_checkpoints()
    assert log(run.path, "step")[-1]["step"] == STEPS
    subprocess.run(["mount", "-o", "remount,size=20m", small], check=True)
    command = done.stderr.partition("go on with: ")[2]
    code, out, err = called(home, *shlex.split(command))
    assert code == 0, err
    assert f"resuming after step {facts['step']}" in out


@pytest.mark.parametrize(("room", "is_best_kept"), [(3.6, True), (2.2, False)])
def test_a_run_with_room_for_two_checkpoints_goes_on_to_its_end(home, mounted, called, room, is_best_kept):
    """Validation rises from the first evaluation on (the steps' random tokens can't be learned), so that four would be there
    while one is written: the oldest goes before, and the best only where there is no room for three."""
    one = sum(f.stat().st_size for f in next(RunFolder(home / "whole").checkpoints.iterdir()).iterdir())
    small = mounted(f"room-{room}", f"size={int(room * one) + 100_000}")
    code, out, err = called(home, "train", *run_options(f"{small.name}/run"))
    assert code == 0, err
    assert "warning: disk: " in out
    assert "newest 2 and the best are kept while the next is written" in " ".join(out.split())
    losses = {line["step"]: line["val_loss"] for line in log(small / "run", "eval")}
    assert losses[STEPS] > losses[10]
    steps = RunFolder(small / "run").checkpoint_steps()
    assert steps[-1] == STEPS
    assert checkpoint.newest(RunFolder(small / "run"))[0]["step"] == STEPS
    assert (len(steps) == 3) is is_best_kept
    assert ("no room to keep" in out) is not is_best_kept
    assert receipt(small / "run")["checkpoint_failures"] == 0


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
