"""A run's log as TensorBoard event files, beside the JSONL."""

from pathlib import Path
from typing import Any

from spillcliff.errors import UserError

SCALARS = {"step": {"loss": "loss/train", "lr": "lr", "norm": "gradient_norm"}, "eval": {"val_loss": "loss/validation"}}


def check_installed() -> None:
    """UserError where TensorBoard isn't installed."""
    import importlib.util

    if importlib.util.find_spec("tensorboard") is None:
        raise UserError('--tensorboard needs an extra: pip install "spillcliff[tensorboard]"')


class EventFiles:
    """Event files in `folder`. A reader drops what an earlier process wrote of steps after `done`, which come again."""

    def __init__(self, folder: Path, done: int, tokens_per_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(folder), purge_step=done + (done > 0))
        except OSError as e:
            raise UserError(f"can't write {folder}: {e.strerror or e}") from None
        self._tokens = tokens_per_step

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line of the log; OSError if the disk doesn't take it."""
        for name, tag in SCALARS.get(kind, {}).items():
            if values[name] is not None:
                self._writer.add_scalar(tag, values[name], step)
        if kind == "step":
            self._writer.add_scalar("tok_s", self._tokens / values["step_s"], step)
        if kind == "sample":
            self._writer.add_text(f"sample/{values['prompt']}", values["text"], step)

    def close(self) -> None:
        self._writer.close()
