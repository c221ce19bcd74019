"""The Spack recipe asks for what the pyprojects ask for. Spack itself is not needed here."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / ".spack/packages/py_kenotron/package.py"
EXTRAS = {  # the variant that brings an extra, where it has another name
    "hub": "nanosets", "draw": "report", "check": "transformers",
}  # fmt: skip
Bounds = dict[tuple[str, str], str]
"""(Spack's name, variant or nothing) -> least version."""


class Recipe:
    """What the directives of the recipe said."""

    def __init__(self) -> None:
        self.needs: Bounds = {}
        self.variants: list[str] = []
        self.versions: list[str] = []

    def depends_on(self, spec: str, when: str = "", type: Any = None) -> None:
        name, _, rest = spec.partition("@")
        self.needs[name, when.lstrip("+")] = re.split("[:+]", rest)[0]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> tuple[Recipe, Any]:
    """The recipe's directives, and its class, as Spack would load them."""
    found = Recipe()
    spack, python = ModuleType("spack.package"), ModuleType("python")
    python.PythonPackage = object  # pyrefly: ignore[missing-attribute]
    python.PythonPipBuilder = object  # pyrefly: ignore[missing-attribute]
    given = {
        "depends_on": found.depends_on,
        "variant": lambda name, **_: found.variants.append(name),
        "version": lambda name, **_: found.versions.append(name),
        "license": lambda _: None,
        "working_dir": None,
    }
    vars(spack).update(given)
    monkeypatch.setitem(sys.modules, "spack", ModuleType("spack"))
    monkeypatch.setitem(sys.modules, "spack.package", spack)
    for name in ("spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "spack_repo.builtin.build_systems.python", python)
    namespace: dict[str, Any] = {}
    exec(compile(RECIPE.read_text(encoding="utf-8"), str(RECIPE), "exec"), namespace)
    return found, namespace


def projects() -> list[dict[str, Any]]:
    files = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")]
    return [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]


def wanted() -> Bounds:
    """The highest of the least versions that the pyprojects declare."""
    found: Bounds = {}
    for project in projects():
        asked = {"": project["project"]["dependencies"]}
        extras = project["project"].get("optional-dependencies", {})
        asked |= {
            EXTRAS.get(n, n): each for n, each in extras.items() if n not in ("test", "bench")
        }
        for variant, requirements in asked.items():
            for requirement in requirements:
                name, _, bound = requirement.partition(">=")
                key = (f"py-{name.lower()}", variant)
                if not name.startswith("kenotron-") and _key(bound) > _key(found.get(key, "0")):
                    found[key] = bound
    always = {name for name, variant in found if not variant}
    return {key: bound for key, bound in found.items() if not key[1] or key[0] not in always}


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_it_asks_for_the_versions_of_the_pyprojects(recipe: tuple[Recipe, Any]) -> None:
    found, _ = recipe
    tools = ("python", "py-pip", "py-hatchling")
    assert {key: v for key, v in found.needs.items() if key[0] not in tools} == wanted()
    builds = {r for p in projects() for r in p["build-system"]["requires"]}
    assert builds - {"hatchling"} == {f"hatchling>={found.needs['py-hatchling', '']}"}
    pythons = {project["project"]["requires-python"] for project in projects()}
    assert pythons == {f">={found.needs['python', '']}"}


def test_its_variants_are_nanotrons_and_the_extras(recipe: tuple[Recipe, Any]) -> None:
    found, _ = recipe
    used = {variant for _, variant in found.needs if variant}
    assert used | {"datastates"} == set(found.variants) and len(found.variants) == 10
    assert {"nanosets", "s3", "datastates"} <= set(found.variants)
    assert found.versions == ["main"]


def test_it_installs_each_part_after_those_that_it_needs(recipe: tuple[Recipe, Any]) -> None:
    order = recipe[1]["ORDER"]
    assert sorted(order) == sorted(
        p.name.removeprefix("kenotron-") for p in ROOT.glob("packages/*")
    )
    for place, name in enumerate(order):
        text = (ROOT / f"packages/kenotron-{name}/pyproject.toml").read_text(encoding="utf-8")
        for needed in tomllib.loads(text)["project"]["dependencies"]:
            if needed.startswith("kenotron-"):
                assert needed.partition(">=")[0].removeprefix("kenotron-") in order[:place]
    text = RECIPE.read_text(encoding="utf-8")
    assert all(f'"apps/{app.name}"' in text for app in ROOT.glob("apps/*"))


def test_its_folder_is_a_repository_of_spack() -> None:
    assert "namespace: kenotron\n" in (ROOT / ".spack/repo.yaml").read_text(encoding="utf-8")
