"""Hosts of a mesh: which ranks see one folder."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from kenotron_ckpt.collective_errors import on_each, on_first
from kenotron_dist import Mesh


@dataclass(frozen=True)
class Hosts:
    """Hosts of the ranks, numbered from 0 by their lowest rank."""

    of: tuple[int, ...]
    """Number of the host of each rank."""

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(set(self.of))

    def ranks(self, host: int) -> list[int]:
        """Return the ranks on a host, ascending; hosts are counted modulo their number."""
        return [rank for rank, each in enumerate(self.of) if each == host % self.count]

    def leads(self, rank: int) -> bool:
        """Return True for the lowest rank of each host."""
        return self.ranks(self.of[rank])[0] == rank

    def next_rank(self, rank: int) -> int:
        """Return the rank of the next host that stores copies of a rank's files.

        Hosts may have different numbers of ranks: one may serve several, or none.
        """
        own, others = self.ranks(self.of[rank]), self.ranks(self.of[rank] + 1)
        return others[own.index(rank) % len(others)]


def hosts_of(folder: Path, mesh: Mesh) -> Hosts:
    """Find which ranks see the same files in a folder, whose path may be that of several folders.

    Collective over the mesh. Raises OSError where a rank cannot write there.
    """
    token = on_first(mesh, lambda: secrets.token_hex(8))
    marks = [folder / f".seen-{token}-{rank}" for rank in range(mesh.world.size)]
    on_each(mesh, marks[mesh.rank].touch)
    firsts = on_each(mesh, lambda: next(n for n, mark in enumerate(marks) if mark.exists()))
    marks[mesh.rank].unlink(missing_ok=True)
    numbers = {first: number for number, first in enumerate(sorted({*firsts}))}
    return Hosts(tuple(numbers[first] for first in firsts))
