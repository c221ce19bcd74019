"""Which rows of Hugging Face's tensors our tensors are made of, and the other way round.

Queries, keys and values are one matrix here, and so are gate and up: rows one after the other.
Where neighbouring features are turned (``rope_interleaved``), our rows 2i and 2i + 1 of a head are
their rows i and i + K/2: the same function, as they turn halves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from kenotron_models.spec import DecoderSpec

Shape = tuple[int, ...]
Run = tuple[str, int, int, int]
"""(their tensor, its first row, the first row in ours, number of rows)."""

EMBEDDING, HEAD = "embedding.weight", "head.weight"
HF_HEAD = "lm_head.weight"
LAYER: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up": ("mlp.up_proj",),
    "mlp.down": ("mlp.down_proj",),
}
"""Modules of our decoder layer -> those of Llama's, whose rows follow one another in ours."""
_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""What old files hold beside the weights: it is computed anew."""


@dataclass(frozen=True)
class Part:
    """One of their tensors, as consecutive rows of one of ours."""

    name: str
    shape: Shape
    first: int
    """Our row where it begins."""
    head_dim: int = 0
    """Features of its heads when halves of theirs are neighbours of ours; 0: rows are alike."""

    def runs(self) -> Iterator[Run]:
        """Rows that are consecutive in both."""
        if not self.head_dim:
            yield self.name, 0, self.first, self.shape[0]
            return
        half = self.head_dim // 2
        for row in range(self.shape[0]):
            head, inner = divmod(row, self.head_dim)
            place = head * self.head_dim + 2 * (inner % half) + inner // half
            yield self.name, row, self.first + place, 1

    def from_ours(self, rows: Tensor) -> Tensor:
        """Their tensor from ``shape[0]`` rows of ours, from ``first`` on."""
        if not self.head_dim:
            return rows
        by_pair = rows.unflatten(0, (-1, self.head_dim // 2, 2))
        return by_pair.transpose(1, 2).reshape(self.shape)


@dataclass(frozen=True)
class Whole:
    """One of our tensors."""

    shape: Shape
    parts: tuple[Part, ...]

    def sources(self) -> dict[str, Shape]:
        """Shapes of theirs that it is made of, by name."""
        return {part.name: part.shape for part in self.parts}

    def runs(self) -> Iterator[Run]:
        """Where all its rows come from."""
        for part in self.parts:
            yield from part.runs()


def tensors_of(spec: DecoderSpec, layer: Mapping[str, tuple[str, ...]]) -> dict[str, Whole]:
    """Our tensors by name, in the order of the model; ``layer``: what replaces parts of LAYER."""
    width, vocabulary = spec.hidden_size, (spec.vocab_size, spec.hidden_size)
    modules = {**LAYER, **layer}
    found = {EMBEDDING: _plain("model.embed_tokens.weight", vocabulary)}
    for i in range(spec.num_hidden_layers):
        for module, (outs, ins, bias) in _modules(spec).items():
            there = [f"model.layers.{i}.{name}" for name in modules[module]]
            heads = _TURNED.get(module, 0) if spec.rope_interleaved and spec.rotates(i) else 0
            for kind, columns in [("weight", ins), ("bias", ())][: 1 + bias]:
                found[f"layers.{i}.{module}.{kind}"] = _fused(
                    [f"{name}.{kind}" for name in there],
                    [(rows, *columns) for rows in outs],
                    [spec.head_dim if at < heads else 0 for at in range(len(outs))],
                )
    found["norm.weight"] = _plain("model.norm.weight", (width,))
    if spec.norm == "layer_norm":
        found["norm.bias"] = _plain("model.norm.bias", (width,))
    if not spec.tie_word_embeddings:
        found[HEAD] = _plain(HF_HEAD, vocabulary)
    return found


_TURNED = {"attention.qkv": 2, "attention.q_norm": 1, "attention.k_norm": 1}
"""Modules whose rows are features that are turned: so many of their first parts."""


_Sizes = tuple[Shape, Shape, bool]
"""Rows of each part of a module's weight; its columns, none for a vector; whether with bias."""


def _modules(spec: DecoderSpec) -> dict[str, _Sizes]:
    """The modules of a layer."""
    width, wide, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
    heads, kv = spec.num_attention_heads * head, spec.kv_heads * head
    norm: _Sizes = ((width,), (), spec.norm == "layer_norm")
    found: dict[str, _Sizes] = {
        "attention_norm": norm,
        "attention.qkv": ((heads, kv, kv), (width,), spec.qkv_bias),
        "attention.out": ((width,), (heads,), spec.out_bias),
        "mlp_norm": norm,
        "mlp.down": ((width,), (wide,), spec.mlp_bias),
    }
    if spec.qk_norm:
        found |= {f"attention.{name}": ((head,), (), False) for name in ("q_norm", "k_norm")}
    if spec.gated:
        found["mlp.gate_up"] = ((wide, wide), (width,), spec.mlp_bias)
    else:
        found["mlp.up"] = ((wide,), (width,), spec.mlp_bias)
    return found


def is_superfluous(name: str, spec: DecoderSpec) -> bool:
    """Whether a tensor of a file is none that the model has, and may be there all the same."""
    return bool(_BUFFERS.fullmatch(name)) or (spec.tie_word_embeddings and name == HF_HEAD)


def _plain(name: str, shape: Shape) -> Whole:
    return Whole(shape, (Part(name, shape, 0),))


def _fused(names: list[str], shapes: list[Shape], turned: list[int]) -> Whole:
    firsts = accumulate((shape[0] for shape in shapes), initial=0)
    parts = [
        Part(name, shape, first, head)
        for name, shape, first, head in zip(names, shapes, firsts, turned, strict=False)
    ]
    return Whole((sum(shape[0] for shape in shapes), *shapes[0][1:]), tuple(parts))
