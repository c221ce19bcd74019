"""Print how far a change has to reach: files that name a specimen of each seam, takers of a config.

``python tests/seams.py``. A specimen is something that was added before: its like needs a change in
as many files. Tests, benchmarks and examples are left out, and the file that a specimen lives in is
counted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPECIMENS = {
    "a loss (multi-token prediction's, FurtherToken)": r"\bFurtherToken\b",
    "a loss (DoReMi's, DomainObjective)": r"\bDomainObjective\b",
    "a change of attention's scores (soft cap, Scoring.cap)": r"\bscoring\.cap\b",
    "a family (SmolLM3)": r"\b(SmolLM3\w*|smollm3)\b",
    "an optimizer (Muon, its config)": r"\bMuonConfig\b",
    "a policy of the step (SpikeGuard)": r"\bSpikeGuard\b",
    "a tracker (Weights & Biases)": r"\bimport wandb\b|\"wandb\"",
    "a storage (fsspec)": r"\bfsspec\b",
    "a stage of ZeRO (parameters)": r"\bcuts_parameters\b",
}


def sources() -> Iterator[Path]:
    """Every Python file that is installed."""
    for pattern in ("packages/*/src/**/*.py", "apps/*/kenotron_*/**/*.py"):
        yield from sorted(ROOT.glob(pattern))


def named_in(pattern: str, texts: Mapping[Path, str]) -> list[str]:
    """Return folder and name of the files that a pattern is found in."""
    files = [path for path, text in texts.items() if re.search(pattern, text)]
    return [f"{path.parts[-2]}/{path.name}" for path in files]


def config_takers(tree: ast.Module) -> list[str]:
    """Names of functions with an argument of type Config, and of classes with such a field."""
    found = []
    for node in ast.walk(tree):
        kinds: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            kinds = [each.annotation for each in arguments]
        elif isinstance(node, ast.ClassDef):
            kinds = [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]
        if any(re.search(r"\bConfig\b", ast.unparse(kind)) for kind in kinds if kind):
            found.append(node.name)
    return found


def area_of(name: str) -> str:
    """Area of a file, given its folder and name: what is about configs, or the road of a run."""
    folder = name.partition("/")[0]
    areas = {"kenotron_config": "kenotron-config", "kenotron_cost": "planner"}
    areas |= {"kenotron_plan": "planner", "verify": "verify"}
    return areas.get(folder, "training road")


def exported_names(source: str) -> set[str]:
    """List the names in `__all__`."""
    return {
        name
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }


def of_rooms(texts: Mapping[Path, str]) -> Iterator[str]:
    """Say the lines, files and names in ``__all__`` of every package and app."""
    rooms = [path.relative_to(ROOT).parts[:2] for path in texts]
    for room in dict.fromkeys(rooms):
        folder = ROOT.joinpath(*room)
        own = {path: text for path, text in texts.items() if path.is_relative_to(folder)}
        shortest = min(own, key=lambda path: (path.name != "__init__.py", len(path.parts)))
        lines = sum(text.count("\n") for text in own.values())
        public = len(exported_names(own[shortest]))
        yield f"  {'/'.join(room)}: {lines} lines, {len(own)} files, {public} public names"


def main() -> None:
    """Print the table."""
    texts = {path: path.read_text(encoding="utf-8") for path in sources()}
    lines = sum(text.count("\n") for text in texts.values())
    print(f"source: {lines} lines, {len(texts)} files", *of_rooms(texts), sep="\n")
    for name, pattern in SPECIMENS.items():
        files = named_in(pattern, texts)
        print(f"{name}: {len(files)} files: {', '.join(files)}")
    named = {"/".join(path.parts[-2:]): config_takers(ast.parse(t)) for path, t in texts.items()}
    print("a whole Config is taken, as an argument or a field, by")
    for area in dict.fromkeys(map(area_of, named)):
        found = {name: takers for name, takers in named.items() if takers and area_of(name) == area}
        print(
            f"  {area}: {sum(map(len, found.values()))} in {len(found)} files: {', '.join(found)}"
        )


if __name__ == "__main__":
    main()
