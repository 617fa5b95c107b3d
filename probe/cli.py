"""The command `probe`."""

import dataclasses
import functools
from pathlib import Path

import click

from spillcliff.console import Output, given, print_rows, write_table
from trainer.cli import HELP, device_option, guarded, json_option

results_option = click.option("--results", default="results", show_default=True, type=click.Path(path_type=Path),
                              metavar="DIR", help="Where records are kept.")

length_option = click.option("--length", "lengths", default="256,512,1024", show_default=True, metavar="256,512",
                             help="Tokens in a sequence.")


def _options(*options):
    """Several options as one decorator, for commands that share them."""
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


of_a_step = _options(
    click.option("--engine", "engines", default="eager", show_default=True, metavar="E", help="eager, graph or compile."),
    click.option("--recompute", "recomputes", default="none", show_default=True, metavar="R",
                 help="none, elementwise or block."),
    click.option("--update", default="after", show_default=True, type=click.Choice(["after", "backward"]),
                 help="Update parameters after the backward pass, or in it: no accumulation and no clip, less memory."),
    click.option("--vocab", metavar="N", help="Entries of the vocabulary.  [default: 32000, or the config.json's]"))

of_what_is_measured = _options(
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
def card(device, results, as_json) -> None:
    """Show what the device is, what it can run, what it takes for itself, and what it shows now."""
    from probe.grid.bench import takes
    from probe.grid.run import name_of, opened
    from probe.show.text import card_rows
    from spillcliff.hardware import nvml
    from spillcliff.hardware.device import engine_refusal, on_battery
    from trainer.config import ENGINES

    out = Output(as_json)
    with opened(results, device) as (workers, facts, store, extra):
        if facts.kind in ("cuda", "cpu"):
            store.keep(takes(workers, name_of(device, facts), facts))
    readings, free = nvml.readings(facts.uuid), nvml.free_bytes(facts.uuid)
    refusals = {engine: engine_refusal(engine, facts.kind, facts.capability) for engine in ENGINES}
    for label, value in card_rows(facts, free, extra["disk_write_bytes_s"], refusals, readings,
                                  store.device.get("memory") or {}, on_battery()):
        out.say(f"{label:12} {value}")
    for engine in ENGINES:
        if refusals[engine]:
            out.say(f"no {engine}: {refusals[engine]}")
    out.say(f"kept in {store.folder / 'device.json'}")
    out.result(store.device | {"free_bytes": free, "readings": readings, "refused_engines": refusals})


@cli.command(context_settings=HELP)
@device_option
@results_option
@json_option
def cliff(device, results, as_json) -> None:
    """Find where this card's memory stops being fast, by taking it block by block.

    No model is needed. Everything else that runs now counts, and all memory is given back at the end.
    """
    from probe.grid.bench import find_cliff
    from probe.grid.run import name_of, opened
    from probe.show.text import cliff_line
    from probe.store import alone

    out = Output(as_json)
    with opened(results, device) as (workers, facts, store, _), alone(facts):
        found = find_cliff(workers, name_of(device, facts), facts)
    found.save(store.cliff_file)
    out.say(cliff_line(found))
    out.say(f"kept in {store.cliff_file}")
    out.result(dataclasses.asdict(found) | {"device_bytes": found.device_bytes})


@cli.command(context_settings=HELP)
@click.option("--model", "models", metavar="M[,M]", help=MODELS)
@click.option("--step", metavar="MODULE:FUNCTION", help="Instead of --model: your own training step (see the README).")
@click.option("--batch", "batches", default="1,2,3,4,6,8,12,16,24,32", show_default=True, metavar="1,2,4",
              help="Sequences in a micro-step.")
@length_option
@click.option("--accum", "accums", metavar="1,2", help="Micro-steps in a step; 2 stands for every number above 1.  "
                                                       "[default: 1, and 2 for what may be picked]")
@of_a_step
@click.option("--limit", metavar="5GB", help="Memory that may be used.  [default: 97% of the cliff]")
@click.option("--seconds", default=10.0, show_default=True, type=click.FloatRange(1, 3600), help="Time for each cell.")
@click.option("--every-cell", is_flag=True, help="Measure all cells, not only what the pick needs.")
@click.option("--again", is_flag=True, help="Measure again what has been measured.")
@click.option("--nproc", default=1, show_default=True, type=click.IntRange(1, 1024), metavar="N",
              help="Cards that share each step, through torchrun; --batch is each one's part.")
@click.option("--sharded", is_flag=True, help="Each of them keeps a part of the weights and moments only.")
@device_option
@results_option
@json_option
def grid(models, step, batches, lengths, accums, engines, recomputes, update, vocab, limit, seconds, every_cell, again,
         nproc, sharded, device, results, as_json) -> None:
    """Measure peak memory and tok/s over batch, length and model size, and find the fastest cell that fits.

    Few cells are measured: those that the pick needs, and its neighbours. Each runs in a process of its own and is on disk
    before the next one starts; a grid that is started again measures only what is missing.
    """
    from probe.cell import asked_cells
    from probe.grid.run import Tour, name_of, opened, tell
    from probe.store import alone
    from spillcliff.units import parse_bytes

    if (models is None) == (step is None):
        raise click.UsageError("a grid needs either --model (sizes, such as 150M) or --step package.module:make_step")
    out = Output(as_json)
    asked = given(limit, parse_bytes, "--limit")
    cells = asked_cells(models, step, batches, lengths, "1" if accums is None else accums, engines, recomputes, vocab,
                        update, nproc)
    if sharded and nproc == 1:
        raise click.UsageError("--sharded needs --nproc N, the cards to share the weights out to")
    with opened(results, device, nproc, sharded) as (workers, facts, store, _), alone(facts):
        tour = Tour(workers, name_of(device, facts), facts, store, seconds, every_cell, again, out)
        found = tour.run(cells, asked, step, with_twins=accums is None and update == "after")
    tell(*found, facts, store, out)


@cli.command(context_settings=HELP)
@click.option("--model", "models", required=True, metavar="M[,M]", help=MODELS)
@click.option("--batch", "batches", default="1,2,4,8,16,32", show_default=True, metavar="1,2,4",
              help="Sequences in a micro-step.")
@length_option
@click.option("--accum", "accums", default="1", show_default=True, metavar="1,2", help="Micro-steps in a step.")
@of_a_step
@click.option("--card", metavar="NAME", help='A card that is not here, such as "RTX 3060 12GB", by its paper figures.')
@click.option("--device", metavar="NAME", help="A measured device, a folder under results/.  [default: this machine's]")
@results_option
@json_option
def estimate(models, batches, lengths, accums, engines, recomputes, update, vocab, card, device, results, as_json) -> None:
    """Estimate peak memory without touching a card: the step's own allocations, replayed.

    One cell is told part by part, several as a table. With --card the table says what would fit under which limit.
    """
    from probe.cell import asked_cells, planes
    from probe.estimate import gpu_catalog
    from probe.estimate.peak import CardMemory
    from probe.estimate.peak import estimate as estimated
    from probe.show.text import ESTIMATE_HEAD, estimate_lines, estimate_rows, memory_of

    out = Output(as_json)
    cells = asked_cells(models, None, batches, lengths, accums, engines, recomputes, vocab, update)
    if card and device:
        raise click.UsageError("--card is for a card by its paper figures, --device for a measured one: give one of them")
    paper = given(card, gpu_catalog.find)
    memory, about = memory_of(results, device) if paper is None else (
        CardMemory.of({"kind": "cuda", "capability": paper.capability}), paper.name)
    found = {cell: estimated(cell, memory) for cell in cells}
    if paper:
        for plane in planes(cells):
            for line in gpu_catalog.shopping_lines(paper, plane, out.console().width):
                out.say(line)
    elif len(cells) == 1:
        for line in estimate_lines(*next(iter(found.items())), about):
            out.say(line)
    else:
        print_rows(out, ESTIMATE_HEAD, estimate_rows(found))
    if not memory.measured and not paper:
        out.say(f"estimated for a card that was not measured: {about}; `probe card` measures what is here")
    out.result({"device": about, "measured": memory.measured, "cells": [
        {"cell": dataclasses.asdict(c)} | dataclasses.asdict(e) for c, e in found.items()]})


@cli.command(context_settings=HELP)
@click.option("--plan", "plan_path", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The plan to run.")
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(0.1, 1440), help="For how long at most.")
@device_option
@results_option
@json_option
def soak(plan_path, minutes, device, results, as_json) -> None:
    """Run a plan's step until its speed has settled: does it hold when the card is warm?

    Plans that are made afterwards count what was lost in their hours.
    """
    from probe.grid.bench import soaked
    from probe.grid.run import name_of, opened
    from probe.soak import lines
    from probe.store import alone
    from spillcliff.console import LiveLine
    from trainer.plan import Plan

    out = Output(as_json)
    plan = Plan.load(plan_path)
    with opened(results, device) as (workers, facts, store, _), alone(facts), LiveLine(out.console(), every_s=30) as live:
        found = soaked(workers, name_of(device, facts), facts, plan, minutes, store.soaks, live)
    for line in lines(found):
        out.say(line)
    out.say(f"kept in {store.soaks}")
    out.result(found.to_json() | {"first_s": found.first_s, "settled_s": found.settled_s, "factor": found.factor,
                                  "power_w": found.power_w, "energy_wh": found.energy_wh})


@cli.command(context_settings=HELP)
@click.option("--run", "run_path", type=click.Path(path_type=Path), metavar="DIR",
              help="The folder of a run.  [default: the newest under results/runs that runs]")
@click.option("--pid", type=click.IntRange(1), metavar="N", help="Instead: any training process, seen from outside alone.")
@click.option("--watch", is_flag=True, help="Keep looking and showing, until it ends or Ctrl-C.")
@click.option("--seconds", default=15.0, show_default=True, type=click.FloatRange(2, 3600),
              help="For how long to look; with --watch, what a verdict stands on.")
@click.option("--device", metavar="D", help="cpu, cuda, cuda:1 or its name.  [default: where it is seen to compute]")
@results_option
@json_option
def health(run_path, pid, watch, seconds, device, results, as_json) -> None:
    """Tell whether a job that is running is well: alive, saturated or starved and of what, checkpoints on cadence, processes
    doubled, sources edited since it began.

    Looks from outside and changes nothing. Exits with 0 whatever it finds (--json has the verdicts), with 2 if there is
    nothing to look at.
    """
    from probe.health.diagnose import judge, lines
    from probe.health.watch import job, sit
    from spillcliff.console import LiveLine

    if run_path is not None and pid is not None:
        raise click.UsageError("--run is for a run of ours, --pid for any process: give one of them")
    out, is_interrupted = Output(as_json), False
    this, console = job(run_path, pid, device, results, seconds, watch), out.console()
    try:
        with LiveLine(console) as live:
            sit(this, seconds, watch, live, console.width, out.stream)
    except KeyboardInterrupt:
        if not watch:
            raise
        is_interrupted = True
    seen = this.observed()
    findings = judge(seen)
    for line in lines(findings, console.width):
        out.say(line)
    out.result({"findings": [dataclasses.asdict(f) for f in findings], "observed": dataclasses.asdict(seen)})
    if is_interrupted:
        raise KeyboardInterrupt


@cli.command(context_settings=HELP)
@of_what_is_measured
@click.option("--csv", "csv_path", is_flag=False, flag_value="-", metavar="[FILE]",
              help="Write the records as CSV instead, a row each; without FILE to stdout.")
def show(model, device, limit, results, csv_path, as_json) -> None:
    """Show what has been measured: tok/s and peak over batch and length, and the cliff as a line."""
    from probe.records import frame
    from probe.show import heatmap
    from probe.show.text import Measured, cliff_line
    from spillcliff.units import parse_bytes

    out = Output(as_json, is_taken=csv_path == "-")
    m = Measured.read(results, device, model, given(limit, parse_bytes, "--limit"), out.say)
    if csv_path:
        write_table(out, csv_path, frame(m.records).to_csv(index=False, lineterminator="\n"))
        out.result({"device": m.device, "csv": csv_path, "records": len(m.records)})
        return
    series = heatmap.series_of(m.records)
    out.say(f"{m.device}: {len(m.records)} cells")
    if m.cliff:
        out.say(cliff_line(m.cliff))
    if len(series) > MAPS and model is None:
        print_rows(out, heatmap.SUMMARY_HEAD, heatmap.summary(m.records))
        out.say("--model M shows the maps of one model")
    else:
        for of_series in series.values():
            cliff_bytes = m.cliff and m.cliff.device_bytes
            for line in ["", *heatmap.lines(of_series, m.limit_bytes, cliff_bytes, out.console().width)]:
                out.say(line)
    if line := m.error_line():
        out.say(line)
    out.result({"device": m.device, "limit_bytes": m.limit_bytes, "cliff": m.cliff and dataclasses.asdict(m.cliff),
                "records": [r.to_json() | {"tok_s": r.tok_s} for r in m.records]})


@cli.command(context_settings=HELP)
@of_what_is_measured
def plot(model, device, limit, results, as_json) -> None:
    """Draw what `probe show` shows, a PNG for each map, beside the records."""
    from probe.show.text import Measured, draw
    from spillcliff.units import parse_bytes

    out = Output(as_json)
    m = Measured.read(results, device, model, given(limit, parse_bytes, "--limit"), out.say)
    pictures = draw(m.records, m.device, m.limit_bytes, m.cliff, results / m.device)
    out.say("\n".join(str(p) for p in pictures))
    out.result({"device": m.device, "pictures": [str(p) for p in pictures]})


def main() -> None:
    guarded(cli, "probe")


if __name__ == "__main__":
    main()
