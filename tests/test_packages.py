"""The packages as a whole: their floors, versions, licences, READMEs, tests and documented names.

Like the rooms, each rule returns complaints and is tried on planted offenders; nothing is imported.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest
from definitions import Trees, definition, exported, trees_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from python_examples import python_blocks, unmade_names
from test_rooms import ROOT, imported_modules, module_name, python_files, repository_files

PLACES = {"packages", "apps", "tests"}
TOP_LEVEL = PLACES | {"noxfile.py", "pyproject.toml", "LICENSE"}  # and names that begin with a dot
TOP_LEVEL |= {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}
GROUND = {"kenotron-dist", "kenotron-data", "kenotron-command"}
FIRST_FLOOR = {f"kenotron-{room}" for room in ("tp", "pp", "cp", "ep", "optim", "ckpt")}
SECOND_FLOOR = {"kenotron-models", "kenotron-nanotron"}
COMPOSED = {f"kenotron-{room}" for room in ("tp", "pp", "optim", "ckpt", "data", "models")}
ENGINE = {*COMPOSED, "kenotron-dist", "kenotron-cp", "kenotron-ep"} - {"kenotron-ckpt"}
COST = {*ENGINE, "kenotron-config", "kenotron-engine"} - {"kenotron-cp", "kenotron-ep"}
THIRD_FLOOR = {"kenotron-config": COMPOSED | {"kenotron-command"}, "kenotron-engine": ENGINE}
RUNNING = {"dist", "tp", "pp", "models", "ckpt", "data", "command"}
RUNNING = {f"kenotron-{room}" for room in RUNNING}
FLOORS = {  # who may import whom: always something lower in the house
    **dict.fromkeys(GROUND, frozenset()),
    "kenotron-data": {"kenotron-command"},  # the frame of its program
    **dict.fromkeys(FIRST_FLOOR, {"kenotron-dist"}),
    "kenotron-ckpt": {"kenotron-dist", "kenotron-command"},
    "kenotron-models": {f"kenotron-{room}" for room in ("dist", "tp", "cp", "ep")},
    "kenotron-nanotron": {"kenotron-ckpt", "kenotron-command"},
    **THIRD_FLOOR,
    "kenotron-cost": COST,
    "kenotron-plan": RUNNING | {*THIRD_FLOOR, "kenotron-cost"},
    "kenotron-generate": RUNNING | {"kenotron-engine"},
    "kenotron-convert": RUNNING,
    "kenotron-train": GROUND | FIRST_FLOOR | SECOND_FLOOR | {*THIRD_FLOOR, "kenotron-cost"},
}
DISTRIBUTION = {"yaml": "pyyaml", "triton": "torch"}  # an import name: who brings it, if not itself
README_LINES = 120
"""Of the root."""
PACKAGE_README_LINES = 140
"""Of a package, which opens with a table from torch's names to its own."""
README_SECTIONS = ("Install", "Example", "API", "Why", "Limits")


@dataclass(frozen=True)
class Unit:
    """A package or an app: a folder with a pyproject.toml, below the root of a repository."""

    root: Path
    path: str

    @property
    def is_app(self) -> bool:
        """Say whether it is an app."""
        return self.path.startswith("apps/")

    @cached_property
    def pyproject(self) -> dict:
        """Read its pyproject.toml."""
        return tomllib.loads(self.text("pyproject.toml"))

    @property
    def name(self) -> str:
        """Give the name that it is installed under."""
        return self.pyproject["project"]["name"]

    def text(self, name: str) -> str:
        """Read one of its files; empty if it has none of this name."""
        file = self.root / self.path / name
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """Parse its sources: path to tree."""
        paths = [p for p in python_files(self.root) if p.startswith(f"{self.path}/")]
        return {p: ast.parse((self.root / p).read_text(encoding="utf-8")) for p in paths}

    def required(self) -> list[Requirement]:
        """List what it cannot be installed without."""
        return [Requirement(text) for text in self.pyproject["project"].get("dependencies", [])]

    def optional(self) -> list[Requirement]:
        """List what its extras ask for."""
        extras = self.pyproject["project"].get("optional-dependencies", {})
        return [Requirement(text) for texts in extras.values() for text in texts]

    def imported(self) -> dict[str, str]:
        """Map the name of every distribution that it imports, but its own, to the place of one."""
        found = {}
        for path, tree in self.modules.items():
            for name, line in imported_modules(path, tree):
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names:
                    wanted = canonicalize_name(DISTRIBUTION.get(top, top))
                    found.setdefault(wanted, f"{path}:{line}")
        return {name: place for name, place in found.items() if name != self.name}


def units(root: Path) -> list[Unit]:
    """List the packages and apps of a repository."""
    found = sorted(root.glob("packages/*/pyproject.toml")) + sorted(
        root.glob("apps/*/pyproject.toml")
    )
    return [Unit(root, file.parent.relative_to(root).as_posix()) for file in found]


def is_sibling(name: str) -> bool:
    """Say whether a distribution is one of ours."""
    return name.startswith("kenotron-")


def siblings_imported_and_declared(unit: Unit) -> list[str]:
    """Complain of a sibling that is imported and not declared, or declared and not imported."""
    imported = {name: place for name, place in unit.imported().items() if is_sibling(name)}
    declared = {r.name for r in unit.required() if is_sibling(r.name)}
    return (
        [f"{imported[n]}: {unit.name} imports {n}, not declared" for n in {*imported} - declared]
        + [f"{unit.path}: declares {n} and never imports it" for n in declared - {*imported}]
        + [f"{unit.path}: {r} in an extra" for r in unit.optional() if is_sibling(r.name)]
    )


def floors(unit: Unit) -> list[str]:
    """Complain of an import that does not go down the house."""
    if unit.name not in FLOORS:
        return [f"{unit.path}: give {unit.name} its floor in tests/test_packages.py"]
    siblings = {name: place for name, place in unit.imported().items() if is_sibling(name)}
    return [
        f"{place}: {unit.name} may not import {name}"
        for name, place in siblings.items()
        if name not in FLOORS[unit.name]
    ]


def others_declared(unit: Unit) -> list[str]:
    """Complain of an import from outside that neither the dependencies nor an extra bring."""
    declared = {canonicalize_name(r.name) for r in [*unit.required(), *unit.optional()]}
    return [
        f"{place}: {name} is not in the dependencies of {unit.name}"
        for name, place in unit.imported().items()
        if not is_sibling(name) and name not in declared
    ]


def sibling_ranges(unit: Unit) -> list[str]:
    """Complain of a range that is open, or does not admit the sibling's version in this tree."""
    versions = {other.name: other.pyproject["project"]["version"] for other in units(unit.root)}
    found = []
    for wanted in (r for r in unit.required() if is_sibling(r.name)):
        if {s.operator for s in wanted.specifier} != {">=", "<"}:
            found.append(f"{unit.path}: {wanted} is not of the form >=a,<b")
        if wanted.name in versions and versions[wanted.name] not in wanted.specifier:
            found.append(f"{unit.path}: {wanted}, but it is {versions[wanted.name]} in this tree")
    return found


def metadata(unit: Unit) -> list[str]:
    """Complain of a pyproject.toml that is not like the others."""
    project, build = unit.pyproject["project"], unit.pyproject.get("build-system", {})
    folder = f"kenotron-{unit.path.split('/')[1]}" if unit.is_app else unit.path.split("/")[1]
    wanted = {
        f"name = {folder}": unit.name == folder,
        "a static version": "version" in project and not project.get("dynamic"),
        "requires-python = >=3.11": project.get("requires-python") == ">=3.11",
        "license = Apache-2.0": project.get("license") == "Apache-2.0",
        "build-backend = hatchling.build": build.get("build-backend") == "hatchling.build",
    }
    return [
        f"{unit.path}/pyproject.toml: needs {what}" for what, held in wanted.items() if not held
    ]


def documents(unit: Unit) -> list[str]:
    """Complain of a missing or overlong README, another licence, or a changelog behind."""
    readme, source = unit.text("README.md"), "" if unit.is_app else "src/"
    newest = re.search(r"^## \[(\d[^\]]*)\]", unit.text("CHANGELOG.md"), re.MULTILINE)
    version = unit.pyproject["project"].get("version", "0")
    typed = f"{source}{unit.name.replace('-', '_')}/py.typed"
    missing = [s for s in README_SECTIONS if not re.search(rf"^## {s}\b", readme, re.MULTILINE)]
    licence = (unit.root / "LICENSE").read_text(encoding="utf-8")
    problems = {
        "README.md is missing": not readme,
        f"README.md has more than {PACKAGE_README_LINES} lines": (
            len(readme.splitlines()) > PACKAGE_README_LINES
        ),
        f"README.md has no section {', '.join(missing)}": missing and not unit.is_app,
        "README.md has no example in Python": "\n```python\n" not in readme and not unit.is_app,
        "LICENSE differs from the root's": unit.text("LICENSE") != licence,
        f"{typed} is missing": not (unit.root / unit.path / typed).is_file(),
        f"the newest entry of CHANGELOG.md is not {version}": not newest
        or Version(newest[1]) != Version(version),
    }
    return [f"{unit.path}: {problem}" for problem, found in problems.items() if found]


def examples(unit: Unit) -> list[str]:
    """Complain of a name that an example of the README uses and does not make: each runs alone."""
    return [
        f"{unit.path}: an example of README.md does not make {name}"
        for code in (() if unit.is_app else python_blocks(unit.text("README.md")))
        for name in unmade_names(code)
    ]


@cache
def all_modules(root: Path) -> Trees:
    """Map every module of all packages and apps to its path and tree."""
    return trees_of({path: tree for unit in units(root) for path, tree in unit.modules.items()})


def public_names(unit: Unit) -> list[str]:
    """Complain of a package without `__all__`, and of a name in one twice or undocumented."""
    trees = all_modules(unit.root)
    top = unit.name.replace("-", "_")
    found = []
    if not unit.is_app and (top not in trees or not exported(trees[top][1])):
        found.append(f"{unit.path}: {top}/__init__.py has no __all__")
    for path, tree in unit.modules.items():
        for name, times in Counter(exported(tree)).items():
            if times > 1:
                found.append(f"{path}: {name} is {times} times in __all__: list it once")
            known = definition(name, module_name(path), trees)
            if known is None or not known.docstring:
                problem = "cannot be found" if known is None else "has no docstring"
                found.append(f"{path}: {name} of __all__ {problem}")
    return found


def smoke_tests(unit: Unit) -> list[str]:
    """Complain of a package or app of which `nox -s quick` runs no test."""
    files = (unit.root / unit.path).glob("tests/test_*.py")
    marked = any("@pytest.mark.smoke\n" in file.read_text(encoding="utf-8") for file in files)
    return [] if marked else [f"{unit.path}: no test is marked smoke: mark a fast one"]


def strangers(root: Path) -> list[str]:
    """Complain of a file or folder that has no place at the top of the repository."""
    tops = {path.split("/")[0] for path in repository_files(root)}
    return [f"{t} has no place at the top" for t in sorted(tops - TOP_LEVEL) if t[0] != "."]


def shared_test_names(root: Path) -> list[str]:
    """Complain of two modules of one name among all tests: the second would not be imported."""
    paths = [p for p in python_files(root, tests=True) if "tests" in p.split("/")]
    count = Counter(Path(path).name for path in paths)
    return [
        f"{path}: another test module has this name, or hides behind a package"
        for path in paths
        if (count[Path(path).name] > 1 or path.endswith("/__init__.py"))
        and not path.endswith("/conftest.py")
    ]


RULES: list[Callable[[Unit], list[str]]] = [
    siblings_imported_and_declared, floors, others_declared, sibling_ranges,
    metadata, documents, examples, public_names, smoke_tests,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("unit", units(ROOT), ids=lambda unit: unit.path)
def test_each_package_and_app_keeps_the_rule(unit, rule):
    found = rule(unit)
    assert not found, "\n".join(found)


def test_the_root_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_nothing_else_lies_at_the_top():
    assert not strangers(ROOT)


def test_no_two_test_modules_share_a_name():
    assert not shared_test_names(ROOT)


PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "NAME"
version = "0.1.0"
requires-python = ">=3.11"
license = "Apache-2.0"
dependencies = [DEPENDENCIES]
"""
README = "# x\n```python\n```\n" + "".join(f"## {section}\n" for section in README_SECTIONS)
SIBLING = '"torch", "kenotron-dist>=0.1,<0.2"'
AXIS = '''"""x"""\n\n__all__ = ["Axis"]\n\nclass Axis:\n    """x"""\n'''
LINEAR = "from kenotron_dist import Axis"
INIT = '''"""x"""\nfrom .linear import Axis\n\nSIZE = 1\n"""x"""\n\n__all__ = ["Axis", "SIZE"]\n'''
PYPROJECT_TP = PYPROJECT.replace("NAME", "kenotron-tp").replace("DEPENDENCIES", SIBLING)
MODULE = "src/kenotron_tp/linear.py"
TOP = "src/kenotron_tp/__init__.py"


def plant(root: Path, path: str, files: dict[str, str]) -> Unit:
    """Write a package or an app below `root`, with what every one has, and `files`."""
    name = f"kenotron-{path.split('/')[1].removeprefix('kenotron-')}"
    usual = {
        "pyproject.toml": PYPROJECT.replace("NAME", name).replace("DEPENDENCIES", ""),
        "README.md": README,
        "CHANGELOG.md": "# Changelog\n\n## [0.1.0] - 2026-11-20\n",
        "LICENSE": "licence",
        f"src/{name.replace('-', '_')}/py.typed": "",
        "tests/test_it.py": "@pytest.mark.smoke\n",
    }
    for file, text in (usual | files).items():
        (root / path / file).parent.mkdir(parents=True, exist_ok=True)
        (root / path / file).write_text(text)
    return Unit(root, path)


def plant_two(root: Path, changes: dict[str, str]) -> Unit:
    """Write a lawful repository, kenotron-tp above kenotron-dist, then `changes` to kenotron-tp."""
    (root / "LICENSE").write_text("licence")
    plant(root, "packages/kenotron-dist", {"src/kenotron_dist/__init__.py": AXIS})
    lawful = {"pyproject.toml": PYPROJECT_TP, MODULE: LINEAR, TOP: INIT}
    return plant(root, "packages/kenotron-tp", lawful | changes)


def pyproject(old: str, new: str) -> dict[str, str]:
    """Change one thing in the lawful pyproject.toml of kenotron-tp."""
    assert old in PYPROJECT_TP
    return {"pyproject.toml": PYPROJECT_TP.replace(old, new)}


OFFENDERS = [
    (siblings_imported_and_declared, pyproject(SIBLING, ""), "linear.py:1: kenotron-tp imports"),
    (siblings_imported_and_declared, {MODULE: ""}, "declares kenotron-dist and never imports"),
    (
        floors,
        {MODULE: "def f():\n    import kenotron_pp"},
        "linear.py:2: kenotron-tp may not import",
    ),
    (floors, pyproject("kenotron-tp", "kenotron-new"), "give kenotron-new its floor"),
    (others_declared, {MODULE: "import einops"}, "einops is not in the dependencies"),
    (others_declared, {MODULE: "import yaml.nodes"}, "pyyaml is not in the dependencies"),
    (sibling_ranges, pyproject(">=0.1,<0.2", ">=0.2,<0.3"), "it is 0.1.0 in this tree"),
    (sibling_ranges, pyproject(">=0.1,<0.2", ">=0.1"), "is not of the form >=a,<b"),
    (sibling_ranges, pyproject(">=0.1,<0.2", "==0.1.0"), "is not of the form >=a,<b"),
    (metadata, pyproject('version = "0.1.0"', 'dynamic = ["version"]'), "needs a static version"),
    (metadata, pyproject(">=3.11", ">=3.9"), "needs requires-python"),
    (metadata, pyproject("hatchling.build", "setuptools.build_meta"), "needs build-backend"),
    (metadata, pyproject("Apache-2.0", "MIT"), "needs license"),
    (metadata, pyproject("kenotron-tp", "kenotron-tensor"), "needs name = kenotron-tp"),
    (documents, {"README.md": ""}, "README.md is missing"),
    (documents, {"README.md": README + "\n" * 140}, "more than 140 lines"),
    (documents, {"README.md": README.replace("## Why", "")}, "no section Why"),
    (documents, {"README.md": README.replace("python", "")}, "no example in Python"),
    (examples, {"README.md": "```python\nimport x\n\nprint(x, y)\n```\n"}, "does not make y"),
    (documents, {"LICENSE": "another"}, "LICENSE differs"),
    (
        documents,
        {"CHANGELOG.md": "## [0.0.9] - 2026-01-01\n## [0.1.0] - 2025-01-01"},
        "newest entry",
    ),
    (documents, {"CHANGELOG.md": "## Unreleased"}, "newest entry"),
    (documents, pyproject("kenotron-tp", "kenotron-other"), "kenotron_other/py.typed is missing"),
    (public_names, {TOP: ""}, "has no __all__"),
    (public_names, {TOP: INIT.replace('"SIZE"]', '"SIZE", "Axis"]')}, "Axis is 2 times in __all__"),
    (smoke_tests, {"tests/test_it.py": ""}, "no test is marked smoke"),
    (public_names, {TOP: INIT.replace('SIZE = 1\n"""x"""', "SIZE = 1")}, "SIZE of __all__ has no"),
    (public_names, {MODULE: "class Axis:\n    x = 1"}, "Axis of __all__ has no docstring"),
    (public_names, {MODULE: "AXES = 1, 2\nAxis = int"}, "Axis of __all__ has no docstring"),
    (public_names, {MODULE: ""}, "Axis of __all__ cannot be found"),
    (public_names, {MODULE: "from kenotron_dist.gone import Axis"}, "Axis of __all__ cannot be"),
]


@pytest.mark.parametrize(("rule", "changes", "words"), OFFENDERS)
def test_a_planted_offender_is_found(rule, changes, words, tmp_path):
    found = rule(plant_two(tmp_path, changes))
    assert any(words in complaint for complaint in found), found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_lawful_packages_and_apps_are_left_in_peace(rule, tmp_path):
    package = plant_two(tmp_path, {})
    source = '"""x"""\nfrom kenotron_tp import SIZE\n__all__ = ["SIZE"]\n'
    files = {
        "pyproject.toml": PYPROJECT.replace("NAME", "kenotron-train").replace(
            "DEPENDENCIES", '"kenotron-tp>=0.1,<0.2", "pyyaml"'
        ),
        "kenotron_train/__init__.py": source,
        "kenotron_train/cli.py": "import yaml\nfrom . import SIZE",
        "kenotron_train/py.typed": "",
    }
    app = plant(tmp_path, "apps/train", files)
    assert [unit.path for unit in units(tmp_path)] == [
        "packages/kenotron-dist", "packages/kenotron-tp", "apps/train"
    ]  # fmt: skip
    assert rule(package) == [] and rule(app) == []


def test_an_app_keeps_to_its_floor(tmp_path):
    files = {"kenotron_generate/load.py": "from kenotron_optim import Zero1"}
    found = floors(plant(tmp_path, "apps/generate", files))
    assert "load.py:1: kenotron-generate may not import kenotron-optim" in found[0]


def test_a_stranger_at_the_top_and_a_shared_test_name_are_found(tmp_path):
    for path in ("notes/a.md", ".ci/run", "tests/test_a.py", "apps/train/tests/test_a.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert strangers(tmp_path) == ["notes has no place at the top"]
    assert len(shared_test_names(tmp_path)) == 2
    (tmp_path / "apps/train/tests/test_a.py").rename(tmp_path / "apps/train/tests/test_b.py")
    assert shared_test_names(tmp_path) == []
    (tmp_path / "apps/train/tests/__init__.py").write_text("")
    assert len(shared_test_names(tmp_path)) == 1


def test_no_two_packages_export_one_name() -> None:
    owners: dict[str, list[str]] = {}
    for unit in units(ROOT):
        if unit.is_app:
            continue
        top = unit.name.replace("-", "_")
        for name in exported(all_modules(ROOT)[top][1]):
            owners.setdefault(name, []).append(top)
    twice = {name: each for name, each in owners.items() if len(each) > 1 and name != "main"}
    assert not twice, f"give one of the two another name: {twice}"
