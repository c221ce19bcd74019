"""Where public names are defined, found in the sources alone: nothing is imported."""

import ast
import itertools
from dataclasses import dataclass
from itertools import pairwise

from test_rooms import imported_modules, module_name

Trees = dict[str, tuple[str, ast.Module]]
"""Module to its path and its tree."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Constant = ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Found:
    """One name, where it is defined."""

    name: str
    module: str
    path: str
    nodes: list[Definition | Constant | ast.Module]
    """More than one where a function is overloaded."""
    docstring: str | None


def exported(tree: ast.Module) -> list[str]:
    """List the names in `__all__`."""
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    return [name for value in values for name in ast.literal_eval(value)]


def definition(name: str, module: str, trees: Trees) -> Found | None:
    """Find `name` of `module`; None if it is not there.

    A name that is imported is followed to where it is defined, in any package of `trees`.
    """
    if module not in trees:
        return None
    path, tree = trees[module]
    nodes = [n for n in tree.body if isinstance(n, Definition) and n.name == name]
    if nodes:
        said = next(filter(None, map(ast.get_docstring, nodes)), None)
        return Found(name, module, path, [*nodes], said)
    bodies = [tree.body, *(n.body for n in tree.body if isinstance(n, ast.If))]
    for body in bodies:
        for node, said in documented_constants(body):
            if name in targets(node):
                return Found(name, module, path, [node], said)
    for node in itertools.chain(*bodies):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    single = ast.Module([ast.ImportFrom(node.module, [alias], node.level)], [])
                    source = next(imported_modules(path, ast.fix_missing_locations(single)))[0]
                    if source != f"{module}.{name}":
                        return definition(alias.name, source.rpartition(".")[0], trees)
    if f"{module}.{name}" in trees:
        path, tree = trees[f"{module}.{name}"]
        return Found(name, f"{module}.{name}", path, [tree], ast.get_docstring(tree))
    return None


def documented_constants(body: list[ast.stmt]) -> list[tuple[Constant, str | None]]:
    """List the assignments, each with the string on the line that follows it."""
    found = []
    for node, following in pairwise([*body, None]):
        if isinstance(node, Constant):
            value = following.value if isinstance(following, ast.Expr) else None
            is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
            found.append((node, value.value if is_text else None))
    return found


def targets(node: Constant) -> list[str]:
    """List the plain names that are assigned to."""
    nodes = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in nodes if isinstance(target, ast.Name)]


def trees_of(sources: dict[str, ast.Module]) -> Trees:
    """Map modules to their paths and trees; `sources` maps paths to trees."""
    return {module_name(path): (path, tree) for path, tree in sources.items()}
