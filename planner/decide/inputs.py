"""What is on disk of one device: its records, and all that a plan takes from elsewhere than them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.decide import calibration
from planner.decide.calibration import Calibration, PastRun, calibrate
from planner.decide.hours import Rates
from planner.decide.scaling import scaled_records
from probe import records, soak
from probe.cliff import Cliff
from probe.records import Record
from probe.soak import Soak
from probe.store import RATES, DeviceFolder, measured_devices
from spillcliff.errors import NoPlan, UserError
from spillcliff.files import Say
from spillcliff.hardware.fingerprints import choose_device, device_count, multi_device_name, single_device_name
from spillcliff.schema import is_number
from spillcliff.units import parse_count
from trainer.huggingface.config_json import model_name
from trainer.run_folder import runs_folder


@dataclass(frozen=True)
class PlanInputs:
    """device.json's content, the cliff, finished runs, and soaks, oldest first; the runs may be of other devices too.
    `assumed_for` is for how many devices as one the records are assumed from one's; 0 if they were measured."""

    device: dict[str, Any] = field(default_factory=dict)
    cliff: Cliff | None = None
    past: tuple[PastRun, ...] = ()
    soaks: tuple[Soak, ...] = ()
    assumed_for: int = 0

    def calibration(self, record: Record) -> Calibration:
        """What past runs and soaks change about forecasts from `record`."""
        rates = Rates(**{name: self.device.get(name) for name in RATES})
        return calibrate(self.past, self.soaks, record.device, record.software.get("torch"), rates)

    def power_w(self, record: Record) -> float | None:
        """What the card draws when warm, or else drew while it was measured; of several together, all of them."""
        wanted = record.cell.with_step(accum=1)
        powers = [s.power_w for s in self.soaks if s.cell.with_step(accum=1) == wanted and s.power_w]
        power = powers[-1] if powers else record.power_w
        return power * device_count(record.device) if is_number(power, 1e-9) else None


def read_inputs(results: Path, files: tuple[Path, ...], device: str | None, say: Say, gpus: int | None = None,
                sharded: bool = False) -> tuple[list[Record], PlanInputs]:
    """(the records of one device, oldest first, what else is known of it); UserError if there are none. Of `files`, or of
    the device's folder under `results`; `device` as in fingerprints.choose_device. With `gpus`, of so many of the device
    as one, or where they were not measured so, assumed from one's; `sharded` ones must have been measured."""
    if files:
        chosen = records.of_device(
            files, lambda names: _multi_device(names, choose_device(names, device, True), gpus, sharded), say)
        name = chosen[0].device if chosen else ""
        folder = DeviceFolder(_folder_of(files, name))
    else:
        folders = measured_devices(results)
        name = _multi_device(list(folders), choose_device(list(folders), device, False), gpus, sharded)
        folder = folders[name]
        chosen = [r for r in records.load(folder.records, say) if r.device == name]
    if not chosen:
        raise UserError(f"no records in {', '.join(map(str, files)) or folder.path}; `probe grid --model 150M` measures "
                        f"some")
    chosen = _on_mains(chosen, say)
    inputs = PlanInputs(
        device=folder.load_device(), cliff=folder.load_cliff(), past=tuple(calibration.read(runs_folder(results), say)),
        soaks=tuple(soak.load(folder.soaks, say)) if folder.soaks.exists() else ())
    if gpus is None or device_count(name) == gpus:
        return chosen, inputs
    return scaled_records(chosen, gpus), replace(inputs, assumed_for=gpus)


def _on_mains(measured: list[Record], say: Say) -> list[Record]:
    """Without the records that were made on battery, at about half the speed; where there are no others all of them, which
    `say` tells."""
    mains = [r for r in measured if not r.on_battery]
    if len(mains) == len(measured):
        return measured
    if mains:
        say(f"left out: {len(measured) - len(mains)} records made on battery; measure them again on mains with probe grid")
        return mains
    say("note: all records were made on battery, and the forecast is of that: plug the machine in and measure again")
    return measured


def _folder_of(files: tuple[Path, ...], name: str) -> Path:
    """Where the device called `name` has its other files, for records that were named."""
    around = [f.resolve().parent for f in files]
    return next((folder for folder in around if folder.name == name), around[0].parent / name)


def _multi_device(names: list[str], chosen: str, gpus: int | None, sharded: bool) -> str:
    """The name of `gpus` of the `chosen` device as one if it is among the names, else that of one; UserError if there is
    neither."""
    if gpus is None:
        return chosen
    one = single_device_name(chosen)
    several = multi_device_name(one, gpus, sharded)
    if several in names:
        return several
    if one in names and not sharded:
        return one
    raise UserError(f"no records of {several}{'' if sharded else f', nor of {one}'}; there are {', '.join(names)}; probe "
                    f"grid --nproc {gpus}{' --sharded' * sharded} measures them")


def models_in(measured: list[Record]) -> list[tuple[str, int]]:
    """The models that were measured, each with its vocabulary; NoPlan if there is none of ours."""
    ours = list(dict.fromkeys((r.cell.model, r.cell.vocab) for r in measured if not r.cell.is_custom))
    if not ours:
        raise NoPlan("all records are of somebody's own step (--step), which `train` can't run; `probe grid --model 150M` "
                     "measures ours")
    return ours


def of_model(measured: list[Record], model: str | None, vocab: int | None) -> list[Record]:
    """The records of one model at one vocabulary; UserError lists what there is."""
    every = models = models_in(measured)
    if model is not None:
        name = model_name(model)
        count = _count(name)
        models = [m for m in models if m[0] == name] or [m for m in models if count and _count(m[0]) == count]
    if vocab is not None:
        models = [m for m in models if m[1] == vocab]
    if not models:
        raise UserError(f"no records of that model; there are {_listed(every)}; `probe grid` measures others")
    if len(models) > 1:
        names = list(dict.fromkeys(name for name, _ in models))
        or_several = f"; or name several, as --model {','.join(names)}" if len(names) == len(models) else ""
        raise UserError(f"records of several models: choose one, of {_listed(models)}{or_several}")
    return [r for r in measured if (r.cell.model, r.cell.vocab) == models[0]]


def _listed(models: list[tuple[str, int]]) -> str:
    return ", ".join(f"--model {model} --vocab {vocab}" for model, vocab in models)


def _count(name: str) -> int | None:
    try:
        return parse_count(name)
    except UserError:
        return None
