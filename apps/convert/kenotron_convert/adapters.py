"""Adapters: from a checkpoint to a folder that peft loads, and from that into a model's weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
from kenotron_convert.adapter_stacks import is_stack, stack_plans
from kenotron_convert.drafts import check_apart, check_replaceable, draft_of
from kenotron_dist import Mesh
from kenotron_models import model_from_json
from kenotron_models.adapters import (
    ADAPTER,
    AdapterSpec,
    foreign_keys,
    linear_parts,
    rank_and_scale,
    targeted,
)
from kenotron_models.hf import PEFT_PREFIX, TensorPart, Whole, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a folder of peft."""
MODEL = "config.json"
CONV1D = ("gpt2", "openai-gpt")
"""``model_type`` of models whose linear layers, but for the head, have weights (I, O)."""


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
    check_apart(folder, checkpoint.store)
    state = dict(checkpoint.manifest.state.get("model_config", {}))
    if (given := state.pop(ADAPTER, None)) is None:
        raise ValueError(f"{checkpoint.store} has no adapter: `kenotron-to-hf` writes its weights")
    config, _ = model_from_json(state)
    weights = targeted(linear_parts(config), given["targets"])
    how = {key: given[key] for key in ("kind", "rank", "alpha", "dropout")}
    spec = AdapterSpec(weights=weights, **how)
    check_replaceable(folder, CONFIG, overwrite)
    values, ours = spec.to_peft(given["base"]), spec.tensors()
    records = checkpoint.manifest.records
    # Sizes of all tensors go into the header, so values can be read one at a time as they are
    # written.
    sizes = {
        whole.parts[0].name: TensorSize(whole.shape, getattr(torch, records[name].dtype))
        for name, whole in ours.items()
    }
    tensors = (
        whole.parts[0].of(
            read_box(checkpoint.store, records[name], (0,) * len(whole.shape), whole.shape)
        )
        for name, whole in ours.items()
    )
    with draft_of(folder) as draft:
        write_safetensors(draft / WEIGHTS, sizes, tensors)
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        (draft / CONFIG).write_text(text, encoding="utf-8")
    return len(ours) // (3 if spec.kind == "dora" else 2)


def merge_adapter(adapter: Path, base: Path, folder: Path, *, overwrite: bool = False) -> int:
    """Write a model folder whose weights have an adapter in them; returns how many changed.

    Sums are made in fp32 and rounded to the format of the weights. One weight is in memory at once.

    Args:
        adapter: folder of peft, which peft or ``adapter_to_peft`` wrote.
        base: model folder of Hugging Face that it belongs to.
        folder: to make.
        overwrite: whether an older model may be replaced.

    Raises:
        ValueError: a file is missing or damaged, the adapter is of another model, or of a kind that
            is not computed here. OSError. No folder of that name is made, or changed, then.
    """
    check_apart(folder, adapter, base)
    check_replaceable(folder, MODEL, overwrite)
    keys = read_json(adapter / CONFIG)
    if problems := foreign_keys(keys):
        raise ValueError("\n".join(f"{adapter / CONFIG}: {each}" for each in problems))
    # All that can be refused is refused from headers and configs, before any value is read.
    own, theirs = open_safetensors(adapter, single=WEIGHTS), open_safetensors(base)
    try:
        modules = {name.partition(".lora_")[0] for name in own.tensors}
        stacks = stack_plans(own, keys, base, {each for each in modules if is_stack(each)})
        plans = _plans(own, theirs, keys, read_json(base / MODEL))
        if lacking := sorted(stacks.keys() - theirs.tensors.keys()):
            raise ValueError(f"the model has no {lacking[0]}, for which there is an adapter")
    except ValueError as error:
        raise ValueError(f"{adapter} cannot be merged into {base}: {error}") from error

    def values(names: list[str]) -> Iterator[Tensor]:
        for name in names:
            weight = _read(theirs, name)
            if stack := stacks.get(name):
                a, b = (_read(own, f"{stack.module}.lora_{kind}.weight") for kind in "AB")
                weight = stack.added_to(weight, a, b)
            yield _merged(weight, own, plans[name]) if name in plans else weight

    # Files keep their names and tensors, so that the base's index still holds.
    files: dict[str, list[str]] = {}
    for name, stored in theirs.tensors.items():
        files.setdefault(stored.file, []).append(name)
    with draft_of(folder) as draft:
        for file, names in files.items():
            sizes = {n: TensorSize(theirs.tensors[n].shape, theirs.tensors[n].dtype) for n in names}
            write_safetensors(draft / file, sizes, values(names))
        for other in base.iterdir():
            if other.is_file() and other.name not in files:
                shutil.copyfile(other, draft / other.name)
    return len(plans) + len(stacks)


class _Plan(NamedTuple):
    """Adapter of a weight."""

    module: str
    """Begins the names of its tensors."""
    scale: float
    dora: bool
    turned: bool
    """True for a weight (I, O)."""


def _plans(
    own: SafetensorsFolder,
    theirs: SafetensorsFolder,
    keys: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, _Plan]:
    """Return the adapter of each weight that has one, by name of the weight.

    Raises ValueError for a tensor of the adapter that would not be used, and for one that the model
    has no weight for.
    """
    dora = bool(keys.get("use_dora"))
    ends = (".lora_A.weight", ".lora_B.weight", *([".lora_magnitude_vector"] if dora else []))
    modules = {n.removesuffix(ends[0]) for n in own.tensors if n.endswith(ends[0])}
    modules = {module for module in modules if not is_stack(module)}
    used = {module + end for module in modules for end in ends}
    others = {name for name in own.tensors if not is_stack(name.partition(".lora_")[0])}
    if unused := sorted(others - used):
        raise ValueError(
            f"{unused[0]} ({len(unused)} tensors in all) is no matrix of a linear layer: train "
            "without it, or merge the adapter with merge_and_unload of peft"
        )
    if lacking := sorted(used - own.tensors.keys()):
        raise ValueError(f"{lacking[0]} is missing from {WEIGHTS}")
    plans = {}
    for module in sorted(modules):
        name = module.removeprefix(PEFT_PREFIX)
        if (weight := f"{name}.weight") not in theirs.tensors:
            raise ValueError(f"the model has no {weight}, for which there is an adapter")
        if name.endswith("lm_head") and config.get("tie_word_embeddings"):
            raise ValueError(f"{weight} is tied to the embedding: an adapter of one changes both")
        stored, (rank, scale) = theirs.tensors[weight], rank_and_scale(keys, name)
        a, b = (own.tensors[module + end].shape for end in ends[:2])
        shape = (b[0], a[-1])
        # A Conv1D has (I, O): seen from the shape, or for a square one from the kind of model.
        turned = shape != stored.shape or (shape[0] == shape[1] and _is_turned(name, keys, config))
        if a[0] != rank or b[1:] != (rank,) or stored.shape != (shape[::-1] if turned else shape):
            raise ValueError(
                f"{weight} is {list(stored.shape)}, and its adapter is {list(a)} and {list(b)} at "
                f"rank {rank}"
            )
        if not stored.dtype.is_floating_point or "quantization_config" in config:
            raise ValueError(f"{weight} is quantised: take the model in a floating-point format")
        plans[weight] = _Plan(module, scale, dora, turned)
    return plans


def _is_turned(name: str, keys: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return True where a square weight is that of a Conv1D, (I, O)."""
    known = config.get("model_type") in CONV1D
    if keys.get("fan_in_fan_out") and not known:
        raise ValueError(
            f"fan_in_fan_out is True, and {name}.weight is square: models of "
            f"{config.get('model_type')} are not known to have Conv1D layers; if this layer is "
            "linear write false, else merge the adapter with merge_and_unload of peft"
        )
    return known and not name.endswith("lm_head")


def _merged(weight: Tensor, own: SafetensorsFolder, plan: _Plan) -> Tensor:
    """Return a weight (O, I), or (I, O) where it is turned, with its adapter in it."""
    a, b = (_read(own, f"{plan.module}.lora_{kind}.weight").float() for kind in "AB")
    whole = (weight.t() if plan.turned else weight).float() + plan.scale * b @ a
    if plan.dora:
        norms = _read(own, f"{plan.module}.lora_magnitude_vector").float()
        whole = (norms / torch.linalg.norm(whole, dim=1))[:, None] * whole
    return (whole.t() if plan.turned else whole).to(weight.dtype)


def _read(folder: SafetensorsFolder, name: str) -> Tensor:
    """Return a whole tensor of a folder."""
    shape = folder.tensors[name].shape
    start = (0,) * len(shape)
    whole = {name: Whole(shape, (TensorPart(name, shape, start),))}
    return read_box(folder.path, folder.records(whole, lambda _: True)[name], start, shape)
