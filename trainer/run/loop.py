"""The run: reads top to bottom as what happens."""

import contextlib
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from spillcliff.errors import UserError, is_card_lost, is_out_of_memory
from spillcliff.files import write_json
from spillcliff.hardware import device
from spillcliff.hardware.usage import Claim
from spillcliff.stop import Stop
from spillcliff.units import is_figure
from trainer import checkpoint
from trainer.data.dataset import answer_share, changes, identity
from trainer.data.pairs import Pairs, answers
from trainer.data.tokens import Tokens, feed
from trainer.huggingface import weights
from trainer.plan import Plan, eval_batches, is_due
from trainer.run.distributed import Team
from trainer.run.ledger import Ledger
from trainer.run.log import Meter, RunFolder, RunLog, live_line, process_seconds, receipt
from trainer.run.sample import Sampler
from trainer.run.slowdown import Sight, is_away, trouble
from trainer.run.step import TrainStep
from trainer.run.tensorboard import Board
from trainer.run.timing import Pace, StepTimes
from trainer.schedule import lr

SEED = 0
LOOK_S = 20.0
"""Seconds between two looks at the card: one takes some ms."""


@dataclass(frozen=True)
class Extras:
    """What a run may be asked for beside its plan: weights to start from, texts at each evaluation, event files; and the
    command that goes on with it, for a person."""

    source: weights.RunWeights | weights.HubWeights | None = None
    sampler: Sampler | None = None
    tensorboard: bool = False
    again: str = "train --resume"


class Run:
    """A plan that is being run, by this process or by a team of them, of which the first writes. `say` takes lines that
    stay, `live` the line that changes."""

    def __init__(self, plan: Plan, tokens: Tokens | Pairs, held: Tokens | Pairs, folder: RunFolder, where, claim: Claim,
                 team: Team, say, live, extras: Extras) -> None:
        self.started_s = process_seconds()
        self.plan, self.tokens, self.folder, self.where, self.claim = plan, tokens, folder, where, claim
        self.say, self.live, self.team, self.leads = say, live, team, team.seat.leads
        self.facts = device.facts(where)
        self.ran_on = device.team_name(self.facts.fingerprint, team.seat.size, team.is_sharded)
        claim.begin(where, self.facts.uuid)
        self.answer_share = answer_share(tokens)
        self.step = TrainStep(plan.model, team.seat.share(plan), plan.optimizer, where, SEED, team,
                              masked=self.answer_share is not None)
        self.data = {"training": identity(tokens), "validation": identity(held)}
        windows = held.fixed(plan.step.batch, plan.step.length, eval_batches(plan.corpus_tokens, plan.step))
        self.weigh = len if self.answer_share is None else answers  # of the mean over some rows, in the mean over all
        self.evaluated = sum(self.weigh(b) for b in windows)
        self.windows = team.seat.deal([p for b in windows for p in torch.from_numpy(b).split(self.step.step.batch)])
        self.extras, self.came_from = extras, None
        self.start, self.before_s, self.first_loss = 0, 0.0, None
        self.loss = self.val_loss = math.nan
        self.ledger, self.wrote_before_s = Ledger({}), 0.0
        self.meter, self.pace = Meter(plan.step.tokens), Pace(self.step)
        self.saver = checkpoint.Saver(folder.path, say)
        self.peaks = {"device_peak_bytes": None}
        self.out_of_memory, self.troubles, self.now_wrong = [], [], None
        self.looked_s, self.log_s = time.monotonic(), 0.0

    def resume(self) -> None:
        """Takes the newest whole checkpoint; UserError if it is of another run or other data."""
        path = self.folder.path
        state, newest = checkpoint.newest(path, self.say)
        try:
            if changed := changes(state.get("data"), self.data):
                raise UserError(f"run {path} was started on other data ({changed}); resume with what it was started on")
            self.start, self.before_s, self.first_loss = state["step"], state["seconds"], float(state["first_val_loss"])
            self.ledger = Ledger(state.get("ledger", {}))
            self.wrote_before_s = state.get("checkpoint_write_s", 0.0)
            if self.start > self.plan.steps or not all(
                    map(is_figure, (self.before_s, self.wrote_before_s, *self.ledger.spent.values()))):
                raise ValueError("a step past the plan's end, or times that can't be")
            self.step.load_state(checkpoint.Tensors(newest))
        except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as e:
            raise UserError(f"run {path}: its checkpoint is not of this run ({e!r:.80})") from None
        self.came_from = state.get("from")
        if self.extras.source:
            weights.refuse_others(self.extras.source, self.came_from, path)
        self.say(f"resuming after step {self.start}")

    def take(self, source: weights.RunWeights | weights.HubWeights) -> None:
        """Starts from its weights."""
        self.came_from = {"path": str(source.path), "crc32": weights.load(source, self.step.model, self.step.put)}
        self.say(f"starting from {source.what}")

    def go(self) -> dict:
        """Trains to the plan's end and returns the receipt. Asked to stop, it saves after the step that runs, says how to go
        on, and raises KeyboardInterrupt."""
        ready_s = process_seconds()
        self.ledger.add("start_up_s", ready_s)
        if self.leads:
            write_json(self.folder.path / "process.json", {
                "pid": os.getpid(), "started_at": round(time.time() - ready_s, 3), "ran_on": self.ran_on})
        done, plan = self.start, self.plan
        shows = self.leads and self.extras.tensorboard
        board = Board(self.folder.path / "tensorboard", done, plan.step.tokens) if shows else None
        self.log = RunLog(self.folder.path, self.say, self.leads, board)
        if self.answer_share is not None:
            self.log.write("answers", done, answer_share=self.answer_share)
        with contextlib.closing(self.log), Stop() as stop:
            try:
                if done == 0:
                    if self.came_from:
                        self.log.write("from", 0, **self.came_from)
                    self.evaluate(0)
                source = feed(self.tokens, self.step.step, SEED, self.where, done, self.team.seat)
                self.pace.go_on()
                while done < plan.steps:
                    begin = time.perf_counter()
                    finished = self.advance(next(source), done, begin)
                    done += 1
                    if finished:
                        self.note(done - 1, finished)
                    leaves = self.team.agree(stop.asked)
                    due_eval = is_due(done, plan.steps, plan.eval)
                    due_save = is_due(done, plan.steps, plan.checkpoint) or leaves
                    if due_eval or due_save:
                        self.note(done, self.pace.drain(), is_pause=True)
                        if due_eval:
                            self.evaluate(done)
                        if due_save:
                            self.save(done)
                        self.pace.go_on()
                    if leaves and done < plan.steps:
                        self.saver.wait()
                        self.say(f"stopped after step {done}; go on with: {self.extras.again}")
                        raise KeyboardInterrupt
            except RuntimeError as e:
                if not is_card_lost(type(e).__name__, str(e)):
                    raise
                self.stop_here(f"the card failed in step {done + 1} ({str(e).splitlines()[0]:.120})",
                               "when it answers again (a driver that was reset, a lost card: restart)")
            self.settle()
        self.measure_peaks()
        paper = self.paper()
        if self.leads:
            write_json(self.folder.path / "receipt.json", paper)
        return paper

    def advance(self, tokens, done: int, begin: float) -> StepTimes | None:
        """Starts optimizer step `done` (from 0) on `tokens`, asked for at `begin`, and returns the times of the one before;
        out of memory it is done again in smaller pieces."""
        feed_s, log_s = time.perf_counter() - begin, self.log_s
        self.log_s = 0.0
        rate = lr(done, self.plan.steps, self.plan.optimizer)
        while True:
            shape = self.step.step
            try:
                return self.pace.run(tokens.view(shape.accum, shape.batch, -1), rate, feed_s, log_s)
            except (RuntimeError, MemoryError) as e:
                if not self.lightens(e):
                    raise
            # out here, where the exception no longer holds what the step had made
            if finished := self.pace.drain():  # with the accumulation that it had
                self.note(done, finished, is_pause=True)
            self.lighten(done + 1)

    def lightens(self, e: Exception) -> bool:
        """Whether smaller pieces may help against an exception."""
        return is_out_of_memory(type(e).__name__, str(e)) and self.step.lighter() is not None

    def lighten(self, number: int) -> None:
        """Goes on in smaller micro-steps, after a failure in step `number`."""
        self.step.lighten()
        now = self.step.step
        self.out_of_memory.append({"step": number, "batch": now.batch, "accum": now.accum})
        self.log.write("out_of_memory", number, batch=now.batch, accum=now.accum)
        self.say(f"step {number}: out of memory, has another program taken some? Going on with batch {now.batch} and accum "
                 f"{now.accum}: the same tokens a step, slower")

    def note(self, number: int, times: StepTimes, is_pause: bool = False) -> None:
        """Enters a finished step; in a pause the device waits for it, else another step runs meanwhile."""
        begin = time.perf_counter()
        self.loss, plan = times.loss, self.plan
        is_gone = is_away(times.step_s, self.meter.step_s[-50:])
        self.ledger.step(times, self.step.step.accum, is_gone)
        if is_gone:
            self.say(f"step {number} took {times.step_s:,.0f} s: the machine slept or the process was stopped; not counted")
        else:
            self.meter.add(times)
        self.log.write("step", number, loss=times.loss, norm=times.norm, step_s=times.step_s, micro_s=times.micro_s,
                       optimizer_s=times.optimizer_s, data_s=times.data_s, log_s=times.log_s,
                       lr=lr(number - 1, plan.steps, plan.optimizer))
        if not (math.isfinite(times.loss) and math.isfinite(times.norm or 0)):
            self.stop_here(f"loss {times.loss} with gradient norm {times.norm} at step {number} "
                           f"({self.tokens.where(number - 1, plan.step)})", "with a lower lr in the plan")
        if time.monotonic() - self.looked_s > LOOK_S and self.meter.recent_tok_s:
            self.look(number)
        self.live(live_line(plan, number, times.loss, self.meter, self.peaks["device_peak_bytes"]))
        seconds = time.perf_counter() - begin
        if is_pause:
            self.ledger.add("log_s", seconds)
        else:
            self.log_s += seconds

    def look(self, number: int) -> None:
        """Tells what costs speed, when it begins and when it ends."""
        self.looked_s = time.monotonic()
        found = trouble(Sight(
            self.facts.kind, self.meter.recent_tok_s, self.plan.predicted.tok_s.low, self.meter.recent_data_share,
            on_battery=device.on_battery(), **self.claim.sight(self.where, self.facts.uuid)), device.THROTTLED)
        if (found and found.what) == (self.now_wrong and self.now_wrong.what):
            return
        line = found.line if found else f"{self.now_wrong.what} is over: {self.meter.recent_tok_s:,.0f} tok/s"
        self.say(f"step {number}: {line}")
        self.log.write("trouble", number, what=found and found.what, line=line)
        if found:
            self.troubles.append({"step": number, "what": found.what, "line": line})
        self.now_wrong = found

    def stop_here(self, what: str, how: str) -> None:
        with contextlib.suppress(RuntimeError):
            self.saver.wait()
        raise UserError(f"{what}: the run stops here; go on from {checkpoint.last_good(self.folder.path)} {how}")

    def evaluate(self, number: int) -> None:
        begin = time.perf_counter()
        self.val_loss = self.team.sum(sum(self.losses(number))) / self.evaluated
        if not math.isfinite(self.val_loss):
            self.stop_here(f"validation loss {self.val_loss} after step {number}", "with a lower lr in the plan")
        self.first_loss = self.val_loss if self.first_loss is None else self.first_loss
        self.measure_peaks()
        seconds = time.perf_counter() - begin
        self.ledger.add("eval_s", seconds)
        self.log.write("eval", number, val_loss=self.val_loss, seconds=seconds)
        self.say(f"step {number}/{self.plan.steps}  validation loss {self.val_loss:.4f}")
        if self.extras.sampler and self.leads:
            self.ledger.add("sample_s", self.extras.sampler.show(self.step.model, number, self.log, self.say))

    def losses(self, number: int) -> list[float]:
        """Of each evaluation batch, times its windows or answers; in smaller ones if memory has run out."""
        while True:
            try:
                return [float(self.step.evaluate(piece)) * self.weigh(piece) * counts
                        for b, counts in self.windows for piece in b.split(self.step.step.batch)]
            except (RuntimeError, MemoryError) as e:
                if not self.lightens(e):
                    raise
            self.lighten(number)

    def measure_peaks(self) -> None:
        """Takes note of the most that any of the team has held."""
        peaks = self.claim.peaks(self.where, self.facts.uuid)
        self.peaks.update({name: self.team.largest(value) for name, value in peaks.items()})

    def save(self, number: int) -> None:
        before_s, state = self.saver.held_s, self.step.named_state()
        if not self.leads:
            return
        self.saver.save(number, state, {
            "seconds": self.before_s + process_seconds(), "first_val_loss": self.first_loss, "val_loss": self.val_loss,
            "data": self.data, "from": self.came_from, "ledger": self.ledger.spent,
            "checkpoint_write_s": self.wrote_before_s + self.saver.write_s})
        self.held(number, before_s)

    def settle(self) -> None:
        """Waits for the last checkpoint; UserError if it failed."""
        before_s = self.saver.held_s
        self.saver.wait()
        self.ledger.add("checkpoint_s", self.saver.held_s - before_s)
        if self.saver.last_failed:
            raise UserError(f"the run is through, but for its last checkpoint: {self.saver.last_failed}; make room, and go "
                            f"on with --run {self.folder.path} --resume")

    def held(self, number: int, before_s: float) -> None:
        seconds = self.saver.held_s - before_s
        self.ledger.add("checkpoint_s", seconds)
        self.log.write("checkpoint", number, seconds=seconds)

    def paper(self) -> dict:
        """The receipt."""
        away_s, spent = self.ledger.spent["away_s"], self.ledger.spent
        seconds = self.before_s + process_seconds()
        return receipt(self.plan, self.meter, self.peaks, seconds - away_s, {
            "start_up_s": self.started_s, "resumed_from": self.start, "eval_s": spent["eval_s"],
            "checkpoint_s": spent["checkpoint_s"], "checkpoint_write_s": self.wrote_before_s + self.saver.write_s,
            "ledger": self.ledger.paper(seconds), "first_val_loss": self.first_loss, "val_loss": self.val_loss,
            "loss": self.loss, "checkpoint_failures": self.saver.failures, "out_of_memory": self.out_of_memory,
            "troubles": self.troubles, "from": self.came_from, "answer_share": self.answer_share,
            "software": self.facts.software, "ran_on": self.ran_on})


def run(plan: Plan, tokens: Tokens | Pairs, held: Tokens | Pairs, folder: RunFolder, where, resume: bool, claim: Claim,
        team: Team, say, live, extras: Extras) -> dict:
    """Trains as planned from the start or the newest checkpoint, and returns the receipt; see Run."""
    this = Run(plan, tokens, held, folder, where, claim, team, say, live, extras)
    if resume:
        this.resume()
    elif extras.source:
        this.take(extras.source)
    if team.seat.leads and not resume and tokens.tokenizer and Path(tokens.tokenizer).is_file():
        with contextlib.suppress(OSError):  # only sampling needs it, and says so
            shutil.copyfile(tokens.tokenizer, folder.path / "tokenizer.json")
    return this.go()
