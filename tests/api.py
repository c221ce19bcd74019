"""The public names of each package: ``public_names.txt``, and the pages of the API in the site.

``python tests/api.py`` writes the file again: a name comes or goes knowingly.
"""

import ast
import textwrap
from itertools import groupby
from pathlib import Path

from definitions import Found, definition, exported
from test_packages import Unit, all_modules, units
from test_rooms import PUBLIC_MODULES, ROOT

NAMES = ROOT / "tests/public_names.txt"
WIDTH = 96


def documented_packages(root: Path = ROOT) -> list[Unit]:
    """List the packages and programs that have public names, and so a page each."""
    return [unit for unit in units(root) if any(public_modules(unit).values())]


def public_modules(unit: Unit) -> dict[str, list[str]]:
    """Map the package and its public modules to their names."""
    trees, top = all_modules(unit.root), unit.name.replace("-", "_")
    modules = [top, *(name for name in PUBLIC_MODULES if name.startswith(f"{top}."))]
    return {m: sorted(exported(trees[m][1]), key=str.lower) for m in modules}


def public_definitions(unit: Unit) -> list[Found]:
    """List the public names where they are defined, each once, by module."""
    trees = all_modules(unit.root)
    found = [definition(n, m, trees) for m, names in public_modules(unit).items() for n in names]
    once = {(each.module, each.name): each for each in found if each}
    return sorted(once.values(), key=lambda each: (each.module, each.name.lower()))


def is_module(found: Found) -> bool:
    """Say whether a public name is a module."""
    return isinstance(found.nodes[0], ast.Module)


def names(root: Path = ROOT) -> str:
    """Write the names of all packages, by the module that they are imported from."""
    return "".join(
        textwrap.fill(f"{module}: {', '.join(found)}", WIDTH, subsequent_indent="    ") + "\n"
        for unit in documented_packages(root)
        for module, found in public_modules(unit).items()
    )


def page(unit: Unit) -> str:
    """Write the page of one package, which mkdocstrings fills with signatures and docstrings."""
    top, *more = public_modules(unit)
    lines = [
        f"# {top}",
        "",
        f"The names of `from {top} import ...`, by the module that defines them. The package's",
        f"[README](../{unit.path}/README.md) says what they are for.",
    ]
    if more:
        lines += ["", f"Public modules: {', '.join(f'`{each}`' for each in more)}."]
    for module, found in groupby(public_definitions(unit), key=lambda each: each.module):
        members = [each.name for each in found if not is_module(each)]
        lines += ["", f"::: {module}", "    options:", f"      members: {members}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    NAMES.write_text(names(), encoding="utf-8")
