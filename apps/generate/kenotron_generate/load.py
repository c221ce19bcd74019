"""A model from a checkpoint or from a folder of Hugging Face, ready to run on this mesh."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kenotron_ckpt import load, open_safetensors, read_manifest, resolve
from kenotron_dist import Mesh, named_parameters, parameter_layouts, tie_storages
from kenotron_models import (
    DecoderSpec,
    LayerStack,
    build_decoder,
    config_from_json,
    layer_costs,
)
from kenotron_models.hf import hf_tensors, is_superfluous, read_hf_config
from kenotron_pp import Pipeline, Stages

HF_CONFIG = "config.json"
TOKENIZER = "tokenizer"
"""Folder beside the steps where a converted model keeps its tokenizer."""


@dataclass(frozen=True)
class Description:
    """What a checkpoint, or a folder of Hugging Face, says of its model."""

    folder: Path
    """The step folder, or the model's."""
    model: DecoderSpec
    dtype: str
    sequence_length: int
    """Tokens the model is meant to see at once."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Mesh it was trained on."""
    tokenizer: str | None = None
    """Where its tokenizer is; None: bytes, or nobody says."""
    hub: bool = False
    """Whether the weights are Hugging Face's own, whose prompts begin with special tokens."""
    foreign: bool = False
    """Whether the folder is one of Hugging Face."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text."""


def describe(path: str | Path) -> Description:
    """Read what a step folder, the newest step in a run folder, or an HF folder says of its model.

    Raises FileNotFoundError or ValueError when it is none of them, or has no model in it.
    """
    if (Path(path) / HF_CONFIG).is_file():
        return _foreign(Path(path))
    folder = resolve(Path(path))
    manifest = read_manifest(folder)
    state = manifest.state
    missing = [key for key in ("model_config", "dtype", "sequence_length") if key not in state]
    if missing:
        raise ValueError(
            f"{folder} does not describe a model ({', '.join(missing)} missing): "
            "was it written by apps/train?"
        )
    spec = config_from_json(state["model_config"]).decoder
    imported = state.get("imported") or {}
    return Description(
        folder,
        spec,
        state["dtype"],
        int(state["sequence_length"]),
        dict(manifest.mesh),
        _tokenizer(folder, state),
        hub=bool(imported),
        ends=_ends(spec, imported.get("generation_config")),
    )


def load_model(described: Description, mesh: Mesh) -> Pipeline:
    """Build this rank's stage and fill it. Collective over the mesh.

    Raises ValueError when the mesh does not fit the model, or a file is damaged.
    """
    spec = described.model
    layers = build_decoder(spec, mesh["tp"], dtype=getattr(torch, described.dtype))
    stages = Stages.balanced(layers, layer_costs(spec), mesh.sizes["pp"])
    layouts = parameter_layouts(LayerStack(layers), mesh.sizes, stages.of_parameter)
    stack = LayerStack(stages.own(layers, mesh["pp"].rank))
    stack.to_empty(device=mesh.device)
    tie_storages(stack)
    wanted = {
        path: (parameter.detach().zero_(), layouts[path])  # padding is in no checkpoint
        for path, parameter in named_parameters(stack).items()
    }
    if described.foreign:
        opened = open_safetensors(described.folder)
        records = opened.records(hf_tensors(spec), lambda name: is_superfluous(name, spec))
        opened.load(records, wanted, mesh)
    else:
        load(described.folder, wanted, mesh)
    return Pipeline(stack, mesh["pp"], device=mesh.device)


def _foreign(folder: Path) -> Description:
    config, values = read_hf_config(folder)
    spec = config.decoder
    given = values.get("dtype") or values.get("torch_dtype") or "float32"
    generation = folder / "generation_config.json"
    said = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    named = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return Description(
        folder,
        spec,
        str(given),
        spec.max_position_embeddings,
        tokenizer=str(folder) if named else None,
        hub=True,
        foreign=True,
        ends=_ends(spec, {"eos_token_id": values.get("eos_token_id"), **said}),
    )


def _tokenizer(folder: Path, state: Mapping[str, Any]) -> str | None:
    """What a checkpoint names, or the files that a conversion has put beside its steps."""
    named = state.get("tokenizer")
    if named:
        return str(named["name"])
    beside = folder.parent / TOKENIZER
    return str(beside) if beside.is_dir() else None


def _ends(spec: DecoderSpec, generation: dict[str, Any] | None) -> tuple[int, ...]:
    found = (generation or {}).get("eos_token_id")
    given = found if isinstance(found, list) else [spec.eos_token_id if found is None else found]
    return tuple(int(token) for token in given if token is not None)
