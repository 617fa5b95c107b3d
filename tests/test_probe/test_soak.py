"""A soak ends when the speed has settled and not before, says what was lost, and keeps what it saw however it ends."""

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
from helpers.made import ROOT, make_plan

from probe.cell import Cell
from probe.grid.session import Session
from probe.grid.soak_command import SoakRun
from probe.outcome import Outcome
from probe.soak import Soak, Window, append, lines, load, readings_of, settled
from probe.store import Store
from probe.tasks.table import DescribeDevice, Description, RunSoak, SoakProgress, Task
from probe.tasks.worker import Workers
from spillcliff.console import LiveLine
from spillcliff.errors import NoPlan, UserError
from spillcliff.hardware.device import DeviceFacts
from spillcliff.hardware.fingerprints import cpu_name, slug

HERE = slug(f"cpu {cpu_name()}")
FACTS = DeviceFacts(HERE, "AMD", "cpu", 1, None, 2, "test", "2.11", None, None, "3.11", "linux", "")


def windows(minutes, step_s, temperature_c=lambda t: None, every_s=5.0):
    return [Window(t, 5, step_s(t), temperature_c=temperature_c(t))
            for t in (every_s * i for i in range(1, int(minutes * 60 / every_s) + 1))]


def end(series, asked_s=3600.0):
    """Seconds after which it counts as settled; None if it never does."""
    return next((series[i].at_s for i in range(len(series)) if settled(series[:i + 1], asked_s)), None)


def soak(series, **other) -> Soak:
    values: dict[str, Any] = dict(schema=1, at="2026-01-01T00:00:00+00:00", device="gtx", software={"torch": "2.11"},
                  cell=Cell.of("150M", 4, 512), minutes=10.0, seconds=series[-1].at_s, windows=tuple(series), settled=True)
    return Soak(**(values | other))


def settles(series, asked_s=3600.0) -> tuple[float, float]:
    """(seconds after which it settles, seconds of a step that it settles to)."""
    at = end(series, asked_s)
    assert at, "it never settles"
    return at, soak([w for w in series if w.at_s <= at], minutes=asked_s / 60).settled_s


def warming(lost, tau_s):
    return lambda t: 0.9 * (1 + lost - lost * math.exp(-t / tau_s))


def test_a_steady_speed_settles_after_a_third_of_the_time_and_not_before():
    """Of ten minutes, or less if less was asked for, and two windows."""
    steady = windows(10, lambda t: 0.9)
    assert end(steady) == end(steady, 600.0) == 210.0
    assert end(windows(1, lambda t: 0.9, every_s=1.0), asked_s=60.0) == 22.0
    assert soak(steady).factor == 1.0


def test_a_cooling_plateau_settles_to_the_plateau():
    """Slow until the fan starts."""
    assert settles(windows(10, lambda t: 1.0 if t < 60 else 0.9))[1] == pytest.approx(0.9)


@pytest.mark.parametrize("heats", [True, False])
@pytest.mark.parametrize(("lost", "within"), [(0.05, 0.01), (0.12, 0.007)])
def test_a_slow_warming_is_followed_to_its_end(lost, within, heats):
    """A time constant of 3 minutes, on a device with a thermometer and without."""
    heat = (lambda t: 80 - 40 * math.exp(-t / 180)) if heats else lambda t: None
    assert settles(windows(30, warming(lost, 180), heat))[1] == pytest.approx(0.9 * (1 + lost), rel=within)


def test_ten_minutes_are_enough_for_a_time_constant_of_two():
    series = windows(10, warming(0.1, 120), lambda t: 80 - 40 * math.exp(-t / 120))
    assert settles(series, 600.0)[1] == pytest.approx(0.99, rel=0.005)


def test_rising_heat_is_not_settled_even_while_the_speed_holds():
    assert end(windows(10, lambda t: 0.9, lambda t: 40 + t / 20)) is None
    assert end(windows(10, lambda t: 0.9, lambda t: 80 - t / 20)) == 210.0  # a fan that wins is no reason to wait


def test_a_throttle_that_sets_in_when_the_card_is_hot_is_waited_for():
    series = windows(30, lambda t: 1.2 if t > 300 else 0.9, lambda t: 50 + 33 * min(1, t / 300))
    assert settles(series)[1] == pytest.approx(1.2)


@pytest.mark.parametrize("period_s", [10, 20, 40, 60, 90, 120, 180, 240])
@pytest.mark.parametrize("phase", [0, 0.25, 0.5, 0.75])
def test_a_throttle_s_swings_settle_to_their_mean_or_not_at_all(period_s, phase):
    """Full speed for a minute, then by turns 1.4 times as long a step and a full one. What a run of hours takes is the mean
    of the two speeds; the two levels themselves are 20% above and 14% below."""
    series = windows(30, lambda t: 0.9 * (1.4 if t > 60 and (t / period_s + phase) % 1 < 0.5 else 1.0))
    series = [dataclasses.replace(w, steps=round(5000 / w.step_s)) for w in series]
    if end(series):
        assert settles(series)[1] == pytest.approx(0.9 / ((1 + 1 / 1.4) / 2), rel=0.04)


def test_noise_neither_hides_a_warming_nor_keeps_a_steady_speed_from_settling():
    """A processor that others use, by 3% from window to window."""
    for seed in range(10):
        noise = random.Random(seed)
        noisy = windows(30, lambda t: 0.9 * math.exp(noise.gauss(0, 0.03)))  # noqa: B023
        assert settles(noisy)[1] == pytest.approx(0.9, rel=0.02)
        slower = [dataclasses.replace(w, step_s=w.step_s * warming(0.12, 180)(w.at_s) / 0.9) for w in noisy]
        assert settles(slower)[1] == pytest.approx(0.9 * 1.12, rel=0.05)


def test_steps_longer_than_a_window_settle_too():
    series = [dataclasses.replace(w, steps=1) for w in windows(20, lambda t: 40.0, every_s=40.0)]
    assert settles(series, 1200.0)[1] == 40.0
    series = [dataclasses.replace(w, steps=1, step_s=44 - 4 * math.exp(-w.at_s / 180)) for w in series]
    assert settles(series, 1200.0)[1] == pytest.approx(44, rel=0.01)


def test_fresh_is_the_first_twenty_seconds_and_warm_the_last_fifth_or_what_it_settled_to():
    s = soak(windows(10, lambda t: 1.0 if t <= 20 else 2.0 if t <= 480 else 1.2), settled=False)
    assert (s.first_s, s.settled_s, s.factor) == (1.0, 1.2, 1.2)
    assert soak(windows(10, lambda t: 1.0 if t <= 300 else 1.2)).settled_s == pytest.approx(1.2)
    powered = soak([dataclasses.replace(w, power_w=90.0) for w in s.windows])
    assert powered.power_w == 90.0
    assert powered.energy_wh == pytest.approx(15.0)
    assert s.energy_wh is None


def test_a_window_has_the_mean_of_its_looks_and_every_throttle_bit():
    looks = [{"power_w": 80.0, "throttle": 0x4}, {"power_w": 90.0, "throttle": 0x20, "clock_mhz": 1500}]
    assert readings_of(looks) == {"power_w": 85.0, "throttle": 0x24, "clock_mhz": 1500}
    assert readings_of([{}, {}]) == {}


def test_what_it_says_names_the_loss_the_readings_and_the_cause():
    series = [dataclasses.replace(w, clock_mhz=1700 - i, power_w=80.0, throttle=0x21)
              for i, w in enumerate(windows(10, lambda t: 0.9 if t <= 60 else 1.0, lambda t: 50 + t / 20))]
    said = "\n".join(lines(soak(series, settled=False, on_battery=True)))
    for words in ("2,276 tok/s at first", "2,048 (-10.0%)", "clock: 1700 to 1581", "50 to 80 degrees", "slowed by: heat",
                  "Wh", "battery", "had not settled: what was lost is a lower bound"):
        assert words in said


def test_a_soak_comes_back_as_it_was_written():
    s = soak(windows(3, lambda t: 0.9, lambda t: 60.0))
    assert Soak.from_json(json.loads(json.dumps(s.to_json()))) == s
    assert Soak.from_json(s.to_json() | {"windows": [dataclasses.asdict(w) for w in s.windows], "new": 1}) == s


@pytest.mark.parametrize("change", [
    {"schema": 2}, {"schema": None}, {"windows": []}, {"windows": None}, {"windows": [1]}, {"windows": [{"at_s": 1}]},
    {"windows": [{"at_s": 1, "steps": 1, "step_s": 0}]}, {"windows": [{"at_s": 1, "steps": 1, "step_s": float("nan")}]},
    {"windows": [{"at_s": 1, "steps": 1, "step_s": 1, "power_w": "hot"}]},
    {"windows": [{"at_s": 1, "steps": 0, "step_s": 1}]}, {"windows": [{"at_s": 1, "steps": 1, "step_s": 1}] * 2},
    {"cell": {}}, {"minutes": -1}, {"settled": 1},
    {"software": []}, {"at": 3}, {"device": None}])
def test_damage_is_told_in_one_line(tmp_path, change):
    path = tmp_path / "soak.jsonl"
    values = json.loads(json.dumps(soak(windows(1, lambda t: 0.9)).to_json()))
    path.write_text(json.dumps(values | change) + "\n")
    with pytest.raises(UserError, match=r"soak\.jsonl, line 1: ") as e:
        load(path)
    assert "\n" not in str(e.value)


def test_a_torn_line_is_told_and_the_next_soak_written_whole(tmp_path):
    path, s = tmp_path / "soak.jsonl", soak(windows(3, lambda t: 0.9))
    said: list[str] = []
    append(path, s)
    path.write_bytes(path.read_bytes() + b'{"schema": 1, "at"')
    assert load(path, said.append) == [s]
    assert "line 2 is torn" in said[0]
    append(path, s)
    assert load(path) == [s, s]
    assert path.with_name("soak.jsonl.torn").read_bytes().startswith(b'{"schema"')
    path.write_text("{\n" + path.read_text())
    with pytest.raises(UserError, match="line 1 is not JSON"):
        load(path)


A = TypeVar("A")
P = TypeVar("P")


class Ended(Workers):
    """Workers whose soak tells of so many windows and ends so: None is an interruption."""

    def __init__(self, count: int, outcome: Outcome[Any, Any] | None) -> None:
        super().__init__()
        self.windows = tuple(windows(10, lambda t: 0.9)[:count])
        self.outcome = outcome

    def run(self, task: Task[A, P], seconds: float, on_host: bool = False,
            certain: Callable[[P, float], str | None] = lambda progress, quiet_s: None,
            tell: Callable[[P], None] = lambda progress: None) -> Outcome[A, P]:
        progress: Any = None
        if isinstance(task, DescribeDevice):
            description: Any = Description(FACTS, None)
            return Outcome(answer=description)
        assert isinstance(task, RunSoak)
        if self.windows:
            progress = SoakProgress(self.windows)
            tell(progress)
        if self.outcome is None:
            self.interrupt()
        return dataclasses.replace(self.outcome, progress=progress)

    def interrupt(self) -> NoReturn:
        raise KeyboardInterrupt


class Lines(LiveLine):
    """What a live line was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def update(self, line: str) -> None:
        pass


Ending = tuple[BaseException, list[Soak], list[str]]


@pytest.fixture
def end_so(tmp_path: Path) -> Callable[..., Ending]:
    """Soaks with such a process; returns what was raised, what was kept and what was said."""
    def run(count: int, outcome: Outcome[Any, Any] | None, device: str = HERE) -> Ending:
        live = Lines()
        session = Session(Ended(count, outcome), "cpu", FACTS, Store(tmp_path, FACTS, {}), None)
        with pytest.raises((UserError, KeyboardInterrupt)) as e:
            SoakRun(session, make_plan(device), 10.0, live).run()
        path = session.store.folder.soaks
        return e.value, load(path) if path.exists() else [], live.said
    return run


def test_a_plan_for_another_device_is_refused(end_so):
    error, kept, _ = end_so(5, Outcome(), "nvidia-geforce-gtx-1060")
    assert "nvidia-geforce-gtx-1060" in str(error)
    assert not kept


@pytest.mark.parametrize(("outcome", "kind", "words"), [
    (None, KeyboardInterrupt, ""), (Outcome(exit_code=-6), UserError, "code -6"),
    (Outcome(killed="timeout"), UserError, "timeout"), (Outcome(exit_code=-9), NoPlan, "does not fit"),
    (Outcome(error=("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")), NoPlan, "does not fit")])
def test_however_it_ends_what_was_seen_is_kept(end_so, outcome, kind, words):
    error, (kept,), said = end_so(5, outcome)
    assert type(error) is kind
    assert words in str(error)
    assert "\n" not in str(error)
    assert len(kept.windows) == 5
    assert not kept.settled
    assert "kept in" in said[0]


@pytest.mark.parametrize("outcome", [None, Outcome(exit_code=-6)])
def test_less_than_three_windows_are_not_worth_keeping(end_so, outcome):
    _, kept, said = end_so(2, outcome)
    assert not kept
    assert len(said) == 1


def test_a_step_longer_than_the_soak_is_told(end_so):
    error, kept, _ = end_so(0, Outcome(answer=SoakProgress(())))
    assert "--minutes" in str(error)
    assert not kept


def test_a_soak_on_the_processor(command, tmp_path):
    make_plan(HERE).save(tmp_path / "plan.json")
    done = command("probe", "soak", "--plan", "plan.json", "--minutes", "0.1", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    (kept,) = load(next(tmp_path.glob("results/*/soak.jsonl")))
    assert json.loads(done.stdout)["factor"] == pytest.approx(kept.factor)
    assert "tok/s at first" in done.stderr
    assert kept.cell == Cell.of("1M", 2, 32, vocab=500)
    assert kept.minutes == 0.1
    assert not kept.windows[0].temperature_c
    assert 1 <= len(kept.windows) <= 12
    assert all(w.steps for w in kept.windows)


INTERRUPTED = """
import os, signal, time
from test_soak import Ended
import probe.grid.session
from probe.cli import main

class Told(Ended):
    def __init__(self):
        super().__init__(5, None)

    def interrupt(self):
        os.kill(os.getpid(), getattr(signal, os.environ["HOW"]))
        time.sleep(600)

probe.grid.session.Workers = Told
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals to itself")
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])
def test_an_interrupted_command_keeps_what_it_saw_and_says_so(tmp_path, how):
    make_plan(HERE).save(tmp_path / "plan.json")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": path, "HOW": how}
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, "soak", "--plan", "plan.json"], cwd=tmp_path, timeout=240,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 130
    assert not done.stderr.strip()
    live, said = done.stdout.splitlines()
    assert live == "25 of 600 s  71 tok/s"
    assert said.startswith("broken off: 25 s of it kept in results")
    (kept,) = load(next(tmp_path.glob("results/*/soak.jsonl")))
    assert len(kept.windows) == 5
    assert not kept.settled
