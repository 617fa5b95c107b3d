"""On a card: products are IEEE fp32, every engine and recompute option gives eager's loss curve, memory doesn't grow."""

import numpy as np
import pytest
import torch
from helpers.made import tiny

from trainer.config import OptimizerConfig, StepConfig
from trainer.data.feed import feed
from trainer.data.tokens import Tokens
from trainer.run.step import TrainStep

pytestmark = pytest.mark.gpu
STEPS = 50
# fp32 rounding, grown through 50 steps of AdamW at a high rate; eager against itself with another recompute differs by
# up to 3e-5 here
TOLERANCE = 5e-4


def device():
    return torch.device("cuda", 0)


def run(step: StepConfig, rates=None):
    """(loss curve, the step) over STEPS optimizer steps on four repeated batches."""
    train = TrainStep(tiny(vocab=1000), step, OptimizerConfig(lr=1e-2), device())
    generator = torch.Generator("cuda").manual_seed(0)
    data = torch.randint(1000, (4, step.accum, step.batch, step.length + 1), dtype=torch.int32, device="cuda",
                         generator=generator)
    losses = []
    for i in range(STEPS):
        loss, _ = train(data[i % 4], rates[i] if rates else 1e-2)
        losses.append(loss.clone())
    return torch.stack(losses).tolist(), train


@pytest.fixture(scope="module")
def eager():
    return {accum: run(StepConfig(4, 64, accum))[0] for accum in (1, 3)}


def worst(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_a_product_is_ieee_fp32():
    """TF32 keeps 10 bits of the mantissa: its error here is 3e-4, fp32's below 1e-6."""
    TrainStep(tiny(), StepConfig(1, 8), OptimizerConfig(lr=1e-3), device())
    a, b = torch.randn(2048, 2048, device="cuda"), torch.randn(2048, 2048, device="cuda")
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).norm() / exact.norm() < 2e-6
    x, w = torch.randn(8, 64, 32, 32, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    exact = torch.nn.functional.conv2d(x.double(), w.double())
    assert (torch.nn.functional.conv2d(x, w).double() - exact).norm() / exact.norm() < 2e-6


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize(("engine", "recompute"), [
    ("eager", "elementwise"), ("eager", "block"), ("graph", "none"), ("graph", "elementwise"), ("graph", "block"),
    ("compile", "none"), ("compile", "block")])
def test_every_option_gives_eagers_curve(eager, engine, recompute, accum):
    losses, _ = run(StepConfig(4, 64, accum, engine=engine, recompute=recompute))
    assert losses[-1] < 0.5 * losses[0]
    assert worst(losses, eager[accum]) < TOLERANCE


def test_a_graph_honours_a_changing_rate():
    rates = [1e-2 / (1 + i) for i in range(STEPS)]
    assert worst(run(StepConfig(4, 64, 2, engine="graph"), rates)[0], run(StepConfig(4, 64, 2), rates)[0]) < TOLERANCE


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_memory_does_not_grow(engine):
    _, train = run(StepConfig(4, 64, 2, engine=engine))
    data = torch.randint(1000, (2, 4, 65), dtype=torch.int32, device="cuda")
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(100):
        train(data, 1e-3)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert after == before


def test_the_feed_brings_every_step_unharmed(token_file):
    """With the card kept busy, so that copies and readers overlap as they do in training."""
    tokens, shape = Tokens.open(token_file(np.arange(40_000) % 60_000, vocab=60_000)), StepConfig(8, 32, accum=2)
    busy = torch.randn(4096, 4096, device="cuda")
    steps, copies = feed(tokens, shape, 0, device()), []
    for _ in range(30):
        batch = next(steps)
        busy @ busy
        copies.append(batch.clone())
    for step, copy in enumerate(copies):
        assert np.array_equal(copy.cpu().numpy(), tokens.batch(0, step, shape))
