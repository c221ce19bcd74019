"""The public names of each package, made from their docstrings: ``packages/*/API.md``.

``python tests/api.py`` writes the files again.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

from definitions import (
    Constant,
    Definition,
    Found,
    Trees,
    definition,
    documented_constants,
    exported,
)
from test_packages import Unit, all_modules, units
from test_rooms import PUBLIC_MODULES, ROOT

WIDTH = 96


def documented_packages(root: Path = ROOT) -> list[Unit]:
    """List the packages, which have an ``API.md`` each."""
    return [unit for unit in units(root) if not unit.is_app]


def render(unit: Unit) -> str:
    """Write the page of one package: its names by module, with signatures and docstrings."""
    trees, top = all_modules(unit.root), unit.name.replace("-", "_")
    modules = [top, *(name for name in PUBLIC_MODULES if name.startswith(f"{top}."))]
    found = [definition(name, m, trees) for m in modules for name in exported(trees[m][1])]
    once = {(each.module, each.name): each for each in found if each}
    names = sorted(once.values(), key=lambda each: (each.module, each.name.lower()))
    lines = [
        f"# API of {unit.name}",
        "",
        "Made from the docstrings by `python tests/api.py`: do not edit it. The names are those of",
        f"`from {top} import ...`, by the module that has them.",
    ]
    if modules[1:]:
        lines += [
            "",
            "These modules are public too:",
            "",
            *(_import(m, trees) for m in modules[1:]),
        ]
    module = ""
    for each in names:
        if each.module != module:
            module = each.module
            lines += ["", f"## {module}", "", *_text(ast.get_docstring(trees[module][1]))]
        lines += ["", f"### {each.name}", "", *_entry(each)]
    return "\n".join(lines) + "\n"


def _import(module: str, trees: Trees) -> str:
    """Write how to import the names of a public module."""
    names = sorted(exported(trees[module][1]), key=str.lower)
    return f"- `from {module} import ...`: {', '.join(f'`{name}`' for name in names)}"


def _entry(found: Found) -> Iterator[str]:
    """Write one name: what its kind of definition says, then its docstring."""
    yield "```python"
    for node in found.nodes:
        if _is_overload(node):
            continue
        if isinstance(node, Constant):
            yield from _folded(ast.unparse(node))
        elif isinstance(node, Definition):
            yield from _signature(node)
        else:
            yield f"import {found.module}"
    yield "```"
    yield ""
    yield from _text(found.docstring)
    for node in found.nodes:
        if isinstance(node, ast.ClassDef):
            yield from _members(node)


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Write the public fields, properties and methods of a class."""
    fields = [(n, said) for n, said in documented_constants(node.body) if _is_public(_target(n))]
    if fields:
        yield ""
    for field, said in fields:
        text = f"- `{' '.join(ast.unparse(field).split())}`" + (f": {said}" if said else "")
        yield from textwrap.wrap(" ".join(text.split()), WIDTH, subsequent_indent="  ")
    for method in node.body:
        if isinstance(method, Definition) and (
            _is_public(method.name) or method.name in ("__init__", "__call__")
        ):
            said = ast.get_docstring(method)
            yield from ("", f"#### {node.name}.{method.name}", "", "```python")
            yield from _signature(method)
            yield "```"
            if said:
                yield ""
                yield from _text(said)


def _signature(node: Definition) -> list[str]:
    """Write the head of a definition with its decorators, in lines of at most ``WIDTH``."""
    head = [f"@{ast.unparse(each)}" for each in node.decorator_list]
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
        return [*head, f"class {node.name}({bases})" if bases else f"class {node.name}"]
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name}({ast.unparse(node.args)}){result}"
    if len(line) <= WIDTH:
        return [*head, line]
    return [
        *head,
        f"def {node.name}(",
        *(f"    {each}," for each in _arguments(node)),
        f"){result}",
    ]


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Write each argument with its type and default."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + [*args.defaults]
    found = [_argument(each, default) for each, default in zip(plain, defaults, strict=True)]
    if args.posonlyargs:
        found.insert(len(args.posonlyargs), "/")
    if args.vararg:
        found.append("*" + _argument(args.vararg, None))
    elif args.kwonlyargs:
        found.append("*")
    named = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found += [_argument(each, default) for each, default in named]
    return found + (["**" + _argument(args.kwarg, None)] if args.kwarg else [])


def _argument(each: ast.arg, default: ast.expr | None) -> str:
    text = each.arg + (f": {ast.unparse(each.annotation)}" if each.annotation else "")
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _text(docstring: str | None) -> list[str]:
    """Turn a docstring into Markdown: its indented parts stay as they are."""
    lines = inspect.cleandoc(docstring or "").replace("``", "`").splitlines()
    return [line.rstrip() for line in lines]


def _folded(code: str) -> list[str]:
    """Shorten an assignment of many lines to its first ones."""
    lines = textwrap.wrap(code, WIDTH, subsequent_indent="    ")
    return lines if len(lines) <= 4 else [*lines[:3], "    ..."]


def _target(node: Constant) -> str:
    first = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return first.id if isinstance(first, ast.Name) else "_"


def _is_overload(node: ast.AST) -> bool:
    return any(ast.unparse(each) == "overload" for each in getattr(node, "decorator_list", []))


def _is_public(name: str) -> bool:
    return not name.startswith("_")


if __name__ == "__main__":
    for unit in documented_packages():
        (unit.root / unit.path / "API.md").write_text(render(unit), encoding="utf-8")
