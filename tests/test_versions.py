"""``VERSIONS.md``: it has every package, with what that declares, and no failures; its script."""

import pytest
import version_table
from packaging.requirements import Requirement
from packaging.version import Version
from test_packages import units
from test_rooms import ROOT
from version_table import SECTIONS, Row, counts, declared, main, rows, write

UNITS = {unit.name: unit.path for unit in units(ROOT)}
PACKAGES = [name for name, path in UNITS.items() if path.startswith("packages/")]
XML = '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="4" /></testsuites>'
ROW = Row("kenotron-tp", "3.11.2", "2.11.0", "pytest 9.0.0", "7", "0", "1", "2026-11-22", "abc")


@pytest.mark.parametrize("section", SECTIONS)
def test_every_package_was_tested_and_passed(section):
    found = rows(section)
    missing = sorted(set(PACKAGES) - set(found))
    assert not missing, f"run nox -s tests-{section}: {missing} were not tested"
    assert {row.package: row.failed for row in found.values() if row.failed != "0"} == {}


@pytest.mark.parametrize("package", rows("oldest"))
def test_what_was_tested_as_oldest_is_what_is_declared(package):
    tested = rows("oldest")[package].versions
    bounds = {r.name: r.specifier for r in map(Requirement, declared(UNITS[package]))}
    assert set(tested) == set(bounds)
    for name, specifiers in bounds.items():
        lowest = [Version(each.version) for each in specifiers if each.operator == ">="]
        release = Version(tested[name]).release
        assert any(release[: len(each.release)] == each.release for each in lowest), (
            f"{package}: tested with {name} {tested[name]}, declared {specifiers}"
        )


def test_a_row_takes_the_place_of_the_last_one_and_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(version_table, "TABLE", tmp_path / "VERSIONS.md")
    (tmp_path / "VERSIONS.md").write_text("# Versions\n\nText.\n")
    other = Row(**{**vars(ROW), "package": "kenotron-dist", "others": "", "failed": "?"})
    later = Row(**{**vars(ROW), "failed": "3"})
    for section, row in (("newest", ROW), ("oldest", ROW), ("oldest", other)):
        write(section, row)
    assert main("oldest") == 1 and main("newest") == 0
    write("newest", later)
    assert rows("oldest") == {"kenotron-tp": ROW, "kenotron-dist": other}
    assert rows("newest") == {"kenotron-tp": later} and main("newest") == 1
    assert (tmp_path / "VERSIONS.md").read_text().startswith("# Versions\n\nText.\n\n## Oldest\n")
    assert other.versions == {"torch": "2.11.0"} and ROW.versions["pytest"] == "9.0.0"


def test_errors_count_as_failures_and_a_run_without_a_result_as_unknown(tmp_path):
    (tmp_path / "a.xml").write_text(XML)
    assert counts(tmp_path / "a.xml") == {"passed": "2", "failed": "3", "skipped": "4"}
    assert set(counts(tmp_path / "none.xml").values()) == {"?"}
