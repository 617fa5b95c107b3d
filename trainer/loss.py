"""Linear cross-entropy that never holds the full logits."""

import torch

IGNORE = -100
"""Target that takes no part in the loss, as in torch.nn.functional.cross_entropy."""


def chunk_rows(d_model: int) -> int:
    """Rows of logits computed at a time.

    At d_model rows a chunk of logits is as large as the embedding's gradient, which is alive at that moment anyway, so
    the loss adds one more copy of the embedding and nothing that grows with the tokens. From 256 rows on the products
    fill a card; above 4096 nothing is gained.
    """
    return min(4096, max(256, d_model))


def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of `x @ weight.T` against `targets`, over the targets that are not IGNORE.

    x (rows, d_model), weight (vocab, d_model), targets (rows,) int64. With gradients enabled they are computed in the
    forward pass, chunk by chunk, so that nothing of size rows x vocab ever exists.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(x, weight, targets)
    return _forward(x, weight, targets, None, None)


def _forward(x, weight, targets, d_x, d_weight) -> torch.Tensor:
    """The loss; fills d_x and adds to d_weight where they are given."""
    valid = targets != IGNORE
    scale = valid.to(x.dtype) / valid.sum().clamp(min=1)
    safe = torch.where(valid, targets, 0)
    loss = torch.zeros((), device=x.device, dtype=x.dtype)
    for start in range(0, x.shape[0], chunk_rows(x.shape[1])):
        rows = slice(start, start + chunk_rows(x.shape[1]))
        logits = x[rows] @ weight.T
        target, row_scale = safe[rows, None], scale[rows]
        picked = logits.gather(1, target)[:, 0]
        largest = logits.amax(1)
        # softmax in the logits' own memory; its largest value is at least 1/vocab, so this logarithm loses nothing
        # where -log(p[target]) would underflow
        torch.softmax(logits, 1, out=logits)
        loss += ((largest - logits.amax(1).log() - picked) * row_scale).sum()
        if d_x is None:
            continue
        logits.scatter_add_(1, target, torch.full_like(target, -1, dtype=x.dtype))
        logits *= row_scale[:, None]
        torch.mm(logits, weight, out=d_x[rows])
        d_weight.addmm_(logits.T, x[rows])
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets):
        d_x, d_weight = torch.empty_like(x), torch.zeros_like(weight)
        loss = _forward(x, weight, targets, d_x, d_weight)
        ctx.save_for_backward(d_x, d_weight)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        d_x, d_weight = ctx.saved_tensors
        return d_x.mul_(d_loss), d_weight.mul_(d_loss), None
