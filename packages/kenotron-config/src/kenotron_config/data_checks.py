"""Rules on the data of stages, which may need the model, the tokenizer or the domains."""

from collections.abc import Sequence

from kenotron_config.doremi_section import DoReMiConfig
from kenotron_config.sections import ModelConfig, TokenizerConfig
from kenotron_data.config import (
    HUB_FIELD,
    DatasetStageConfig,
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    SFTDatasetsConfig,
)

BYTE_TOKENS = 256
"""Ids of text that is read as bytes."""


def stage_problems(stages: Sequence[DatasetStageConfig]) -> list[str]:
    """Name what is wrong with the order and the names of stages."""
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


def vocabulary_problems(
    model: ModelConfig, stages: Sequence[DatasetStageConfig], tokenizer: TokenizerConfig | None
) -> list[str]:
    """Name a vocabulary that is too small for text that is read as bytes."""
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


def id_problems(model: ModelConfig, stages: Sequence[DatasetStageConfig]) -> list[str]:
    """Name token files with more ids than the model has."""
    size = model.model_config.vocab_size
    return [
        f"data_stages.{number}.data.dataset.vocab_size: {section.vocab_size} was given; "
        f"model.model_config.vocab_size is {size}, which must be at least as many"
        for number, stage in enumerate(stages)
        if isinstance(section := stage.data.dataset, NanosetDatasetsConfig)
        and (section.vocab_size or 0) > size
    ]


def domain_problems(
    doremi: DoReMiConfig, stages: Sequence[DatasetStageConfig], model: ModelConfig | None
) -> list[str]:
    """Name contradictions between domains and what stages read."""
    found = []
    for number, stage in enumerate(stages):
        found += _domains_of(doremi, f"data_stages.{number}.data.dataset", stage)
    if doremi.is_proxy and model is not None and model.cuda_graph:
        found.append(
            "model.cuda_graph: true was given with doremi.ref_model_resume_checkpoint_path; a "
            "graph repeats one loss, and a proxy weighs each batch otherwise: set cuda_graph to "
            "false"
        )
    return found


def _domains_of(doremi: DoReMiConfig, path: str, stage: DatasetStageConfig) -> list[str]:
    section, count = stage.data.dataset, len(doremi.names)
    if section is None:
        return [f"{path}: null was given; doremi needs a data set for each of its {count} domains"]
    folders = isinstance(section, NanosetDatasetsConfig)
    field = "dataset_folder" if folders else HUB_FIELD
    given, found = getattr(section, field), []
    if not isinstance(given, str) and len(given) != count:
        found.append(
            f"{path}.{field}: {len(given)} data sets were given; doremi.domain_names has {count} "
            f"domains ({', '.join(doremi.names)}): give one for each in their order, or a folder "
            "that has one under the name of each"
        )
    if folders and section.weights is not None:
        key = "dataset_folder" if isinstance(given, dict) else "dataset_weights"
        found.append(
            f"{path}.{key}: weights were given; doremi.domain_weights has the weights of domains: "
            "remove one of them"
        )
    return found
