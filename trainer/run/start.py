"""From a start's options to a run: opens everything, goes through the audit, trains, and tells what came of it."""

import os
import shlex
import subprocess
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spillcliff.errors import UserError, is_out_of_memory
from spillcliff.hardware.device import facts, is_sharded, resolve, team_name
from spillcliff.hardware.usage import Claim
from spillcliff.live import Live
from spillcliff.output import Output, print_rows
from trainer.data.dataset import answer_share, open_data
from trainer.plan import Plan
from trainer.run import preflight, tensorboard
from trainer.run.distributed import Seat, Team
from trainer.run.ledger import words
from trainer.run.log import RunFolder, default_run, describe, receipt_rows
from trainer.run.preflight_facts import look


@dataclass(frozen=True)
class Start:
    """The options of `train`."""

    plan: Path
    data: tuple[Path, ...]
    val: tuple[Path, ...]
    dtype: str | None
    column: str | None
    run: Path | None
    resume: bool
    source: Path | None
    prompts: tuple[str, ...]
    tensorboard: bool
    dry_run: bool
    allow_battery: bool
    device: str | None


def launch(start: Start, as_json: bool) -> None:
    """Trains, as the first of a team or as one that follows it. What is wrong with the input is told once, by the first,
    before it joins: the others wait for it."""
    team = Team(Seat.of(os.environ))
    out = Output(as_json, team.seat.leads)
    plan = Plan.load(start.plan) if team.seat.leads else None
    claim = Claim()
    where = team.place(resolve(start.device))
    if not team.seat.leads:
        if start.dry_run:
            return
        team.join(where)
        plan = Plan.load(start.plan)
    team.is_sharded = is_sharded(plan.device) and team.seat.size > 1
    from trainer.huggingface import weights  # with torch, which what is wrong with a plan need not wait for
    from trainer.run.loop import Extras
    from trainer.run.sample import Sampler

    tokens, held = open_data(plan, start.data, start.val, not start.dry_run, start.dtype, start.column, out.say)
    if start.tensorboard:
        tensorboard.check()
    if start.prompts and team.is_sharded:
        raise UserError("--sample needs the whole model on one device, and the plan shares it out; leave it out, and ask "
                        "`train sample` when the run is through")
    folder = start.run or default_run(Path("results"), plan)
    extras = Extras(start.source and weights.of_shape(start.source, plan.model, out.say),
                    Sampler(start.prompts, tokens.tokenizer, plan.model) if start.prompts else None, start.tensorboard,
                    _again(start, folder, team.seat.size))
    _introduce(plan, start, tokens, held, out)
    if not _passes(plan, start, folder, tokens, where, team, out):
        return
    paper = _train(plan, start, folder, tokens, held, where, claim, team, extras, out)
    _tell(paper, folder, out)


def _again(start: Start, folder: Path, processes: int) -> str:
    """The command that goes on with the run."""
    told = [("--plan", folder / "plan.json"), *(("--data", p) for p in start.data), *(("--val", p) for p in start.val),
            ("--dtype", start.dtype), ("--column", start.column), *(("--sample", text) for text in start.prompts),
            ("--device", start.device), ("--run", folder)]
    words = [str(word) for name, value in told if value is not None for word in (name, value)]
    words += ["--tensorboard"] * start.tensorboard + ["--resume"]
    begin = "train" if processes == 1 else f"torchrun --nproc-per-node {processes} -- $(which train)"
    return f"{begin} {subprocess.list2cmdline(words) if os.name == 'nt' else shlex.join(words)}"


def _introduce(plan: Plan, start: Start, tokens, held, out: Output) -> None:
    seen = plan.steps * plan.step.tokens / len(tokens)
    named = ", ".join(map(str, start.data))
    out.say(describe(plan))
    out.say(f"data {named}: {len(tokens):,} tokens, each seen {seen:.1f} times; {len(held):,} held back to validate")
    if share := answer_share(tokens):
        out.say(f"pairs: the loss is on the answers, {share:.0%} of these tokens; tok/s counts all, padding too")


def _passes(plan: Plan, start: Start, folder: Path, tokens, where, team: Team, out: Output) -> bool:
    """Goes through the audit, and returns whether to train; what refuses is raised."""
    if start.resume:
        RunFolder.resume(folder, plan)
    team.seat.share(plan)
    situation = look(plan, where, folder, start.resume, start.allow_battery, tokens=len(tokens),
                     fingerprint=team_name(facts(where).fingerprint, team.seat.size, team.is_sharded))
    if not team.seat.leads:  # the first has the folder by now
        situation = replace(situation, held=None, run_problem=None)
    findings = preflight.judge(situation)
    for line in preflight.lines(findings) if start.dry_run else preflight.warnings(findings):
        out.say(line)
    if refusal := preflight.refusal(findings):
        raise refusal
    if start.dry_run:
        out.say(f"would run on {situation.fingerprint} into {folder}; nothing was written")
        out.result({"run": str(folder), "device": situation.fingerprint, "steps": plan.steps, "tokens": len(tokens),
                    "findings": [asdict(f) for f in findings]})
    return not start.dry_run


def _train(plan: Plan, start: Start, path: Path, tokens, held, where, claim: Claim, team: Team, extras, out: Output) -> dict:
    """The receipt."""
    from trainer.run.loop import run

    try:
        with RunFolder.alone(path) if team.seat.leads else nullcontext(), Live(out.console()) as live:
            if team.seat.leads:
                folder = RunFolder.resume(path, plan) if start.resume else RunFolder.start(path, plan)
                team.join(where)
            else:
                folder = RunFolder(path)
            paper = run(plan, tokens, held, folder, where, start.resume, claim, team, live.say, live.update, extras)
            team.leave()
    except (RuntimeError, MemoryError) as e:
        if not is_out_of_memory(type(e).__name__, str(e)):
            raise
        raise UserError(f"out of memory at {describe(plan)}: another program may have taken some since it was measured; "
                        f"plan with a smaller --limit, or go on with --run {path} --resume when it is free") from None
    return paper


def _tell(paper: dict, folder: Path, out: Output) -> None:
    out.say(f"validation loss {paper['first_val_loss']:.3f} -> {paper['val_loss']:.3f}; receipt in {folder}")
    print_rows(out, ("", "planned", "actual", "difference"), receipt_rows(paper))
    out.say(f"the time went to {words(paper['ledger'])}")
    out.result(paper | {"run": str(folder)})
