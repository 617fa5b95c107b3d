"""The operations with their backward passes written out give what the plain formulas give in float64."""

import pytest
import torch
import torch.nn.functional as F
from helpers.made import tiny

from trainer.model.decoder import Decoder, attention, halves_to_pairs, rms_norm, rope, rope_angles
from trainer.model.layers import Attention, NormLinear, SwiGLULinear
from trainer.model.loss import chunk_rows, head_loss

CPU = torch.device("cpu")
IGNORE = -100
"""A target without a loss, as torch.nn.functional has it; ours is any below 0."""


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


EPS = 1e-5


def gradients(x, gain, weight, targets, scale=1.0, before=None):
    """(loss, d_x, d_gain, d_weight) by ours; with `before` added to those, (d_gain, d_weight)."""
    rows = x.detach().clone()
    d_gain, d_weight = before or (torch.full_like(t, torch.nan) for t in (gain, weight))
    loss = head_loss(rows, gain.detach(), weight.detach(), targets, EPS, scale, d_gain=d_gain, d_weight=d_weight,
                     add=before is not None)
    return loss, rows, d_gain, d_weight


@pytest.mark.parametrize("rows", [1, 511, 512, 700, 9000])
def test_loss_and_its_gradients_equal_cross_entropy_over_full_logits(rows):
    """Any number of rows, whole chunks or not, some targets ignored."""
    inputs = x, gain, weight = doubles(rows, 16), doubles(16), doubles(50, 16)
    targets = torch.randint(50, (rows,))
    targets[::3] = IGNORE
    targets[-1] = 7
    loss, *ours = gradients(x, gain, weight, targets, 3.0)
    plain = F.cross_entropy(rms_norm(x, gain, EPS) @ weight.T, targets, ignore_index=IGNORE)
    assert loss.item() == pytest.approx(3 * plain.item(), rel=1e-12)
    assert head_loss(x, gain, weight, targets, EPS).item() == pytest.approx(plain.item(), rel=1e-12)
    for a, b in zip(ours, torch.autograd.grad(3 * plain, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_the_gradients_by_the_weights_add_up_over_micro_steps():
    x, gain, weight, targets = doubles(700, 16), doubles(16), doubles(50, 16), torch.randint(50, (700,))
    _, _, *once = gradients(x, gain, weight, targets)
    _, _, *twice = gradients(x, gain, weight, targets, before=[t.clone() for t in once])
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(2 * a, b)


def test_loss_survives_logits_whose_probability_underflows():
    x, gain, weight = torch.tensor([[1.0, 1.0]]), torch.tensor([200.0, 0.0]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert head_loss(x, gain, weight, torch.tensor([1]), EPS).item() == pytest.approx(400, rel=1e-4)


def test_a_batch_without_targets_has_loss_zero_and_no_gradient():
    loss, *grads = gradients(doubles(4, 8), doubles(8), doubles(9, 8), torch.full((4,), IGNORE))
    assert loss.item() == 0
    assert not any(g.any() for g in grads)


def test_a_chunk_is_512_rows_or_an_eighth():
    assert [chunk_rows(n) for n in (100, 512, 2048, 16_384, 17_000)] == [100, 512, 512, 2048, 2048]


def test_rms_norm_is_its_formula():
    x, gain = doubles(5, 8), doubles(8)
    torch.testing.assert_close(rms_norm(x, gain, 1e-5), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain)


@pytest.mark.parametrize("lean", [False, True])
def test_norm_and_product_have_the_gradients_of_the_plain_ones(lean):
    x, gain, weight = doubles(2, 3, 8), doubles(8), doubles(6, 8)
    assert torch.autograd.gradcheck(lambda *a: NormLinear.apply(*a, 1e-5, lean), (x, gain, weight))
    torch.testing.assert_close(NormLinear.apply(x, gain, weight, 1e-5, lean), F.linear(rms_norm(x, gain, 1e-5), weight))


@pytest.mark.parametrize("lean", [False, True])
def test_swiglu_and_product_have_the_gradients_of_the_plain_ones(lean):
    """Its gradient is written over its input, so that is a fresh copy for each call."""
    def ours(gate_up, weight):
        return SwiGLULinear.apply(gate_up.clone(), weight, lean)

    def plain(gate_up, weight):
        gate, up = gate_up.chunk(2, -1)
        return F.linear(F.silu(gate) * up, weight)

    same_gradients(ours, plain, doubles(2, 3, 10), doubles(4, 5))


def same_gradients(ours, plain, *inputs):
    a, b = ours(*inputs), plain(*inputs)
    torch.testing.assert_close(a, b)
    pull = torch.randn_like(b)
    for x, y in zip(torch.autograd.grad(a, inputs, pull), torch.autograd.grad(b, inputs, pull), strict=True):
        torch.testing.assert_close(x, y)


def test_rope_turns_pairs_by_position_so_that_products_depend_on_distance_alone():
    angles = rope_angles(12, 8, 10_000.0, CPU)
    q, k = doubles(1, 1, 1, 8), doubles(1, 1, 1, 8)
    turned_q, turned_k = (rope(t.expand(1, 12, 1, 8), angles)[0, :, 0] for t in (q, k))
    products = turned_q @ turned_k.T
    for distance in range(1, 11):
        torch.testing.assert_close(products[distance, 0], products[11, 11 - distance], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(turned_q[0], q[0, 0, 0])
    assert torch.autograd.gradcheck(lambda x: rope(x, angles), doubles(1, 12, 2, 8))


def test_pairs_of_neighbours_are_the_pairs_of_halves_in_another_order():
    """Scores by neighbours, of permuted projections, equal those that Hugging Face's Llama has by halves."""
    x, w_q, w_k = doubles(1, 6, 16), doubles(16, 16), doubles(16, 16)
    angles = rope_angles(6, 8, 10_000.0, CPU)

    def by_halves(t):
        first, second = t.chunk(2, -1)
        cos, sin = angles.real, angles.imag
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    scores = [torch.einsum("blhd,bmhd->bhlm", *(turn(F.linear(x, w).unflatten(-1, (2, 8))) for w in pair))
              for turn, pair in ((by_halves, (w_q, w_k)),
                                 (lambda t: rope(t, angles), (halves_to_pairs(w_q, 8), halves_to_pairs(w_k, 8))))]
    torch.testing.assert_close(*scores)


def test_attention_with_rope_has_the_gradients_of_the_plain_formulas():
    angles = rope_angles(5, 6, 10_000.0, CPU)

    def ours(qkv):
        return Attention.apply(qkv.clone(), angles, 4, 2)  # turns it in place

    def plain(qkv):
        q, k = rope(qkv[:, :, :6], angles).split((4, 2), 2)
        return attention(q, k, qkv[:, :, 6:])

    same_gradients(ours, plain, doubles(2, 5, 8, 6))


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
        a, b = model(model.embed(tokens)), model(model.embed(changed))
    assert torch.equal(a[:, :9], b[:, :9])
    assert not torch.equal(a[:, 9:], b[:, 9:])


def test_weights_are_those_of_the_seed():
    a, b, c = (Decoder(tiny(), 8, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(a.embedding, b.embedding)
    assert not torch.equal(a.embedding, c.embedding)


@pytest.mark.parametrize("recompute", ["none", "elementwise", "block"])
def test_a_whole_model_has_the_gradients_of_the_plain_formulas(recompute):
    model = Decoder(tiny(), 16, CPU).double()
    model.angles = rope_angles(16, 8, 10_000.0, CPU)
    x = doubles(2, 16, 32)
    inputs = [x, *model.blocks.parameters()]
    a, b = model(x, recompute), model(x, plain=True)
    torch.testing.assert_close(a, b)
    pull = torch.randn_like(b)
    for ours, plain in zip(torch.autograd.grad(a, inputs, pull), torch.autograd.grad(b, inputs, pull), strict=True):
        torch.testing.assert_close(ours, plain)
