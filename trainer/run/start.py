"""From the options of `train` to a run: opens everything, goes through the audit, trains, and tells what came of it."""

import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spillcliff.console import LiveLine, Output
from spillcliff.errors import UserError
from spillcliff.failures import failure, fragmentation, is_out_of_memory, is_peer_lost
from spillcliff.hardware.device import device_facts, resolve_device
from spillcliff.hardware.fingerprints import is_sharded, multi_device_name
from spillcliff.hardware.usage import MemoryClaim
from trainer.checkpoint import NoCheckpoint
from trainer.data.dataset import Dataset, open_data
from trainer.plan import Plan
from trainer.ranks import World
from trainer.run import preflight, tensorboard
from trainer.run.commands import RunCommands
from trainer.run.distributed import ProcessGroup
from trainer.run.receipt import ledger_line, receipt_rows
from trainer.run.validation import best_words
from trainer.run_folder import RunFolder, new_run_folder

if TYPE_CHECKING:

    from trainer.run.setup import RunOptions, RunSetup


@dataclass(frozen=True)
class StartOptions:
    """The options of `train`."""

    plan: Path
    data: tuple[Path, ...]
    val: tuple[Path, ...]
    dtype: str | None
    column: str | None
    run: Path | None
    resume: bool
    source: Path | None
    lr: float | None
    prompts: tuple[str, ...]
    tensorboard: bool
    dry_run: bool
    allow_battery: bool
    keep_step: bool
    device: str | None


def start(options: StartOptions, as_json: bool) -> None:
    """Trains, as the main one of several processes or as one that follows it. What is wrong with the input is told once, by
    the main one, before it joins: the others wait for it."""
    group = ProcessGroup(World.of_environment(os.environ))
    out = Output(as_json, is_silent=not group.world.is_main)
    plan = _plan(options) if group.world.is_main else None
    claim = MemoryClaim()
    device = group.own_device(resolve_device(options.device))
    if plan is None:
        if options.dry_run:
            return
        group.join(device)
        plan = _plan(options)
    group.is_sharded = is_sharded(plan.device) and group.world.size > 1
    from trainer.run.setup import RunSetup  # with torch, which what is wrong with a plan need not wait for

    data, validation = open_data(plan, options.data, options.val, keep=not options.dry_run, dtype=options.dtype,
                                 column=options.column, say=out.say)
    folder = RunFolder(options.run) if options.run else new_run_folder(Path("results"), plan)
    setup = RunSetup(plan=plan, data=data, validation=validation, folder=folder, device=device, claim=claim, group=group,
                     options=_run_options(options, plan, data, folder, group, out))
    _introduce(setup, options, out)
    if not _passes_preflight(setup, options, out):
        return
    receipt = _train(setup, options, out)
    out.say(f"validation loss {receipt['first_val_loss']:.3f} -> {receipt['val_loss']:.3f}{_risen(receipt)}; receipt in "
            f"{folder.path}")
    out.table(("", "planned", "actual", "difference"), receipt_rows(receipt))
    out.say(f"the time went to {ledger_line(receipt['ledger'])}")
    out.result(receipt | {"run": str(folder.path)})


def _risen(receipt: dict) -> str:
    """What to say of a validation loss that has risen since its lowest; "" if it has not."""
    best, step = receipt["best_val_loss"], receipt["best_val_step"]
    if best is None or best >= receipt["val_loss"]:
        return ""
    return (f", risen from its {best_words(best, step)}: since then it fits its data too closely (more data or fewer epochs "
            f"help); `train sample` and `train export` take the best checkpoint")


def _plan(options: StartOptions) -> Plan:
    """The plan, with the peak rate that was asked for."""
    plan = Plan.load(options.plan)
    return plan if options.lr is None else replace(plan, optimizer=replace(plan.optimizer, lr=options.lr))


def _run_options(options: StartOptions, plan: Plan, data: Dataset, folder: RunFolder, group: ProcessGroup,
                 out: Output) -> "RunOptions":
    from trainer.huggingface import weights
    from trainer.run.sample import Sampler
    from trainer.run.setup import RunOptions

    if options.tensorboard:
        tensorboard.check_installed()
    if options.prompts and group.is_sharded:
        raise UserError("--sample needs the whole model on one device, and the plan shares it out; leave it out, and ask "
                        "`train sample` when the run is through")
    return RunOptions(
        source=weights.open_for(options.source, plan.model, out.say) if options.source else None,
        sampler=Sampler(options.prompts, data.tokenizer, plan.model) if options.prompts else None,
        tensorboard=options.tensorboard, keep_step=options.keep_step, commands=_commands(options, folder, group.world.size))


def _commands(options: StartOptions, folder: RunFolder, processes: int) -> RunCommands:
    told: list[tuple[str, Path | str | None]] = [
        *(("--data", p) for p in options.data), *(("--val", p) for p in options.val), ("--dtype", options.dtype),
        ("--column", options.column), *(("--sample", text) for text in options.prompts), ("--device", options.device)]
    flags = [("--tensorboard", options.tensorboard), ("--allow-battery", options.allow_battery),
             ("--keep-step", options.keep_step)]
    return RunCommands(folder, (*((name, str(value)) for name, value in told if value is not None),
                                *((name, None) for name, is_on in flags if is_on)), options.source, processes)


def _introduce(setup: "RunSetup", options: StartOptions, out: Output) -> None:
    plan, data = setup.plan, setup.data
    times = plan.steps * plan.step.tokens / len(data)
    out.say(plan.describe())
    out.say(f"data {', '.join(map(str, options.data))}: {len(data):,} tokens, each seen {times:.1f} times; "
            f"{len(setup.validation):,} held back to validate")
    if data.answer_share:
        out.say(f"pairs: the loss is on the answers, {data.answer_share:.0%} of these tokens; tok/s counts all, padding too")


def _passes_preflight(setup: "RunSetup", options: StartOptions, out: Output) -> bool:
    """Goes through the audit, and returns whether to train; what refuses is raised."""
    plan, folder, world = setup.plan, setup.folder, setup.group.world
    if options.resume:
        folder.check_resume(plan, options.lr is not None)
    world.part_of_plan(plan)
    facts = _preflight_facts(setup, options)
    findings = preflight.check(facts)
    for line in preflight.lines(findings) if options.dry_run else preflight.warnings(findings):
        out.say(line)
    if refusal := preflight.refusal(findings):
        raise refusal
    if options.dry_run:
        out.say(f"would run on {facts.fingerprint} into {folder.path}; nothing was written")
        out.result({"run": str(folder.path), "device": facts.fingerprint, "steps": plan.steps, "tokens": len(setup.data),
                    "findings": [asdict(f) for f in findings]})
    return not options.dry_run


def _preflight_facts(setup: "RunSetup", options: StartOptions) -> preflight.PreflightFacts:
    from trainer.run.preflight_facts import gather

    world = setup.group.world
    fingerprint = multi_device_name(device_facts(setup.device).fingerprint, world.size, setup.group.is_sharded)
    facts = gather(setup.plan, setup.device, setup.folder, options.resume, options.allow_battery, tokens=len(setup.data),
                   sequences=setup.data.windows(setup.plan.step.length), fingerprint=fingerprint)
    # the main process has the folder by the time that the others look
    return facts if world.is_main else replace(facts, is_locked=None, folder_problem=None)


def _memory_advice(setup: "RunSetup") -> str:
    """Why memory may have run out, and what to do."""
    import torch

    if setup.device.type == "cuda":
        reserved, allocated = torch.cuda.max_memory_reserved(setup.device), torch.cuda.max_memory_allocated(setup.device)
        if why := fragmentation(reserved, allocated, setup.plan.step.engine != "eager"):
            return why
    return "another program may have taken some since it was measured; plan with a smaller --limit"


def _train(setup: "RunSetup", options: StartOptions, out: Output) -> dict:
    """The receipt."""
    from trainer.run.loop import run

    is_main, folder, commands = setup.group.world.is_main, setup.folder, setup.options.commands
    try:
        with folder.locked() if is_main else nullcontext(), LiveLine(out.console()) as live:
            if is_main:
                if options.resume:
                    folder.resume(setup.plan, options.lr is not None)
                else:
                    folder.start(setup.plan)
                setup.group.join(setup.device)
            receipt = run(replace(setup, say=live.say, show=live.update), options.resume)
            setup.group.leave()
    except NoCheckpoint as e:
        raise UserError(f"{e}; start anew with: {commands.start()}") from None
    except Exception as e:
        told = failure(e)
        if setup.group.world.size > 1 and is_peer_lost(told.text):
            raise UserError(f"another of the {setup.group.world.size} processes ended: its own line, or torchrun's below, "
                            f"says why (SIGKILL: most likely the system ran out of memory); go on with: "
                            f"{commands.go_on()}") from None
        if not is_out_of_memory(*told):
            raise
        raise UserError(f"out of memory at {setup.plan.describe()}: {_memory_advice(setup)}, or when it is free go on with: "
                        f"{commands.go_on()}") from None
    return receipt
