"""`train tokenize` beside `tokenizers`' own encode_batch on the same text, in turns in one run: rate and peak memory.

    python3 -m benchmarks.tokenize [--megabytes 1000] [--turn 20] [--out FILE]

The text is the words and lines of Python's standard library, shuffled by file, until it is long enough. Both take the same
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

WARM_MB = 2
"""Text that is encoded before the clock starts."""


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
    """The whole command's work: reading, encoding, writing, flushing."""
    from trainer.corpus import tokenize

    begin = time.monotonic()
    facts = tokenize([text], out, 1, coder)
    print(json.dumps({"bytes": facts["bytes"], "tokens": facts["tokens"], "from": begin}))


def theirs(text: Path, coder: Path) -> None:
    from tokenizers import Tokenizer

    from trainer.encode import BATCH
    from trainer.texts import Source, cut

    tokenizer = Tokenizer.from_file(str(coder))
    with Source(text) as source:
        pieces = list(cut(source.text().read))
    print("ready", flush=True)
    tokens = count = begin = 0
    for end, piece in enumerate(pieces, 1):
        count += len(piece)
        if count >= BATCH or end == len(pieces):
            tokens += sum(len(e.ids) for e in tokenizer.encode_batch(pieces[begin:end], add_special_tokens=False))
            count, begin = 0, end
    print(json.dumps({"bytes": text.stat().st_size, "tokens": tokens}))
