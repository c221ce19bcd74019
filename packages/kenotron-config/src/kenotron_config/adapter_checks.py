"""Adapters of a model, and rules on them that need the rest of the config."""

from __future__ import annotations

from collections.abc import Iterator

from kenotron_config.adapter_section import AdapterConfig
from kenotron_config.init_sections import RandomInitConfig, SpectralMupInitConfig
from kenotron_config.sections import GeneralConfig, ModelConfig
from kenotron_models.adapters import AdapterSpec, linear_parts, targeted


def adapter_of(model: ModelConfig) -> AdapterSpec | None:
    """Return the adapters of a model; None: there are none.

    Raises:
        ValueError: a line for each target that names nothing.
    """
    if (own := model.adapter) is None:
        return None
    return AdapterSpec(
        kind=own.kind,
        rank=own.rank,
        alpha=own.alpha,
        dropout=own.dropout,
        weights=targeted(linear_parts(model.model_config), own.targets),
    )


def adapter_problems(model: ModelConfig, general: GeneralConfig | None) -> list[str]:
    """Name what adapters cannot be combined with, and targets that name nothing.

    Args:
        model: the model, which can be built.
        general: for the reproducible mode.

    Returns:
        One line for each problem: `key.path: value given; what is needed; what to change`.
    """
    if model.adapter is None:
        return []
    found = [*_combined(model, general)]
    try:
        spec = adapter_of(model)
    except ValueError as error:
        return found + [f"model.adapter.targets: {line}" for line in str(error).splitlines()]
    if spec is not None and spec.stacks:
        found += _of_stacks(model.adapter)
    return found


def _of_stacks(own: AdapterConfig) -> Iterator[str]:
    """Name what adapters of stacks of experts have not, as those of peft."""
    without = "experts that are stacks of matrices have no"
    leave = "take experts out of targets"
    if own.kind == "dora":
        yield f"model.adapter.kind: dora was given; {without} dora: set it to lora, or {leave}"
    if own.dropout:
        yield (
            f"model.adapter.dropout: {own.dropout} was given; {without} dropout: set it to 0, or "
            f"{leave}"
        )


def _combined(model: ModelConfig, general: GeneralConfig | None) -> Iterator[str]:
    assert model.adapter is not None
    start = f"model.adapter.rank: {model.adapter.rank} was given; adapters"
    method = model.init_method
    if isinstance(method, SpectralMupInitConfig) or getattr(method, "use_mup", False):
        yield f"{start} have no scales of use_mup: give path or std, or leave adapter out"
    if isinstance(method, RandomInitConfig) and model.adapter.path is not None:
        yield (
            f"model.adapter.path: {model.adapter.path} was given; it is of weights that are there: "
            "give model.init_method.path"
        )
    for key in ("compile", "cuda_graph"):
        if getattr(model, key):
            yield f"model.{key}: true was given; {_is_not(start)}: set it to false"
    if model.mtp is not None:
        yield f"model.mtp.layers: {model.mtp.layers} was given; {_is_not(start)}: leave mtp out"
    if general is not None and general.reproducible:
        yield f"general.reproducible: true was given; {_is_not(start)}: set it to false"


def _is_not(start: str) -> str:
    return f"{start.partition(':')[0]} is set, and adapters are not combined with it"
