"""A config to plan with, for a model folder of Hugging Face."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kenotron_config import Config, ModelConfig, RandomInitConfig
from kenotron_cost.cost_plan import check_measured
from kenotron_models import AnyConfig
from kenotron_models.families import TransformersConfig
from kenotron_models.hf import hub_folder, read_hf_config

UNITS = {"": 1, "K": 2**10, "M": 2**20}
"""Factors of a number of tokens: 4M are 4 x 2^20."""


def with_model(config: Config, folder: Path | str, sequence: int, batch: str | int) -> Config:
    """Return a config of another model on one rank, in bf16, with other batches.

    Args:
        config: everything else.
        folder: the model, or the path of its config.json.
        sequence: tokens of a sample.
        batch: tokens of a global batch: 4194304, 4096K or 4M.

    Raises:
        ValueError: the folder has no config.json, neither we nor transformers know its family, or
            sizes contradict one another.
        OSError: it cannot be read.
    """
    folder, batch = Path(hub_folder(str(folder))), str(batch)
    if sequence < 1:
        raise ValueError(f"--sequence-length {sequence}: it must be at least 1")
    number, unit = (batch[:-1], batch[-1].upper()) if batch[-1:].isalpha() else (batch, "")
    if not number.isdecimal() or unit not in UNITS:
        raise ValueError(f"--batch {batch}: give tokens of a global batch: 4M, 512K or 4194304")
    tokens = int(number) * UNITS[unit]
    if not tokens or tokens % sequence:
        raise ValueError(
            f"--batch {batch}: {tokens:,} tokens are no whole number of samples of {sequence:,}; "
            "change it or --sequence-length"
        )
    model = _model(folder.parent if folder.name == "config.json" else folder)
    mode = "ALL_REDUCE" if isinstance(model, TransformersConfig) else "REDUCE_SCATTER"
    return replace(
        config,
        parallelism=replace(config.parallelism, dp=1, pp=1, cp=1, tp=1, ep=1, tp_mode=mode),
        model=_replaced(config.model, model),
        tokens=replace(
            config.tokens,
            sequence_length=sequence,
            micro_batch_size=1,
            batch_accumulation_per_replica=tokens // sequence,
        ),
    )


def _replaced(before: ModelConfig, model: AnyConfig) -> ModelConfig:
    """Return the section of another model; first values do not matter."""
    init = before.init_method
    if isinstance(init, RandomInitConfig):
        init = replace(init, scaling_method="NONE")
    return replace(
        before, model_config=model, dtype="bfloat16", make_vocab_size_divisible_by=1,
        init_method=init,
    )  # fmt: skip


def _model(folder: Path) -> AnyConfig:
    """Return our config of a model, or that of transformers where its family is none of ours."""
    try:
        return read_hf_config(folder)[0]
    except ValueError as error:
        if not (folder / "config.json").is_file():
            raise
        try:
            found = TransformersConfig(path=str(folder))
            check_measured(found.decoder)
        except (ImportError, ValueError) as other:
            raise ValueError(f"{error}\n{other}") from None
        return found
