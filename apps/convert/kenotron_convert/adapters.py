"""Adapters: from a checkpoint to a folder that peft loads, and from that into a model's weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kenotron_ckpt import (
    Location,
    SafetensorsFolder,
    TensorSize,
    open_checkpoint,
    open_safetensors,
    read_box,
    write_safetensors,
)
from kenotron_dist import Mesh
from kenotron_models import ADAPTER, AdapterSpec, linear_parts, model_from_json, targeted
from kenotron_models.hf import TensorPart, Whole, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a folder of peft."""
PREFIX = "base_model.model."
"""Begins the names of its tensors."""


def adapter_to_peft(ckpt: Location, folder: Path, *, overwrite: bool = False) -> int:
    """Write a folder that peft loads, from a checkpoint with adapters; returns how many.

    Args:
        ckpt: a step folder or a run folder, of any layout.
        folder: to make.
        overwrite: whether an older adapter may be replaced.

    Raises:
        ValueError: there is no such checkpoint, or it has no adapters; the folder is there.
        OSError: a file cannot be read or written.
    """
    checkpoint = open_checkpoint(ckpt, Mesh.connect(), select=lambda n: ".lora." in n)
    state = dict(checkpoint.manifest.state.get("model_config", {}))
    if (given := state.pop(ADAPTER, None)) is None:
        raise ValueError(f"{checkpoint.store} has no adapter: `kenotron-to-hf` writes its weights")
    config, _ = model_from_json(state)
    weights = targeted(linear_parts(config), given["targets"])
    how = {key: given[key] for key in ("kind", "rank", "alpha", "dropout")}
    spec = AdapterSpec(weights=weights, **how)
    _make(folder, CONFIG, overwrite)
    values, ours = spec.to_peft(given["base"]), spec.tensors()
    records = checkpoint.manifest.records
    sizes = {
        whole.parts[0].name: TensorSize(whole.shape, getattr(torch, records[name].dtype))
        for name, whole in ours.items()
    }
    write_safetensors(
        folder / WEIGHTS,
        sizes,
        (
            whole.parts[0].of(
                read_box(checkpoint.store, records[name], (0,) * len(whole.shape), whole.shape)
            )
            for name, whole in ours.items()
        ),
    )
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    return len(values["target_modules"])


def merge_adapter(adapter: Path, base: Path, folder: Path, *, overwrite: bool = False) -> int:
    """Write a model folder whose weights have an adapter in them; returns how many changed.

    Sums are made in fp32 and rounded to the format of the weights. One weight is in memory at once.

    Args:
        adapter: folder of peft, which peft or ``adapter_to_peft`` wrote.
        base: model folder of Hugging Face that it belongs to.
        folder: to make.
        overwrite: whether an older model may be replaced.

    Raises:
        ValueError: a file is missing or damaged, or the adapter is of another model. OSError.
    """
    keys = read_json(adapter / CONFIG)
    if keys.get("peft_type") != "LORA" or keys.get("use_rslora") or keys.get("alpha_pattern"):
        raise ValueError(f"{adapter / CONFIG}: it must be of a LORA with one lora_alpha / r")
    own, theirs = open_safetensors(adapter, single=WEIGHTS), open_safetensors(base)
    end = ".lora_A.weight"
    modules = {n.removeprefix(PREFIX).removesuffix(end) for n in own.tensors if n.endswith(end)}
    if missing := sorted(m for m in modules if f"{m}.weight" not in theirs.tensors):
        raise ValueError(f"{base} has no {missing[0]}.weight, for which {adapter} has an adapter")
    _make(folder, "config.json", overwrite)
    scale = keys["lora_alpha"] / keys["r"]

    def values(names: list[str]) -> Iterator[Tensor]:
        for name in names:
            weight, module = _read(theirs, name), name.removesuffix(".weight")
            merged = module in modules and name.endswith(".weight")
            yield _merged(weight, own, PREFIX + module, scale) if merged else weight

    files: dict[str, list[str]] = {}
    for name, stored in theirs.tensors.items():
        files.setdefault(stored.file, []).append(name)
    for file, names in files.items():
        sizes = {n: TensorSize(theirs.tensors[n].shape, theirs.tensors[n].dtype) for n in names}
        write_safetensors(folder / file, sizes, values(names))
    for other in base.iterdir():
        if other.is_file() and other.name not in files:
            shutil.copyfile(other, folder / other.name)
    return len(modules)


def _merged(weight: Tensor, own: SafetensorsFolder, module: str, scale: float) -> Tensor:
    """Return a weight (O, I) with its adapter in it."""
    a, b = (_read(own, f"{module}.lora_{kind}.weight").float() for kind in "AB")
    whole = weight.float() + scale * b @ a
    if (norms := f"{module}.lora_magnitude_vector") in own.tensors:
        share = _read(own, norms).float() / torch.linalg.norm(whole, dim=1)
        whole = share[:, None] * whole
    return whole.to(weight.dtype)


def _read(folder: SafetensorsFolder, name: str) -> Tensor:
    """Return a whole tensor of a folder."""
    shape = folder.tensors[name].shape
    start = (0,) * len(shape)
    whole = {name: Whole(shape, (TensorPart(name, shape, start),))}
    return read_box(folder.path, folder.records(whole, lambda _: True)[name], start, shape)


def _make(folder: Path, marker: str, overwrite: bool) -> None:
    """Make an empty folder, or take one with an older file ``marker`` if it may be replaced."""
    there = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if there and not (overwrite and (folder / marker).is_file()):
        raise ValueError(f"{folder} is there: give --overwrite to replace it, or another folder")
    folder.mkdir(parents=True, exist_ok=True)
