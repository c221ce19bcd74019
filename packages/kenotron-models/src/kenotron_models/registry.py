"""The families of decoders that can be built. A new one is a file, and a line in ``FAMILIES``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from kenotron_models.families.deepseek_v3 import DEEPSEEK_V3
from kenotron_models.families.gemma import GEMMA2, GEMMA3
from kenotron_models.families.glm4_moe import GLM4_MOE
from kenotron_models.families.gpt_oss import GPT_OSS
from kenotron_models.families.granite_hybrid import GRANITE_HYBRID
from kenotron_models.families.jamba import JAMBA
from kenotron_models.families.llama import LLAMA
from kenotron_models.families.llamoe import LLAMOE
from kenotron_models.families.mamba import MAMBA
from kenotron_models.families.mamba2 import MAMBA2
from kenotron_models.families.mistral import MISTRAL
from kenotron_models.families.mixtral import MIXTRAL
from kenotron_models.families.nemotron_h import NEMOTRON_H
from kenotron_models.families.olmo2 import OLMO2, OLMO3
from kenotron_models.families.olmoe import OLMOE
from kenotron_models.families.phi3 import PHI3
from kenotron_models.families.qwen2 import QWEN2
from kenotron_models.families.qwen3 import QWEN3
from kenotron_models.families.qwen3_moe import QWEN3_MOE
from kenotron_models.families.qwen3_next import QWEN3_NEXT
from kenotron_models.families.smollm3 import SMOLLM3
from kenotron_models.families.starcoder2 import STARCODER2
from kenotron_models.families.transformers_config import TRANSFORMERS
from kenotron_models.family import Family, FamilyConfig
from kenotron_models.multipliers import Multipliers

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN2,
    QWEN3,
    MISTRAL,
    STARCODER2,
    MIXTRAL,
    QWEN3_MOE,
    DEEPSEEK_V3,
    LLAMOE,
    OLMOE,
    GLM4_MOE,
    MAMBA,
    MAMBA2,
    NEMOTRON_H,
    SMOLLM3,
    PHI3,
    OLMO2,
    OLMO3,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    QWEN3_NEXT,
    JAMBA,
    GRANITE_HYBRID,
    TRANSFORMERS,
)
"""YAML without a marker is of the family that knows most of its keys, the first of equals;
config.json is written by the config's own family, else by the first that can say it."""
MULTIPLIERS = "multipliers"
"""Key of what a checkpoint says of a model next to the keys of its config."""
ADAPTER = "adapter"
"""The same of a checkpoint that has adapters and not the weights that they belong to."""
if TYPE_CHECKING:
    AnyConfig = FamilyConfig
    """The config of some family: a union of all families' at run time."""
else:
    AnyConfig = reduce(or_, (family.config for family in FAMILIES))


def family_of(config: FamilyConfig) -> Family:
    """Return the family of a config. Raises ValueError for a class that no family has."""
    for family in FAMILIES:
        if family.config is type(config):
            return family
    known = ", ".join(family.config.__name__ for family in FAMILIES)
    raise ValueError(f"{type(config).__name__} is the config of no known family: it is {known}")


def model_to_json(config: FamilyConfig, multipliers: Multipliers) -> dict[str, Any]:
    """Return what a checkpoint says of a model: ``asdict``, and multipliers that are not 1."""
    more = {MULTIPLIERS: multipliers.to_json()} if multipliers.change else {}
    return {**asdict(config), **more}


def model_from_json(values: Mapping[str, Any]) -> tuple[FamilyConfig, Multipliers]:
    """Return what ``model_to_json`` wrote, as JSON has it.

    Raises:
        ValueError: as ``config_from_json``, or there is a multiplier that is not known, or the
            checkpoint has adapters alone.
    """
    if ADAPTER in values:
        raise ValueError(
            "the checkpoint has an adapter and no weights of its model: write it with "
            "`kenotron-convert adapter-to-peft`, then add it to the model's folder with "
            "`kenotron-convert merge-adapter`"
        )
    multipliers = Multipliers.from_json(values.get(MULTIPLIERS))
    rest = {name: value for name, value in values.items() if name != MULTIPLIERS}
    return config_from_json(rest), multipliers


def config_from_json(values: Mapping[str, Any]) -> FamilyConfig:
    """Return the config whose ``dataclasses.asdict`` was written as JSON.

    Raises:
        ValueError: it has no marker of a family, a value is wrong, or the weights need multipliers.
    """
    if MULTIPLIERS in values:
        raise ValueError(
            "the weights were trained with multipliers (use_mup), and are those of another model "
            "without them: export them (apps/convert kenotron-to-hf), which folds them, and take "
            "that folder"
        )
    markers = [family.marker for family in FAMILIES]
    family = next((each for each in FAMILIES if values.get(each.marker)), None)
    if family is None:
        raise ValueError(
            f"the config of a model has none of the markers {', '.join(markers)}: it is of no "
            "family that can be built"
        )
    others = {marker for marker in markers if marker != family.marker and not values.get(marker)}
    whole = _with_tuples({name: value for name, value in values.items() if name not in others})
    config = family.config
    hints, former = get_type_hints(config), {*getattr(config, "former", ())}
    whole = {name: value for name, value in whole.items() if name in hints or name not in former}
    for name, given in whole.items():
        kind = _dataclass_in(hints.get(name))
        if kind is not None and isinstance(given, Mapping):
            whole[name] = kind(**_with_tuples(given))
    try:
        made: FamilyConfig = config(**whole)
    except TypeError as error:
        raise ValueError(
            f"the config of a {config.__name__.removesuffix('Config')}: {error}"
        ) from error
    return made


def _dataclass_in(hint: Any) -> type[Any] | None:
    """The dataclass that a type hint allows, alone or among others."""
    kinds = (hint, *get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where dataclasses have tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
