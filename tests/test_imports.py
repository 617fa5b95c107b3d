"""Imports run one way without a circle, click stays at the edge, and what needs no torch starts without it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers.made import MODULES, ROOT

LAYERS = {"spillcliff": set(), "trainer": {"spillcliff"}, "probe": {"spillcliff", "trainer"},
          "planner": {"spillcliff", "trainer", "probe"}}
FILES = [p for layer in LAYERS for p in sorted((ROOT / layer).rglob("*.py"))]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


OURS = {name_of(p) for p in FILES}


def imported(path: Path, at_start: bool = False) -> Iterator[str]:
    """The modules that a file imports, anywhere in it or when it is imported itself; of `from a import b` it is a.b if that
    is one of ours."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_start else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from (f"{module}.{a.name}" if f"{module}.{a.name}" in OURS else module for a in node.names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_run_one_way_and_click_stays_in_the_command_lines(path):
    layer, modules = path.relative_to(ROOT).parts[0], set(imported(path))
    packages = {m.split(".")[0] for m in modules}
    assert packages & set(LAYERS) <= LAYERS[layer] | {layer}
    assert "click" not in packages or path.name == "cli.py"
    if layer == "planner":
        assert "torch" not in packages
    commands = modules & {"trainer.cli", "probe.cli", "planner.cli"}
    assert not commands or path.name == "__main__.py", "a command's module is nobody else's"


def folder(module: str) -> str:
    """Of trainer.run.step it is trainer.run; of trainer.plan, which lies beside the folders, itself."""
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize(("of", "at_start"), [(folder, False), (str, True)], ids=["folders", "modules"])
def test_there_is_no_circle(of, at_start):
    """Between folders none at all; between modules a task may import what it runs when it runs."""
    needs: dict[str, set[str]] = {}
    for path in FILES:
        needs.setdefault(of(name_of(path)), set()).update(of(m) for m in imported(path, at_start) if m in OURS)
    for name, others in needs.items():
        others.discard(name)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as e:
        pytest.fail(" <- ".join(e.args[1]))


def test_a_circle_would_be_seen(tmp_path):
    (tmp_path / "a.py").write_text("def late():\n    from probe.grid import bench\n    import trainer.plan\n")
    assert list(imported(tmp_path / "a.py")) == ["probe.grid.bench", "trainer.plan"]
    assert not list(imported(tmp_path / "a.py", at_start=True))


def modules_after(code: str) -> set[str]:
    script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("layer", ["planner", "probe.grid", "probe.estimate", "probe.health", "probe.show"])
def test_what_decides_imports_no_torch(layer):
    names = [n for n in sorted(OURS) if n.startswith(layer) and not n.endswith("__main__")]
    assert len(names) > 3
    assert "torch" not in modules_after("\n".join(f"import {n}" for n in names))


def test_a_run_imports_what_was_measured_and_no_more():
    """On a processor libraries count: tokenizers, which only --sample needs, made a run's peak 4 MB more than planned."""
    code = "import trainer.run.start, trainer.run.loop"
    assert not {"tokenizers", "click", "pandas", "matplotlib", "tensorboard"} & modules_after(code)


COMMANDS = [("probe",), ("probe", "card"), ("probe", "cliff"), ("probe", "grid"), ("probe", "soak"), ("probe", "show"),
            ("probe", "health"), ("probe", "plot"), ("probe", "estimate"), ("plan",), ("plan", "report"), ("train",),
            ("train", "tokenize"), ("train", "sample"), ("train", "audit"), ("train", "export"), ("train", "curve"),
            ("spillcliff",)]


@pytest.mark.parametrize("name", MODULES)
def test_help_needs_neither_torch_nor_pandas(name):
    """That is what keeps every --help below half a second."""
    commands = [[*rest, "--help"] for first, *rest in COMMANDS if first == name]
    code = (f"import {MODULES[name]} as m, io, contextlib\nfor words in {commands!r}:\n"
            f"    with contextlib.redirect_stdout(io.StringIO()) as s:\n"
            f"        m.cli.main(words, standalone_mode=False)\n    assert 'Usage' in s.getvalue()")
    assert not {"torch", "pandas", "matplotlib", "numpy", "rich", "jinja2"} & modules_after(code)


def test_ruff_is_clean():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_mypy_is_clean_with_the_tests_of_a_card():
    """It reads what no card here can run: a GPU test once called a constructor with another argument too few."""
    command = [sys.executable, "-m", "mypy", *LAYERS, "tests", "benchmarks", "demo.py", "bootstrap.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
