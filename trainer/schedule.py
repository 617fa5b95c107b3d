"""The learning rate of a step: pure."""

import math

from trainer.config import OptimizerConfig

FLOOR = 0.1
"""The cosine ends at a tenth of the peak (Hoffmann et al., arXiv 2203.15556, app. B)."""


def lr(step: int, steps: int, optimizer: OptimizerConfig) -> float:
    """Learning rate of step `step` (from 0) of `steps`: a linear warm-up, then constant or a cosine to a tenth."""
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    span = max(1, steps - 1 - optimizer.warmup_steps)
    progress = min(1.0, (step - optimizer.warmup_steps) / span)
    return optimizer.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
