"""Rules on a model that transformers computes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from kenotron_config.init_sections import RandomInitConfig
from kenotron_config.parallelism_section import ParallelismConfig
from kenotron_config.sections import ModelConfig
from kenotron_models import TransformersSpec, layers_on_meta, run_on_meta, sequence_problem
from kenotron_models.families import TransformersConfig

PATH = "model.model_config"
WHOLE = "a model of transformers computes whole samples, and knows nothing of this"


def transformers_problems(
    model: ModelConfig, sizes: TransformersConfig, parallelism: ParallelismConfig | None
) -> list[str]:
    """Name what a model of transformers cannot do, in one line each; it is built on meta."""
    try:
        spec = sizes.decoder
    except (ImportError, ValueError) as error:
        return [f"{PATH}.path: {_one_line(error)}"]
    found = [*_model(model)]
    if parallelism is not None:
        found += [*_ranks(parallelism), *_rows(spec, parallelism.cp)]
        found += [] if found else _layers(model, spec, parallelism)
    return found


def _model(model: ModelConfig) -> Iterator[str]:
    if model.cuda_graph:
        yield f"model.cuda_graph: true was given; {WHOLE}: set it to false"
    if model.make_vocab_size_divisible_by != 1:
        yield (
            f"model.make_vocab_size_divisible_by: {model.make_vocab_size_divisible_by} was given; "
            "the vocabulary of a model of transformers is padded for tp alone: set it to 1"
        )


def _ranks(parallelism: ParallelismConfig) -> Iterator[str]:
    if (again := parallelism.recompute) not in (None, "full", "none"):
        yield f"parallelism.recompute: {again} was given; {WHOLE}: choose full or none"
    if parallelism.recompute_memory_gb is not None:
        yield (
            f"parallelism.recompute_memory_gb: {parallelism.recompute_memory_gb} was given; what "
            "layers of transformers keep is not known: leave it out, and set recompute"
        )


def _rows(spec: TransformersSpec, cp: int) -> Iterator[str]:
    try:
        problem = sequence_problem(spec) if cp > 1 else None
    except ValueError as error:
        problem = _one_line(error)
    if problem is not None:
        yield f"parallelism.cp: {cp} was given; {problem}, or cp to 1"


def _layers(
    model: ModelConfig, spec: TransformersSpec, parallelism: ParallelismConfig
) -> Iterator[str]:
    """Yield the problems that show when the layers are made."""
    tp, pp = parallelism.tp, parallelism.pp
    try:
        layers = layers_on_meta(spec)
    except ValueError as error:
        yield f"{PATH}: {_one_line(error)}"
        return
    try:
        layers_on_meta(spec, tp)
    except ValueError as error:
        yield f"parallelism.tp: {_one_line(error)}; tp is {tp}"
        return
    try:
        layers_on_meta(spec, tp, parallelism.ep)
    except ValueError as error:
        yield f"parallelism.ep: {_one_line(error)}; ep is {parallelism.ep}"
    else:
        yield from _tokens(spec, parallelism)
    parts = pp * parallelism.schedule.chunks
    if len(layers) == 1 and model.compile:
        yield (
            "model.compile: true was given; transformers computes this model in one piece, and "
            "layers are compiled: set it to false"
        )
    if len(layers) == 1 and parallelism.recompute_of(0) == "full":
        yield (
            "parallelism.recompute: full was given; transformers computes this model in one piece, "
            "and layers are computed again: set it to none"
        )
    if len(layers) == 1 < parts:
        yield (
            f"parallelism.pp: {pp} was given; transformers computes this model in one piece: its "
            "layers hand on more than hidden features; set pp to 1"
        )
    elif len(layers) < parts:
        yield (
            f"parallelism.pp: {pp} was given ({parts} parts); the model has {len(layers)} layers, "
            "with embedding and head: choose fewer"
        )
    method = model.init_method
    roles = {getattr(each, "roles", {}).get("weight") for _, m in layers for each in m.modules()}
    if isinstance(method, RandomInitConfig) and (kept := _without_first_values(layers)):
        yield (
            f"model.init_method.std: {method.std} was given; {kept} is saved with the weights and "
            "is not drawn: read first weights with model.init_method.path"
        )
    if isinstance(method, RandomInitConfig) and "residual" not in roles:
        if method.scaling_method == "NONE":
            return
        yield (
            f"model.init_method.scaling_method: {method.scaling_method} was given; without a "
            "base_model_tp_plan it is not known which matrices write to the residual stream: set "
            "it to NONE"
        )


def _tokens(spec: TransformersSpec, parallelism: ParallelismConfig) -> Iterator[str]:
    """Yield why tokens between layers cannot be cut over tp, where they are."""
    if not parallelism.mode.sequence_parallel:
        return
    try:
        run_on_meta(spec, parallelism.tp, parallelism.ep, parallelism.mode)
    except ValueError as error:
        yield (
            f"parallelism.tp_mode: REDUCE_SCATTER was given; {_one_line(error)}: set it to "
            "ALL_REDUCE"
        )


def _without_first_values(layers: list[tuple[str, nn.Module]]) -> str | None:
    """Return a tensor that does not learn, and whose first values are no ones or zeros."""
    for _, layer in layers:
        for path, module in layer.named_modules():
            for name, each in module.named_parameters(recurse=False):
                role = getattr(module, "roles", {}).get(name, "")
                if not (each.requires_grad or role.startswith("norm")):
                    return f"{path}.{name}"
    return None


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines())
