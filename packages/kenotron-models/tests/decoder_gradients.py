"""A decoder with all variations of attention, and its gradients on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from attention_cases import positions
from torch import Tensor

from kenotron_cp import AttentionWay, Layout, cut_sequence
from kenotron_dist import Mesh, all_reduce, sum_gradients
from kenotron_dist.boxes import local_boxes
from kenotron_dist.init import Initializer, Normal, initialize
from kenotron_dist.placement import TensorLayout, parameter_layouts
from kenotron_dist.rng import counter_key
from kenotron_models import (
    Build,
    Context,
    DecoderSpec,
    LayerStack,
    Recompute,
    SequenceCut,
    build_decoder,
    compile_layers,
    standard_init,
)
from kenotron_models.layers import (
    AttentionSpec,
    BlockSpec,
    Experts,
    ExpertsSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MambaSpec,
    MLPSpec,
    NormSpec,
    PartSpec,
    Rope,
    RopeScaling,
    RouterSpec,
)
from kenotron_models.mlp import ClampedSwiGLU
from kenotron_tp import TPMode, cross_entropy

NormKind = Literal["rms_norm", "offset_rms_norm"]
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
MIXER = AttentionSpec(
    heads=8, kv_heads=2, head_dim=8, qk_norm=NormSpec(), qkv_bias=True, out_bias=True, scale=0.3,
    window=6, separate_documents=True, rope=Rope(scaling=YARN), dropout=0.25,
)  # fmt: skip


LATENT = LatentAttentionSpec(
    heads=8, kv_heads=8, head_dim=10, turned=4, value_features=6, kv_rank=12, q_rank=14,
    separate_documents=True, backend="sdpa",
)  # fmt: skip


DELTA = GatedDeltaSpec(
    key_heads=4, value_heads=8, key_dim=8, value_dim=10, eps=0.01, separate_documents=True
)
MAMBA = MambaSpec(channels=16, state=6, step_rank=3, bias=True, separate_documents=True)


MAMBA2 = Mamba2Spec(
    heads=8, head_dim=4, groups=2, state=6, bias=True, separate_documents=True, chunk=4,
    step_limits=(0.01, 0.9),
)  # fmt: skip


def recurrent(mixer: PartSpec) -> DecoderSpec:
    """Three blocks of a mixer and no feed-forward."""
    return DecoderSpec(
        hidden_size=24, vocab_size=32, max_position_embeddings=128,
        blocks=(BlockSpec(mixer=mixer, feed_forward=None),) * 3,
    )  # fmt: skip


def decoder(mixer: AttentionSpec) -> DecoderSpec:
    """Three blocks; the second sees all and has no positions."""
    mixers = (mixer, replace(mixer, window=None, rope=None), mixer)
    mlp = MLPSpec(features=16)
    return DecoderSpec(
        hidden_size=24, vocab_size=32, max_position_embeddings=128,
        blocks=tuple(BlockSpec(mixer=m, feed_forward=mlp, dropout=m.dropout) for m in mixers),
    )  # fmt: skip


def routed(experts: ExpertsSpec) -> DecoderSpec:
    """Three blocks; the first and the last have experts."""
    whole = decoder(AttentionSpec(heads=8, kv_heads=2, head_dim=8))
    some = (replace(block, feed_forward=experts) for block in whole.blocks[::2])
    first, last = some
    return replace(whole, blocks=(first, whole.blocks[1], last))


def normed(whole: DecoderSpec, norms: Literal["after", "both"], kind: NormKind) -> DecoderSpec:
    """The same with other norms, as OLMo-2 and Gemma-2 have them."""
    norm = NormSpec(kind=kind)
    blocks = (replace(block, norms=norms, norm=norm) for block in whole.blocks)
    return replace(whole, blocks=tuple(blocks), norm=norm)


SPECS = {
    "all": decoder(MIXER),
    "blocked": decoder(replace(MIXER, backend="blocked", dropout=0.0)),
    "mqa": decoder(replace(MIXER, kv_heads=1, backend="sdpa", dropout=0.0)),
    "width": decoder(
        AttentionSpec(
            heads=8,
            kv_heads=2,
            head_dim=8,
            qk_norm=NormSpec(),
            qk_norm_over="width",
            qkv_bias=True,
            rope=Rope(share=0.5),
        )
    ),  # fmt: skip
    "experts": routed(
        ExpertsSpec(
            router=RouterSpec(experts=8, top_k=3, normalize=True, balance_loss=0.3, z_loss=0.1),
            features=12,
            shared_features=16,
            shared_gate=True,
        )
    ),
    "capacity": routed(
        ExpertsSpec(
            router=RouterSpec(experts=4, top_k=2, balance_loss=0.2, balance="all_layers", layers=2),
            features=12,
            capacity_factor=0.75,
        )
    ),
    "capped": replace(
        normed(decoder(replace(MIXER, cap=0.7, dropout=0.0)), "both", "offset_rms_norm"),
        embedding_scale=24**0.5,
        logit_cap=1.5,
    ),
    "sinks": normed(
        decoder(replace(MIXER, sinks=True, gate=True, dropout=0.0)), "after", "rms_norm"
    ),
    "all-variants": normed(
        decoder(replace(MIXER, cap=0.7, sinks=True, gate=True, kv_heads=1)), "both", "rms_norm"
    ),
    "gpt-oss": routed(
        ExpertsSpec(
            router=RouterSpec(experts=8, top_k=3, normalize=True, bias=True, balance_loss=0.3),
            features=12,
            activation=ClampedSwiGLU(1.5, 0.3),
            bias=True,
            transposed=True,
        )
    ),
    "latent": decoder(LATENT),
    "latent-direct": decoder(replace(LATENT, q_rank=None, rope=Rope(interleaved=True))),
    "sigmoid": routed(
        ExpertsSpec(
            router=RouterSpec(
                experts=8,
                top_k=2,
                scoring="sigmoid",
                groups=4,
                top_groups=2,
                scale=2.5,
                balance_loss=0.3,
                balance="micro_batch",
                jitter=0.2,
            ),
            features=12,
            gated=False,
            activation="gelu_tanh",
            way="allgather",
        )
    ),
    "delta": recurrent(DELTA),
    "delta-one-text": recurrent(replace(DELTA, key_heads=8, separate_documents=False)),
    "mamba": recurrent(MAMBA),
    "mamba-one-text": recurrent(replace(MAMBA, separate_documents=False, conv_bias=False)),
    "mamba-normed": recurrent(replace(MAMBA, inner_norm=NormSpec(eps=0.01))),
    "mamba2": recurrent(MAMBA2),
    "mamba2-groups": recurrent(replace(MAMBA2, groups=4, separate_documents=False)),
    "mamba2-one-group": recurrent(replace(MAMBA2, groups=1, bias=False, conv_bias=False)),
    "places": replace(
        decoder(AttentionSpec(heads=8, kv_heads=8, head_dim=8, rope=None)),
        learned_positions=True,
        embedding_dropout=0.1,
    ),
}
MODES = {"plain": TPMode(), "sequence": TPMode(sequence_parallel=True, overlap=True)}


class Sink(list[Tensor]):
    """Losses that layers add."""

    def __init__(self, added: list[Tensor]) -> None:
        self.add = added.append


def drawn(spec: DecoderSpec) -> Callable[[TensorLayout], Initializer]:
    """First values, of which no bias and no sink is 0."""
    rule = standard_init(spec, 0.4)
    return lambda layout: Normal(0.4) if layout.role == "bias" else rule(layout)


Parts = dict[str, list[tuple[tuple[slice, ...], Tensor]]]


def gradients(
    mesh: Mesh,
    name: str,
    mode: str,
    way: AttentionWay = "ring",
    recompute: Recompute = "none",
    compiled: bool = False,
    chunks: int = 1,
    order: Literal["zigzag", "contiguous"] = "zigzag",
) -> tuple[float, dict[str, Tensor], Parts]:
    """Loss; shapes by name; this rank's parts of all gradients, complete."""
    spec, cp = SPECS[name], mesh["cp"]
    build = Build(mesh["tp"], MODES[mode], ep=mesh["ep"], ep_chunks=chunks)
    stack = LayerStack(build_decoder(spec, build, recompute=recompute))
    layouts = parameter_layouts(stack, mesh.axis_sizes)
    stack.to_empty(device="cpu")
    initialize(stack, layouts, mesh.view, seed=1, initializer=drawn(spec))
    if compiled:  # as the compiler reads them; what it makes of C++ is tested with whole trainings
        with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
            compile_layers(stack)
    whole, samples, key = positions(15), torch.tensor([5, 17, 3]), counter_key(0, 7)
    tokens = (torch.arange(45) * 7 % 32).view(3, 15)
    labels = tokens.flatten().roll(-1).view(3, 15)
    layout = Layout(order=order)
    cut = SequenceCut(cp, whole, way, layout) if cp.size > 1 else None
    own = [cut_sequence(x, cp, layout=layout) for x in (whole, tokens)]
    added: list[Tensor] = []
    for module in stack.modules():
        if isinstance(module, Experts):
            module.auxiliary_losses = Sink(added)
    padding = None
    if spec.routes:
        padding = cut_sequence(whole * 0, cp, layout=layout, fill=1).bool()
    weight = torch.tensor(1 / 45)
    context = Context(own[0], samples, key, cut=cut, padding_BS=padding, loss_weight=weight)
    logits = stack(own[1].flatten(), context)
    targets = cut_sequence(labels, cp, layout=layout, fill=-100).flatten()
    each = cross_entropy(logits, targets, mesh["tp"], vocab_size=32)[0]
    loss = each.sum() / 45 + sum(added)
    loss.backward()
    for path, parameter in stack.named_parameters():
        assert parameter.grad is not None, path
        parameter.grad = all_reduce(parameter.grad, mesh[mesh.view(layouts[path]).data])
    loss = all_reduce(loss.detach(), cp)
    sum_gradients(stack, mesh)
    wholes: dict[str, Tensor] = {}
    parts: Parts = {}
    for path, parameter in stack.named_parameters():
        assert parameter.grad is not None, path
        wholes[path] = torch.full(layouts[path].shape, torch.nan)
        whole = torch.arange(wholes[path].numel()).view(wholes[path].shape)
        parts[path] = [
            (box.of_global(whole), box.of_local(parameter.grad))
            for box in local_boxes(layouts[path], mesh.view(layouts[path]))
        ]
    return loss.item(), wholes, parts


def gradients_fp64(mesh: Mesh, *how: Any) -> tuple[float, dict[str, Tensor], Parts]:
    """The same in fp64, so that a layout's rounding hides no fault."""
    torch.set_default_dtype(torch.float64)
    return gradients(mesh, *how)


def complete(ranks: list[tuple[float, dict[str, Tensor], Parts]]) -> dict[str, Tensor]:
    """All gradients whole; what several ranks hold must be equal on them."""
    wholes = ranks[0][1]
    for _, _, parts in ranks:
        for path, pieces in parts.items():
            flat = wholes[path].view(-1)
            for numbers, values in pieces:
                known = flat[numbers]
                assert ((known == values) | known.isnan()).all(), path
                flat[numbers] = values
    return wholes
