"""Every command in the docs runs. They are the docs' own lines, in their order and in one folder for each page; what a
page's card takes hours for is made small by the changes below, which are the only ones."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.made import MODULES, ROOT
from helpers.waiting import PATIENCE_S

PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
SMALLER = [("150M", "1M"), ("50M", "2M"), ("--corpus 100M", "--corpus 30k"), ("--hours 12", "--hours 1m"),
           ("--minutes 10", "--minutes 0.1"), ("--vocab 32000", "--vocab 500")]
MORE = {"probe grid": "--batch 1,2 --length 32 --vocab 500 --accum 1,2 --seconds 1 --device cpu",
        "train tokenize": "--vocab 500"}
"""Options of a command that make it small, where the docs' line does not have them."""
LONG = ("docs/laptop.md",)
"""Pages whose commands are the README's and more."""
REFUSED = {"probe cliff": 2}
"""Exit codes of what a processor can't do."""


def commands(page: str) -> list[str]:
    """The lines of a page's sh blocks, as they stand there."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def smaller(line: str) -> str:
    for old, new in SMALLER:
        line = line.replace(old, new)
    words = line.split()
    options = MORE.get(" ".join(words[:2]), "").split() if "--tokenizer" not in words else []
    return " ".join([line, *(f"{name} {value}" for name, value in zip(options[::2], options[1::2], strict=True)
                             if name not in words)])


def run(line: str, folder: Path):
    """In a shell, as a user would, where each of our commands and python3 are those of this environment."""
    shell = [f'{name}() {{ "{sys.executable}" -m {module} "$@"; }};' for name, module in MODULES.items()]
    shell.append(f'python3() {{ "{sys.executable}" "$@"; }};')
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", "-c", " ".join([*shell, line])], cwd=folder, env=environment, capture_output=True,
                          text=True, timeout=PATIENCE_S)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_run(page, tmp_path, request):
    if page in LONG and not request.config.getoption("--long"):
        pytest.skip("takes a minute or more; --long runs it")
    text = "".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "trainer").glob("*.py")))
    (tmp_path / "corpus.txt").write_text(text, encoding="utf-8")
    for line in commands(page):
        done = run(smaller(line), tmp_path)
        wanted = REFUSED.get(" ".join(line.split()[:2]), 0)
        assert done.returncode == wanted, f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"


def test_links_of_the_docs_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8")):
            if "://" not in target:
                assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"
