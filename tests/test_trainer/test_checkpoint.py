"""A run can't be lost: every damage to a checkpoint is noticed, whatever kills a run it goes on bit for bit, a full disk
costs no checkpoint that was there, and other data than it was started on is refused."""

import itertools
import json
import os
import random
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import STEPS, end_state, kill_and_go_on, log, open_run, receipt, train

from spillcliff.errors import UserError
from trainer import checkpoint
from trainer.run.saver import Saver
from trainer.run.step import TrainStep
from trainer.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


def state(value=1.0) -> dict:
    return {"model.w": torch.full((40, 30), value), "step.w": torch.tensor(3.0), "exp_avg.w": torch.zeros(1200)}


def damaged(data: bytes, r: random.Random) -> bytes:
    """Truncated, emptied, lengthened, or with one to three bits flipped."""
    kind = r.randrange(6)
    if kind == 0:
        return b""
    if kind == 1:
        return data[:r.randrange(len(data))]
    if kind == 2:
        return data + r.randbytes(r.randint(1, 9))
    out = bytearray(data)
    for place in r.sample(range(8 * len(data)), r.randint(1, 3)):
        out[place // 8] ^= 1 << place % 8
    return bytes(out)


def test_every_damage_is_noticed(run, long):
    folder = checkpoint.save(run, 7, state(), {"val_loss": 2.5, "seconds": 1.0})
    assert checkpoint.check(folder)["step"] == 7
    whole, r = {p: p.read_bytes() for p in folder.iterdir()}, random.Random(0)
    assert sorted(p.name for p in whole) == ["state.json", "state.safetensors"]
    for i in range(2000 if long else 200):
        path = sorted(whole)[i % 2]
        path.write_bytes(damaged(whole[path], r))
        if json_alike(path, whole[path]):
            path.write_bytes(whole[path])
            continue
        with pytest.raises(UserError) as e:
            checkpoint.check(folder)
        assert "\n" not in str(e.value)
        path.write_bytes(whole[path])
    for path in whole:
        path.unlink()
        with pytest.raises(UserError):
            checkpoint.check(folder)
        path.write_bytes(whole[path])
    assert checkpoint.check(folder)["step"] == 7


def json_alike(path, data: bytes) -> bool:
    """Whether a damage left the same facts: a space that became a tab, say."""
    if path.suffix != ".json":
        return False
    try:
        return json.loads(path.read_bytes()) == json.loads(data)
    except ValueError:
        return False


def test_the_newest_whole_one_is_taken_and_the_broken_are_named(run):
    for step in (1, 2, 3):
        checkpoint.save(run, step, state(step), {})
    (run.checkpoint(3) / checkpoint.STATE).write_bytes(b"")
    (run.checkpoints / "step-00000009.tmp").mkdir()
    said: list[str] = []
    facts, folder = checkpoint.newest(run, said.append)
    assert facts["step"] == 2
    assert float(checkpoint.Tensors(folder)["model.w"][0, 0]) == 2
    assert len(said) == 1
    assert "step-00000003" in said[0]
    (folder / checkpoint.FACTS).unlink()
    with pytest.raises(UserError, match="no usable checkpoint"):
        checkpoint.newest(run, said.append)


def test_the_best_is_kept_beside_the_newest(run):
    for step, loss in enumerate((3.0, 1.5, 2.0, float("nan"), 1.9, 1.8), 1):
        checkpoint.save(run, step, state(), {"val_loss": loss})
    assert run.checkpoint_steps() == [2, 5, 6]


def test_of_checkpoints_between_two_evaluations_the_latest_is_the_best(run):
    """They bear the loss of the same evaluation."""
    for step, loss in enumerate((1.5, 1.5, 1.5, 2.0, 2.0), 1):
        checkpoint.save(run, step, state(), {"val_loss": loss})
    assert run.checkpoint_steps() == [3, 4, 5]
    assert checkpoint.select(run, "best")[0]["step"] == 3


def test_one_is_selected_by_its_step_or_by_the_lowest_loss_and_what_is_not_there_is_told(run):
    for step, loss in ((3, 1.0), (6, 2.0)):
        checkpoint.save(run, step, state(), {"val_loss": loss})
    for which, step in (("newest", 6), ("best", 3), ("step-3", 3), ("step-00000006", 6), ("3", 3)):
        assert checkpoint.select(run, which)[0]["step"] == step
    for which, words in (("last", "newest or step-N, such as step-6"), ("step-x", "step-N"), ("step-4", "step-3, step-6")):
        with pytest.raises(UserError, match=words):
            checkpoint.select(run, which)
    (run.checkpoint(3) / checkpoint.STATE).write_bytes(b"")
    said: list[str] = []
    assert checkpoint.select(run, "best", said.append)[0]["step"] == 6
    assert len(said) == 1
    with pytest.raises(UserError, match=r"step-00000003 is broken"):
        checkpoint.select(run, "step-3")


def test_what_a_resume_passed_over_does_not_push_out_what_it_writes(run):
    for step in (100, 200, 300):
        checkpoint.save(run, step, state(), {})
    for step in (200, 300):
        (run.checkpoint(step) / checkpoint.FACTS).write_text("{}")
    checkpoint.save(run, 100, state(), {})
    checkpoint.save(run, 150, state(), {})
    assert run.checkpoint_steps() == [100, 150]
    assert checkpoint.newest(run)[0]["step"] == 150


def test_a_folder_left_by_a_kill_is_removed_by_the_next_save(run):
    (run.checkpoints / "step-00000007.tmp").mkdir(parents=True)
    checkpoint.save(run, 8, state(), {})
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000008"]


FOREIGN = ("step-old", "step-12", "step-000000012", "step-00000012 - Copy", "step-00000012.tmp.old", "step-old.tmp",
           "step-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0662", "step-00000099")


def test_what_somebody_put_beside_the_checkpoints_is_neither_resumed_from_nor_removed(run):
    """Copies under other names, digits that are not ASCII, a copy under a name like ours, and a file."""
    checkpoint.save(run, 12, state(), {"val_loss": 0.1})
    for name in FOREIGN:
        shutil.copytree(run.checkpoint(12), run.checkpoints / name)
    (run.checkpoints / "step-00000098").write_text("mine")
    (run.checkpoints / "step-00000011.tmp").mkdir()
    for step in (15, 18, 21):
        checkpoint.save(run, step, state(), {"val_loss": 1.0})
    said: list[str] = []
    assert checkpoint.newest(run, said.append)[0]["step"] == 21
    assert said == ["checkpoint step-00000099 is a copy of that of step 12 and passed over"]
    assert checkpoint.select(run, "best")[0]["step"] == 12
    with pytest.raises(UserError, match="a copy of that of step 12"):
        checkpoint.select(run, "99")
    ours = {f"step-{step:08d}" for step in (12, 18, 21)}
    assert run.checkpoint_steps() == [12, 18, 21, 99]
    assert {p.name for p in run.checkpoints.iterdir()} == ours | {*FOREIGN, "step-00000098"}


def test_a_resume_is_from_the_highest_step_whatever_lies_beside(home):
    """By the command: a copy of an earlier one, newer by its time and its name."""
    shutil.copytree(home / "whole", home / "copied")
    part = RunFolder(home / "copied")
    part.receipt.unlink()
    shutil.rmtree(part.checkpoint(STEPS))
    newest = part.checkpoint_steps()[-1]
    shutil.copytree(part.checkpoint(part.checkpoint_steps()[-2]), part.checkpoints / "step-old")
    done = train(home, "copied", "--resume")
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {newest}" in done.stdout
    assert end_state(part.path) == end_state(home / "whole")
    assert (part.checkpoints / "step-old" / checkpoint.STATE).is_file()


@pytest.mark.parametrize(("steps", "best", "written", "goes"), [
    ([3, 6], 3, 9, 3), ([3, 6, 9], 3, 12, 6), ([3, 6, 9], 9, 12, 3), ([3, 6, 9], None, 12, 3), ([3], 3, 6, None),
    ([], None, 3, None), ([3, 30], 3, 6, 30), ([3, 30], 3, 30, 3)])
def test_without_room_the_oldest_goes_then_the_best_and_never_the_newest(steps, best, written, goes):
    assert checkpoint.next_to_go(steps, best, written) == goes


@pytest.mark.parametrize(("error", "is_full"), [
    (OSError(28, "No space left on device"), True), (OSError(13, "Permission denied"), False), (ValueError("no"), False),
    (RuntimeError("Error while serializing: I/O error: There is not enough space on the disk. (os error 112)"), True),
    (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), False)])
def test_only_for_want_of_room_does_an_old_one_go(run, monkeypatch, error, is_full):
    for step in (1, 2):
        checkpoint.save(run, step, state(), {})

    def fails(*arguments):
        raise error

    monkeypatch.setattr(checkpoint, "_write", fails)
    with pytest.raises(UserError, match="can't write checkpoint"):
        checkpoint.save(run, 3, state(), {})
    assert run.checkpoint_steps() == ([2] if is_full else [1, 2])


def test_a_disk_that_is_full_when_the_facts_are_written_is_full(run, monkeypatch):
    for step in (1, 2):
        checkpoint.save(run, step, state(), {})
    calls, real = itertools.count(1), os.fsync

    def full_once(handle):
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full_once)
    checkpoint.save(run, 3, state(), {})
    assert run.checkpoint_steps() == [2, 3]


def test_a_disk_without_room_costs_nothing_that_was_there(run, monkeypatch):
    checkpoint.save(run, 1, state(), {})
    usage = shutil.disk_usage(run.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(UserError, match=r"takes .* and .* are free"):
        checkpoint.save(run, 2, state(), {})
    assert run.checkpoint_steps() == [1]
    assert checkpoint.newest(run)[0]["step"] == 1


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_run_goes_on_bit_for_bit_and_takes_nothing_broken(home, kills):
    """SIGKILL at random moments, saves included (a checkpoint every third step); `--long` for more."""
    kill_and_go_on(home, kills, 0.4)


def test_a_resumed_run_takes_no_more_memory_than_a_start(home):
    """What a run holds that goes on from a whole run's last checkpoint but one, beside that run."""
    shutil.copytree(home / "whole", home / "part")
    part = RunFolder(home / "part")
    part.receipt.unlink()
    shutil.rmtree(part.checkpoint(part.checkpoint_steps()[-1]))
    done = train(home, "part", "--resume")
    assert done.returncode == 0, done.stderr
    assert end_state(part.path) == end_state(home / "whole")
    assert receipt(part.path)["device_peak_bytes"] <= 1.03 * receipt(home / "whole")["device_peak_bytes"]


@pytest.mark.parametrize(("changed", "words"), [
    ({"data": "other.bin"}, "training crc32"), ({"val": "other.bin"}, "validation crc32")])
def test_other_data_is_refused_and_named(tmp_path, changed, words):
    def opened(data="data.bin", val="held.bin"):
        return open_run(tmp_path, data=data, val=val)

    opened().train()
    opened().resume()
    other = opened(**changed)
    with pytest.raises(UserError, match=words):
        other.resume()


@pytest.mark.skipif(sys.platform == "win32", reason="a limit of a file's size")
def test_a_failed_write_is_told_and_the_run_goes_on(home):
    """Files may grow to 10 kB, less than a checkpoint or the log takes: the log loses its end."""
    import resource

    done = train(home, "full", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)))
    assert done.returncode == 2
    assert "but for its last checkpoint" in done.stderr
    assert done.stdout.count("the run goes on, and the checkpoints") >= 3
    assert "with lines missing" in done.stdout
    assert f"step {STEPS}/{STEPS}" in done.stdout
    run = RunFolder(home / "full")
    assert not run.receipt.exists()
    assert not list(run.checkpoints.iterdir())


def test_a_loss_that_is_no_number_names_the_step_its_windows_and_the_last_good_checkpoint(tmp_path, monkeypatch):
    """The 51st micro-step is the first of step 26; checkpoints come every third step."""
    calls, real = itertools.count(1), TrainStep._forward_backward
    monkeypatch.setattr(TrainStep, "_forward_backward",
                        lambda self, *a: real(self, *a) * (float("nan") if next(calls) == 51 else 1))
    run = open_run(tmp_path, 90, 3)
    with pytest.raises(UserError, match="lower lr") as stopped:
        run.train()
    for words in ("loss nan", "at step 26", "windows 100 to 103", "epoch 0", "step-00000024"):
        assert words in str(stopped.value)
    assert checkpoint.newest(run.folder)[0]["step"] == 24
    assert log(run.folder.path, "step")[-1]["step"] == 26


def test_a_host_without_memory_for_the_copy_is_a_failed_write(run, monkeypatch):
    """What is on a device is copied to the host first: the run goes on, and a later copy is tried again."""
    said: list[str] = []
    on_device = {"model.a": torch.empty(3, device="meta")}

    def refuse(*shape, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to")

    saver = Saver(run, said.append)
    monkeypatch.setattr(torch, "empty", refuse)
    saver.save(1, on_device, {})
    saver.wait()
    assert saver.failures == 1
    assert saver.last_failure is not None
    assert "no checkpoint: the host has no" in saver.last_failure
    assert said == [f"{saver.last_failure}; the run goes on, and the checkpoints before it are still there"]
    assert not run.checkpoints.exists()


def test_a_failed_write_is_forgotten_when_the_next_one_is_through(run, monkeypatch):
    """The run's end asks for it: what is on disk then is whole, and nothing need be gone on with."""
    saver = Saver(run, lambda line: None)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10, used=10, free=0))
        saver.save(1, state(), {})
    assert (saver.failures, saver.last_failure is None) == (1, False)
    saver.save(2, state(), {})
    assert (saver.failures, saver.last_failure) == (1, None)


def test_a_run_killed_in_its_first_save_starts_anew(tmp_path):
    """What it left is no checkpoint: there is nothing to resume from, so that a start must do."""
    whole = open_run(tmp_path, name="whole")
    whole.train()
    left = whole.folder.path.with_name("killed") / "checkpoints" / "step-00000004.tmp"
    left.mkdir(parents=True)
    (left / checkpoint.STATE).write_bytes(b"half")
    again = open_run(tmp_path, name="killed")
    again.train()
    assert not left.exists()
    assert end_state(again.folder.path) == end_state(whole.folder.path)
