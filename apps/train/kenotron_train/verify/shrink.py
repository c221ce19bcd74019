"""A config small enough for a laptop, with the structure of a real one."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields, replace
from typing import Any, cast

from kenotron_config import (
    Config,
    ExistingCheckpointInitConfig,
    LoggingConfig,
    ModelConfig,
    ParallelismConfig,
    RandomInitConfig,
    TokenizerConfig,
    TokensConfig,
)
from kenotron_cost import cost_plan
from kenotron_data.config import (
    DataConfig,
    DatasetStageConfig,
    NanosetDatasetsConfig,
    SFTDatasetsConfig,
)
from kenotron_dist import Axis
from kenotron_dist.placement import parameter_layouts
from kenotron_models import AnyConfig, Build, LayerStack, SizedConfig, build_decoder
from kenotron_models.families import TransformersConfig
from kenotron_optim import LRMultiplier, MuonConfig, OptimizerConfig
from kenotron_train.verify.shrink_layout import (
    few,
    fewer_ranks,
    small_accumulation,
    small_depth,
    small_shards,
)
from kenotron_train.verify.shrink_model import SEQUENCE, ModelCut, small_model

MOST_PADDING = 8
STD = 0.02
"""Standard deviation of weights where the config reads them from a file."""
LEAST_STD, MOST_GAIN = 0.05, 1.0
"""Bounds in the small model, of it and of its product with the root of the hidden size: attention
is not even, and roundings do not grow from layer to layer."""
MOST_CLIP = 0.1
"""Norms of the small model's gradients are larger, so that clipping is part of the comparison."""
OF_THE_LAYOUT = ("zero_stage", "reduce", "regather", "shard_ranks", "offload")
"""Keys of the optimizer that say where its state is and how it travels, and change no number."""


def shrink(config: Config, ranks: int, steps: int) -> Config:
    """The config of a small copy: few features, layers, tokens and at most ``ranks`` processes.

    What decides which code runs stays: architecture, ties, GQA and how its heads lie on tp ranks,
    modes, the pipeline's schedule and chunks, whether layers and vocabulary divide evenly, ZeRO,
    optimizer and groups, recompute, compile, windows, kinds of positions, biases, norms, dropout.
    It is in float32, its weights are drawn, its tokens made up; it reads no file and writes none.
    """
    parallelism = fewer_ranks(config.parallelism, ranks)
    if config.parallelism.cp > 1:  # what auto means depends on sizes
        way = cost_plan(config).cp_way
        parallelism = replace(parallelism, cp_attention=way)
    sequence = config.longest_sequence
    accumulation = small_accumulation(
        config.tokens.batch_accumulation_per_replica, config.parallelism.pp, parallelism.pp
    )
    micro = min(config.tokens.micro_batch_size, 2)
    length = _small_length(config, parallelism, micro)
    model = _model(config, parallelism, sequence, length)
    parallelism = _recompute(parallelism, config, model)
    tokens = TokensConfig(
        sequence_length=length,
        train_steps=steps,
        micro_batch_size=micro,
        batch_accumulation_per_replica=accumulation,
    )
    data = DataConfig(dataset=None, seed=config.data_stages[0].data.seed, num_loading_workers=0)
    return Config(
        general=replace(config.general, ignore_sanity_checks=True, benchmark_csv_path=None),
        parallelism=parallelism,
        model=model,
        tokenizer=TokenizerConfig(),
        tokens=tokens,
        optimizer=_optimizer(config, model, parallelism.dp),
        checkpoints=replace(config.checkpoints, resume_checkpoint_path=None),
        logging=LoggingConfig(),
        data_stages=(DatasetStageConfig(name="made up", start_training_step=1, data=data),),
    )


def on_one_process(small: Config) -> Config:
    """Return the plainest way to the same numbers: one process that computes nothing twice.

    Every key that only a layout has is at its default. The micro-batches are those of all data
    ranks, one after the other.
    """
    count = small.tokens.batch_accumulation_per_replica * small.parallelism.dp
    plain: dict[str, Any] = {"zero_stage": 0} | {
        field.name: field.default
        for field in fields(OptimizerConfig)
        if field.name in OF_THE_LAYOUT and field.default is not MISSING
    }
    return replace(
        small,
        parallelism=ParallelismConfig(dp=1, pp=1, tp=1),
        model=replace(small.model, compile=False),
        tokens=replace(small.tokens, batch_accumulation_per_replica=count),
        optimizer=replace(small.optimizer, **plain),
    )


def has_documents(config: Config) -> bool:
    """Return True where a sample may be of several documents, which model or data keeps apart."""
    return config.decoder.separate_documents or any(
        (isinstance(data, NanosetDatasetsConfig) and data.return_positions)
        or isinstance(data, SFTDatasetsConfig)
        for data in (stage.data.dataset for stage in config.data_stages)
    )


def _small_length(config: Config, parallelism: ParallelismConfig, micro: int) -> int:
    """Few tokens of a sample, with properties of before.

    The strips of cp divide them, or there is padding; tp divides those of a micro-batch, or not.
    """
    sequence, mode = config.longest_sequence, cost_plan(config).cp_mode

    def properties(tokens: int, rows: int, sizes: ParallelismConfig) -> tuple[bool, bool]:
        cut = mode.cut(tokens, sizes.cp)
        whole = parallelism.cp == 1 or cut.padded == tokens  # one rank has no padding
        return whole, rows * cut.local % sizes.tp == 0

    wanted = properties(sequence, config.tokens.micro_batch_size, config.parallelism)
    length = min(sequence, SEQUENCE)
    near = range(length, length // 2, -1)
    found = {each: properties(each, micro, parallelism) for each in near}
    kept = (each for each in near if found[each] == wanted)
    padded = (each for each in near if found[each][0] == wanted[0])
    return next(kept, next(padded, length))


def _model(
    config: Config, parallelism: ParallelismConfig, sequence: int, length: int
) -> ModelConfig:
    section, before = config.model, config.parallelism
    if not hasattr(section.model_config, "small"):
        raise ValueError(
            f"model.model_config: {type(section.model_config).__name__} has no narrow copy to "
            "compare layouts with: give its class what kenotron_models.SizedConfig lists"
        )
    sizes = cast(SizedConfig, section.model_config)
    chunks = before.schedule.chunks
    depth, period = small_depth(
        sizes.num_hidden_layers,
        before.pp * chunks,
        parallelism.pp * chunks,
        getattr(sizes, "no_rope_layer", None),
    )
    ulysses = parallelism.cp_attention == "ulysses"
    heads_over, fewer = (s.tp * (s.cp if ulysses else 1) for s in (before, parallelism))
    cut = ModelCut(
        before.tp, parallelism.tp, heads_over, fewer, depth, period, sequence, length,
        parallelism.ep,
    )  # fmt: skip
    padding = section.make_vocab_size_divisible_by
    small = small_model(sizes, cut, padding, few(padding, MOST_PADDING))
    method = section.init_method
    drawn = method if isinstance(method, RandomInitConfig) else RandomInitConfig(std=STD)
    gain = min(drawn.std * math.sqrt(sizes.hidden_size), MOST_GAIN)
    std = max(gain / math.sqrt(small.hidden_size), LEAST_STD)
    folder = isinstance(method, ExistingCheckpointInitConfig)
    own = folder and isinstance(sizes, TransformersConfig)  # transformers draws them
    return replace(
        section,
        model_config=small,
        init_method=method if own else replace(drawn, std=float(f"{std:.3g}")),
        dtype="float32",
        cuda_graph=False,  # it runs on CPUs
        make_vocab_size_divisible_by=few(padding, MOST_PADDING),
        ddp_bucket_cap_mb=1,
    )


def _recompute(
    parallelism: ParallelismConfig, config: Config, model: ModelConfig
) -> ParallelismConfig:
    """As many layers that compute again, in proportion: all, none, or some.

    Where memory decides, layers are selective: that of a small model is another.
    """
    if parallelism.recompute_memory_gb is not None:
        return replace(parallelism, recompute_memory_gb=None, recompute="selective")
    count, depth = parallelism.recompute_layers, config.decoder.num_hidden_layers
    if not count:
        return parallelism
    small = cast(SizedConfig, model.model_config).num_hidden_layers
    some = min(max(1, round(count * small / depth)), max(1, small - 1))
    return replace(parallelism, recompute_layers=small if count >= depth else some)


def _optimizer(config: Config, model: ModelConfig, dp: int) -> OptimizerConfig:
    """The same rule and groups; a schedule whose few steps warm up, and then decay."""
    section = config.optimizer
    roles = _roles(model)
    names = sorted(roles)
    schedule = section.learning_rate_scheduler
    rule = section.optimizer_factory
    if isinstance(rule, MuonConfig):
        rule = replace(rule, adamw_named_params=_matching(rule.adamw_named_params, names))
    exclude = _matching(section.weight_decay_exclude_named_params, names)
    return replace(
        section,
        optimizer_factory=rule,
        shard_ranks=small_shards(section.shard_ranks, config.parallelism.dp, dp),
        clip_grad=None if section.clip_grad is None else min(section.clip_grad, MOST_CLIP),
        nonfinite="continue",  # what is not finite is found by comparing
        spikes=None,
        weight_average=None,
        weight_decay_exclude_named_params=exclude,
        lr_multipliers=_rules(section.lr_multipliers, roles),
        learning_rate_scheduler=replace(
            schedule,
            lr_warmup_steps=min(schedule.lr_warmup_steps, 1),
            lr_decay_steps=None,
            lr_decay_starting_step=None,
        ),
    )


def _roles(model: ModelConfig) -> dict[str, str]:
    """Roles of all parameters of a model by logical name."""
    axis = Axis("tp", 0, (0,))
    whole = LayerStack(build_decoder(cast(AnyConfig, model.model_config), Build(axis)))
    layouts = parameter_layouts(whole, {"tp": 1, "ep": 1}).values()
    return {layout.name: layout.role for layout in layouts}


def _matching(patterns: tuple[str, ...], names: list[str]) -> tuple[str, ...]:
    """Patterns of layers that the small model has."""
    return tuple(p for p in patterns if any(re.fullmatch(p, name) for name in names))


def _rules(rules: tuple[LRMultiplier, ...], roles: dict[str, str]) -> tuple[LRMultiplier, ...]:
    """Rules that are left something by earlier ones."""
    left, kept = set(roles), []
    for rule in rules:
        found = {
            name
            for name in left
            if (
                roles[name] == rule.role
                if rule.pattern is None
                else re.fullmatch(rule.pattern, name)
            )
        }
        if found:
            kept.append(rule)
            left -= found
    return tuple(kept)
