"""Loads that read every byte once: hashed as it arrives, or by the one rank whose share it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ckpt_cases import PADDING
from ckpt_checks import flipped, vectors
from ckpt_kills import put, state_of

from kenotron_ckpt import (
    DamagedCheckpoint,
    LocalStore,
    Manifest,
    NoCheckpoint,
    checkpoint,
    load,
    open_checkpoint,
    read_manifest,
    read_preferred,
    save,
)
from kenotron_dist import Mesh, barrier, spawn
from kenotron_dist.placement import Shard, TensorLayout

SHARD = "shard-00000-of-00001.safetensors"


class Reads:
    """Counts what ``os.preadv`` reads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        real = os.preadv

        def counted(handle, buffers, offset):
            got = real(handle, buffers, offset)
            self.bytes += got
            return got

        patch.setattr(os, "preadv", counted)


def blank(tensors):
    return {key: (torch.full_like(tensor, PADDING), p) for key, (tensor, p) in tensors.items()}


def test_a_verified_load_reads_every_byte_once(tmp_path, monkeypatch):
    tensors, mesh = vectors(20, size=1 << 18), Mesh.connect()  # 1 MB each
    save(tmp_path, 1, tensors, mesh, {})
    wanted, reads = blank(tensors), Reads(monkeypatch)
    loaded = load(tmp_path, wanted, mesh)
    assert reads.bytes == 20 << 20
    assert all(torch.equal(wanted[key][0], tensor) for key, (tensor, _) in tensors.items())
    assert loaded.loaded == sorted(tensors) and loaded.unused == []


def test_a_second_load_of_an_open_checkpoint_hashes_nothing(tmp_path, monkeypatch):
    tensors, mesh = vectors(3), Mesh.connect()
    save(tmp_path, 1, tensors, mesh, {})
    found = open_checkpoint(tmp_path, mesh)
    flipped(tmp_path / "1" / SHARD, -1, 0)
    found.load(blank(tensors))  # as before: what was verified is not compared again
    found = open_checkpoint(tmp_path, mesh, verify=False)
    with pytest.raises(DamagedCheckpoint, match=r"1:\n.*: the bytes of v2@0 are not those"):
        found.load(blank(tensors))


def test_damage_found_while_filling_is_said_and_filled_again_from_an_older_one(tmp_path):
    mesh = Mesh.connect()
    put(tmp_path, 10, 1)
    put(tmp_path, 20, 2)
    flipped(tmp_path / "20" / SHARD, -1, 0)
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(tmp_path / "20", mesh, verify=False).load(state_of(mesh, 1, blank=True))
    error = caught.value
    assert error.filled and len(error.faults) == 1
    assert str(error) == (
        f"cannot load {tmp_path / '20'}:\n  {error.faults[0]}\n"
        "  the tensors were set to NaN: load another checkpoint into them"
    )
    wanted = state_of(mesh, 1, blank=True)
    loaded = load(tmp_path, wanted, mesh)
    assert loaded.step == 10 and loaded.passed_over == [f"{tmp_path / '20'}: {error.faults[0]}"]
    for key, (tensor, _) in state_of(mesh, 1).items():
        assert torch.equal(wanted[key][0], tensor)
    flipped(tmp_path / "10" / SHARD, -1, 0)
    with pytest.raises(NoCheckpoint, match=r"(?s)can be read:\n  .*/20: shard.*\n  .*/10: shard"):
        load(tmp_path, wanted, mesh)


def test_a_lenient_load_and_an_opened_checkpoint_leave_tensors_as_they_were(tmp_path):
    mesh = Mesh.connect()
    put(tmp_path, 10, 1)
    flipped(tmp_path / "10" / SHARD, -1, 0)
    wanted = state_of(mesh, 1, blank=True)
    before = {key: tensor.clone() for key, (tensor, _) in wanted.items()}
    with pytest.raises(NoCheckpoint):
        load(tmp_path, wanted, mesh, strict=False)
    with pytest.raises(NoCheckpoint):
        open_checkpoint(tmp_path, mesh).load(wanted)
    assert all(torch.equal(wanted[key][0], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("name", [SHARD, "header", "gone", "short"])
def test_every_fault_of_a_file_is_found_while_filling(tmp_path, name):
    mesh = Mesh.connect()
    put(tmp_path, 10, 1)
    found, path = open_checkpoint(tmp_path, mesh, verify=False), tmp_path / "10" / SHARD
    if name == "gone":
        path.unlink()
    elif name == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flipped(path, 12 if name == "header" else -1, 0)
    said = {"header": "its header is not", "gone": "is missing", "short": "bytes long, but"}
    with pytest.raises(DamagedCheckpoint, match=said.get(name, "the bytes of half@0,0 are not")):
        found.load(state_of(mesh, 1, blank=True))


ROWS = TensorLayout("rows", (8, 4), (Shard("tp", 0),))
COLUMNS = TensorLayout("columns", (8, 4), (Shard("tp", 1),))
EVERY = TensorLayout("every", (6,))


def share(mesh: Mesh, folder: str) -> tuple[int, list[str]]:
    """Bytes that this rank reads for a load on tp 2 of what one rank wrote; then of damage."""
    wanted = {
        layout.name: (torch.full(shape, PADDING), layout)
        for layout, shape in ((ROWS, (4, 4)), (COLUMNS, (8, 2)), (EVERY, (6,)))
    }
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        load(folder, wanted, mesh)
    path, errors = Path(folder, "1", SHARD), []
    data = path.read_bytes()
    for name in ("rows", "columns"):
        if mesh.rank == 0:
            path.write_bytes(_with_damage(data, read_manifest(folder), name))
        barrier(mesh.world)
        for tensor, _ in wanted.values():
            tensor.fill_(PADDING)
        with pytest.raises(DamagedCheckpoint) as caught:
            open_checkpoint(folder, mesh, verify=False).load(wanted)
        left = all(bool((tensor == PADDING).all()) for tensor, _ in wanted.values())
        nan = all(bool(tensor.isnan().all()) for tensor, _ in wanted.values())
        errors.append(f"{caught.value.faults} {caught.value.filled} {left} {nan}")
        barrier(mesh.world)
        if mesh.rank == 0:
            path.write_bytes(data)
        barrier(mesh.world)
    return reads.bytes, errors


def _with_damage(data: bytes, manifest: Manifest, name: str) -> bytes:
    place = manifest.records[name].pieces[0].offset
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_what_no_rank_reads_whole_is_verified_by_one_rank_before(tmp_path):
    tensors = {p.name: (torch.ones(p.shape), p) for p in (ROWS, COLUMNS, EVERY)}
    save(tmp_path, 1, tensors, Mesh.connect(), {})
    (first, errors), (second, same) = spawn(share, str(tmp_path), tp=2)
    # Each rank reads half of the rows and all else; one of them also hashes the rows.
    assert sorted([first, second]) == [64 + 128 + 24, 64 + 128 + 24 + 128]
    assert errors == same
    fault = "['{}: the bytes of {}@0,0 are not those that were written'] {} {} {}"
    assert errors == [
        fault.format(SHARD, "rows", False, True, False),
        fault.format(SHARD, "columns", True, False, True),
    ]


def test_no_program_computes_with_what_a_damaged_checkpoint_left(tmp_path):
    """Every value that was to be filled is NaN, of narrow numbers and of damaged parts as well."""
    mesh = Mesh.connect()
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64)
    tensors = {
        str(dtype): (torch.ones(8).to(dtype), TensorLayout(str(dtype), (8,))) for dtype in dtypes
    }
    save(tmp_path, 1, tensors, mesh, {})
    flipped(tmp_path / "1" / SHARD, -1, 0)
    wanted = {
        key: (torch.zeros(8).to(tensor.dtype).requires_grad_(tensor.dtype.is_floating_point), p)
        for key, (tensor, p) in tensors.items()
    }
    with pytest.raises(NoCheckpoint):
        load(tmp_path, wanted, mesh)
    for name, (tensor, _) in wanted.items():
        assert tensor.dtype == torch.int64 or bool(tensor.detach().float().isnan().all()), name


CHECKED = """
import sys, torch
from kenotron_ckpt import load, save
from kenotron_dist import spawn
from kenotron_dist.placement import TensorLayout

def work(mesh, folder):
    layout = TensorLayout("a", (8,))
    save(folder, 1, {"a": (torch.ones(8), layout)}, mesh, {})
    wanted = torch.zeros(8)
    load(folder, {"a": (wanted, layout)}, mesh)
    return wanted.tolist()

if __name__ == "__main__":
    assert spawn(work, sys.argv[1], dp=2, tp=2) == [[1.0] * 8] * 4
"""


def test_ranks_load_under_the_checks_of_torch(tmp_path):
    """DETAIL counts messages as well: ranks 0 and 1 have sent different numbers of them."""
    (tmp_path / "program.py").write_text(CHECKED)
    done = subprocess.run(
        [sys.executable, "program.py", str(tmp_path / "run")],
        cwd=tmp_path,
        env=os.environ | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Linear(list):
    """A list in which nobody may search."""

    def __contains__(self, name):
        raise AssertionError(f"{name} is searched for in a list")


def test_names_are_not_searched_for_in_lists(tmp_path, monkeypatch):
    tensors, mesh = vectors(50), Mesh.connect()
    save(tmp_path, 1, tensors, mesh, {})
    real = checkpoint.wanted_bytes

    def linear(*args):
        loaded, rest = real(*args)
        return Linear(loaded), Linear(rest)

    monkeypatch.setattr(checkpoint, "wanted_bytes", linear)
    for strict in (True, False):
        assert load(tmp_path, blank(tensors), mesh, strict=strict).loaded == sorted(tensors)


def test_few_of_many_missing_names_get_a_suggestion(tmp_path, monkeypatch):
    tensors, mesh = vectors(30), Mesh.connect()
    save(tmp_path, 1, tensors, mesh, {})
    asked = []
    real = checkpoint.get_close_matches
    monkeypatch.setattr(
        checkpoint,
        "get_close_matches",
        lambda name, *args, **options: asked.append(name) or real(name, *args, **options),
    )
    wanted = {
        name: (torch.zeros(100), layout.renamed(f"w{name}"))
        for name, (_, layout) in tensors.items()
    }
    with pytest.raises(ValueError, match="did you mean v0") as error:
        load(tmp_path, wanted, mesh)
    assert str(error.value).count("no such record among 30") == 30 and len(asked) == 5


def test_a_manifest_is_parsed_once_by_the_rank_that_looks_for_it(tmp_path, monkeypatch):
    from kenotron_ckpt import folder, loading

    put(tmp_path, 10, 1)
    parsed, real = [], folder.manifest_at
    for module in (folder, loading):
        monkeypatch.setattr(module, "manifest_at", lambda path: parsed.append(path) or real(path))
    assert read_preferred(tmp_path, Mesh.connect(), lambda found: found.folder.name) == "10"
    assert parsed == [LocalStore(tmp_path / "10")]
