"""Runs that begin with weights that are there: of a checkpoint, or of a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import arguments, metrics, train

from kenotron_ckpt import TensorSize, read_manifest, read_record, resolve_step, write_safetensors
from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh, spawn
from kenotron_models import config_from_json, hf_import
from kenotron_models.hf import config_to_hf, hf_tensors
from kenotron_train.assemble import build_training
from kenotron_train.config_file import parse_config
from kenotron_train.run.initial import load_initial

SHORT = {"tokens__train_steps": 1, "checkpoints__save_final_state": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a short run in it."""
    path = tmp_path_factory.mktemp("first")
    done = train(path, *arguments(path, **SHORT))
    assert done.returncode == 0, done.stderr
    return path


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's checkpoint."""
    step = resolve_step(folder / "checkpoints")
    manifest = read_manifest(step)
    names = [name for name in manifest.records if not name.startswith("optimizer.")]
    return {name: read_record(step, manifest, name) for name in names}


def as_hf(folder: Path, target: Path, **changes: object) -> Path:
    """The weights of a run as a folder of Hugging Face."""
    state = read_manifest(folder / "checkpoints").state
    config = replace(config_from_json(state["model_config"]), **changes)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config_to_hf(config)))
    values = saved(folder)
    parts = [(n, p) for n, whole in hf_tensors(config).items() for p in whole.parts]
    write_safetensors(
        target / "model.safetensors",
        {p.name: TensorSize(p.shape, values[n].dtype) for n, p in parts},
        (p.of(values[n]) for n, p in parts),
    )
    return target


def configure(folder: Path, source: Path, **changes: object) -> Config:
    init = {"model__init_method": f"{{path: {source}}}"}
    flags = arguments(folder, **{**init, **changes})[1::2]
    return parse_config(DEFAULT_CONFIG.read_text(), "default.yaml", flags)


def begun(mesh: Mesh, config: Config) -> tuple[dict[str, torch.Tensor], str]:
    """First weights of one process, padding too, and the sentence about them."""
    training = build_training(config, mesh)
    said = load_initial(training)
    return {n: tensor.clone() for n, (tensor, _) in training.records().items()}, said


@pytest.mark.parametrize("kind", ["run folder", "step folder", "url", "hugging face"])
def test_weights_are_those_of_the_source(kind, folder, tmp_path):
    source = {
        "run folder": lambda: folder / "checkpoints",
        "step folder": lambda: folder / "checkpoints/1",
        "url": lambda: f"file://{folder}/checkpoints",
        "hugging face": lambda: as_hf(folder, tmp_path / "hf"),
    }[kind]()
    config = configure(tmp_path, source, model__make_vocab_size_divisible_by=64)
    found, said = spawn(begun, config)[0]
    assert said.startswith("The first weights are those of ")
    assert ("; logits and a gradient are those of transf" in said) == (kind == "hugging face")
    for name, value in saved(folder).items():
        assert torch.equal(found[name][: len(value)], value), name
        assert (found[name][len(value) :] == 0).all(), name
    assert len(found["embedding.weight"]) > config.decoder.vocab_size


def test_a_folder_that_transformers_computes_otherwise_begins_no_run(folder, tmp_path, monkeypatch):
    right = hf_import.read_hf_config

    def wrong(path):
        config, values = right(path)
        return replace(config, rms_norm_eps=0.1), values

    monkeypatch.setattr(hf_import, "read_hf_config", wrong)
    source = as_hf(folder, tmp_path / "hf")
    changes = {"model__model_config__rms_norm_eps": 0.1}
    with pytest.raises(ValueError, match="init_method.path: logits of a text(?s:.)*check: false"):
        begun(Mesh.connect(), configure(tmp_path, source, **changes))
    unchecked = {"model__init_method": f"{{path: {source}, check: false}}"}
    _, said = begun(Mesh.connect(), configure(tmp_path, source, **unchecked, **changes))
    assert said == f"The first weights are those of {source}"


def masters(mesh: Mesh, config: Config) -> dict[str, torch.Tensor]:
    """First masters of a data rank's slices, by name."""
    training = build_training(config, mesh)
    load_initial(training)
    return {name: tensor.clone() for name, (tensor, _) in training.optimizer.state().items()}


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("kind", ["ours", "hugging face"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_keep_every_bit_of_the_source(kind, dtype, dp, folder, tmp_path):
    source = folder / "checkpoints" if kind == "ours" else as_hf(folder, tmp_path / "hf")
    config = configure(tmp_path, source, model__dtype=dtype, parallelism__dp=dp)
    ranks = spawn(masters, config, dp=dp)
    for name, value in saved(folder).items():
        parts = [rank[f"optimizer.master.{name}"].flatten() for rank in ranks]
        assert torch.equal(torch.cat(parts), value.flatten()), name


def test_a_tied_model_begins_an_untied_one_and_not_the_other_way_round(folder, tmp_path):
    tied = as_hf(folder, tmp_path / "tied", tie_word_embeddings=True)
    found, _ = spawn(begun, configure(tmp_path, tied))[0]
    assert torch.equal(found["head.weight"], saved(folder)["embedding.weight"])

    said_tied = as_hf(folder, tmp_path / "said tied")
    says = json.loads((said_tied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (said_tied / "config.json").write_text(json.dumps(says))
    found, _ = spawn(begun, configure(tmp_path, said_tied))[0]
    assert torch.equal(found["head.weight"], saved(folder)["head.weight"])

    changes = {"model__model_config__tie_word_embeddings": "true"}
    for source in (folder / "checkpoints", as_hf(folder, tmp_path / "untied"), said_tied):
        done = train(tmp_path, *arguments(tmp_path, **begin(source), **changes))
        assert done.returncode == 1
        assert "has a head of its own, and model.model_config.tie_word" in done.stderr

    done = train(tmp_path, *arguments(tmp_path, **begin(tied), **SHORT, **changes))
    assert done.returncode == 0, done.stderr
    target = tmp_path / "other"
    target.mkdir()
    found, _ = spawn(begun, configure(target, tmp_path / "checkpoints"))[0]
    assert torch.equal(found["head.weight"], saved(tmp_path)["embedding.weight"])


def begin(source: Path) -> dict[str, str]:
    return {"model__init_method": f"{{path: {source}}}"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model__model_config__rope_theta": 5000.0}, "rope_theta: 5000.0 and 10000.0"),
        ({"model__model_config__num_hidden_layers": 3}, "num_hidden_layers: 3 and 2"),
        ({"model__model_config__vocab_size": 300}, "vocab_size: 300 and 257"),
        ({"model__model_config__rms_norm_eps": 0.5}, r"\n  rms_norm_eps .*: 0\.5 and "),
        (
            {"model__model_config__rope_scaling": "{rope_type: linear, factor: 2.0}"},
            r"rope_scaling: \{factor: 2\.0, rope_type: linear, .*\} and null",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["ours", "hugging face"])
def test_another_model_is_refused_by_its_key(kind, changes, sentence, folder, tmp_path):
    source = folder / "checkpoints" if kind == "ours" else as_hf(folder, tmp_path / "hf")
    with pytest.raises(ValueError, match="model.init_method.path: .*(?s:.)*" + sentence):
        begun(Mesh.connect(), configure(tmp_path, source, **changes))


def test_interleaved_positions_of_a_checkpoint_are_not_turned_into_halves(folder, tmp_path):
    changes = {"model__model_config__rope_interleaved": "true"}
    with pytest.raises(ValueError, match="rope_interleaved: True and False"):
        begun(Mesh.connect(), configure(tmp_path, folder / "checkpoints", **changes))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model.init_method.path: "):
        begun(Mesh.connect(), configure(tmp_path, tmp_path / "nothing"))


def test_a_run_begins_at_step_0_and_a_resumed_one_goes_on(folder, tmp_path):
    source = as_hf(folder, tmp_path / "hf")
    own = {"checkpoints__resume_checkpoint_path": tmp_path / "checkpoints"}
    flags = {
        **begin(source),
        **own,
        "tokens__train_steps": 2,
        "checkpoints__save_final_state": True,
    }
    first = train(tmp_path, *arguments(tmp_path, **flags))
    assert first.returncode == 0, first.stderr
    text = first.stdout + first.stderr
    assert f"the run starts afresh; The first weights are those of {source}" in text
    (source / "config.json").write_text("no longer needed")
    second = train(tmp_path, *arguments(tmp_path, **flags | {"tokens__train_steps": 3}))
    assert second.returncode == 0, second.stderr
    assert "Resumed after step 2" in second.stdout + second.stderr
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
