"""The run: reads top to bottom as what happens."""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from spillcliff.console import StopRequest
from spillcliff.errors import UserError
from spillcliff.failures import failure, is_card_lost, is_out_of_memory
from spillcliff.files import write_json
from spillcliff.hardware.device import device_facts
from spillcliff.hardware.fingerprints import multi_device_name
from spillcliff.hardware.usage import MemoryPeaks, process_seconds
from spillcliff.schema import is_number
from trainer import checkpoint
from trainer.data.dataset import changes, identity
from trainer.data.feed import feed
from trainer.huggingface import weights
from trainer.plan import eval_windows, is_due
from trainer.run.divergence import way_on
from trainer.run.log import RunLog, Throughput, live_line
from trainer.run.receipt import Ledger, make_receipt, pauses_left_s
from trainer.run.saver import Saver
from trainer.run.setup import RunSetup
from trainer.run.slowdown import is_away, only_a_spill_explains
from trainer.run.speed_watch import SpeedWatch
from trainer.run.spill_escape import SpillEscape
from trainer.run.step import TrainStep
from trainer.run.tensorboard import EventFiles
from trainer.run.timing import StepTimer, StepTimes
from trainer.run.validation import ValidationLosses

SEED = 0


class Run:
    """A plan that is being run, by this process or by several, of which the main one writes."""

    def __init__(self, setup: RunSetup) -> None:
        self.libraries_s = process_seconds()
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
                                                 eval_windows(self.plan.corpus_tokens, self.plan.step, self.plan.rules))
        self.eval_weight = sum(self.data.loss_weight(b) for b in batches)
        pieces = [piece for b in batches for piece in torch.from_numpy(b).split(self.step.step.batch)]
        self.eval_pieces = self.group.world.split(pieces)
        self.start, self.done, self.before_s = 0, 0, 0.0
        self.validation = ValidationLosses()
        self.came_from: dict[str, Any] | None = None
        self.loss = self.val_loss = math.nan
        self.ledger, self.write_s_before = Ledger(), 0.0
        self.throughput, self.timer = Throughput(self.plan.step.tokens), StepTimer(self.step)
        self.saver = Saver(self.folder, self.say)
        self.peaks = MemoryPeaks()
        self.out_of_memory: list[dict] = []
        self.spills: list[dict] = []
        self.escape, self.planned_batch = SpillEscape(), self.step.step.batch
        self.speed_watch = SpeedWatch(self.plan, self.device, self.facts, self.claim)
        self.log_s = 0.0

    def resume(self) -> None:
        """Takes the newest whole checkpoint; UserError if it is of another run or other data."""
        path = self.folder.path
        state, newest = checkpoint.newest(self.folder, self.say)
        try:
            if changed := changes(state.get("data"), self.identities):
                raise UserError(f"run {path} was started on other data ({changed}); resume with what it was started on")
            self.start, self.before_s, self.validation = state["step"], state["seconds"], ValidationLosses.of(state)
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
                if not is_card_lost(*failure(e)):
                    raise
                self._stop_here(f"the card failed in step {self.done + 1} ({str(e).splitlines()[0]:.120})")
            self._wait_for_last_checkpoint()
        self._measure_peaks()
        receipt = self._receipt()
        if self.is_main:
            write_json(self.folder.receipt, receipt)
        return receipt

    def _open_log(self) -> None:
        self.start_up_s, self.done = process_seconds(), self.start
        self.ledger.add("start_up_s", self.start_up_s)
        if self.is_main:
            write_json(self.folder.process, {
                "pid": os.getpid(), "started_at": round(time.time() - self.start_up_s, 3), "ran_on": self.ran_on,
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
            self._leave_spill_if_shown()
            is_asked_to_stop = self.group.any_asked(stop.is_made)
            self._pause_if_due(is_asked_to_stop)
            if is_asked_to_stop and self.done < self.plan.steps:
                self.saver.wait()
                self.say(f"stopped after step {self.done}; go on with: {self.options.commands.resume()}")
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
            if self.escape.is_retry_due():
                self._change_batch(done, self.planned_batch, "spill", "trying the planned step again")
        self.timer.restart()

    def _start_step(self, batches: Iterator[Tensor]) -> StepTimes | None:
        """Starts the next optimizer step and returns the times of the one before; out of memory it is done again in smaller
        pieces."""
        begin = time.perf_counter()
        tokens = next(batches)
        feed_s, log_s = time.perf_counter() - begin, self.log_s
        self.log_s = 0.0
        lr = self.plan.lr_at(self.done)
        while True:
            step = self.step.step
            try:
                return self.timer.run(tokens.view(step.accum, step.batch, -1), lr, feed_s, log_s)
            except Exception as e:  # a wrapped failure to allocate may be of any type
                if not self._can_shrink(e):
                    raise
            # out here, where the exception no longer holds what the step had made
            if finished := self.timer.drain():
                self._note(self.done, finished, is_pause=True)
            self._shrink_batch(self.done + 1)

    def _can_shrink(self, e: Exception) -> bool:
        """Whether smaller pieces may help against an exception."""
        return is_out_of_memory(*failure(e)) and self.step.smaller_batch() is not None

    def _shrink_batch(self, number: int) -> None:
        """Goes on in smaller micro-steps, after a failure in step `number`."""
        smaller = self.step.smaller_batch()
        assert smaller is not None, "asked by _can_shrink"
        self.planned_batch = smaller  # the larger one is not tried again
        self.escape.look_again()
        self._change_batch(number, smaller, "out_of_memory", "out of memory, has another program taken some? Going on")
        self.out_of_memory.append({"step": number, "batch": smaller, "accum": self.step.step.accum})

    def _leave_spill_if_shown(self) -> None:
        """Goes on in smaller micro-steps where the latest steps show that memory spilled and a smaller one needs less."""
        fall, smaller = self.escape.fall(), self.step.smaller_batch()
        if fall is None or smaller is None or self.options.keep_step or not self.plan.needs_less(smaller):
            return
        now = self.speed_watch.readings(self.throughput.recent_tok_s or 0.0, self.throughput.recent_data_share)
        if not only_a_spill_explains(now, fall):
            self.escape.look_again()
            return
        if finished := self.timer.drain():
            self._note(self.done, finished, is_pause=True)
        self.escape.halve()
        self._change_batch(self.done, smaller, "spill", f"{fall:.1f} times as slow as usual, memory has spilled: going on")
        self.spills.append({"step": self.done, "batch": smaller, "accum": self.step.step.accum, "fall": round(fall, 2)})
        self.timer.restart()

    def _change_batch(self, number: int, batch: int, kind: str, why: str) -> None:
        """Makes the same steps in micro-steps of `batch` from here on, and tells it."""
        self.step.use_batch(batch)
        accum = self.step.step.accum
        self.log.write(kind, number, batch=batch, accum=accum)
        self.say(f"step {number}: {why} with batch {batch} and accum {accum}, the same tokens a step")

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
            self.escape.add(times.step_s)
        self.log.write("step", number, loss=times.loss, norm=times.norm, step_s=times.step_s, micro_s=times.micro_s,
                       optimizer_s=times.optimizer_s, data_s=times.data_s, log_s=times.log_s,
                       lr=plan.lr_at(number - 1))
        if not (math.isfinite(times.loss) and math.isfinite(times.norm or 0)):
            self._stop_here(f"loss {times.loss} with gradient norm {times.norm} at step {number} "
                            f"({self.data.where(number - 1, plan.step)})", bad_after=number - 1)
        if change := self.speed_watch.change(number, self.throughput):
            self.say(f"step {number}: {change.line}")
            self.log.write("trouble", number, what=change.cause, line=change.line)
        self.show(live_line(plan, number, times.loss, self.throughput, self.peaks.device_peak_bytes,
                            pauses_left_s(plan, number, self.ledger.spent)))
        seconds = time.perf_counter() - begin
        if is_pause:
            self.ledger.add("log_s", seconds)
        else:
            self.log_s += seconds

    def _stop_here(self, what: str, bad_after: int | None = None) -> NoReturn:
        """`bad_after` is after how many steps the weights give no number; None where it was the card that failed."""
        with contextlib.suppress(RuntimeError):
            self.saver.wait()
        how = way_on(self.folder, self.plan, self.options.commands, bad_after, self.is_main)
        raise UserError(f"{what}: the run stops here; {how}")

    def _evaluate(self, number: int) -> None:
        begin = time.perf_counter()
        self.val_loss = self.group.sum(sum(self._eval_losses(number))) / self.eval_weight
        if not math.isfinite(self.val_loss):
            self._stop_here(f"validation loss {self.val_loss} after step {number}", bad_after=number)
        self._measure_peaks()
        seconds = time.perf_counter() - begin
        self.ledger.add("eval_s", seconds)
        self.log.write("eval", number, val_loss=self.val_loss, seconds=seconds)
        risen = self.validation.note(number, self.val_loss)
        self.say(f"step {number}/{self.plan.steps}  validation loss {self.val_loss:.4f}{risen}")
        if self.options.sampler and self.is_main:
            self.ledger.add("sample_s", self.options.sampler.show(self.step.model, number, self.log, self.say))

    def _eval_losses(self, number: int) -> list[float]:
        """Of each evaluation batch, times its windows or answers; in smaller ones if memory has run out."""
        while True:
            try:
                return [float(self.step.evaluate(smaller)) * self.data.loss_weight(smaller) * is_own
                        for piece, is_own in self.eval_pieces for smaller in piece.split(self.step.step.batch)]
            except Exception as e:  # a wrapped failure to allocate may be of any type
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
            "seconds": self.before_s + process_seconds(), "data": self.identities, "ledger": self.ledger.spent,
            **self._so_far()})
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
                            f"on with: {self.options.commands.go_on()}")

    def _receipt(self) -> dict:
        spent, seconds = self.ledger.spent, self.before_s + process_seconds()
        peak_bytes = self.peaks.device_peak_bytes or self.peaks.reserved_peak_bytes
        return make_receipt(self.plan, self.throughput.tok_s, peak_bytes, seconds - spent["away_s"], {
            **vars(self.peaks), **self._so_far(), "start_up_s": self.start_up_s, "libraries_s": self.libraries_s,
            "resumed_from": self.start, "eval_s": spent["eval_s"], "checkpoint_s": spent["checkpoint_s"],
            "ledger": self.ledger.of_total(seconds), "checkpoint_failures": self.saver.failures,
            "out_of_memory": self.out_of_memory, "spills": self.spills, "troubles": self.speed_watch.slowdowns,
            "answer_share": self.data.answer_share, "software": self.facts.software, "ran_on": self.ran_on})

    def _so_far(self) -> dict[str, Any]:
        """What the receipt and a checkpoint's facts both have."""
        return {**self.validation.to_json(), "val_loss": self.val_loss, "loss": self.loss, "from": self.came_from,
                "checkpoint_write_s": self.write_s_before + self.saver.write_s}


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
