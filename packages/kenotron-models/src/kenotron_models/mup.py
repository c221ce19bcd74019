"""Maximal update parametrisation (µP): how first values and learning rates follow the widths.

Everything is relative to a base model of the same depth, whose widths are those that
hyperparameters were chosen for; there, all factors are 1 (Yang et al., arXiv 2203.03466; spectral
condition: Yang et al., arXiv 2310.17813; depth: arXiv 2310.02244 and 2505.01618).

Shapes: O output and I input features of a matrix; those of q, k, v, gate and up are counted apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kenotron_dist import MATRICES, Role
from kenotron_dist.init import Normal
from kenotron_dist.placement import Fused, TensorLayout, parameter_layouts
from kenotron_models.decoder import LayerStack, build_decoder
from kenotron_models.parameter_init import standard_init
from kenotron_models.part import HasFirstValues
from kenotron_models.shapes import ONE
from kenotron_models.spec import DecoderSpec
from kenotron_models.transformers_spec import TransformersSpec

MupRule = Literal["spectral", "nanotron"]
"""Rule for the factors: the spectral condition, or Nanotron's old runs."""
MupOptimizer = Literal["adamw", "sgd", "muon"]
"""Optimizer of the matrices inside the model."""
DepthRule = Literal["none", "inverse_sqrt", "inverse"]
"""Divisor of the additions of blocks as depth grows: 1, the root of the depth, or the depth."""
POWERS: dict[DepthRule, float] = {"none": 0.0, "inverse_sqrt": 0.5, "inverse": 1.0}
"""Exponent of the number of layers in the divisor of a block's output."""
PRODUCTS: frozenset[Role] = frozenset({*MATRICES, "router"})
"""Roles of matrices whose update is measured by its spectral norm."""


@dataclass(frozen=True, kw_only=True)
class Mup:
    """A parametrisation by widths. ``rule: nanotron`` has no base and no other field.

    Raises:
        ValueError: the spectral rule without a base, or a depth rule without a base depth.
    """

    rule: MupRule = "spectral"
    """spectral: see the file; nanotron: that of Nanotron's old runs, which has the learning rates
    of SGD under every optimizer, takes fused matrices as one, and the head as any other matrix."""
    base: DecoderSpec | None = None
    """The model with base widths, as deep as the model itself."""
    base_depth: int | None = None
    """Layers of the base model; None: as many as the model has."""
    depth_rule: DepthRule = "none"
    """Divisor of the output of a block: (the root of) the number of layers over ``base_depth``."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        if self.rule == "spectral" and self.base is None:
            raise ValueError("base: None was given; the spectral rule is relative to a base model")
        if self.depth_rule != "none" and self.base_depth is None:
            raise ValueError(
                f"depth_rule: {self.depth_rule} was given without base_depth: it is relative to "
                "the number of layers of the base model"
            )

    def depth_ratio(self, spec: DecoderSpec) -> float:
        """Return how many times deeper a model is than the base; 1 without a depth rule."""
        if self.depth_rule == "none" or self.base_depth is None:
            return 1.0
        return spec.num_hidden_layers / self.base_depth


@dataclass(frozen=True)
class ParameterScale:
    """Scales of one logical tensor under a parametrisation."""

    name: str
    role: Role
    fan_in: int
    """I of a matrix; 1 of a table and of a vector."""
    fan_out: tuple[int, ...]
    """O of each fused matrix; features of a table or of a vector."""
    std: tuple[float, ...]
    """Standard deviation of the draws of each of these; empty: the values are constants."""
    lr: float
    """Factor of the learning rate."""
    weight_decay: float
    """Factor of the weight decay."""


@dataclass(frozen=True)
class _Fans:
    layout: TensorLayout
    fan_in: int
    fan_out: tuple[int, ...]


def mup_scales(
    spec: DecoderSpec,
    mup: Mup,
    optimizer: MupOptimizer,
    std: float,
    scaling: str = "NUM_LAYERS",
    adamw: Sequence[str] = (),
) -> dict[str, ParameterScale]:
    """Return first values and factors of every logical tensor by name; the same on all layouts.

    Args:
        spec: the model.
        mup: the parametrisation.
        optimizer: what updates matrices inside the model; Muon leaves all else to AdamW.
        std: standard deviation of the base model's draws; the nanotron rule does not read it.
        scaling: see ``standard_init``.
        adamw: regular expressions for whole names of matrices that Muon leaves to AdamW.

    Raises:
        ValueError: the base has other tensors, parts have first values of their own, or matrices
            that are fused in one tensor need different learning rates.
    """
    _check_parts(spec)
    fans = _fans(spec)
    if mup.rule == "nanotron":
        return {name: _nanotron(own) for name, own in fans.items()}
    assert mup.base is not None
    base = _fans(mup.base)
    if changed := sorted(fans.keys() ^ base.keys()):
        raise ValueError(
            f"base: its model has not the same parameters: {', '.join(changed[:3])}; change widths "
            "only, such as hidden_size"
        )
    draw, found = standard_init(spec, std, scaling), {}
    for name, own in fans.items():
        left = optimizer == "muon" and any(re.fullmatch(pattern, name) for pattern in adamw)
        rule: MupOptimizer = "adamw" if left else optimizer
        lr = _rate(own, base[name], rule) * _depth_rate(own.layout, mup, spec, rule)
        stds = tuple(
            how.std * factor
            for how in [draw(own.layout)]
            if isinstance(how, Normal)
            for factor in _draws(own, base[name], mup, spec, scaling)
        )
        role = own.layout.role
        found[name] = ParameterScale(name, role, own.fan_in, own.fan_out, stds, lr, 1 / lr)
    return found


def _fans(spec: DecoderSpec) -> dict[str, _Fans]:
    """Whole fans of every logical tensor, fused matrices apart."""
    stack = LayerStack(build_decoder(spec, ONE))
    turned = {
        f"{name}.weight" for name, m in stack.named_modules() if getattr(m, "transposed", False)
    }
    found: dict[str, _Fans] = {}
    for path, layout in parameter_layouts(stack, {"tp": 1, "ep": 1}).items():
        shape, product = layout.shape, layout.role in {*PRODUCTS, "output"}
        if not product or len(shape) < 2:
            out = shape[0] if layout.role == "filter" else shape[-1]
            found[layout.name] = _Fans(layout, 1, (out,))
        elif path in turned:
            found[layout.name] = _Fans(layout, shape[-2], (shape[-1],))
        else:
            found[layout.name] = _Fans(layout, shape[-1], _apart(layout))
    return found


def _apart(layout: TensorLayout) -> tuple[int, ...]:
    """Rows of each of the matrices that are fused in one tensor (..., O, I)."""
    rows = len(layout.shape) - 2
    for placement in layout.placement:
        if isinstance(placement, Fused) and placement.dim == rows:
            return placement.sizes
    for shard in layout.shards:
        if shard.dim == rows and shard.chunks is not None:
            return tuple(chunk.size for chunk in shard.chunks)
    return (layout.shape[-2],)


def spectral_std(fan_in: int, fan_out: int) -> float:
    """Return the std of a matrix (O, I) whose spectral norm is of the order of sqrt(O / I)."""
    return fan_in**-0.5 * min(1.0, (fan_out / fan_in) ** 0.5)


def _draws(own: _Fans, base: _Fans, mup: Mup, spec: DecoderSpec, scaling: str) -> tuple[float, ...]:
    """Factors of the standard draws' std, for each fused matrix."""
    role = own.layout.role
    if role not in PRODUCTS:
        return (1.0,) * len(own.fan_out)
    undo = scaling == "NUM_LAYERS" and role == "residual"  # the block is divided instead
    depth = math.sqrt(mup.depth_ratio(spec)) if undo else 1.0
    return tuple(
        depth * spectral_std(own.fan_in, o) / spectral_std(base.fan_in, b)
        for o, b in zip(own.fan_out, base.fan_out, strict=True)
    )


def _rate(own: _Fans, base: _Fans, optimizer: MupOptimizer) -> float:
    """Factor of a tensor's learning rate for its widths."""
    if own.layout.role == "output":  # logits are divided by the growth of I, gradients too
        return own.fan_in / base.fan_in if optimizer == "sgd" else 1.0
    if own.layout.role not in PRODUCTS:  # vectors and tables: their elements are activations
        return own.fan_out[0] / base.fan_out[0] if optimizer == "sgd" else 1.0
    growth = own.fan_in / base.fan_in
    if optimizer == "adamw" or (optimizer == "muon" and own.layout.role not in MATRICES):
        return 1 / growth
    norm = _sgd_rate if optimizer == "sgd" else _muon_rate
    each = {
        norm(own.fan_in, o) / norm(base.fan_in, b)
        for o, b in zip(own.fan_out, base.fan_out, strict=True)
    }
    if max(each) > min(each) * (1 + 1e-12):
        raise ValueError(
            f"base: the matrices in {own.layout.name} of {', '.join(map(str, own.fan_out))} rows "
            f"(base: {', '.join(map(str, base.fan_out))}) need different rates with {optimizer}, "
            "and they are one parameter: let all widths grow in proportion, such as "
            "num_key_value_heads with num_attention_heads, or take AdamW"
        )
    return each.pop()


def _sgd_rate(fan_in: int, fan_out: int) -> float:
    return fan_out / fan_in


def _muon_rate(fan_in: int, fan_out: int) -> float:
    """sqrt(O / I) over the spectral norm of an update of ours, 0.2 sqrt(max(O, I))."""
    return (fan_out / fan_in / max(fan_out, fan_in)) ** 0.5


def _depth_rate(
    layout: TensorLayout, mup: Mup, spec: DecoderSpec, optimizer: MupOptimizer
) -> float:
    """Factor of the learning rate of what is in a block, which is divided by the depth."""
    if not layout.name.startswith("layers.") or mup.depth_rule == "none":
        return 1.0
    power = POWERS[mup.depth_rule]
    return mup.depth_ratio(spec) ** (2 * power - 1 if optimizer == "sgd" else power - 1)


def _nanotron(own: _Fans) -> ParameterScale:
    """Nanotron's rule: fused matrices are one, and so is the head; tables have std 1."""
    role, whole = own.layout.role, (sum(own.fan_out),)
    if role in {*PRODUCTS, "output"}:
        std, lr = spectral_std(own.fan_in, whole[0]), whole[0] / own.fan_in
        return ParameterScale(own.layout.name, role, own.fan_in, whole, (std,), lr, 1.0)
    stds = (1.0,) if role == "embedding" else ()
    return ParameterScale(own.layout.name, role, own.fan_in, whole, stds, 1.0, 1.0)


def _check_parts(spec: DecoderSpec) -> None:
    if isinstance(spec, TransformersSpec):
        raise ValueError(
            "use_mup: true was given for layers of transformers, whose attention cannot be scaled: "
            "choose a family of ours, or give std"
        )
    for block in spec.blocks:
        for part in block.parts:
            if isinstance(part, HasFirstValues):
                raise ValueError(
                    f"use_mup: true was given for a model with {part.name}, whose constants begin "
                    "by a rule of their own: no widths of it are known to transfer; give std"
                )
