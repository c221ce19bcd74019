"""Cut the rows of a batch over the ranks of cp: the one place that does.

Ranks of cp read the same whole rows. Labels are shifted by then, so each token's target is at its
own place, and what a rank keeps of tokens, labels and positions lies on the same places.

Shapes: B rows of S tokens of a micro-batch, n tokens of a row on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kenotron_cp import AttentionWay, Cut, Layout, cut_sequence
from kenotron_data import MicroBatch
from kenotron_dist import Axis, Mesh
from kenotron_models import Context, DecoderSpec, SequenceCut
from kenotron_models.layers import AttentionSpec, Block, Embedding, Head, LayerNorm, RMSNorm

NO_TARGET = -100
"""Label of a position that has no target."""
ALONE = (Embedding, Head, RMSNorm, LayerNorm)
"""Layers that treat each token alone."""


@dataclass(frozen=True)
class CPMode:
    """Attention over the ranks of cp; the same on every rank."""

    way: Literal["auto", "ring", "gather", "ulysses"] = "auto"
    """Method of the exchange; auto: see ``way_of``."""
    stride: int = 1
    """Key heads that ``gather`` has at a time."""
    order: Literal["zigzag", "contiguous"] = "zigzag"
    """Order of tokens on the ranks; see ``kenotron_cp.Layout``."""
    block: int = 512
    """Most tokens of a block, the unit of a kernel call."""

    @property
    def layout(self) -> Layout:
        """Layout of rows on the ranks."""
        return Layout(self.order, block=self.block)

    def cut(self, sequence: int, ranks: int) -> Cut:
        """Return how rows of ``sequence`` tokens lie on so many ranks; ``Cut.local`` on each."""
        return Cut(sequence, ranks, self.layout)


class Share(NamedTuple):
    """Part of its micro-batches that this rank computes."""

    micros: list[MicroBatch]
    """Its tokens (B, n) and their labels."""
    contexts: list[Context]
    """Context of each of them that the layers may read."""
    further: list[Tensor]
    """Labels (B, n) of the module that predicts the token after the next; empty without one."""

    @property
    def inputs(self) -> list[Tensor]:
        """Tokens of each micro-batch (T,), T = B * n."""
        return [micro.tokens_BS.flatten() for micro in self.micros]


def share_of(
    mode: CPMode,
    spec: DecoderSpec,
    mesh: Mesh,
    batch: Iterable[MicroBatch],
    dropout_key: int | None = None,
    count: Tensor | None = None,
    virtual: int = 1,
    shards: int = 1,
) -> Share:
    """Return this rank's part of its micro-batches; nothing is communicated.

    Args:
        mode: how attention runs over cp.
        spec: the model.
        mesh: the ranks; ``mesh["cp"]`` cuts rows.
        batch: micro-batches of whole rows, the same on all ranks of cp.
        dropout_key: of seed and step; without one layers drop nothing.
        count: tokens of the global batch but padding, by which losses of layers are divided, a
            scalar; without it layers add none, and only the next token is predicted.
        virtual: C, virtual ranks of cp; where a rank has several, its tokens are theirs in turn.
        shards: virtual ranks of tp; see ``way_of``.

    Returns:
        Micro-batches and contexts. The head's product is left to the loss. Padding, at the end of
        rows that cp does not divide, has no target.
    """
    micros, axis = list(batch), mesh["cp"]
    weight = 1 / count.float() if count is not None and spec.routes else None
    further = [after_next(each) for each in micros] if count is not None and spec.mtp_weight else []
    following: list[Tensor | None] = [tokens for tokens, _ in further] or [None] * len(micros)
    # Alone: rows stay whole.
    if max(axis.size, virtual) == 1:
        made = [
            Context(
                micro.positions_BS, micro.samples_B, dropout_key, to_loss=True,
                host_positions_BS=micro.host_positions_BS, loss_weight=weight,
                padding_BS=padding_of(micro) if spec.routes else None, next_tokens_BS=tokens,
            )
            for micro, tokens in zip(micros, following, strict=True)
        ]  # fmt: skip
        return Share(micros, made, [labels for _, labels in further])
    # Cut: tokens, labels, padding and what is predicted next are cut in the same way.
    way = way_of(mode, spec, mesh.sizes, shards)
    layout, ranks = mode.layout, _virtual_axes(axis, virtual)
    if virtual > 1:  # the fewest strips that as many ranks can share: few and large products
        layout = replace(layout, strips=virtual * layout.per_rank(virtual))
    cut = partial(_cut_over, ranks=ranks, layout=layout)
    own = [_cut(each, ranks, layout) for each in micros]
    contexts = [
        Context(
            part.positions_BS, part.samples_B, dropout_key, to_loss=True,
            cut=SequenceCut(axis, _on_host(micro), way, layout, mode.stride, virtual),
            chunks=len(ranks) if virtual > 1 else 0, loss_weight=weight,
            padding_BS=_cut_padding(micro, ranks, layout) if spec.routes else None,
            next_tokens_BS=None if tokens is None else cut(tokens),
        )
        for micro, part, tokens in zip(micros, own, following, strict=True)
    ]  # fmt: skip
    return Share(own, contexts, [cut(labels, fill=NO_TARGET) for _, labels in further])


def after_next(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Shift whole rows once more, for the prediction of the token after the next.

    Args:
        micro: its labels are shifted once: that of a place is the next token.

    Returns:
        The next token of each place, and the label of the token after it, both (B, S). A place
        whose next one is of another document, or outside the row, has no target.
    """
    tokens, labels = micro.tokens_BS.roll(-1, 1), micro.labels_BS.roll(-1, 1)
    follows = micro.positions_BS.roll(-1, 1) == micro.positions_BS + 1
    if micro.documents_BS is not None:
        follows &= micro.documents_BS.roll(-1, 1) == micro.documents_BS
    follows[:, -1] = False
    return tokens, labels.masked_fill(~follows, NO_TARGET)


def padding_of(micro: MicroBatch) -> Tensor:
    """Return which tokens (B, S) of whole rows are padding, bool: no expert sees them."""
    padding = (micro.samples_B < 0)[:, None].expand_as(micro.tokens_BS)
    return padding if micro.documents_BS is None else padding | (micro.documents_BS < 0)


def chunk_of(share: Share, number: int) -> Share:
    """Return the same micro-batches with one virtual chunk of this rank's tokens."""
    parts = []
    for micro, context in zip(share.micros, share.contexts, strict=True):
        n = micro.tokens_BS.shape[1] // context.chunks
        own = slice(number * n, (number + 1) * n)
        parts.append(
            replace(
                micro,
                tokens_BS=micro.tokens_BS[:, own],
                labels_BS=micro.labels_BS[:, own],
                positions_BS=micro.positions_BS[:, own],
            )
        )
    further = [labels.chunk(share.contexts[0].chunks, 1)[number] for labels in share.further]
    return share._replace(micros=parts, further=further)


def _virtual_axes(axis: Axis, virtual: int) -> list[Axis]:
    """Return this rank of cp as its virtual ranks are."""
    if virtual == 1:
        return [axis]
    each = virtual // axis.size
    first = axis.rank * each
    return [Axis(axis.name, i, tuple(range(virtual))) for i in range(first, first + each)]


def _cut_over(x: Tensor, ranks: Sequence[Axis], layout: Layout, fill: float = 0) -> Tensor:
    """Cut rows (B, S), which have no gradient, for some ranks: (B, n), one after the other."""
    return torch.cat([cut_sequence(x, axis, layout=layout, fill=fill) for axis in ranks], 1)


def _cut_padding(micro: MicroBatch, ranks: Sequence[Axis], layout: Layout) -> Tensor:
    """This rank's part of ``padding_of``, and what pads rows that cp does not divide."""
    whole = padding_of(micro).to(torch.uint8)
    return _cut_over(whole, ranks, layout, fill=1).bool()


def _cut(micro: MicroBatch, ranks: Sequence[Axis], layout: Layout) -> MicroBatch:
    """This rank's tokens of a micro-batch."""
    cut = partial(_cut_over, ranks=ranks, layout=layout)
    return replace(
        micro,
        tokens_BS=cut(micro.tokens_BS),
        labels_BS=cut(micro.labels_BS, fill=NO_TARGET),
        positions_BS=cut(micro.positions_BS),
        documents_BS=None,
        host_positions_BS=None,
    )


def _on_host(micro: MicroBatch) -> Tensor:
    """Positions of the whole rows, read back from an accelerator where it alone has them."""
    kept = micro.host_positions_BS
    return micro.positions_BS.cpu() if kept is None else kept


def way_of(
    mode: CPMode, spec: DecoderSpec, sizes: Mapping[str, int], shards: int = 1
) -> AttentionWay:
    """Return what ``auto`` means for a model on axes of these sizes.

    With virtual ranks of tp, ``shards``, each of them mixes its heads by itself.

    Ulysses where it divides query and key heads of all layers and sends less than the ring: with H
    query and G key heads it sends (2H + 2G) (c-1)/c features of a token, the ring 3/4 (c-1) 2G on
    average. Else the ring, which also skips what is outside of a window, and where heads are not
    known: in layers of transformers.
    """
    if mode.way != "auto":
        return mode.way
    if not spec.blocks:
        return "ring"
    ranks, tp = sizes["cp"], max(sizes["tp"], shards)
    for mixer in {block.mixer for block in spec.blocks}:
        if not isinstance(mixer, AttentionSpec):
            continue
        heads, kv_heads = mixer.heads // tp, max(mixer.kv_heads // tp, 1)
        less = 4 * (heads + kv_heads) < 3 * ranks * kv_heads
        if heads % ranks or kv_heads % ranks or mixer.window is not None or not less:
            return "ring"
    return "ulysses"


def check_cut(
    mode: CPMode,
    spec: DecoderSpec,
    layers: Sequence[tuple[str, nn.Module]],
    mesh: Mesh,
    shards: int = 1,
) -> None:
    """Raise ValueError for layers that need whole rows, and for heads that Ulysses cannot divide.

    ``layers``: all layers of the model by name. One that is no part of ``kenotron_models`` says by
    ``cuts_sequence = True`` that it reads ``Context.cut``. ``shards``: see ``way_of``.
    """
    ranks, tp = mesh.sizes["cp"], max(mesh.sizes["tp"], shards)
    if ranks == 1:
        return
    for name, layer in layers:
        if isinstance(layer, ALONE) or getattr(layer, "cuts_sequence", False):
            continue
        inner = f" ({' or '.join(layer.parts)})" if isinstance(layer, Block) else ""
        raise ValueError(
            f"cp = {ranks} cuts rows, but layer {name}{inner} does not say that it is right for "
            "cut rows: choose cp = 1, or read Context.cut in it and set cuts_sequence = True"
        )
    for mixer in {block.mixer for block in spec.blocks}:
        if mode.way != "ulysses" or not isinstance(mixer, AttentionSpec):
            continue
        heads, kv_heads = mixer.heads // tp, max(mixer.kv_heads // tp, 1)
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            raise ValueError(
                f"ulysses exchanges heads over cp = {ranks} ranks, which must divide the {heads} "
                f"query heads of a tp rank, and divide its {kv_heads} key heads or be a multiple "
                "of them: choose ring or gather, or another cp or tp"
            )
