"""A model folder of Hugging Face: its config, its tensors, and a comparison with transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kenotron_ckpt import Record, SafetensorsFolder, open_safetensors
from kenotron_convert.comparison import Wanted, compare
from kenotron_dist import Mesh
from kenotron_models import FamilyConfig
from kenotron_models.hf import (
    CONFIG,
    EMBEDDING,
    HEAD,
    hf_dtype,
    hf_tensors,
    is_superfluous,
    read_hf_config,
    with_its_head,
)

RESCALES = "rescale_prenorm_residual"


@dataclass(frozen=True)
class HFModel:
    """A model folder of Hugging Face whose config and headers were read."""

    folder: SafetensorsFolder
    config: FamilyConfig
    values: dict[str, Any]
    """What its config.json says."""
    records: dict[str, Record]
    """Our tensors, as rows of its own."""


def read_model(hf: Path) -> HFModel:
    """Read config.json and headers of a model folder.

    Raises:
        ValueError: it is no model that can be said here, or holds other tensors.
        OSError: a file cannot be read.
    """
    config, values = read_hf_config(hf)
    try:
        hf_dtype(values)
    except ValueError as error:
        raise ValueError(f"{hf / CONFIG}: {error}") from None
    opened = open_safetensors(hf)
    config = with_its_head(config, opened.same)
    records = opened.records(hf_tensors(config), lambda name: is_superfluous(name, config))
    return HFModel(opened, config, values, records)


def as_in_the_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of a config.json with which transformers keeps the weights that it loads.

    A Mamba of transformers 5 divides loaded weights by the root of the number of layers, too, and
    not only first values.
    """
    return {RESCALES: False} if values.get(RESCALES) else {}


def compare_hf(source: HFModel, dtype: torch.dtype | None = None) -> float | None:
    """Return how far the model, as it is read here, is from what transformers computes.

    Args:
        source: the model.
        dtype: what its weights are rounded to first; None: nothing is rounded.

    Returns:
        The largest deviation of logits and a gradient, in units of the largest; None where
        transformers is not installed.

    Raises:
        ValueError: transformers does not load the folder, or computes something else.
    """
    folder, records = source.folder, source.records

    def load(wanted: Wanted) -> None:
        own = dict(records)
        if HEAD not in own:  # tied
            own[HEAD] = own[EMBEDDING]
        folder.load(own, wanted, Mesh.connect())

    try:
        keys = as_in_the_file(source.values)
        return compare(load, source.config.decoder, folder.path, dtype=dtype, keys=keys)
    except ImportError:
        return None
    except ValueError as error:
        raise ValueError(
            f"{error}\n{folder.path} was not imported. Please report this; --no-check imports it "
            "all the same"
        ) from error
