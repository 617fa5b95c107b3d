"""What looking costs: tok/s of one run with `probe health --watch` beside it and without, in turns within that run.

    python3 -m benchmarks.health [--model 1M] [--device cpu] [--pairs 6] [--seconds 12] [--out FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from trainer.config import ModelConfig, OptimizerConfig, StepConfig
from trainer.plan import Plan, Predicted, Span
from trainer.tokens import dtype_for, write_sidecar

SETTLE_S = 3.0
"""Of each window, left out: in it the watcher starts."""
SHAPES = {"cpu": StepConfig(2, 128), "cuda": StepConfig(16, 512)}


def start(folder: Path, model: ModelConfig, device: str) -> subprocess.Popen:
    """A run that would take days, on random tokens."""
    ids = np.random.default_rng(0).integers(0, model.vocab, 4_000_000)
    ids.astype(dtype_for(model.vocab)).tofile(folder / "data.bin")
    write_sidecar(folder / "data.bin", len(ids), model.vocab, None)
    span, never = Span(1.0, 1.0, 1.0), 10**7
    plan = Plan(1, "2026-01-01T00:00:00+00:00", device, model, SHAPES[device.partition(":")[0]], len(ids), 1, never,
                OptimizerConfig(1e-4), never, never, 10**15, Predicted(span, span, span), [], [], [], "", {})
    plan.save(folder / "plan.json")
    return subprocess.Popen([sys.executable, "-m", "trainer.cli", "--plan", folder / "plan.json", "--data",
                             folder / "data.bin", "--run", folder / "run", "--device", device, "--allow-battery"],
                            stdout=subprocess.DEVNULL)


def window(run: Path, seconds: float, is_watched: bool) -> tuple[float, float]:
    """(steps a second, the watcher's seconds of processor time a minute) in a window of the run, its start left out."""
    watcher = None
    if is_watched:
        watcher = subprocess.Popen([sys.executable, "-m", "probe.cli", "health", "--run", run, "--watch", "--json"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(SETTLE_S)
    spent, begin = cpu_s(watcher), time.time()
    time.sleep(seconds - SETTLE_S)
    spent, until = cpu_s(watcher) - spent, time.time()
    if watcher:
        watcher.terminate()
        watcher.wait()
    steps = [line["at"] for text in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
             if (line := json.loads(text))["kind"] == "step" and begin <= line["at"] <= until]
    if len(steps) < 10:
        raise SystemExit(f"only {len(steps)} steps in a window: take longer --seconds or a smaller --model")
    return (len(steps) - 1) / (steps[-1] - steps[0]), 60 * spent / (until - begin)


def cpu_s(process) -> float:
    if process is None:
        return 0.0
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="1M", help="A small one: its steps log most often.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=12.0, help="Of one window.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, rows = ModelConfig.named(options.model), []
    tokens = SHAPES[options.device.partition(":")[0]].tokens
    with tempfile.TemporaryDirectory() as name:
        run, process = Path(name) / "run", start(Path(name), model, options.device)
        try:
            while not (run / "log.jsonl").exists() or (run / "log.jsonl").read_text().count('"step"') < 20:
                if process.poll() is not None:
                    raise SystemExit("the run did not start")
                time.sleep(0.5)
            for pair in range(options.pairs):
                order = (False, True) if pair % 2 == 0 else (True, False)  # a drift falls on both alike
                seen = {is_watched: window(run, options.seconds, is_watched) for is_watched in order}
                rows.append({"alone_tok_s": seen[False][0] * tokens, "watched_tok_s": seen[True][0] * tokens,
                             "loss": 1 - seen[True][0] / seen[False][0], "watcher_cpu_s_min": seen[True][1]})
        finally:
            process.terminate()
            process.wait()
    print(f"{'pair':>4}  {'alone, tok/s':>12}  {'watched, tok/s':>14}  {'lost':>7}  watcher, CPU s a minute")
    for number, row in enumerate(rows, 1):
        print(f"{number:4}  {row['alone_tok_s']:12,.0f}  {row['watched_tok_s']:14,.0f}  {row['loss']:7.2%}  "
              f"{row['watcher_cpu_s_min']:.2f}")
    losses, spent = sorted(row["loss"] for row in rows), statistics.median(row["watcher_cpu_s_min"] for row in rows)
    cores = psutil.cpu_count() or 1
    print(f"lost in the median {statistics.median(losses):.2%} ({losses[0]:.2%} to {losses[-1]:.2%}); the watcher took "
          f"{spent:.2f} s of processor time a minute, {spent / 60 / cores:.3%} of {cores} cores")
    text = json.dumps({"model": options.model, "device": options.device, "cores": cores, "rows": rows})
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
