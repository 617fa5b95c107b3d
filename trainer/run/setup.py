"""What a run is made of, as its start hands it to the loop."""

from dataclasses import dataclass
from pathlib import Path

import torch

from spillcliff.files import Say, ignore
from spillcliff.hardware.usage import MemoryClaim
from trainer.data.dataset import Dataset
from trainer.huggingface import weights
from trainer.plan import Plan
from trainer.run.commands import RunCommands
from trainer.run.distributed import ProcessGroup
from trainer.run.sample import Sampler
from trainer.run_folder import RunFolder


@dataclass(frozen=True)
class RunOptions:
    """What a run may be asked for beside its plan: weights to start from, texts at each evaluation, event files,
    the planned step even where memory spills; and the commands that go on with it, for a person."""

    source: weights.Source | None = None
    sampler: Sampler | None = None
    tensorboard: bool = False
    keep_step: bool = False
    commands: RunCommands = RunCommands(RunFolder(Path("RUN")))  # noqa: RUF009


@dataclass(frozen=True)
class RunSetup:
    """All that a run is made of. `claim` was made before anything touched the device; `say` takes lines that stay, `show`
    the line that changes."""

    plan: Plan
    data: Dataset
    validation: Dataset
    folder: RunFolder
    device: torch.device
    claim: MemoryClaim
    group: ProcessGroup
    say: Say = ignore
    show: Say = ignore
    options: RunOptions = RunOptions()
