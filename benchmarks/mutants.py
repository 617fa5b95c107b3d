"""Small changes of logic in the deciding files, and whether a test notices: `python3 -m benchmarks.mutants [PART...]`.

Each is made in a copy of the checkout, and the tests of that file are run there until one fails. A mutant that survives is a
decision that no test pins: it is named, and the exit code is 1. Of PART, a part of a file's name, those of such files alone.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LONGEST_S = 900
"""A mutant that makes its tests hang is noticed too."""

TESTS = {
    "spillcliff/hardware/energy.py": ["test_probe/test_power.py"],
    "probe/grid/bench.py": ["test_probe/test_power.py"],
    "planner/decide/inputs.py": ["test_probe/test_power.py"],
    "spillcliff/hardware/host_memory.py": ["test_spillcliff/test_host_memory.py"],
    "spillcliff/hardware/visible.py": ["test_spillcliff/test_visible.py"],
    "spillcliff/hardware/software.py": ["test_spillcliff/test_software.py"],
    "probe/verdict.py": ["test_probe/test_verdict.py"],
    "probe/cliff.py": ["test_probe/test_verdict.py", "test_planner/test_choose.py", "test_probe/test_search.py"],
    "probe/stats.py": ["test_probe/test_stats.py"],
    "probe/soak.py": ["test_planner/test_calibration.py", "test_probe/test_soak.py"],
    "probe/records.py": ["test_probe/test_records.py", "test_probe/test_power.py"],
    "probe/grid/search.py": ["test_probe/test_search.py"],
    "probe/estimate/allocator.py": ["test_probe/test_allocator.py", "test_probe/test_estimate.py"],
    "planner/decide/choose.py": ["test_planner/test_choose.py"],
    "planner/decide/hours.py": ["test_planner/test_hours.py", "test_planner/test_build.py"],
    "planner/decide/costmodel.py": ["test_planner/test_costmodel.py"],
    "planner/decide/build.py": ["test_planner/test_build.py", "test_planner/test_report.py"],
    "planner/decide/calibration.py": ["test_planner/test_calibration.py"],
    "planner/decide/scaling.py": ["test_planner/test_scaling.py", "test_probe/test_power.py"],
    "planner/decide/defaults.py": ["test_planner/test_build.py"],
    "trainer/plan.py": ["test_trainer/test_plan.py", "test_planner/test_build.py", "test_trainer/test_tokens.py"],
    "trainer/config.py": ["test_trainer/test_config.py"],
    "trainer/run/receipt.py": ["test_trainer/test_trainer_cases.py"],
    "trainer/run/validation.py": ["test_trainer/test_trainer_cases.py"],
    "trainer/run/divergence.py": ["test_trainer/test_ways_on.py"],
    "trainer/run/commands.py": ["test_trainer/test_ways_on.py"],
    "trainer/run_folder.py": ["test_trainer/test_checkpoint.py"],
    "trainer/run/saver.py": ["test_trainer/test_checkpoint.py"],
    "trainer/checkpoint.py": ["test_trainer/test_checkpoint.py", "test_trainer/test_disks.py"],
    "trainer/run/slowdown.py": ["test_trainer/test_trouble.py", "test_probe/test_verdict.py"],
    "trainer/run/preflight.py": ["test_trainer/test_preflight.py"]}
"""The tests of each file, under tests/, run in this order."""


class Mutant(NamedTuple):
    """`old`, which stands once in `file`, becomes `new`."""

    file: str
    old: str
    new: str


MUTANTS = [Mutant(*m) for m in (
    ("spillcliff/hardware/energy.py", "seconds < LEAST_S", "seconds <= LEAST_S"),
    ("spillcliff/hardware/energy.py", "and after_j > before_j", ""),
    ("probe/grid/bench.py", "and r.on_battery == is_on_battery", ""),
    ("probe/grid/bench.py", "and (is_on_battery or not r.on_battery)", ""),
    ("planner/decide/inputs.py", "return mains\n", "return measured\n"),
    ("spillcliff/hardware/host_memory.py", "level.used_bytes + level.cache_bytes", "level.used_bytes"),
    ("spillcliff/hardware/host_memory.py", "max(0, min(free, total))", "min(free, total)"),
    ("spillcliff/hardware/host_memory.py", "max(0, min(free, total))", "max(0, free)"),
    ("spillcliff/hardware/host_memory.py", '("memory.max", "memory.high")', '("memory.max",)'),
    ("spillcliff/hardware/host_memory.py", 'range(len(parts), -1, -1)', 'range(len(parts), len(parts) - 1, -1)'),
    ("spillcliff/hardware/host_memory.py", "if inner.is_relative_to(mount_root) else ()", "if True else ()"),
    ("spillcliff/hardware/host_memory.py", '"total_inactive_file"', '"inactive_file"'),
    ("spillcliff/hardware/host_memory.py", '_stat(folder / "memory.stat").get("hierarchical_memory_limit")', "None"),
    ("spillcliff/hardware/host_memory.py", "min(limits) <= 0", "False"),
    ("spillcliff/hardware/host_memory.py", "if file not in libraries", ""),
    ("spillcliff/hardware/host_memory.py", '("/dev/", "/memfd:", "/SYSV")', '("/memfd:", "/SYSV")'),
    ("spillcliff/hardware/visible.py", "if order == \"PCI_BUS_ID\" or", "if"),
    ("spillcliff/hardware/visible.py", "FASTER = 1.25", "FASTER = 1.0"),
    ("spillcliff/hardware/visible.py", "speeds[slower] <= 0 or ", ""),
    ("spillcliff/hardware/visible.py", "reverse=True", "reverse=False"),
    ("spillcliff/hardware/visible.py", "if found is None:", "if found is None and chosen:"),
    ("spillcliff/hardware/visible.py", "if found in chosen:", "if False:"),
    ("spillcliff/hardware/visible.py", "return found[0] if len(found) == 1 else None", "return found[0] if found else None"),
    ("spillcliff/hardware/visible.py", "if len(card.instances) == 1 else \"\"", "if card.instances else \"\""),
    ("spillcliff/hardware/visible.py", "if card is None or card.instances is None:", "if True:"),
    ("spillcliff/hardware/visible.py", "        devices = devices[:1]\n", "        pass\n"),
    ("spillcliff/hardware/software.py", "not local or not other_local or local == other_local", "True"),
    ("spillcliff/hardware/software.py", "not local or not other_local or local == other_local", "local == other_local"),
    ("probe/verdict.py",
     'if spilled:\n            return Verdict(Status.SPILLS, spilled)\n        return Verdict(Status.TIMEOUT',
     'if False:\n            return Verdict(Status.SPILLS, spilled)\n        return Verdict(Status.TIMEOUT'),
    ("probe/verdict.py", "not in (Status.CRASHED, Status.TIMEOUT)", "not in (Status.CRASHED,)"),
    ("probe/verdict.py", "not in (Status.CRASHED, Status.TIMEOUT)", "not in (Status.TIMEOUT,)"),
    ("probe/cliff.py", "cell.step.tokens / measured.median_step_s", "cell.step.tokens / min(measured.step_s)"),
    ("probe/cliff.py", "GROWS = 1.3", "GROWS = 1.0"),
    ("probe/cliff.py", "if ranks[0] > ranks[1]:", "if False:"),
    ("probe/verdict.py", "min(after) > JUMP * before", "min(after) > 8 * JUMP * before"),
    ("probe/verdict.py", "claim > card.total_bytes", "claim > 2 * card.total_bytes"),
    ("probe/grid/search.py", "EARLY_SHARE = 0.1", "EARLY_SHARE = 0.01"),
    ("trainer/run/slowdown.py", "CLOCK_DOUBT / clock_share", "CLOCK_DOUBT"),
    ("trainer/run/slowdown.py", "throttle_bits & HEAT_BITS else FALL", "throttle_bits else FALL"),
    ("probe/verdict.py", "abs(grown) >= OTHERS_GREW_BYTES", "grown >= OTHERS_GREW_BYTES"),
    ("probe/verdict.py", "if failed and total_bytes", "if total_bytes"),
    ("probe/verdict.py", "and moved > MOVED_BYTES", "and moved > MOVED_BYTES * 8"),
    ("probe/cliff.py", "bound_bytes and size > bound_bytes", "bound_bytes and size >= bound_bytes * 0.98"),
    ("probe/verdict.py", "0 if steps else FIRST_S", "0 if True else FIRST_S"),
    ("probe/verdict.py", "max(QUIET_S, slow_s)", "QUIET_S"),
    ("probe/verdict.py", "cell.step.tokens * FALL / demand.tok_s", "cell.step.tokens / demand.tok_s"),
    ("probe/cliff.py", "max(0, (free_bytes or 0) - cliff.free_at_start_bytes)", "0"),
    ("probe/cliff.py", 'self.kind != "collapse" and ', ""),
    ("probe/cliff.py", "clock_share) >= demand.tok_s", "clock_share) >= 2 * demand.tok_s"),
    ("probe/cliff.py", "int(min(free) * MARGIN)", "int(max(free) * MARGIN)"),
    ("probe/cliff.py", "return max(1.0, cost[0] / cost[1])", "return 1.0"),
    ("probe/stats.py", "2 * tail <= 0.05", "tail <= 0.05"),
    ("probe/stats.py", "values[-6:-3]", "values[:-3]"),
    ("probe/soak.py", "settled_s / self.first_s", "first_s / self.settled_s"),
    ("probe/records.py", "sorted(lines)", "lines"),
    ("probe/records.py", "is_long and schema", "schema"),
    ("probe/records.py", "if name not in usual or own != usual[name]", "if True"),
    ("probe/grid/search.py", "(1 + NEAR) *", "(1 + 10 * NEAR) *"),
    ("probe/grid/search.py", ">= TRIES", ">= TRIES + 2"),
    ("probe/grid/search.py", "OPTIMISM = 1.35", "OPTIMISM = 0.2"),
    ("probe/estimate/allocator.py", "if self.reserved > self.reserved_peak:\n                self",
     "if True:\n                self"),
    ("probe/estimate/allocator.py", "left >= MIN_BLOCK if is_small else left > SMALL", "left >= MIN_BLOCK"),
    ("probe/estimate/allocator.py", "if size < MIN_LARGE else", "if size <= 2 * MIN_LARGE else"),
    ("planner/decide/choose.py", "TOLERANCE = 0.2", "TOLERANCE = 0.5"),
    ("planner/decide/choose.py", "SHORT = 0.8", "SHORT = 0.3"),
    ("planner/decide/choose.py", "max(1, round(tokens_wanted / r.cell.step.micro_tokens))",
     "max(1, math.ceil(tokens_wanted / r.cell.step.micro_tokens))"),
    ("planner/decide/choose.py", "if leanest is not pick and leanest not in others:", "if False:"),
    ("planner/decide/choose.py", "NEAR = 0.02", "NEAR = 0.04"),
    ("planner/decide/choose.py", "(1 - LONG) * fastest.tok_s", "(1 - 4 * LONG) * fastest.tok_s"),
    ("planner/decide/choose.py", "longest = max(", "longest = min("),
    ("planner/decide/choose.py", "> limit_bytes:", "> 1.2 * limit_bytes:"),
    ("planner/decide/choose.py", "candidate.stretch() < before.stretch()", "candidate.stretch() > before.stretch()"),
    ("planner/decide/choose.py", "self.median_step_s - measured * self.record.micro_s", "0.0"),
    ("planner/decide/choose.py", "saves_bytes=pick.peak_bytes - c.peak_bytes", "saves_bytes=c.peak_bytes - pick.peak_bytes"),
    ("planner/decide/choose.py", "and can_spill(record) and", "and"),
    ("planner/decide/hours.py", "for part in (0.1, 0.9)", "for part in (0.0, 1.0)"),
    ("planner/decide/hours.py", "mid - math.hypot(steps * (step_s.mid - step_s.low), wide_s)",
     "mid - (steps * (step_s.mid - step_s.low) + wide_s)"),
    ("planner/decide/hours.py", "mid + math.hypot(steps * (step_s.high - step_s.mid), wide_s)",
     "mid + (steps * (step_s.high - step_s.mid) + wide_s)"),
    ("planner/decide/hours.py", "math.hypot(below, BAND_SD * sd)", "below + BAND_SD * sd"),
    ("planner/decide/hours.py", "r.setup_s - candidate.median_step_s", "r.setup_s"),
    ("planner/decide/hours.py", "_checkpoints(evaluations - 1,", "_checkpoints(evaluations,"),
    ("planner/decide/hours.py", "round(900 / step_s)", "round(1800 / step_s)"),
    ("planner/decide/hours.py", "PEAK_SD = 0.006", "PEAK_SD = 0.0012"),
    ("planner/decide/costmodel.py", "wide * (peaks.spread()[i] + BEYOND * beyond)",
     "wide / 5 * (peaks.spread()[i] + BEYOND * beyond)"),
    ("planner/decide/costmodel.py", "max(0.0, math.log2(value / max(measured)), math.log2(min(measured) / value))",
     "max(0.0, math.log2(value / max(measured)))"),
    ("planner/decide/costmodel.py", "sd = self.scale * (", "sd = 1 * ("),
    ("planner/decide/costmodel.py", "DOUBT * DOUBTED + sum(z * z for z in misses)", "DOUBT + len(misses)"),
    ("planner/decide/costmodel.py", "failed.within(cell)", "failed == cell"),
    ("planner/decide/build.py", "spare_s = hours * 3600 - overheads.total_s", "spare_s = hours * 3600"),
    ("planner/decide/build.py", "1 / calibration.tok_s", "calibration.tok_s"),
    ("planner/decide/calibration.py", "prior / BIAS_SD**2 + sum(logs)", "sum(logs)"),
    ("planner/decide/calibration.py", "and not s.on_battery", ""),
    ("planner/decide/calibration.py", "same_version(torch, software.get(\"torch\"))", "torch == software.get(\"torch\")"),
    ("planner/decide/calibration.py", "[s for s in soaks if s.settled] or soaks", "soaks"),
    ("planner/decide/calibration.py", "RUN_WEIGHT + len(logs) - 1", "RUN_WEIGHT + len(logs) + 20"),
    ("planner/decide/calibration.py", "sd=math.sqrt(1 / precision + run_sd**2)", "sd=run_sd"),
    ("planner/decide/scaling.py", "r.power_w * sum(step_s)", "r.power_w * sum(r.step_s)"),
    ("planner/decide/scaling.py", "2 * (count - 1) / count", "(count - 1) / count"),
    ("planner/decide/defaults.py", "corpus_tokens**0.571", "corpus_tokens**0.6"),
    ("trainer/plan.py", "or step == steps", ""),
    ("trainer/plan.py", "min(batch + 1, tokens // 10))", "0)"),
    ("trainer/plan.py", "min(EVAL_WINDOWS * step.length + 1, tokens // 10)", "0"),
    ("trainer/plan.py", "min(tokens // 100, EVAL_TOKENS + 1)", "tokens // 100"),
    ("trainer/plan.py", "count - count % step.batch", "count"),
    ("trainer/plan.py", "(tokens - held - 1) // step.length", "(tokens - held) // step.length"),
    ("trainer/plan.py", '{"rules": 1} | values', "values"),
    ("planner/decide/choose.py", "if c.accum <= most:", "if c.accum <= most + 1:"),
    ("planner/decide/choose.py", "elif not wish.is_asked and most > 1", "elif most > 1"),
    ("planner/decide/choose.py", "elif not wish.is_asked and most == 1 and", "elif False and"),
    ("trainer/config.py", "(step + 1) / self.warmup_steps", "step / self.warmup_steps"),
    ("trainer/config.py", "max(1, steps - 1 - peak)", "max(1, steps - peak)"),
    ("trainer/config.py", "self.warmup_steps if repeats_peak else max(0, self.warmup_steps - 1)", "self.warmup_steps"),
    ("trainer/run/saver.py", "            self.last_failure = None\n        except", "        except"),
    ("trainer/checkpoint.py", "[-KEEP:], _best(facts)}", "[-KEEP:]}"),
    ("trainer/checkpoint.py", "(step == best, step), default", "step, default"),
    ("trainer/checkpoint.py", "min(before[:-1],", "min(before,"),
    ("trainer/checkpoint.py", "if before != steps:", "if False:"),
    ("trainer/checkpoint.py", "min(losses, key=lambda step: (losses[step], -step)",
     "min(losses, key=lambda step: (losses[step], step)"),
    ("trainer/checkpoint.py", 'if values.get("step", step) == step', "if True"),
    ("trainer/checkpoint.py", "if not (_is_disk_full(e) and _make_room", "if not (_make_room"),
    ("trainer/run_folder.py", "and p == self.checkpoint(step := int(match[1]))", "and (step := int(match[1])) >= 0"),
    ("trainer/run_folder.py", "and p.is_dir()", ""),
    ("trainer/run/receipt.py", "(done - 1) // plan.eval, (done", "done // plan.eval, (done"),
    ("trainer/run/receipt.py", '(spent["eval_s"] + spent["sample_s"])', 'spent["eval_s"]'),
    ("trainer/run/receipt.py", "plan.checkpoint) - 1 - saves", "plan.checkpoint) - saves"),
    ("trainer/run/validation.py", "loss <= self.best", "loss < self.best"),
    ("trainer/run/divergence.py", 'facts["step"] < bad_after', 'facts["step"] <= bad_after'),
    ("trainer/run/divergence.py", "WILD = 1.5", "WILD = 1.4"),
    ("trainer/run/divergence.py", "min(lr / 2, LARGEST_LR)", "lr / 2"),
    ("trainer/run/commands.py", "self.resume(lr) if self.folder.checkpoint_steps() else", "self.resume(lr) if True else"),
    ("trainer/checkpoint.py", "if step <= written][-KEEP:]", "][-KEEP:]"),
    ("trainer/checkpoint.py", "if digest != expected:", "if False:"),
    ("trainer/run/slowdown.py", "now.tok_s * FALL < now.planned_tok_s", "now.tok_s < now.planned_tok_s"),
    ("trainer/run/slowdown.py", "step_s > max(AWAY_S, AWAY_TIMES * median(usual))", "step_s > AWAY_S"),
    ("trainer/run/preflight.py", "if free < peak:", "if free < peak / 2:"),
    ("trainer/run/preflight.py", "most = min(KEEP + 2,", "most = min(KEEP + 1,"),
    ("trainer/run/preflight.py", "least, room = min(2, most)", "least, room = min(1, most)"),
    ("trainer/run/preflight.py", "plan.checkpoint) - 1)", "plan.checkpoint))"),
    ("trainer/run/preflight.py", "facts.sequences and not facts.checkpoints", "facts.sequences"),
    ("trainer/run/preflight.py", "tokens >= plan.corpus_tokens - held and", ""),
    ("trainer/run/preflight.py", "and (plan.steps - 1) * plan.step.tokens < plan.corpus_tokens * plan.epochs", ""),
)]


def copy_checkout(folder: Path) -> Path:
    """What the tests need of the checkout, in a folder of its own."""
    for name in ("spillcliff", "trainer", "probe", "planner", "tests", "benchmarks", "results", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("*.cfg")):
        shutil.copy(path, folder)
    return folder


def mutated(mutant: Mutant) -> str:
    """The file's text with the mutant in it; ValueError unless its old text stands there once."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def tests_pass(names: list[str], folder: Path) -> bool:
    """Whether these tests of a copy of the checkout pass; RuntimeError if they can't run."""
    tests = [str(folder / "tests" / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(names)} can't run: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.returncode == 0


def survives(mutant: Mutant, folder: Path) -> bool:
    """Whether no test in a copy of the checkout fails for it; the copy is left as it was."""
    path = folder / mutant.file
    path.write_text(mutated(mutant), encoding="utf-8")
    try:
        return tests_pass(TESTS[mutant.file], folder)
    finally:
        shutil.copy(ROOT / mutant.file, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parts = parser.parse_args().parts
    chosen = [m for m in MUTANTS if not parts or any(part in m.file for part in parts)]
    begin, survivors = time.monotonic(), []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
        folders: Queue[Path] = Queue()
        for i in range(os.cpu_count() or 1):
            folders.put(copy_checkout(Path(temporary) / str(i)))

        names = list(dict.fromkeys(name for m in chosen for name in TESTS[m.file]))
        if not tests_pass(names, Path(temporary) / "0"):
            print("error: these tests fail without a mutant: " + " ".join(names), file=sys.stderr)
            return 2

        def run(mutant: Mutant) -> bool:
            folder = folders.get()
            try:
                return survives(mutant, folder)
            finally:
                folders.put(folder)

        for mutant, lives in zip(chosen, pool.map(run, chosen), strict=True):
            print(f"{'SURVIVES' if lives else 'killed':9}{mutant.file}: {' '.join(mutant.old.split())} -> "
                  f"{' '.join(mutant.new.split()) or 'nothing'}", flush=True)
            survivors += [mutant] * lives
    print(f"\n{len(chosen)} mutants, {len(survivors)} survive; {time.monotonic() - begin:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
