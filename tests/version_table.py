"""``VERSIONS.md``: the result of each package's tests with the oldest and the newest versions.

``python tests/version_table.py oldest packages/kenotron-tp RESULT.xml`` writes the row of one
package, in the environment that ran its tests. Without a package, the status is 1 where a row of
the section has failures.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "VERSIONS.md"
SECTIONS = ("oldest", "newest")
COUNTS = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Row:
    """The result of one package's tests with one set of versions."""

    package: str
    python: str
    torch: str
    others: str
    """``name version, name version, ...``: what the package declares next to torch."""
    passed: str
    failed: str
    skipped: str
    date: str
    commit: str

    @property
    def versions(self) -> dict[str, str]:
        """Versions of all that the package declares, by name."""
        pairs = (pair.split() for pair in self.others.split(", ") if pair)
        torch = {} if self.torch == "-" else {"torch": self.torch}
        return torch | dict(pairs)


def declared(package: str) -> list[str]:
    """Requirements of a package and of its extra ``test``, siblings left out."""
    project = _project(package)
    extra = project.get("optional-dependencies", {}).get("test", [])
    return [text for text in [*project["dependencies"], *extra] if not text.startswith("kenotron-")]


def name_of(requirement: str) -> str:
    """Name of a requirement without extras and bounds."""
    return re.split(r"[^\w.-]", requirement)[0]


def rows(section: str, text: str | None = None) -> dict[str, Row]:
    """Rows of a section of ``VERSIONS.md``, by package."""
    text = TABLE.read_text() if text is None else text
    part = re.search(rf"^## {section.title()}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^\| (kenotron-.*) \|$", part[1] if part else "", re.MULTILINE)
    found = (Row(*(cell.strip() for cell in re.split(r" ?\| ?", line))) for line in lines)
    return {row.package: row for row in found}


def counts(result: Path) -> dict[str, str]:
    """Numbers of tests in pytest's XML file; ``?`` where the run ended before it was written."""
    if not result.exists():
        return dict.fromkeys(COUNTS, "?")
    suite = ElementTree.parse(result).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {
        "passed": f"{total - failed - skipped}",
        "failed": f"{failed}",
        "skipped": f"{skipped}",
    }


def measured(package: str, result: Path) -> Row:
    """The row of a package, tested in this environment."""
    names = sorted({name_of(text) for text in declared(package)} - {"torch"}, key=str.lower)
    return Row(
        package=_project(package)["name"],
        python=platform.python_version(),
        torch=version("torch") if find_spec("torch") else "-",
        others=", ".join(f"{name} {version(name)}" for name in names),
        **counts(result),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        commit=_commit(),
    )


def write(section: str, row: Row) -> None:
    """Put a row into a section, in place of that of the same package."""
    found = {name: rows(name) for name in SECTIONS}
    found[section][row.package] = row
    before = TABLE.read_text().partition("\n## ")[0]
    TABLE.write_text(before + "".join(_section(name, found[name]) for name in SECTIONS))


def _section(name: str, found: dict[str, Row]) -> str:
    head = "| " + " | ".join(Row.__annotations__) + " |"
    rule = "|" + "---|" * len(Row.__annotations__)
    lines = [f"| {' | '.join(vars(found[package]).values())} |" for package in sorted(found)]
    return "\n".join([f"\n## {name.title()}\n", head, rule, *lines, ""])


def _commit() -> str:
    """The commit that was tested; this table itself may have changed since."""
    describe = ["git", "describe", "--always"]
    found = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changes = ["git", "diff", "--quiet", "HEAD", "--", ".", f":!{TABLE.relative_to(ROOT)}"]
    dirty = subprocess.run(changes, cwd=ROOT, capture_output=True).returncode
    return f"{found or 'unknown'}{'-dirty' if dirty else ''}"


def _project(package: str) -> dict:
    return tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]


def main(section: str, package: str = "", result: str = "") -> int:
    """Write the row of a package, or name the failures of a section; the exit status."""
    if package:
        write(section, measured(package, Path(result)))
        return 0
    bad = [row for row in rows(section).values() if row.failed != "0"]
    for row in bad:
        print(f"{row.package} with torch {row.torch}: {row.failed} failed", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
