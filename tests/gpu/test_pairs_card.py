"""On a card: every engine gives eager's losses where targets are left out, and steps of unequal answers share one graph."""

import pytest
import torch
from helpers.made import tiny

from trainer.config import OptimizerConfig, StepConfig
from trainer.run.step import TrainStep

pytestmark = pytest.mark.gpu
TOLERANCE = 5e-4  # as in test_engines.py


def losses_of(engine, accum, recompute="none"):
    device, random = torch.device("cuda", 0), torch.Generator().manual_seed(0)
    step = StepConfig(4, 64, accum, engine=engine, recompute=recompute)
    train = TrainStep(tiny(vocab=1000), step, OptimizerConfig(1e-2), device, masked=True)
    losses = []
    for i in range(30):
        t = torch.randint(1000, (accum, 4, 65), dtype=torch.int32, generator=random)
        t[..., :20 + i] = ~t[..., :20 + i]
        t[0, :, 60:] = ~t[0, :, 60:]
        losses.append(train(t.to(device), 1e-2)[0].clone())
    return torch.stack(losses).tolist(), float(train.evaluate(t[0]))


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize(("engine", "recompute"), [("graph", "none"), ("graph", "block"), ("compile", "none")])
def test_every_engine_gives_eagers_losses_of_answers(engine, recompute, accum):
    ours, eager = losses_of(engine, accum, recompute), losses_of("eager", accum)
    assert max(abs(a - b) for a, b in zip([*ours[0], ours[1]], [*eager[0], eager[1]], strict=True)) < TOLERANCE
