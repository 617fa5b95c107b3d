"""The lean formulas give what the plain ones give in float64: loss, RoPE, attention grouping, RMSNorm, SwiGLU."""

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny

from trainer.loss import IGNORE, chunk_rows, linear_cross_entropy
from trainer.model import Decoder, _NormLinear, _SwiGLULinear, attention, rms_norm, rope, rope_tables

CPU = torch.device("cpu")


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rows", [1, 255, 256, 700])
def test_loss_and_its_gradients_equal_cross_entropy_over_full_logits(rows):
    """Any number of rows, whole chunks or not, some targets ignored."""
    x, weight = doubles(rows, 16), doubles(50, 16)
    targets = torch.randint(50, (rows,))
    targets[::3] = IGNORE
    targets[-1] = 7
    ours = torch.autograd.grad(3 * linear_cross_entropy(x, weight, targets), (x, weight))
    plain_loss = F.cross_entropy(x @ weight.T, targets, ignore_index=IGNORE)
    plain = torch.autograd.grad(3 * plain_loss, (x, weight))
    with torch.no_grad():
        assert torch.allclose(linear_cross_entropy(x, weight, targets), plain_loss, rtol=1e-12)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_loss_survives_logits_whose_probability_underflows():
    x = torch.tensor([[200.0, 0.0]])
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert float(linear_cross_entropy(x, weight, torch.tensor([1]))) == pytest.approx(400)


def test_a_batch_without_targets_has_loss_zero_and_no_gradient():
    x, weight = doubles(4, 8), doubles(9, 8)
    loss = linear_cross_entropy(x, weight, torch.full((4,), IGNORE))
    loss.backward()
    assert loss.item() == 0 and not x.grad.any() and not weight.grad.any()


def test_a_chunk_of_logits_is_no_larger_than_the_embedding():
    assert [chunk_rows(d) for d in (28, 768, 2048, 8192)] == [256, 768, 2048, 4096]


def test_rms_norm_is_its_formula():
    x, gain = doubles(5, 8), doubles(8)
    torch.testing.assert_close(rms_norm(x, gain, 1e-5), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain)


def test_lean_norm_linear_has_the_gradients_of_the_plain_one():
    x, gain, weight = doubles(2, 3, 8), doubles(8), doubles(6, 8)
    assert torch.autograd.gradcheck(lambda *a: _NormLinear.apply(*a, 1e-5), (x, gain, weight))
    torch.testing.assert_close(_NormLinear.apply(x, gain, weight, 1e-5), F.linear(rms_norm(x, gain, 1e-5), weight))


def test_lean_swiglu_has_the_gradients_of_the_plain_one():
    gate_up, weight = doubles(2, 3, 10), doubles(4, 5)
    assert torch.autograd.gradcheck(_SwiGLULinear.apply, (gate_up, weight))
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(_SwiGLULinear.apply(gate_up, weight), F.linear(F.silu(gate) * up, weight))


def test_rope_turns_pairs_by_position_so_that_products_depend_on_distance_alone():
    cos, sin = (t.double() for t in rope_tables(12, 8, 10_000.0, CPU))
    q, k = doubles(1, 1, 1, 8), doubles(1, 1, 1, 8)
    turned_q, turned_k = (rope(t.expand(1, 12, 1, 8), cos, sin)[0, :, 0] for t in (q, k))
    products = turned_q @ turned_k.T
    for distance in range(1, 11):
        torch.testing.assert_close(products[distance, 0], products[11, 11 - distance], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(turned_q[0], q[0, 0, 0])
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin), doubles(1, 12, 2, 8))


def test_grouped_attention_equals_each_head_by_the_plain_formula():
    """Query head j reads key and value head j // group, and sees no later position."""
    q, k, v = doubles(2, 5, 4, 6), doubles(2, 5, 2, 6), doubles(2, 5, 2, 6)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    heads = []
    for j in range(4):
        scores = q[:, :, j] @ k[:, :, j // 2].transpose(1, 2) / 6**0.5
        heads.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, :, j // 2])
    plain = torch.stack(heads, 2)
    ours = attention(q, k, v)
    torch.testing.assert_close(ours, plain)
    pull = torch.randn_like(plain)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), pull), torch.autograd.grad(plain, (q, k, v), pull), strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_looks_ahead():
    """Changing a later token changes no earlier hidden state."""
    model = Decoder(tiny(), 16, CPU)
    tokens = torch.randint(300, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 300
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.equal(a[:, 9:], b[:, 9:])


def test_weights_are_those_of_the_seed():
    a, b, c = (Decoder(tiny(), 8, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(a.embedding, b.embedding) and not torch.equal(a.embedding, c.embedding)
