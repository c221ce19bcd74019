"""Effects of `model.init_method` with `use_mup`: multipliers, draws, learning rates."""

from __future__ import annotations

from dataclasses import fields, replace

from kenotron_config.init_sections import DEPTH, SpectralMupInitConfig
from kenotron_config.sections import ModelConfig
from kenotron_models import (
    Multipliers,
    Mup,
    MupOptimizer,
    ParameterScale,
    multipliers_of,
    mup_scales,
)
from kenotron_optim import AdamWConfig, MuonConfig, OptimizerConfig

AT = "model.init_method"
COUNTS = ("int", "int | None", int, int | None)
"""Types of the fields that may be widths."""
NO_WIDTHS = frozenset(
    {"vocab_size", "max_position_embeddings", "sliding_window", "sliding_window_size"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp"}
)
"""Whole numbers of models that no factor follows from."""


def mup_of(model: ModelConfig) -> Mup | None:
    """Return the parametrisation of a model; None: the standard one.

    Raises:
        ValueError: a key of `base` is none of the model's, or its value is wrong there.
    """
    method, sizes = model.init_method, model.model_config
    if not isinstance(method, SpectralMupInitConfig):
        return None
    if method.is_nanotron:
        return Mup(rule="nanotron")
    known = {each.name for each in fields(sizes) if each.type in COUNTS} - NO_WIDTHS
    if unknown := sorted({*method.base} - known):
        raise ValueError(
            f"{AT}.base: {', '.join(unknown)} was given; it must have keys of model.model_config "
            "that are widths, such as hidden_size"
        )
    widths = {key: size for key, size in method.base.items() if key != DEPTH}
    try:
        base = replace(sizes, **widths).decoder
    except ValueError as error:
        raise ValueError(f"{AT}.base: {'; '.join(str(error).splitlines())}") from error
    return Mup(base=base, base_depth=method.base.get(DEPTH), depth_rule=method.depth_rule)


def multipliers_in(model: ModelConfig) -> Multipliers:
    """Return what the parametrisation multiplies in a model; all 1 with the standard one."""
    mup, method = mup_of(model), model.init_method
    if mup is None or not isinstance(method, SpectralMupInitConfig):
        return Multipliers()
    return multipliers_of(
        model.model_config.decoder,
        mup,
        embedding=method.embedding_multiplier,
        output=method.output_multiplier,
        attention_scale=method.attention_scale,
    )


def scales_in(model: ModelConfig, optimizer: OptimizerConfig) -> dict[str, ParameterScale] | None:
    """Return first values and factors of each parameter; None: the standard parametrisation.

    Raises:
        ValueError: the model or the optimizer has what the parametrisation does not cover.
    """
    mup, method, rule = mup_of(model), model.init_method, optimizer.optimizer_factory
    if mup is None or not isinstance(method, SpectralMupInitConfig):
        return None
    kind: MupOptimizer = "adamw" if isinstance(rule, AdamWConfig) else "sgd"
    left: tuple[str, ...] = ()
    if isinstance(rule, MuonConfig):
        kind, left = "muon", rule.adamw_named_params
        if rule.per_head:
            raise ValueError(
                "optimizer.optimizer_factory.per_head: true was given; with model.init_method."
                "use_mup matrices must be whole: set it to false"
            )
    spec = model.model_config.decoder
    try:
        return mup_scales(spec, mup, kind, method.std, method.scaling_method, left)
    except ValueError as error:
        raise ValueError(f"{AT}.{error}") from error


def mup_problems(model: ModelConfig, optimizer: OptimizerConfig | None) -> list[str]:
    """Return one line for each problem of a parametrisation by widths."""
    try:
        if optimizer is None:
            mup_of(model)
        else:
            scales_in(model, optimizer)
    except ValueError as error:
        return str(error).splitlines()
    return []
