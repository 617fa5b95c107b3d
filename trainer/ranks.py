"""Which of several processes that train one model this one is, and which part of a step is its own. Pure.

They are started by torchrun, whose variables say so."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from spillcliff.errors import UserError
from spillcliff.hardware.fingerprints import device_count
from trainer.config import StepConfig
from trainer.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all: its `rank` of `size`, and `local_rank` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "World":
        """By torchrun's RANK, WORLD_SIZE and LOCAL_RANK; alone where they are not set. UserError for what can't be."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return cls()
        try:
            rank, size, local_rank = (int(environment.get(name, environment["RANK"]))
                                      for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        except ValueError:
            rank, size, local_rank = -1, 0, -1
        if not 0 <= rank < size or local_rank < 0:
            raise UserError("RANK, WORLD_SIZE and LOCAL_RANK are set, but not as torchrun sets them; unset them to train on "
                            "one device")
        return cls(rank, size, local_rank)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that speaks and writes."""
        return self.rank == 0

    def split(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This process's part of `items` as (item, True). All get as many, since sharded processes have to work in step: the
        last of some is (another's, False)."""
        rounds = -(-len(items) // self.size)
        return [(items[i], True) if i < len(items) else (items[0], False)
                for i in range(self.rank, rounds * self.size, self.size)]

    def part_of_plan(self, plan: Plan) -> StepConfig:
        """What each process does of a planned step: of one that was planned for so many, an equal part of each micro-step,
        as was measured; of another, fewer micro-steps, or where they can't be dealt out evenly, smaller ones. UserError if
        the step's sequences can't be dealt out evenly at all."""
        if device_count(plan.device) == self.size:
            return self.part_of_batch(plan.step)
        return self._part(plan.step, math.gcd(plan.step.accum, self.size))

    def part_of_batch(self, step: StepConfig) -> StepConfig:
        """An equal part of each micro-step. UserError if its sequences can't be dealt out evenly."""
        return self._part(step, 1)

    def _part(self, step: StepConfig, at_once: int) -> StepConfig:
        """The step where `at_once` micro-steps are made at a time, each by an equal number of processes."""
        if step.batch % (self.size // at_once):
            raise UserError(f"a step of {step.batch} x {step.accum} sequences can't be dealt out evenly to {self.size} "
                            f"processes; start as many as divide {step.batch * step.accum}, or plan with --gpus {self.size}")
        if self.size > 1 and step.update == "backward":
            raise UserError("update backward changes a parameter before the others' gradients are there; plan with "
                            "--update after for several devices")
        return replace(step, batch=step.batch * at_once // self.size, accum=step.accum // at_once)


ALONE = World()
