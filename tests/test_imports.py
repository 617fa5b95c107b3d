"""Imports run one way, click stays at the edge, and what needs no torch starts without it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.made import MODULES, ROOT

LAYERS = {"spillcliff": set(), "trainer": {"spillcliff"}, "probe": {"spillcliff", "trainer"},
          "planner": {"spillcliff", "trainer", "probe"}}
FILES = [p for layer in LAYERS for p in sorted((ROOT / layer).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way_and_click_stays_in_the_command_lines(path):
    layer = path.relative_to(ROOT).parts[0]
    assert imported(path) & set(LAYERS) <= LAYERS[layer] | {layer}
    assert "click" not in imported(path) or path.name == "cli.py"
    if layer == "planner":
        assert "torch" not in imported(path)


def modules_after(code: str) -> set[str]:
    script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["probe.grid.bench", "probe.estimate.peak",
                                    *(".".join(p.relative_to(ROOT).with_suffix("").parts) for p in FILES
                                      if p.relative_to(ROOT).parts[0] == "planner")])
def test_the_planner_and_the_grid_import_no_torch(module):
    assert "torch" not in modules_after(f"import {module}")


@pytest.mark.parametrize("command", [("probe",), ("probe", "card"), ("probe", "cliff"), ("probe", "grid"), ("probe", "soak"),
                                     ("probe", "show"), ("probe", "health"), ("probe", "plot"), ("probe", "estimate"),
                                     ("plan",), ("train",), ("train", "tokenize"), ("train", "sample"), ("train", "audit"),
                                     ("train", "export"), ("train", "curve")])
def test_help_needs_neither_torch_nor_pandas(command):
    """That is what keeps every --help below half a second."""
    name, *rest = command
    code = (f"import {MODULES[name]} as m, io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as s:\n"
            f"    m.cli.main({[*rest, '--help']!r}, standalone_mode=False)\nassert 'Usage' in s.getvalue()")
    assert not {"torch", "pandas", "matplotlib", "numpy", "rich"} & modules_after(code)


def test_ruff_is_clean():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
