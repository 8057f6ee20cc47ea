"""constraints.txt, which `make constraints` writes, pins every dependency of pyproject.toml in a version that it allows."""

import tomllib
from itertools import chain

import pytest
from launches import ROOT
from packaging.requirements import Requirement

CONSTRAINTS = (ROOT / "constraints.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
SYSTEMS = [
    {"sys_platform": system, "platform_machine": machine, "python_version": python, "python_full_version": f"{python}.0"}
    for system, machine in (("linux", "x86_64"), ("darwin", "arm64"))
    for python in ("3.11", "3.12", "3.13")
]


def pins(text: str) -> list[Requirement]:
    """Return the requirements of a constraints file."""
    return [Requirement(line) for line in text.splitlines() if not line.startswith("#")]


def pinned(text: str, name: str) -> list[str | None]:
    """Return the version of a package on each of SYSTEMS; None where it has no pin or several."""
    own = [pin for pin in pins(text) if pin.name == name]
    held = [[str(pin.specifier)[2:] for pin in own if not pin.marker or pin.marker.evaluate(system)] for system in SYSTEMS]
    return [versions[0] if len(versions) == 1 else None for versions in held]


@pytest.mark.parametrize("dependency", [each for each in DEPENDENCIES if not each.startswith(PROJECT["name"])])
def test_dependency_is_pinned_in_a_version_that_it_allows(dependency):
    wanted = Requirement(dependency)
    versions = pinned(CONSTRAINTS, wanted.name)
    assert all(version and wanted.specifier.contains(version) for version in versions), f"run `make constraints`: {versions}"


def test_constraints_are_exact_versions_that_any_index_can_serve():
    assert "make constraints" in CONSTRAINTS.splitlines()[1]
    assert all([each.operator for each in pin.specifier] == ["=="] for pin in pins(CONSTRAINTS))
    assert not any(pin.url for pin in pins(CONSTRAINTS))
