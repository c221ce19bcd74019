"""First weights that are there already: of a model of Hugging Face, or of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from kenotron_ckpt import Checkpoint, open_safetensors, read_preferred
from kenotron_config import ExistingCheckpointInitConfig, ModelConfig
from kenotron_dist import Mesh
from kenotron_engine import Records
from kenotron_models import (
    DecoderSpec,
    TransformersSpec,
    config_from_json,
    is_tied_copy,
    transformers_tensors,
)
from kenotron_models.families import TransformersConfig
from kenotron_models.hf import (
    CONFIG,
    EMBEDDING,
    HEAD,
    differences,
    read_hf_config,
    turns_neighbours,
)
from kenotron_models.hf_import import OtherModel, read_model, remark
from kenotron_train.assemble import TrainingRun
from kenotron_train.run.adapters import begin_adapters

FREE = (
    "tie_word_embeddings", "max_position_embeddings", "bos_token_id", "eos_token_id",
    "embedding_dropout", "dropout",
)  # fmt: skip
"""Keys that may differ from the model that the weights are of; the first is checked separately."""
ROPE = ("theta", "scaling")
"""Keys that may differ, too, with ``accept_changed_rope``."""

NO_CHANGE = (
    "architectures", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "initializer_range", "max_position_embeddings",
)  # fmt: skip
"""Keys of config.json that may differ from that of the weights."""

KEYS = {
    "norm.eps": "rms_norm_eps (of a starcoder2: layer_norm_epsilon)",
    "window": "sliding_window_size (or sliding_window and layer_types)",
    "cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
    "rope.theta": "rope_theta",
    "rope.scaling": "rope_scaling",
    "rope.interleaved": "rope_interleaved",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads (of a starcoder2: num_kv_heads)",
    "head_dim": "head_dim",
    "qkv_bias": "attention_bias",
    "features": "intermediate_size",
}
"""Ends of names of a model's fields, and what ``model.model_config`` calls them."""


def load_initial(training: TrainingRun) -> str:
    """Fill weights and adapters as ``load_base`` and ``begin_adapters`` do; a sentence about it."""
    return "; ".join(filter(None, [load_base(training), begin_adapters(training)]))


def load_base(training: TrainingRun) -> str:
    """Fill this rank's weights from what ``model.init_method`` names; a sentence about it.

    Adapters are left as they are. Empty when weights are drawn. Each rank reads its slices only;
    the optimizer has no state. Collective over the mesh. Raises ValueError, naming the file and the
    key or the tensors: there is no model, it is damaged, or of other sizes or constants than
    ``model.model_config``; OSError.
    """
    method, mesh = training.checkpoints.model.init_method, training.mesh
    if not isinstance(method, ExistingCheckpointInitConfig):
        return ""
    path, spec, wanted = Path(method.path), training.plan.spec, training.first_records()
    # Adapters are drawn and not read: files of a base model do not have them.
    adapters = {} if training.plan.adapter is None else training.plan.adapter.tensors()
    wanted = {key: each for key, each in wanted.items() if each[1].name not in adapters}
    free = FREE + (ROPE if method.accept_changed_rope else ())
    try:
        with mesh.pulse.busy("reading the first weights"):
            if not (path / CONFIG).is_file():
                source = _read_checkpoint(method.path, spec, wanted, mesh, free)
            elif isinstance(spec, TransformersSpec):
                source = _read_transformers(path, spec, wanted, mesh)
            else:
                source = _read_hf(path, spec, wanted, mesh, free, check=method.check)
    except ValueError as error:
        raise ValueError(f"model.init_method.path: {error}") from error
    if training.plan.dtype == torch.float32 and training.plan.adapter is None:
        training.optimizer.reload()
    return f"The first weights are those of {source}"


def other_model(model: ModelConfig, spec: DecoderSpec) -> list[str]:
    """Name what the weights of a folder of Hugging Face contradict, without reading them."""
    method = model.init_method
    if not isinstance(method, ExistingCheckpointInitConfig) or isinstance(spec, TransformersSpec):
        return []
    path, free = Path(method.path), FREE + (ROPE if method.accept_changed_rope else ())
    try:
        if (path / CONFIG).is_file():
            theirs = read_hf_config(path)[0].decoder
            free += ("tie_word_embeddings", "interleaved")
            _check_same(replace(spec, tie_word_embeddings=False), theirs, path / CONFIG, free)
    except (ValueError, OSError) as error:
        return [f"model.init_method.path: {error}"]
    return []


def _read_hf(
    path: Path,
    spec: DecoderSpec,
    wanted: Records,
    mesh: Mesh,
    free: tuple[str, ...],
    *,
    check: bool,
) -> str:
    """Fill from a folder of Hugging Face; where a head's features have another order, reorder."""
    folder, turns = open_safetensors(path), turns_neighbours(spec)
    source = read_model(folder, turns)
    _check_same(spec, source.config.decoder, path / CONFIG, (*free, "interleaved"))
    source.load(wanted, mesh)
    # The first rank alone compares the model with transformers, from the folder and in one piece.
    if not check or mesh.rank != 0:
        return str(path)
    try:
        return f"{path}; {remark(read_model(folder) if turns else source)}"
    except OtherModel as error:
        raise ValueError(
            f"{error}\nPlease report this; model.init_method.check: false trains it all the same"
        ) from error


def _read_transformers(path: Path, spec: DecoderSpec, wanted: Records, mesh: Mesh) -> str:
    """Fill from a folder of the same model of transformers, names as they are there."""
    source = TransformersConfig(path=str(path))
    assert isinstance(spec, TransformersSpec)
    ours, theirs = json.loads(spec.config_json), json.loads(source.decoder.config_json)
    changed = [
        f"{key}: {ours.get(key)!r} and {theirs.get(key)!r}"
        for key in sorted({*ours, *theirs})
        if key not in NO_CHANGE and ours.get(key) != theirs.get(key)
    ]
    if changed:
        raise ValueError(
            f"{path / CONFIG} is of another model than model.model_config; first what that says:"
            + "".join(f"\n  {line}" for line in changed)
        )
    folder = open_safetensors(path)
    tensors = transformers_tensors(source.decoder)
    records = folder.records(tensors, lambda name: is_tied_copy(name, source.decoder))
    folder.load(records, wanted, mesh)
    return str(path)


def _read_checkpoint(
    path: str, spec: DecoderSpec, wanted: Records, mesh: Mesh, free: tuple[str, ...]
) -> str:
    """Fill from a checkpoint of any layout; the step that was read."""

    def read(checkpoint: Checkpoint) -> str:
        state = checkpoint.manifest.state
        if "model_config" not in state:
            raise ValueError(
                f"{checkpoint.store} does not describe a model: model_config is missing"
            )
        theirs = config_from_json(state["model_config"]).decoder
        _check_same(spec, theirs, checkpoint.store, free)
        checkpoint.load(_untied(wanted) if theirs.tie_word_embeddings else wanted)
        passed = "".join(f"; passed over {reason}" for reason in checkpoint.passed_over)
        return f"{checkpoint.store}{passed}"

    return read_preferred(path, mesh, read)


def _untied(wanted: Records) -> Records:
    """The head asks for the matrix of the embedding: in a tied checkpoint it is both."""
    return {
        name: (tensor, layout.renamed(EMBEDDING) if layout.name == HEAD else layout)
        for name, (tensor, layout) in wanted.items()
    }


def _check_same(
    ours: DecoderSpec, theirs: DecoderSpec, where: object, free: tuple[str, ...]
) -> None:
    if isinstance(ours, TransformersSpec) != isinstance(theirs, TransformersSpec):
        raise ValueError(
            f"{where} is of another model than model.model_config: one of them is of transformers "
            "(is_hf_config), the other is not"
        )
    if ours.tie_word_embeddings and not theirs.tie_word_embeddings:
        raise ValueError(
            f"{where} has a head of its own, and model.model_config.tie_word_embeddings is true: "
            "it would be lost; set it to false"
        )
    if changed := differences(ours, theirs, free):
        pairs = [line.partition(":") for line in changed]
        longer = any(name.endswith(tuple(f"rope.{each}" for each in ROPE)) for name, _, _ in pairs)
        hint = "\nmodel.init_method.accept_changed_rope: true extends their context" * longer
        raise ValueError(
            f"{where} is of another model than model.model_config; first what the config says, "
            "then what the weights were trained with (`kenotron-convert config` writes it):"
            + "".join(dict.fromkeys(f"\n  {key_of(name)}:{values}" for name, _, values in pairs))
            + hint
        )


def key_of(name: str) -> str:
    """Return the name that a field of a model has in ``model.model_config``, and its layer."""
    end = next((end for end in KEYS if f".{name}".endswith(f".{end}")), None)
    if end is None:
        return name
    layer = ".".join(name.split(".")[:2]) + ": " if name.startswith("layers.") else ""
    return layer + KEYS[end]
