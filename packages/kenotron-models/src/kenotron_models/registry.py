"""The families of decoders that can be built, by the marker of their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kenotron_models.config import LlamaConfig
from kenotron_models.config_mistral import MistralConfig
from kenotron_models.config_qwen2 import MoEConfig, Qwen2Config
from kenotron_models.config_qwen3 import Qwen3Config
from kenotron_models.config_starcoder2 import Starcoder2Config
from kenotron_models.rope_scaling import RopeScaling

AnyConfig = LlamaConfig | Qwen2Config | Qwen3Config | MistralConfig | Starcoder2Config
FAMILIES: dict[str, type[AnyConfig]] = {
    "is_qwen2_config": Qwen2Config,
    "is_qwen3_config": Qwen3Config,
    "is_mistral_config": MistralConfig,
    "is_starcoder2_config": Starcoder2Config,
    "is_llama_config": LlamaConfig,
}
"""The class that a marker stands for."""
_NESTED = {"rope_scaling": RopeScaling, "moe_config": MoEConfig}


def config_from_json(values: Mapping[str, Any]) -> AnyConfig:
    """The config whose ``dataclasses.asdict`` was written as JSON.

    Raises ValueError when it has no marker of a family, or a value is wrong.
    """
    kind = next((kind for marker, kind in FAMILIES.items() if values.get(marker)), None)
    if kind is None:
        raise ValueError(
            f"the config of a model has none of the markers {', '.join(FAMILIES)}: it is of no "
            "family that can be built"
        )
    whole = _with_tuples(values)
    for name, nested in _NESTED.items():
        if isinstance(given := whole.get(name), Mapping):
            whole[name] = nested(**_with_tuples(given))
    try:
        return kind(**whole)
    except TypeError as error:
        raise ValueError(
            f"the config of a {kind.__name__.removesuffix('Config')}: {error}"
        ) from error


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where dataclasses have tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
