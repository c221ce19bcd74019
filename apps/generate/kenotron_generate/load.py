"""A model from a checkpoint, ready to run on this mesh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kenotron_ckpt import load, read_manifest, resolve
from kenotron_dist import Mesh, named_parameters, parameter_layouts, tie_storages
from kenotron_models import LayerStack, LlamaConfig, build_decoder, layer_costs
from kenotron_pp import Pipeline, Stages


@dataclass(frozen=True)
class Description:
    """What a checkpoint says of its model."""

    folder: Path
    """The step folder."""
    model: LlamaConfig
    dtype: str
    sequence_length: int
    """Tokens the model was trained to see at once."""
    sizes: dict[str, int]
    """Mesh it was trained on."""


def describe(path: str | Path) -> Description:
    """Read the description of a checkpoint (a step folder, or the newest step in a run folder).

    Raises FileNotFoundError or ValueError when there is none, or when it has no model in it.
    """
    folder = resolve(Path(path))
    manifest = read_manifest(folder)
    state = manifest.state
    missing = [key for key in ("model_config", "dtype", "sequence_length") if key not in state]
    if missing:
        raise ValueError(
            f"{folder} does not describe a model ({', '.join(missing)} missing): "
            "was it written by apps/train?"
        )
    model = LlamaConfig.from_dict(state["model_config"])
    return Description(
        folder, model, state["dtype"], int(state["sequence_length"]), dict(manifest.mesh)
    )


def load_model(described: Description, mesh: Mesh) -> Pipeline:
    """Build this rank's stage and fill it from the checkpoint. Collective over the mesh.

    Raises ValueError when the mesh does not fit the model, or a file is damaged.
    """
    layers = build_decoder(described.model, mesh["tp"], dtype=getattr(torch, described.dtype))
    stages = Stages.balanced(layers, layer_costs(described.model), mesh.sizes["pp"])
    layouts = parameter_layouts(LayerStack(layers), mesh.sizes, stages.of_parameter)
    stack = LayerStack(stages.own(layers, mesh["pp"].rank))
    stack.to_empty(device=mesh.device)
    tie_storages(stack)
    wanted = {
        path: (parameter.detach().zero_(), layouts[path])  # padding is in no checkpoint
        for path, parameter in named_parameters(stack).items()
    }
    load(described.folder, wanted, mesh)
    return Pipeline(stack, mesh["pp"], device=mesh.device)
