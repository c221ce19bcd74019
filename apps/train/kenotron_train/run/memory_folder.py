"""The folder of copies in memory: its name, its hosts, and whether it has the newest save.

It is in a folder of ``checkpoints.memory_path``, and named after the run's folder and a number that
this folder holds: copies of another run, or of one that was removed, are never read.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from kenotron_ckpt import (
    CheckpointsConfig,
    HostCopies,
    hosts_of,
    is_url,
    latest_step,
    newest_save,
    on_each,
    on_first,
    replace_text,
)
from kenotron_dist import Mesh
from kenotron_train.run.own_folder import is_step_of

OWNER = "memory_id"
"""File of the run's folder, and of the one in memory, with the number that both have."""


@dataclass(frozen=True)
class MemoryFolder:
    """Folder in memory of a run."""

    path: Path
    """The same on all hosts."""
    hosts: HostCopies | None
    """Copies of the hosts where there are several; None: all ranks see one folder."""

    def newest(self, mesh: Mesh) -> tuple[tuple[int, int] | None, str]:
        """Return generation and step of the newest copy, and a remark on later ones.

        Collective over the mesh.
        """
        if self.hosts is not None:
            return self.hosts.newest()
        found = on_first(mesh, lambda: newest_save(self.path))
        return (tuple(found) if found else None), ""


def memory_folder(section: CheckpointsConfig, mesh: Mesh) -> MemoryFolder | None:
    """Make the folder in memory of the run in ``checkpoints_path``; None: it has none.

    Those of earlier runs there are removed. Collective over the mesh.

    Raises:
        ValueError: ``memory_path`` is no folder.
        OSError: it cannot be written.
    """
    if section.memory_every is None:
        return None
    number = on_first(mesh, lambda: _number(Path(section.checkpoints_path)))
    on_each(mesh, lambda: _make(section, number))
    path = _base(section) / f"{_prefix(section)}{number}"
    hosts = hosts_of(path, mesh)

    def tidy() -> None:
        for each in _folders(section):
            if each != path:
                shutil.rmtree(each, ignore_errors=True)
        replace_text(path / OWNER, number + "\n")

    on_each(mesh, lambda: tidy() if hosts.leads(mesh.rank) else None)
    return MemoryFolder(path, HostCopies(path, mesh, hosts) if hosts.count > 1 else None)


def newer_in_memory(
    copy: tuple[int, int] | None,
    memory: Path,
    checkpoints: CheckpointsConfig,
    url: str | None,
    given: str | None,
) -> tuple[bool, str]:
    """Return whether memory has a later save of this run than the place to resume from.

    That of a later start is the later one, whatever its step is: a host may have copies of a start
    that another one has superseded.

    Args:
        copy: the newest copy, of ``MemoryFolder.newest``.
        memory: the folder.
        checkpoints: the section.
        url: that the run uploads to.
        given: the place.

    Returns:
        The answer, and a remark on a copy that is not taken.
    """
    if copy is None:
        return False, ""
    if given is None or not is_own(checkpoints, url, given) or (own := newest_save(given)) is None:
        return True, ""
    if copy > own or copy[1] <= own[1]:
        return copy > own, ""
    return False, (
        f"; passed over {memory}: generation {copy[0]} made its copy of step {copy[1]}, and "
        f"generation {own[0]} has saved step {own[1]} since"
    )


def is_own(checkpoints: CheckpointsConfig, url: str | None, given: str) -> bool:
    """Return whether a place has checkpoints of this run: its folder, a step of it, its URL."""
    if is_url(given):
        return url is not None and f"{given}/".startswith(f"{url}/")
    return is_step_of(Path(given), Path(checkpoints.checkpoints_path))


def has_copies(section: CheckpointsConfig) -> bool:
    """Return whether there is a complete copy in memory of the run in ``checkpoints_path``."""
    return any(latest_step(each) is not None for each in _folders(section))


def _folders(section: CheckpointsConfig) -> list[Path]:
    return sorted(_base(section).glob(f"{_prefix(section)}*"))


def _prefix(section: CheckpointsConfig) -> str:
    run = str(Path(section.checkpoints_path).resolve())
    return f"kenotron-{hashlib.sha256(run.encode()).hexdigest()[:16]}-"


def _base(section: CheckpointsConfig) -> Path:
    """Return the folder for all runs; variables of the environment may differ by host."""
    return Path(os.path.expandvars(section.memory_path))


def _number(run: Path) -> str:
    """Return the number of a run's folder, which is made where it is not there. On one rank."""
    try:
        return (run / OWNER).read_text().strip()
    except FileNotFoundError:
        number = secrets.token_hex(8)
        run.mkdir(parents=True, exist_ok=True)
        replace_text(run / OWNER, number + "\n")
        return number


def _make(section: CheckpointsConfig, number: str) -> None:
    base = _base(section)
    if not base.is_dir():
        raise ValueError(
            f"checkpoints.memory_path: {section.memory_path} was given; it must be a folder that "
            "is there, in memory: /dev/shm on Linux"
        )
    (base / f"{_prefix(section)}{number}").mkdir(mode=0o700, exist_ok=True)
