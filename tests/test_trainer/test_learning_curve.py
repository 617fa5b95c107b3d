"""Logs that others read: CSV, pictures, TensorBoard's event files, also of a run that was killed and went on."""

import csv
import io
import json
import math

import pytest
from helpers.made import make_plan, make_record, write_records

from spillcliff.errors import UserError
from trainer.config import StepConfig
from trainer.run import learning_curve
from trainer.run.log import RunLog
from trainer.run.tensorboard import EventFiles
from trainer.run_folder import RunFolder

PNG = b"\x89PNG\r\n\x1a\n"


def step(n, loss=None, step_s=0.5):
    return {"kind": "step", "step": n, "at": 1.0, "loss": 10 / n if loss is None else loss, "norm": 1.5, "step_s": step_s,
            "micro_s": 0.4, "optimizer_s": 0.1, "data_s": 0.0, "log_s": 0.0, "lr": 1e-3}


def evaluation(n, loss):
    return {"kind": "eval", "step": n, "at": 1.0, "val_loss": loss, "seconds": 0.1}


@pytest.fixture
def run(tmp_path):
    """Writes a run's folder with a log of these lines and maybe a torn end; a step has 64 tokens."""
    def make(lines, torn="", name="first"):
        folder = RunFolder(tmp_path / name)
        make_plan(step=StepConfig(2, 32)).save(folder.plan)
        folder.log.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
        return folder
    return make


def test_a_curve_has_each_step_once_also_after_a_resume():
    """Killed after step 5, it went on from the checkpoint of step 3: what was logged of 4 and 5 is not what the run did."""
    lines = [evaluation(0, 5.0), *map(step, (1, 2, 3)), step(4, 99), evaluation(4, 98), step(5, 97),
             {"kind": "checkpoint", "step": 5}, step(4), evaluation(4, 2.0)]
    rows = learning_curve.rows_of(lines, 64)
    assert [(r["step"], r["tokens"]) for r in rows] == [(n, 64 * n) for n in range(5)]
    assert [r.get("loss") for r in rows] == [None, 10, 5, 10 / 3, 2.5]
    assert [r.get("val_loss") for r in rows] == [
        5.0, None, None, None, 2.0]
    assert rows[1]["tok_s"] == 128


def test_a_torn_last_line_is_told_and_left_out(run):
    said: list[str] = []
    curve = learning_curve.read(run([evaluation(0, 5.0), step(1)], '{"kind": "step", "st'), said.append)
    assert len(curve.rows) == 2
    assert len(said) == 1
    assert "line 3 is torn" in said[0]
    bad, empty = run([{"kind": 3}, step(1)], name="bad"), run([], name="empty")
    with pytest.raises(UserError, match="line 1"):
        learning_curve.read(bad)
    with pytest.raises(UserError, match="no step and no evaluation"):
        learning_curve.read(empty)


def test_what_a_killed_process_left_of_a_line_does_not_spoil_the_next(run):
    folder = run([evaluation(0, 5.0), step(1)], '{"kind": "step", "st')
    log = RunLog(folder, print)
    log.write("step", 2, loss=1.0, step_s=0.1)
    log.close()
    assert [row["step"] for row in learning_curve.read(folder).rows] == [0, 1, 2]
    assert folder.log.with_name("log.jsonl.torn").read_text() == '{"kind": "step", "st\n'


def test_the_table_says_what_the_log_says(run):
    """Every figure comes back to the last bit; a loss that was no number is told as it was."""
    lines = [evaluation(0, 5.123456789012345), step(1, 1 / 3), step(2, math.nan)]
    text = learning_curve.table([learning_curve.read(run(lines)), learning_curve.read(run(lines[:2], name="second"))])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(r["run"], r["step"]) for r in rows] == [("first", "0"), ("first", "1"), ("first", "2"), ("second", "0"),
                                                     ("second", "1")]
    assert float(rows[0]["val_loss"]) == 5.123456789012345
    assert float(rows[1]["loss"]) == 1 / 3
    assert rows[2]["loss"] == "nan"
    assert rows[0]["loss"] == ""
    assert float(rows[1]["tok_s"]) == 128


def test_smoothing_follows_the_trend():
    assert learning_curve.smoothed([3.0] * 9, 4) == pytest.approx([3.0] * 9)
    assert learning_curve.smoothed([1.0, 2.0], 0) == [1.0, 2.0]
    rising = learning_curve.smoothed([float(i) for i in range(1000)], 20)
    assert rising[-1] == pytest.approx(999 - 19.5, abs=0.1)
    assert learning_curve.middles([1.0, 100.0, 1.0, 1.0]) == [1.0] * 4


def test_commands_draw_and_tabulate(called, run, tmp_path):
    run([evaluation(0, 5.0), *map(step, range(1, 60)), evaluation(59, 0.2)], "torn")
    run([evaluation(0, 5.0)], name="$only_an-evaluation$")
    code, out, err = called(tmp_path, "train", "curve", "--run", "first", "--run", "$only_an-evaluation$", "--json")
    assert code == 0, err
    picture = tmp_path / json.loads(out)["picture"]
    assert picture == tmp_path / "first" / "curve.png"
    assert picture.read_bytes().startswith(PNG)
    code, out, err = called(tmp_path, "train", "curve", "--run", "first", "--csv", "-")
    assert len(list(csv.DictReader(io.StringIO(out)))) == 60
    assert "torn" in err
    for arguments, words in ((("--run", "$only_an-evaluation$", "--csv", "-", "--json"), "both want stdout"),
                             (("--run", "gone"), "gone")):
        code, _, err = called(tmp_path, "train", "curve", *arguments)
        assert code == 2
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert words in err


def test_records_are_shown_as_csv(called, tmp_path):
    records = [make_record(), make_record(batch=8, status="oom", why='a "quoted", one', step_s=())]
    write_records(tmp_path / "results" / records[0].device / "records.jsonl", records)
    shown = ("show", "--device", records[0].device, "--csv")
    code, out, err = called(tmp_path, "probe", *shown)
    assert code == 0, err
    assert not err
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(r["model"], r["batch"], r["status"], r["why"]) for r in rows] == [
        ("150M", "4", "fits", ""), ("150M", "8", "oom", 'a "quoted", one')]
    assert float(rows[0]["tok_s"]) == records[0].tok_s
    assert rows[1]["tok_s"] == ""
    assert called(tmp_path, "probe", *shown, "out.csv")[1] == "written to out.csv\n"
    assert (tmp_path / "out.csv").read_text() == out


def test_event_files_have_each_step_once_after_a_resume(run):
    """Read by TensorBoard itself: the killed process had written to step 5, the next goes on after step 3."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run([])
    for done, steps, factor in ((0, (1, 2, 3, 4, 5), 1), (3, (4, 5, 6), 10)):
        log = RunLog(folder, print, events=EventFiles(folder.tensorboard, done, 64))
        if not done:
            log.write("eval", 0, val_loss=5.0, seconds=0.1)
        for n in steps:
            log.write("step", n, **{k: v for k, v in step(n, n * factor).items() if k not in ("kind", "step", "at")})
        log.write("sample", steps[-1], prompt="the", text="quick", seconds=0.1)
        log.write("checkpoint", steps[-1], seconds=0.1)
        log.close()
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    points = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert points["loss/train"] == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]
    assert points["loss/validation"] == [(0, 5)]
    assert points["tok_s"] == [(n, 128) for n in range(1, 7)]
    assert set(points) == {"loss/train", "loss/validation", "tok_s", "lr", "gradient_norm"}
    assert "sample/the/text_summary" in events.Tags()["tensors"]
