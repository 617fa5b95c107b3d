"""The decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention, tied embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.config import ModelConfig
from trainer.model.layers import Attention, NormLinear, SwiGLULinear, has_kernel


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x over its root mean square, times `gain`; x (..., d), gain (d,)."""
    return F.rms_norm(x, (x.shape[-1],), gain, eps)


def rope_angles(length: int, head_size: int, base: float, device: torch.device) -> Tensor:
    """e^(i position base^(-2j / head_size)) as complex64 (length, 1, head_size / 2): RoFormer, arXiv 2104.09864, eq. 34.
    The pairs are neighbours as there, not halves as in Hugging Face's Llama; `halves_to_pairs` takes one to the other."""
    # made on the processor: not every device has float64
    frequency = base ** (-torch.arange(0, head_size, 2, device="cpu", dtype=torch.float64) / head_size)
    angle = torch.arange(length, device="cpu", dtype=torch.float64)[:, None, None] * frequency
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64).to(device)


def halves_to_pairs(weight: Tensor, head_size: int) -> Tensor:
    """Rows of a q or k projection whose RoPE pairs i with i + head_size / 2, in the order in which it pairs neighbours."""
    return weight.unflatten(0, (-1, 2, head_size // 2)).transpose(1, 2).flatten(0, 2)


def pairs_to_halves(weight: Tensor, head_size: int) -> Tensor:
    """The inverse of `halves_to_pairs`."""
    return weight.unflatten(0, (-1, head_size // 2, 2)).transpose(1, 2).flatten(0, 2)


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Turns neighbours of x (batch, length, heads, head_size) by their position's angles; the plain formula."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.real, angles.imag
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; q (batch, length, heads, head_size), k and v with kv_heads; returns q's shape. Query head j reads
    kv head j // (heads / kv_heads). The plain formula: torch's own enable_gqa would hold all scores on a card in fp32."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """One layer; q, k, v come from one product, gate and up from another."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.config = config
        d, kv = config.d_model, config.kv_heads * config.head_size

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device))

        self.attention_norm, self.qkv, self.out = weight(d), weight(d + 2 * kv, d), weight(d, d)
        self.ff_norm, self.gate_up, self.down = weight(d), weight(2 * config.d_ff, d), weight(d, config.d_ff)

    def forward(self, x: Tensor, angles: Tensor, lean: bool) -> Tensor:
        """x (batch, length, d_model) to the same, by the operations of layers.py."""
        c = self.config
        qkv = NormLinear.apply(x, self.attention_norm, self.qkv, c.norm_eps, lean)
        qkv = qkv.unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_size))
        if has_kernel(x.device.type, c.head_size, x.dtype):
            mixed = Attention.apply(qkv, angles, c.heads, c.kv_heads)
        else:
            mixed = attention(*self.turned(qkv, angles))
        x = x + mixed.flatten(-2) @ self.out.T
        return x + SwiGLULinear.apply(NormLinear.apply(x, self.ff_norm, self.gate_up, c.norm_eps, lean), self.down, lean)

    def turned(self, qkv: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, the first two turned, each (batch, length, heads or kv_heads, head_size)."""
        heads, kv_heads = self.config.heads, self.config.kv_heads
        q, k = rope(qkv[:, :, :-kv_heads], angles).split((heads, kv_heads), 2)
        return q, k, qkv[:, :, -kv_heads:]

    def plain(self, x: Tensor, angles: Tensor) -> Tensor:
        """What `forward` gives, by the plain formulas: for the compiler, which fuses them itself, and for tests."""
        return self.finish(x, attention(*self.projected(x, angles)))

    def projected(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What attention takes of x (batch, length, d_model), as `turned` gives it."""
        c = self.config
        qkv = F.linear(rms_norm(x, self.attention_norm, c.norm_eps), self.qkv)
        return self.turned(qkv.unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_size)), angles)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The block's result, (batch, length, d_model), of its input x and its attention's result `mixed`, (batch, length,
        heads, head_size)."""
        x = x + F.linear(mixed.flatten(-2), self.out)
        gate, up = F.linear(rms_norm(x, self.ff_norm, self.config.norm_eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Decoder(nn.Module):
    """The model, its weights made on `device` from `seed`; `length` is the longest sequence it will see."""

    def __init__(self, config: ModelConfig, length: int, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.d_model, device=device))
        self.blocks = nn.ModuleList(Block(config, device) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.d_model, device=device))
        # no buffer: data-parallel training would send it round before every step
        self.angles = rope_angles(length, config.head_size, config.rope_base, device)
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

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding for int tokens (batch, length), outside of autograd: its gradient is added by hand."""
        return F.embedding(tokens, self.embedding.detach())

    def forward(self, x: Tensor, recompute: str = "none", plain: bool = False) -> Tensor:
        """The last block's output, (batch, length, d_model), of embedded tokens x of the same shape; the last norm belongs
        to the head, which takes it chunk by chunk."""
        angles = self.angles[: x.shape[1]]
        for block in self.blocks:
            layer, extra = (block.plain, ()) if plain else (block, (recompute != "none",))
            if recompute == "block" and torch.is_grad_enabled():
                # nothing in a block is random, so no generator state needs keeping
                x = checkpoint(layer, x, angles, *extra, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, angles, *extra)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """The scores (..., vocab) of outputs x (..., d_model)."""
        return F.linear(rms_norm(x, self.norm, self.config.norm_eps), self.embedding)
