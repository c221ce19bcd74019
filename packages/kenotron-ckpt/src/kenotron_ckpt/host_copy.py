"""A save of which several hosts have parts: the files that each has, and fetching from there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kenotron_ckpt.file_moves import FileMove, move_bytes
from kenotron_ckpt.hosts import Hosts
from kenotron_ckpt.index import Manifest, Piece
from kenotron_dist import Mesh, gather_objects


@dataclass(frozen=True)
class HostCopy:
    """A save as the hosts have it. Files count where their manifest has the same checksum."""

    generation: int
    step: int
    seal: str
    files: int
    """Number of files of all ranks."""
    holders: dict[int, set[int]] = field(default_factory=dict)
    """Hosts that have a file in its full length, by its place in the manifest."""

    @property
    def is_whole(self) -> bool:
        """True where each file is on some host."""
        return len(self.holders) == self.files

    def __str__(self) -> str:
        return (
            f"the copy of step {self.step} of generation {self.generation}: {len(self.holders)} of "
            f"{self.files} files are on the hosts that are left"
        )


class Fetch:
    """Fetches pieces of files, and their headers, that this rank's host does not have."""

    def __init__(
        self,
        copy: HostCopy,
        manifest: Manifest,
        mesh: Mesh,
        hosts: Hosts,
        source: Path,
        target: Path,
    ) -> None:
        """Prepare fetching.

        Args:
            copy, manifest: what is read.
            mesh, hosts: the ranks that read.
            source: folder of each host that has what it holds.
            target: folder of each host for what is read there, with files of the right length.
        """
        self._mesh, self._hosts, self._source, self._target = mesh, hosts, source, target
        pieces = [piece for record in manifest.records.values() for piece in record.pieces]
        headers = {name: entry.bytes for name, entry in manifest.files.items()}
        for piece in pieces:
            headers[piece.file] = min(headers[piece.file], piece.offset)
        self._spans = [(name, 0, end) for name, end in headers.items()]
        self._spans += [(piece.file, piece.offset, piece.bytes) for piece in pieces]
        self._places = {span: place for place, span in enumerate(self._spans)}
        self._headers = {name: place for place, name in enumerate(headers)}
        names = dict(enumerate(manifest.files))
        self._holders = {names[number]: hosts for number, hosts in copy.holders.items()}
        self._there: set[tuple[int, int]] = set()  # host, place of the span

    def __call__(self, pieces: Iterable[Piece]) -> str:
        """Fetch them. Collective over the mesh; returns what failed on this rank."""
        mesh, hosts = self._mesh, self._hosts
        host = hosts.of[mesh.rank]
        lacking = [piece for piece in pieces if host not in self._holders[piece.file]]
        wanted = {self._places[each.file, each.offset, each.bytes] for each in lacking}
        wanted |= {self._headers[each.file] for each in lacking}
        own = sorted(place for place in wanted if (host, place) not in self._there)
        moves = []
        for rank, places in enumerate(gather_objects(own, mesh.world)):
            for place in places:
                if (key := (hosts.of[rank], place)) not in self._there:
                    self._there.add(key)
                    moves.append(self._move(place, rank))
        return move_bytes(moves, mesh, self._source, self._target)

    def _move(self, place: int, rank: int) -> FileMove:
        name, begin, nbytes = self._spans[place]
        ranks = [r for host in sorted(self._holders[name]) for r in self._hosts.ranks(host)]
        return FileMove(ranks[place % len(ranks)], rank, name, begin, nbytes)
