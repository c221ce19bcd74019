"""Rules of `general.reproducible`: what is not shown to have the same bits on every layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kenotron_config.parallelism_section import ParallelismConfig
from kenotron_config.sections import GeneralConfig, ModelConfig
from kenotron_models import DecoderSpec, virtual_shards, whole_row_part
from kenotron_models.families import TransformersConfig
from kenotron_models.layers import AttentionSpec
from kenotron_optim import unordered_settings

MODE = "with general.reproducible: true"
SECTIONS = ("lighteval", "metrics_logging")
"""Sections whose numbers are not shown to be the same on every layout."""


def reproducible_problems(sections: Mapping[str, Any]) -> list[str]:
    """Name every setting that cannot be combined with `general.reproducible: true`.

    Args:
        sections: the sections by name; rules that need a missing one are passed over.

    Returns:
        One line for each problem: `key.path: value given; what is needed; what to change`.
    """
    general = sections.get("general")
    if general is None or not general.reproducible:
        return []
    found = []
    if parallelism := sections.get("parallelism"):
        found += _cp(parallelism.cp, general.reproducible_max_cp)
    if model := sections.get("model"):
        found += _model(model)
        if parallelism and not isinstance(model.model_config, TransformersConfig):
            spec = model.model_config.decoder
            found += _tp(parallelism.tp, general.reproducible_max_tp, spec)
            if general.reproducible_max_cp > 1:
                found += _chunks(general, parallelism, spec)
    evaluate = sections.get("evaluate")
    if evaluate and evaluate.tasks and general.reproducible_max_cp > 1:
        rule = "tasks of evaluate score texts, which are not computed in chunks of a sample"
        key = "general.reproducible_max_cp"
        found.append(
            _line(key, general.reproducible_max_cp, rule, "1, or leave evaluate.tasks out")
        )
    if optimizer := sections.get("optimizer"):
        for line in unordered_settings(optimizer):
            key, _, rest = line.partition(" was given")
            found.append(f"optimizer.{key} was given {MODE}{rest}")
    found += [
        f"{name}: a section was given {MODE}; its numbers are not shown to be the same on every "
        "layout: leave it out"
        for name in SECTIONS
        if sections.get(name) is not None
    ]
    return found


def _cp(cp: int, most: int) -> Iterator[str]:
    if most % cp == 0:
        return
    rule = f"cp must divide general.reproducible_max_cp ({most}), a power of two"
    larger = 1 << (cp - 1).bit_length()
    fix = f"a power of two up to {most}, or general.reproducible_max_cp to {larger} or more"
    yield _line("parallelism.cp", cp, rule, fix)


def _chunks(
    general: GeneralConfig, parallelism: ParallelismConfig, spec: DecoderSpec
) -> Iterator[str]:
    """Name settings that samples in chunks are not combined with."""
    most, shards = general.reproducible_max_cp, virtual_shards(spec, general.reproducible_max_tp)
    if part := whole_row_part(spec):
        rule = f"{part} is not computed in chunks of a sample"
        yield _line("general.reproducible_max_cp", most, rule, 1)
    kinds = [m for m in {b.mixer for b in spec.blocks} if isinstance(m, AttentionSpec)]
    shared = [m.heads // shards for m in kinds if m.heads // shards % parallelism.cp]
    if parallelism.cp_attention == "ulysses" and shared:
        of = f" of each of {shards} virtual shards" if shards > 1 else ""
        rule = f"ranks exchange heads, and cp must divide the {shared[0]} query heads{of}"
        yield _line("parallelism.cp_attention", "ulysses", rule, "ring or gather")


def _tp(tp: int, most: int, spec: DecoderSpec) -> Iterator[str]:
    if tp == 1 or (shards := virtual_shards(spec, most)) % tp == 0:
        return
    rule = (
        f"the model has {shards} virtual shards, the largest power of two up to "
        f"general.reproducible_max_tp ({most}) that divides what tp cuts"
    )
    fix = "1" if shards == 1 else f"a power of two up to {shards}"
    yield _line("parallelism.tp", tp, rule, fix)


def _model(model: ModelConfig) -> Iterator[str]:
    sizes, path = model.model_config, "model.model_config"
    if isinstance(sizes, TransformersConfig):
        yield f"{path}: a model of transformers was given {MODE}; choose one of our own families"
        return
    for name in ("compile", "cuda_graph"):
        if getattr(model, name):
            yield _line(f"model.{name}", "true", "compiled kernels are not proved", "false")
    if model.dtype == "float16":
        yield _line("model.dtype", "float16", "its loss scale is not proved", "bfloat16 or float32")


def _line(key: str, value: object, rule: str, fix: object) -> str:
    return f"{key}: {value} was given {MODE}; {rule}: set it to {fix}"
