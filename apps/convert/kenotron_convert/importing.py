"""From a model folder of Hugging Face to a checkpoint, one tensor at a time in memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt import (
    Record,
    StreamedTensor,
    open_safetensors,
    read_box,
    save_streamed,
)
from kenotron_convert.drafts import check_apart
from kenotron_convert.remote_code import without_code
from kenotron_convert.tokenizer_files import copy_tokenizer, tokenizer_files
from kenotron_data import Cursor
from kenotron_models import FamilyConfig, family_of
from kenotron_models.hf import CONFIG, EMBEDDING, cast, read_json, stays_fp32
from kenotron_models.hf_import import HFModel, OtherModel, compare_import, read_model

GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a config.json for the tokens that begin, end and pad a text."""
TOKENIZER = "tokenizer"
"""Folder next to the steps that keeps the tokenizer's files."""
STEP = 0


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    folder: Path
    """The step folder."""
    deviation: float | None
    """Of logits and a gradient, in units of the largest; None: they were not compared."""


def import_hf(
    hf: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    check: bool = True,
    overwrite: bool = False,
) -> Imported:
    """Write ``<folder>/0/`` from a model folder of Hugging Face.

    Args:
        hf: the model's folder.
        folder: the run folder to write to.
        dtype: of all tensors; None: each as it is.
        check: whether logits and a gradient are compared with those of transformers first, where it
            is installed.
        overwrite: whether a checkpoint of step 0 may be replaced.

    Returns:
        The step folder, and what was compared.

    Raises:
        ValueError: the folder is no model that can be said here, or holds other tensors than its
            config.json says, or transformers computes something else, or there is a run or a
            checkpoint. The message names the file and the key or the tensors.
        OSError: a file cannot be read or written. Nothing is written in either case.
    """
    source = opened(hf)
    values, config, records = source.values, source.config, source.records
    check_free(folder, overwrite, hf)
    deviation = _compared(source, dtype) if check else None
    wanted = {name: None if stays_fp32(name) else dtype for name in records}
    # Values are read when they are written, so that one tensor is in memory at once.
    sources = {
        name: StreamedTensor(
            record.shape,
            wanted[name] or getattr(torch, record.dtype),
            partial(_read, hf, name, record, wanted[name]),
        )
        for name, record in records.items()
    }
    kept = dtype or getattr(torch, records[EMBEDDING].dtype)
    imported = {"from": str(hf), "config": values, **_generation(hf, values)}
    imported = without_code(imported)
    written = write_or_remove(folder, sources, fresh_state(config, kept, imported))
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    if tokenizer_files(hf):
        (folder / TOKENIZER).mkdir()
        copy_tokenizer(hf, folder / TOKENIZER)
    return Imported(written, deviation)


def opened(hf: Path) -> HFModel:
    """Read config.json and headers of a model folder. Raises ValueError, OSError."""
    if not (hf / CONFIG).is_file():
        reason = f"it has no {CONFIG}" if hf.is_dir() else "there is no such folder; download it"
        raise ValueError(f"{hf} is no model of Hugging Face: {reason}")
    return read_model(open_safetensors(hf))


def compare_hf(hf: Path) -> float | None:
    """Return how far a model folder, as it is read here, is from what transformers computes.

    The largest deviation of logits and a gradient, in units of the largest; None where transformers
    is not installed. Raises ValueError, OSError.
    """
    return _compared(opened(hf), None)


def model_config(hf: Path) -> dict[str, Any]:
    """Return what ``model.model_config`` of a training must say for the weights of a model folder.

    Keys at their defaults are left out. Raises ValueError, OSError.
    """
    config = opened(hf).config
    values = asdict(config)
    known = {each.name: each for each in fields(config)}
    own = {name: value for name, value in values.items() if not _is_default(known[name], value)}
    return {family_of(config).marker: True, **own}


def _is_default(field: Field[Any], value: Any) -> bool:
    if field.default_factory is not MISSING:
        return value == field.default_factory()
    return value == field.default


def _compared(source: HFModel, dtype: torch.dtype | None) -> float | None:
    try:
        return compare_import(source, dtype)
    except OtherModel as error:
        raise ValueError(
            f"{error}\n{source.folder.path} was not imported. Please report this; --no-check "
            "imports it all the same"
        ) from error


def write_or_remove(
    folder: Path, sources: Mapping[str, StreamedTensor], state: dict[str, Any]
) -> Path:
    """Write step 0 of a run folder; where that fails, a folder that was not there is removed."""
    made = not folder.exists()
    try:
        return save_streamed(folder, STEP, sources, state)
    except BaseException:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def check_free(folder: Path, overwrite: bool, *sources: object) -> None:
    """Refuse a run folder to write step 0 to.

    Raises:
        ValueError: it is the folder of a run, has one of ``sources`` in it, which are read, or a
            step 0 that may not be replaced.
    """
    check_apart(folder, *sources)
    steps = {each.name for each in folder.glob("[0-9]*") if each.is_dir()} - {str(STEP)}
    if steps:
        raise ValueError(
            f"{folder} is the folder of a run (step {min(steps)}): give --out a new one"
        )
    if (folder / str(STEP)).exists() and not overwrite:
        raise ValueError(f"{folder / str(STEP)} is there: give --overwrite to replace it")


def _read(folder: Path, name: str, record: Record, dtype: torch.dtype | None) -> Tensor:
    values = read_box(folder, record, (0,) * len(record.shape), record.shape)
    if not values.isfinite().all():
        raise ValueError(f"{folder}: weights are nan or inf in {name}")
    return values if dtype is None else cast(folder, name, values, dtype)


def _generation(hf: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The folder's settings of generation, kept for an export and for all tokens that end a text.

    Raises ValueError, OSError.
    """
    path = hf / GENERATION
    if not path.is_file():
        tokens = {key: values[key] for key in TOKENS if values.get(key) is not None}
        return {"generation_config": {"_from_model_config": True, **tokens}}
    return {"generation_config": read_json(path)}


def fresh_state(
    config: FamilyConfig, dtype: torch.dtype, imported: dict[str, Any]
) -> dict[str, Any]:
    """Return the state that a training program and the generation app read."""
    return {
        "step": STEP,
        "optimizer_steps": 0,
        "cursor": Cursor().to_dict(),
        "consumed_train_samples": 0,
        "consumed_tokens": 0,
        "model_config": asdict(config),
        "dtype": str(dtype).removeprefix("torch."),
        "sequence_length": config.decoder.max_position_embeddings,
        "reading": {},
        "imported": imported,
    }
