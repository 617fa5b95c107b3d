"""The whole chain on this machine, as a user would type it: tokenize, probe grid, plan, train, sample.

`python3 bootstrap.py demo` runs it. The text is what every machine has, the sources of Python's own standard library.
"""

import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

HOME = Path("results/demo")
SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
# two cores pass 1.4 million tokens of the small one in 100 s; a card takes the larger one in its stride
ON_CPU = ("--model", "2M", "--batch", "4,8", "--length", "64,128", "--seconds", "4")
ON_CARD = ("--model", "10M", "--batch", "4,16,64", "--length", "256", "--engine", "eager,graph", "--seconds", "4")
VOCAB = "1024"


def run(command: str, *arguments: str) -> None:
    """Shows and runs one of the three commands; ends the demo with its exit code if it fails."""
    print(f"\n$ {command} {' '.join(repr(a) if ' ' in a else a for a in arguments)}", flush=True)
    module = {"probe": "probe.cli", "plan": "planner.cli", "train": "trainer.cli"}[command]
    code = subprocess.call([sys.executable, "-m", module, *arguments])
    if code:
        sys.exit(code)


def gather(path: Path) -> None:
    """The standard library's sources as one text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [p for p in sorted(library.rglob("*.py")) if not SKIP & set(p.relative_to(library).parts)]
    text = "".join(p.read_text(encoding="utf-8", errors="ignore") for p in sources)
    if len(text) < 1_000_000:
        print(f"error: {library} has only {len(text)} characters of Python source, too few to train on", file=sys.stderr)
        sys.exit(2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{len(sources)} files of {library}: {len(text) / 1e6:.1f} MB of text")


def main() -> None:
    begin = time.time()
    text, tokens, plan = HOME / "stdlib.txt", HOME / "stdlib.bin", HOME / "plan.json"
    if not tokens.exists():
        gather(text)
        run("train", "tokenize", str(text), "--out", str(tokens), "--vocab", VOCAB)
    facts = subprocess.run([sys.executable, "-m", "probe.cli", "card", "--json", "--results", str(HOME)],
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    card = facts.returncode == 0 and json.loads(facts.stdout)["kind"] == "cuda"
    run("probe", "grid", *(ON_CARD if card else ON_CPU), "--vocab", VOCAB, "--results", str(HOME))
    run("plan", "--hours", "2m", "--results", str(HOME), "--out", str(plan))
    folder = HOME / "runs" / time.strftime("%Y%m%d-%H%M%S")
    run("train", "--plan", str(plan), "--data", str(tokens), "--run", str(folder))
    run("train", "sample", "--run", str(folder), "--prompt", "import os\n\ndef ", "--tokens", "80")
    receipt = json.loads((folder / "receipt.json").read_text())
    first, last = receipt["first_val_loss"], receipt["val_loss"]
    print(f"\nvalidation loss {first:.3f} -> {last:.3f}, {(1 - last / first) * 100:.0f}% less; "
          f"the demo took {time.time() - begin:.0f} s\n")
    print(f"{'':14}{'planned':>14}{'actual':>14}{'difference':>12}")
    for name, label, unit, scale in (("tok_s", "throughput", "tok/s", 1), ("peak_bytes", "peak memory", "GB", 1e-9),
                                     ("hours", "whole time", "s", 3600)):
        if not receipt["ratio"][name]:
            continue
        planned, actual = receipt["planned"][name] * scale, receipt["actual"][name] * scale
        digits = 2 if unit == "GB" else 0
        difference = (actual / planned - 1) * 100
        print(f"{label:14}{planned:>8,.{digits}f} {unit:5}{actual:>8,.{digits}f} {unit:5}{difference:>+11.1f}%")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
