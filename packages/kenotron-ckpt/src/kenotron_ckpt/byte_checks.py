"""Division of checksum comparisons over ranks: the bytes a rank reads anyway, or its share.

A piece that some rank reads whole is hashed as it arrives there. The others, of which ranks read
rows or nothing, are dealt out to all ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from kenotron_ckpt.checksums import file_faults
from kenotron_ckpt.index import Manifest, Piece
from kenotron_ckpt.reader import Read
from kenotron_ckpt.store import Store
from kenotron_dist import Mesh, all_reduce

_IN_PART, _WHOLE = 1, 1 << 32
"""Amount of a piece that a rank reads; 0 is nothing. Of a record: wanted is ``_IN_PART``. The sum
over all ranks is at least ``_WHOLE`` where one reads it whole."""


def wanted_bytes(
    manifest: Manifest, names: Iterable[str], reads: Sequence[Read], mesh: Mesh
) -> tuple[list[str], list[Piece]]:
    """Return what all ranks together want, equal on every rank.

    Collective over the mesh: one all-reduce of 8 bytes for each record and each piece.

    Args:
        manifest: of the checkpoint, the same on every rank.
        names: of the records that this rank wants; all are in the manifest.
        reads: what this rank reads of them.
        mesh: the ranks that load.

    Returns:
        Sorted names of the records that some rank wants, and the pieces of these records that no
        rank reads whole.
    """
    records = manifest.records
    pieces = [piece for record in records.values() for piece in record.pieces]
    places = {id(piece): place for place, piece in enumerate(pieces, len(records))}
    own = [0] * (len(records) + len(pieces))
    positions = {name: place for place, name in enumerate(records)}
    for name in names:
        own[positions[name]] = _IN_PART
    for read in reads:
        place = places[id(read.piece)]
        own[place] = max(own[place], _WHOLE if read.whole else _IN_PART)
    found = own
    if mesh.world.size > 1:  # a sum: gloo's maximum fails under TORCH_DISTRIBUTED_DEBUG=DETAIL
        read = torch.tensor(own, dtype=torch.int64, device=mesh.device)
        found = all_reduce(read, mesh.world).tolist()
    loaded = [name for name, place in positions.items() if found[place]]
    rest = [
        piece
        for name in loaded
        for piece in records[name].pieces
        if found[places[id(piece)]] < _WHOLE
    ]
    return sorted(loaded), rest


def share_of_bytes(pieces: Sequence[Piece], mesh: Mesh) -> dict[str, list[Piece]]:
    """The pieces that this rank verifies, by file: about as many bytes on every rank."""
    loads = [(0, rank) for rank in range(mesh.world.size)]  # a heap, the least first
    own: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: -piece.bytes):
        load, reader = loads[0]
        heapq.heapreplace(loads, (load + piece.bytes + 1, reader))
        if reader == mesh.rank:
            own.setdefault(piece.file, []).append(piece)
    return own


def faults_in(store: Store, manifest: Manifest, own: dict[str, list[Piece]]) -> list[str]:
    """One sentence for every fault of the pieces, by file, and of the headers of these files."""
    threads = store.threads
    with ThreadPoolExecutor(threads) as pool:
        jobs = [
            pool.submit(file_faults, store, name, manifest.files[name], pieces[first::threads])
            for name, pieces in own.items()
            for first in range(min(threads, len(pieces)))
        ]
        return list(dict.fromkeys(fault for job in jobs for fault in job.result()))
