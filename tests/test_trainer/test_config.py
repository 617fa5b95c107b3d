"""A model's numbers by arithmetic are those of the built model, shapes that can't be are refused with what could, and the
learning rate is a function of the step alone."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
from helpers.made import tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spillcliff.errors import UserError
from spillcliff.units import parse_count
from trainer.config import SIZES, ModelConfig, OptimizerConfig, StepConfig
from trainer.model.decoder import Decoder
from trainer.model.loss import head_loss

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [*SIZES, "0.7M", "80M", "138M", "1.3B", "7B"])
def test_a_named_size_has_the_parameters_it_is_called_by(name):
    config = ModelConfig.named(name)
    assert abs(config.parameters / parse_count(name) - 1) < 0.03


@pytest.mark.parametrize("config", [
    tiny(), ModelConfig.named("1M"), ModelConfig.named("5M", vocab=700), ModelConfig.named("10M")])
def test_parameters_by_arithmetic_equal_the_built_model(config):
    model = Decoder(config, 16, CPU)
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    assert config.body_parameters == config.parameters - model.embedding.numel()


def test_the_known_150m_shapes():
    """138M is the shape that the field's figures on an H200 are of; 150M has two layers more."""
    shape = ModelConfig.named("138M")
    assert (shape.layers, shape.d_model, shape.heads, shape.kv_heads, shape.d_ff) == (18, 768, 12, 4, 2048)
    assert shape.parameters == 137_850_624
    assert ModelConfig.named("150M").layers == 20


def test_a_name_is_true_at_32000_and_another_vocabulary_keeps_the_shape():
    a, b = ModelConfig.named("50M"), ModelConfig.named("50M", vocab=1000)
    assert (a.layers, a.d_model) == (b.layers, b.d_model)
    assert a.body_parameters == b.body_parameters


@pytest.mark.parametrize("length", [8, 64])
def test_flops_by_arithmetic_equal_those_counted_on_the_built_model(length):
    """torch counts attention without its mask; all else must agree exactly, and attention must be half of its count."""
    config = tiny()
    model = Decoder(config, length, CPU)
    tokens = torch.randint(config.vocab, (3, length + 1))
    # torch does not count the in-place product by itself, nor the processor's attention kernel
    in_place = {torch.ops.aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        hidden = model(model.embed(tokens[:, :-1]).requires_grad_(), plain=True)
        rows = hidden.detach().flatten(0, 1)
        head_loss(rows, model.norm, model.embedding, tokens[:, 1:].flatten(), 1e-5, 1.0, torch.empty_like(model.norm),
                  torch.empty_like(model.embedding))
        hidden.backward(rows.view_as(hidden))
    attention = 6 * config.layers * length * config.d_model
    assert counter.get_total_flops() / (3 * length) - 2 * attention == config.flops_per_token(length) - attention


@pytest.mark.parametrize(("changes", "words"), [
    ({"heads": 3}, "1, 2, 4"), ({"d_model": 12, "heads": 4}, "odd"), ({"kv_heads": 3}, "1, 2 or 4"),
    ({"layers": 0}, "layers"), ({"vocab": True}, "vocab"), ({"norm_eps": -1}, "norm_eps")])
def test_shapes_that_cannot_be_are_refused_with_what_could(changes, words):
    with pytest.raises(UserError, match=words):
        tiny(**changes)


@pytest.mark.parametrize("name", ["huge", "0", "100", "9000B", "", "150X"])
def test_sizes_that_are_not_are_refused(name):
    with pytest.raises(UserError, match="model"):
        ModelConfig.named(name)


def test_step_and_optimizer_are_checked():
    assert StepConfig(4, 512, 3).tokens == 6144
    steps: list[tuple[str, Any]] = [("batch", 0), ("length", -1), ("accum", 1.5), ("engine", "warp"), ("recompute", "all")]
    for name, value in steps:
        with pytest.raises(UserError, match=name):
            StepConfig(**{"batch": 1, "length": 8, name: value})
    optimizers: list[tuple[str, Any]] = [("lr", 0), ("lr", "fast"), ("betas", [0.9]), ("clip", -1), ("schedule", "magic"),
                                         ("warmup_steps", -1)]
    for name, value in optimizers:
        with pytest.raises(UserError, match=name):
            OptimizerConfig(**{"lr": 1e-3, name: value})


def test_the_rate_rises_to_its_peak_and_falls_to_a_tenth():
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=10)
    rates = [optimizer.lr_at(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a < b for a, b in itertools.pairwise(rates[:10]))
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))


@pytest.mark.parametrize(("warmup", "steps"), [(0, 30), (1, 30), (2, 30), (10, 30), (30, 30), (2, 3), (40, 30)])
def test_the_peak_comes_once_and_the_plan_states_the_formula(warmup, steps):
    """What is said is worked out here, as text."""
    optimizer = OptimizerConfig(lr=0.004, warmup_steps=warmup)
    rates = [optimizer.lr_at(step, steps) for step in range(steps)]
    assert rates.count(max(rates)) == 1
    assert max(rates) == pytest.approx(0.004 * min(1, steps / max(1, warmup)))
    said = optimizer.describe(steps)
    rise = re.fullmatch(r"lr 0\.004(?: x step / (\d+) up to| at) step (\d+),.*", said)
    assert rise, said
    peak = int(rise[2])
    assert rates.index(max(rates)) == peak - 1
    assert rates[:peak] == pytest.approx([0.004 * step / int(rise[1] or 1) for step in range(1, peak + 1)])
    formula = said.partition(": lr x ")[2].replace(" x ", " * ")
    told = [0.004 * eval(formula, {"cos": math.cos, "pi": math.pi, "step": step}) for step in range(peak + 1, steps + 1)] \
        if formula else []
    assert rates[peak:] == pytest.approx(told)


def test_a_run_that_was_started_with_the_peak_twice_goes_on_so():
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=10)
    rates = [optimizer.lr_at(step, 100, repeats_peak=True) for step in range(100)]
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[11] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 89)))


@pytest.mark.parametrize("steps", [1, 2, 10, 11])
def test_short_runs_keep_a_rate_above_zero(steps):
    for warmup in (0, 1, 10, 20):
        optimizer = OptimizerConfig(lr=1.0, warmup_steps=warmup)
        assert all(0 < optimizer.lr_at(step, steps) <= 1 for step in range(steps))


def test_a_constant_rate_stays():
    optimizer = OptimizerConfig(lr=0.5, warmup_steps=2, schedule="constant")
    assert [optimizer.lr_at(step, 5) for step in range(5)] == [0.25, 0.5, 0.5, 0.5, 0.5]
