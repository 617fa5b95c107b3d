"""The command `probe`."""

from pathlib import Path

import click

from trainer.cli import HELP, Output, device_option, given, guarded, json_option
from trainer.errors import NoPlan, UserError

results_option = click.option("--results", default="results", show_default=True, type=click.Path(path_type=Path),
                              metavar="DIR", help="Where records are kept.")


@click.group(context_settings=HELP)
def cli() -> None:
    """Measure what fits on this device, and how fast, with the very step that trains."""


def _open(results: Path, device: str | None):
    """(workers, facts, store, extra) of a device, its folder made."""
    from probe.grid import look
    from probe.store import Store
    from probe.worker import Workers

    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--results {results}: {e.strerror or e}; name a folder that can be written") from None
    workers = Workers()
    facts, extra = look(workers, device, results)
    return workers, facts, Store(results, facts, extra), extra


@cli.command(context_settings=HELP)
@device_option
@results_option
@json_option
def card(device, results, as_json) -> None:
    """Show what the device is, what it can run, and what it shows now."""
    import dataclasses

    from trainer import nvml
    from trainer.config import ENGINES
    from trainer.device import THROTTLED, on_battery, refuse_engine
    from trainer.units import format_bytes

    out = Output(as_json)
    _, facts, store, extra = _open(results, device)
    readings = nvml.readings(facts.uuid)
    refusals = {engine: refuse_engine(engine, facts.kind, facts.capability) for engine in ENGINES}
    free = nvml.free_bytes(facts.uuid)
    rows = [("name", facts.name), ("memory", format_bytes(facts.total_bytes)),
            ("free now", format_bytes(free)), ("capability", "{}.{}".format(*facts.capability) if facts.capability else "-"),
            ("cores", str(facts.cores)), ("torch", facts.torch), ("CUDA", facts.cuda or "-"),
            ("driver", facts.driver or "-"), ("allocator", facts.allocator),
            ("disk", f"{format_bytes(extra['disk_write_bytes_s'])}/s"),
            ("engines", ", ".join(e for e in ENGINES if not refusals[e])), ("precision", "fp32, TF32 off"),
            ("power", "battery: a run would be refused" if on_battery() else "mains, or no battery")]
    names = {"clock_mhz": ("clock", "{} MHz"), "temperature_c": ("temperature", "{} C"), "power_w": ("draws", "{:.0f} W"),
             "utilization": ("utilization", "{}%")}
    rows += [(label, text.format(readings[key])) for key, (label, text) in names.items() if key in readings]
    if "throttle" in readings:
        rows.append(("throttled", "yes" if readings["throttle"] & THROTTLED else "no"))
    for label, value in rows:
        out.say(f"{label:12} {value}")
    for engine in ENGINES:
        if refusals[engine]:
            out.say(f"no {engine}: {refusals[engine]}")
    out.say(f"kept in {store.folder / 'device.json'}")
    out.result(dataclasses.asdict(facts) | extra | {"free_bytes": free, "readings": readings, "refused_engines": refusals})


@cli.command(context_settings=HELP)
@click.option("--model", "models", required=True, metavar="M[,M]", help="Sizes, such as 150M or 10M,50M.")
@click.option("--batch", "batches", default="1,2,4,8,16,32", show_default=True, metavar="1,2,4",
              help="Sequences in a micro-step.")
@click.option("--length", "lengths", default="256,512,1024", show_default=True, metavar="256,512",
              help="Tokens in a sequence.")
@click.option("--accum", "accums", default="1", show_default=True, metavar="1,2",
              help="Micro-steps in a step; 2 stands for every number above 1.")
@click.option("--engine", "engines", default="eager", show_default=True, metavar="E", help="eager, graph or compile.")
@click.option("--recompute", "recomputes", default="none", show_default=True, metavar="R",
              help="none, elementwise or block.")
@click.option("--update", default="after", show_default=True, type=click.Choice(["after", "backward"]),
              help="Update parameters after the backward pass, or in it: no accumulation and no clip, less memory.")
@click.option("--vocab", default="32000", show_default=True, metavar="N", help="Entries of the vocabulary.")
@click.option("--limit", metavar="5GB", help="Larger cells are not run once one is above this.")
@click.option("--seconds", default=10.0, show_default=True, type=click.FloatRange(1, 3600), help="Time for each cell.")
@click.option("--every-cell", is_flag=True, help="Run the hopeless ones too.")
@click.option("--again", is_flag=True, help="Measure again what has been measured.")
@device_option
@results_option
@json_option
def grid(models, batches, lengths, accums, engines, recomputes, update, vocab, limit, seconds, every_cell, again, device,
         results, as_json) -> None:
    """Measure peak memory and tok/s over batch, length and model size.

    Each cell runs in a process of its own and is on disk before the next one starts; a grid that is started again
    measures only what is missing.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from probe.cell import grid as cells_of
    from probe.cell import shape
    from probe.cliff import default_limit
    from probe.grid import run
    from probe.plot import heat_map
    from trainer.config import VOCAB, OptimizerConfig, clip_for, refuse_update
    from trainer.device import refuse_engine
    from trainer.units import format_bytes, parse_bytes, parse_count, parse_ints

    out = Output(as_json)
    limit_bytes = given(limit, parse_bytes, "--limit")
    cells = cells_of(_names(models), parse_ints(batches, "--batch"), parse_ints(lengths, "--length"),
                     parse_ints(accums, "--accum"), _names(engines), _names(recomputes), parse_count(vocab, "--vocab"),
                     update)
    if not cells:
        raise click.UsageError("--model, --engine and --recompute each need a name")
    for cell in cells:  # what can't be is told before the device is asked
        shape(cell)
        if refusal := refuse_update(cell.step, OptimizerConfig(1e-5, clip=clip_for(cell.step))):
            raise UserError(f"--update backward: {refusal}")
    workers, facts, store, _ = _open(results, device)
    for engine in _names(engines):
        if refusal := refuse_engine(engine, facts.kind, facts.capability):
            raise UserError(refusal)
    out.say(f"{facts.name}, torch {facts.torch}: {len(cells)} cells, about {seconds:.0f} s each at most; "
            f"records in {store.records}")
    several = len({(c.accum, c.engine, c.recompute) for c in cells}) > 1
    out.say(f"{'model':>6} {'batch':>5} {'length':>6} {'tok/s':>9} {'step':>9} {'peak':>9}  verdict")
    console = out.console()
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                  console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("cells", total=len(cells))

        def show(cell, record, note) -> None:
            if record is None:
                words, tok_s, step, peak = f"not run: {note}", "", "", ""
            else:
                words = record.status + (f": {record.why}" if record.why else f" ({note})" if note else "")
                tok_s = f"{record.tok_s:,.0f}" if record.step_s else ""
                step = f"{record.median_step_s * 1000:,.1f} ms" if record.step_s else ""
                peak = format_bytes(record.peak_bytes) if record.peak_bytes else ""
            if several:
                words = f"{cell.engine}/{cell.recompute} x{cell.accum} {words}"
            progress.console.print(
                f"{cell.model:>6} {cell.batch:>5} {cell.length:>6} {tok_s:>9} {step:>9} {peak:>9}  {words}",
                markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)

        device_name = device or (facts.kind if facts.kind == "cpu" else f"{facts.kind}:0")
        measured = run(workers, cells, device_name, facts, store.records, seconds, limit_bytes, every_cell, again,
                       out.say, show)
    pictures = []
    limit_shown = limit_bytes or (default_limit(measured) or (None,))[0]
    for series in dict.fromkeys((c.model, c.accum, c.engine, c.recompute) for c in cells):
        of_series = [r for r in measured
                     if (r.cell.model, r.cell.accum, r.cell.engine, r.cell.recompute) == series]
        if of_series:
            model, accum, engine, recompute = series
            extra = [f"accum{accum}"] * (accum > 1) + [f"v{cells[0].vocab}"] * (cells[0].vocab != VOCAB)
            name = "-".join([model, engine, recompute, *extra, *["backward"] * (update == "backward")])
            pictures.append(store.folder / f"grid-{name}.png")
            heat_map(of_series, f"{facts.name}: {model}, {engine}, recompute {recompute}, accumulation {accum}",
                     limit_shown, pictures[-1])
    fitting = [r for r in measured if r.status == "fits"]
    best = max(fitting, key=lambda r: r.tok_s, default=None)
    if best:
        out.say(f"{len(fitting)} of {len(cells)} cells fit; the fastest is B={best.cell.batch} L={best.cell.length} with "
                f"{best.tok_s:,.0f} tok/s")
        out.say(f"pictures: {', '.join(str(p) for p in pictures)}")
    out.result({"device": facts.fingerprint, "records": str(store.records), "pictures": [str(p) for p in pictures],
                "cells": [r.to_json() | {"tok_s": r.tok_s} for r in measured]})
    if not best:
        raise NoPlan(f"none of {len(cells)} cells fits on {facts.name}; try a smaller --batch, --length or --model, or "
                     f"--recompute block")


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def main() -> None:
    guarded(cli, "probe")


if __name__ == "__main__":
    main()
