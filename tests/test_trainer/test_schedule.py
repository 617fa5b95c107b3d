"""The learning rate rises to its peak, falls to a tenth, and is a function of the step alone."""

import pytest
from trainer.schedule import lr

from trainer.config import OptimizerConfig


def test_warm_up_then_cosine_to_a_tenth():
    o = OptimizerConfig(lr=1.0, warmup_steps=10)
    rates = [lr(s, 100, o) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a < b for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert all(a > b for a, b in zip(rates[10:-1], rates[11:], strict=True))


@pytest.mark.parametrize("steps", [1, 2, 10, 11])
def test_short_runs_stay_above_zero(steps):
    for warmup in (0, 1, 10, 20):
        assert all(0 < lr(s, steps, OptimizerConfig(lr=1.0, warmup_steps=warmup)) <= 1 for s in range(steps))


def test_constant_stays():
    o = OptimizerConfig(lr=0.5, warmup_steps=2, schedule="constant")
    assert [lr(s, 5, o) for s in range(5)] == [0.25, 0.5, 0.5, 0.5, 0.5]
