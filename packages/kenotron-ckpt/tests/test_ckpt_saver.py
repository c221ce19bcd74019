"""Saving beside the training: which values, who waits, what is said of it."""

import threading
import time

import pytest
import torch
from ckpt_checks import vectors

from kenotron_ckpt import LocalStore, SaveFailed, Saver, load, open_checkpoint, read_manifest
from kenotron_ckpt.blocks import blocks_of
from kenotron_ckpt.host_buffer import HostBuffer
from kenotron_ckpt.part_files import plan_parts
from kenotron_dist import Mesh, MeshConfig, views_of
from kenotron_dist.placement import TensorLayout


def read(folder, tensors):
    wanted = {key: (torch.full_like(t, -7), layout) for key, (t, layout) in tensors.items()}
    load(folder, wanted, Mesh.connect())
    return {key: tensor for key, (tensor, _) in wanted.items()}


@pytest.mark.parametrize("pool_bytes", [300, 900, 3000, 1 << 30])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_files_hold_the_moment_of_the_save(tmp_path, slow, pool_bytes, threads):
    mesh = Mesh.connect()
    tensors = vectors(4)
    options = {"pool_bytes": pool_bytes, "threads": threads, "file_bytes": 1000}
    with Saver(tmp_path, mesh, **options) as saver:
        for step in range(2):
            due = {key: tensor.clone() for key, (tensor, _) in tensors.items()}
            saver.save(step, tensors, {})
            forward = sum(float(tensor.sum()) for tensor, _ in tensors.values())
            assert forward == sum(float(tensor.sum()) for tensor in due.values())
            saver.wait()
            for tensor, _ in tensors.values():
                tensor.add_(1)  # in place, while files are written
            saver.finish()
            found = read(tmp_path / str(step), tensors)
            assert all(torch.equal(found[key], due[key]) for key in due)


def test_the_update_waits_for_what_the_pool_does_not_hold(tmp_path, slow):
    tensors = vectors(6)
    with Saver(tmp_path, Mesh.connect(), pool_bytes=800, threads=1) as saver:
        slow.clear()
        saver.save(1, tensors, {})
        waiter = threading.Thread(target=saver.wait)
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()  # nothing is on the disk, and the pool is full
        slow.set()
        waiter.join(30)
        assert not waiter.is_alive()
        saver.finish()
        (report,) = saver.reports()
    assert report.blocked > 0.3


def test_the_update_does_not_wait_for_the_disk_when_the_pool_holds_all(tmp_path, slow):
    with Saver(tmp_path, Mesh.connect()) as saver:
        slow.clear()
        saver.save(1, vectors(6), {})
        saver.wait()
        assert saver.reports() == []
        slow.set()


@pytest.mark.parametrize("pool_bytes", [300, 850, 1 << 30])
def test_what_is_volatile_may_change_at_once(tmp_path, slow, pool_bytes):
    tensors = vectors(6)
    keys = ["v1", "v4", "v5"]
    due = {key: tensor.clone() for key, (tensor, _) in tensors.items()}
    with Saver(tmp_path, Mesh.connect(), pool_bytes=pool_bytes) as saver:
        saver.save(1, tensors, {}, volatile=keys)
        for key in keys:
            tensors[key][0].fill_(-1)
        saver.wait()
        for tensor, _ in tensors.values():
            tensor.fill_(-2)
        with pytest.raises(ValueError, match="volatile: nobody is not among the tensors"):
            saver.save(2, tensors, {}, volatile=["nobody"])
        saver.save(2, tensors, {})
    found = read(tmp_path / "1", tensors)
    assert all(torch.equal(found[key], due[key]) for key in due)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["1", "2"]


def test_state_and_config_may_change_at_once(tmp_path, slow):
    state, own = {"data": [1, 2]}, {"seed": [3]}
    with Saver(tmp_path, Mesh.connect()) as saver:
        saver.save(1, vectors(1), state, "a: 1\n", rank_state=own)
        state["data"].append(9)
        own["seed"].append(9)
    manifest = open_checkpoint(tmp_path, Mesh.connect()).manifest
    assert (manifest.state, manifest.rank_states) == ({"data": [1, 2]}, ({"seed": [3]},))


def test_a_second_save_waits_for_the_first(tmp_path, slow):
    with Saver(tmp_path, Mesh.connect()) as saver:
        saver.save(1, vectors(2), {})
        saver.save(2, vectors(2), {})
        saver.finish()
        first, second = saver.reports()
    assert (first.step, second.step) == (1, 2)
    assert first.waited < 0.05 <= second.waited <= second.blocked
    assert 0.05 < first.durable < 30


def test_reports_say_what_a_save_cost_and_removed(tmp_path, slow):
    mesh, tensors = Mesh.connect(), vectors(3)
    with Saver(tmp_path, mesh, every=4, keep=1) as saver:
        for step in range(1, 13):
            time.sleep(0.01)
            saver.wait()
            assert saver.maybe_save(step, tensors, {"step": step}) == (step % 4 == 0)
        saver.finish()
        reports = saver.reports()
        assert saver.reports() == []
    assert [(r.step, r.failure, r.removed) for r in reports] == [
        (4, "", []),
        (8, "", [4]),
        (12, "", [8]),
    ]
    assert all(
        r.nbytes == sum(p.stat().st_size for p in tmp_path.glob("12/shard*")) for r in reports
    )
    assert all(r.blocked > 0 and r.durable > 0 for r in reports)
    assert any(r.blocked < r.durable for r in reports)  # one may wait for a core, unlike its writer
    assert reports[0].slow_down is not None
    assert 0.2 < reports[0].slow_down < 50
    assert "12: " in str(reports[2])
    assert reports[2].gb_per_s > 0


def test_memory_is_reserved_once_and_used_again(tmp_path):
    tensors = vectors(5)
    with Saver(tmp_path, Mesh.connect()) as saver:
        saver.reserve(tensors, volatile=["v3"])
        places = [slot.data_ptr() for slot in saver._arena.slots]
        plan = saver._plans._plan
        for step in range(3):
            saver.save(step, tensors, {}, volatile=["v3"])
            saver.wait()
        assert [slot.data_ptr() for slot in saver._arena.slots] == places
        assert saver._plans._plan is plan
        other = vectors(9, size=1000)
        saver.save(3, tensors, {})
        saver.reserve(other)  # which waits for the save under way
        saver.save(4, other, {})
    assert torch.equal(read(tmp_path / "3", tensors)["v4"], tensors["v4"][0])
    assert torch.equal(read(tmp_path / "4", other)["v8"], other["v8"][0])


def test_a_plan_is_made_anew_when_a_tensor_moves(tmp_path):
    tensors = vectors(3)
    with Saver(tmp_path, Mesh.connect()) as saver:
        saver.save(1, tensors, {})
        saver.finish()
        plan = saver._plans._plan
        moved, layout = tensors["v1"]
        tensors["v1"] = moved + 40, layout
        moved.fill_(-1)  # where it was
        saver.save(2, tensors, {})
        saver.finish()
        assert saver._plans._plan is not plan
        holder = tensors["v2"][0]
        holder.data = torch.full((100,), 60.0)  # the same tensor object, other memory
        saver.save(3, tensors, {})
    assert read(tmp_path / "2", tensors)["v1"][0] == 41
    assert read(tmp_path / "3", tensors)["v2"][0] == 60


def test_in_the_foreground_the_files_are_the_same_and_no_thread_is_started(tmp_path):
    tensors, before = vectors(4), threading.active_count()
    told = []
    options = {"keep": 1, "verify": True, "file_bytes": 900, "on_commit": told.append}
    with Saver(tmp_path / "a", Mesh.connect(), background=False, **options) as saver:
        saver.reserve(tensors)
        assert not saver._arena.slots and threading.active_count() == before
        for step in (1, 2):
            saver.save(step, tensors, {"step": step}, "a: 1\n", rank_state=[step])
            for tensor, _ in tensors.values():
                tensor.add_(1)
            assert told[-1] == LocalStore(tmp_path / "a" / str(step))
            (report,) = saver.reports()
            assert (report.step, report.failure, report.removed) == (step, "", [1] * (step - 1))
            assert report.blocked >= report.durable > 0 and report.waited == 0
    with pytest.raises(RuntimeError, match="save of step 3: this Saver of .* is closed"):
        saver.save(3, tensors, {})
    for tensor, _ in tensors.values():
        tensor.sub_(1)
    options |= {"threads": 1, "keep": None}
    with Saver(tmp_path / "b", Mesh.connect(), **options) as saver:
        saver.save(2, tensors, {"step": 2}, "a: 1\n", rank_state=[2])
    here, there = (
        {path.name: path.read_bytes() for path in (tmp_path / run / "2").iterdir()} for run in "ab"
    )
    assert here.keys() == there.keys()
    shards = [name for name in here if name.startswith(("shard", "config"))]
    assert len(shards) == 3 and all(here[name] == there[name] for name in shards)
    assert read_manifest(tmp_path / "a/2") == read_manifest(tmp_path / "b/2")
    assert report.nbytes == sum(len(here[name]) for name in shards if name != "config.yaml")


@pytest.mark.parametrize("on_failure", ["warn", "report", "raise"])
def test_a_failed_save_in_the_foreground_is_reported_as_asked(tmp_path, monkeypatch, on_failure):
    def full(*arguments):
        raise OSError("no room")

    options = {"background": False, "on_failure": on_failure}
    with Saver(tmp_path, Mesh.connect(), **options) as saver, monkeypatch.context() as patch:
        patch.setattr("kenotron_ckpt.saving.write_part", full)
        if on_failure == "raise":
            with pytest.raises(SaveFailed, match="step 1 was not saved: no room"):
                saver.save(1, vectors(1), {})
        elif on_failure == "warn":
            with pytest.warns(UserWarning, match="no room; earlier checkpoints are whole"):
                saver.save(1, vectors(1), {})
        else:
            saver.save(1, vectors(1), {})
        (report,) = saver.reports()
        assert (report.failure, report.nbytes) == ("no room", 0) and not (tmp_path / "1").exists()
        with pytest.raises(ValueError, match="steps are counted from 0"):
            saver.save(-1, vectors(1), {})
        patch.undo()
        saver.save(2, vectors(1), {})
    assert read(tmp_path, vectors(1))["v0"][0] == 0


def test_slots_of_a_plan_that_fitted_serve_one_that_does_not():
    view, arena = views_of(MeshConfig(), 0), HostBuffer()

    def parts(tensors):
        return plan_parts(blocks_of(tensors, view), 40)

    arena.fit(parts(vectors(4, 10) | {"w": (torch.zeros(5), TensorLayout("w", (5,)))}), 180, False)
    assert [slot.numel() for slot in arena.slots] == [40, 40, 40, 40, 20]
    many = parts(vectors(8, 10))
    arena.fit(many, 180, pin=False)
    for index, part in enumerate(many):
        assert [host.numel() for host in arena.hosts(index, part)] == [10]
