"""Settings of a run's data, in its checkpoints: other values skip or repeat samples."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from kenotron_config import EnvText, TokenizerConfig, public
from kenotron_data.config import DatasetStageConfig
from kenotron_train.data.vocabulary import BYTES
from kenotron_train.data_plan import DataPlan

HOW_IT_IS_MADE = ("dataset_processing_num_proc_per_process", "dataset_overwrite_cache")
"""Fields of a data set that change neither its samples nor their order."""


def reading_of(data: DataPlan) -> dict[str, Any]:
    """Return what places in the data refer to: other values would skip or repeat samples."""
    reading = {
        "global_batch_size": data.global_batch_size,
        "sequence_length": data.tokens.sequence_length,
        "held_out": data.tokens.limit_val_batches > 0,
        "data_stages": [_stage_reading(stage) for stage in data.stages],
        "tokenizer": tokenizer_state(data.tokenizer),
    }
    if data.tokens.batch_ramp is not None:
        reading["batch_ramp"] = asdict(data.tokens.batch_ramp)
    if data.doremi is not None:
        reading["domains"] = data.doremi.shares
    return public(reading)


def _stage_reading(stage: DatasetStageConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"seed": stage.data.seed, "dataset": None}
    if stage.data.dataset is not None:
        found["dataset"] = asdict(stage.data.dataset)
    if stage.sequence_length is not None:
        found["sequence_length"] = stage.sequence_length
    return found


def tokenizer_state(section: TokenizerConfig) -> dict[str, Any] | None:
    """A checkpoint's entry of its tokenizer; None: bytes. A local path is made absolute.

    The name of a variable (`!env NAME`) stays.
    """
    name = section.tokenizer_name_or_path
    if name is None and section.tokenizer_max_length is None:
        return None
    here = Path(name or BYTES)
    absolute = name and here.exists() and not isinstance(name, EnvText)
    return {
        "name": public(str(here.resolve()) if absolute else name or BYTES),
        "revision": section.tokenizer_revision if name else None,
        "max_length": section.tokenizer_max_length,
    }


def order_of(reading: dict[str, Any]) -> dict[str, Any]:
    """The part of a reading, ours or an imported one, that samples and their order follow from."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(v) for key, v in value.items() if key not in HOW_IT_IS_MADE}
        return [kept(each) for each in value] if isinstance(value, list) else value

    return kept(reading)
