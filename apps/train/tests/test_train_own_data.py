"""Data of one's own: functions, indexables and iterables, on every layout and resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import runs
from own_runs import LAYOUTS, configure, run

from kenotron_dist import RankError
from kenotron_train.assemble import data_plan
from kenotron_train.data.own_data import OwnData, check_hook, own_data
from kenotron_train.data.stage_dataset import open_corpus

SIZE = 200
EXAMPLE = Path(__file__).parents[1] / "examples/custom_dataloader"


def sample(i: int) -> list[int]:
    """33 ids that a small model can learn something from."""
    return [(3 * i + 5 * place) % 256 for place in range(33)]


class Listed:
    """Samples by index."""

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return {"input_ids": sample(i)}


class Stream:
    """Samples that can only be iterated, ``length`` of them."""

    def __init__(self, length=SIZE):
        self.length = length

    def __iter__(self):
        return map(sample, range(self.length))


SOURCES = {
    "function": OwnData(sample, samples=SIZE),
    "indexable": Listed(),
    "iterable": Stream(),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_all_kinds_train_alike_on_every_layout(tmp_path, kind):
    one = run(tmp_path / "1", None, loader=SOURCES[kind])
    for name, changes in LAYOUTS.items():
        many = run(tmp_path / name, None, changes, loader=SOURCES[kind])
        assert [loss for loss, _ in many] == pytest.approx([loss for loss, _ in one], rel=1e-5)
    assert one != run(tmp_path / "made up", None)


def test_a_function_and_an_indexable_of_the_same_samples_are_the_same(tmp_path):
    one = run(tmp_path / "1", None, loader=SOURCES["function"])
    assert run(tmp_path / "2", None, loader=SOURCES["indexable"]) == one
    assert run(tmp_path / "3", None, loader={"Python sources": Listed()}) == one


@pytest.mark.parametrize("kind", SOURCES)
def test_a_resumed_run_reads_what_comes_next(tmp_path, kind):
    saving = {"checkpoints.checkpoint_interval": 2}
    whole = run(tmp_path / "1", None, saving, loader=SOURCES[kind])
    resumed = {"checkpoints.resume_checkpoint_path": tmp_path / "1/checkpoints/2"}
    assert run(tmp_path / "2", None, resumed, loader=SOURCES[kind]) == whole[2:]


def test_a_tenth_of_what_has_an_index_is_held_out(tmp_path):
    config = configure(tmp_path, None, {"tokens.limit_val_batches": 1})
    corpus = open_corpus(data_plan(config), 0, Listed())
    (held,) = corpus.validation.values()
    assert (len(corpus.training), len(held)) == (180, 20)
    assert held.sample(0).tolist() == sample(180)
    assert "nothing is held out" in open_corpus(data_plan(config), 0, Stream()).about


def test_the_end_of_a_stream_is_an_error_that_says_how_far_it_went(tmp_path):
    with pytest.raises(RankError, match=r"data_stages.0: the data ended after 8 samples, before s"):
        run(tmp_path, None, loader=Stream(11))


def test_samples_of_another_length_are_refused(tmp_path):
    with pytest.raises(RankError, match="samples have 33 ids, but sequence_length 31 needs 32"):
        run(tmp_path, None, {"tokens.sequence_length": 31}, loader=Listed())


def test_a_hook_that_nobody_reads_is_refused(tmp_path):
    text = {"hf_dataset_or_datasets": "a.txt"}
    with pytest.raises(ValueError, match="no stage says data.dataset: null"):
        check_hook(configure(tmp_path, text).data_stages, Listed())
    with pytest.raises(ValueError, match="handed over for 'other'; .* null are 'Python sources'"):
        check_hook(configure(tmp_path, None).data_stages, {"other": Listed()})


@pytest.mark.parametrize(
    ("source", "sentence"),
    [(sample, "give the samples of an epoch"), (3, "int is no function of an index")],
)
def test_wrong_sources_are_named(source, sentence):
    with pytest.raises(ValueError, match=sentence):
        own_data(source, "web")


def test_the_example_learns(tmp_path):
    script = EXAMPLE / "train.py"
    assert len(script.read_text().splitlines()) <= 40
    done = runs.start(
        sys.executable, str(script), "--config-file", str(EXAMPLE / "config.yaml"),
        "--set", "tokens.train_steps=30", "--set", "checkpoints.checkpoints_path=checkpoints",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "data of one's own: 9,000 samples, 1,000 held out" in done.stdout
    steps = runs.metrics(tmp_path)
    assert len(steps) == 30
    assert steps[-1]["lm_loss"] < 0.7 * steps[0]["lm_loss"]
    assert steps[-1]["validation_loss"] < 0.7 * steps[0]["lm_loss"]
    assert json.loads((tmp_path / "checkpoints/30/manifest.json").read_text())
