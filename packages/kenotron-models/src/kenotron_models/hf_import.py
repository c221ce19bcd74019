"""A model folder of Hugging Face: reading it, and comparing what was read with transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kenotron_dist import Mesh
from kenotron_models.hf import (
    CONFIG,
    hf_dtype,
    hf_tensors,
    is_superfluous,
    read_hf_config,
    with_its_head,
)
from kenotron_models.hf_comparison import OtherModel, Wanted, compare
from kenotron_models.hf_tensors import EMBEDDING, HEAD, Whole
from kenotron_models.registry import AnyConfig
from kenotron_models.shapes import decoder_layouts

__all__ = [
    "HFModel",
    "OtherModel",
    "as_in_the_file",
    "compare_import",
    "read_model",
    "remark",
]

RESCALES = "rescale_prenorm_residual"
MOST = 10**9
"""Parameters of the largest model that ``remark`` compares."""


class Folder(Protocol):
    """Safetensors of a folder whose headers were read, as ``kenotron_ckpt.open_safetensors``."""

    @property
    def path(self) -> Path:
        """The folder."""
        ...

    def same(self, one: str, other: str) -> bool | None:
        """Return True where two tensors are equal; None: one is not there."""
        ...

    def records(self, ours: Mapping[str, Whole], may_be: Callable[[str], bool]) -> dict[str, Any]:
        """Our tensors, as rows of the folder's."""
        ...

    def load(self, records: Mapping[str, Any], wanted: Wanted, mesh: Mesh) -> None:
        """Fill tensors from records."""
        ...


@dataclass(frozen=True)
class HFModel:
    """A model folder of Hugging Face whose config and headers were read."""

    folder: Folder
    config: AnyConfig
    values: dict[str, Any]
    """Contents of its config.json."""
    records: dict[str, Any]
    """Our tensors, as rows of its own."""

    def load(self, wanted: Wanted, mesh: Mesh) -> None:
        """Fill tensors in place, a head of its own from a tied embedding. Collective over the mesh.

        Args:
            wanted: each of the shape that its layout has on this rank, by path.
            mesh: ranks that read together.

        Raises:
            ValueError: values are not finite, or a file is damaged.
            OSError: a file cannot be read.
        """
        records = dict(self.records)
        records.setdefault(HEAD, records[EMBEDDING])
        self.folder.load(records, wanted, mesh)


def read_model(folder: Folder, interleaved: bool | None = None) -> HFModel:
    """Read config.json of a model folder, and find our tensors in it.

    Args:
        folder: the opened folder.
        interleaved: whether our rotary positions turn neighbouring features; None: as theirs.

    Raises:
        ValueError: it is no model that can be said here, or holds other tensors.
        OSError: a file cannot be read.
    """
    config, values = read_hf_config(folder.path)
    try:
        hf_dtype(values)
    except ValueError as error:
        raise ValueError(f"{folder.path / CONFIG}: {error}") from None
    config = with_its_head(config, folder.same)
    ours = hf_tensors(config, interleaved=interleaved)
    records = folder.records(ours, lambda name: is_superfluous(name, config))
    return HFModel(folder, config, values, records)


def compare_import(source: HFModel, dtype: torch.dtype | None = None) -> float | None:
    """Return how far a model, as it is read here, is from what transformers computes.

    Args:
        source: the model; this process reads it alone.
        dtype: what weights of both are rounded to first; None: nothing is rounded.

    Returns:
        The largest deviation of logits and a gradient, in units of the largest; None where
        transformers is not installed.

    Raises:
        OtherModel: transformers does not load the folder, or computes something else.
        ValueError: a weight is not finite, or a file is damaged.
    """
    spec, folder = source.config.decoder, source.folder.path
    keys = as_in_the_file(source.values)
    try:
        return compare(
            lambda wanted: source.load(wanted, Mesh.alone()), spec, folder, dtype=dtype, keys=keys
        )
    except ImportError:
        return None


def as_in_the_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of a config.json with which transformers keeps the weights that it loads.

    A Mamba of transformers 5 divides loaded weights by the root of the number of layers, too, and
    not only first values.
    """
    return {RESCALES: False} if values.get(RESCALES) else {}


def remark(source: HFModel) -> str:
    """Compare a model with transformers, for a program that reads it to do something else.

    Args:
        source: the model, read with rotary positions as theirs; this process reads it alone.

    Returns:
        The end of a sentence: how far it is, or why it was not compared.

    Raises:
        ValueError: as ``compare_import``.
    """
    layouts = decoder_layouts(source.config.decoder).values()
    if (count := sum(math.prod(layout.shape) for layout in layouts)) > MOST:
        command = f"kenotron-convert compare --hf {source.folder.path}"
        return f"not compared with transformers for its {count:.1e} parameters ({command} does it)"
    found = compare_import(source)
    if found is None:
        return "not compared with transformers, which is not installed"
    return f"logits and a gradient are those of transformers to {found:.1e} of the largest"
