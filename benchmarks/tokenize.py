"""`train tokenize` beside `tokenizers`' own encode_batch on the same text, in turns in one run: rate and peak memory.

    python3 -m benchmarks.tokenize [--megabytes 1000] [--turn 20] [--call encode_batch]

The text is the sources of Python's standard library, file after file in another order each time round. Both take the same
tokenizer.json, made beforehand. encode_batch gets what is the best for it: the text in memory before the clock starts, in
pieces and batches of the sizes that `train tokenize` uses; its ids are dropped. Each runs in a process of its own, and they
are suspended in turns, so that a machine that others use is as slow for one as for the other.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def write_text(path: Path, megabytes: float) -> None:
    """Lines of the standard library's sources until `megabytes` are there, another order of the files each time round."""
    r = random.Random(0)
    sources = sorted(Path(os.__file__).parent.glob("*.py")) + sorted(Path(os.__file__).parent.glob("*/*.py"))
    sources = [p for p in sources if "site-packages" not in p.parts]
    left = int(megabytes * 1e6)
    with open(path, "wb") as f:
        while left > 0:
            r.shuffle(sources)
            for source in sources:
                data = source.read_bytes().decode("utf-8", "ignore").encode()[:left].decode("utf-8", "ignore").encode()
                left -= max(1, len(data))
                f.write(data)
                if left <= 0:
                    break


def ours(text: Path, coder: Path, out: Path) -> None:
    """The whole command's work: reading, encoding, checking, writing, flushing."""
    from spillcliff.hardware.host_memory import resident_peak_bytes
    from trainer.tokenize.corpus import CorpusOptions, tokenize

    print("ready", flush=True)
    facts = tokenize(CorpusOptions([text], out, tokenizer=coder))
    print(json.dumps({"bytes": facts["bytes"], "tokens": facts["tokens"], "peak_bytes": resident_peak_bytes()}))


def theirs(text: Path, coder: Path, call: str) -> None:
    """encode_batch (or encode_batch_fast, which leaves out the offsets) alone."""
    from tokenizers import Tokenizer

    from spillcliff.hardware.host_memory import resident_peak_bytes
    from trainer.tokenize.encode import BATCH
    from trainer.tokenize.source import Source
    from trainer.tokenize.texts import cut

    encode = getattr(Tokenizer.from_file(str(coder)), call)
    with Source(text) as source:
        pieces = list(cut(source.text().read))
    print("ready", flush=True)
    tokens = size = begin = 0
    for end, piece in enumerate(pieces, 1):
        size += len(piece)
        if size >= BATCH or end == len(pieces):
            tokens += sum(map(len, encode(pieces[begin:end], add_special_tokens=False)))
            size, begin = 0, end
    print(json.dumps({"bytes": text.stat().st_size, "tokens": tokens, "peak_bytes": resident_peak_bytes()}))


def in_turns(commands: dict[str, list[str]], turn_s: float) -> dict[str, dict]:
    """What each process printed, and the seconds that it was let run after it was ready."""
    import psutil

    children = {name: subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for name, command in commands.items()}
    spent = dict.fromkeys(children, 0.0)
    for child in children.values():
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        psutil.Process(child.pid).suspend()
    while running := [name for name, child in children.items() if child.poll() is None]:
        for name in running:
            begin = time.monotonic()
            psutil.Process(children[name].pid).resume()
            try:
                children[name].wait(turn_s)
            except subprocess.TimeoutExpired:
                psutil.Process(children[name].pid).suspend()
            spent[name] += time.monotonic() - begin
    return {name: json.loads(child.stdout.read() if child.stdout else "") | {"seconds": spent[name]}
            for name, child in children.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--turn", type=float, default=20, help="seconds")
    parser.add_argument("--call", default="encode_batch", help="encode_batch or encode_batch_fast")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    if options.only:
        name, *paths = options.only
        text, coder, *out = map(Path, paths)
        if name == "ours":
            ours(text, coder, out[0])
        else:
            theirs(text, coder, options.call)
        return
    from trainer.tokenize.texts import sample
    from trainer.tokenize.tokenizer import train

    with tempfile.TemporaryDirectory(dir=".") as folder:
        text, coder = Path(folder, "text.txt"), Path(folder, "tokenizer.json")
        write_text(text, options.megabytes)
        train(sample([text], [None], 10_000_000), 16_000).save(str(coder))
        again = [sys.executable, "-m", "benchmarks.tokenize", "--call", options.call, "--only"]
        results = in_turns({"train tokenize": [*again, "ours", str(text), str(coder), str(Path(folder, "out.bin"))],
                          options.call: [*again, "theirs", str(text), str(coder)]}, options.turn)
    rates = {name: f["bytes"] / 1e6 / f["seconds"] for name, f in results.items()}
    print(f"{'':16} {'MB':>7} {'tokens':>12} {'seconds':>8} {'MB/s':>6} {'of theirs':>9} {'peak resident':>14}")
    for name, f in results.items():
        print(f"{name:16} {f['bytes'] / 1e6:7.1f} {f['tokens']:12,} {f['seconds']:8.1f} {rates[name]:6.2f} "
              f"{rates[name] / rates[options.call]:9.2f} {f['peak_bytes'] / 1e6:11.0f} MB")


if __name__ == "__main__":
    main()
