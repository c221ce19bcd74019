"""From a checkpoint of a model of transformers to its folder, by ``save_pretrained``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt import Checkpoint, read_box
from kenotron_models import transformers_names
from kenotron_models.families import TransformersConfig
from kenotron_models.hf import cast


def save_transformers(
    checkpoint: Checkpoint,
    config: TransformersConfig,
    folder: Path,
    shard_bytes: int,
    dtype: torch.dtype | None,
) -> None:
    """Write a model folder with transformers' ``save_pretrained``; all weights are in memory.

    Args:
        checkpoint: of any layout.
        config: its model.
        folder: to write to.
        shard_bytes: most bytes of a file.
        dtype: of all tensors; None: each as it is.

    Raises:
        ValueError: the checkpoint's tensors are not those of its model, or a value does not fit
            ``dtype``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    records, names = checkpoint.manifest.records, transformers_names(config.decoder)
    weights = {name for name in records if not name.startswith("optimizer.")}
    if wrong := {*names} ^ weights:
        raise ValueError(
            f"{checkpoint.store}: its tensors are not those of its model_config: "
            f"{', '.join(sorted(wrong)[:20])}"
        )
    values: dict[str, Tensor] = {}
    for name, theirs in names.items():
        record = records[name]
        whole = read_box(checkpoint.store, record, (0,) * len(record.shape), record.shape)
        if dtype is not None:
            whole = cast(str(checkpoint.store), name, whole, dtype)
        values |= dict.fromkeys(theirs, whole)
    keys: dict[str, Any] = json.loads(config.config_json or "")
    theirs_config = AutoConfig.for_model(**keys)
    kind = next(iter(values.values())).dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs_config, dtype=kind)
    model.load_state_dict(values, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size=shard_bytes)
