"""A run can't be lost: every damage to a checkpoint is noticed, whatever kills a run it goes on bit for bit, a full disk
costs no checkpoint that was there, and other data than it was started on is refused."""

import json
import random
import resource
import sys

import pytest
import torch
from helpers.runs import STEPS, end_state, kill_and_go_on, make_home, open_run, train, train_with

from spillcliff.errors import UserError
from trainer import checkpoint


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("runs"))


def state(value=1.0) -> dict:
    return {"model.w": torch.full((40, 30), value), "step.w": torch.tensor(3.0), "exp_avg.w": torch.zeros(1200)}


def folders(run) -> list[str]:
    return [p.name for p in checkpoint._all(run)]


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


def test_every_one_of_500_damages_is_noticed(tmp_path):
    folder = checkpoint.save(tmp_path, 7, state(), {"val_loss": 2.5, "seconds": 1.0})
    assert checkpoint.check(folder)["step"] == 7
    whole, r = {p: p.read_bytes() for p in folder.iterdir()}, random.Random(0)
    assert sorted(p.name for p in whole) == ["state.json", "state.safetensors"]
    for i in range(500):
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


def test_the_newest_whole_one_is_taken_and_the_broken_are_named(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state(step), {})
    (tmp_path / "checkpoints/step-00000003/state.safetensors").write_bytes(b"")
    (tmp_path / "checkpoints/step-00000009.tmp").mkdir()
    said = []
    facts, folder = checkpoint.newest(tmp_path, said.append)
    assert facts["step"] == 2 and float(checkpoint.Tensors(folder)["model.w"][0, 0]) == 2
    assert len(said) == 1 and "step-00000003" in said[0]
    (folder / "state.json").unlink()
    with pytest.raises(UserError, match="no usable checkpoint"):
        checkpoint.newest(tmp_path, said.append)


def test_the_best_is_kept_beside_the_newest(tmp_path):
    for step, loss in enumerate((3.0, 1.5, 2.0, float("nan"), 1.9, 1.8), 1):
        checkpoint.save(tmp_path, step, state(), {"val_loss": loss})
    assert folders(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]


def test_what_a_resume_passed_over_does_not_push_out_what_it_writes(tmp_path):
    for step in (100, 200, 300):
        checkpoint.save(tmp_path, step, state(), {})
    for step in (200, 300):
        (tmp_path / f"checkpoints/step-{step:08d}/state.json").write_text("{}")
    checkpoint.save(tmp_path, 100, state(), {})
    checkpoint.save(tmp_path, 150, state(), {})
    assert folders(tmp_path) == ["step-00000100", "step-00000150"] and checkpoint.newest(tmp_path)[0]["step"] == 150


def test_a_folder_left_by_a_kill_is_removed_by_the_next_save(tmp_path):
    (tmp_path / "checkpoints/step-00000007.tmp").mkdir(parents=True)
    checkpoint.save(tmp_path, 8, state(), {})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000008"]


def test_a_disk_without_room_costs_nothing_that_was_there(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, state(), {})
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(UserError, match="takes .* and .* are free"):
        checkpoint.save(tmp_path, 2, state(), {})
    assert folders(tmp_path) == ["step-00000001"] and checkpoint.newest(tmp_path)[0]["step"] == 1


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_run_goes_on_bit_for_bit_and_takes_nothing_broken(home, request):
    """SIGKILL at random moments, saves included (a checkpoint every third step); `--kills 200` for more."""
    kill_and_go_on(home, request.config.getoption("--kills"), 0.4)


def test_a_resumed_run_takes_no_more_memory_than_a_start(home):
    assert train(home, "part").returncode == 0
    for newest in sorted((home / "part/checkpoints").iterdir())[-1:]:
        for path in newest.iterdir():
            path.unlink()
    (home / "part/receipt.json").unlink()
    assert train(home, "part", "--resume").returncode == 0
    whole, part = (json.loads((home / run / "receipt.json").read_text())["device_peak_bytes"] for run in ("whole", "part"))
    assert part <= 1.03 * whole


@pytest.mark.parametrize("option", ["--data", "--val"])
def test_other_data_is_refused_and_named(tmp_path, option):
    open_run(tmp_path, val="held.bin").go()
    other = {"data": "other.bin"} if option == "--data" else {"val": "other.bin"}
    open_run(tmp_path, val="held.bin").resume()
    with pytest.raises(UserError, match={"--data": "training crc32", "--val": "validation crc32"}[option]):
        open_run(tmp_path, **{"val": "held.bin"} | other).resume()


@pytest.mark.skipif(sys.platform == "win32", reason="a limit of a file's size")
def test_a_failed_write_is_told_and_the_run_goes_on(home):
    """Files may grow to 20 kB, less than a checkpoint or the log takes: the log loses its end."""
    done = train(home, "full", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)))
    assert done.returncode == 2 and "but for its last checkpoint" in done.stderr
    assert done.stdout.count("the run goes on, and the checkpoints") >= 3 and "with lines missing" in done.stdout
    assert f"step {STEPS}/{STEPS}" in done.stdout
    assert not (home / "full/receipt.json").exists() and not list((home / "full/checkpoints").iterdir())


BROKEN = """
import itertools
from trainer import step
calls, real = itertools.count(1), step.TrainStep._forward_backward
step.TrainStep._forward_backward = lambda self, *a: real(self, *a) * (float("nan") if next(calls) == 51 else 1)
"""


def test_a_loss_that_is_no_number_names_the_step_its_windows_and_the_last_good_checkpoint(home):
    """The 51st micro-step is the first of step 26; checkpoints come every third step."""
    done = train_with(home, BROKEN, "broken")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    for words in ("loss nan", "at step 26", "windows 100 to 103", "epoch 0", "step-00000024", "lower lr"):
        assert words in done.stderr
    assert checkpoint.newest(home / "broken")[0]["step"] == 24


def test_a_host_without_memory_for_the_copy_is_a_failed_write(tmp_path, monkeypatch):
    """What is on a device is copied to the host first: the run goes on, and a later copy is tried again."""
    said, real = [], torch.empty

    def refuse(*shape, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to")

    saver = checkpoint.Saver(tmp_path, said.append)
    there = {"model.a": real(3, device="meta")}
    monkeypatch.setattr(torch, "empty", refuse)
    saver.save(1, there, {})
    saver.wait()
    assert saver.failures == 1 and "no checkpoint: the host has no" in saver.last_failed
    assert said == [f"{saver.last_failed}; the run goes on, and the checkpoints before it are still there"]
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_killed_in_its_first_save_starts_anew(home):
    """What it left is no checkpoint: there is nothing to resume from, so that a start must do."""
    left = home / "first" / "checkpoints" / "step-00000003.tmp"
    left.mkdir(parents=True)
    (left / "state.safetensors").write_bytes(b"half")
    done = train(home, "first")
    assert done.returncode == 0, done.stderr
    assert not left.exists() and end_state(home / "first") == end_state(home / "whole")
