"""The decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention, tied embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.config import SIZES, ModelConfig, shape_for
from trainer.loss import linear_cross_entropy

__all__ = ["SIZES", "Decoder", "ModelConfig", "shape_for"]


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x over its root mean square, times `gain`; x (..., d), gain (d,)."""
    return F.rms_norm(x, (x.shape[-1],), gain, eps)


class _NormLinear(torch.autograd.Function):
    """linear(rms_norm(x)), keeping x and one number per row instead of the normed rows (4 d bytes per token less)."""

    @staticmethod
    def forward(ctx, x, gain, weight, eps):
        rstd = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd, gain, weight)
        return F.linear((x * rstd).mul_(gain), weight)

    @staticmethod
    def backward(ctx, d_y):
        x, rstd, gain, weight = ctx.saved_tensors
        unit = x * rstd
        rows = d_y.flatten(0, -2)
        d_weight = rows.T @ (unit * gain).flatten(0, -2)
        d_normed = d_y @ weight
        d_gain = (d_normed * unit).flatten(0, -2).sum(0)
        d_unit = d_normed.mul_(gain)
        mean = (d_unit * unit).mean(-1, keepdim=True)
        return d_unit.sub_(unit.mul_(mean)).mul_(rstd), d_gain, d_weight, None


class _SwiGLULinear(torch.autograd.Function):
    """linear(silu(gate) * up), keeping only the product's input gate_up (4 d_ff bytes per token less)."""

    @staticmethod
    def forward(ctx, gate_up, weight):
        ctx.save_for_backward(gate_up, weight)
        gate, up = gate_up.chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx, d_y):
        gate_up, weight = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        d_weight = d_y.flatten(0, -2).T @ (silu * up).flatten(0, -2)
        d_hidden = d_y @ weight
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, -1)
        torch.mul(d_hidden, silu, out=d_up)
        # silu' = sigmoid (1 + gate (1 - sigmoid)) = sigmoid + silu (1 - sigmoid)
        slope = silu.mul_(1 - sigmoid).add_(sigmoid)
        torch.mul(d_hidden.mul_(up), slope, out=d_gate)
        return d_gate_up, d_weight


def rope_tables(length: int, head_size: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (length, 1, head_size / 2), of position x base^(-2i / head_size) (arXiv 2104.09864)."""
    frequency = base ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float64) / head_size)
    angle = torch.arange(length, device=device, dtype=torch.float64)[:, None, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + head_size / 2) of x (batch, length, heads, head_size) by their position's angles."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; q (batch, length, heads, head_size), k and v with kv_heads; returns q's shape.

    Query head j reads kv head j // (heads / kv_heads). Only the processor's kernel groups by itself in fp32: on a card
    enable_gqa would fall to the plain path, which holds all length x length scores.
    """
    grouped = q.shape[2] != k.shape[2]
    if grouped and q.device.type != "cpu":
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        grouped = False
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


class Block(nn.Module):
    """One layer; q, k, v come from one product, gate and up from another."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.config = config
        d, kv = config.d_model, config.kv_heads * config.head_size

        def weight(*shape):
            return nn.Parameter(torch.empty(shape, device=device))

        self.attention_norm, self.qkv, self.out = weight(d), weight(d + 2 * kv, d), weight(d, d)
        self.ff_norm, self.gate_up, self.down = weight(d), weight(2 * config.d_ff, d), weight(d, config.d_ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lean: bool) -> Tensor:
        """x (batch, length, d_model) to the same; `lean` recomputes norms, SiLU and gate in backward."""
        c = self.config
        if lean:
            qkv = _NormLinear.apply(x, self.attention_norm, self.qkv, c.norm_eps)
        else:
            qkv = F.linear(rms_norm(x, self.attention_norm, c.norm_eps), self.qkv)
        qkv = qkv.unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_size))
        q, k = rope(qkv[:, :, :-c.kv_heads], cos, sin).split((c.heads, c.kv_heads), 2)
        x = x + F.linear(attention(q, k, qkv[:, :, -c.kv_heads:]).flatten(-2), self.out)
        if lean:
            return x + _SwiGLULinear.apply(_NormLinear.apply(x, self.ff_norm, self.gate_up, c.norm_eps), self.down)
        gate, up = F.linear(rms_norm(x, self.ff_norm, c.norm_eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Decoder(nn.Module):
    """The model, its weights made on `device` from `seed`; `length` is the longest sequence it will see."""

    def __init__(self, config: ModelConfig, length: int, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.d_model, device=device))
        self.blocks = nn.ModuleList(Block(config, device) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.d_model, device=device))
        cos, sin = rope_tables(length, config.head_size, config.rope_base, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights(torch.Generator(device).manual_seed(seed))

    @torch.no_grad()
    def _init_weights(self, generator: torch.Generator) -> None:
        # GPT-2's: normal of 0.02, the two products that add to the residual stream smaller by sqrt(2 layers)
        residual = 0.02 / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, residual if name.endswith(("out", "down")) else 0.02, generator=generator)

    def forward(self, tokens: Tensor, recompute: str = "none") -> Tensor:
        """Hidden states after the last norm, (batch, length, d_model), of int tokens (batch, length)."""
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            if recompute == "block" and torch.is_grad_enabled():
                # nothing in a block is random, so no generator state needs keeping
                x = checkpoint(block, x, cos, sin, True, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin, recompute != "none")
        return rms_norm(x, self.norm, self.config.norm_eps)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of hidden states (batch, length, d_model) against targets (batch, length)."""
        return linear_cross_entropy(hidden.flatten(0, 1), self.embedding, targets.flatten().long())
