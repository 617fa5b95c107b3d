"""What looking costs: tok/s of one run with `probe health --watch` beside it and without, in turns within that run.

    python3 -m benchmarks.health [--model 1M] [--device cpu] [--pairs 16] [--seconds 5] [--out FILE]
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
from trainer.data.tokens import dtype_for, write_sidecar
from trainer.plan import Plan, Predicted, Span

SHAPES = {"cpu": StepConfig(1, 32), "cuda": StepConfig(16, 512)}


def start(folder: Path, model: ModelConfig, device: str) -> subprocess.Popen:
    """A run that would take days, on random tokens."""
    ids = np.random.default_rng(0).integers(0, model.vocab, 4_000_000)
    ids.astype(dtype_for(model.vocab)).tofile(folder / "data.bin")
    write_sidecar(folder / "data.bin", len(ids), model.vocab, None)
    span, never = Span(1.0, 1.0, 1.0), 10**7
    plan = Plan(schema=1, at="2026-01-01T00:00:00+00:00", device=device, model=model,
                step=SHAPES[device.partition(":")[0]], corpus_tokens=len(ids), epochs=1, steps=never,
                optimizer=OptimizerConfig(1e-4), eval=never, checkpoint=never, limit_bytes=10**15,
                predicted=Predicted(span, span, span), why=[], runners_up=[], rejected=[], records_sha256="", calibration={})
    plan.save(folder / "plan.json")
    return subprocess.Popen([sys.executable, "-m", "trainer.cli", "--plan", folder / "plan.json", "--data",
                             folder / "data.bin", "--run", folder / "run", "--device", device, "--allow-battery"],
                            stdout=subprocess.DEVNULL)


class Bench:
    """A run and its watcher, which is let go on or held: its start, some tenths of a second of a core, is in no window."""

    def __init__(self, run: Path, runner: psutil.Process, watcher: psutil.Process) -> None:
        self.run, self.runner, self.watcher = run, runner, watcher

    def window(self, seconds: float, is_watched: bool) -> dict:
        """steps a second, the run's processor seconds a step and the watcher's a minute, of a window of the run."""
        if is_watched:
            self.watcher.resume()
        else:
            self.watcher.suspend()
        spent, watching, begin = cpu_s(self.runner), cpu_s(self.watcher), time.time()
        time.sleep(seconds)
        spent, watching, until = cpu_s(self.runner) - spent, cpu_s(self.watcher) - watching, time.time()
        with open(self.run / "log.jsonl", encoding="utf-8") as f:
            lines = [json.loads(text) for text in f if text.endswith("\n")]
        steps = [line["at"] for line in lines if line["kind"] == "step" and begin <= line["at"] <= until]
        if len(steps) < 5:
            raise SystemExit(f"only {len(steps)} steps in a window: take longer --seconds or a smaller --model")
        return {"steps_s": (len(steps) - 1) / (steps[-1] - steps[0]), "cpu_s_step": spent / len(steps),
                "watcher_cpu_s_min": 60 * watching / (until - begin)}


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="1M", help="A small one: its steps log most often.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="Of one window.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, pairs = ModelConfig.named(options.model), list[dict]()
    with tempfile.TemporaryDirectory() as name:
        run, process = Path(name) / "run", start(Path(name), model, options.device)
        watcher: subprocess.Popen[str] | None = None
        try:
            while not (run / "log.jsonl").exists() or (run / "log.jsonl").read_text().count('"step"') < 20:
                if process.poll() is not None:
                    raise SystemExit("the run did not start")
                time.sleep(0.5)
            watcher = subprocess.Popen([sys.executable, "-m", "probe.cli", "health", "--run", run, "--watch", "--json"],
                                       stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            assert watcher.stderr is not None
            watcher.stderr.readline()
            time.sleep(options.seconds)
            bench = Bench(run, psutil.Process(process.pid), psutil.Process(watcher.pid))
            for pair in range(options.pairs):
                order = (False, True) if pair % 2 == 0 else (True, False)  # a drift falls on both alike
                windows = {is_watched: bench.window(options.seconds, is_watched) for is_watched in order}
                pairs.append({"alone": windows[False], "watched": windows[True]})
        finally:
            for child in (watcher, process):
                if child is not None:
                    child.kill()
                    child.wait()
    tell(options, pairs, SHAPES[options.device.partition(":")[0]].tokens)


def tell(options, pairs: list[dict], tokens: int) -> None:
    print("pair  alone, tok/s  watched, tok/s     lost  CPU a step  watcher, CPU s a minute")
    lost, more, spent = [], [], []
    for number, pair in enumerate(pairs, 1):
        alone, watched = pair["alone"], pair["watched"]
        lost.append(1 - watched["steps_s"] / alone["steps_s"])
        more.append(watched["cpu_s_step"] / alone["cpu_s_step"] - 1)
        spent.append(watched["watcher_cpu_s_min"])
        print(f"{number:4}  {alone['steps_s'] * tokens:12,.0f}  {watched['steps_s'] * tokens:14,.0f}  {lost[-1]:7.2%}  "
              f"{more[-1]:+10.2%}  {spent[-1]:.2f}")
    cores = psutil.cpu_count() or 1
    print(f"lost {spread(lost)}; the run's own processor time a step {spread(more)}; the watcher took "
          f"{statistics.median(spent):.2f} s of it a minute, {statistics.median(spent) / 60 / cores:.3%} of {cores} cores")
    text = json.dumps({"model": options.model, "device": options.device, "cores": cores, "pairs": pairs})
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:+.2%} in the median (quartiles {low:+.2%} to {high:+.2%})"


if __name__ == "__main__":
    main()
