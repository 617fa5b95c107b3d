"""A soak ends when the speed has settled and not before, says what was lost, and keeps what it saw however it ends."""

import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from probe.cell import Cell
from probe.soak import Soak, Window, lines, load, settled
from trainer.config import ModelConfig, OptimizerConfig, StepConfig
from trainer.device import cpu_name, slug
from trainer.errors import UserError
from trainer.plan import Plan, Predicted, Span

SPAN = Span(1.0, 2.0, 3.0)


def windows(minutes, step_s, temperature_c=lambda t: None, every_s=5.0):
    return [Window(t, 5, step_s(t), temperature_c=temperature_c(t))
            for t in (every_s * i for i in range(1, int(minutes * 60 / every_s) + 1))]


def end(series, asked_s=3600.0):
    """Seconds after which it counts as settled; None if it never does."""
    return next((series[i].at_s for i in range(len(series)) if settled(series[:i + 1], asked_s)), None)


def soak(series, **other) -> Soak:
    values = dict(schema=1, at="2026-01-01T00:00:00+00:00", device="gtx", software={"torch": "2.11"},
                  cell=Cell("150M", 4, 512), minutes=10.0, seconds=series[-1].at_s, windows=tuple(series), settled=True)
    return Soak(**(values | other))


def test_a_steady_speed_settles_after_two_minutes_and_not_before():
    steady = windows(10, lambda t: 0.9)
    assert end(steady) == 120.0
    assert end(windows(1, lambda t: 0.9, every_s=0.5), asked_s=30.0) == 10.0
    assert soak(steady).factor == 1.0


def test_a_slow_warming_is_followed_to_its_end():
    """Time constant 3 minutes, 12% lost: it ends within 0.7% of where it leads."""
    series = windows(30, lambda t: 0.9 * (1.12 - 0.12 * math.exp(-t / 180)), lambda t: 80 - 40 * math.exp(-t / 180))
    at = end(series)
    assert at and soak([w for w in series if w.at_s <= at]).settled_s == pytest.approx(0.9 * 1.12, rel=0.007)


def test_rising_heat_is_not_settled_even_while_the_speed_holds():
    series = windows(10, lambda t: 0.9, lambda t: 40 + t / 20)
    assert end(series) is None


def test_a_throttle_s_swings_are_not_taken_for_the_level_they_start_from():
    """Full speed for a minute, then 20 s at 1.4 times and 20 s at 1.0: the mean is 1.2."""
    series = windows(30, lambda t: 0.9 * (1.4 if t > 60 and t % 40 < 20 else 1.0))
    at = end(series)
    if at:
        assert soak([w for w in series if w.at_s <= at]).settled_s == pytest.approx(0.9 * 1.2, rel=0.03)


def test_noise_is_no_drift():
    noise = random.Random(1)
    series = windows(10, lambda t: 0.9 * math.exp(noise.gauss(0, 0.03)))
    assert end(series) is not None


def test_steps_longer_than_a_window_settle_too():
    series = windows(20, lambda t: 40.0, every_s=40.0)
    assert end(series, asked_s=1200.0) is not None


def test_fresh_is_the_first_twenty_seconds_and_warm_the_last_fifth():
    s = soak(windows(10, lambda t: 1.0 if t <= 20 else 2.0 if t < 450 else 1.2))
    assert (s.first_s, s.settled_s, s.factor) == (1.0, 1.2, 1.2)
    powered = soak([dataclasses.replace(w, power_w=90.0) for w in s.windows])
    assert powered.power_w == 90.0 and powered.energy_wh == pytest.approx(15.0) and s.energy_wh is None


def test_what_it_says_names_the_loss_the_readings_and_the_cause():
    series = [dataclasses.replace(w, clock_mhz=1700 - i, power_w=80.0, throttle=0x21)
              for i, w in enumerate(windows(10, lambda t: 0.9 if t <= 60 else 1.0, lambda t: 50 + t / 20))]
    said = "\n".join(lines(soak(series, settled=False, on_battery=True)))
    for words in ("2,276 tok/s at first", "2,048 (-10.0%)", "clock: 1700 to 1581", "50 to 80 degrees", "slowed by: heat",
                  "Wh", "battery", "had not settled"):
        assert words in said


def test_a_soak_comes_back_as_it_was_written():
    s = soak(windows(3, lambda t: 0.9, lambda t: 60.0))
    assert Soak.from_json(json.loads(json.dumps(s.to_json()))) == s
    assert Soak.from_json(s.to_json() | {"windows": [dataclasses.asdict(w) for w in s.windows], "new": 1}) == s


@pytest.mark.parametrize("change", [
    {"schema": 2}, {"schema": None}, {"windows": []}, {"windows": None}, {"windows": [1]}, {"windows": [{"at_s": 1}]},
    {"windows": [{"at_s": 1, "steps": 1, "step_s": 0}]}, {"windows": [{"at_s": 1, "steps": 1, "step_s": float("nan")}]},
    {"windows": [{"at_s": 1, "steps": 1, "step_s": 1, "power_w": "hot"}]}, {"cell": {}}, {"minutes": -1}, {"settled": 1},
    {"software": []}, {"at": 3}, {"device": None}])
def test_damage_is_told_in_one_line(tmp_path, change):
    path = tmp_path / "soak.jsonl"
    values = json.loads(json.dumps(soak(windows(1, lambda t: 0.9)).to_json()))
    path.write_text(json.dumps(values | change) + "\n")
    with pytest.raises(UserError, match="soak.jsonl, line 1: ") as e:
        load(path)
    assert "\n" not in str(e.value)


def plan(tmp_path, device=None):
    Plan(1, "2026-01-01T00:00:00+00:00", device or slug(f"cpu {cpu_name()}"), ModelConfig.named("1M", 500),
         StepConfig(2, 32), 1000, 1, 32, OptimizerConfig(1e-3), 10, 10, 10**9, Predicted(SPAN, SPAN, SPAN), [], [], [], "",
         {}).save(tmp_path / "plan.json")


def test_a_soak_on_the_processor(command, tmp_path):
    plan(tmp_path)
    done = command("probe", "soak", "--plan", "plan.json", "--minutes", "0.1", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    (kept,) = load(next((tmp_path / "results").glob("*/soak.jsonl")))
    assert kept.factor == pytest.approx(out["factor"]) and kept.cell == Cell("1M", 2, 32, vocab=500)
    assert len(kept.windows) >= 3 and "tok/s at first" in done.stderr


def test_a_plan_for_another_device_is_refused(refused, tmp_path):
    plan(tmp_path, "nvidia-geforce-gtx-1060")
    assert "nvidia-geforce-gtx-1060" in refused(2, "probe", "soak", "--plan", "plan.json", "--device", "cpu")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT to a process group")
def test_an_interrupted_soak_keeps_what_it_saw(tmp_path):
    plan(tmp_path)
    run = subprocess.Popen([sys.executable, "-m", "probe.cli", "soak", "--plan", "plan.json", "--minutes", "0.5", "--device",
                            "cpu"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True)
    seen = iter(run.stdout.readline, "")
    next(line for line in seen if " tok/s" in line)
    time.sleep(4)  # several windows of half a second
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    (kept,) = load(next((tmp_path / "results").glob("*/soak.jsonl")))
    assert not kept.settled and len(kept.windows) >= 3
