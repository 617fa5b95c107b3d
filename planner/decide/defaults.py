"""What a plan takes where nothing was asked for, each with its source."""

import math

from trainer.config import LARGEST_LR, ModelConfig, OptimizerConfig, StepConfig, clip_for

STEP_LAW = "Step Law, Li et al. 2025, arXiv 2503.04715"


def tokens_per_step(corpus_tokens: int) -> tuple[int, str]:
    """0.58 D^0.571 tokens for a corpus of D tokens; the law finds that it hardly depends on the model's size."""
    tokens = round(0.58 * corpus_tokens**0.571)
    return tokens, f"about {tokens:,} tokens per step suit a corpus of {corpus_tokens:,} ({STEP_LAW})"


def optimizer(model: ModelConfig, corpus_tokens: int, steps: int, step: StepConfig) -> tuple[OptimizerConfig, str]:
    """lr 1.79 N^-0.713 D^0.307 for N parameters without the embedding and D tokens, at most LARGEST_LR; smaller by the root
    of the batch where a step has fewer tokens than the law's (Malladi et al., arXiv 2205.10287). A warm-up over 2% of the
    steps, 2000 at most; betas, decay and clip as GPT-3 has them (Brown et al., arXiv 2005.14165, app. B)."""
    lr = min(LARGEST_LR, 1.79 * model.body_parameters**-0.713 * corpus_tokens**0.307)
    lr *= math.sqrt(min(1.0, step.tokens / tokens_per_step(corpus_tokens)[0]))
    lr = float(f"{lr:.2g}")
    return (OptimizerConfig(lr=lr, warmup_steps=min(2000, math.ceil(steps / 50)), clip=clip_for(step)),
            f"learning rate {lr:g} for {model.body_parameters:,} parameters without the embedding ({STEP_LAW})")
