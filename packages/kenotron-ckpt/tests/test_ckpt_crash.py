"""A save that is cut off at any point loses nothing, and what it leaves is not a checkpoint."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from ckpt_cases import PADDING, local, small

import kenotron_ckpt.saving
from kenotron_ckpt import latest_step, load, read_manifest, resolve_step, save
from kenotron_dist import Mesh, RankError, spawn


class PowerCut(BaseException):
    """Nothing catches it: the process is gone."""


def scaled(mesh, factor):
    return {key: (tensor * factor, layout) for key, (tensor, layout) in small(mesh).items()}


def what_is_there(folder):
    """(step, factor) of the latest checkpoint, read back whole; None when there is none."""
    step = latest_step(folder)
    if step is None:
        return None
    mesh = Mesh.connect()
    wanted = small(mesh, blank=True)
    state = load(folder / str(step), wanted, mesh).state
    due = scaled(mesh, state["factor"])
    assert all(torch.equal(wanted[key][0], due[key][0]) for key in due)
    assert read_manifest(folder / str(step)).config == f"factor: {state['factor']}\n"
    return step, state["factor"]


def save_scaled(folder, step, factor):
    mesh = Mesh.connect()
    save(folder, step, scaled(mesh, factor), mesh, {"factor": factor}, f"factor: {factor}\n")


def cut_power_at(monkeypatch, moment):
    """Die before (even moments) or after (odd ones) a call among all that touch the disk."""
    call, after = divmod(moment, 2)
    count, opened = -1, Path.open

    def dying(function):
        def counted(*args, **options):
            nonlocal count
            count += 1
            mine = count  # a call may make others of its kind
            if mine == call and not after:
                raise PowerCut
            try:
                result = function(*args, **options)
            except OSError:
                if mine == call:
                    raise PowerCut from None
                raise
            if mine == call:
                if function is opened:
                    result.close()  # the system does, too
                raise PowerCut
            return result

        return counted

    for name in ("fsync", "write"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    for name in ("replace", "unlink", "mkdir", "rmdir", "open"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))


@pytest.mark.parametrize(("first", "second"), [(None, 10), (10, 20), (10, 10)])
def test_at_every_moment_there_is_the_old_checkpoint_or_the_new(tmp_path, first, second):
    seen = []
    for call in range(400):
        folder = tmp_path / str(call)
        if first is not None:
            save_scaled(folder, first, 1)
        with pytest.MonkeyPatch.context() as patch:
            cut_power_at(patch, call)
            try:
                save_scaled(folder, second, 2)
                done = True
            except PowerCut:
                done = False
        seen.append(what_is_there(folder) if folder.exists() else None)
        save_scaled(folder, second, 3)  # over what was left
        assert what_is_there(folder) == (second, 3)
        whole = set(read_manifest(folder).files) | {"manifest.json", "config.yaml"}
        assert {path.name for path in (folder / str(second)).iterdir()} == whole
        if done:
            break
    old = None if first is None else (first, 1)
    assert len(seen) > 30
    assert set(seen) == {old, (second, 2)}
    assert seen == sorted(seen, key=lambda found: found == (second, 2))  # first old, then new


def save_and_die(mesh, folder):
    if mesh.rank == 1:
        kenotron_ckpt.saving.write_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save(folder, 20, small(mesh), mesh, {})


def save_small(mesh, folder, step):
    save(folder, step, small(mesh), mesh, {"factor": 1}, "factor: 1\n")


def test_a_killed_rank_leaves_the_former_checkpoint(tmp_path):
    spawn(save_small, tmp_path, 10, tp=2)
    with pytest.raises(RankError, match="died of SIGKILL|Connection"):
        spawn(save_and_die, tmp_path, tp=2)
    assert what_is_there(tmp_path) == (10, 1)
    assert not (tmp_path / "20" / "manifest.json").exists()
    # Rank 0 may have had the time to clear up.
    with pytest.raises(ValueError, match="is half-written|does not exist|it has neither"):
        resolve_step(tmp_path / "20")


def save_with_a_full_disk(mesh, folder):
    if mesh.rank == 1:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        save(folder, 20, small(mesh), mesh, {})
    except OSError as error:
        return str(error)


def test_a_rank_that_cannot_write_stops_all_and_commits_nothing(tmp_path):
    spawn(save_small, tmp_path, 10, tp=2, dp=2)
    said = spawn(save_with_a_full_disk, tmp_path, tp=2, dp=2)
    assert set(said) == {"rank 1: [Errno 27] File too large"}
    assert what_is_there(tmp_path) == (10, 1)
    assert not (tmp_path / "20").exists()  # the space is given back
    spawn(save_small, tmp_path, 20, tp=2, dp=2)
    assert what_is_there(tmp_path) == (20, 1)


def shard(folder):
    return next(folder.glob("shard-*"))


def truncate(folder):
    shard(folder).write_bytes(shard(folder).read_bytes()[:-1])


def flip(folder):
    data = bytearray(shard(folder).read_bytes())
    data[-1] ^= 1
    shard(folder).write_bytes(data)


def lose(folder):
    shard(folder).unlink()


def unname(folder):
    (folder / "manifest.json").unlink()


def garble(folder):
    (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (truncate, "20 cannot be read: shard-00000-of-00001.safetensors is .* bytes long, but man"),
        (lose, "20 cannot be read: shard-00000-of-00001.safetensors is missing"),
        (unname, "20 cannot be read: it is half-written: there is no manifest.json, so the save"),
        (garble, "20 cannot be read: manifest.json is not JSON: "),
    ],
)
def test_a_broken_checkpoint_is_named_and_passed_over(tmp_path, harm, sentence):
    save_scaled(tmp_path, 10, 1)
    save_scaled(tmp_path, 20, 2)
    harm(tmp_path / "20")
    assert (tmp_path / "latest.txt").read_text() == "20"
    with pytest.raises(ValueError, match=sentence):
        resolve_step(tmp_path / "20")
    assert what_is_there(tmp_path) == (10, 1)
    assert resolve_step(tmp_path) == tmp_path / "10"
    harm(tmp_path / "10")
    assert latest_step(tmp_path) is None
    with pytest.raises(ValueError, match=r"(?s)no checkpoint in .* is complete:\n  20: .*\n  10: "):
        resolve_step(tmp_path)


def load_flipped(mesh, folder):
    wanted = small(mesh, blank=True)
    try:
        load(folder, wanted, mesh)
    except ValueError as error:
        assert all((tensor == PADDING).all() for tensor, _ in wanted.values())
        load(folder, wanted, mesh, verify=False)
        whole = all(torch.equal(t, local(p, t.dtype, mesh)) for t, p in wanted.values())
        return str(error), whole


def test_a_flipped_byte_is_found_before_anything_is_filled(tmp_path):
    spawn(save_small, tmp_path, 10, tp=2)
    flip(tmp_path / "10")
    name = shard(tmp_path / "10").name
    found = spawn(load_flipped, tmp_path, tp=4)
    for said, _ in found:
        assert said == (
            f"no checkpoint at {tmp_path} can be read:\n"
            f"  {tmp_path}/10: {name}: the bytes of w@0,0 are not those that were written"
        )
    assert not all(whole for _, whole in found)  # the byte was one that is read


def test_a_changed_header_is_found_though_it_is_not_needed(tmp_path):
    save_scaled(tmp_path, 10, 1)
    data = shard(tmp_path / "10").read_bytes()
    mesh = Mesh.connect()
    for damaged in (b"\xff" * 9 + data[9:], data[:20] + b"x" + data[21:]):
        shard(tmp_path / "10").write_bytes(damaged)
        with pytest.raises(ValueError, match="00001.safetensors: its header is not what was writt"):
            load(tmp_path, small(mesh), mesh)
        load(tmp_path, small(mesh), mesh, verify=False)
