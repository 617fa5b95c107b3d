"""On a card: a soak of a plan tells windows, what the card read meanwhile, and the energy."""

import json

import pytest
import torch
from helpers.made import make_plan

from probe.soak import load
from spillcliff.hardware.device import facts
from trainer.config import ModelConfig, StepConfig

pytestmark = pytest.mark.gpu


@pytest.fixture
def planned(tmp_path):
    """Writes plan.json of this card for a step of 10M."""
    return lambda *step: make_plan(facts(torch.device("cuda", 0)).fingerprint, ModelConfig.named("10M"),
                                   StepConfig(*step)).save(tmp_path / "plan.json")


@pytest.mark.parametrize(("engine", "accum"), [("eager", 2), ("graph", 1)])
def test_a_soak_tells_windows_readings_and_energy(command, planned, tmp_path, engine, accum):
    planned(4, 256, accum, engine)
    done = command("probe", "soak", "--plan", "plan.json", "--minutes", 20 / 60, "--json")
    assert done.returncode == 0, done.stderr
    (kept,) = load(next(tmp_path.glob("results/*/soak.jsonl")))
    assert len(kept.windows) >= 6 and (kept.cell.accum, kept.cell.engine) == (accum, engine)
    assert all(w.clock_mhz > 0 and w.temperature_c > 0 and w.throttle is not None for w in kept.windows)
    energy = json.loads(done.stdout)["energy_wh"]
    assert energy == pytest.approx(kept.power_w * kept.seconds / 3600, rel=0.5) and energy > 0


def test_a_plan_that_does_not_fit_is_told_in_one_line(planned, refused):
    planned(100_000, 256)
    assert "does not fit" in refused(3, "probe", "soak", "--plan", "plan.json")
