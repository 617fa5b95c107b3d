"""Our training step beside Hugging Face's Llama of the same shape and weights, on one card in one run.

    python3 -m benchmarks.step [--rows TEXT] [--out FILE]

Needs `transformers`. Each row runs in a process of its own. Efficiency is FLOPs (attention counted causal) x tok/s over
the rate of an fp32 matrix product of 8192 cubed, measured in the same run.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

FIELDS = ("who", "engine", "recompute", "update", "batch", "length", "model")
SHAPES = ((1, 512), (4, 512), (16, 1024))
# 138M and 13M are the shapes of 137.9M and 12.9M parameters
ROWS = [
    *(("hf", "eager", "none", "after", b, n, "138M") for b, n in SHAPES),
    ("hf", "compile", "none", "after", 4, 512, "138M"),
    *(("ours", e, "none", "after", b, n, "138M") for b, n in SHAPES for e in ("eager", "graph", "compile")),
    *(("ours", "eager", r, "after", 4, 512, "138M") for r in ("elementwise", "block")),
    ("ours", "eager", "block", "after", 32, 512, "138M"),
    ("ours", "eager", "block", "backward", 1, 512, "300M"),
    *(("ours", e, "none", "after", 4, 512, "13M") for e in ("eager", "graph")),
    *(("fed", "graph", "none", "after", 4, 512, m) for m in ("13M", "138M")),
]
ON_CPU = [(who, "eager", "none", "after", 4, 256, "10M") for who in ("hf", "ours")]


def measure(who: str, engine: Any, recompute: Any, update: Any, batch: int, length: int, model: str, steps: int) -> dict:
    """One row in this process: peaks in bytes, median seconds of a step, tok/s, and the loss of the first batch."""
    import torch

    from spillcliff.hardware.device import device_facts, resolve_device, synchronize
    from spillcliff.hardware.usage import MemoryClaim
    from trainer.config import ModelConfig, OptimizerConfig, StepConfig, clip_for
    from trainer.run.step import TrainStep

    claim = MemoryClaim()
    device = resolve_device(None)
    config = ModelConfig.named(model)
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab, (1, batch, length + 1), dtype=torch.int32).to(device)
    if who == "ours":
        shape = StepConfig(batch, length, 1, engine=engine, recompute=recompute, update=update)
        train = TrainStep(config, shape, OptimizerConfig(1e-5, clip=clip_for(shape)), device)
        first = float(train.evaluate(tokens[0]))

        def step():
            return train(tokens, 1e-5)[0]
    else:
        step, first = hugging_face(config, engine, tokens[0], device)
    begin = time.perf_counter()
    for _ in range(4):
        step()
    synchronize(device)
    warm = time.perf_counter() - begin
    times, events = [], []
    for _ in range(steps):
        if device.type == "cuda":
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            step()
            b.record()
            events.append((a, b))
        else:
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
    synchronize(device)
    step_s = median([a.elapsed_time(b) / 1000 for a, b in events] or times)
    peaks = dataclasses.asdict(claim.peaks(device, device_facts(device).uuid))
    return {"step_s": step_s, "tok_s": batch * length / step_s, "first_loss": first, "warm_s": warm,
            "flops": config.flops_per_token(length) * batch * length / step_s} | peaks


def fed(engine: Any, recompute: Any, batch: int, length: int, model: str, steps: int) -> dict:
    """Our step on a token file's batches and on one resident batch, in turns in one process."""
    import tempfile
    from itertools import cycle
    from pathlib import Path

    import numpy as np

    from spillcliff.hardware.device import resolve_device
    from trainer.config import ModelConfig, OptimizerConfig, StepConfig
    from trainer.data.feed import feed
    from trainer.data.tokens import Tokens, dtype_for, write_sidecar
    from trainer.run.step import TrainStep
    from trainer.run.timing import StepTimer

    device, config = resolve_device(None), ModelConfig.named(model)
    shape = StepConfig(batch, length, 1, engine=engine, recompute=recompute)
    timer = StepTimer(TrainStep(config, shape, OptimizerConfig(1e-5), device))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(config.vocab, size=8_000_000).astype(dtype_for(config.vocab)).tofile(path)
        write_sidecar(path, 8_000_000, config.vocab, None)
        file = feed(Tokens.open(path), shape, 0, device)
        times: dict[str, list[float]] = {"fed": [], "resident": []}
        for _ in range(5):
            for name, source in (("fed", file), ("resident", cycle([next(file).clone()]))):
                done = [*(timer.run(next(source), 1e-5) for _ in range(5 * steps)), timer.drain()]
                times[name] += [t.step_s for t in done[3:] if t]
        del file
    tok_s = {name: batch * length * len(t) / sum(t) for name, t in times.items()}  # means: a stall must show
    return {"tok_s": tok_s["fed"], "resident_tok_s": tok_s["resident"],
            "fed_over_resident": tok_s["fed"] / tok_s["resident"]}


def hugging_face(config, engine, tokens, device):
    """(step, loss of the first batch) of LlamaForCausalLM with our weights, SDPA, fused AdamW and the same clip."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from spillcliff.hardware.device import lock_fp32
    from trainer.huggingface.llama_names import to_llama
    from trainer.model.decoder import Decoder

    lock_fp32()
    with device:
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=config.vocab, hidden_size=config.d_model, intermediate_size=config.d_ff,
            num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
            tie_word_embeddings=True, rms_norm_eps=config.norm_eps, rope_theta=config.rope_base,
            max_position_embeddings=2048, attn_implementation="sdpa", use_cache=False))
    ours, theirs = Decoder(config, 8, device).state_dict(), model.state_dict()
    for name, weight in to_llama(ours.__getitem__, config):
        theirs[name].copy_(weight)
    del ours, theirs, weight
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    x, y = tokens[:, :-1].long(), tokens[:, 1:].long()
    run = torch.compile(model) if engine == "compile" else model

    def loss_of():
        return run(input_ids=x, labels=y, shift_labels=y).loss

    with torch.no_grad():
        first = float(model(input_ids=x, labels=y, shift_labels=y).loss)

    def step():
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step, first


def product_rate() -> dict:
    """The device and its FLOP/s in an fp32 matrix product of 8192 cubed (2048 on a processor)."""
    import torch

    from spillcliff.hardware.device import lock_fp32, resolve_device, synchronize

    lock_fp32()
    device = resolve_device(None)
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    times = []
    for _ in range(8):
        synchronize(device)
        begin = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return {"device": device.type, "rate": 2 * n**3 / median(times[2:])}


def loss_differences(results: list[dict]) -> list[str]:
    """For each shape that both ran, how far the first losses are apart, and whether that is within 1e-4."""
    lines, theirs = [], {(r["model"], r["batch"], r["length"]): r for r in results if r["who"] == "hf" and "first_loss" in r}
    for r in results:
        peer = theirs.get((r["model"], r["batch"], r["length"]))
        if r["who"] == "ours" and peer and "first_loss" in r:
            apart = abs(r["first_loss"] - peer["first_loss"])
            name = f"{r['model']} {r['engine']}/{r['recompute']} {r['batch']} x {r['length']}"
            lines.append(f"{name}: first losses {apart:.1e} apart" + ("" if apart <= 1e-4 else ": NOT THE SAME MODEL"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows whose name holds this")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", help="write the JSON line here too")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        row = json.loads(options.row)
        if row == "product":
            print(json.dumps(product_rate()))
            return
        values = dict(zip(FIELDS, row, strict=True))
        if values["who"] == "fed":
            del values["who"], values["update"]
            print(json.dumps(fed(**values, steps=options.steps)))
        else:
            print(json.dumps(measure(**values, steps=options.steps)))
        return

    def child(row) -> dict:
        done = subprocess.run([sys.executable, "-m", "benchmarks.step", "--row", json.dumps(row), "--steps",
                               str(options.steps)], capture_output=True, text=True)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        return json.loads(lines[-1])

    product = child("product")
    if "error" in product:
        sys.exit(f"error: the product could not be measured: {product['error']}")
    rate = product["rate"]
    print(f"fp32 product {rate / 1e12:.2f} TFLOP/s")
    print(f"{'who':5} {'model':5} {'engine':8} {'recompute':11} {'B x L':>10} {'alloc GB':>8} {'resv GB':>8} {'dev. GB':>8} "
          f"{'tok/s':>9} {'eff':>6}")
    results = []
    for row in ROWS if product["device"] == "cuda" else ON_CPU:
        if options.rows not in " ".join(map(str, row)):
            continue
        got = child(row)
        results.append(dict(zip(FIELDS, row, strict=True)) | got)
        name = f"{row[0]:5} {row[6]:5} {row[1]:8} {row[2]:11} {f'{row[4]} x {row[5]}':>10}"
        if "error" in got:
            print(f"{name} {got['error'][:80]}", flush=True)
            continue
        if "fed_over_resident" in got:
            print(f"{name} {got['tok_s']:,.0f} tok/s is {got['fed_over_resident']:.4f} of a resident batch's", flush=True)
            continue
        gb = [f"{(got[k] or 0) / 1e9:.3f}" for k in ("allocated_peak_bytes", "reserved_peak_bytes", "device_peak_bytes")]
        print(f"{name} {gb[0]:>8} {gb[1]:>8} {gb[2]:>8} {got['tok_s']:>9,.0f} {got['flops'] / rate:>6.3f}", flush=True)
    for difference in loss_differences(results):
        print(difference)
    line = json.dumps({"product_flops": rate, "rows": results})
    if options.out:
        with open(options.out, "w", encoding="utf-8") as f:
            f.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
