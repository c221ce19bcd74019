"""A model from a checkpoint or from a folder of Hugging Face, ready to run on this mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kenotron_ckpt import Manifest, load, open_safetensors, read_manifest, resolve_step
from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters
from kenotron_engine import (
    Layouts,
    ModelOnMesh,
    ModelPlan,
    Records,
    assemble,
    model_as_trained,
)
from kenotron_models import (
    Build,
    DecoderSpec,
    LayerStack,
    build_decoder,
    layer_costs,
    model_from_json,
)
from kenotron_models.hf import CONFIG, EMBEDDING, hf_dtype, hub_folder, read_json
from kenotron_models.hf_import import OtherModel, read_model, remark
from kenotron_pp import Pipeline

_VARIABLE = "!env "
TOKENIZER = "tokenizer"
"""Folder next to the steps where a converted model keeps its tokenizer."""


@dataclass(frozen=True)
class Description:
    """The model of a checkpoint or of a folder of Hugging Face."""

    folder: Path | str
    """The step folder, by its path or URL, or the model's."""
    model: DecoderSpec
    dtype: str
    sequence_length: int
    """Tokens the model is meant to see at once."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Mesh it was trained on."""
    tokenizer: str | None = None
    """Location of its tokenizer; None: bytes, or unknown."""
    hub: bool = False
    """True where the weights are Hugging Face's own, whose prompts begin with special tokens."""
    is_foreign: bool = False
    """It is a folder of Hugging Face, not a checkpoint."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text: of generation_config.json where there is one, else of the config."""
    begin: int | None = None
    """Token that begins a text out of nothing."""
    reproducible: dict[str, Any] | None = None
    """Conditions of a training with `general.reproducible`; None: it was without."""


def describe(path: str | Path) -> Description:
    """Read what a step folder, the newest step in a run folder, or an HF folder says of its model.

    The first two may be URLs.

    Raises FileNotFoundError or ValueError when it is none of them, or has no model in it.
    """
    path = hub_folder(str(path))
    if (Path(path) / CONFIG).is_file():
        return _foreign(Path(path))
    folder = resolve_step(path)
    manifest = read_manifest(folder)
    state = manifest.state
    if "model_config" not in state:
        raise ValueError(
            f"{folder} does not describe a model (model_config is missing): "
            "was it written by apps/train?"
        )
    config, multipliers = model_from_json(state["model_config"])
    spec = multipliers.applied(config.decoder)
    imported = state.get("imported") or {}
    generation = imported.get("generation_config") or {"eos_token_id": spec.eos_token_id}
    return Description(
        folder,
        spec,
        state.get("dtype") or _dtype_of(folder, manifest),
        int(state.get("sequence_length") or spec.max_position_embeddings),
        dict(manifest.mesh),
        _tokenizer(folder, state),
        hub=bool(imported),
        ends=_ends(generation),
        begin=generation.get("bos_token_id", spec.bos_token_id),
        reproducible=state.get("reproducible"),
    )


def load_model(described: Description, mesh: Mesh) -> Pipeline:
    """Build this rank's stage and fill it. Collective over the mesh.

    Raises ValueError when the mesh does not fit the model, or a file is damaged.
    """

    def read(stack: LayerStack, layouts: Layouts) -> None:
        wanted = {
            path: (parameter.detach().zero_(), layouts[path])  # padding is in no checkpoint
            for path, parameter in named_parameters(stack).items()
        }
        _fill(described, wanted, mesh)

    build = Build(mesh["tp"], dtype=getattr(torch, described.dtype), ep=mesh["ep"])
    layers = build_decoder(described.model, build)
    return assemble(layers, mesh, read, costs=layer_costs(described.model)).pipeline


def load_scorer(
    described: Description, mesh: Mesh, *, threads: int | None
) -> tuple[ModelOnMesh, str]:
    """Build this rank's stage of a model that scores texts, and fill it. Collective over the mesh.

    Args:
        described: the model; that of a run with `general.reproducible` computes as it did, where
            the mesh allows it.
        mesh: any layout that the model fits.
        threads: those that torch has; None: those of a reproducible run.

    Returns:
        The model, and a remark on the bits of a reproducible run; empty: they are its own.

    Raises:
        ValueError: as ``load_model``.
    """
    dtype, saved = getattr(torch, described.dtype), described.reproducible
    plan = ModelPlan(spec=described.model, dtype=dtype, draws=None)  # padding is 0
    model, remark = model_as_trained(plan, saved, mesh, scores=True, threads=threads)
    _fill(described, model.records(), mesh)
    return model, remark


def _fill(described: Description, wanted: Records, mesh: Mesh) -> None:
    """Fill tensors of a checkpoint or a model folder. Collective over the mesh."""
    if described.is_foreign:
        read_model(open_safetensors(described.folder)).load(wanted, mesh)
    else:
        load(described.folder, wanted, mesh)


def remark_on(described: Description) -> str:
    """Compare a folder of Hugging Face with transformers, on this rank alone; a line about it.

    Raises ValueError when they compute something else.
    """
    try:
        return f"{described.folder}: {remark(read_model(open_safetensors(described.folder)))}"
    except OtherModel as error:
        raise ValueError(
            f"{error}\nPlease report this; --no-check reads it all the same"
        ) from error


def _foreign(folder: Path) -> Description:
    opened = open_safetensors(folder)
    source = read_model(opened)
    spec, values = source.config.decoder, source.values
    generation = folder / "generation_config.json"
    said = read_json(generation) if generation.is_file() else values
    named = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return Description(
        folder,
        spec,
        hf_dtype(values) or opened.dtype,
        spec.max_position_embeddings,
        tokenizer=str(folder) if named else None,
        hub=True,
        is_foreign=True,
        ends=_ends(said),
        begin=said.get("bos_token_id", values.get("bos_token_id")),
    )


def _tokenizer(folder: Path | str, state: Mapping[str, Any]) -> str | None:
    """Find the tokenizer that a checkpoint names, or the files of a conversion near its steps."""
    named = state.get("tokenizer")
    if named:
        return _named(folder, str(named["name"]))
    tokenizer = Path(folder).parent / TOKENIZER  # one next to a URL is not read
    return str(tokenizer) if tokenizer.is_dir() else None


def _dtype_of(folder: Path | str, manifest: Manifest) -> str:
    """Dtype of the weights where the state has none: of an imported checkpoint."""
    if EMBEDDING not in manifest.records:
        raise ValueError(f"{folder} holds no model: {EMBEDDING} is missing")
    return manifest.records[EMBEDDING].dtype


def _ends(generation: Mapping[str, Any]) -> tuple[int, ...]:
    """As transformers reads it: a token, several, or none."""
    found = generation.get("eos_token_id")
    given = found if isinstance(found, list) else [found]
    return tuple(int(token) for token in given if token is not None)


def _named(folder: Path | str, name: str) -> str:
    """Look up a name that the run took from a variable of its environment (`!env NAME`)."""
    if not name.startswith(_VARIABLE):
        return name
    variable, *other = name.removeprefix(_VARIABLE).split(" ", 1)
    if variable not in os.environ and not other:
        raise ValueError(
            f"{folder} was trained with the tokenizer that {variable} named in the environment: "
            f"set {variable}, or give --tokenizer"
        )
    return os.environ.get(variable, *other)
