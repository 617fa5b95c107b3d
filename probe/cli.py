"""The command `probe`."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import click

from spillcliff.cli import HELP, PATH, device_option, json_option, results_option, run_command
from spillcliff.console import LiveLine, Output, parse_option
from trainer.config import STEP_OPTIONS


def _options(*options: Callable) -> Callable:
    """Several options as one decorator, for commands that share them."""
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


def _step_option(field: dataclasses.Field) -> Callable:
    """A command's option for a field of StepConfig."""
    return click.option(f"--{field.name}", default=field.default, show_default=True, metavar=field.name[0].upper(),
                        help=field.metadata["help"])


length_option = click.option("--length", "lengths", default="256,512,1024", show_default=True, metavar="256,512",
                             help="Tokens in a sequence.")
step_options = _options(
    *map(_step_option, STEP_OPTIONS),
    click.option("--vocab", metavar="N", help="Entries of the vocabulary.  [default: 32000, or the config.json's]"))
measured_options = _options(
    click.option("--model", metavar="M", help="Only this size, this model's config.json, or this step."),
    click.option("--device", metavar="NAME", help="A folder under results/.  [default: this machine's, else the only one]"),
    click.option("--limit", metavar="5GB", help="Mark what is above it.  [default: 97% of the cliff]"),
    results_option, json_option)

MODELS = "Sizes, such as 150M or 10M,50M, or a Llama-like model's config.json."
MAPS = 12
"""More series than this are shown a line each: a page holds no more maps."""


@click.group(context_settings=HELP)
def cli() -> None:
    """Measure what fits on this device, and how fast, with the very step that trains."""


@cli.command(context_settings=HELP)
@device_option
@results_option
@json_option
def card(device: str | None, results: Path, as_json: bool) -> None:
    """Show what the device is, what it can run, what it takes for itself, and what it shows now."""
    from probe.grid.session import measure_overheads, open_session
    from probe.show.text import card_rows
    from spillcliff.hardware import nvml
    from spillcliff.hardware.device import engine_refusal, on_battery
    from spillcliff.hardware.host_memory import host_memory
    from trainer.config import ENGINES

    out = Output(as_json)
    with open_session(results, device) as session:
        facts, store = session.facts, session.store
        if facts.kind in ("cuda", "cpu"):
            store.keep(measure_overheads(session.workers, session.device, facts))
    readings, free = nvml.readings(facts.uuid), nvml.free_bytes(facts.uuid)
    if facts.kind in ("cpu", "mps"):
        free = host_memory().free_bytes
    refusals = {engine: engine_refusal(engine, facts.kind, facts.capability) for engine in ENGINES}
    for label, value in card_rows(facts, free, session.disk_write_bytes_s, refusals, readings,
                                  store.device.get("memory") or {}, on_battery(facts.uuid)):
        out.say(f"{label:12} {value}")
    for engine in ENGINES:
        if refusals[engine]:
            out.say(f"no {engine}: {refusals[engine]}")
    out.say(f"kept in {store.folder.device}")
    out.result(store.device | {"free_bytes": free, "readings": readings, "refused_engines": refusals})


@cli.command(context_settings=HELP)
@device_option
@results_option
@json_option
def cliff(device: str | None, results: Path, as_json: bool) -> None:
    """Find where this card's memory stops being fast, by taking it block by block.

    No model is needed. Everything else that runs now counts, and all memory is given back at the end.
    """
    from probe.grid.session import find_cliff, open_session
    from probe.show.text import cliff_line
    from probe.store import only_probe_on

    out = Output(as_json)
    with open_session(results, device) as session, only_probe_on(session.facts):
        measured = find_cliff(session.workers, session.device, session.facts)
    path = session.store.folder.cliff
    measured.save(path)
    out.say(cliff_line(measured))
    out.say(f"kept in {path}")
    out.result(dataclasses.asdict(measured) | {"device_bytes": measured.device_bytes})


@cli.command(context_settings=HELP)
@click.option("--model", "models", metavar="M[,M]", help=MODELS)
@click.option("--step", metavar="MODULE:FUNCTION", help="Instead of --model: your own training step (see the README).")
@click.option("--batch", "batches", default="1,2,3,4,6,8,12,16,24,32", show_default=True, metavar="1,2,4",
              help="Sequences in a micro-step.")
@length_option
@click.option("--accum", "accums", metavar="1,2", help="Micro-steps in a step; 2 stands for every number above 1.  "
                                                       "[default: 1, and 2 for what may be picked]")
@step_options
@click.option("--limit", metavar="5GB", help="Memory that may be used.  [default: 97% of the cliff]")
@click.option("--seconds", default=10.0, show_default=True, type=click.FloatRange(1, 3600), help="Time for each cell.")
@click.option("--every-cell", is_flag=True, help="Measure all cells, not only what the pick needs.")
@click.option("--again", is_flag=True, help="Measure again what has been measured.")
@click.option("--allow-battery", is_flag=True, help="Measure even on battery (about half as fast); records are marked.")
@click.option("--nproc", default=1, show_default=True, type=click.IntRange(1, 1024), metavar="N",
              help="Cards that share each step, through torchrun; --batch is each one's part.")
@click.option("--sharded", is_flag=True, help="Each of them keeps a part of the weights and moments only.")
@device_option
@results_option
@json_option
def grid(models: str | None, step: str | None, batches: str, lengths: str, accums: str | None, vocab: str | None,
         limit: str | None, seconds: float, every_cell: bool, again: bool, allow_battery: bool, nproc: int, sharded: bool,
         device: str | None, results: Path, as_json: bool, **options: str) -> None:
    """Measure peak memory and tok/s over batch, length and model size, and find the fastest cell that fits.

    Few cells are measured: those that the pick needs, and its neighbours. Each runs in a process of its own and is on disk
    before the next one starts; a grid that is started again measures only what is missing.
    """
    from probe.cell import requested_cells
    from probe.grid.run import GridOptions, run_grid, tell
    from probe.grid.session import open_session
    from probe.store import only_probe_on
    from spillcliff.units import parse_bytes

    if (models is None) == (step is None):
        raise click.UsageError("a grid needs either --model (sizes, such as 150M) or --step package.module:make_step")
    out = Output(as_json)
    limit_bytes = parse_option(limit, parse_bytes, "--limit")
    cells = requested_cells(models, step, batches, lengths, "1" if accums is None else accums, options, vocab, nproc)
    if sharded and nproc == 1:
        raise click.UsageError("--sharded needs --nproc N, the cards to share the weights out to")
    can_accumulate = all(cell.step.update == "after" for cell in cells)
    grid_options = GridOptions(seconds=seconds, every_cell=every_cell, again=again, limit_bytes=limit_bytes,
                               with_accumulation=accums is None and can_accumulate, allow_battery=allow_battery)
    with open_session(results, device, nproc, sharded) as session, only_probe_on(session.facts):
        result = run_grid(session, cells, grid_options, out)
    tell(result, session, out)


@cli.command(context_settings=HELP)
@click.option("--model", "models", required=True, metavar="M[,M]", help=MODELS)
@click.option("--batch", "batches", default="1,2,4,8,16,32", show_default=True, metavar="1,2,4",
              help="Sequences in a micro-step.")
@length_option
@click.option("--accum", "accums", default="1", show_default=True, metavar="1,2", help="Micro-steps in a step.")
@step_options
@click.option("--card", metavar="NAME", help='A card that is not here, such as "RTX 3060 12GB", by its paper figures.')
@click.option("--device", metavar="NAME", help="A measured device, a folder under results/.  [default: this machine's]")
@results_option
@json_option
def estimate(models: str, batches: str, lengths: str, accums: str, vocab: str | None, card: str | None, device: str | None,
             results: Path, as_json: bool, **options: str) -> None:
    """Estimate peak memory without touching a card: the step's own allocations, replayed.

    One cell is told part by part, several as a table. With --card the table says what would fit under which limit.
    """
    from probe.cell import planes, requested_cells
    from probe.estimate.gpu_catalog import find_card
    from probe.estimate.peak import CardMemory
    from probe.estimate.peak import estimate as estimate_peak
    from probe.show.card_table import card_table
    from probe.show.measured import memory_of
    from probe.show.text import ESTIMATE_HEAD, estimate_lines, estimate_rows

    out = Output(as_json)
    cells = requested_cells(models, None, batches, lengths, accums, options, vocab)
    if card and device:
        raise click.UsageError("--card is for a card by its paper figures, --device for a measured one: give one of them")
    on_paper = parse_option(card, find_card)
    memory, about = memory_of(results, device) if on_paper is None else (
        CardMemory.of({"kind": "cuda", "capability": on_paper.capability}), on_paper.name)
    peaks = {cell: estimate_peak(cell, memory) for cell in cells}
    if on_paper:
        for plane in planes(cells):
            for line in card_table(on_paper, plane, out.console().width):
                out.say(line)
    elif len(cells) == 1:
        for line in estimate_lines(*next(iter(peaks.items())), about):
            out.say(line)
    else:
        out.table(ESTIMATE_HEAD, estimate_rows(peaks))
    if not memory.measured and not on_paper:
        out.say(f"estimated for a card that was not measured: {about}; `probe card` measures what is here")
    out.result({"device": about, "measured": memory.measured, "cells": [
        {"cell": cell.to_json()} | dataclasses.asdict(peak) for cell, peak in peaks.items()]})


@cli.command(context_settings=HELP)
@click.option("--plan", "plan_path", required=True, type=PATH, metavar="FILE", help="The plan to run.")
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(0.1, 1440), help="For how long at most.")
@device_option
@results_option
@json_option
def soak(plan_path: Path, minutes: float, device: str | None, results: Path, as_json: bool) -> None:
    """Run a plan's step until its speed has settled: does it hold when the card is warm?

    Plans that are made afterwards count what was lost in their hours.
    """
    from probe.grid.session import open_session
    from probe.grid.soak_command import SoakRun
    from probe.soak import lines
    from probe.store import only_probe_on
    from trainer.plan import Plan

    out = Output(as_json)
    plan = Plan.load(plan_path)
    with (open_session(results, device) as session, only_probe_on(session.facts),
          LiveLine(out.console(), every_s=30) as live):
        kept = SoakRun(session, plan, minutes, live).run()
    for line in lines(kept):
        out.say(line)
    out.say(f"kept in {session.store.folder.soaks}")
    out.result(kept.to_json() | {"first_s": kept.first_s, "settled_s": kept.settled_s, "factor": kept.factor,
                                 "power_w": kept.power_w, "energy_wh": kept.energy_wh})


@cli.command(context_settings=HELP)
@click.option("--run", "run_path", type=PATH, metavar="DIR",
              help="The folder of a run.  [default: the newest under results/runs that runs]")
@click.option("--pid", type=click.IntRange(1), metavar="N", help="Instead: any training process, seen from outside alone.")
@click.option("--watch", is_flag=True, help="Keep looking and showing, until it ends or Ctrl-C.")
@click.option("--seconds", default=15.0, show_default=True, type=click.FloatRange(2, 3600),
              help="For how long to look; with --watch, what a verdict stands on.")
@click.option("--device", metavar="D", help="cpu, cuda, cuda:1 or its name.  [default: where it is seen to compute]")
@results_option
@json_option
def health(run_path: Path | None, pid: int | None, watch: bool, seconds: float, device: str | None, results: Path,
           as_json: bool) -> None:
    """Tell whether a job that is running is well: alive, saturated or starved and of what, checkpoints on cadence, processes
    doubled, sources edited since it began.

    Looks from outside and changes nothing. Exits with 0 whatever it finds (--json has the verdicts), with 2 if there is
    nothing to look at.
    """
    from probe.health.diagnose import diagnose, lines
    from probe.health.watch import observer_of, watch_job

    if run_path is not None and pid is not None:
        raise click.UsageError("--run is for a run of ours, --pid for any process: give one of them")
    out, is_interrupted = Output(as_json), False
    observer, console = observer_of(run_path, pid, device, results, seconds, watch), out.console()
    try:
        with LiveLine(console) as live:
            watch_job(observer, seconds, watch, live, console.width, out.stream)
    except KeyboardInterrupt:
        if not watch:
            raise
        is_interrupted = True
    observation = observer.observation()
    findings = diagnose(observation)
    for line in lines(findings, console.width):
        out.say(line)
    out.result({"findings": [dataclasses.asdict(f) for f in findings], "observed": dataclasses.asdict(observation)})
    if is_interrupted:
        raise KeyboardInterrupt


@cli.command(context_settings=HELP)
@measured_options
@click.option("--csv", "csv_path", is_flag=False, flag_value="-", metavar="[FILE]",
              help="Write the records as CSV instead, a row each; without FILE to stdout.")
def show(model: str | None, device: str | None, limit: str | None, results: Path, csv_path: str | None,
         as_json: bool) -> None:
    """Show what has been measured: tok/s and peak over batch and length, and the cliff as a line."""
    from probe.records import frame
    from probe.show import text
    from probe.show.heatmap import series_of
    from probe.show.measured import Measured
    from spillcliff.units import parse_bytes

    out = Output(as_json, stdout_is_taken=csv_path == "-")
    m = Measured.read(results, device, model, parse_option(limit, parse_bytes, "--limit"), out.say)
    if csv_path:
        out.csv(csv_path, frame(m.records).to_csv(index=False, lineterminator="\n"))
        out.result({"device": m.folder.name, "csv": csv_path, "records": len(m.records)})
        return
    series = series_of(m.records)
    out.say(f"{m.folder.name}: {len(m.records)} cells")
    if m.cliff:
        out.say(text.cliff_line(m.cliff))
    if len(series) > MAPS and model is None:
        out.table(text.SUMMARY_HEAD, text.summary(m.records))
        out.say("--model M shows the maps of one model")
    else:
        cliff_bytes = m.cliff.device_bytes if m.cliff else None
        for of_series in series.values():
            for line in ["", *text.map_lines(of_series, m.limit_bytes, cliff_bytes, out.console().width)]:
                out.say(line)
    if error_line := m.error_line():
        out.say(error_line)
    out.result({"device": m.folder.name, "limit_bytes": m.limit_bytes, "cliff": m.cliff and dataclasses.asdict(m.cliff),
                "records": [r.to_json() | {"tok_s": r.tok_s or None} for r in m.records]})


@cli.command(context_settings=HELP)
@measured_options
def plot(model: str | None, device: str | None, limit: str | None, results: Path, as_json: bool) -> None:
    """Draw what `probe show` shows, a PNG for each map, beside the records."""
    from probe.show.heatmap_png import draw_maps
    from probe.show.measured import Measured
    from spillcliff.units import parse_bytes

    out = Output(as_json)
    m = Measured.read(results, device, model, parse_option(limit, parse_bytes, "--limit"), out.say)
    pictures = draw_maps(m.records, m.folder.name, m.limit_bytes, m.cliff, m.folder)
    out.say("\n".join(str(p) for p in pictures))
    out.result({"device": m.folder.name, "pictures": [str(p) for p in pictures]})


def main() -> None:
    run_command(cli, "probe")


if __name__ == "__main__":
    main()
