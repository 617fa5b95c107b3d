"""The command `probe`."""

import contextlib
import dataclasses
from pathlib import Path

import click

from trainer.cli import HELP, Output, device_option, given, guarded, json_option, print_rows
from trainer.errors import NoPlan, UserError

results_option = click.option("--results", default="results", show_default=True, type=click.Path(path_type=Path),
                              metavar="DIR", help="Where records are kept.")

MAPS = 12
"""More series than this are shown a line each: a page holds no more maps."""


@click.group(context_settings=HELP)
def cli() -> None:
    """Measure what fits on this device, and how fast, with the very step that trains."""


@contextlib.contextmanager
def _device(results: Path, device: str | None):
    """(workers, facts, store, extra) of a device, its folder made."""
    from probe.grid import look
    from probe.store import Store
    from probe.worker import Workers

    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--results {results}: {e.strerror or e}; name a folder that can be written") from None
    with Workers() as workers:
        facts, extra = look(workers, device, results)
        yield workers, facts, Store(results, facts, extra), extra


def _name(device: str | None, facts) -> str:
    return device or (facts.kind if facts.kind == "cpu" else f"{facts.kind}:0")


@cli.command(context_settings=HELP)
@device_option
@results_option
@json_option
def card(device, results, as_json) -> None:
    """Show what the device is, what it can run, and what it shows now."""
    from trainer import nvml
    from trainer.config import ENGINES
    from trainer.device import THROTTLED, on_battery, refuse_engine
    from trainer.units import format_bytes

    out = Output(as_json)
    with _device(results, device) as (_, facts, store, extra):
        pass
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
@device_option
@results_option
@json_option
def cliff(device, results, as_json) -> None:
    """Find where this card's memory stops being fast, by taking it block by block.

    No model is needed. Everything else that runs now counts, and all memory is given back at the end.
    """
    from probe.grid import find_cliff
    from probe.store import alone

    out = Output(as_json)
    with _device(results, device) as (workers, facts, store, _), alone(facts):
        found = find_cliff(workers, _name(device, facts), facts)
    found.save(store.cliff_file)
    _say_cliff(out, found)
    out.say(f"kept in {store.cliff_file}")
    out.result(dataclasses.asdict(found) | {"device_bytes": found.device_bytes})


def _say_cliff(out: Output, cliff) -> None:
    from trainer.units import format_bytes

    size, fast = format_bytes(cliff.device_bytes), f"{cliff.fast_bytes_s / 1e9:,.0f}"
    out.say({"collapse": f"cliff: {size} with its context; past it {fast} GB/s fell to "
                         f"{(cliff.slow_bytes_s or 0) / 1e9:,.1f}, without an error",
             "failure": f"cliff: {size} with its context; past it memory can't be had ({fast} GB/s)",
             "reserve": f"no cliff up to {size} with its context ({fast} GB/s); the rest was left alone"}[cliff.kind])


@cli.command(context_settings=HELP)
@click.option("--model", "models", metavar="M[,M]", help="Sizes, such as 150M or 10M,50M.")
@click.option("--step", metavar="MODULE:FUNCTION", help="Instead of --model: your own training step (see the README).")
@click.option("--batch", "batches", default="1,2,3,4,6,8,12,16,24,32", show_default=True, metavar="1,2,4",
              help="Sequences in a micro-step.")
@click.option("--length", "lengths", default="256,512,1024", show_default=True, metavar="256,512",
              help="Tokens in a sequence.")
@click.option("--accum", "accums", metavar="1,2", help="Micro-steps in a step; 2 stands for every number above 1.  "
                                                       "[default: 1, and 2 for what may be picked]")
@click.option("--engine", "engines", default="eager", show_default=True, metavar="E", help="eager, graph or compile.")
@click.option("--recompute", "recomputes", default="none", show_default=True, metavar="R",
              help="none, elementwise or block.")
@click.option("--update", default="after", show_default=True, type=click.Choice(["after", "backward"]),
              help="Update parameters after the backward pass, or in it: no accumulation and no clip, less memory.")
@click.option("--vocab", default="32000", show_default=True, metavar="N", help="Entries of the vocabulary.")
@click.option("--limit", metavar="5GB", help="Memory that may be used.  [default: 97% of the cliff]")
@click.option("--seconds", default=10.0, show_default=True, type=click.FloatRange(1, 3600), help="Time for each cell.")
@click.option("--every-cell", is_flag=True, help="Measure all cells, not only what the pick needs.")
@click.option("--again", is_flag=True, help="Measure again what has been measured.")
@device_option
@results_option
@json_option
def grid(models, step, batches, lengths, accums, engines, recomputes, update, vocab, limit, seconds, every_cell, again,
         device, results, as_json) -> None:
    """Measure peak memory and tok/s over batch, length and model size, and find the fastest cell that fits.

    Few cells are measured: those that the pick needs, and its neighbours. Each runs in a process of its own and is on disk
    before the next one starts; a grid that is started again measures only what is missing.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from probe import search, table
    from probe.cell import Cell, shape
    from probe.cell import grid as cells_of
    from probe.cliff import default_limit
    from probe.grid import Bench, ask, find_cliff
    from probe.store import alone
    from trainer.config import OptimizerConfig, clip_for, refuse_update
    from trainer.device import refuse_engine
    from trainer.units import format_bytes, parse_bytes, parse_count, parse_ints

    if (models is None) == (step is None):
        raise click.UsageError("a grid needs either --model (sizes, such as 150M) or --step package.module:make_step")
    out = Output(as_json)
    asked = given(limit, parse_bytes, "--limit")
    cells = cells_of(_names(models or step), parse_ints(batches, "--batch"), parse_ints(lengths, "--length"),
                     given(accums, parse_ints, "--accum") or (1,), _names(engines), _names(recomputes),
                     parse_count(vocab, "--vocab"), update)
    if not cells:
        raise click.UsageError("--model, --engine and --recompute each need a name")
    for cell in cells:  # what can't be is told before the device is asked
        if shape(cell) is None and (step is None or cell.step != Cell(cell.model, cell.batch, cell.length).step):
            raise UserError("--model takes sizes, such as 150M" if step is None else
                            "--step has its own engine, recomputation, accumulation and update: leave those options out")
        if refusal := refuse_update(cell.step, OptimizerConfig(1e-5, clip=clip_for(cell.step))):
            raise UserError(f"--update backward: {refusal}")
    with _device(results, device) as (workers, facts, store, _), alone(facts):
        for engine in _names(engines):
            if refusal := refuse_engine(engine, facts.kind, facts.capability):
                raise UserError(refusal)
        if step:
            ask(workers, "probe.anystep:check", (step,))
        out.say(f"{facts.name}, torch {facts.torch}: {len(cells)} cells, about {seconds:.0f} s each at most; "
                f"records in {store.records}")
        known = store.cliff()
        if known is None and asked is None and facts.kind == "cuda":
            known = find_cliff(workers, _name(device, facts), facts)
            known.save(store.cliff_file)
            _say_cliff(out, known)
        limit_bytes, source = (asked, "as asked") if asked else default_limit((), known) or (None, "")
        if limit_bytes:
            out.say(f"limit {format_bytes(limit_bytes)}: {source}")
        bench = Bench(workers, _name(device, facts), facts, store.records, known, seconds, limit_bytes, out.say)
        out.say(table.ROW_HEAD)
        console = out.console()
        with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                      console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("cells", total=len(cells))

            def show(cell, record, note) -> None:
                progress.console.print(table.row(cell, record, note), markup=False, highlight=False, soft_wrap=True)
                progress.advance(task)

            measured = bench.run(cells, every_cell, again, show)
            if accums is None and update == "after" and not step:
                twins = [dataclasses.replace(r.cell, accum=2) for r in search.picks(measured, limit_bytes)]
                measured += bench.run(twins, True, again, show)
    pictures = _draw(measured, facts.name, limit_bytes, known, store.folder)
    pick = search.best(measured, limit_bytes)
    if pick:
        fitting = sum(r.status == "fits" for r in measured)
        out.say(f"pick: B={pick.cell.batch} L={pick.cell.length} with {pick.tok_s:,.0f} tok/s at "
                f"{format_bytes(pick.peak_bytes)}; {fitting} of the {len(measured)} cells measured fit")
        out.say(f"pictures: {', '.join(str(p) for p in pictures)}")
    out.result({"device": facts.fingerprint, "records": str(store.records), "pictures": [str(p) for p in pictures],
                "limit_bytes": limit_bytes, "pick": pick and pick.to_json()["cell"],
                "cells": [r.to_json() | {"tok_s": r.tok_s} for r in measured]})
    if not pick:
        over = f" under {format_bytes(limit_bytes)}" if limit_bytes else ""
        raise NoPlan(f"none of {len(measured)} measured cells fits on {facts.name}{over}; try a smaller --batch, --length "
                     f"or --model, or --recompute block")


@cli.command(context_settings=HELP)
@click.option("--model", metavar="M", help="Only this size, or this step.")
@click.option("--device", metavar="NAME", help="A folder under results/.  [default: this machine's, else the only one]")
@click.option("--limit", metavar="5GB", help="Mark what is above it.  [default: 97% of the cliff]")
@results_option
@json_option
def show(model, device, limit, results, as_json) -> None:
    """Show what has been measured: tok/s and peak over batch and length, and the cliff as a line."""
    from probe import table

    out = Output(as_json)
    name, records, cliff_found, limit_bytes = _measured(results, device, model, limit, out)
    series = table.series_of(records)
    console = out.console()
    out.say(f"{name}: {len(records)} cells")
    if cliff_found:
        _say_cliff(out, cliff_found)
    if len(series) > MAPS and model is None:
        print_rows(out, table.SUMMARY_HEAD, table.summary(records))
        out.say("--model M shows the maps of one model")
    else:
        for of_series in series.values():
            out.say()
            for line in table.lines(of_series, limit_bytes, cliff_found and cliff_found.device_bytes, console.width):
                out.say(line)
    out.result({"device": name, "limit_bytes": limit_bytes, "cliff": cliff_found and dataclasses.asdict(cliff_found),
                "records": [r.to_json() | {"tok_s": r.tok_s} for r in records]})


@cli.command(context_settings=HELP)
@click.option("--model", metavar="M", help="Only this size, or this step.")
@click.option("--device", metavar="NAME", help="A folder under results/.  [default: this machine's, else the only one]")
@click.option("--limit", metavar="5GB", help="Mark what is above it.  [default: 97% of the cliff]")
@results_option
@json_option
def plot(model, device, limit, results, as_json) -> None:
    """Draw what `probe show` shows, a PNG for each map, beside the records."""
    out = Output(as_json)
    name, records, cliff_found, limit_bytes = _measured(results, device, model, limit, out)
    pictures = _draw(records, name, limit_bytes, cliff_found, results / name)
    out.say("\n".join(str(p) for p in pictures))
    out.result({"device": name, "pictures": [str(p) for p in pictures]})


def _measured(results: Path, device: str | None, model: str | None, limit: str | None, out: Output):
    """(device, newest records of its cells, cliff, limit in bytes) of what is on disk."""
    from probe.cliff import Cliff, default_limit
    from probe.records import latest, load
    from trainer.device import choose
    from trainer.units import parse_bytes

    asked = given(limit, parse_bytes, "--limit")
    names = sorted(p.parent.name for p in results.glob("*/records.jsonl"))
    if not names:
        raise UserError(f"no records in {results}/*/records.jsonl; `probe grid --model 150M` measures some")
    name = choose(names, device, True)
    records = list(latest(load(results / name / "records.jsonl", out.say)).values())
    records = [r for r in records if model in (None, r.cell.model)]
    if not records:
        raise UserError(f"--model {model}: {name} has no record of it; `probe show` lists what there is")
    found = Cliff.load(results / name / "cliff.json")
    return name, records, found, asked or (default_limit(records, found) or (None,))[0]


def _draw(records: list, name: str, limit_bytes: int | None, cliff_found, folder: Path) -> list[Path]:
    """A picture of each series' maps."""
    from probe.plot import heat_map
    from probe.table import series_of

    pictures = []
    for series, of_series in series_of(records).items():
        pictures.append(folder / f"grid-{series.file_name}.png")
        heat_map(of_series, f"{name}: {series.title}", limit_bytes, pictures[-1], cliff_found and cliff_found.device_bytes)
    return pictures


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def main() -> None:
    guarded(cli, "probe")


if __name__ == "__main__":
    main()
