"""What the operations of trainer/model/layers.py and loss.py ask of a card's allocator, in their order. Imports no torch.

Sizes and order are as seen in torch 2.11's allocator history on an H200, what kernels take for themselves included.
"""

from collections.abc import Hashable

from probe.estimate.allocation_trace import BOOL, COMPLEX, FLOAT, INT, LONG, AllocationTrace
from trainer.config import ModelConfig, StepConfig

SORT_SINGLE, SORT_TILE = 256 * 9, 384 * 12
"""Rows that CUB's radix sort of 8-byte keys takes in one block without storage, and rows per block past that (its tuning
for compute capability 8.0 and up); fits 1 byte at 1,920 rows and the storage of seven sizes from 2,560 to 131,072."""


def chunk_rows(rows: int) -> int:
    """As trainer.model.loss.chunk_rows, which can't be imported without torch."""
    return min(rows, max(512, rows // 8 // 256 * 256))


class Operations:
    """Writes each operation's events to `trace`. Sizes in bytes; rows = batch x length."""

    def __init__(self, trace: AllocationTrace, model: ModelConfig, step: StepConfig) -> None:
        m = model
        self._trace, self._model, self._config = trace, model, step
        self.take, self.drop = trace.take, trace.drop
        self.rows = step.batch * step.length
        kv = m.kv_heads * m.head_size
        self.x, self.row = self.rows * m.d_model * FLOAT, self.rows * FLOAT
        self.qkv, self.ff = self.rows * (m.d_model + 2 * kv) * FLOAT, self.rows * m.d_ff * FLOAT
        d = m.d_model * FLOAT
        self.block_weights = {"attention_norm": d, "qkv": (m.d_model + 2 * kv) * d, "out": m.d_model * d, "ff_norm": d,
                              "gate_up": 2 * m.d_ff * d, "down": m.d_ff * d}
        self.head_weights = {"embedding": m.vocab * d, "norm": d}
        self.angles = step.length * m.head_size // 2 * COMPLEX
        self.in_backward = step.update == "backward"

    def gradient(self, key: Hashable, size: int) -> int:
        return self._trace.keep(("gradient", key), size, "gradients")

    def update(self, key: Hashable, size: int) -> None:
        self._trace.keep(("step", key), FLOAT, "optimizer")
        for moment in ("exp_avg", "exp_avg_sq"):
            self._trace.keep((moment, key), size, "optimizer")

    def targets(self) -> int:
        flat = self.take(self.rows * INT, "loss")
        targets = self.take(self.rows * LONG, "loss")
        self.drop(flat)
        return targets

    def embed(self) -> int:
        inputs = self.take(self.rows * INT, "workspaces")  # in one piece
        x = self.take(self.x)
        self.drop(inputs)
        return x

    def block(self, x: int, recompute: str) -> dict[str, int]:
        """Block.forward. Of the results `none` and `elementwise` keep what layers.py says, "nothing" the output alone, and
        "again" (which the backward pass of a recomputed block does) all that `elementwise` does but the output."""
        keeps_rstd, keeps_all = recompute != "nothing", recompute == "none"
        s = {"x": x}

        def norm_linear(of: str, size: int) -> None:
            s[of + "_normed"], s[of + "_rstd"] = self.take(self.x), self.take(self.row)
            s[of] = self._trace.matmul(size)
            if not keeps_all:
                self.drop(s[of + "_normed"])
            if not keeps_rstd:
                self.drop(s[of + "_rstd"])

        norm_linear("qkv", self.qkv)
        repeated = self.repeat_kv()
        # a recorded kernel's seed and offset
        generator = [self.take(LONG, "workspaces") for _ in range(2)] if self._trace.recording else []
        s["mixed"], s["lse"] = self.take(self.x), self.take(self.lse())
        self.drop(*generator[:1], *repeated, *generator[1:], *(() if keeps_rstd else (s["lse"],)))
        product = self._trace.matmul(self.x)
        s["middle"] = self.take(self.x)
        self.drop(product)
        norm_linear("gate_up", 2 * self.ff)
        s["hidden"] = self.take(self.ff)
        product = self._trace.matmul(self.x)
        if not keeps_all:
            self.drop(s["hidden"])
        if recompute == "again":
            self.drop(product)
            return s
        if not keeps_rstd:
            self.drop(s["gate_up"])
        s["y"] = self.take(self.x)
        self.drop(product)
        if not keeps_rstd:
            self.drop(s["middle"], s["qkv"], s["mixed"])
        return s

    def repeat_kv(self) -> list[int]:
        """k and v repeated for their query heads: a view where each has one."""
        return [self.take(2 * self.x)] if self._model.heads > self._model.kv_heads else []

    def lse(self) -> int:
        """The kernel's logarithms of sums: lengths in 32s (kAlignLSE, kernel_forward.h of torch's mem_eff_attention)."""
        return self._config.batch * self._model.heads * -(-self._config.length // 32) * 32 * FLOAT

    def block_backward(self, layer: int, s: dict[str, int], add: bool, d_x: int | None) -> int:
        """The backward pass of one block; `d_x` is the residual stream's gradient, None before the first, where it is
        the head's and may not be written over. Returns it."""
        recompute = self._config.recompute

        def finish(*names: str) -> None:
            """The gradients `names` of this layer are whole: kept, added to what was there, or used at once."""
            for name in names:
                key = (name, layer)
                if self.in_backward:
                    self.update(key, self.block_weights[name])
                if add or self.in_backward:
                    self.drop(made[name])

        def weight_gradient(name: str) -> None:
            size = self.block_weights[name]
            made[name] = self.take(size, "gradients") if add or self.in_backward else self.gradient((name, layer), size)

        def norm_linear_backward(of: str, weight: str, gain: str) -> tuple[int, list[int]]:
            """Returns the gradient by x, and a second 1 / root mean square where the norm was made again."""
            again = [] if recompute == "none" else [self.take(self.x), self.take(self.row)]
            weight_gradient(weight)
            self.drop(*again[:1])
            d_normed = self.take(self.x)
            result = self.take(self.x)
            weight_gradient(gain)
            self.drop(d_normed)
            return result, again[1:]

        made: dict[str, int] = {}
        silu = self.take(self.ff)
        hidden = [] if recompute == "none" else [self.take(self.ff)]
        weight_gradient("down")
        self.drop(*hidden)
        d_hidden, d_silu = self.take(self.ff), self.take(self.ff)
        self.drop(silu, d_hidden, d_silu, *((s["hidden"],) if recompute == "none" else ()))
        finish("down")
        result, again = norm_linear_backward("gate_up", "gate_up", "ff_norm")
        normed = [s["gate_up_normed"]] if recompute == "none" else []
        if recompute == "block":  # whose saved tensors live for one function only
            self.drop(s["middle"], s["gate_up_rstd"], *again, s["gate_up"])
        else:
            self.drop(*again, s["gate_up"], s["middle"], s["gate_up_rstd"], *normed)
        if d_x is None:
            d_x = self.take(self.x)
        self.drop(result)
        finish("ff_norm", "gate_up")
        weight_gradient("out")
        d_mixed = self.take(self.x)
        finish("out")
        d_qkv = self.attention_backward(s, d_mixed)
        result, again = norm_linear_backward("qkv", "qkv", "attention_norm")
        inputs = [s["x"]] if layer else []  # the first block's are held by the step
        normed = [s["qkv_normed"]] if recompute == "none" else []
        if recompute == "block":
            self.drop(s["qkv_rstd"], *again, d_qkv, *inputs, result)
        else:
            self.drop(*again, d_qkv, *inputs, s["qkv_rstd"], *normed, result)
        finish("attention_norm", "qkv")
        return d_x

    def attention_backward(self, s: dict[str, int], d_mixed: int) -> int:
        """Attention.backward; returns qkv's gradient. The kernel takes (_efficient_attention_backward,
        attention_backward.cu) three gradients, delta = (d_out * out).sum(-1) made contiguous, and for each head and 64
        queries a lock and a tile of 64 x 64 (GradQTempStorage, kernel_backward.h), which is right for heads of 64 and
        less: no named size has larger ones."""
        m, c = self._model, self._config
        repeated = self.repeat_kv()
        d_q, d_k, d_v = (self.take(self.x) for _ in range(3))
        product = self.take(self.x, "workspaces")
        deltas = [self.take(self.rows * m.heads * FLOAT, "workspaces") for _ in range(2 if m.heads > 1 else 1)]
        self.drop(*deltas[:-1], product)
        tiles = self.take(c.batch * m.heads * -(-c.length // 64) * (64 * 64 * FLOAT + 16), "workspaces")
        self.drop(deltas[-1], tiles, *repeated)
        d_qkv = self.take(self.qkv)
        self.drop(self.take(self.angles))  # their conjugate
        kernel, saved = (d_k, d_q, d_v, d_mixed), (s["qkv"], s["mixed"], s["lse"])
        self.drop(*(saved + kernel if c.recompute == "block" else kernel + saved))
        return d_qkv

    def head(self, gradients: bool) -> int:
        """loss.head_loss; returns the loss."""
        def take(size: int) -> int:
            return self.take(size, "loss")

        valid, scale, total = take(self.rows * BOOL), take(self.row), take(LONG)
        self.drop(self.take(self.rows * LONG, "workspaces"))  # `valid` as longs
        at_least = take(LONG)
        self.drop(total)
        row_scale = take(self.row)
        self.drop(scale, at_least)
        ignored = take(LONG)
        target = take(self.rows * LONG)
        self.drop(ignored)
        loss = take(FLOAT)
        chunk = chunk_rows(self.rows)
        # of the chunk before, whose memory is still there while the next one's is taken
        rstd: list[int] = []
        picked: list[int] = []
        largest: list[int] = []
        d_x: list[int] = []
        for start in range(0, self.rows, chunk):
            rows = min(chunk, self.rows - start)
            normed, new_rstd = take(rows * self._model.d_model * FLOAT), take(rows * FLOAT)
            self.drop(*rstd)
            rstd = [new_rstd]
            logits = self._trace.matmul(rows * self._model.vocab * FLOAT, "loss")
            new_picked = take(rows * FLOAT)
            self.drop(*picked)
            picked = [new_picked]
            new_largest = [take(rows * FLOAT), take(rows * LONG)]
            self.drop(*largest)
            largest = new_largest
            apart, likely, difference = (take(rows * FLOAT) for _ in range(3))
            self.drop(apart, likely)
            scaled = take(rows * FLOAT)
            self.drop(difference)
            part = take(FLOAT)
            self.drop(scaled, part)
            if gradients:
                self.drop(take(rows * FLOAT))
                new_d_x = [take(rows * self._model.d_model * FLOAT), take(self._model.d_model * FLOAT)]
                self.drop(*d_x)
                d_x = new_d_x
            self.drop(logits, normed)
        self.drop(valid, row_scale, target, *rstd, *picked, *largest, *d_x)
        return loss

    def add_rows(self) -> None:
        """index_put_ of the embedded tokens' gradients: the tokens as longs, their bounds, and a sort of them with its
        storage, which is two more pairs of keys and a histogram (index_put_with_sort_kernel, Indexing.cu)."""
        def take(size: int) -> int:
            return self.take(size, "workspaces")

        size = self.rows * LONG
        inputs, first = self.take(self.rows * INT), take(size)
        for _ in range(2):
            bound, reduced = take(LONG), take(BOOL)
            self.drop(reduced, bound)
        linear, index = take(size), take(size)
        self.drop(linear, first)
        pairs = [take(size) for _ in range(3)]
        histograms = 4 + -(-self.rows // SORT_TILE)  # of 256 counters, for the passes and for each block
        storage = take(1 if self.rows <= SORT_SINGLE else 2 * (-(-size // 256) * 256) + histograms * 1024 + 511)
        self.drop(storage, *reversed(pairs), index, inputs)
