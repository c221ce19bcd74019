"""Bytes of files between ranks whose folders are not shared, by the process group."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kenotron_ckpt.writer import as_bytes
from kenotron_dist import Mesh, all_to_all

CHUNK = 1 << 24
"""Bytes that a rank sends to another in one collective."""
_Span = tuple[str, int, int]  # file, first byte, bytes


@dataclass(frozen=True)
class FileMove:
    """Bytes of a file that one rank reads and another writes, at the same place of its own."""

    source: int
    target: int
    name: str
    begin: int
    nbytes: int


def move_bytes(moves: Sequence[FileMove], mesh: Mesh, source: Path, target: Path) -> str:
    """Carry out moves. Collective over the mesh.

    In each round every pair of ranks exchanges at most ``CHUNK`` bytes, all pairs in one
    all-to-all, so no rank waits for another one's order. A rank that cannot read or write takes
    part in the other rounds all the same.

    Args:
        moves: the same on all ranks.
        mesh: the ranks.
        source: folder that this rank reads from.
        target: folder that it writes to; files are made where they are not there.

    Returns:
        Reason why this rank could not read or write; empty: it could.
    """
    ranks, fault = range(mesh.world.size), ""
    totals: dict[tuple[int, int], int] = {}
    for move in moves:
        pair = move.source, move.target
        totals[pair] = totals.get(pair, 0) + move.nbytes
    sends = [_rounds(m for m in moves if (m.source, m.target) == (mesh.rank, r)) for r in ranks]
    arrivals = [_rounds(m for m in moves if (m.source, m.target) == (r, mesh.rank)) for r in ranks]
    for number in range(-(-max(totals.values(), default=0) // CHUNK)):
        going, coming = (
            [each[number] if number < len(each) else [] for each in rounds]
            for rounds in (sends, arrivals)
        )
        # Read what goes out, exchange it, write what has come.
        out = torch.empty(sum(map(_nbytes, going)), dtype=torch.uint8)
        try:
            _read(source, [span for spans in going for span in spans], out)
        except OSError as error:
            fault = fault or str(error)
        counts = [_nbytes(spans) for spans in going], [_nbytes(spans) for spans in coming]
        found = all_to_all(out.to(mesh.device), mesh.world, *counts).cpu()
        try:
            _write(target, [span for spans in coming for span in spans], found)
        except OSError as error:
            fault = fault or str(error)
    return fault


def _rounds(moves: Iterable[FileMove]) -> list[list[_Span]]:
    """Cut the moves of a pair of ranks into rounds of ``CHUNK`` bytes."""
    rounds: list[list[_Span]] = []
    room = 0
    for move in moves:
        begin, left = move.begin, move.nbytes
        while left:
            if not room:
                rounds.append([])
                room = CHUNK
            part = min(left, room)
            rounds[-1].append((move.name, begin, part))
            begin, left, room = begin + part, left - part, room - part
    return rounds


def _nbytes(spans: Iterable[_Span]) -> int:
    return sum(nbytes for _, _, nbytes in spans)


def _read(folder: Path, spans: Iterable[_Span], data: torch.Tensor) -> None:
    view = as_bytes(data)
    for name, begin, nbytes in spans:
        with (folder / name).open("rb", buffering=0) as file:
            got = os.preadv(file.fileno(), [view[:nbytes]], begin)
        if got != nbytes:
            raise OSError(f"{folder / name} ends at byte {begin + got}: it was cut off just now")
        view = view[nbytes:]


def _write(folder: Path, spans: Iterable[_Span], data: torch.Tensor) -> None:
    view = as_bytes(data)
    for name, begin, nbytes in spans:
        rest, view = view[:nbytes], view[nbytes:]
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            while rest:
                done = os.pwrite(handle, rest, begin)
                rest, begin = rest[done:], begin + done
        finally:
            os.close(handle)
