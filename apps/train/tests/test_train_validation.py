"""Loss and perplexity of each source: by hand, on every layout, and without any effect."""

from __future__ import annotations

import math
import os

import pytest
import runs
import torch
from own_runs import LAYOUTS, PRELOAD, configure, documents, jsonl, run
from torch.nn.functional import cross_entropy

from kenotron_dist import Mesh, spawn
from kenotron_engine import Validation, perplexity
from kenotron_models import Context
from kenotron_train.assemble import build_training, data_plan
from kenotron_train.data.stage_dataset import open_corpus
from kenotron_train.evaluate.validation import validate

VALIDATING = {"tokens.limit_val_batches": 3, "tokens.val_check_interval": 2}


@pytest.fixture
def section(tmp_path):
    """A set of words and a shorter one of digits."""
    words = jsonl(tmp_path / "words.jsonl", [{"text": text} for text in documents()])
    digits = [{"text": f"{i * i} {i * 7}" * 9} for i in range(80)]
    return {"hf_dataset_or_datasets": [str(words), str(jsonl(tmp_path / "d.jsonl", digits))]}


def both(mesh: Mesh, config, cache) -> tuple[Validation, dict[str, float], float]:
    """The validation of a fresh model, and its losses by hand of all that is held out."""
    os.environ["KENOTRON_CACHE"] = cache
    training = build_training(config, mesh)
    held = open_corpus(data_plan(config), 0).validation
    losses, total, count = {}, 0.0, 0
    with torch.no_grad():
        for name, data in held.items():
            rows = torch.tensor([data.sample(i).tolist() for i in range(len(data))])
            found = []
            for row in rows:
                (micro,) = training_batch(row)
                tokens, context = micro.tokens_BS.flatten(), Context(micro.positions_BS)
                logits = training.model.pipeline.forward([tokens], [context])[0]
                found.append(cross_entropy(logits, micro.labels_BS.flatten(), reduction="sum"))
            losses[name] = float(sum(found)) / rows[:, 1:].numel()
            total, count = total + float(sum(found)), count + rows[:, 1:].numel()
    found = validate(training, held)
    assert found is not None
    return found, losses, total / count


def training_batch(row):
    from kenotron_data import Batch

    shape = (1, 1, len(row) - 1)
    places = torch.arange(len(row) - 1)
    return Batch(
        row[:-1].reshape(shape), row[1:].reshape(shape), places.reshape(shape), torch.zeros(1, 1)
    )


def test_each_source_has_the_mean_over_its_own_targets(tmp_path, section):
    config = configure(tmp_path / "1", section, {"tokens.limit_val_batches": 1000})
    cache = str(tmp_path / "cache")
    ((found, by_hand, overall),) = spawn(both, config, cache, preload=PRELOAD)
    assert len(by_hand) == 2
    assert found.sources == pytest.approx(by_hand, rel=1e-5)
    assert found.loss == pytest.approx(overall, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(overall), rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_same_on_every_layout(tmp_path, section, layout):
    run(tmp_path / "1", section, VALIDATING)
    run(tmp_path / "2", section, VALIDATING | LAYOUTS[layout])
    for one, many in zip(runs.metrics(tmp_path / "1"), runs.metrics(tmp_path / "2"), strict=True):
        assert ("validation_loss" in one) == ("validation_loss" in many) == (one["step"] % 2 == 0)
        if "validation_loss" in one:
            assert many["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-5)
            assert one["validation_perplexity"] == pytest.approx(math.exp(one["validation_loss"]))
            sources = one["validation_sources"]
            assert set(sources) == set(section["hf_dataset_or_datasets"])
            for name, figures in many["validation_sources"].items():
                assert figures == pytest.approx(sources[name], rel=1e-5)


def test_it_never_changes_the_training(tmp_path, section):
    seldom = run(tmp_path / "1", section, VALIDATING | {"tokens.val_check_interval": -1})
    often = run(tmp_path / "2", section, VALIDATING | {"tokens.val_check_interval": 1})
    assert often == seldom


def test_the_log_names_each_source(tmp_path, section):
    names = section["hf_dataset_or_datasets"]
    flags = runs.arguments(tmp_path, tokens__train_steps=2)
    flags += ["--set", f"data_stages.0.data.dataset.hf_dataset_or_datasets=[{', '.join(names)}]"]
    done = runs.start(
        "env", f"KENOTRON_CACHE={tmp_path}/cache", runs.sys.executable, str(runs.APP), *flags,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "val_loss" in line]
    (last,) = [step for step in runs.metrics(tmp_path) if "validation_loss" in step]
    assert f"val_loss: {last['validation_loss']:.3g} | val_perplexity: " in line
    for name in names:
        assert f"| {name}: {last['validation_sources'][name]['loss']:.3g} (" in line


def test_perplexity_has_no_overflow():
    assert perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))
