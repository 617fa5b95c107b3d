"""The mutation run's list is of the code as it is: what it changes stands there once, and its tests are there."""

import pytest
from helpers.made import ROOT

from benchmarks.mutants import MUTANTS, TESTS, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}: {m.old[:30]}")
def test_every_mutant_can_be_made(mutant):
    assert mutated(mutant) != (ROOT / mutant.file).read_text(encoding="utf-8")
    assert all((ROOT / "tests" / name).exists() for name in TESTS[mutant.file])
