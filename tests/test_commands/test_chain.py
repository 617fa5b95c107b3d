"""The whole chain in real processes: text, tokens, grid, plan, run, receipt, sample; interrupted, resumed, run twice."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from helpers.made import MODULES, ROOT, there
from helpers.waiting import PATIENCE_S, wait_for

from probe.records import load

GRID = ("grid", "--model", "1M", "--vocab", "300", "--batch", "1,2", "--accum", "1", "--length", "32", "--seconds", "1")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a text, its tokens and a measured grid."""
    folder = tmp_path_factory.mktemp("chain")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog and runs away\n" * 400)
    for name, arguments in (("train", ("tokenize", "text.txt", "--out", "text.bin", "--vocab", "300")), ("probe", GRID)):
        done = call(folder, name, *arguments)
        assert done.returncode == 0, done.stderr
    done = call(folder, "plan", "--corpus", "640", "--out", "plan.json")
    assert done.returncode == 0, done.stderr
    return folder


def call(folder, name, *arguments, **options):
    return subprocess.run([sys.executable, "-m", MODULES[name], *map(str, arguments)], cwd=folder, text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=PATIENCE_S, **options)


def start(folder, name, *arguments):
    return subprocess.Popen([sys.executable, "-m", MODULES[name], *map(str, arguments)], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})


def records_file(home):
    return next(home.glob("results/*/records.jsonl"))


def steps_in(log):
    return log.read_text().count('"kind": "step"') if log.exists() else 0


def wait_for_steps(log, least, process):
    """Returns when a run has made more steps than that, or has ended."""
    wait_for(lambda: steps_in(log) > least or process.poll() is not None)


def final_state(run):
    return (sorted((run / "checkpoints").iterdir())[-1] / "state.safetensors").read_bytes()


def test_the_grid_leaves_records_facts_and_a_picture(home):
    records = load(records_file(home))
    assert [(r.cell.batch, r.status) for r in records] == [(1, "fits"), (2, "fits")]
    for r in records:
        assert len(r.step_s) >= 5
        assert len(r.warmup_s) >= 2
        assert there(r.device_peak_bytes) > 1e8
        assert there(r.micro_s) < there(r.median_step_s)
        assert r.software["torch"]
        assert there(r.free_at_start_bytes) > there(r.device_peak_bytes)
        assert there(r.eval_s) > 0
    folder = records_file(home).parent
    assert json.loads((folder / "device.json").read_text())["fingerprint"] == folder.name == records[0].device
    assert (folder / "grid-1M-eager-none-v300.png").read_bytes().startswith(b"\x89PNG")


def test_a_grid_started_again_measures_only_what_is_missing(home):
    before = records_file(home).read_text()
    done = call(home, "probe", *GRID[:-4], "--length", "32,48", "--seconds", "1", "--every-cell", "--json")
    assert done.returncode == 0, done.stderr
    assert records_file(home).read_text().startswith(before)
    assert len(load(records_file(home))) == 4
    assert done.stderr.count("measured before") == 2
    out = json.loads(done.stdout)
    assert len(out["cells"]) == 4
    assert all(c["tok_s"] > 0 for c in out["cells"])


def test_a_run_leaves_its_plan_log_checkpoints_and_receipt(home):
    done = call(home, "train", "--plan", "plan.json", "--data", "text.bin", "--run", "run", "--json")
    assert done.returncode == 0, done.stderr
    receipt, plan = json.loads((home / "run/receipt.json").read_text()), json.loads((home / "plan.json").read_text())
    assert json.loads(done.stdout)["val_loss"] == receipt["val_loss"] < receipt["first_val_loss"]
    assert set(receipt["planned"]) == set(receipt["actual"]) == set(receipt["ratio"]) == {"tok_s", "peak_bytes", "hours"}
    assert receipt["planned"]["tok_s"] == plan["predicted"]["tok_s"]["mid"]
    log = [json.loads(line) for line in (home / "run/log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in log if line["kind"] == "step"]
    assert steps == list(range(1, plan["steps"] + 1))
    evaluations = [line["step"] for line in log if line["kind"] == "eval"]
    assert evaluations[0] == 0
    assert evaluations[-1] == plan["steps"]
    assert len(list((home / "run/checkpoints").iterdir())) == 2
    assert json.loads((home / "run/plan.json").read_text()) == plan


def test_ten_steps_are_five_a_stop_and_five_bit_for_bit(home):
    """A resume that replays data, shifts the rate or forgets a moment would end elsewhere."""
    plan = json.loads((home / "plan.json").read_text())
    plan |= {"steps": 10, "eval": 5, "checkpoint": 5}
    (home / "ten.json").write_text(json.dumps(plan))
    assert call(home, "train", "--plan", "ten.json", "--data", "text.bin", "--run", "whole").returncode == 0
    shutil.copytree(home / "whole", home / "parts")
    shutil.rmtree(home / "parts/checkpoints/step-00000010")
    (home / "parts/receipt.json").unlink()
    done = call(home, "train", "--plan", "ten.json", "--data", "text.bin", "--run", "parts", "--resume")
    assert done.returncode == 0, done.stderr
    assert "resuming after step 5" in done.stdout
    assert final_state(home / "whole") == final_state(home / "parts")
    receipt = json.loads((home / "parts/receipt.json").read_text())
    assert receipt["actual"]["tok_s"] is None  # five steps are all warm-up, and rates count this process's alone


def test_a_broken_newest_checkpoint_is_named_and_the_one_before_taken(home):
    broken = home / "whole/checkpoints/step-00000010/state.safetensors"
    broken.write_bytes(broken.read_bytes()[:1000])
    (home / "whole/receipt.json").unlink()
    done = call(home, "train", "--plan", "ten.json", "--data", "text.bin", "--run", "whole", "--resume")
    assert done.returncode == 0, done.stderr
    assert "step-00000010 is broken" in done.stdout
    assert "resuming after step 5" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_run_stopped_at_any_moment_saves_says_how_to_go_on_and_does_bit_for_bit(home):
    """Weights and step number must be of the same moment: a stop may not cut a step in two."""
    plan = json.loads((home / "plan.json").read_text()) | {"steps": 300, "eval": 150, "checkpoint": 150}
    (home / "stops.json").write_text(json.dumps(plan))
    arguments = ("train", "--plan", "stops.json", "--data", "text.bin", "--run")
    assert call(home, *arguments, "unstopped").returncode == 0
    log = home / "stopped/log.jsonl"
    for least, how, resume in ((30, signal.SIGINT, ()), (150, signal.SIGTERM, ("--resume",))):
        process = start(home, *arguments, "stopped", *resume)
        wait_for_steps(log, least, process)
        process.send_signal(how)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err.strip()) == (130, "")
        done = int(sorted((home / "stopped/checkpoints").iterdir())[-1].name.removeprefix("step-"))
        assert f"stopped after step {done};" in out
        assert "--resume" in out
        last = json.loads(log.read_text().splitlines()[-1])
        assert (last["kind"], last["step"]) == ("checkpoint", done)
    assert call(home, *arguments, "stopped", "--resume").returncode == 0
    assert final_state(home / "stopped") == final_state(home / "unstopped")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupted_grid_keeps_what_it_measured(home, tmp_path):
    shutil.copytree(home / "results", tmp_path / "results", ignore=shutil.ignore_patterns("records.jsonl"))
    process = start(tmp_path, "probe", *GRID[:-6], "--batch", "1,2,4,8,16", "--length", "32", "--seconds", "2")
    wait_for(lambda: list(tmp_path.glob("results/*/records.jsonl")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert load(records_file(tmp_path))


def test_sampling_gives_the_prompt_and_more_and_is_a_function_of_the_seed(home, called):
    asked = ("train", "sample", "--run", "run", "--prompt", "the quick", "--tokens", 5, "--json", "--seed")
    texts = [called(home, *asked, seed) for seed in (0, 0, 1)]
    a, b, c = (json.loads(out)["text"] for _, out, _ in texts)
    assert a == b
    assert a.startswith("the quick")
    assert len(a) > len("the quick")
    assert a != c


def test_a_dry_run_writes_nothing(home):
    before = sorted(home.rglob("*"))
    done = call(home, "train", "--plan", "plan.json", "--data", "text.bin", "--dry-run")
    assert done.returncode == 0
    assert "nothing was written" in done.stdout
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(("name", "arguments", "words"), [
    ("train", ("--plan", "plan.json", "--data", "text.bin", "--run", "run"), "--resume"),
    ("train", ("--plan", "other.json", "--data", "text.bin", "--run", "unfinished", "--resume"), "another plan"),
    ("train", ("--plan", "plan.json", "--data", "text.bin", "--run", "run", "--resume"), "finished"),
    ("plan", ("--corpus", ""), "--corpus"), ("plan", ("--hours", ""), "--hours"),
    ("plan", ("--corpus", "640", "--limit", ""), "--limit"), ("plan", ("--corpus", "640", "--epochs", "nan"), "epochs"),
    ("plan", ("--corpus", "640", "--out", "."), "folder"), ("plan", ("--corpus", "640", "--device", "cuda:9"), "cuda:9"),
    ("probe", ("grid", "--model", "1M", "--batch", "\u00b2"), "--batch"),
    ("probe", ("grid", "--model", "1M", "--engine", ""), "name"),
    ("probe", ("grid", "--model", "1M", "--accum", "2", "--update", "backward"), "accum 1"),
    ("train", ("--plan", "vast.json", "--data", "text.bin", "--run", "vast"), "out of memory"),
    ("train", ("--plan", "plan.json", "--data", "text.bin", "--run", "new", "--resume"), "no run to resume"),
    ("train", ("--plan", "plan.json", "--data", "text.bin", "--resume"), "--run"),
    ("train", ("--plan", "gone.json", "--data", "text.bin"), "gone.json"),
    ("train", ("--plan", "plan.json", "--data", "gone.bin"), "gone.bin"),
    ("train", ("--plan", "plan.json", "--data", "text.txt"), "run `train tokenize text.txt --out "),
    ("train", ("--plan", "plan.json",), "--data"), ("train", ("--plan",), "--plan"),
    ("train", ("--plan", "plan.json", "--data", "text.bin", "--device", "cuda:7"), "cuda:7"),
    ("train", ("--plan", "plan.json", "--data", "text.bin", "--device", "toaster"), "toaster"),
    ("train", ("--plan", "graph.json", "--data", "text.bin", "--run", "g"), "engine graph"),
    ("train", ("--plan", "graph.json", "--data", "text.bin", "--dry-run"), "engine graph"),
    ("train", ("--plan", "small.json", "--data", "text.bin"), "past the model's vocabulary of 100"),
    ("train", ("sample", "--run", "gone", "--prompt", "x"), "gone"),
    ("train", ("tokenize", "text.txt", "--out", "text.bin"), "text.bin"),
    ("train", ("tokenize", "gone.txt", "--out", "new.bin"), "gone.txt"),
    ("train", ("frobnicate",), "frobnicate"),
    ("probe", ("grid",), "--model"), ("probe", ("grid", "--model", "huge"), "huge"),
    ("probe", ("grid", "--model", "1M", "--batch", "1,two"), "two"),
    ("probe", ("grid", "--model", "1M", "--engine", "warp"), "warp"),
    ("probe", ("grid", "--model", "1M", "--recompute", "all"), "all"),
    ("probe", ("grid", "--model", "1M", "--limit", "big"), "--limit"),
    ("probe", ("grid", "--model", "1M", "--device", "toaster"), "toaster"),
    ("probe", ("grid", "--model", "1M", "--results", "text.txt"), "text.txt"),
    ("probe", ("card", "--device", "cuda:9"), "cuda:9")])
def test_bad_input_is_one_line_that_names_it_and_nothing_is_overwritten(home, called, name, arguments, words):
    plan = json.loads((home / "plan.json").read_text())
    (home / "graph.json").write_text(json.dumps(plan | {"step": plan["step"] | {"engine": "graph"}}))
    (home / "small.json").write_text(json.dumps(plan | {"model": plan["model"] | {"vocab": 100}}))
    (home / "other.json").write_text(json.dumps(plan | {"steps": plan["steps"] + 1}))
    (home / "vast.json").write_text(json.dumps(plan | {"model": plan["model"] | {"d_ff": 2**31 - 1}}))
    (home / "unfinished/checkpoints").mkdir(parents=True, exist_ok=True)
    (home / "unfinished/plan.json").write_text(json.dumps(plan))
    kept = {p: p.read_bytes() for p in (home / "text.bin", home / "plan.json", records_file(home))}
    if name == "probe" and {"--device", "--results"} & set(arguments):  # which starts processes
        done = call(home, name, *arguments)
        code, err = done.returncode, done.stderr
    else:
        code, _, err = called(home, name, *arguments)
    assert code == 2, err
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert all(p.read_bytes() == content for p, content in kept.items())


def test_nothing_that_fits_is_exit_3(home):
    """A cell that can't be allocated: its record says oom and the grid ends with what to try. Without a limit of one's own,
    what is certain to be too much for the machine is not even begun."""
    shutil.copytree(home / "results", home / "none", ignore=shutil.ignore_patterns("records.jsonl"))
    done = call(home, "probe", "grid", "--model", "1M", "--vocab", "300", "--batch", "2000000000", "--length", "8",
                "--seconds", "1", "--results", "none")
    assert done.returncode == 3
    assert "none of 0 measured cells fits" in done.stderr
    assert not list(home.glob("none/*/records.jsonl"))
    done = call(home, "probe", "grid", "--model", "1M", "--vocab", "300", "--batch", "2000000000", "--length", "8",
                "--seconds", "1", "--results", "none", "--limit", "900TB")
    assert done.returncode == 3
    assert "--batch" in done.stderr
    (record,) = load(next(home.glob("none/*/records.jsonl")))
    assert record.status == "oom"
    assert record.why


def test_a_closed_pipe_is_no_error(home):
    done = subprocess.run(f"'{sys.executable}' -m planner.cli --corpus 640 --out p2.json | head -1", shell=True, cwd=home,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True)
    assert not done.stderr


def test_a_run_whose_reader_has_gone_goes_on_to_its_receipt(home):
    command = f"'{sys.executable}' -m trainer.cli --plan plan.json --data text.bin --run unread | head -2"
    subprocess.run(command, shell=True, cwd=home, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (home / "unread/receipt.json").exists()


def test_tables_fit_80_columns(home):
    for name, arguments in (("plan", ("--corpus", "640", "--out", "p3.json")), ("probe", GRID)):
        rows = [line for line in call(home, name, *arguments).stdout.splitlines() if "  " in line.strip()]
        assert rows
        assert not [row for row in rows if len(row) > 80]
