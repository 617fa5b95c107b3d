"""What to go back to when a loss is no number, and how to go on from there."""

import math

from spillcliff.schema import is_number
from trainer import checkpoint
from trainer.config import LARGEST_LR
from trainer.plan import Plan
from trainer.run.commands import RunCommands
from trainer.run_folder import RunFolder

WILD = 1.5
"""Times the loss of a model that knows nothing, ln(vocabulary), above which weights have run away; assumed: new weights
begin within a tenth of it."""


def lower_lr(lr: float) -> float:
    """The peak rate to try next: half, and none above what plans take."""
    return float(f"{min(lr / 2, LARGEST_LR):.2g}")


def is_sound(facts: dict, bad_after: int, vocab: int) -> bool:
    """Whether to go back to a checkpoint with such facts, where the weights after `bad_after` steps give no number: they are
    others, since they would give none again at any rate, and neither of its losses is wild."""
    losses = [facts[name] for name in ("loss", "val_loss") if name in facts]
    return facts["step"] < bad_after and all(is_number(loss, 0, WILD * math.log(vocab)) for loss in losses)


def way_on(run: RunFolder, plan: Plan, commands: RunCommands, bad_after: int | None, is_main: bool) -> str:
    """How a run goes on that has to stop, in words that end with a command. Where the weights gave no number after
    `bad_after` steps: from the newest sound checkpoint, those past it being set aside by the main process, or from the
    start. None: it was the card that failed."""
    if bad_after is None:
        return (f"go on from {checkpoint.last_good(run)} when it answers again (a driver that was reset, a lost card: "
                f"restart): {commands.go_on()}")
    steps, lr = run.checkpoint_steps(), lower_lr(plan.optimizer.lr)
    sound = next((step for step in reversed(steps) if (facts := checkpoint.facts_if_whole(run, step))
                  and is_sound(facts, bad_after, plan.model.vocab)), None)
    if sound is None:
        none = "no checkpoint from before the loss ran away" if steps else "no checkpoint yet"
        return f"there is {none}; start anew with a lower lr: {commands.start(lr)}"
    later = [step for step in steps if step > sound]
    for step in later if is_main else ():
        checkpoint.set_aside(run, step)
    names = ", ".join(run.checkpoint(step).name for step in later)
    aside = f" (set aside, since it would come again from there: {names})" if later else ""
    return f"go on from {run.checkpoint(sound)}{aside} with a lower lr: {commands.resume(lr)}"
