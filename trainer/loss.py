"""Linear cross-entropy that never holds the full logits, and makes its gradients as it goes."""

import torch
from torch import Tensor

IGNORE = -100
"""Target that takes no part in the loss, as in torch.nn.functional.cross_entropy."""


def chunk_rows(rows: int, d_model: int) -> int:
    """Rows of logits computed at a time, of `rows` in all.

    At d_model rows a chunk is as large as the embedding's gradient, and a card's products are within 5% of their best (an
    H200 at V 32000: 47, 51 and 46 TFLOP/s at 768 rows, 50, 53 and 50 at 4096). An eighth of the rows, where that is more,
    is little beside the activations of so many tokens. From 256 rows on a product fills a small card.
    """
    return min(rows, max(256, d_model, rows // 8 // 256 * 256))


@torch.no_grad()
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0,
                         d_weight: Tensor | None = None, add: bool = False) -> Tensor:
    """The mean cross-entropy of `x @ weight.T` against `targets` over those that are not IGNORE, times `scale`.

    x (rows, d_model), weight (vocab, d_model), targets (rows,) int64. With `d_weight` the gradients are made as well: the
    weight's is written into it, or added to it with `add`, so that one buffer serves the tied embedding through all
    micro-steps, and x's is written over x. Takes no part in autograd.
    """
    valid = targets != IGNORE
    row_scale = (valid.to(x.dtype).mul_(scale) / valid.sum().clamp(min=1))[:, None]
    target = torch.where(valid, targets, 0)[:, None]
    loss = torch.zeros((), device=x.device, dtype=x.dtype)
    step = chunk_rows(*x.shape)
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        logits = x[rows] @ weight.T
        picked = logits.gather(1, target[rows])
        largest, where = logits.max(1, keepdim=True)
        # softmax in the logits' own memory; its largest value is at least 1/vocab, so this logarithm loses nothing where
        # -log(p[target]) would underflow
        torch.softmax(logits, 1, out=logits)
        loss += ((largest - picked - logits.gather(1, where).log_()) * row_scale[rows]).sum()
        if d_weight is not None:
            logits.scatter_add_(1, target[rows], torch.full_like(picked, -1))
            scaled = x[rows] * row_scale[rows]  # d_model wide, where scaling the logits would be vocab wide
            if add or start:
                d_weight.addmm_(logits.T, scaled)
            else:
                torch.mm(logits.T, scaled, out=d_weight)
            torch.mm(logits, weight, out=x[rows])
            x[rows] *= row_scale[rows]
        del logits  # before the next chunk is made
    return loss
