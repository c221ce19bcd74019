"""A run whose checkpoints cannot be read: it never starts afresh over them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import runs
from xxhash import xxh3_64_hexdigest

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh
from kenotron_train.config_file import load_config
from kenotron_train.failures.passing_errors import PassingError
from kenotron_train.replay.replay import replay
from kenotron_train.run import loop


def configure(folder: Path, **changes: object) -> Config:
    changes = {"tokens__limit_val_batches": 0, "checkpoints__checkpoint_interval": 100} | changes
    return load_config(DEFAULT_CONFIG, runs.arguments(folder, **changes)[1::2])


@pytest.fixture
def only(tmp_path: Path) -> Path:
    """The folder of a run's only checkpoint, of step 6."""
    loop.train(Mesh.connect(), configure(tmp_path))
    return tmp_path / "checkpoints/6"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "writer.lock"
    }


def newer_format(step: Path) -> str:
    path = step / "manifest.json"
    data = json.loads(path.read_text())
    del data["checksum"]
    body = json.dumps(data | {"version": 4, "min_reader": 4})[:-1]
    path.write_text(f'{body},\n"checksum": "{xxh3_64_hexdigest(body.encode())}"\n}}\n')
    return "the format is too new, not damaged"


def changed_byte(step: Path) -> str:
    path = step / "manifest.json"
    path.write_text(path.read_text().replace('"dtype": "', '"dtypf": "', 1))
    return "manifest.json is damaged or was edited"


def short_shard(step: Path) -> str:
    path = next(step.glob("shard-*"))
    path.write_bytes(path.read_bytes()[:-1])
    return "bytes long, but manifest.json says"


def changed_shard(step: Path) -> str:
    path = next(step.glob("shard-*"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return "are not those that were written"


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("damage", [newer_format, changed_byte, short_shard, changed_shard])
def test_the_only_checkpoint_is_never_trained_over(only: Path, damage, named: bool) -> None:
    message, run = damage(only), only.parent
    before = contents(run)
    changes = {"checkpoints__resume_checkpoint_path": run} if named else {}
    config = configure(run.parent, tokens__train_steps=9, **changes)
    with pytest.raises(
        ValueError, match="checkpoints.checkpoints_path: no checkpoint at "
    ) as error:
        loop.train(Mesh.connect(), config)
    said = str(error.value)
    assert f"{only}: " in said and message in said and "does not start afresh over them" in said
    assert contents(run) == before


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_an_error_on_read_is_no_fresh_start(only: Path, number: int) -> None:
    run = only.parent
    before, real = contents(run), Path.read_bytes

    def broken(path: Path) -> bytes:
        if path.name == "manifest.json":
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        kind = ValueError if number == errno.EACCES else PassingError  # another start may help
        with pytest.raises(kind, match=f"{os.strerror(number)}.*manifest.json"):
            loop.train(Mesh.connect(), configure(run.parent, tokens__train_steps=9))
    assert contents(run) == before


def test_a_run_that_began_elsewhere_does_not_begin_there_again(only: Path) -> None:
    """Its own checkpoints are there, though none can be read."""
    start, folder = only.parent, only.parent.parent
    more = {
        "checkpoints__checkpoints_path": folder / "more",
        "checkpoints__resume_checkpoint_path": start,
        "tokens__train_steps": 9,
    }
    loop.train(Mesh.connect(), configure(folder, **more))
    newer_format(folder / "more/9")
    with pytest.raises(ValueError, match=r"(?s)checkpoints_path: .*more/9: the format is too new"):
        loop.train(Mesh.connect(), configure(folder, **more))


def test_an_older_one_is_resumed_and_the_unreadable_one_kept(tmp_path: Path) -> None:
    config = configure(tmp_path, checkpoints__checkpoint_interval=3)
    whole = loop.train(Mesh.connect(), config)
    newest = tmp_path / "checkpoints/6"
    newer_format(newest)
    before = contents(newest)
    with pytest.warns(UserWarning, match="kept in .*6.unreadable"):
        again = loop.train(Mesh.connect(), config)
    assert [step.loss for step in again] == [step.loss for step in whole[3:]]
    assert contents(newest.with_name("6.unreadable")) == before


def test_a_first_save_that_did_not_finish_is_a_fresh_start(only: Path) -> None:
    (only / "manifest.json").unlink()
    (only.parent / "latest.txt").unlink()
    assert len(loop.train(Mesh.connect(), configure(only.parent.parent))) == 6


def test_a_replay_does_not_begin_at_step_0_for_want_of_a_readable_checkpoint(
    tmp_path: Path,
) -> None:
    config = configure(tmp_path, checkpoints__checkpoint_interval=3)
    loop.train(Mesh.connect(), config)
    newer_format(tmp_path / "checkpoints/3")
    with pytest.raises(
        ValueError, match=r"(?s)--replay-step 5: no checkpoint before it.*/3: the f"
    ):
        replay(Mesh.connect(), config, 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("damaged", [1, 2])
def test_damage_found_while_tensors_are_filled_is_not_trained_on(
    tmp_path: Path, damaged: int, dtype: str
) -> None:
    """With two damaged, the checkpoint of step 0 is resumed, which has no moments."""
    changes = {
        "checkpoints__checkpoint_interval": 3,
        "checkpoints__save_initial_state": True,
        "model__dtype": dtype,
    }
    config = configure(tmp_path, **changes)
    whole = loop.train(Mesh.connect(), config)
    for step in (6, 3)[:damaged]:
        changed_shard(tmp_path / f"checkpoints/{step}")
    again = loop.train(Mesh.connect(), config)
    begin = (3, 0)[damaged - 1]
    assert [step.loss for step in again] == [step.loss for step in whole[begin:]]
    assert [step.grad_norm for step in again] == [step.grad_norm for step in whole[begin:]]


def test_a_resume_reads_every_byte_once(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = [], os.preadv

    def counted(handle: int, buffers: list, offset: int) -> int:
        read.append(real(handle, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    loop.train(Mesh.connect(), configure(only.parent.parent))
    manifest = json.loads((only / "manifest.json").read_text())
    pieces = [piece for record in manifest["records"].values() for piece in record["pieces"]]
    assert sum(read) == sum(piece["bytes"] for piece in pieces)
