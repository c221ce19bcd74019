"""Rules for the stages of the data, and for what they need of the model's vocabulary."""

from collections.abc import Sequence

from kenotron_config.sections import ModelConfig, TokenizerConfig
from kenotron_data.config import (
    DatasetStageConfig,
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    SFTDatasetsConfig,
)

BYTE_TOKENS = 256


def stage_problems(
    stages: Sequence[DatasetStageConfig],
    model: ModelConfig | None,
    tokenizer: TokenizerConfig | None,
) -> list[str]:
    """Name contradictions between stages, and between them and the model."""
    found = _stage_order(stages)
    if model and stages:
        found += _vocabulary(model, stages, tokenizer)
        found += _ids_of_folders(model, stages)
    return found


def _stage_order(stages: Sequence[DatasetStageConfig]) -> list[str]:
    if not stages:
        return ["data_stages: an empty list was given; there must be at least one stage"]
    found = []
    if stages[0].start_training_step != 1:
        found.append(
            f"data_stages.0.start_training_step: {stages[0].start_training_step} was given; the "
            "first stage must start at step 1"
        )
    names = {stages[0].name}
    for number, (before, stage) in enumerate(zip(stages, stages[1:], strict=False), start=1):
        if stage.start_training_step <= before.start_training_step:
            found.append(
                f"data_stages.{number}.start_training_step: {stage.start_training_step} was given; "
                f"it must come after the stage before ({before.start_training_step})"
            )
        if stage.name in names:
            found.append(
                f"data_stages.{number}.name: {stage.name!r} was given; another stage has that "
                "name; choose a different one"
            )
        names.add(stage.name)
    return found


def _vocabulary(
    model: ModelConfig, stages: Sequence[DatasetStageConfig], tokenizer: TokenizerConfig | None
) -> list[str]:
    size = model.model_config.vocab_size
    if tokenizer is not None and tokenizer.tokenizer_name_or_path is not None:
        return []
    kinds = {type(stage.data.dataset) for stage in stages}
    path = "model.model_config.vocab_size"
    if SFTDatasetsConfig in kinds and size <= BYTE_TOKENS:
        return [
            f"{path}: {size} was given; answers are read as bytes and ended by {BYTE_TOKENS}, so "
            f"at least {BYTE_TOKENS + 1} are needed"
        ]
    if size >= BYTE_TOKENS or PretrainDatasetsConfig not in kinds:
        return []
    return [
        f"{path}: {size} was given; text is read as bytes and needs at least {BYTE_TOKENS}; "
        f"{BYTE_TOKENS + 1} also marks where documents end"
    ]


def _ids_of_folders(model: ModelConfig, stages: Sequence[DatasetStageConfig]) -> list[str]:
    size = model.model_config.vocab_size
    return [
        f"data_stages.{number}.data.dataset.vocab_size: {section.vocab_size} was given; "
        f"model.model_config.vocab_size is {size}, which must be at least as many"
        for number, stage in enumerate(stages)
        if isinstance(section := stage.data.dataset, NanosetDatasetsConfig)
        and (section.vocab_size or 0) > size
    ]
