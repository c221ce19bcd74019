"""A checkpoint written from tensors that are made one at a time is one like any other."""

import weakref

import pytest
import torch

from kenotron_ckpt import latest_step, load, read_manifest, read_record, save, verify_files
from kenotron_ckpt.lock import FolderLock
from kenotron_ckpt.streamed import StreamedTensor, save_streamed
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout

VALUES = {
    "b": torch.arange(24, dtype=torch.float32).view(6, 4),
    "a": torch.arange(30, dtype=torch.bfloat16).view(3, 10),
    "c.scalar": torch.tensor(7, dtype=torch.int64),
}


def sources(values=VALUES, log=None):
    def make(name):
        if log is not None:
            log.append((name, [each() is None for each in alive]))
        made = values[name].clone()
        alive.append(weakref.ref(made))
        return made

    alive = []
    return {
        name: StreamedTensor(tuple(each.shape), each.dtype, lambda name=name: make(name))
        for name, each in values.items()
    }


@pytest.mark.parametrize("file_bytes", [1 << 31, 100, 1])
def test_it_holds_what_save_would_have_stored(tmp_path, file_bytes):
    save_streamed(tmp_path / "a", 3, sources(), {"x": 1}, "seed: 1\n", file_bytes=file_bytes)
    tensors = {n: (v, TensorLayout(n, tuple(v.shape))) for n, v in VALUES.items()}
    save(tmp_path / "b", 3, tensors, Mesh.connect(), {"x": 1}, "seed: 1\n", file_bytes=file_bytes)
    for name in ("manifest.json", "config.yaml", *read_manifest(tmp_path / "b").files):
        assert (tmp_path / "a/3" / name).read_bytes() == (tmp_path / "b/3" / name).read_bytes()
    assert verify_files(tmp_path / "a") == []
    blank = {n: (torch.zeros_like(v), TensorLayout(n, tuple(v.shape))) for n, v in VALUES.items()}
    load(tmp_path / "a", blank, Mesh.connect())
    assert all(torch.equal(blank[name][0], value) for name, value in VALUES.items())


def test_one_tensor_is_alive_at_a_time_and_each_is_made_once(tmp_path):
    log = []
    values = {f"t{i}": torch.full((64, 64), float(i)) for i in range(5)}
    save_streamed(tmp_path, 0, sources(values, log), {})
    assert [name for name, _ in log] == list(values)
    assert all(all(gone) for _, gone in log)
    manifest = read_manifest(tmp_path)
    assert torch.equal(read_record(tmp_path / "0", manifest, "t3"), values["t3"])


def test_a_large_tensor_is_cut_in_pieces_and_still_made_once(tmp_path, monkeypatch):
    monkeypatch.setattr("kenotron_ckpt.blocks.share_of.__defaults__", (100,))
    log = []
    values = {"w": torch.arange(400, dtype=torch.float32).view(100, 4), "v": torch.ones(3)}
    save_streamed(tmp_path, 0, sources(values, log), {})
    assert sorted(name for name, _ in log) == ["v", "w"]
    manifest = read_manifest(tmp_path)
    assert len(manifest.records["w"].pieces) >= 16
    assert torch.equal(read_record(tmp_path / "0", manifest, "w"), values["w"])


def test_a_source_that_fails_leaves_the_checkpoint_of_before_or_none(tmp_path):
    def fail():
        raise ValueError("the source is damaged")

    broken = sources() | {"z": StreamedTensor((2,), torch.float32, fail)}
    with pytest.raises(ValueError, match="the source is damaged"):
        save_streamed(tmp_path, 3, broken, {})
    assert latest_step(tmp_path) is None
    assert not list(tmp_path.glob("3/*"))
    save_streamed(tmp_path, 3, sources(), {"first": True})
    with pytest.raises(ValueError, match="the source is damaged"):
        save_streamed(tmp_path, 3, broken, {})
    assert read_manifest(tmp_path).state == {"first": True}
    assert verify_files(tmp_path) == []


def test_bad_arguments_are_named_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="step = -1: steps are counted from 0"):
        save_streamed(tmp_path / "a", -1, sources(), {})
    odd = {"w": StreamedTensor((2,), torch.complex64, lambda: torch.zeros(2))}
    with pytest.raises(ValueError, match="w: dtype complex64 cannot be stored"):
        save_streamed(tmp_path / "a", 0, odd, {})
    assert not (tmp_path / "a").exists()


def test_the_folder_of_a_run_that_is_writing_is_left_alone(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(ValueError, match="is being written by another run"):
        save_streamed(tmp_path, 3, sources(), {})
    lock.release()
    assert save_streamed(tmp_path, 3, sources(), {}) == tmp_path / "3"
