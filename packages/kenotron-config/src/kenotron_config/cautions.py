"""Likely mistakes that can be run: lengths, schedules, rules, tokens of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kenotron_config.availability import unavailable
from kenotron_config.config import Config
from kenotron_config.init_sections import SpectralMupInitConfig
from kenotron_data import tokenizer_of_folder
from kenotron_data.config import NanosetDatasetsConfig

SCHEDULE = "optimizer.learning_rate_scheduler"


def cautions(config: Config) -> list[str]:
    """Name what can be run and is likely a mistake.

    Args:
        config: the config of a training; the metadata of its token files are read.

    Returns:
        One line for each, `key.path: value was given; what is odd`.
    """
    return [
        *_long_sequences(config),
        *_schedule(config),
        *_never_reached(config),
        *_rule(config),
        *_reduce(config),
        *_other_tokenizers(config),
        *_left_out(config),
    ]


def _long_sequences(config: Config) -> list[str]:
    known = getattr(config.model.model_config, "max_position_embeddings", None)
    if known is None:
        return []
    keys = {"tokens.sequence_length": config.tokens.sequence_length}
    for number, stage in enumerate(config.data_stages):
        if stage.sequence_length is not None:
            keys[f"data_stages.{number}.sequence_length"] = stage.sequence_length
    return [
        f"{key}: {length} was given; that is beyond model.model_config.max_position_embeddings "
        f"({known}): nothing is cut, but other programs may refuse the model at this length"
        for key, length in keys.items()
        if length > known
    ]


def _schedule(config: Config) -> Iterator[str]:
    """Parts of the learning-rate schedule that the run never reaches."""
    schedule, steps = config.optimizer.learning_rate_scheduler, config.tokens.train_steps
    if schedule.lr_warmup_steps > steps:
        yield (
            f"{SCHEDULE}.lr_warmup_steps: {schedule.lr_warmup_steps} was given, but "
            f"tokens.train_steps is {steps}: the learning rate never reaches learning_rate "
            f"({schedule.learning_rate:g})"
        )
        return
    decay, start = schedule.lr_decay_steps, schedule.lr_decay_starting_step
    if start is not None and start >= steps:
        yield (
            f"{SCHEDULE}.lr_decay_starting_step: {start} was given, but tokens.train_steps is "
            f"{steps}: the learning rate never decays"
        )
    elif decay is not None and (end := decay + (start or schedule.lr_warmup_steps)) > steps:
        yield (
            f"{SCHEDULE}.lr_decay_steps: {decay} was given: the decay ends at step {end}, but "
            f"tokens.train_steps is {steps}: the learning rate never reaches min_decay_lr"
        )


def _never_reached(config: Config) -> Iterator[str]:
    """Batches, averages and bounds that need more steps than the run has."""
    tokens, optim, batches = config.tokens, config.optimizer, config.batches
    end = f"but the run ends after {tokens.train_steps} steps"
    read = sum(map(batches.samples, range(len(config.data_stages))))
    if tokens.batch_ramp is not None and tokens.batch_ramp.samples > read:
        yield (
            f"tokens.batch_ramp.samples: {tokens.batch_ramp.samples} was given, {end} and "
            f"{read} samples: the batch never has its full size"
        )
    if (average := optim.weight_average) is not None and average.every > tokens.train_steps:
        yield (
            f"optimizer.weight_average.every: {average.every} was given, {end}: nothing is averaged"
        )
    if (spikes := optim.spikes) is not None and spikes.window // 2 >= tokens.train_steps:
        yield (
            f"optimizer.spikes.window: {spikes.window} was given, {end}: the first half of a "
            "window has no bound, so no step is left out"
        )


def _rule(config: Config) -> list[str]:
    """Nanotron's files have no key but `use_mup`."""
    method = config.model.init_method
    if not isinstance(method, SpectralMupInitConfig) or method.rule or not method.is_nanotron:
        return []
    return [
        "model.init_method.use_mup: true was given without base: the table of Nanotron's own runs "
        "is taken (rule: nanotron), whose learning rates do not transfer to other widths; give "
        "base, the widths that hyperparameters were chosen for, or write rule: nanotron"
    ]


def _reduce(config: Config) -> Iterator[str]:
    """A key of ZeRO 2 and 3 in a run of another stage."""
    optim = config.optimizer
    if optim.reduce == "step" and not optim.zero.cuts_gradients:
        yield (
            f"optimizer.reduce: step was given; optimizer.zero_stage {optim.zero_stage} adds "
            "gradients over ranks once a step in any case: the key is for stages 2 and 3"
        )


def _other_tokenizers(config: Config) -> Iterator[str]:
    """Folders whose metadata name another tokenizer than the config."""
    for number, stage in enumerate(config.data_stages):
        section, key = stage.data.dataset, f"data_stages.{number}.data.dataset"
        if not isinstance(section, NanosetDatasetsConfig):
            continue
        named = {
            "tokenizer.tokenizer_name_or_path": config.tokenizer.tokenizer_name_or_path,
            f"{key}.tokenizer_name": section.tokenizer_name,
        }
        for folder in section.folders:
            made_with = tokenizer_of_folder(folder)
            yield from (
                f"{where}: {name} was given, but the token files of {folder} were made with "
                f"{made_with}: where these are different tokenizers, ids have other meanings; name "
                "that of the files, or make the files again"
                for where, name in named.items()
                if name is not None and made_with and _short(name) != _short(made_with)
            )


def _left_out(config: Config) -> Iterator[str]:
    """Evaluations that cannot be made, in one line."""
    if problems := unavailable(config):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        yield f"nothing is evaluated during the training: {problems[0]}{more}"


def _short(name: str) -> str:
    """The part of a tokenizer's name that a copy in another folder keeps."""
    path = Path(name)
    is_file = path.suffix == ".json"
    return (path.parent.name if is_file and path.parent.name else path.name).lower()
