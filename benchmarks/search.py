"""What the search costs and loses, replayed on complete grids: an H200's, free and with its memory capped, and made-up ones.

    python3 -m benchmarks.search [--seeds 40]

A share is of the seconds that all cells took; a loss is of the best cell's tok/s, and lossy ones lose over 1%. "told" has
predicted peaks, "blind" not.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.made import SAMPLES
from helpers.made_grids import made_up, replay

from probe.estimate.peak import CardMemory, estimate
from probe.grid.search import unknown
from probe.records import load
from spillcliff.units import format_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    seeds = parser.parse_args().seeds
    card = CardMemory.of({"kind": "cuda", "capability": [9, 0]})
    print(f"{'grid':24} {'limit':>9} {'peaks':>6} {'cells':>7} {'share':>7} {'loss':>7}")
    for name, limits in (("grid-h200", (142_680_000_000, 20_000_000_000, 6_000_000_000)),
                         ("grid-h200-6gb-fails", (6_430_000_000, None))):
        full = {r.cell: r for r in load(SAMPLES / f"{name}.jsonl")}
        for limit in limits:
            for how, predict in (("told", lambda c: estimate(c, card).device_bytes), ("blind", unknown)):
                order, share, loss = replay(full, limit, predict=predict)
                cells = f"{len(order)}/{len(full)}"
                print(f"{name:24} {format_bytes(limit):>9} {how:>6} {cells:>7} {share:7.1%} {loss:7.1%}")
    print(f"\n{f'{seeds} each of waves, bump':24} {'peaks':>6} {'median':>7} {'worst':>7} {'>35%':>5} {'lossy':>5} "
          f"{'worst':>7}")
    for how in ("told", "blind"):
        for waves in ("none", "wave", "even"):
            for bump in ("none", "batch", "cell"):
                results = []
                for seed in range(seeds):
                    full, limit, predicted = made_up(seed, waves, bump)
                    results.append(replay(full, limit, predict=predicted.get if how == "told" else unknown)[1:])
                shares, losses = zip(*results, strict=True)
                print(f"{waves + ', ' + bump:24} {how:>6} {statistics.median(shares):7.1%} {max(shares):7.1%} "
                      f"{sum(s > 0.35 for s in shares):>5} {sum(x > 0.01 for x in losses):>5} {max(losses):7.1%}")


if __name__ == "__main__":
    main()
