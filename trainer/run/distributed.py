"""Several processes that train one model, each on a device of its own: who they are, what each does, what they exchange.
They are started by torchrun, whose variables say so."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from spillcliff.errors import UserError
from spillcliff.hardware.device import team_size
from trainer.config import StepConfig
from trainer.plan import Plan

PATIENCE = timedelta(hours=1)
"""How long one waits for another: the first writes checkpoints while the others wait."""


@dataclass(frozen=True)
class Seat:
    """This process's place: `rank` of `size` in all, `local` on its machine."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Seat":
        """By torchrun's RANK, WORLD_SIZE and LOCAL_RANK; alone where they are not set. UserError for what can't be."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return cls()
        try:
            rank, size, local = (int(environment.get(name, environment["RANK"]))
                                 for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        except ValueError:
            rank, size, local = -1, 0, -1
        if not 0 <= rank < size or local < 0:
            raise UserError("RANK, WORLD_SIZE and LOCAL_RANK are set, but not as torchrun sets them; unset them to train on "
                            "one device")
        return cls(rank, size, local)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that speaks and writes."""
        return self.rank == 0

    def deal(self, things: list) -> list[tuple]:
        """This process's share of them as (thing, True); all get as many, the last of some being (another's, False), since
        sharded ones have to work in step."""
        rounds = -(-len(things) // self.size)
        return [(things[i], True) if i < len(things) else (things[0], False)
                for i in range(self.rank, rounds * self.size, self.size)]

    def share(self, plan: Plan) -> StepConfig:
        """What each of the team does of a planned step: of one that was planned for so many, an equal part of each
        micro-step, as was measured; of another, fewer micro-steps, or where they can't be dealt out evenly, smaller ones.
        UserError if the step's sequences can't be dealt out evenly at all."""
        return self.equal(plan.step) if team_size(plan.device) == self.size else self._part(
            plan.step, math.gcd(plan.step.accum, self.size))

    def equal(self, step: StepConfig) -> StepConfig:
        """An equal part of each micro-step."""
        return self._part(step, 1)

    def _part(self, step: StepConfig, together: int) -> StepConfig:
        """The step where `together` of the team make a micro-step each at a time."""
        if step.batch % (self.size // together):
            raise UserError(f"a step of {step.batch} x {step.accum} sequences can't be dealt out evenly to {self.size} "
                            f"processes; start as many as divide {step.batch * step.accum}, or plan with --gpus {self.size}")
        if self.size > 1 and step.update == "backward":
            raise UserError("update backward changes a parameter before the others' gradients are there; plan with "
                            "--update after for several devices")
        return replace(step, batch=step.batch * together // self.size, accum=step.accum // together)


ALONE = Seat()


class Team:
    """The exchange between processes; alone, everything is as given. `join` comes before everything else. `is_sharded` says
    that each keeps a part of the weights only."""

    def __init__(self, seat: Seat = ALONE, is_sharded: bool = False) -> None:
        self.seat, self.is_sharded = seat, is_sharded and seat.size > 1
        self._words = self._asked = None

    def place(self, device):
        """This process's own device of the kind of the torch.device `device`. UserError where a machine has too few."""
        import torch

        if self.seat.size == 1 or device.type == "cpu":
            return device
        there = torch.accelerator.device_count()
        if self.seat.local >= there:
            raise UserError(f"process {self.seat.local} of this machine has no card: there are {there}; start torchrun with "
                            f"--nproc-per-node {there}")
        return torch.device(device.type, self.seat.local)

    def join(self, device) -> None:
        """Waits until all are there."""
        if self.seat.size == 1:
            return
        import torch
        import torch.distributed as dist

        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        self._words = dist.new_group(backend="gloo", timeout=PATIENCE)  # figures, which no card need wait for

    def leave(self) -> None:
        """Lets go of the others."""
        if self._words is not None:
            import torch.distributed as dist

            self.agree(False)
            dist.destroy_process_group()
            self._words = None

    def average_(self, tensors: Iterable) -> None:
        """Makes each tensor the mean of all processes' own."""
        if self.seat.size == 1:
            return
        import torch
        import torch.distributed as dist

        tensors = list(tensors)
        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()
        torch._foreach_div_(tensors, self.seat.size)

    def sum(self, value: float) -> float:
        """Over all processes, the same in each to the last bit."""
        return self._reduce(value, "SUM")

    def largest(self, value: float | None) -> float | None:
        """Of all processes' values; None where any has none."""
        if self.seat.size == 1:
            return value
        found = self._reduce(math.inf if value is None else value, "MAX")
        return None if found == math.inf else type(value)(found)

    def _reduce(self, value: float, how: str) -> float:
        if self.seat.size == 1:
            return value
        import torch
        import torch.distributed as dist

        held = torch.tensor([float(value)], dtype=torch.float64)
        dist.all_reduce(held, getattr(dist.ReduceOp, how), group=self._words)
        return held.item()

    def agree(self, asked: bool) -> bool:
        """Whether any process asked for it when this was last called: all get the same answer, and none waits for another,
        since that was a step ago. Alone, `asked` itself."""
        if self.seat.size == 1:
            return asked
        import torch
        import torch.distributed as dist

        before, held = self._asked, torch.tensor([asked], dtype=torch.int32)
        self._asked = dist.all_reduce(held, dist.ReduceOp.MAX, group=self._words, async_op=True), held
        if before is None:
            return False
        before[0].wait()
        return bool(before[1].item())
