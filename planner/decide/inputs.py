"""What is on disk of one device: its records, and all that a plan takes from elsewhere than them."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from planner.decide import calibration, together
from planner.decide.calibration import Calibration, Past, calibrate
from planner.decide.hours import Rates
from probe import records, soak
from probe.cliff import Cliff
from probe.records import Record
from probe.soak import Soak
from probe.store import RATES, device_file
from spillcliff.errors import NoPlan, UserError
from spillcliff.hardware.fingerprints import choose, device_count, multi_device_name, single_device_name
from spillcliff.units import parse_count
from trainer.huggingface.config_json import model_name


@dataclass(frozen=True)
class Known:
    """device.json's content, the cliff, finished runs, and soaks, oldest first; the runs may be of other devices too.
    `assumed_for` is for how many devices together the records are assumed from one's; 0 if they were measured."""

    device: dict = field(default_factory=dict)
    cliff: Cliff | None = None
    past: tuple[Past, ...] = ()
    soaks: tuple[Soak, ...] = ()
    assumed_for: int = 0

    def calibration(self, record: Record) -> Calibration:
        """What past runs and soaks change about forecasts from `record`."""
        rates = Rates(**{name: self.device.get(name) for name in RATES})
        return calibrate(self.past, self.soaks, record.device, record.software.get("torch"), rates)

    def power_w(self, record: Record) -> float | None:
        """What the card draws when warm, or else drew at the end of the measurement; of several together, all of them."""
        wanted = replace(record.cell, accum=1)
        powers = [s.power_w for s in self.soaks if replace(s.cell, accum=1) == wanted and s.power_w]
        power = powers[-1] if powers else record.readings.get("power_w")
        return power * device_count(record.device) if isinstance(power, (int, float)) and power > 0 else None


def read(results: Path, files: tuple[Path, ...], device: str | None, say,
         gpus: int | None = None, sharded: bool = False) -> tuple[list[Record], Known]:
    """(the records of one device, oldest first, what else is known of it); UserError if there are none. Of `files`, or of
    the device's folder under `results`; `device` as in hardware.device.choose. With `gpus`, of so many of the device
    together, or where they were not measured so, assumed from one's; `sharded` ones must have been measured."""
    if files:
        found = records.of_devices(files, lambda names: _of_team(names, choose(names, device, True), gpus, sharded), say)
        name = found[0].device if found else ""
        around = [f.resolve().parent for f in files]
        folder = next((f for f in around if f.name == name), around[0].parent / name)
    else:
        folders = {p.parent.name: p for p in sorted(results.glob("*/records.jsonl"))}
        if not folders:
            raise UserError(f"no records in {results}/*/records.jsonl; `probe grid --model 150M` measures some")
        name = _of_team(list(folders), choose(list(folders), device, False), gpus, sharded)
        found, folder = [r for r in records.load(folders[name], say) if r.device == name], results / name
    if not found:
        raise UserError(f"no records in {', '.join(map(str, files)) or folder}; `probe grid --model 150M` measures some")
    soaks = soak.load(folder / "soak.jsonl", say) if (folder / "soak.jsonl").exists() else []
    is_assumed = gpus is not None and device_count(found[0].device) != gpus
    return together.assumed(found, gpus) if is_assumed else found, Known(
        device_file(folder / "device.json"), Cliff.load(folder / "cliff.json"),
        tuple(calibration.read(results / "runs", say)), tuple(soaks), gpus if is_assumed else 0)


def _of_team(names: list[str], chosen: str, gpus: int | None, sharded: bool) -> str:
    """The name of `gpus` of the `chosen` device together if it is among the names, else that of one; UserError if there is
    neither."""
    if gpus is None:
        return chosen
    one = single_device_name(chosen)
    team = multi_device_name(one, gpus, sharded)
    found = next((name for name in (team, one) if name in names and (name == team or not sharded)), None)
    if found is None:
        raise UserError(f"no records of {team}{'' if sharded else f', nor of {one}'}; there are {', '.join(names)}; probe "
                        f"grid --nproc {gpus}{' --sharded' * sharded} measures them")
    return found


def kinds(found: list[Record]) -> list[tuple[str, int]]:
    """The models that were measured, each with its vocabulary; NoPlan if there is none of ours."""
    ours = list(dict.fromkeys((r.cell.model, r.cell.vocab) for r in found if not r.cell.is_foreign))
    if not ours:
        raise NoPlan("all records are of somebody's own step (--step), which `train` can't run; `probe grid --model 150M` "
                     "measures ours")
    return ours


def of_model(found: list[Record], model: str | None, vocab: int | None) -> list[Record]:
    """The records of one model at one vocabulary; UserError lists what there is."""
    there = chosen = kinds(found)
    if model is not None:
        name = model_name(model)
        wanted = _count(name)
        chosen = [k for k in chosen if k[0] == name] or [k for k in chosen if wanted and _count(k[0]) == wanted]
    if vocab is not None:
        chosen = [k for k in chosen if k[1] == vocab]
    if not chosen:
        raise UserError(f"no records of that model; there are {_listed(there)}; `probe grid` measures others")
    if len(chosen) > 1:
        names = list(dict.fromkeys(name for name, _ in chosen))
        or_several = f"; or name several, as --model {','.join(names)}" if len(names) == len(chosen) else ""
        raise UserError(f"records of several models: choose one, of {_listed(chosen)}{or_several}")
    return [r for r in found if (r.cell.model, r.cell.vocab) == chosen[0]]


def _listed(found: list[tuple[str, int]]) -> str:
    return ", ".join(f"--model {model} --vocab {vocab}" for model, vocab in found)


def _count(name: str) -> int | None:
    try:
        return parse_count(name)
    except UserError:
        return None
