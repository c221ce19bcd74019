"""The documentation site: every document is a page with a place in the menu; links follow them."""

import ast
import os
import re

import api
import pytest
import site_pages
from python_examples import python_blocks
from test_rooms import ROOT, imported_modules, public_names, repository_files

GUIDES = [path for path in site_pages.documents() if path.startswith(site_pages.DOCS)]


def in_menu(entries):
    """List the pages of a menu."""
    for entry in entries:
        values = entry.values() if isinstance(entry, dict) else [entry]
        for value in values:
            yield from in_menu(value) if isinstance(value, list) else [value]


def test_every_document_is_a_page():
    found = {path for path in repository_files(ROOT) if path.endswith(".md")}
    templates = {path for path in found if "/templates/" in path}  # pages of folders that are made
    assert templates and {*site_pages.documents()} == found - templates


def test_every_page_is_in_the_menu_once():
    menu = [*in_menu(site_pages.navigation())]
    made = ["benchmarks.md", *(f"api/{unit.name}.md" for unit in api.documented_packages())]
    assert sorted(menu) == sorted([*map(site_pages.place, site_pages.documents()), *made])


def test_links_and_fences_are_those_of_the_site():
    targets = set()
    text = (
        "[a](../../../packages/kenotron-tp) ![b](pictures/zero.svg)\n[c](data.md#x) [d](#e)\n"
        "[f](same-numbers.md) [g](../../../.ci/run) [h](https://x.y/z.md)\n"
        "```bash network\n[i](data.md)\n```\n"
    )
    assert site_pages.with_links("apps/train/docs/gpus.md", text, targets) == (
        "[a](../../../packages/kenotron-tp/README.md) ![b](pictures/zero.svg)\n"
        "[c](data.md#x) [d](#e)\n"
        "[f](../../../index.md) [g](../../../ci/run.md) [h](https://x.y/z.md)\n"
        "```bash\n[i](data.md)\n```\n"
    )
    assert ".ci/run" in targets and "packages/kenotron-tp/README.md" in targets
    assert [*site_pages.with_links("README.md", "[a](LICENSE)", targets)][4:-1] == [*"LICENSE.md"]


def test_every_link_of_a_page_leads_to_a_page():
    written = dict(site_pages.pages())
    assert "LICENSE.md" in written and "tests/test_parity.py.md" in written
    lost = [
        f"{name}: {link}"
        for name, text in written.items()
        if not name.endswith((".py.md", ".json.md"))
        for part in site_pages.FENCE.split(text)[::2]
        for _, link, _ in site_pages.LINK.findall(part)
        if os.path.normpath(f"{os.path.dirname(name) or '.'}/{link}") not in written
    ]
    assert not lost


KEY = re.compile(
    r"`((?:general|parallelism|model|tokens|optimizer|checkpoints|logging|s3_upload|profiler)"
    r"(?:\.[a-z_]\w*)+)(?::[^`]*)?`"
)


@pytest.mark.parametrize("name", ["questions", "from-trainer", "from-torchtitan"])
def test_guides_name_keys_that_there_are(name):
    reference = (ROOT / site_pages.DOCS / "configuration.md").read_text(encoding="utf-8")
    known = {
        f"{section}.{key}"
        for section, body in re.findall(
            r"^## `([\w.]+)`.*?$(.*?)(?=^## |\Z)", reference, re.M | re.S
        )
        for key in re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)
    }
    text = (ROOT / site_pages.DOCS / f"{name}.md").read_text(encoding="utf-8")
    ours = "\n".join(line.split("|")[-2] if line[:1] == "|" else line for line in text.splitlines())
    found = {*KEY.findall(ours.replace(" x ", "` `"))}
    assert found and found <= known, found - known


@pytest.mark.parametrize("path", GUIDES)
def test_blocks_of_python_in_guides_parse_and_import_public_names(path):
    public = public_names(ROOT)
    for code in python_blocks((ROOT / path).read_text()):
        for name, _ in imported_modules("tests/a.py", ast.parse(code)):
            module, _, last = name.rpartition(".")
            assert module not in public or last in public[module], f"{path}: {name}"
