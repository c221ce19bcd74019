"""Parameters and operations of a model of transformers, read off its modules on meta."""

from __future__ import annotations

import json
import math
from functools import lru_cache

from kenotron_dist.placement import TensorLayout
from kenotron_models.shapes import decoder_layouts
from kenotron_models.transformers_spec import TransformersSpec

TABLES = ("embedding",)
"""Roles of tensors that no token is multiplied with."""


@lru_cache(maxsize=8)
def tensors(spec: TransformersSpec) -> dict[str, TensorLayout]:
    """Return each logical tensor once, by the name of its first owner."""
    found: dict[str, TensorLayout] = {}
    for path, layout in decoder_layouts(spec).items():
        if all(each.name != layout.name for each in found.values()):
            found[path] = layout
    return found


def element_count(spec: TransformersSpec) -> int:
    """Count all parameters, tied ones once."""
    return sum(math.prod(layout.shape) for layout in tensors(spec).values())


def flops(spec: TransformersSpec, batch: int, sequence: int, *, causal: bool) -> float:
    """Count the operations of a forward pass over (batch, sequence) tokens.

    Products with matrices, and the scores of attention where config.json names heads. Of experts,
    which are stacks of matrices, a token uses as many as config.json names.
    """
    matrices = sum(_used(spec, layout) for layout in tensors(spec).values())
    separate = any(layout.role == "output" for layout in tensors(spec).values())
    head = 0 if separate else spec.hidden_size * spec.vocab_size
    scores = _scores(spec, batch, sequence, causal) * spec.depth
    return float(2 * batch * sequence * (matrices + head) + scores)


def layer_flops(
    spec: TransformersSpec, number: int, batch: int, sequence: int, *, causal: bool
) -> tuple[int, int]:
    """Count the operations of a layer, as ``flops``: of its matrices, and of attention's scores."""
    matrices = work(spec)[1 + number]
    return int(2 * batch * sequence * matrices), int(_scores(spec, batch, sequence, causal))


def _scores(spec: TransformersSpec, batch: int, sequence: int, causal: bool) -> float:
    """Operations of the scores of a layer's attention."""
    whole = 4 * batch * sequence**2 * spec.heads * spec.head_dim
    return whole / 2 if causal else whole


@lru_cache(maxsize=8)
def work(spec: TransformersSpec) -> tuple[float, ...]:
    """Return the multiply-adds a token of every layer of ``transformers_layers``."""
    found: dict[str, float] = {"embedding": 0.0}
    for path, layout in decoder_layouts(spec).items():
        words = path.split(".")
        entry = ".".join(words[: 2 if words[0] == "layers" else 1])
        used = math.prod(layout.shape) if entry == "head" else _used(spec, layout)
        found[entry] = found.get(entry, 0.0) + (used if len(layout.shape) > 1 else 0)
    return (found.pop("embedding"), *found.values()) if len(found) > 2 else (1.0,)


def stacked_matrices(spec: TransformersSpec) -> int:
    """Return the fewest matrices of a stack, which are experts; 1 where there are none."""
    stacks = [layout.shape[0] for layout in tensors(spec).values() if len(layout.shape) == 3]
    return min(stacks, default=1)


def _used(spec: TransformersSpec, layout: TensorLayout) -> float:
    """Elements that a token is multiplied with."""
    size = math.prod(layout.shape)
    if len(layout.shape) < 2 or layout.role in TABLES:
        return 0
    if len(layout.shape) < 3:
        return size
    return size * min(1.0, _experts_of_token(spec.config_json) / layout.shape[0])


@lru_cache(maxsize=8)
def _experts_of_token(config_json: str) -> float:
    values = json.loads(config_json)
    given = values.get("num_experts_per_tok")
    return float(given) if isinstance(given, int) else math.inf
