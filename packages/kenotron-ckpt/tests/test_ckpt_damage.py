"""Files that change and folders with other things: a clear word, and the newest that is right."""

import os
import resource
import shutil

import pytest
import torch
from ckpt_cases import PADDING, local, small
from ckpt_checks import begin, flipped, what_is_there
from ckpt_kills import MANY, put, state_of

from kenotron_ckpt import (
    Saver,
    latest_step,
    load,
    open_checkpoint,
    prune,
    resolve_step,
    save,
    verify_files,
)
from kenotron_ckpt.folder import is_verified
from kenotron_dist import Mesh, spawn
from kenotron_dist.placement import Shard, TensorLayout


@pytest.fixture
def two(tmp_path):
    """A run with checkpoints 10 and 20, and how its files are."""
    put(tmp_path, 10, 1, verify=True)
    put(tmp_path, 20, 2, verify=True)
    return tmp_path


@pytest.mark.parametrize("name", ["shard-00000-of-00001.safetensors", "manifest.json"])
def test_every_byte_that_counts_is_under_a_checksum(two, name):
    path, mesh = two / "20" / name, Mesh.connect()
    good = path.read_bytes()
    where = "manifest.json is " if name == "manifest.json" else "shard-00000-of-00001.safetensors: "
    for place in range(0, len(good.rstrip()), 1 if name != "manifest.json" else 7):
        flipped(path, place, place % 8)
        found = open_checkpoint(two, mesh)
        assert found.folder.name == "10", place
        assert len(found.passed_over) == 1
        assert f"20: {where}" in found.passed_over[0] or "format version" in found.passed_over[0]
        path.write_bytes(good)
    assert what_is_there(two) == (20, 2)


def test_a_flipped_bit_in_the_pointer_leads_to_a_checkpoint_all_the_same(two):
    path = two / "latest.txt"
    for place in range(2):
        for bit in range(8):
            flipped(path, place, bit)
            assert what_is_there(two) in [(10, 1), (20, 2)]
            flipped(path, place, bit)
    assert path.read_text() == "20"


def test_a_flipped_bit_in_a_mark_unmakes_it(two):
    path = two / "20" / "verified.txt"
    for place in range(len(path.read_bytes())):
        flipped(path, place, place % 8)
        assert not is_verified(two / "20")
        flipped(path, place, place % 8)
    assert is_verified(two / "20")
    shard = next((two / "20").glob("shard-*"))
    shard.rename(two / "away")
    assert not is_verified(two / "20")
    (two / "away").rename(shard)
    flipped(path, 0, 0)
    put(two, 30, 3)
    assert prune(two, keep=1) == [20]  # what says that it was verified is not believed
    assert what_is_there(two) == (30, 3)


def test_the_copy_of_the_config_for_people_does_not_count(two):
    flipped(two / "20" / "config.yaml", 3, 1)
    assert what_is_there(two) == (20, 2)
    assert verify_files(two) == []


def test_what_is_damaged_is_walked_over_with_reasons(tmp_path):
    for step in (10, 20, 30, 40):
        put(tmp_path, step, step)
    flipped(next((tmp_path / "40").glob("shard-*")), -1, 0)
    next((tmp_path / "30").glob("shard-*")).unlink()
    (tmp_path / "50").mkdir()
    mesh = Mesh.connect()
    wanted = state_of(mesh, 1, blank=True)
    loaded = load(tmp_path, wanted, mesh)
    assert (loaded.step, loaded.store.path, loaded.state) == (20, tmp_path / "20", {"factor": 20})
    reasons = [reason.removeprefix(f"{tmp_path}/") for reason in loaded.passed_over]
    name = "shard-00000-of-00001.safetensors"
    assert reasons == [
        f"40: {name}: the bytes of half@0,0 are not those that were written",
        "50: it is half-written: there is no manifest.json, so the save did not finish",
        f"30: {name} is missing",
    ]
    for key, (tensor, _) in state_of(mesh, 20).items():
        assert torch.equal(wanted[key][0], tensor)
    for step in ("10", "20"):
        (tmp_path / step / "manifest.json").write_text("")
    with pytest.raises(ValueError, match=r"(?s)no checkpoint at .* can be read:\n.*/40: .*/50: .*"):
        load(tmp_path, wanted, mesh)


@pytest.fixture
def crowded(two):
    """The run of ``two`` with much in it that is not of its making."""
    (two / "20" / "pytorch_model.bin").write_bytes(b"PK")
    (two / "20" / "model.safetensors").write_bytes(b"")
    (two / "30").mkdir()
    (two / "30" / "checkpoint_metadata.json").write_text('{"version": "1.4"}')
    (two / "31").mkdir()
    (two / "31" / "manifest.json").write_text('{"schemaVersion": 2}')
    for name in ("007", "10abc", "-5", "٢٢", "40.old"):
        shutil.copytree(two / "10", two / name)
    (two / "50").write_text("a file")
    (two / "60").symlink_to(two / "nowhere")
    (two / "shard-00000-of-00001.safetensors").write_bytes(b"stray")
    shutil.copytree(two / "10", two / "70")  # a checkpoint under another name
    shutil.copytree(two / "20", two / "80")
    shutil.copy(two / "10" / "manifest.json", two / "80")  # a manifest of another step
    return two


def test_what_others_put_there_is_no_checkpoint(crowded):
    mesh = Mesh.connect()
    (crowded / "latest.txt").unlink()
    loaded = load(crowded, state_of(mesh, 1, blank=True), mesh)
    assert loaded.step == 20
    said = {reason.removeprefix(f"{crowded}/") for reason in loaded.passed_over}
    assert said == {
        "80: its manifest.json is of step 10: the folder was renamed, or copied into",
        "70: its manifest.json is of step 10: the folder was renamed, or copied into",
        "31: manifest.json is not a 'kenotron-checkpoint': its 'format' does not say so",
        "30: it is a checkpoint of Nanotron: `python -m kenotron_nanotron` makes one "
        "of ours of it, in another folder",
    }
    assert resolve_step(crowded) == crowded / "20"
    assert resolve_step(crowded / "40.old") == crowded / "40.old"  # a name of one's own is no step


def test_what_others_put_there_stays(crowded):
    def listing():
        return {path.relative_to(crowded) for path in crowded.rglob("*")}

    with Saver(crowded, Mesh.connect(), keep=1, verify=True) as saver:
        before = listing()
        begin(saver, 90, 3)
        saver.finish()
        assert saver.reports()[0].removed == [10, 20]
    gone = {path.as_posix() for path in before - listing()}
    ours = ("manifest.json", "config.yaml", "verified.txt", "shard-00000-of-00001.safetensors")
    assert gone == {f"{step}/{name}" for step in (10, 20) for name in ours} | {"10"}


def test_a_checkpoint_that_is_a_link_is_read_but_never_removed(tmp_path):
    put(tmp_path / "other", 10, 1)
    put(tmp_path / "run", 20, 2)
    (tmp_path / "run" / "10").symlink_to(tmp_path / "other" / "10")
    assert what_is_there(tmp_path / "run" / "10") == (10, 1)
    assert prune(tmp_path / "run", keep=1) == []
    assert what_is_there(tmp_path / "other") == (10, 1)


def test_a_file_of_another_save_is_noticed_though_it_looks_alike(two):
    name = "shard-00000-of-00001.safetensors"
    shutil.copy(two / "10" / name, two / "20" / name)
    found = open_checkpoint(two, Mesh.connect())
    assert found.folder.name == "10"
    assert f"20: {name}: the bytes of " in found.passed_over[0]
    assert latest_step(two) == 20  # which only looks at the lengths


def test_a_manifest_of_the_same_step_in_another_run_does_not_fit_the_files(two, tmp_path):
    put(tmp_path / "other", 20, 7)
    shutil.copy(tmp_path / "other" / "20" / "manifest.json", two / "20")
    assert what_is_there(two) == (10, 1)


def layout(name, *shape):
    return torch.full(shape, PADDING), TensorLayout(name, shape)


def test_a_load_of_nothing_is_an_error_however_lenient(two):
    mesh = Mesh.connect()
    for strict in (True, False):
        with pytest.raises(ValueError, match="cannot load .*20:\n  x: no such record among 3|none"):
            load(two, {"x": layout("x", 2)}, mesh, strict=strict)
    with pytest.raises(ValueError, match=r"none of the 2 names that are wanted is among its 3 rec"):
        load(two, {"x": layout("x", 2), "y": layout("y", 2)}, mesh, strict=False)


def load_some(mesh, folder):
    """Rank 0 wants what is there, each wants something else that is not."""
    wanted = {"x": layout(f"x{mesh.rank}", 2)}
    if mesh.rank == 0:
        wanted |= {"w": small(mesh, blank=True)["w"]}
    loaded = load(folder, wanted, mesh, strict=False)
    assert wanted["x"][0].tolist() == [PADDING] * 2
    if mesh.rank == 0:
        weight, cut = wanted["w"]
        assert torch.equal(weight, local(cut, weight.dtype, mesh))
    return loaded.loaded, loaded.missing, loaded.unused


def test_a_lenient_load_counts_what_it_did_the_same_on_all_ranks(tmp_path):
    put(tmp_path, 10, 1)
    found = spawn(load_some, tmp_path, tp=2)
    assert found == [(["w"], ["x0", "x1"], ["b", "half"])] * 2


def test_a_config_that_is_gone_and_a_mark_that_no_longer_holds_do_not_stay(tmp_path):
    put(tmp_path, 10, 1, verify=True, file_bytes=MANY)
    put(tmp_path, 10, 2, config=False)
    assert {path.name for path in (tmp_path / "10").iterdir()} == {
        "manifest.json",
        "shard-00000-of-00001.v1.safetensors",
    }
    save(tmp_path, 10, state_of(Mesh.connect(), 3), Mesh.connect(), {"factor": 3}, verify=True)
    assert is_verified(tmp_path / "10")


def test_a_checkpoint_of_more_files_than_may_be_open_is_read(tmp_path):
    mesh = Mesh.connect()
    rows = TensorLayout("rows", (300, 2), (Shard("tp", 0),))
    value = torch.arange(600.0).view(300, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        with Saver(tmp_path, mesh, pool_bytes=16, file_bytes=8) as saver:
            saver.save(1, {"rows": (value, rows)}, {})
    assert len(list(tmp_path.glob("1/shard-*"))) == 300
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = torch.zeros(300, 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        load(tmp_path, {"rows": (found, rows)}, mesh)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert torch.equal(found, value)
