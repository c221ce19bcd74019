"""Rules of a release, on planted offenders; its checksums and its index."""

import re
import subprocess
import tarfile
import textwrap
import zipfile
from dataclasses import replace
from io import BytesIO

import pytest
import release
from release import Release
from test_packages import units
from test_rooms import ROOT

TAG = "kenotron-tp-v0.1.0"
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-11-20\n\n- First.\n"
METADATA = b"Metadata-Version: 2.4\nName: kenotron-tp\nVersion: 0.1.0\n\nText.\n"


@pytest.fixture
def lawful(tmp_path):
    folder = tmp_path / "packages/kenotron-tp"
    (folder / "src").mkdir(parents=True)
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    return Release(folder, "packages/kenotron-tp", "kenotron-tp", "0.1.0")


def unchanged(tag, paths):
    return []


def changed(tag, paths):
    return ["packages/kenotron-tp/src/kenotron_tp/linear.py"]


def tagged(each, *, here=False, tag=TAG):
    tags = frozenset([tag])
    return replace(each, tags=tags, here=tags if here else frozenset())


def test_a_lawful_package_may_be_released(lawful):
    for each in (lawful, tagged(lawful), tagged(lawful, here=True)):
        assert not release.rules(each, unchanged) and not release.misplaced_tags([each])
    assert not release.rules(lawful, changed)
    assert lawful.sources == ["packages/kenotron-tp/src", "packages/kenotron-tp/pyproject.toml"]


def test_a_version_is_dated_in_its_changelog(lawful):
    for text in ("# Changelog\n", CHANGELOG.replace(" - 2026-11-20", "")):
        (lawful.folder / "CHANGELOG.md").write_text(text)
        (found,) = release.rules(lawful, unchanged)
        assert found.startswith("kenotron-tp 0.1.0: packages/kenotron-tp/CHANGELOG.md has no dated")
        assert "write '## [0.1.0] - YYYY-MM-DD'" in found


def test_a_version_is_released_once(lawful):
    (found,) = release.rules(tagged(lawful), changed)
    assert found == (
        f"kenotron-tp 0.1.0: 1 files differ from the tag {TAG} "
        "(packages/kenotron-tp/src/kenotron_tp/linear.py, ...), and a version is released once: "
        "raise version in packages/kenotron-tp/pyproject.toml, with an entry in "
        "packages/kenotron-tp/CHANGELOG.md"
    )
    raised = replace(tagged(lawful), version="0.1.1")
    (lawful.folder / "CHANGELOG.md").write_text(CHANGELOG.replace("0.1.0", "0.1.1"))
    assert not release.rules(raised, changed)


def test_what_is_tagged_has_nothing_unreleased(lawful):
    text = CHANGELOG.replace(
        "[Unreleased]\n", "[Unreleased]\n\n### Added\n\n- More,\n  much.\n- x\n"
    )
    (lawful.folder / "CHANGELOG.md").write_text(text)
    assert not release.rules(tagged(lawful), unchanged)
    (found,) = release.rules(tagged(lawful, here=True), unchanged)
    assert "has 2 entries under Unreleased: move them to the version" in found
    assert release.state(lawful, unchanged) == (
        "kenotron-tp 0.1.0: no tag yet, 2 entries under Unreleased"
    )


def test_a_tag_has_the_version_of_its_commit(lawful):
    wrong = tagged(lawful, here=True, tag="kenotron-tp-v0.2.0")
    (found,) = release.misplaced_tags([wrong])
    assert found.startswith("kenotron-tp 0.1.0: the tag kenotron-tp-v0.2.0 is on this commit")
    assert found.endswith("delete the tag, or change the version")
    unknown = tagged(lawful, here=True, tag="kenotron-tpp-v0.1.0")
    (found,) = release.misplaced_tags([unknown])
    assert found == "tag kenotron-tpp-v0.1.0: no package has this name: tag one of kenotron-tp"


def test_the_last_tag_is_the_highest_version(lawful):
    tags = frozenset(f"kenotron-{rest}" for rest in ("tp-v0.9.0", "tp-v0.10.0", "ep-v0.11.0"))
    asked = []
    state = release.state(replace(lawful, tags=tags), lambda tag, _: asked.append(tag) or ["a"])
    assert asked == ["kenotron-tp-v0.10.0"] and "1 files since kenotron-tp-v0.10.0" in state


def build(folder, wheel="kenotron_tp/__init__.py", metadata=METADATA):
    folder.mkdir()
    with zipfile.ZipFile(folder / "kenotron_tp-0.1.0-py3-none-any.whl", "w") as file:
        file.writestr(wheel, "")
        file.writestr("kenotron_tp-0.1.0.dist-info/METADATA", metadata)
    with tarfile.open(folder / "kenotron_tp-0.1.0.tar.gz", "w:gz") as file:
        member = tarfile.TarInfo("kenotron_tp-0.1.0/PKG-INFO")
        member.size = len(metadata)
        file.addfile(member, BytesIO(metadata))
    return folder


def test_built_files_are_of_the_package(lawful, tmp_path):
    assert not release.wrong_files(lawful, build(tmp_path / "right"))
    (found,) = release.wrong_files(lawful, build(tmp_path / "outside", wheel="tests/a.py"))
    assert found.startswith("kenotron-tp 0.1.0: its wheel has tests/a.py, outside kenotron_tp: ")
    other = build(tmp_path / "name", metadata=METADATA.replace(b"-tp", b"-pp"))
    found = release.wrong_files(lawful, other)
    assert [text.split(":")[1] for text in found] == [
        " its wheel is of kenotron-pp 0.1.0", " its sdist is of kenotron-pp 0.1.0",
    ]  # fmt: skip
    (other / "kenotron_tp-0.1.0.tar.gz").rename(other / "kenotron_tp-0.2.0.tar.gz")
    (found,) = release.wrong_files(lawful, other)
    assert "'kenotron_tp-0.2.0.tar.gz'] were built: " in found


def test_two_builds_are_compared(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "same").write_text("a")
    assert not release.different(first, second)
    (first / "bytes").write_text("a")
    (second / "bytes").write_text("b")
    (second / "more").write_text("b")
    found = release.different(first, second)
    assert [text.split(":")[0] for text in found] == ["bytes", "more"]
    assert f"compare {first}/bytes with {second}/bytes" in found[0]


def test_sums_are_those_that_sha256sum_reads(tmp_path):
    (tmp_path / "sbom").mkdir()
    (tmp_path / "sbom/a b.json").write_text("{}")
    release.write_sums(tmp_path)
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout
    (tmp_path / "sbom/a b.json").write_text("[]")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    assert not release.not_ours(tmp_path / "new") and not release.not_ours(tmp_path)
    (tmp_path / "SHA256SUMS").write_text("")
    for place in (tmp_path, tmp_path / "SHA256SUMS"):
        assert release.not_ours(place).endswith("which replaces them: give an empty folder")
    for name in ("simple", "sbom"):
        (tmp_path / name).mkdir()
    assert not release.not_ours(tmp_path)


def test_an_index_has_links_with_hashes(lawful, tmp_path):
    dist = build(tmp_path / "dist")
    (dist / "kenotron_tp-0.1.0rc1.tar.gz").write_text("another version")
    index = release.write_index(dist, [lawful])
    assert '<a href="kenotron-tp/">kenotron-tp</a>' in (index / "index.html").read_text()
    page = (index / "kenotron-tp/index.html").read_text()
    for file in dist.glob("kenotron_tp-0.1.0[.-]*"):
        assert f'<a href="../../{file.name}#sha256={release.digest(file)}">{file.name}</a>' in page
    assert page.count("<a ") == 2


def test_each_package_of_this_tree_is_dated_in_its_changelog():
    paths = [unit.path for unit in units(ROOT)]
    found = release.releases(ROOT, paths, ROOT)
    assert len(found) == len(paths) and [each.path for each in found] == paths
    assert [
        text for each in found for text in release.rules(replace(each, tags=frozenset()), changed)
    ] == []


def test_the_workflow_publishes_without_a_token():
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    actions = re.findall(r"uses: (\S+)@(\S+)", text)
    assert actions and all(re.fullmatch(r"v\d+|release/v\d+", version) for _, version in actions)
    assert "secrets." not in text and "password" not in text and "\npermissions: {}\n" in text
    jobs = dict(re.findall(r"^  (\w+):\n((?:    .*\n|\n)+)", text.partition("\njobs:\n")[2], re.M))
    assert list(jobs) == ["build", "publish", "describe"]
    assert [name for name, job in jobs.items() if "id-token: write" in job] == ["publish"]
    assert "environment: pypi" in jobs["publish"] and "nox" not in jobs["publish"]
    script = re.search(r"        run: \|\n((?:          .*\n)+)", jobs["build"])[1]
    stem = subprocess.run(
        ["bash", "-euc", textwrap.dedent(script).partition("mkdir")[0] + 'echo "$name $stem"'],
        env={"TAG": TAG}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert stem == "kenotron-tp kenotron_tp-0.1.0\n"


def test_the_citation_is_that_of_the_program_that_trains():
    text = (ROOT / ".github/CITATION.cff").read_text(encoding="utf-8")
    fields = dict(re.findall(r"^([a-z-]+):[ ]?(.*)$", text, re.M))
    (train,) = release.releases(ROOT, ["apps/train"], ROOT)
    dates = dict(release.ENTRY.findall((train.folder / "CHANGELOG.md").read_text(encoding="utf-8")))
    assert {"cff-version", "message", "title", "authors"} <= fields.keys()  # those it must have
    assert fields["cff-version"] == "1.2.0" and fields["type"] == "software"
    assert fields["version"] == train.version and fields["date-released"] == dates[train.version]
    assert fields["license"] == "Apache-2.0" and re.search(r"^authors:\n  - name: \S", text, re.M)
