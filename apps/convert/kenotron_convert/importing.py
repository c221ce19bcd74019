"""From a model folder of Hugging Face to a checkpoint, one tensor at a time in memory."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt import Record, Source, open_safetensors, read_box, save_streamed
from kenotron_convert.tokenizer_files import copy_tokenizer, tokenizer_files
from kenotron_data import Cursor
from kenotron_models.hf import EMBEDDING, hf_tensors, is_superfluous, read_hf_config
from kenotron_models.registry import AnyConfig

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer"
"""Folder beside the steps that keeps the tokenizer's files."""
STEP = 0


def import_hf(
    hf: Path, folder: Path, *, dtype: torch.dtype | None = None, overwrite: bool = False
) -> Path:
    """Write ``<folder>/0/`` from a model folder of Hugging Face; returns its path.

    Arguments: the model's folder; the run folder to write to; dtype of all tensors, None: each as
    it is; whether a checkpoint of step 0 may be replaced.

    Raises ValueError, naming the file and the key or the tensors, when the folder is no model that
    can be said here, or holds other tensors than its config.json says, or when there is a
    checkpoint of step 0; OSError. Nothing is written then.
    """
    config, values = read_hf_config(hf)
    records = open_safetensors(hf).records(
        hf_tensors(config), lambda name: is_superfluous(name, config.decoder)
    )
    if (folder / str(STEP)).exists() and not overwrite:
        raise ValueError(f"{folder / str(STEP)} is there: give --overwrite to replace it")
    sources = {
        name: Source(
            record.shape,
            dtype or getattr(torch, record.dtype),
            partial(_read, hf, record, dtype),
        )
        for name, record in records.items()
    }
    kept = dtype or getattr(torch, records[EMBEDDING].dtype)
    imported = {"from": str(hf), "config": values, **_generation(hf)}
    written = save_streamed(folder, STEP, sources, _state(config, kept, imported))
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    if tokenizer_files(hf):
        (folder / TOKENIZER).mkdir()
        copy_tokenizer(hf, folder / TOKENIZER)
    return written


def _read(folder: Path, record: Record, dtype: torch.dtype | None) -> Tensor:
    values = read_box(folder, record, (0,) * len(record.shape), record.shape)
    return values if dtype is None else values.to(dtype)


def _generation(hf: Path) -> dict[str, Any]:
    """What the folder says of generation, kept for an export. Raises ValueError, OSError."""
    path = hf / GENERATION
    if not path.is_file():
        return {}
    try:
        return {"generation_config": json.loads(path.read_text(encoding="utf-8"))}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _state(config: AnyConfig, dtype: torch.dtype, imported: dict[str, Any]) -> dict[str, Any]:
    """What a training program and the generation app read."""
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
