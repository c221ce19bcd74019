"""Batches that a run left out, and records of steps: as known to a later start as to the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
import test_train_nanoset
from test_train_rollback import BAD, configure, poison

from kenotron_config import DEFAULT_CONFIG
from kenotron_data import Cursor, TokenFile
from kenotron_dist import Mesh
from kenotron_engine import NextToken, Parts
from kenotron_train.assemble import data_plan
from kenotron_train.config_file import load_config
from kenotron_train.data.stage_dataset import open_corpus
from kenotron_train.data.stage_loader import OpenStage
from kenotron_train.failures.nonfinite_folder import read_record
from kenotron_train.failures.skipped_batches import keep_left_out, left_out_since
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.progress import Progress
from kenotron_train.replay import replay
from kenotron_train.run import loop

GOOD = -7
"""No sample has this number: nothing is poisoned."""


class Dies(LifeCycle):
    """Ends the run after the steps with these numbers, as a kill would: nothing more is saved."""

    def __init__(self, *steps: int) -> None:
        self._left = list(steps)

    def post_train_step(self, training, progress, result) -> None:
        if progress.step == self._left[0]:
            del self._left[0]
        if not self._left:
            raise RuntimeError("killed")


def curve(folder: Path) -> list[tuple]:
    return [(s["step"], s["lm_loss"], s["grad_norm"]) for s in runs.metrics(folder)]


def records(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints/nonfinite").glob("step-*.json"))


def gone_back_and_died(folder: Path, *after: int) -> None:
    """A run whose step 5 is undone; it goes on from step 3, and dies before it saves again."""
    config = configure(folder, "one", optimizer__max_rollbacks=1)
    with poison(17), pytest.raises(RuntimeError, match="killed"):
        loop.run(Mesh.connect(), config, hooks=(Dies(*(after or (5,))),))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that goes back once and is never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with poison(17):
        loop.run(Mesh.connect(), configure(folder, "one", optimizer__max_rollbacks=1))
    return folder


@pytest.mark.parametrize("bad", [17, GOOD], ids=["bad again", "bad once"])
@pytest.mark.parametrize("after", [(4, 4), (5,)], ids=["at once", "a batch later"])
def test_a_run_that_died_after_it_went_back_trains_on_the_same_batches(
    bad: int, after: tuple, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone_back_and_died(tmp_path, *after)
    capsys.readouterr()
    with poison(bad):
        loop.run(Mesh.connect(), configure(tmp_path, "one", optimizer__max_rollbacks=1))
    said = capsys.readouterr().out
    assert "; a batch is left out since, as " in said and "is undone" not in said
    assert curve(tmp_path) == curve(whole) and len(curve(whole)) == 6
    assert records(tmp_path) == ["step-5.json"]  # it was not met once more


def test_steps_after_a_rollback_are_replayed_as_the_run_made_them(
    whole: Path, tmp_path: Path
) -> None:
    gone_back_and_died(tmp_path)
    config = configure(tmp_path, "one")
    with poison(17):
        found = replay.replay(Mesh.connect(), config, 5)
        undone = tmp_path / "checkpoints/nonfinite/step-5.json"
        again = replay.replay(Mesh.connect(), config, undone)
    assert (5, float(found["loss"]), float(found["grad_norm"])) == curve(whole)[4]
    assert found["left_out"] == [BAD.to_dict()] and again["left_out"] == []
    want = read_record(undone)
    assert again["loss"] == "nan" and {key: again[key] for key in want} == want
    with pytest.raises(ValueError, match=r"metrics\.jsonl is no record of a step"):
        replay.replay(Mesh.connect(), config, tmp_path / "checkpoints/metrics.jsonl")
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps({key: want[key] for key in want if key != "loss"}))
    with pytest.raises(ValueError, match=r"cut\.json is no record of a step: loss is missing"):
        replay.replay(Mesh.connect(), config, cut)


def test_the_message_of_a_rollback_names_the_record_to_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone_back_and_died(tmp_path)
    record = tmp_path / "checkpoints/nonfinite/step-5.json"
    assert f"and --replay-step {record} makes it again" in capsys.readouterr().out


def test_a_checkpoint_that_was_written_anew_is_another(tmp_path: Path) -> None:
    mesh, step = Mesh.connect(), tmp_path / "3"
    step.mkdir()

    def write(seal: str) -> None:
        (step / "manifest.json").write_text(f'{{\n"records": {{}},\n"checksum": "{seal}"\n}}\n')

    from kenotron_ckpt import LocalStore, seal_of

    write("0123456789abcdef")
    assert seal_of((step / "manifest.json").read_text()) == "0123456789abcdef"
    store = LocalStore(step)
    before, first, second = Progress(3), Cursor(consumed=16), Cursor(consumed=24)
    assert left_out_since(tmp_path, store, before, mesh) == (before, "")
    keep_left_out(tmp_path, store, (first,), mesh)
    keep_left_out(tmp_path, store, (first, second), mesh)
    progress, said = left_out_since(tmp_path, store, before, mesh)
    assert progress.left_out == (first, second) and said.startswith("; 2 batches are left out")
    assert left_out_since(tmp_path, store, progress, mesh) == (progress, "")
    write("fedcba9876543210")
    assert left_out_since(tmp_path, store, before, mesh) == (before, "")
    (tmp_path / "nonfinite/left_out.json").write_text('[{"seal": "0"}]')
    with pytest.raises(ValueError, match=r"left_out\.json is damaged .*: remove it"):
        left_out_since(tmp_path, store, before, mesh)


def test_each_record_of_a_step_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(tmp_path, "one", optimizer__nonfinite="error")
    for name in ("step-5", "step-5.1", "step-5.2"):
        with poison(17), pytest.raises(FloatingPointError, match=rf"/{name}\.json, and --replay"):
            loop.run(Mesh.connect(), config)
    assert len(records(tmp_path)) == 3
    with poison(17):
        replay.replay(Mesh.connect(), config, 5)
        replay.replay(Mesh.connect(), config, tmp_path / "checkpoints/nonfinite/step-5.1.json")
    same = "as in {}/checkpoints/nonfinite/step-5.2.json: samples, loss, parameter"
    assert capsys.readouterr().out.count(same.format(tmp_path)) == 2
    assert (tmp_path / "checkpoints/nonfinite/replay-5.1/step-5.1.json").exists()


def caught(config) -> tuple[dict[int, list[int]], dict]:
    """Tokens of step 2's samples by their places, and the record of a nan in it."""
    tokens: dict[int, list[int]] = {}
    right = NextToken.loss

    def loss(self, model, share, count):
        found = {
            place: row.tolist()
            for micro in share.micros
            for place, row in zip(micro.samples_B.tolist(), micro.tokens_BS, strict=True)
        }
        if 4 in found:
            tokens.update(found)
        whole = right(self, model, share, count)
        return lambda x, m: Parts(whole(x, m).total * (float("nan") if 4 in found else 1.0))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(FloatingPointError):
        patch.setattr(NextToken, "loss", loss)
        loop.run(Mesh.connect(), config)
    (path,) = Path(config.checkpoints.checkpoints_path).glob("nonfinite/step-2.json")
    return tokens, read_record(path)


@pytest.mark.parametrize("mixed", [False, True], ids=["one folder", "a mixture"])
def test_a_record_says_where_its_samples_are(mixed: bool, tmp_path: Path) -> None:
    folders = [test_train_nanoset.write_folder(tmp_path / name, i) for i, name in enumerate("ab")]
    chosen = f"{{{folders[0]}: 0.5, {folders[1]}: 0.5}}" if mixed else str(folders[0])
    flags = test_train_nanoset.flags(tmp_path, f"{{dataset_folder: {chosen}}}")
    config = load_config(DEFAULT_CONFIG, flags[1::2])
    tokens, record = caught(config)
    data = open_corpus(data_plan(config), 0).training
    assert [row["sample"] for row in record["data"]] == record["samples"] == [4, 5, 6, 7]
    for row in record["data"]:
        want = tokens[row["sample"]]
        assert data.sample(row["index"]).tolist()[:-1] == want
        where = row["where"].rpartition("('")[2]  # of a mixture: the source's own words
        file, document, token = where.rstrip(")").split(", ")
        read = TokenFile(file.strip("'"))
        first = int(token.removeprefix("token "))
        assert read.tokens[first : first + len(want)].tolist() == want
        assert read.document_at(first) == int(document.removeprefix("document "))
        assert (row["source"] in map(str, folders)) == mixed and (
            row["source"] in file or not mixed
        )
    assert len({row["source"] for row in record["data"]}) == (2 if mixed else 1)


def test_data_without_an_index_have_no_origin_but_their_place() -> None:
    class Corpus:
        training = iter(())

    stage = OpenStage(0, Corpus(), None, 8, 0)
    assert stage.origins([3, 4]) == []


def test_a_record_is_json_that_a_person_can_read(whole: Path) -> None:
    record = json.loads((whole / "checkpoints/nonfinite/step-5.json").read_text())
    assert all(row["where"].startswith("sample ") for row in record["data"])
    assert record["samples"] == [16, 17, 18, 19]
