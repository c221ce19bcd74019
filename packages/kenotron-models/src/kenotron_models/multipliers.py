"""Multipliers that a parametrisation puts into a model, and how an export folds them into weights.

A model that was trained with them computes the same without them once its weights are scaled: the
embedding by its own, queries by attention's, what blocks add by theirs, and the last norm by the
head's.

Shapes: O output and I input features of a matrix; H heads of K features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import Tensor

from kenotron_models.attention import AttentionSpec
from kenotron_models.attention_mix import MixingSpec
from kenotron_models.block import BlockSpec
from kenotron_models.hf_tensors import EMBEDDING
from kenotron_models.latent_attention import LatentAttentionSpec
from kenotron_models.mup import POWERS, Mup
from kenotron_models.shapes import decoder_layouts
from kenotron_models.spec import DecoderSpec

AttentionScale = Literal["inverse", "inverse_sqrt"]
"""Divisor of the scores as heads grow: their features, or the root of them."""


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Factors of what a config says; all 1: the model is what its config says."""

    embedding: float = 1.0
    """Of embedded tokens."""
    logits: float = 1.0
    """Of what the head reads."""
    attention: tuple[float, ...] = ()
    """Of the scores of each block; empty: 1 in all."""
    residual: float = 1.0
    """Of what each part of a block adds."""

    @property
    def change(self) -> bool:
        """True where any is not 1."""
        return self != Multipliers()

    def applied(self, spec: DecoderSpec) -> DecoderSpec:
        """Return the model with these multipliers, on top of its own.

        Args:
            spec: what the config says.
        """
        if not self.change:
            return spec
        attention = self.attention or (1.0,) * len(spec.blocks)
        blocks = tuple(
            self._block(block, factor) for block, factor in zip(spec.blocks, attention, strict=True)
        )
        own = 1.0 if spec.embedding_scale is None else spec.embedding_scale
        return replace(
            spec,
            blocks=blocks,
            embedding_scale=spec.embedding_scale if self.embedding == 1 else own * self.embedding,
            logit_scale=spec.logit_scale * self.logits,
        )

    def _block(self, block: BlockSpec, factor: float) -> BlockSpec:
        if factor != 1:
            assert isinstance(block.mixer, MixingSpec)
            mixer = replace(block.mixer, scale=block.mixer.factor * factor)
            block = replace(block, mixer=mixer)
        return replace(block, residual_scale=block.residual_scale * self.residual)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for the state of a checkpoint."""
        return {**asdict(self), "attention": list(self.attention)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Multipliers:
        """Return what ``to_json`` wrote; None: all are 1.

        Raises:
            ValueError: a key is not known.
        """
        if unknown := sorted({*(values or {})} - {*asdict(cls())}):
            raise ValueError(f"multipliers: {', '.join(unknown)} is not known: use a newer version")
        given = dict(values or {})
        scores = tuple(given.pop("attention", ()))
        return cls(**given, attention=scores)


def multipliers_of(
    spec: DecoderSpec,
    mup: Mup,
    *,
    embedding: float = 1.0,
    output: float = 1.0,
    attention_scale: AttentionScale = "inverse",
) -> Multipliers:
    """Return the multipliers that a parametrisation puts into a model.

    Args:
        spec: what the config says.
        mup: the parametrisation.
        embedding: further factor of embedded tokens, whose own factor stays that of the base.
        output: further factor of logits.
        attention_scale: scores are divided by K, as at the base width by its root (``inverse``), or
            by the root of K at every width. Nanotron's rule divides by K.
    """
    if mup.rule == "nanotron":
        return Multipliers(attention=_attention(spec, None))
    assert mup.base is not None
    scores = _attention(spec, mup.base) if attention_scale == "inverse" else ()
    scale, first = spec.embedding_scale, mup.base.embedding_scale  # Gemma's grows with the width
    return Multipliers(
        embedding=embedding if scale is None or first is None else embedding * (first / scale),
        logits=output / (spec.hidden_size / mup.base.hidden_size),
        attention=scores,
        residual=mup.depth_ratio(spec) ** -POWERS[mup.depth_rule],
    )


def _attention(spec: DecoderSpec, base: DecoderSpec | None) -> tuple[float, ...]:
    """1/K over the factor of each block's scores; empty: 1 in all."""
    found = []
    for i, block in enumerate(spec.blocks):
        mixer, first = block.mixer, None if base is None else base.blocks[i].mixer
        if not isinstance(mixer, MixingSpec):
            found.append(1.0)
        elif isinstance(first, MixingSpec):  # the config's own scale may depend on K, or not
            wanted = first.factor * first.head_dim / mixer.head_dim
            found.append(wanted / mixer.factor if wanted != mixer.factor else 1.0)
        else:
            found.append(1 / mixer.head_dim / mixer.factor)
    return tuple(found) if any(each != 1 for each in found) else ()


@dataclass(frozen=True)
class Fold:
    """Change that an export makes to a tensor."""

    factor: float
    rows: int | None = None
    """Only the first rows are scaled (queries in q, k and v); None: all."""
    offset: bool = False
    """The tensor is a norm's weight less 1."""

    def __call__(self, block: Tensor, first_row: int = 0) -> Tensor:
        """Return a block of the tensor, scaled.

        Args:
            block: consecutive rows (O, I), or (O,) of a bias or a norm.
            first_row: where they begin.
        """
        if self.offset:
            return (block + 1) * self.factor - 1
        if self.rows is None:
            return block * self.factor
        scaled = block.clone()
        scaled[: max(self.rows - first_row, 0)] *= self.factor
        return scaled


def folds(spec: DecoderSpec, multipliers: Multipliers) -> dict[str, Fold]:
    """Return what makes weights that were trained with multipliers those of a model without.

    Args:
        spec: what the config says, without the multipliers.
        multipliers: what the model was trained with.

    Returns:
        A fold for each logical tensor that changes.

    Raises:
        ValueError: a part has no weights that could take a multiplier.
    """
    layouts = {layout.name: layout for layout in decoder_layouts(spec).values()}
    found: dict[str, Fold] = {}
    if multipliers.embedding != 1:
        found[EMBEDDING] = Fold(multipliers.embedding)
    tied = multipliers.embedding if spec.tie_word_embeddings else 1.0
    if (last := multipliers.logits / tied) != 1:
        _norm(found, layouts, "norm", last)
    for i, block in enumerate(spec.blocks):
        if multipliers.attention and (factor := multipliers.attention[i]) != 1:
            _queries(found, layouts, f"layers.{i}.", block, factor)
        if multipliers.residual != 1:
            for part in block.parts:
                _added(found, layouts, f"layers.{i}.{part.name}", block, multipliers.residual)
    return found


def _norm(found: dict[str, Fold], layouts: Mapping[str, Any], name: str, factor: float) -> None:
    for path, layout in layouts.items():
        if path.rpartition(".")[0] == name:  # its weight, and its bias if it has one
            found[path] = Fold(factor, offset=layout.role == "norm_offset")


def _queries(
    found: dict[str, Fold], layouts: Mapping[str, Any], at: str, block: BlockSpec, factor: float
) -> None:
    spec = block.mixer
    if isinstance(spec, AttentionSpec) and spec.qk_norm is not None:
        _norm(found, layouts, f"{at}{spec.name}.q_norm", factor)
        return
    if isinstance(spec, LatentAttentionSpec):
        last, fold = "q" if spec.q_rank is None else "q_b", Fold(factor)  # it has no other rows
    elif isinstance(spec, AttentionSpec) and not spec.gate:
        last, fold = "qkv", Fold(factor, rows=spec.heads * spec.head_dim)
    else:
        assert spec is not None
        raise ValueError(
            f"{at}{spec.name} has no queries that could take a multiplier of {factor:.6g}"
        )
    for kind in ("weight", "bias"):
        if (path := f"{at}{spec.name}.{last}.{kind}") in layouts:
            found[path] = fold


def _added(
    found: dict[str, Fold], layouts: Mapping[str, Any], part: str, block: BlockSpec, factor: float
) -> None:
    """Scale the output of a part: at the norm after it, else at its matrices of role residual."""
    if block.norms != "before":
        _norm(found, layouts, f"{part}_post_norm", factor)
        return
    for path, layout in layouts.items():
        if path.startswith(f"{part}.") and layout.role == "residual":
            found[path] = Fold(factor)
            bias = path.rpartition(".")[0] + ".bias"
            if bias in layouts:
                found[bias] = Fold(factor)
