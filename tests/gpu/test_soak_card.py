"""On a card: a soak of a plan tells windows, what the card read meanwhile, and the energy."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.made import make_plan

from probe.soak import load
from spillcliff.hardware.device import device_facts
from trainer.config import Engine, ModelConfig, StepConfig

pytestmark = pytest.mark.gpu

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def planned(tmp_path: Path) -> Callable[[StepConfig], None]:
    """Writes plan.json of this card for a step of 10M."""
    def write(step: StepConfig) -> None:
        device = device_facts(torch.device("cuda", 0)).fingerprint
        make_plan(device, model=ModelConfig.named("10M"), step=step).save(tmp_path / "plan.json")
    return write


@pytest.mark.parametrize(("engine", "accum"), [("eager", 2), ("graph", 1)])
def test_a_soak_tells_windows_readings_and_energy(command: Command, planned: Callable[[StepConfig], None], tmp_path: Path,
                                                  engine: Engine, accum: int) -> None:
    planned(StepConfig(4, 256, accum, engine=engine))
    done = command("probe", "soak", "--plan", "plan.json", "--minutes", 20 / 60, "--json")
    assert done.returncode == 0, done.stderr
    (kept,) = load(next(tmp_path.glob("results/*/soak.jsonl")))
    assert len(kept.windows) >= 6
    assert (kept.cell.accum, kept.cell.step.engine) == (accum, engine)
    assert all((w.clock_mhz or 0) > 0 and (w.temperature_c or 0) > 0 and w.throttle is not None for w in kept.windows)
    energy = json.loads(done.stdout)["energy_wh"]
    assert kept.power_w is not None
    assert energy == pytest.approx(kept.power_w * kept.seconds / 3600, rel=0.5)
    assert energy > 0


def test_a_plan_that_does_not_fit_is_told_in_one_line(planned: Callable[[StepConfig], None],
                                                      refused: Callable[..., str]) -> None:
    planned(StepConfig(100_000, 256))
    assert "does not fit" in refused(3, "probe", "soak", "--plan", "plan.json")
