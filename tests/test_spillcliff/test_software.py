"""A version is compared by what it is, not by how it is written."""

import dataclasses
from importlib import metadata

import pytest
from helpers.made import make_plan

from spillcliff.hardware.fingerprints import cpu_fingerprints
from spillcliff.hardware.software import installed_software, same_version


@pytest.mark.parametrize(("measured", "here", "is_same"), [
    ("2.11.0+cu130", "2.11.0", True), ("2.11.0", "2.11.0+cu130", True), ("2.11.0+cu130", "2.11.0+CU130", True),
    ("2.11.0+cu130", "2.11.0+cu126", False), ("2.11.0+cu130", "2.11.0+cpu", False), ("2.11.0+cu130", "2.11.1", False),
    ("2.11.0", "2.11.0", True), ("2.11.0", "2.11.0.dev20261101+cu130", False), ("2.11.0", None, False),
    (None, None, True), ("581.29", "581.2", False)])
def test_the_local_part_counts_where_both_have_one(measured, here, is_same):
    assert same_version(measured, here) is is_same
    assert same_version(here, measured) is is_same


def test_a_plan_of_the_same_build_is_not_called_another_s(monkeypatch):
    """torch names its CUDA in its version, and the metadata of the package from PyPI do not: every user of it was told to
    measure again."""
    monkeypatch.setattr(metadata, "version", lambda name: "2.11.0")
    here = installed_software(cpu_fingerprints()[0])
    plan = dataclasses.replace(make_plan(), software={"torch": "2.11.0+cu130", "driver": "580"})
    assert plan.other_software(here) == []
    assert plan.other_software(here | {"torch": "2.12.0"}) == ["torch 2.11.0+cu130 (now 2.12.0)"]
    assert plan.other_software({"torch": "2.11.0+cu126"}) == ["torch 2.11.0+cu130 (now 2.11.0+cu126)"]
