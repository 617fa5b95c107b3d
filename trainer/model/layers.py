"""The layers' operations with their backward passes written out, so that what each keeps is decided here.

Kept per token and layer, in units of d_model x 4 bytes, at 12 heads, 4 kv heads and d_ff = 8/3 d_model:

                              none    elementwise
    input of the norm         1       1
    normed input              1       -
    q, k, v after RoPE        1.67    1.67
    result of attention       1       1
    input of the second norm  1       1
    normed input              1       -
    gate and up               5.33    5.33
    their product             2.67    -
    in all                    14.67   10

Plain autograd keeps 21: also k and v repeated for every query head, SiLU's result, and q and k before RoPE. `block` keeps
only each block's input, 1, and makes the rest again as `elementwise` does. The plain formulas are in decoder.py; tests
compare the two in float64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

aten = torch.ops.aten


def norm_parts(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x (..., d) with gain (d,), 1 / root mean square of each row (..., 1))."""
    return aten._fused_rms_norm(x, [x.shape[-1]], gain, eps)


def norm_backward(d_normed: Tensor, x: Tensor, rstd: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient by x, by gain), of norm_parts' `rstd` and the gradient by its result, d_normed. May write over d_normed."""
    if x.device.type == "cuda":
        return aten._fused_rms_norm_backward(d_normed, x, [x.shape[-1]], rstd, gain, [True, True])
    unit = x * rstd
    d_gain = (d_normed * unit).flatten(0, -2).sum(0)
    d_unit = d_normed.mul_(gain)
    mean = (d_unit * unit).mean(-1, keepdim=True)
    return d_unit.sub_(unit.mul_(mean)).mul_(rstd), d_gain


class NormLinear(Function):
    """linear(rms_norm(x)) of x (..., d), gain (d,), weight (out, d); `lean` norms again in backward, which reads and
    writes x once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, weight: Tensor, eps: float, lean: bool) -> Tensor:
        normed, rstd = norm_parts(x, gain, eps)
        ctx.save_for_backward(x, rstd, gain, weight, None if lean else normed)
        ctx.eps = eps
        return normed @ weight.T

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, gain, weight, normed = ctx.saved_tensors
        if normed is None:
            normed, _ = norm_parts(x, gain, ctx.eps)
        d_weight = d_y.flatten(0, -2).T @ normed.flatten(0, -2)
        del normed
        d_x, d_gain = norm_backward(d_y @ weight, x, rstd, gain)
        return d_x, d_gain, d_weight, None, None


class SwiGLULinear(Function):
    """linear(silu(gate) * up) of gate_up (..., 2 d_ff), weight (out, d_ff); `lean` makes the product again in backward. The
    gradient is written over gate_up, which nothing else reads."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, lean: bool) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        hidden = aten.silu(gate).mul_(up)
        ctx.save_for_backward(gate_up, weight, None if lean else hidden)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight, hidden = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        silu = aten.silu(gate)
        if hidden is None:
            hidden = silu * up
        d_weight = d_y.flatten(0, -2).T @ hidden.flatten(0, -2)
        del hidden
        d_hidden = d_y @ weight
        d_silu = d_hidden * up
        torch.mul(d_hidden, silu, out=up)
        aten.silu_backward.grad_input(d_silu, gate, grad_input=gate)
        return gate_up, d_weight, None


def turn_(x: Tensor, angles: Tensor) -> None:
    """RoPE in place: each pair of neighbours in x (batch, length, heads, head_size) as a complex number times its
    position's in `angles` (length, 1, head_size / 2): one kernel, where real arithmetic takes five."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(angles)


def has_kernel(device_type: str, head_size: int, dtype: torch.dtype) -> bool:
    """Whether torch has an attention kernel here that holds no length x length scores: on a card the memory-efficient
    one, which wants rows of 16 bytes."""
    return device_type == "cpu" or (device_type == "cuda" and head_size * dtype.itemsize % 16 == 0)


class Attention(Function):
    """Causal attention of qkv (batch, length, heads + 2 kv_heads, head_size), RoPE included, to (batch, length, heads,
    head_size). Turns qkv in place, and repeats k and v for their query heads only while a kernel runs."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, angles: Tensor, heads: int, kv_heads: int) -> Tensor:
        turn_(qkv[:, :, :-kv_heads], angles)
        q, k, v = Attention.split(qkv, heads, kv_heads)
        if qkv.device.type == "cpu":
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        else:
            out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
        ctx.save_for_backward(qkv, angles, out, lse)
        ctx.heads, ctx.kv_heads = heads, kv_heads
        return out.transpose(1, 2)

    @staticmethod
    def split(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as (batch, heads, length, head_size), k and v repeated in one copy."""
        kv = qkv[:, :, heads:].unflatten(2, (2, kv_heads, 1))
        kv = kv.expand(-1, -1, -1, -1, heads // kv_heads, -1).flatten(3, 4)
        return qkv[:, :, :heads].transpose(1, 2), kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        qkv, angles, out, lse = ctx.saved_tensors
        heads, kv_heads = ctx.heads, ctx.kv_heads
        q, k, v = Attention.split(qkv, heads, kv_heads)
        d_out = d_out.transpose(1, 2)
        if qkv.device.type == "cpu":
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(d_out, q, k, v, out, lse, 0.0, True)
        else:
            unused = torch.empty(0, dtype=torch.int64, device=qkv.device)  # seed and offset of a dropout of zero
            grads = aten._scaled_dot_product_efficient_attention_backward(
                d_out, q, k, v, None, out, lse, unused, unused, 0.0, [True, True, True, False], True)
        del q, k, v
        d_qkv = torch.empty_like(qkv)
        d_qkv[:, :, :heads] = grads[0].transpose(1, 2)
        for start, grad in ((heads, grads[1]), (heads + kv_heads, grads[2])):
            torch.sum(grad.transpose(1, 2).unflatten(2, (kv_heads, -1)), 3, out=d_qkv[:, :, start:start + kv_heads])
        turn_(d_qkv[:, :, :-kv_heads], angles.conj())
        return d_qkv, None, None, None
