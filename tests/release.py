"""Rules of a release, and its files besides the packages: `nox -s release`. It needs no torch.

A rule returns complaints that name package, version, rule and fix.
"""

from __future__ import annotations

import hashlib
import html
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email import message_from_bytes
from pathlib import Path

from nox_environments import project

Changed = Callable[[str, list[str]], list[str]]
"""(tag, paths) -> files below the paths that differ from the tag."""
ENTRY = re.compile(r"^## \[([^\]]*)\](?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)


@dataclass(frozen=True)
class Release:
    """A package or an app at the commit that is released."""

    folder: Path
    """Its folder, with pyproject.toml and CHANGELOG.md."""
    path: str
    """The same, from the root of the repository."""
    name: str
    version: str
    tags: frozenset[str] = field(default=frozenset(), repr=False)
    """All tags of the repository."""
    here: frozenset[str] = field(default=frozenset(), repr=False)
    """Tags of the commit."""

    @property
    def tag(self) -> str:
        """Return the tag of this version."""
        return f"{self.name}-v{self.version}"

    @property
    def stem(self) -> str:
        """Return what the names of its files begin with."""
        return f"{self.name.replace('-', '_')}-{self.version}"

    @property
    def sources(self) -> list[str]:
        """Return the paths whose files are installed, from the root of the repository."""
        code = "src" if (self.folder / "src").is_dir() else self.name.replace("-", "_")
        return [f"{self.path}/{code}", f"{self.path}/pyproject.toml"]

    def complaint(self, text: str) -> str:
        """Begin a complaint with the package and its version."""
        return f"{self.name} {self.version}: {text}"


def releases(tree: Path, folders: Iterable[str], repository: Path) -> list[Release]:
    """Read packages and apps.

    Args:
        tree: the files of the commit.
        folders: of the packages and apps, from the root of the repository.
        repository: the folder that git is asked in for tags.
    """
    tags = frozenset(git(repository, "tag", "--list", "kenotron-*"))
    here = frozenset(git(repository, "tag", "--points-at", "HEAD")) & tags
    found = []
    for path in folders:
        table = project(tree / path)
        found.append(Release(tree / path, path, table["name"], table["version"], tags, here))
    return found


def git(repository: Path, *words: str) -> list[str]:
    """Return the lines that a command of git prints."""
    command = ["git", "-C", str(repository), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def changed_since(repository: Path) -> Changed:
    """Return a function that asks git for files that differ between a tag and HEAD."""
    return lambda tag, paths: git(repository, "diff", "--name-only", tag, "HEAD", "--", *paths)


def unreleased(each: Release) -> list[str]:
    """Return the entries of the changelog that belong to no version."""
    text = (each.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("## [Unreleased]")
    return [line for line in re.split(r"^## ", rest, maxsplit=1, flags=re.M)[0].splitlines()
            if line.startswith("- ")]  # fmt: skip


def rules(each: Release, changed: Changed) -> list[str]:
    """Complain of a version that is not in its changelog, is used already, or is not its tag's."""
    changelog = f"{each.path}/CHANGELOG.md"
    text = (each.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    found = []
    if not dict(ENTRY.findall(text)).get(each.version):
        found.append(
            f"{changelog} has no dated entry of this version: write "
            f"'## [{each.version}] - YYYY-MM-DD', with what was under Unreleased"
        )
    if each.tag in each.tags and (files := changed(each.tag, each.sources)):
        found.append(
            f"{len(files)} files differ from the tag {each.tag} ({files[0]}, ...), and a version "
            f"is released once: raise version in {each.path}/pyproject.toml, with an entry in "
            f"{changelog}"
        )
    if each.tag in each.here and (entries := unreleased(each)):
        found.append(
            f"the tag {each.tag} is on this commit, and {changelog} has {len(entries)} entries "
            "under Unreleased: move them to the version, commit, and move the tag"
        )
    return [each.complaint(text) for text in found]


def misplaced_tags(all_of_them: list[Release]) -> list[str]:
    """Complain of a tag on the commit that is of another version, or of no package."""
    versions = {each.name: each for each in all_of_them}
    found = []
    for tag in sorted(all_of_them[0].here if all_of_them else ()):
        name, _, version = tag.rpartition("-v")
        if name not in versions:
            known = ", ".join(versions)
            found.append(f"tag {tag}: no package has this name: tag one of {known}")
        elif versions[name].version != version:
            found.append(
                versions[name].complaint(
                    f"the tag {tag} is on this commit, and a tag has the version of "
                    f"{versions[name].path}/pyproject.toml: delete the tag, or change the version"
                )
            )
    return found


def state(each: Release, changed: Changed) -> str:
    """Return what is new in a package since its last tag, in one line."""
    tags = [tag for tag in each.tags if tag.rpartition("-v")[0] == each.name]
    last = max(tags, key=lambda tag: [int(n) for n in re.findall(r"\d+", tag)], default="")
    since = f"{len(changed(last, each.sources))} files since {last}" if last else "no tag yet"
    return each.complaint(f"{since}, {len(unreleased(each))} entries under Unreleased")


def wrong_files(each: Release, folder: Path) -> list[str]:
    """Complain of built files that have another name, version or content than the package."""
    wanted = {f"{each.stem}.tar.gz", f"{each.stem}-py3-none-any.whl"}
    built = {file.name for file in folder.iterdir()}
    if built != wanted:
        return [each.complaint(f"{sorted(built)} were built: {sorted(wanted)} are released")]
    package = each.name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{each.stem}-py3-none-any.whl") as wheel:
        inside = wheel.namelist()
        texts = {"wheel": wheel.read(f"{each.stem}.dist-info/METADATA")}
    with tarfile.open(folder / f"{each.stem}.tar.gz") as sdist:
        member = sdist.extractfile(f"{each.stem}/PKG-INFO")
        texts["sdist"] = member.read() if member else b""
    found = [
        f"its wheel has {name}, outside {package}: change tool.hatch.build in {each.path}"
        for name in inside
        if name.split("/")[0] not in (package, f"{each.stem}.dist-info")
    ]
    for kind, text in texts.items():
        told = message_from_bytes(text)
        if (told["Name"], told["Version"]) != (each.name, each.version):
            found.append(
                f"its {kind} is of {told['Name']} {told['Version']}: name and version are those "
                f"of {each.path}/pyproject.toml"
            )
    return [each.complaint(text) for text in found]


def different(first: Path, second: Path) -> list[str]:
    """Name the files of two builds that have not the same bytes, or are in one only."""
    sums = [{file.name: digest(file) for file in folder.iterdir()} for folder in (first, second)]
    return [
        f"{name}: two builds of one commit differ, and a release is reproducible: compare "
        f"{first / name} with {second / name}"
        for name in sorted({*sums[0], *sums[1]})
        if sums[0].get(name) != sums[1].get(name)
    ]


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of all files in a folder, which `sha256sum --check` reads."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    lines = [f"{digest(file)}  {file.relative_to(folder).as_posix()}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def not_ours(folder: Path) -> str:
    """Complain of a folder whose content is not that of an earlier release: it is replaced."""
    ours = all((folder / name).exists() for name in ("SHA256SUMS", "simple", "sbom"))
    if ours or not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return ""
    return f"{folder} has other files than a release, which replaces them: give an empty folder"


def write_index(folder: Path, all_of_them: list[Release]) -> Path:
    """Write `simple/`, an index (PEP 503) of the files in a folder; returns its path."""
    index = folder / "simple"
    for each in all_of_them:
        files = sorted(folder.glob(f"{each.stem}[.-]*"))
        links = {f"../../{file.name}#sha256={digest(file)}": file.name for file in files}
        _write_page(index / each.name, links)
    _write_page(index, {f"{each.name}/": each.name for each in all_of_them})
    return index


def _write_page(folder: Path, links: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f'<a href="{html.escape(url)}">{html.escape(text)}</a><br>' for url, text in links.items()
    ]
    (folder / "index.html").write_text(
        "\n".join(["<!DOCTYPE html>", "<html><body>", *lines, "</body></html>", ""])
    )
