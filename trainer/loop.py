"""The run: reads top to bottom as what happens."""

import contextlib
import math
import shutil
import signal
import time
from pathlib import Path

import torch

from trainer import checkpoint, device
from trainer.errors import UserError
from trainer.files import write_json
from trainer.log import Meter, RunFolder, RunLog, live_line, process_seconds, receipt
from trainer.pace import Pace
from trainer.plan import Plan, eval_batches, held_back, is_due
from trainer.schedule import lr
from trainer.step import TrainStep
from trainer.tokens import Tokens, feed
from trainer.usage import Claim

SEED = 0


class Stop:
    """Ctrl-C and SIGTERM while a run goes: noted, so that no step is cut in two; a second one ends it at once."""

    def __enter__(self) -> "Stop":
        self.asked = False
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, signum, frame) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *failure) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def open_data(plan: Plan, data: Path, val: Path | None, keep: bool = True) -> tuple[Tokens, Tokens]:
    """Training and validation tokens, every id checked against the plan's vocabulary. Without `val`, the last hundredth
    of the data (at least one window, at most what an evaluation reads) is kept for it. UserError if they don't suit.
    `keep` is Tokens.check's."""
    length = plan.step.length
    tokens = Tokens.open(data)
    tokens.check(plan.model.vocab, keep)
    if val is not None:
        held = Tokens.open(val)
        held.check(plan.model.vocab, keep)
    else:
        if len(tokens.ids) < 2 * (length + 1):
            raise UserError(f"token file {data} has {len(tokens.ids)} tokens; at length {length} a window to train on and "
                            f"one to validate on take {2 * (length + 1)}: give more text or a shorter length, or --val")
        tokens, held = tokens.split(held_back(len(tokens.ids), plan.step))
    tokens.windows(length)
    held.windows(length)
    return tokens, held


def identity(tokens: Tokens) -> dict:
    """What tells one run of tokens from another: how many, of which vocabulary, and a checksum over all of them."""
    return {"tokens": len(tokens.ids), "vocab": tokens.vocab, "crc32": tokens.checksum()}


def changes(before: dict | None, now: dict) -> str:
    """What of the data is not as it was, in words; "" if nothing is."""
    found = []
    for which, values in (before or {}).items():
        differ = [f"{name} {value} -> {now[which][name]}" for name, value in values.items() if now[which][name] != value]
        found += [f"{which} {', '.join(differ)}"] * bool(differ)
    return "; ".join(found)


def last_good(run: Path) -> str:
    """The newest whole checkpoint in words."""
    try:
        return str(checkpoint.newest(run)[1])
    except UserError:
        return "the start, since there is no checkpoint yet,"


def run(plan: Plan, tokens: Tokens, held: Tokens, folder: RunFolder, where, resume: bool, claim: Claim,
        say, live) -> dict:
    """Trains as planned from the start or the newest checkpoint, and returns the receipt.

    `say` takes lines that stay, `live` the line that changes. Asked to stop, it saves after the step that runs, says how
    to go on, and raises KeyboardInterrupt.
    """
    started_s = process_seconds()
    facts = device.facts(where)
    step = TrainStep(plan.model, plan.step, plan.optimizer, where, SEED)
    data = {"training": identity(tokens), "validation": identity(held)}
    start, before_s, first_loss = 0, 0.0, None
    spent = {"eval_s": 0.0, "checkpoint_s": 0.0, "checkpoint_write_s": 0.0}
    if resume:
        state, newest = checkpoint.newest(folder.path, say)
        if changed := changes(state.get("data"), data):
            raise UserError(f"run {folder.path} was started on other data ({changed}); resume with what it was started on")
        try:
            step.load_state(checkpoint.Tensors(newest))
            start, before_s, first_loss = int(state["step"]), float(state["seconds"]), state["first_val_loss"]
            spent = {name: float(state.get(name, 0.0)) for name in spent}
        except (KeyError, RuntimeError, TypeError, ValueError) as e:
            raise UserError(f"run {folder.path}: its checkpoint is not of this run ({e!r:.80})") from None
        say(f"resuming after step {start}")
    elif tokens.tokenizer and Path(tokens.tokenizer).is_file():
        with contextlib.suppress(OSError):  # only sampling needs it, and says so
            shutil.copyfile(tokens.tokenizer, folder.path / "tokenizer.json")

    saver, saved_before = checkpoint.Saver(folder.path, say), dict(spent)
    log, meter, pace = RunLog(folder.path, say), Meter(plan.step.tokens), Pace(step)
    windows = held.fixed(plan.step.batch, plan.step.length, eval_batches(plan.corpus_tokens, plan.step))
    batches = [torch.from_numpy(b) for b in windows]
    peaks = {"device_peak_bytes": None}
    loss = val_loss = math.nan

    def note(number: int, times) -> None:
        nonlocal loss
        loss = times.loss
        meter.add(times)
        log.write("step", number, loss=times.loss, norm=times.norm, step_s=times.step_s, micro_s=times.micro_s,
                  optimizer_s=times.optimizer_s, lr=lr(number - 1, plan.steps, plan.optimizer))
        if not (math.isfinite(times.loss) and math.isfinite(times.norm or 0)):
            stop_here(f"loss {times.loss} with gradient norm {times.norm} at step {number} "
                      f"({tokens.where(number - 1, plan.step)})")
        live(live_line(plan, number, times.loss, meter, peaks["device_peak_bytes"]))

    def stop_here(what: str) -> None:
        saver.wait()
        raise UserError(f"{what}: the run stops here; go on from {last_good(folder.path)} with a lower lr in the plan")

    def evaluate(number: int) -> None:
        nonlocal val_loss, first_loss
        begin = time.perf_counter()
        losses = [float(step.evaluate(b)) * len(b) for b in batches]
        val_loss = sum(losses) / sum(len(b) for b in batches)
        if not math.isfinite(val_loss):
            stop_here(f"validation loss {val_loss} after step {number}")
        spent["eval_s"] += time.perf_counter() - begin
        first_loss = val_loss if first_loss is None else first_loss
        peaks.update(claim.peaks(where, facts.uuid))
        log.write("eval", number, val_loss=val_loss, seconds=time.perf_counter() - begin)
        say(f"step {number}/{plan.steps}  validation loss {val_loss:.4f}")

    def save(number: int) -> None:
        begin = time.perf_counter()
        saver.save(number, step.named_state(), {
            "seconds": before_s + process_seconds(), "first_val_loss": first_loss, "val_loss": val_loss, "data": data,
            **spent})
        saved()
        log.write("checkpoint", number, seconds=time.perf_counter() - begin)

    def saved() -> None:
        spent["checkpoint_s"] = saved_before["checkpoint_s"] + saver.held_s
        spent["checkpoint_write_s"] = saved_before["checkpoint_write_s"] + saver.write_s

    done = start
    with contextlib.closing(log), Stop() as stop:
        if start == 0:
            evaluate(0)
        for tokens_of_step in feed(tokens, plan.step, SEED, where, start):
            if done >= plan.steps:
                break
            finished = pace.run(tokens_of_step, lr(done, plan.steps, plan.optimizer))
            done += 1
            if finished:
                note(done - 1, finished)
            due_eval = is_due(done, plan.steps, plan.eval)
            due_save = is_due(done, plan.steps, plan.checkpoint) or stop.asked
            if due_eval or due_save:
                note(done, pace.drain())
                if due_eval:
                    evaluate(done)
                if due_save:
                    save(done)
            if stop.asked and done < plan.steps:
                saver.wait()
                say(f"stopped after step {done}; go on with: train --plan {folder.path / 'plan.json'} "
                    f"--data {tokens.path} --run {folder.path} --resume")
                raise KeyboardInterrupt
        saver.wait()
        saved()
        if saver.last_failed:
            raise UserError(f"the run is through, but for its last checkpoint: {saver.last_failed}; make room, and go on "
                            f"with --run {folder.path} --resume")

    peaks.update(claim.peaks(where, facts.uuid))
    paper = receipt(plan, meter, peaks, before_s + process_seconds(), {
        "start_up_s": started_s, "resumed_from": start, **spent, "first_val_loss": first_loss, "val_loss": val_loss,
        "loss": loss,
        "checkpoint_failures": saver.failures, "software": facts.software, "ran_on": facts.fingerprint})
    write_json(folder.path / "receipt.json", paper)
    return paper
