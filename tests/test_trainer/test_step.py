"""One optimizer step does what it says, whatever the accumulation and recompute option."""

import pytest
import torch
import torch.nn.functional as F
from helpers.made import tiny

from spillcliff.errors import UserError
from trainer.config import RECOMPUTES, OptimizerConfig, StepConfig
from trainer.run.step import TrainStep

CPU = torch.device("cpu")


def tokens(accum, batch, length=16, seed=0):
    return torch.randint(300, (accum, batch, length + 1), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def loss_curve(step: StepConfig, steps: int) -> list[float]:
    train = TrainStep(tiny(), step, OptimizerConfig(lr=1e-2), CPU)
    return [float(train(tokens(step.accum, step.batch, seed=i % 4), 1e-2)[0]) for i in range(steps)]


@pytest.mark.parametrize("recompute", RECOMPUTES[1:])
def test_recomputing_gives_the_loss_curve_of_keeping(recompute, long):
    """To fp32 rounding over so many steps that the loss falls well below its start."""
    steps = 100 if long else 30
    kept, again = loss_curve(StepConfig(4, 16), steps), loss_curve(StepConfig(4, 16, recompute=recompute), steps)
    assert kept[-1] < 0.9 * kept[0]
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
    moments = [t for name, t in train.named_state().items() if name.startswith("exp_avg.")]
    seen = torch.stack([m.norm() for m in moments]).norm() / 0.1
    assert norm is not None
    assert float(norm) > 0.1
    assert float(seen) == pytest.approx(0.01, rel=1e-3)


def test_decay_falls_on_matrices_alone():
    train = TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-3), CPU)
    before = {name: t.clone() for name, t in train.named_state().items()}
    # with no gradient at all, decay is all that moves a weight
    for p in train.model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in set(train._optimizers.values()):
        optimizer.step()
    for name, p in train.model.named_parameters():
        expected = before[f"model.{name}"] * (1 - 1e-3 * 0.1 if p.ndim > 1 else 1)
        torch.testing.assert_close(p.detach(), expected)


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


def test_the_tied_embedding_gets_both_of_its_gradients():
    """The head's and the looked-up rows', which are added by hand, against autograd through full logits."""
    train = TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-3, clip=None), CPU)
    t, model = tokens(1, 2), train.model
    x = F.embedding(t[0, :, :-1], model.embedding)
    logits = model.logits(model(x, plain=True))
    plain = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), t[0, :, 1:].flatten().long()),
                                list(model.parameters()))
    train(t, 0.0)
    for p, gradient in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(train.named_state()[names(model)[p].replace("model.", "exp_avg.")] / 0.1, gradient,
                                   rtol=1e-4, atol=1e-6)


def names(model):
    return {p: f"model.{name}" for name, p in model.named_parameters()}


def test_updating_in_the_backward_pass_gives_the_same_step():
    after = TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-2, clip=None), CPU)
    within = TrainStep(tiny(), StepConfig(2, 16, update="backward"), OptimizerConfig(lr=1e-2, clip=None), CPU)
    for i in range(5):
        t = tokens(1, 2, seed=i)
        a, b = after(t, 1e-2), within(t, 1e-2)
        assert a[0].item() == b[0].item()
        assert a[1] is b[1] is None
    assert all(p.grad is None for p in within.model.parameters())
    for (name, a), (_, b) in zip(after.named_state().items(), within.named_state().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("step", "clip", "words"), [
    (StepConfig(2, 16, 2, update="backward"), None, "accum 1"), (StepConfig(2, 16, update="backward"), 1.0, "norm"),
    (StepConfig(2, 16, engine="graph", update="backward"), None, "graph")])
def test_updating_in_the_backward_pass_is_refused_where_it_would_be_wrong(step, clip, words):
    with pytest.raises(UserError, match=words):
        TrainStep(tiny(), step, OptimizerConfig(lr=1e-2, clip=clip), CPU)


@pytest.mark.parametrize("engine", ["graph", "compile"])
def test_an_engine_that_the_device_cannot_run_is_refused(engine):
    with pytest.raises(UserError, match="eager"):
        TrainStep(tiny(), StepConfig(2, 16, engine=engine), OptimizerConfig(lr=1e-2), CPU)


def test_fp32_is_locked_whatever_was_set_before(monkeypatch):
    torch.set_float32_matmul_precision("medium")
    TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-2), CPU)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(UserError, match="NVIDIA_TF32_OVERRIDE"):
        TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(lr=1e-2), CPU)
