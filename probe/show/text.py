"""What the prober's commands say, as text and rows: pure but for the files that are read."""

import dataclasses
from pathlib import Path

from probe.cell import Cell
from probe.cliff import Cliff, default_limit
from probe.estimate.peak import CardMemory, Estimate
from probe.records import Record, latest, load
from probe.store import device_file
from spillcliff.errors import UserError
from spillcliff.hardware.device import THROTTLED, DeviceFacts
from spillcliff.hardware.fingerprints import choose
from spillcliff.units import format_bytes
from trainer.config import ENGINES
from trainer.huggingface.config_json import model_name


@dataclasses.dataclass(frozen=True)
class Measured:
    """What is on disk of one device: the newest record of each cell, its cliff, and the limit in bytes."""

    device: str
    records: list[Record]
    cliff: Cliff | None
    limit_bytes: int | None

    @classmethod
    def read(cls, results: Path, device: str | None, model: str | None, limit_bytes: int | None, say) -> "Measured":
        """`device` as in hardware.device.choose, records of `model` alone if given; UserError if there are none."""
        names = sorted(p.parent.name for p in results.glob("*/records.jsonl"))
        if not names:
            raise UserError(f"no records in {results}/*/records.jsonl; `probe grid --model 150M` measures some")
        name = choose(names, device, True)
        records = list(latest(load(results / name / "records.jsonl", say)).values())
        wanted = model and model_name(model)
        records = [r for r in records if model is None or r.cell.model == wanted]
        if not records:
            raise UserError(f"--model {model}: {name} has no record of it; `probe show` lists what there is")
        cliff = Cliff.load(results / name / "cliff.json")
        return cls(name, records, cliff, limit_bytes or (default_limit(records, cliff) or (None,))[0])

    def error_line(self) -> str | None:
        """How far the predicted peaks were off, of cells that fit; None where none was predicted."""
        errors = sorted(abs(r.predicted_bytes / r.peak_bytes - 1) for r in self.records
                        if r.status == "fits" and r.predicted_bytes and r.peak_bytes)
        return errors and (f"peaks predicted for {len(errors)} cells: off by {errors[len(errors) // 2]:.1%} in the median, "
                           f"{errors[-1]:.1%} at most") or None


def draw(records: list[Record], name: str, limit_bytes: int | None, cliff: Cliff | None, folder: Path) -> list[Path]:
    """A picture of each series' maps; UserError if one can't be written."""
    from probe.show.heatmap import series_of
    from probe.show.heatmap_png import heat_map

    pictures = []
    for series, of_series in series_of(records).items():
        pictures.append(folder / f"grid-{series.file_name}.png")
        heat_map(of_series, f"{name}: {series.title}", limit_bytes, pictures[-1], cliff and cliff.device_bytes)
    return pictures


def cliff_line(cliff: Cliff) -> str:
    size, fast = format_bytes(cliff.device_bytes), f"{cliff.fast_bytes_s / 1e9:,.0f}"
    return {"collapse": f"cliff: {size} with its context; past it {fast} GB/s fell to "
                        f"{(cliff.slow_bytes_s or 0) / 1e9:,.1f}, without an error",
            "failure": f"cliff: {size} with its context; past it memory can't be had ({fast} GB/s)",
            "reserve": f"no cliff up to {size} with its context ({fast} GB/s); the rest was left alone"}[cliff.kind]


def card_rows(facts: DeviceFacts, free_bytes: int | None, disk_bytes_s: float | None, refusals: dict[str, str | None],
              readings: dict, memory: dict, is_on_battery: bool) -> list[tuple[str, str]]:
    """(what, value) of a device: facts, engines, what it takes beside a step's tensors, what it shows now."""
    rows = [("name", facts.name), ("memory", format_bytes(facts.total_bytes)), ("free now", format_bytes(free_bytes)),
            ("capability", "{}.{}".format(*facts.capability) if facts.capability else "-"), ("cores", str(facts.cores)),
            ("torch", facts.torch), ("CUDA", facts.cuda or "-"), ("driver", facts.driver or "-"),
            ("allocator", facts.allocator), ("disk", f"{format_bytes(disk_bytes_s)}/s"),
            ("engines", ", ".join(e for e in ENGINES if not refusals[e])), ("precision", "fp32, TF32 off"),
            ("power", "battery: a run would be refused" if is_on_battery else "mains, or no battery")]
    names = {"context_bytes": "context", "graph_bytes": "graphs", "process_bytes": "process"}
    rows += [(label, f"{format_bytes(memory[key])} beside the tensors") for key, label in names.items() if key in memory]
    names = {"clock_mhz": ("clock", "{} MHz"), "temperature_c": ("temperature", "{} C"), "power_w": ("draws", "{:.0f} W"),
             "utilization": ("utilization", "{}%")}
    rows += [(label, text.format(readings[key])) for key, (label, text) in names.items() if key in readings]
    if "throttle" in readings:
        rows.append(("throttled", "yes" if readings["throttle"] & THROTTLED else "no"))
    return rows


def memory_of(results: Path, device: str | None) -> tuple[CardMemory, str]:
    """(what a device takes beside a step's tensors, its name) of one that was looked at before; an H200's where there is
    none."""
    names = sorted(p.parent.name for p in results.glob("*/device.json"))
    if not names and device is None:
        return CardMemory(), "an H200's context"
    name = choose(names, device, True)
    return CardMemory.of(device_file(results / name / "device.json")), name


def estimate_lines(cell: Cell, found: Estimate, about: str) -> list[str]:
    """One cell's peak, part by part."""
    return [f"{cell.model} B={cell.batch} L={cell.length} {cell.engine}/{cell.recompute} x{cell.accum} on {about}",
            *(f"  {name:12} {format_bytes(size):>10}" for name, size in found.parts.items()),
            f"peak {format_bytes(found.device_bytes)}, most in: {found.moment}; allocated "
            f"{format_bytes(found.allocated_bytes)}, reserved {format_bytes(found.reserved_bytes)}"]


ESTIMATE_HEAD = ("cell", "allocated", "reserved", "whole claim", "most in")


def estimate_rows(found: dict[Cell, Estimate]) -> list[tuple[str, ...]]:
    return [(f"{c.model} B={c.batch} L={c.length} {c.engine}/{c.recompute} x{c.accum}", format_bytes(e.allocated_bytes),
             format_bytes(e.reserved_bytes), format_bytes(e.device_bytes), e.moment) for c, e in found.items()]
