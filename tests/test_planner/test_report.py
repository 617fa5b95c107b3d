"""Every way of asking for a plan, through the real command: words, one object of JSON, the page and its pictures."""

import dataclasses
import json
import resource
import subprocess
import sys

import pytest
from helpers.made import SAMPLES, gtx1060, make_cliff, make_plan, make_record, write_records
from helpers.page_data import make_soak

from planner.decide.choose import Candidate
from planner.report.page_data import pick_of
from probe.soak import append
from spillcliff.files import write_json
from spillcliff.hardware.fingerprints import cpu_name, slug
from trainer.config import ModelConfig, StepConfig
from trainer.plan import Plan

GTX = "nvidia-geforce-gtx-1060"
CASE = json.loads((SAMPLES / "gtx1060.json").read_text())


def of(model, batch, tok_s, peak, **other):
    return make_record(batch, tok_s=tok_s, peak=peak, cell=dataclasses.replace(make_record(batch).cell, model=model),
                       model=ModelConfig.named(model), **other)


@pytest.fixture
def home(tmp_path):
    """results/ of the first user's card: two sizes, a cliff, a finished run and a soak."""
    folder = tmp_path / "results" / GTX
    smaller = [of("50M", b, t, p, energy_j=80 * 5 * b * 512 / t) for b, t, p in ((4, 6200, 1.6e9), (8, 6300, 2.3e9))]
    write_records(folder / "records.jsonl", [*gtx1060(), *smaller])
    make_cliff("collapse", 4.96e9, 5.0e9).save(folder / "cliff.json")
    return tmp_path


def ask(command, *arguments, code=0):
    done = command("plan", *arguments, "--device", GTX, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout), done.stderr


def test_sizes_side_by_side_and_the_first_is_planned(command, home):
    out, words = ask(command, "--corpus", "100M", "--model", "150M,50M")
    assert out["model"]["name"] == "150M"
    assert list(out["models"]) == ["150M", "50M"]
    assert out["models"]["50M"]["predicted"]["hours"]["mid"] < out["predicted"]["hours"]["mid"] / 2
    assert "tok/par" in words
    assert "0.66" in words
    assert Plan.load(home / "results/plan.json").model.name == "150M"


def test_several_sizes_measured_and_none_named_is_asked_back(refused, home):
    line = refused(2, "plan", "--corpus", "100M", "--device", GTX)
    assert "--model 150M,50M" in line


def test_hours_say_how_many_tokens_and_whether_that_is_few(command, home):
    out, words = ask(command, "--hours", "12", "--model", "150M")
    assert out["predicted"]["hours"]["mid"] == pytest.approx(12, rel=0.01)
    assert out["corpus_tokens"] == pytest.approx(12 * 3600 * 2269, rel=0.01)
    assert "0.65 a parameter, few" in words
    assert "2203.15556" not in words
    assert "Hoffmann" in words
    _, words = ask(command, "--hours", "2000", "--model", "50M")
    assert "a parameter, many" in words or "about right" in words


def test_energy_is_told_where_power_was_read(command, home):
    out, words = ask(command, "--corpus", "100M", "--model", "50M")
    assert out["energy_kwh"] == pytest.approx(80 * out["predicted"]["hours"]["mid"] / 1000)
    assert "kWh" in words
    out, words = ask(command, "--corpus", "100M", "--model", "150M")
    assert out["energy_kwh"] is None
    assert "kWh" not in words


def test_where_nothing_fits_what_would_is_estimated_and_said_so(refused, home):
    line = refused(3, "plan", "--corpus", "100M", "--model", "150M", "--limit", "3.6GB", "--device", GTX)
    assert "4.04 GB is over the 3.6 GB limit" in line
    assert "By estimate, not measured" in line
    assert "150M B=1 L=512" in line or "150M B=2 L=512" in line
    assert "recompute" in line
    assert "probe grid --model 150M --batch" in line
    assert not (home / "results/plan.json").exists()


def test_past_runs_are_shown_and_counted(command, home):
    ask(command, "--corpus", "100M", "--model", "150M", "--out", "results/runs/first/plan.json")
    before, _ = ask(command, "--corpus", "100M", "--model", "150M")
    write_json(home / "results/runs/first/receipt.json", {
        "ran_on": GTX, "software": {}, "planned": {}, "actual": {}, "start_up_s": 12.0,
        "ratio": {"tok_s": 0.9, "peak_bytes": 1.01, "hours": 1.12}})
    after, words = ask(command, "--corpus", "100M", "--model", "150M")
    assert after["predicted"]["hours"]["mid"] == pytest.approx(before["predicted"]["hours"]["mid"] / 0.92, rel=0.01)
    assert after["calibration"]["receipts"] == 1
    assert "-10.0%" in words
    assert "1 past run" in words


def test_a_soak_is_counted(command, home):
    before, _ = ask(command, "--corpus", "100M", "--model", "150M")
    warm = dataclasses.replace(make_soak(step_s=lambda i: 1.0 if i else 0.9), device=GTX)
    append(home / "results" / GTX / "soak.jsonl", warm)
    after, words = ask(command, "--corpus", "100M", "--model", "150M")
    assert after["predicted"]["hours"]["mid"] == pytest.approx(before["predicted"]["hours"]["mid"] / 0.9, rel=0.01)
    assert "soak" in words


def test_records_of_another_build_are_pointed_out(command, tmp_path):
    here = slug(f"cpu {cpu_name()}")
    write_records(tmp_path / "results" / here / "records.jsonl", [make_record(device=here, software={"torch": "1.0"})])
    done = command("plan", "--corpus", "1M", "--limit", "5GB", "--device", here)
    assert done.returncode == 0
    assert "note: measured with torch 1.0 (now " in done.stdout


def test_the_first_users_card_through_words_json_and_the_page(command, home):
    out, _ = ask(command, "--corpus", "100M", "--model", "150M")
    assert {size: round(span["mid"], 1) for size, span in out["hours"].items()} == CASE["expected"]["hours"]
    done = command("plan", "report", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    page = (home / made["out"]).read_text(encoding="utf-8")
    for text in ("B=4 L=512", "12.2 h", "5.67 GB is over the 5.1 GB limit", "2,269", "1,067", "spilled", "5.26 GB", "50M"):
        assert text in page, text
    assert sorted(p.rpartition("/")[2] for p in made["pictures"]) == ["hours.png", "sizes.png"]
    assert all((home / p).stat().st_size > 5000 for p in made["pictures"])


def test_without_a_plan_the_page_shows_what_was_measured(command, home):
    done = command("plan", "report", "--device", GTX)
    assert done.returncode == 0, done.stderr
    page = (home / "results/report.html").read_text(encoding="utf-8")
    assert "no plan was made yet" in page
    assert "2,269" in page


def test_a_plan_whose_record_is_gone_is_still_shown(command, home):
    ask(command, "--corpus", "100M", "--model", "150M")
    write_records(home / "results" / GTX / "records.jsonl", [of("50M", 4, 6200, 1.6e9)])
    done = command("plan", "report")
    assert done.returncode == 0, done.stderr
    assert "is not there" in (home / "results/report.html").read_text(encoding="utf-8")


def test_the_page_takes_the_record_that_the_plan_was_made_from():
    """A plan of accumulation 4 comes from a measured accumulation above 1, never from none."""
    plan = make_plan(GTX, model=ModelConfig.named("150M"), step=StepConfig(4, 512, 4))
    none, eight, three = (make_record(4, 512, accum=a) for a in (1, 8, 3))
    assert pick_of(plan, [none]) is None
    assert pick_of(plan, [none, eight]) == Candidate(eight, 4)
    assert pick_of(plan, [none, eight, three]) == Candidate(three, 4)


@pytest.mark.parametrize(("arguments", "words"), [
    (["report", "--plan", "gone.json"], "gone.json"), (["--corpus", "1M", "report"], "--corpus does not go with"),
    (["report", "--device", "tpu"], GTX), (["report", "--out", "results"], "results")])
def test_bad_input_of_the_report_is_one_line(refused, home, arguments, words):
    if "--out" in arguments:
        arguments += ["--device", GTX]
    assert words in refused(2, "plan", *arguments)


SCALE = """
import json, sys
base = json.load(open("one.json"))
with open("all.jsonl", "w") as f:
    for device in range(50):
        for i in range(2000):
            batch, length = 1 + i % 40, 128 * (1 + i // 40 % 8)
            tokens = batch * length
            cell = base["cell"] | {"batch": batch, "length": length, "engine": ("eager", "graph")[i // 320 % 2],
                                   "recompute": ("none", "block", "elementwise")[i // 640 % 3]}
            fits = tokens < 25_000
            f.write(json.dumps(base | {"device": f"card-{device}", "cell": cell, "status": "fits" if fits else "spills",
                "step_s": [(0.01 + tokens / 30_000 + i % 7 / 1000) * (1 if fits else 4)] * 9,
                "device_peak_bytes": int(2.4e9 + 7e5 * tokens)}) + "\\n")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of memory by setrlimit")
def test_a_hundred_thousand_records_of_fifty_devices_plan_in_half_a_gigabyte(command, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(make_record(8, 512).to_json()))
    subprocess.run([sys.executable, "-c", SCALE], cwd=tmp_path, check=True)
    done = command("plan", "--corpus", "100M", "--records", "all.jsonl", "--device", "card-7", "--limit", "30GB", "--json",
                   preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (500_000_000, 500_000_000)))
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["device"] == "card-7"
    assert out["rejected"]
