"""The run: reads top to bottom as what happens."""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from spillcliff.console import StopRequest
from spillcliff.errors import UserError, is_card_lost, is_out_of_memory
from spillcliff.files import Say, ignore, write_json
from spillcliff.hardware.device import device_facts
from spillcliff.hardware.fingerprints import multi_device_name
from spillcliff.hardware.usage import MemoryClaim, MemoryPeaks, process_seconds
from spillcliff.schema import is_number
from trainer import checkpoint
from trainer.data.dataset import Dataset, changes, identity
from trainer.data.feed import feed
from trainer.huggingface import weights
from trainer.plan import Plan, eval_batches, is_due
from trainer.run.distributed import ProcessGroup
from trainer.run.log import RunLog, Throughput, live_line
from trainer.run.receipt import Ledger, make_receipt
from trainer.run.sample import Sampler
from trainer.run.slowdown import is_away
from trainer.run.speed_watch import SpeedWatch
from trainer.run.step import TrainStep
from trainer.run.tensorboard import EventFiles
from trainer.run.timing import StepTimer, StepTimes
from trainer.run_folder import RunFolder

SEED = 0


@dataclass(frozen=True)
class RunOptions:
    """What a run may be asked for beside its plan: weights to start from, texts at each evaluation, event files; and the
    command that goes on with it, for a person."""

    source: weights.Source | None = None
    sampler: Sampler | None = None
    tensorboard: bool = False
    resume_command: str = "train --resume"


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


class Run:
    """A plan that is being run, by this process or by several, of which the main one writes."""

    def __init__(self, setup: RunSetup) -> None:
        self.started_s = process_seconds()
        self.plan, self.data, self.folder, self.device = setup.plan, setup.data, setup.folder, setup.device
        self.say, self.show, self.options, self.group = setup.say, setup.show, setup.options, setup.group
        self.is_main, self.claim = setup.group.world.is_main, setup.claim
        self.facts = device_facts(self.device)
        self.ran_on = multi_device_name(self.facts.fingerprint, self.group.world.size, self.group.is_sharded)
        self.claim.begin(self.device, self.facts.uuid)
        self.step = TrainStep(self.plan.model, self.group.world.part_of_plan(self.plan), self.plan.optimizer, self.device,
                              SEED, self.group, masked=self.data.answer_share is not None)
        self.identities = {"training": identity(self.data), "validation": identity(setup.validation)}
        batches = setup.validation.fixed_batches(self.plan.step.batch, self.plan.step.length,
                                                 eval_batches(self.plan.corpus_tokens, self.plan.step))
        self.eval_weight = sum(self.data.loss_weight(b) for b in batches)
        pieces = [piece for b in batches for piece in torch.from_numpy(b).split(self.step.step.batch)]
        self.eval_pieces = self.group.world.split(pieces)
        self.start, self.done, self.before_s = 0, 0, 0.0
        self.first_val_loss: float | None = None
        self.came_from: dict[str, Any] | None = None
        self.loss = self.val_loss = math.nan
        self.ledger, self.write_s_before = Ledger(), 0.0
        self.throughput, self.timer = Throughput(self.plan.step.tokens), StepTimer(self.step)
        self.saver = checkpoint.Saver(self.folder, self.say)
        self.peaks = MemoryPeaks()
        self.out_of_memory: list[dict] = []
        self.speed_watch = SpeedWatch(self.plan, self.device, self.facts, self.claim)
        self.log_s = 0.0

    def resume(self) -> None:
        """Takes the newest whole checkpoint; UserError if it is of another run or other data."""
        path = self.folder.path
        state, newest = checkpoint.newest(self.folder, self.say)
        try:
            if changed := changes(state.get("data"), self.identities):
                raise UserError(f"run {path} was started on other data ({changed}); resume with what it was started on")
            self.start, self.before_s, self.first_val_loss = (
                state["step"], state["seconds"], float(state["first_val_loss"]))
            self.ledger = Ledger(state.get("ledger", {}))
            self.write_s_before = state.get("checkpoint_write_s", 0.0)
            if self.start > self.plan.steps or not all(
                    map(is_number, (self.before_s, self.write_s_before, *self.ledger.spent.values()))):
                raise ValueError("a step past the plan's end, or times that can't be")
            self.step.load_state(checkpoint.Tensors(newest))
        except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as e:
            raise UserError(f"run {path}: its checkpoint is not of this run ({e!r:.80})") from None
        self.came_from = state.get("from")
        if self.options.source:
            weights.refuse_others(self.options.source, self.came_from, path)
        self.say(f"resuming after step {self.start}")

    def start_from(self, source: weights.Source) -> None:
        """Starts from its weights."""
        self.came_from = {"path": str(source.path), "crc32": weights.load(source, self.step.model, self.step.put)}
        self.say(f"starting from {source.what}")

    def train(self) -> dict:
        """Trains to the plan's end and returns the receipt. Asked to stop, it saves after the step that runs, says how to go
        on, and raises KeyboardInterrupt."""
        self._open_log()
        with contextlib.closing(self.log), StopRequest() as stop:
            try:
                self._train_steps(stop)
            except RuntimeError as e:
                if not is_card_lost(type(e).__name__, str(e)):
                    raise
                self._stop_here(f"the card failed in step {self.done + 1} ({str(e).splitlines()[0]:.120})",
                                "when it answers again (a driver that was reset, a lost card: restart)")
            self._wait_for_last_checkpoint()
        self._measure_peaks()
        receipt = self._receipt()
        if self.is_main:
            write_json(self.folder.receipt, receipt)
        return receipt

    def _open_log(self) -> None:
        ready_s, self.done = process_seconds(), self.start
        self.ledger.add("start_up_s", ready_s)
        if self.is_main:
            write_json(self.folder.process, {
                "pid": os.getpid(), "started_at": round(time.time() - ready_s, 3), "ran_on": self.ran_on,
                "uuid": self.facts.uuid})
        events = None
        if self.is_main and self.options.tensorboard:
            events = EventFiles(self.folder.tensorboard, self.done, self.plan.step.tokens)
        self.log = RunLog(self.folder, self.say, self.is_main, events)
        if self.data.answer_share is not None:
            self.log.write("answers", self.done, answer_share=self.data.answer_share)

    def _train_steps(self, stop: StopRequest) -> None:
        if self.done == 0:
            if self.came_from:
                self.log.write("from", 0, **self.came_from)
            self._evaluate(0)
        batches = feed(self.data, self.step.step, SEED, self.device, self.done, self.group.world)
        self.timer.restart()
        while self.done < self.plan.steps:
            finished = self._start_step(batches)
            self.done += 1
            if finished:
                self._note(self.done - 1, finished)
            is_asked_to_stop = self.group.any_asked(stop.is_made)
            self._pause_if_due(is_asked_to_stop)
            if is_asked_to_stop and self.done < self.plan.steps:
                self.saver.wait()
                self.say(f"stopped after step {self.done}; go on with: {self.options.resume_command}")
                raise KeyboardInterrupt

    def _pause_if_due(self, is_asked_to_stop: bool) -> None:
        """Evaluates and saves where the plan says so, and saves before a stop."""
        done, plan = self.done, self.plan
        eval_is_due = is_due(done, plan.steps, plan.eval)
        save_is_due = is_due(done, plan.steps, plan.checkpoint) or is_asked_to_stop
        if not (eval_is_due or save_is_due):
            return
        if finished := self.timer.drain():
            self._note(done, finished, is_pause=True)
        if eval_is_due:
            self._evaluate(done)
        if save_is_due:
            self._save(done)
        self.timer.restart()

    def _start_step(self, batches: Iterator[Tensor]) -> StepTimes | None:
        """Starts the next optimizer step and returns the times of the one before; out of memory it is done again in smaller
        pieces."""
        begin = time.perf_counter()
        tokens = next(batches)
        feed_s, log_s = time.perf_counter() - begin, self.log_s
        self.log_s = 0.0
        lr = self.plan.optimizer.lr_at(self.done, self.plan.steps)
        while True:
            step = self.step.step
            try:
                return self.timer.run(tokens.view(step.accum, step.batch, -1), lr, feed_s, log_s)
            except (RuntimeError, MemoryError) as e:
                if not self._can_shrink(e):
                    raise
            # out here, where the exception no longer holds what the step had made
            if finished := self.timer.drain():
                self._note(self.done, finished, is_pause=True)
            self._shrink_batch(self.done + 1)

    def _can_shrink(self, e: Exception) -> bool:
        """Whether smaller pieces may help against an exception."""
        return is_out_of_memory(type(e).__name__, str(e)) and self.step.smaller_batch() is not None

    def _shrink_batch(self, number: int) -> None:
        """Goes on in smaller micro-steps, after a failure in step `number`."""
        self.step.shrink_batch()
        now = self.step.step
        self.out_of_memory.append({"step": number, "batch": now.batch, "accum": now.accum})
        self.log.write("out_of_memory", number, batch=now.batch, accum=now.accum)
        self.say(f"step {number}: out of memory, has another program taken some? Going on with batch {now.batch} and accum "
                 f"{now.accum}: the same tokens a step, slower")

    def _note(self, number: int, times: StepTimes, is_pause: bool = False) -> None:
        """Enters a finished step; in a pause the device waits for it, else another step runs meanwhile."""
        begin = time.perf_counter()
        self.loss, plan = times.loss, self.plan
        was_away = is_away(times.step_s, self.throughput.step_s[-50:])
        self.ledger.add_step(times, self.step.step.accum, was_away)
        if was_away:
            self.say(f"step {number} took {times.step_s:,.0f} s: the machine slept or the process was stopped; not counted")
        else:
            self.throughput.add(times)
        self.log.write("step", number, loss=times.loss, norm=times.norm, step_s=times.step_s, micro_s=times.micro_s,
                       optimizer_s=times.optimizer_s, data_s=times.data_s, log_s=times.log_s,
                       lr=plan.optimizer.lr_at(number - 1, plan.steps))
        if not (math.isfinite(times.loss) and math.isfinite(times.norm or 0)):
            self._stop_here(f"loss {times.loss} with gradient norm {times.norm} at step {number} "
                            f"({self.data.where(number - 1, plan.step)})", "with a lower lr in the plan")
        if change := self.speed_watch.change(number, self.throughput):
            self.say(f"step {number}: {change.line}")
            self.log.write("trouble", number, what=change.cause, line=change.line)
        self.show(live_line(plan, number, times.loss, self.throughput, self.peaks.device_peak_bytes))
        seconds = time.perf_counter() - begin
        if is_pause:
            self.ledger.add("log_s", seconds)
        else:
            self.log_s += seconds

    def _stop_here(self, what: str, how: str) -> NoReturn:
        with contextlib.suppress(RuntimeError):
            self.saver.wait()
        raise UserError(f"{what}: the run stops here; go on from {checkpoint.last_good(self.folder)} {how}")

    def _evaluate(self, number: int) -> None:
        begin = time.perf_counter()
        self.val_loss = self.group.sum(sum(self._eval_losses(number))) / self.eval_weight
        if not math.isfinite(self.val_loss):
            self._stop_here(f"validation loss {self.val_loss} after step {number}", "with a lower lr in the plan")
        self.first_val_loss = self.val_loss if self.first_val_loss is None else self.first_val_loss
        self._measure_peaks()
        seconds = time.perf_counter() - begin
        self.ledger.add("eval_s", seconds)
        self.log.write("eval", number, val_loss=self.val_loss, seconds=seconds)
        self.say(f"step {number}/{self.plan.steps}  validation loss {self.val_loss:.4f}")
        if self.options.sampler and self.is_main:
            self.ledger.add("sample_s", self.options.sampler.show(self.step.model, number, self.log, self.say))

    def _eval_losses(self, number: int) -> list[float]:
        """Of each evaluation batch, times its windows or answers; in smaller ones if memory has run out."""
        while True:
            try:
                return [float(self.step.evaluate(smaller)) * self.data.loss_weight(smaller) * is_own
                        for piece, is_own in self.eval_pieces for smaller in piece.split(self.step.step.batch)]
            except (RuntimeError, MemoryError) as e:
                if not self._can_shrink(e):
                    raise
            self._shrink_batch(number)

    def _measure_peaks(self) -> None:
        """Takes note of the most that any of the processes has held."""
        peaks = self.claim.peaks(self.device, self.facts.uuid)
        largest: dict[str, Any] = {name: self.group.largest(value) for name, value in vars(peaks).items()}
        self.peaks = MemoryPeaks(**largest)

    def _save(self, number: int) -> None:
        before_s, tensors = self.saver.blocked_s, self.step.named_state()
        if not self.is_main:
            return
        self.saver.save(number, tensors, {
            "seconds": self.before_s + process_seconds(), "first_val_loss": self.first_val_loss, "val_loss": self.val_loss,
            "data": self.identities, "from": self.came_from, "ledger": self.ledger.spent,
            "checkpoint_write_s": self.write_s_before + self.saver.write_s})
        seconds = self.saver.blocked_s - before_s
        self.ledger.add("checkpoint_s", seconds)
        self.log.write("checkpoint", number, seconds=seconds)

    def _wait_for_last_checkpoint(self) -> None:
        """UserError if it failed."""
        before_s = self.saver.blocked_s
        self.saver.wait()
        self.ledger.add("checkpoint_s", self.saver.blocked_s - before_s)
        if self.saver.last_failure:
            raise UserError(f"the run is through, but for its last checkpoint: {self.saver.last_failure}; make room, and go "
                            f"on with --run {self.folder.path} --resume")

    def _receipt(self) -> dict:
        spent, seconds = self.ledger.spent, self.before_s + process_seconds()
        peak_bytes = self.peaks.device_peak_bytes or self.peaks.reserved_peak_bytes
        return make_receipt(self.plan, self.throughput.tok_s, peak_bytes, seconds - spent["away_s"], {
            **vars(self.peaks), "start_up_s": self.started_s, "resumed_from": self.start, "eval_s": spent["eval_s"],
            "checkpoint_s": spent["checkpoint_s"], "checkpoint_write_s": self.write_s_before + self.saver.write_s,
            "ledger": self.ledger.of_total(seconds), "first_val_loss": self.first_val_loss, "val_loss": self.val_loss,
            "loss": self.loss, "checkpoint_failures": self.saver.failures, "out_of_memory": self.out_of_memory,
            "troubles": self.speed_watch.slowdowns, "from": self.came_from, "answer_share": self.data.answer_share,
            "software": self.facts.software, "ran_on": self.ran_on})


def run(setup: RunSetup, resume: bool) -> dict:
    """Trains as planned from the start or the newest checkpoint, and returns the receipt; see Run."""
    this = Run(setup)
    if resume:
        this.resume()
    elif setup.options.source:
        this.start_from(setup.options.source)
    tokenizer = setup.data.tokenizer
    if this.is_main and not resume and tokenizer and Path(tokenizer).is_file():
        with contextlib.suppress(OSError):  # only sampling needs it, and says so
            shutil.copyfile(tokenizer, setup.folder.tokenizer)
    return this.train()
