"""Pages of the documentation site, gathered from READMEs, guides and docstrings.

``python tests/site_pages.py FOLDER`` writes ``FOLDER/pages`` and ``FOLDER/mkdocs.yml``, from which
mkdocs builds the site: ``nox -s docs``. A page lies where its document lies in the repository, so
links between documents stay. A file that is no document and that a page links to becomes a page.
``--built`` looks for the public names in the built site, and for what it loads from elsewhere.
"""

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import api
from packaging.version import Version
from test_rooms import ROOT

DOCS = "apps/train/docs"
MOVED = {f"{DOCS}/same-numbers.md": "index.md", "README.md": "start.md"}
"""Documents that lie elsewhere in the site; no folder may have two pages called index."""
ASSETS = ".svg", ".js", ".css"
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
MARKS = re.compile(r"^(```\w+) .*$", re.MULTILINE)
"""Words that say why no test runs a block."""
LANGUAGES = {"": "text", ".yml": "yaml", ".md": "markdown"}


def place(path: str) -> str:
    """Return where a file of the repository lies in the site; mkdocs leaves out dot files."""
    shown = path.removeprefix(".")
    if path.endswith((".md", *ASSETS)):
        return MOVED.get(path, shown)
    return f"{shown}.md"


def documents(root: Path = ROOT) -> list[str]:
    """List the documents that become pages."""
    patterns = ("*.md", ".github/*.md", "tests/*.md", "apps/*/*.md", "packages/*/*.md")
    patterns += (f"{DOCS}/*.md", "apps/*/configs/*/*.md", "apps/*/examples/**/*.md")
    found = [file for each in patterns for file in sorted(root.glob(each))]
    return [file.relative_to(root).as_posix() for file in found]


def target_of(document: str, link: str, root: Path = ROOT) -> str:
    """Return the file of the repository that a document links to; of a folder, its README."""
    path = os.path.normpath(f"{os.path.dirname(document)}/{link}".lstrip("/"))
    return f"{path}/README.md" if (root / path).is_dir() else path


def with_links(document: str, text: str, targets: set[str]) -> str:
    """Rewrite the links of a document for its place in the site; add what they name to targets."""

    def moved(found: re.Match[str]) -> str:
        target = target_of(document, found[2])
        targets.add(target)
        path = os.path.relpath(place(target), os.path.dirname(place(document)) or ".")
        return f"{found[1]}{path}{found[3] or ''}"

    parts = FENCE.split(text)
    return "".join(
        MARKS.sub(r"\1", p) if i % 2 else LINK.sub(moved, p) for i, p in enumerate(parts)
    )


def pages(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield each page of the site: its place and its text."""
    listed = documents(root)
    targets: set[str] = set()
    for path in listed:
        yield place(path), with_links(path, (root / path).read_text(encoding="utf-8"), targets)
    yield "benchmarks.md", with_links("benchmarks.md", benchmarks(root), targets)
    for path in sorted(targets - {*listed}):
        if path.endswith(ASSETS):
            yield place(path), (root / path).read_text(encoding="utf-8")
        elif (root / path).is_file():
            yield place(path), source_page(path, (root / path).read_text(encoding="utf-8"))
    for unit in api.documented_packages(root):
        yield f"api/{unit.name}.md", api.page(unit)


def benchmarks(root: Path = ROOT) -> str:
    """List the committed records of benchmarks, with their dates."""
    lines = [
        "# Benchmarks",
        "",
        "Records as they were written, from CPUs; [GPU.md](tests/GPU.md) has those of a GPU.",
        "`nox -s bench-tp`, and so on, measure again.",
        "",
        "| record | date | torch | commit |",
        "|---|---|---|---|",
    ]
    for file in sorted(root.glob("*/*/benchmarks/*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        about = record[0] if isinstance(record, list) else record
        path = file.relative_to(root).as_posix()
        facts = [about.get(key, "") for key in ("date", "torch")] + [about.get("commit", "")[:7]]
        lines.append(f"| [{path}]({path}) | {' | '.join(facts)} |")
    return "\n".join(lines) + "\n"


def source_page(path: str, text: str) -> str:
    """Show a file as it is; the search leaves it out."""
    language = LANGUAGES.get(Path(path).suffix, Path(path).suffix[1:])
    return f"---\nsearch: {{exclude: true}}\n---\n\n# `{path}`\n\n````{language}\n{text}````\n"


def navigation(root: Path = ROOT) -> list[dict]:
    """List the pages in the order of the menu."""
    guides = {name: [f"{DOCS}/{each}.md" for each in names] for name, names in GUIDES.items()}
    units = api.units(root)
    examples = [each for each in documents(root) if "/examples/" in each]
    return [
        {"Start": ["index.md", {"Install and train": "start.md"}, f"{DOCS}/first-training.md"]},
        *({name: each} for name, each in guides.items()),
        *([{"Examples": examples}] if examples else []),
        {"Packages": [{u.name: place(f"{u.path}/README.md")} for u in units]},
        {"API": [{u.name: f"api/{u.name}.md"} for u in api.documented_packages(root)]},
        {"Known models": ["apps/train/configs/known/README.md"]},
        {"Results": [f"{DOCS}/standing.md", "tests/GRID.md", "benchmarks.md", *RESULTS]},
        {
            "Project": [
                "CONTRIBUTING.md",
                "github/SECURITY.md",
                "github/AGENTS.md",
                "github/RELEASING.md",
                {"Changes": [{u.name: place(f"{u.path}/CHANGELOG.md")} for u in units]},
            ]
        },
    ]


RESULTS = "tests/GPU.md", "tests/VERSIONS.md"
GUIDES = {
    "Tutorials": (
        "parallelism",
        "choosing-a-layout",
        "planning",
        "any-model",
        "adapters",
        "extending",
        "widths",
        "doremi",
    ),
    "How to": (
        "data",
        "schedules",
        "evaluating",
        "watching",
        "stopping",
        "elastic",
        "reproducible",
        "launching",
        "gpus",
    ),
    "Problems": ("questions", "debugging"),
    "Migrating": ("migrating", "from-trainer", "from-torchtitan"),
    "Reference": ("configuration", "flags", "formats", "any-model-families"),
}
"""Sections of the menu, and the guides in them."""


def write(folder: Path, root: Path = ROOT) -> None:
    """Write the pages, and the settings that name them."""
    shutil.rmtree(folder / "pages", ignore_errors=True)
    for name, text in pages(root):
        file = folder / "pages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    shutil.copytree(root / DOCS / "assets", folder / "pages/assets")
    project = tomllib.loads((root / "apps/train/pyproject.toml").read_text())["project"]
    site = folder / "site"
    site.mkdir(exist_ok=True)
    versions = sorted({project["version"], *(each.name for each in site.glob("*/"))}, key=Version)
    listed = [{"version": each, "title": each, "aliases": []} for each in reversed(versions)]
    (site / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
    newest = f'<meta http-equiv="refresh" content="0; url={versions[-1]}/index.html">\n'
    (site / "index.html").write_text(newest, encoding="utf-8")
    settings = {
        "INHERIT": os.path.relpath(root / DOCS / "mkdocs.yml", folder),
        "docs_dir": "pages",
        "site_dir": f"site/{project['version']}",
        "copyright": f"Kénotron {project['version']}, Apache-2.0",
        "nav": navigation(root),
    }
    (folder / "mkdocs.yml").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def complaints(folder: Path, root: Path = ROOT) -> list[str]:
    """List public names that the built pages do not have, and what they load from elsewhere."""
    built = "".join(file.read_text(encoding="utf-8") for file in folder.glob("site/*/**/*.html"))
    found = [d for unit in api.documented_packages(root) for d in api.public_definitions(unit)]
    names = [d.module if api.is_module(d) else f"{d.module}.{d.name}" for d in found]
    loaded = re.findall(
        r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="?(?:https?:)?//[^>]*>', built
    )
    return [name for name in names if f'id="{name}"' not in built] + loaded


if __name__ == "__main__":
    if "--built" in sys.argv:
        found = complaints(Path(sys.argv[1]))
        sys.exit(f"not in the site, or not of it: {found}" if found else 0)
    write(Path(sys.argv[1]).resolve())
