"""Rules that need more than one section of a training config."""

import math
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from kenotron_config.adapter_checks import adapter_problems
from kenotron_config.batch_sizes import batch_problems, ramp_problems
from kenotron_config.data_checks import (
    domain_problems,
    id_problems,
    stage_problems,
    vocabulary_problems,
)
from kenotron_config.doremi_section import DoReMiConfig
from kenotron_config.evaluate_section import evaluate_problems
from kenotron_config.expert_checks import chunk_problems, expert_problems
from kenotron_config.mtp_checks import mtp_problems
from kenotron_config.number_checks import number_problems
from kenotron_config.parallelism_section import CPAttention, ParallelismConfig
from kenotron_config.parametrisation import mup_problems
from kenotron_config.reproducible_checks import reproducible_problems
from kenotron_config.sections import GeneralConfig, ModelConfig, TokenizerConfig, TokensConfig
from kenotron_config.transformers_checks import transformers_problems
from kenotron_config.watch_sections import ProfilerConfig
from kenotron_data.config import DatasetStageConfig
from kenotron_models import cut_sizes
from kenotron_models.families import TransformersConfig
from kenotron_optim import OptimizerConfig, shard_ranks_problems

LAYERS_BESIDE_DECODER = ("embedding", "final norm", "head")
NANOTRON_WAYS: dict[str, CPAttention] = {
    "ring": "ring",
    "ring_flash_triton": "ring",
    "llama3_ring_attention": "gather",
}
"""Meaning of values of `attn_implementation` for attention over cp."""


class Sections(TypedDict, total=False):
    """The sections that rules look at; one that could not be read is left out."""

    parallelism: ParallelismConfig
    model: ModelConfig
    tokenizer: TokenizerConfig
    tokens: TokensConfig
    optimizer: OptimizerConfig
    profiler: ProfilerConfig | None
    data_stages: tuple[DatasetStageConfig, ...]
    doremi: DoReMiConfig | None
    general: GeneralConfig


def all_problems(sections: Mapping[str, Any]) -> list[str]:
    """Name every contradiction between the sections of a config, as `cross_problems` does."""
    found = [*cross_problems(cast(Sections, sections)), *evaluate_problems(sections)]
    return [*found, *reproducible_problems(sections)]


def cross_problems(sections: Sections) -> list[str]:
    """Name every contradiction between sections.

    Args:
        sections: the sections by name; rules that need a missing one are passed over.

    Returns:
        One line for each problem: `key.path: value given; what is needed; what to change`.
    """
    if found := number_problems(sections):  # nothing is computed with them
        return found
    parallelism, model = sections.get("parallelism"), sections.get("model")
    stages = sections.get("data_stages")
    if model:
        found += mtp_problems(model, sections.get("doremi"))
    if model and isinstance(model.model_config, TransformersConfig):
        own = transformers_problems(model, model.model_config, parallelism)
        if own:  # other rules need the model
            return found + own
    if model:
        found += mup_problems(model, sections.get("optimizer"))
        found += adapter_problems(model, sections.get("general"))
    if model and parallelism:
        found += _model_over_ranks(model, parallelism)
        found += _heads_over_cp(model, parallelism)
        found += expert_problems(model, parallelism)
        found += _stride(model, parallelism)
        found += _graphed(model, parallelism, sections.get("optimizer"))
    if parallelism and (optimizer := sections.get("optimizer")):
        lines = shard_ranks_problems(optimizer.shard_ranks, parallelism.dp)
        found += [f"optimizer.{line}" for line in lines]
    if stages is not None:
        found += stage_problems(stages)
    if model and stages:
        found += vocabulary_problems(model, stages, sections.get("tokenizer"))
        found += id_problems(model, stages)
    if (tokens := sections.get("tokens")) and (profiler := sections.get("profiler")):
        found += _profile(tokens, profiler)
    if stages is not None and (doremi := sections.get("doremi")):
        found += domain_problems(doremi, stages, model)
    if tokens and tokens.global_batch_size is not None and sections.get("doremi"):
        found.append(
            f"tokens.global_batch_size: {tokens.global_batch_size} was given; a run with doremi "
            "has the batch of dp x micro_batch_size x batch_accumulation_per_replica: remove it"
        )
    if parallelism and tokens and stages is not None:
        found += chunk_problems(parallelism, tokens, stages)
        found += batch_problems(parallelism, tokens, stages)
        found += ramp_problems(parallelism, tokens, stages)
    return found


def _model_over_ranks(model: ModelConfig, parallelism: ParallelismConfig) -> list[str]:
    sizes, tp, pp = model.model_config, parallelism.tp, parallelism.pp
    if isinstance(sizes, TransformersConfig):
        return []  # it has rules of its own
    cut, spec = cut_sizes(sizes), sizes.decoder
    kv_heads = getattr(sizes, "kv_heads", 0)
    found = [
        f"parallelism.tp: {tp} was given; it must divide model.model_config.{name} "
        f"({size}); set tp to {_largest_tp(cut, kv_heads, tp)} or change {name}"
        for name, size in cut.items()
        if size % tp
    ]
    if kv_heads % tp and tp % kv_heads:
        found.append(
            f"parallelism.tp: {tp} was given; it and model.model_config.num_key_value_heads "
            f"({kv_heads}) must divide one another; set tp to {_largest_tp(cut, kv_heads, tp)} or "
            "change num_key_value_heads"
        )
    depth = spec.num_hidden_layers
    layers = depth + len(LAYERS_BESIDE_DECODER)
    chunks = parallelism.schedule.chunks
    if pp * chunks > layers:
        times = f" x {chunks} parts a rank ({parallelism.pp_engine})" if chunks > 1 else ""
        found.append(
            f"parallelism.pp: {pp}{times} was given; each stage needs a layer, and the model has "
            f"{layers} ({depth} decoder layers, "
            f"{', '.join(LAYERS_BESIDE_DECODER)}); set pp to at most {layers // chunks}"
        )
    parts, stages = len(spec.stage_starts) + 1, pp * chunks
    if parts > 1 and stages not in (1, parts):
        found.append(
            f"model.model_config.layers: {getattr(sizes, 'layers', '')!r} was given, {parts} parts "
            f"between '|'; the pipeline has {stages} stages (pp {pp} x {chunks} parts a rank, "
            f"{parallelism.pp_engine}); give as many parts, or no '|', and costs decide"
        )
    return found


def _heads_over_cp(model: ModelConfig, parallelism: ParallelismConfig) -> list[str]:
    """Ulysses gives each rank of cp whole heads."""
    sizes, cp, tp = model.model_config, parallelism.cp, parallelism.tp
    names = ("num_attention_heads", "kv_heads")
    heads, kv_heads = (max(getattr(sizes, name, 0) // tp, 1) for name in names)
    if parallelism.cp_attention != "ulysses" or not hasattr(sizes, "kv_heads"):
        return []
    if heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0):
        return []
    return [
        f"parallelism.cp_attention: ulysses was given; parallelism.cp ({cp}) must divide the "
        f"{heads} query heads of a tp rank, and divide its {kv_heads} key heads or be a multiple "
        "of them; set cp_attention to ring, or change cp or tp"
    ]


def way_over_cp(model: ModelConfig, parallelism: ParallelismConfig) -> CPAttention:
    """Return the method over cp: `attn_implementation` names it where `cp_attention` is open."""
    way = parallelism.cp_attention
    if way != "auto":
        return way
    return NANOTRON_WAYS.get(getattr(model.model_config, "attn_implementation", ""), way)


def _stride(model: ModelConfig, parallelism: ParallelismConfig) -> list[str]:
    """A stride is of gathered keys, and given once."""
    stride, named = parallelism.cp_stride, "ring_attn_heads_k_stride"
    if stride is None:
        return []
    if (way := way_over_cp(model, parallelism)) != "gather":
        return [
            f"parallelism.cp_stride: {stride} was given; it counts key heads that are gathered at "
            f"a time, and cp_attention is {way}; set cp_attention to gather, or leave cp_stride out"
        ]
    if (other := getattr(model.model_config, named, None)) not in (None, stride):
        return [
            f"parallelism.cp_stride: {stride} was given; model.model_config.{named} is {other}; "
            "keep one"
        ]
    return []


def _graphed(
    model: ModelConfig, parallelism: ParallelismConfig, optimizer: OptimizerConfig | None
) -> list[str]:
    """A graph repeats kernels of one rank: no other rank and no dropout key may be in it."""
    if not model.cuda_graph:
        return []
    found = [
        f"model.cuda_graph: true was given with parallelism.{name} {size}; a graph holds one "
        f"rank's kernels: set {name} to 1 or cuda_graph to false"
        for name, size in parallelism.grid.items()
        if size > 1 and name != "dp"
    ]
    if optimizer is not None and optimizer.zero.cuts_gradients:
        found.append(
            f"model.cuda_graph: true was given with optimizer.zero_stage {optimizer.zero_stage}; a "
            "graph adds up whole gradients: set zero_stage to 1 or cuda_graph to false"
        )
    if model.model_config.decoder.routes:
        found.append(
            "model.cuda_graph: true was given with experts, whose numbers of rows are known on the "
            "host alone: set cuda_graph to false"
        )
    names = ("embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout")
    sizes = model.model_config
    found += [
        f"model.cuda_graph: true was given with model.model_config.{name} {rate}; a graph repeats "
        "its random numbers: set it to 0 or cuda_graph to false"
        for name in names
        if (rate := getattr(sizes, name, 0.0))
    ]
    return found


def _profile(tokens: TokensConfig, profiler: ProfilerConfig) -> list[str]:
    if profiler.steps <= tokens.train_steps:
        return []
    return [
        f"profiler.skip_first: {profiler.skip_first} was given; with wait, warmup, active and "
        f"repeat the profiler needs {profiler.steps} steps, and tokens.train_steps is "
        f"{tokens.train_steps}"
    ]


def _largest_tp(cut: Mapping[str, int], kv_heads: int, most: int) -> int:
    """The largest tp, up to `most`, that divides the model's sizes."""
    shared = math.gcd(*cut.values())
    return next(
        tp
        for tp in range(most, 0, -1)
        if shared % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    )
