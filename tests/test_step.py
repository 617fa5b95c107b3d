"""One optimizer step does what it says, whatever the accumulation and recompute option."""

import pytest
import torch
from conftest import tiny

from trainer.config import RECOMPUTES, OptimizerConfig, StepConfig
from trainer.errors import UserError
from trainer.step import TrainStep

CPU = torch.device("cpu")


def tokens(accum, batch, length=16, seed=0):
    return torch.randint(300, (accum, batch, length + 1), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def curve(step: StepConfig, steps=50, optimizer=None):
    train = TrainStep(tiny(), step, optimizer or OptimizerConfig(lr=1e-2), CPU)
    return [float(train(tokens(step.accum, step.batch, seed=i % 4), 1e-2)[0]) for i in range(steps)]


@pytest.mark.parametrize("recompute", RECOMPUTES[1:])
def test_recomputing_gives_the_loss_curve_of_keeping(recompute):
    """To fp32 rounding over 50 steps, in which the loss falls well below its start."""
    kept, again = curve(StepConfig(4, 16)), curve(StepConfig(4, 16, recompute=recompute))
    assert kept[-1] < 0.8 * kept[0]
    assert max(abs(a - b) for a, b in zip(kept, again, strict=True)) < 2e-4


def test_accumulation_gives_the_step_of_one_large_batch():
    whole = TrainStep(tiny(), StepConfig(6, 16), OptimizerConfig(lr=1e-2), CPU)
    parts = TrainStep(tiny(), StepConfig(2, 16, accum=3), OptimizerConfig(lr=1e-2), CPU)
    t = tokens(3, 2)
    loss, norm = whole(t.reshape(1, 6, 17), 1e-2)
    loss_of_parts, norm_of_parts = parts(t, 1e-2)
    torch.testing.assert_close(loss, loss_of_parts)
    torch.testing.assert_close(norm, norm_of_parts)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)


def test_the_clip_bounds_the_gradient_that_the_update_sees():
    """AdamW's first moment after one step is (1 - beta1) x the gradient it was given."""
    train = TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-3, clip=0.01), CPU)
    _, norm = train(tokens(1, 2), 1e-3)
    seen = torch.stack([train.optimizer.state[p]["exp_avg"].norm() for p in train.model.parameters()]).norm() / 0.1
    assert float(norm) > 0.1
    assert float(seen) == pytest.approx(0.01, rel=1e-3)


def test_decay_falls_on_matrices_alone():
    train = TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-3), CPU)
    groups = {id(p): g["weight_decay"] for g in train.optimizer.param_groups for p in g["params"]}
    assert all(groups[id(p)] == (0.1 if p.ndim > 1 else 0.0) for p in train.model.parameters())


def test_the_rate_given_is_the_rate_used():
    train = TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-2), CPU)
    before = [p.detach().clone() for p in train.model.parameters()]
    train(tokens(1, 2), 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, train.model.parameters(), strict=True))


def test_evaluation_changes_nothing_and_holds_no_graph():
    train = TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-2), CPU)
    t = tokens(1, 2)
    loss = train.evaluate(t[0])
    assert not loss.requires_grad
    torch.testing.assert_close(loss, train(t, 0.0)[0])


@pytest.mark.parametrize("engine", ["graph", "compile"])
def test_an_engine_that_the_device_cannot_run_is_refused(engine):
    with pytest.raises(UserError, match="eager"):
        TrainStep(tiny(), StepConfig(2, 16, engine=engine), OptimizerConfig(lr=1e-2), CPU)


def test_fp32_is_locked_whatever_was_set_before(monkeypatch):
    torch.set_float32_matmul_precision("medium")
    TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-2), CPU)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(UserError, match="NVIDIA_TF32_OVERRIDE"):
        TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-2), CPU)
