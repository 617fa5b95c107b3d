"""A job is named for what it is by what was observed of it: ill in each way, or well."""

import dataclasses
import json
import random
from typing import Any

import pytest
from helpers.made import SAMPLES

from probe.health.diagnose import diagnose, lines
from probe.health.observation import Observation, Peer
from probe.health.run_log import RunStatus
from probe.health.utilization import Sample

WORKER, STUB = Peer(10, 0.9, 900_000_000, "itself"), Peer(10, 0.0, 4_000_000, "itself")
STATUS = RunStatus(run="runs/x", steps=1000, eval_every=100, save_every=50, tokens=2048, planned_tok_s=1500.0,
                   limit_bytes=5_000_000_000, finished=False, step=240, lines=12, phase="step", silent_s=0.5, usual_s=0.9,
                   step_s=0.9, mean_s=0.91, data_s=0.02, log_s=0.001, eval_s=4.0, save_s=0.3, logged=200, kept=200,
                   since_save_s=36.0)


def series(count: int = 60, every_s: float = 0.25, **columns: Any) -> tuple[Sample, ...]:
    """Readings of a processor that is busy, but for the columns that are given."""
    rows = [{name: values[i] if isinstance(values, list) else values for name, values in columns.items()}
            for i in range(count)]
    busy: dict[str, Any] = {"cpu_percent": 99.0, "machine_percent": 60.0, "is_waiting": False}
    return tuple(Sample(at_s=1000 + i * every_s, **busy | row) for i, row in enumerate(rows))


def observation(samples: tuple[Sample, ...] = (), **changes: Any) -> Observation:
    values: dict[str, Any] = {"pid": 10, "kind": "cpu", "seconds": 15.0, "state": "running", "cpu_s": 14.0,
                              "samples": samples}
    return Observation(**values | changes)


def sample_of(name: str) -> Observation:
    """What a file under samples/health holds, as it would have been observed."""
    kept = json.loads((SAMPLES / "health" / f"{name}.json").read_text(encoding="utf-8"))
    count = len(kept["readings"]["utilization"])
    facts = {k: kept[k] for k in ("kind", "card_bytes", "clock_max_mhz", "power_limit_w")}
    return observation(series(count, kept["every_s"], **kept["readings"]), seconds=count * kept["every_s"], **facts)


def ill(o: Observation) -> set[str]:
    return {f.what for f in diagnose(o) if f.level != "ok"}


def line(o: Observation, what: str | None) -> str:
    return next(f.line for f in diagnose(o) if f.what == what)


@pytest.mark.parametrize(("name", "what", "words"), [
    ("bubble-27-percent", "data bubble", ("98% at 5.5 GB", "% at 4.2 GB", "low for")),
    ("persistently-low", "data bubble", ("27% busy",)),
    ("evaluation-stall", "evaluation stall", ("6.5 s", "4.2 GB")),
    ("spill-windows", "spill", ("1.14 GB", "0.53 GB")),
    ("spill-by-power", "spill", ("of 700 W", "5.9 GB")),
    ("throttled", "throttling", ("of 1,670 MHz", "94 degrees", "bits 0x")),
    ("well", None, ()),
])
def test_a_foreign_job_on_a_card_is_named_by_the_shape_of_its_readings(name, what, words):
    o = sample_of(name)
    assert ill(o) == ({what} if what else set())
    for word in words:
        assert word in line(o, what)


@pytest.mark.parametrize("seed", range(20))
def test_noise_makes_no_healthy_job_ill(seed):
    """A card at 88 to 100%, with a single low reading now and then, its power cap and a warm clock; a core at 75 to 100%."""
    r = random.Random(seed)
    dips = [i for i in range(60) if r.random() < 0.03]
    card = observation(series(
        utilization=[r.randint(30, 80) if i in dips else min(100, round(r.gauss(96, 3))) for i in range(60)],
        memory_bytes=[round(r.gauss(5.0e9, 3e7)) for _ in range(60)], clock_mhz=[r.gauss(1500, 60) for _ in range(60)],
        throttle=[r.choice([0, 0x4]) for _ in range(60)], temperature_c=[r.randint(70, 84) for _ in range(60)],
        power_w=[r.gauss(70, 4) for _ in range(60)], non_local_bytes=[round(r.gauss(7e8, 2e6)) for _ in range(60)]),
        kind="cuda", card_bytes=6_442_450_944, clock_max_mhz=1670.0, power_limit_w=80.0)
    core = observation(series(cpu_percent=[r.uniform(75, 101) for _ in range(60)]))
    for o in (card, core):
        assert not ill(o)
        assert not ill(dataclasses.replace(o, page=dataclasses.replace(STATUS, silent_s=r.uniform(0, 10))))


RUN = observation(series(utilization=97.0, memory_bytes=4_040_000_000, throttle=0), kind="cuda", page=STATUS, itself=WORKER,
                  newer=())


@pytest.mark.parametrize(("what", "words", "run", "other"), [
    ("data bubble", "data 42%", {"data_s": 0.4}, {}),
    ("data bubble", "waits for tokens", {"data_s": 1.4, "step_s": 2.3, "mean_s": 2.3}, {}),
    ("slow log", "logging 31%", {"log_s": 0.3}, {}),
    ("slow log", "logging 64%", {"log_s": 1.5, "step_s": 2.3, "mean_s": 2.3}, {}),
    ("evaluation stall", "evaluation 35%", {"eval_s": 50.0}, {}),
    ("evaluation stall", "30 s where 4.0 s", {"phase": "evaluation", "usual_s": 4.0, "silent_s": 30.0}, {}),
    ("checkpoint stall", "checkpoint 39%", {"save_s": 30.0}, {}),
    ("spill", "no throttle", {"step_s": 2.9, "mean_s": 2.9}, {}),
    ("throttling", "throttles", {"step_s": 2.4, "mean_s": 2.4}, {"throttle": 0x40}),
    ("spill", "more than its throttle explains", {"step_s": 2.9, "mean_s": 2.9}, {"throttle": 0x40}),
    ("battery", "plug it in", {"step_s": 2.9, "mean_s": 2.9}, {"on_battery": True}),
    ("battery", "plug it in", {}, {"on_battery": True}),
    ("contended", "pid 77", {"step_s": 2.9, "mean_s": 2.9}, {"other_pid": 77, "other_percent": 40.0}),
    ("late", "step 240 is done", {"kept": 150, "logged": 150}, {}),
    ("missing", "none so far", {"kept": None, "logged": None, "since_save_s": None}, {}),
    ("not written", "is the disk full", {"kept": 150, "logged": 200, "since_save_s": 300.0}, {}),
    ("stuck", "no line in the log for 20.0 min", {"silent_s": 1200.0, "lines": 0}, {}),
])
def test_our_run_is_named_by_its_log_and_the_readings_beside(what, words, run, other):
    """The plan wants 1,500 tok/s at least; well, the run has 2,276 and 2% wait for data."""
    assert not ill(RUN)
    throttle = other.pop("throttle", 0)
    o = dataclasses.replace(RUN, page=dataclasses.replace(STATUS, **run), **other,
                            samples=series(utilization=97.0, memory_bytes=4_040_000_000, throttle=throttle))
    assert ill(o) == {what}
    assert words in line(o, what)


@pytest.mark.parametrize(("phase", "usual_s", "silent_s", "what"), [
    ("evaluation", 90.0, 250.0, None), ("checkpoint", 30.0, 300.0, None), ("step", 30.0, 300.0, None),
    ("step", 0.9, 300.0, "stuck"), ("start-up", None, 300.0, None), ("start-up", None, 900.0, "stuck"),
])
def test_silence_is_measured_by_what_is_being_done(phase, usual_s, silent_s, what):
    page = dataclasses.replace(STATUS, phase=phase, usual_s=usual_s, silent_s=silent_s, lines=0)
    assert ill(dataclasses.replace(RUN, page=page)) == ({what} if what else set())


@pytest.mark.parametrize(("peers", "itself", "what", "level"), [
    ((), WORKER, "alone", "ok"),
    ((Peer(9, 0.0, 4_000_000, "parent"),), WORKER, "launcher", "ok"),
    ((Peer(12, 0.0, 4_000_000, "child"),), STUB, "alone", "ok"),
    ((Peer(12, 0.8, 900_000_000, "child"),), STUB, "launcher", "ok"),
    ((Peer(12, 0.0, 4_000_000, "other"), Peer(13, 0.0, 4_000_000, "other")), WORKER, "stubs", "warn"),
    ((Peer(12, 0.8, 900_000_000, "other"),), STUB, "stub", "warn"),
    ((Peer(12, 0.8, 900_000_000, "other"), Peer(13, 0.0, 4_000_000, "other")), WORKER, "doubled", "bad"),
    ((Peer(12, 0.0, 900_000_000, "other"),), WORKER, "doubled", "bad"),
    ((Peer(12, 0.5, 900_000_000, "child"), Peer(13, 0.5, 900_000_000, "child")), WORKER, "alone", "ok"),
])
def test_the_worker_is_told_from_stubs_and_never_to_be_ended(peers, itself, what, level):
    finding = next(f for f in diagnose(observation(series(), itself=itself, peers=peers)) if f.check == "doubled")
    assert (finding.what, finding.level) == (what, level)
    for word in ("kill", "taskkill", "terminate", "end it", "close it"):
        assert word not in finding.line.lower()


def test_a_table_keeps_to_the_width():
    findings = diagnose(sample_of("bubble-27-percent"))
    assert all(len(text) <= 80 for text in lines(findings))
    assert len(list(lines(findings))) > len(findings)
