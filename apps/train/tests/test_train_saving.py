"""What a stopped run reads back of its last checkpoint: all of it, each rank a share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kenotron_ckpt import SaveFailed, byte_checks, save
from kenotron_dist import Mesh, spawn
from kenotron_dist.placement import TensorLayout
from kenotron_train.run.saving import check_saved


def saved(mesh: Mesh, folder: str) -> tuple[list[str], list[str]]:
    """Names of the records that this rank reads back; the errors once files are damaged."""
    layouts = {name: TensorLayout(name, (64, 64), ()) for name in "abcdef"}
    tensors = {name: (torch.ones(64, 64), layout) for name, layout in layouts.items()}
    save(folder, 3, tensors, mesh, {})
    read: list[str] = []
    right = byte_checks.file_faults

    def faults(store, name, entry, pieces):
        read.extend(piece.key.partition("@")[0] for piece in pieces)
        return right(store, name, entry, pieces)

    saver = SimpleNamespace(mesh=mesh, folder=Path(folder))
    with mock.patch.object(byte_checks, "file_faults", faults):
        check_saved(saver, 3)
    errors = []
    for damage in (_flip, Path.unlink):
        if mesh.rank == 0:
            damage(next(Path(folder, "3").glob("shard-*")))
        with pytest.raises(SaveFailed) as error:
            check_saved(saver, 3)
        errors.append(str(error.value))
    return read, errors


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ranks_share_the_reading_back(tmp_path: Path) -> None:
    ranks = spawn(saved, str(tmp_path), dp=2)
    (first, errors), (second, same) = ranks
    assert sorted(first + second) == list("abcdef") and len(first) == len(second) == 3
    assert errors == same
    flipped, gone = errors
    assert flipped.startswith("the checkpoint of step 3 is not whole: shard-")
    assert "are not those that were written" in flipped
    assert gone.startswith("the checkpoint of step 3 is not whole: ") and "is missing" in gone
