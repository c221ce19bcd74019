"""From a checkpoint to a model folder of Hugging Face, one tensor at a time in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt import (
    Checkpoint,
    Location,
    Record,
    Store,
    TensorSize,
    open_checkpoint,
    read_box,
    write_safetensors,
)
from kenotron_convert.drafts import check_apart, check_replaceable, draft_of
from kenotron_convert.export_comparison import compare_export
from kenotron_convert.importing import GENERATION, TOKENIZER, TOKENS
from kenotron_convert.remote_code import without_code
from kenotron_convert.shards import deal
from kenotron_convert.tokenizer_files import copy_tokenizer, tokenizer_files
from kenotron_convert.transformers_export import save_transformers
from kenotron_dist import Mesh
from kenotron_models import AnyConfig, Fold, Multipliers, folds, model_from_json
from kenotron_models.families import TransformersConfig
from kenotron_models.hf import (
    EMBEDDING,
    TensorPart,
    Whole,
    cast,
    config_from_hf,
    config_to_hf,
    differences,
    exported_tensors,
    not_carried,
    stays_fp32,
)
from kenotron_models.hf_import import as_in_the_file

SHARD_BYTES = 5 * 10**9
FURTHER = "mtp."
"""Begins the names of a module that predicts further tokens: no architecture is written with it."""
CONFIG, INDEX = "config.json", "model.safetensors.index.json"


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    folder: Path
    source: Store
    """Step folder that it was made from."""
    deviation: float | None
    """Of the logits, in units of the largest; None: they were not compared."""
    passed_over: list[str]
    """Reason why each checkpoint that would have been preferred was not read; a sentence each."""
    tokenizer: bool
    """True where a tokenizer is in the folder."""
    not_carried: list[str]
    """Fields that only a training reads, and config.json does not have."""


def export_hf(
    ckpt: Location,
    folder: Path,
    *,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype | None = None,
    check: bool = True,
    overwrite: bool = False,
) -> Exported:
    """Write a model folder that transformers loads, from a checkpoint of any layout.

    Arguments: a step folder or a run folder; the folder to make; a folder with a tokenizer, None:
    the one that the checkpoint names or came with, if it is there; most bytes of a file; dtype of
    all tensors, None: each as it is, or float32 where multipliers are folded into weights; whether
    logits are compared before the folder gets its name (only where no dtype is asked for, or the
    checkpoint's own); whether an older export may be replaced.

    Raises ValueError, naming the file, field or tensor: no checkpoint, or one without a model; a
    model that no architecture of Hugging Face has; damaged bytes; logits that differ; a folder
    that is there. OSError. No folder of that name is made, or changed, then.
    """
    checkpoint = open_checkpoint(ckpt, Mesh.connect(), select=_is_weight)
    check_apart(folder, checkpoint.store)
    check_replaceable(folder, CONFIG, overwrite)
    config, multipliers = _config_of(checkpoint)
    stays = dtype in (None, _dtype_of(checkpoint))
    if multipliers.change and dtype is None:  # factors would be rounded in fewer bits
        dtype = torch.float32
    with draft_of(folder) as draft:
        if isinstance(config, TransformersConfig):
            save_transformers(checkpoint, config, draft, shard_bytes, dtype)
        else:
            _write_model(checkpoint, config, multipliers, draft, shard_bytes, dtype)
        if (words := tokenizer or _own_tokenizer(checkpoint)) is not None:
            copy_tokenizer(words, draft)
        deviation = None
        if check:
            round_to = None if stays else dtype
            deviation = compare_export(checkpoint, config, multipliers, draft, round_to)
    return Exported(
        folder,
        checkpoint.store,
        deviation,
        checkpoint.passed_over,
        bool(tokenizer_files(folder)),
        [] if isinstance(config, TransformersConfig) else _left_out(checkpoint, config),
    )


def _left_out(checkpoint: Checkpoint, config: AnyConfig) -> list[str]:
    """Name what the folder does not have: fields of the training, and further predictions."""
    tensors = sum(name.startswith(FURTHER) for name in checkpoint.manifest.records)
    return not_carried(config) + ([f"model.mtp: {tensors} tensors"] if tensors else [])


def _write_model(
    checkpoint: Checkpoint,
    config: AnyConfig,
    multipliers: Multipliers,
    draft: Path,
    shard_bytes: int,
    dtype: torch.dtype | None,
) -> None:
    """Write weights, config.json and generation_config.json of a model that is ours."""
    values = _config_json(checkpoint, config, dtype)
    ours = exported_tensors(config, values)
    _check_records(checkpoint, ours)
    changes = folds(config.decoder, multipliers)
    _write_weights(checkpoint, ours, changes, draft, shard_bytes, dtype)
    _write_json(draft / CONFIG, without_code(values))
    generation = _generation_config(checkpoint, values)
    _write_json(draft / GENERATION, without_code(generation))


def _dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    records = checkpoint.manifest.records
    first = next(record for name, record in records.items() if _is_weight(name))
    return getattr(torch, records.get(EMBEDDING, first).dtype)


def _is_weight(name: str) -> bool:
    return not name.startswith("optimizer.")


def _config_of(checkpoint: Checkpoint) -> tuple[AnyConfig, Multipliers]:
    state = checkpoint.manifest.state
    if "model_config" not in state:
        raise ValueError(
            f"{checkpoint.store} does not describe a model (model_config is missing): was it "
            "written by apps/train or apps/convert?"
        )
    try:
        config, multipliers = model_from_json(state["model_config"])
        assert config.decoder  # one of transformers is built with it
        return config, multipliers
    except (ValueError, ImportError) as error:
        raise ValueError(f"{checkpoint.store}: {error}") from None


def _check_records(checkpoint: Checkpoint, ours: Mapping[str, Whole]) -> None:
    records = checkpoint.manifest.records
    lines = [f"{name} is missing" for name in ours if name not in records]
    weights = [n for n in records if _is_weight(n) and not n.startswith(FURTHER)]
    lines += [f"{name} is none of its" for name in weights if name not in ours]
    lines += [
        f"{name} has shape {list(records[name].shape)}, its model_config makes it "
        f"{list(whole.shape)}"
        for name, whole in ours.items()
        if name in records and records[name].shape != whole.shape
    ]
    if lines:
        where = f"{checkpoint.store}: its tensors are not those of its model_config:"
        raise ValueError("\n  ".join([where, *lines[:20]]))


def _config_json(
    checkpoint: Checkpoint, config: AnyConfig, given: torch.dtype | None
) -> dict[str, Any]:
    """The config.json that the model came with, where it still describes the model."""
    dtype = str(given or _dtype_of(checkpoint)).removeprefix("torch.")
    came_with = checkpoint.manifest.state.get("imported", {}).get("config")
    try:
        same = came_with and not differences(config_from_hf(came_with).decoder, config.decoder)
    except ValueError:
        same = False
    if not same:
        return config_to_hf(config) | {"dtype": dtype, "torch_dtype": dtype}
    dtypes = {key: dtype for key in ("dtype", "torch_dtype") if key in came_with}
    return came_with | dtypes | as_in_the_file(came_with)


def _generation_config(checkpoint: Checkpoint, values: Mapping[str, Any]) -> dict[str, Any]:
    came_with = checkpoint.manifest.state.get("imported", {}).get("generation_config")
    made = {key: values[key] for key in TOKENS if values.get(key) is not None}
    return came_with or {"_from_model_config": True, **made}


def _own_tokenizer(checkpoint: Checkpoint) -> Path | None:
    """Find the tokenizer that the checkpoint names, or that came with it; None: there is none."""
    named = (checkpoint.manifest.state.get("tokenizer") or {}).get("name")
    places = [*([Path(named)] if named else []), Path(str(checkpoint.store)).parent / TOKENIZER]
    return next((place for place in places if tokenizer_files(place)), None)


def _write_weights(
    checkpoint: Checkpoint,
    ours: Mapping[str, Whole],
    changes: Mapping[str, Fold],
    draft: Path,
    shard_bytes: int,
    dtype: torch.dtype | None,
) -> None:
    places = {part.name: (name, part) for name, whole in ours.items() for part in whole.parts}
    records = checkpoint.manifest.records
    wanted = {name: None if stays_fp32(name) else dtype for name in ours}
    sizes = [
        (theirs, TensorSize(part.shape, wanted[name] or getattr(torch, records[name].dtype)))
        for theirs, (name, part) in places.items()
    ]
    files = deal(sizes, shard_bytes)
    for file, own in files.items():
        parts = (
            (records[our], part, wanted[our], changes.get(our))
            for our, part in (places[name] for name in own)
        )
        write_safetensors(draft / file, own, _made(checkpoint.store, parts))
    if len(files) > 1:
        total = sum(size.nbytes for _, size in sizes)
        weight_map = {name: file for file, own in files.items() for name in own}
        _write_json(
            draft / INDEX,
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        )


def _made(
    store: Store, parts: Iterator[tuple[Record, TensorPart, torch.dtype | None, Fold | None]]
) -> Iterator[Tensor]:
    for record, part, dtype, change in parts:
        values = [read_box(store, record, part.start, part.block)]
        if change is not None:
            scaled = change(values.pop().float(), part.start[0])
            values.append(scaled.to(dtype or getattr(torch, record.dtype)))
        values = [part.from_ours(values.pop())]
        if dtype is not None:
            values[0] = cast(str(store), part.name, values[0], dtype)
        yield values.pop()  # it must not stay here while the next one is read


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
