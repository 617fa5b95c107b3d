"""The model's head: norm, product with the embedding and cross-entropy, chunk by chunk, so that the full logits never
exist; the gradients are made as it goes.

torch 2.13 has linear_cross_entropy with chunks. On two cores, 4096 rows of 192 at V 32000, it took 3.4 s and 150 MB where
this takes 1.7 s and 96 MB (cross-entropy over full logits: 2.3 s and 1,615 MB), and it has no place for the tied embedding's
one buffer; so this is kept.
"""

import torch
from torch import Tensor

from trainer.model.layers import norm_backward, norm_parts


def chunk_rows(rows: int) -> int:
    """Rows of logits computed at a time, of `rows` in all: 512, or an eighth of them where that is more.

    512 rows at V 32000 are 66 MB, and an H200's products run at 47, 49 and 44 TFLOP/s (768 rows: 98 MB; 47, 51 and 46;
    4096 rows: 524 MB; 50, 53 and 50). An eighth is little beside the activations of so many tokens.
    """
    return min(rows, max(512, rows // 8 // 256 * 256))


@torch.no_grad()
def head_loss(x: Tensor, gain: Tensor, weight: Tensor, targets: Tensor, eps: float, scale: float = 1.0,
              d_gain: Tensor | None = None, d_weight: Tensor | None = None, add: bool = False,
              count: Tensor | None = None) -> Tensor:
    """The cross-entropy of `rms_norm(x, gain) @ weight.T` against `targets`, summed over those of 0 and more, over their
    number, times `scale`. With `count` (one number) it is divided by that instead, by 1 at least: of a step
    whose micro-steps have unequal numbers of targets, the losses then add up to the mean over all of them.

    x (rows, d_model), gain (d_model,), weight (vocab, d_model), targets (rows,) int64. With `d_gain` and `d_weight` the
    gradients are made as well: theirs are written into them, or with `add` added to them, so that one buffer serves the
    tied embedding through all micro-steps, and x's is written over x. Takes no part in autograd.
    """
    valid = targets >= 0
    row_scale = (valid.to(x.dtype).mul_(scale) / (valid.sum() if count is None else count).clamp(min=1))[:, None]
    target = torch.where(valid, targets, 0)[:, None]
    loss = torch.zeros((), device=x.device, dtype=x.dtype)
    step = chunk_rows(x.shape[0])
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        normed, rstd = norm_parts(x[rows], gain, eps)
        logits = normed @ weight.T
        picked = logits.gather(1, target[rows])
        largest, where = logits.max(1, keepdim=True)
        # softmax in the logits' own memory; its largest value is at least 1/vocab, so this logarithm loses nothing where
        # -log(p[target]) would underflow
        torch.softmax(logits, 1, out=logits)
        loss += ((largest - picked - logits.gather(1, where).log_()) * row_scale[rows]).sum()
        if d_weight is not None:
            logits.scatter_add_(1, target[rows], torch.full_like(picked, -1))
            normed *= row_scale[rows]  # d_model wide, where scaling the logits would be vocab wide
            if add or start:
                d_weight.addmm_(logits.T, normed)
            else:
                torch.mm(logits.T, normed, out=d_weight)
            torch.mm(logits, weight, out=normed)
            d_x, d_gain_of_chunk = norm_backward(normed.mul_(row_scale[rows]), x[rows], rstd, gain)
            if not (add or start):
                d_gain.zero_()  # type: ignore[union-attr]  # there is one where d_weight is
            d_gain += d_gain_of_chunk
            x[rows] = d_x
        del logits, normed  # before the next chunk's are made
    return loss
