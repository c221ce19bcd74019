"""Attention of transformers' layers, computed here: rows may be cut over cp, documents separate.

transformers calls a function that is registered under a name (``ALL_ATTENTION_FUNCTIONS``). Ours
reads the micro-batch's context, which a call's arguments do not have. Its masks are one number: the
window or the chunks of a layer.

Shapes: B rows, n tokens of a row on this rank, S tokens of a whole row, H query heads, G key and
value heads, K features of a head; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kenotron_cp import Scoring
from kenotron_dist import to_device
from kenotron_models.attention_backends import attend
from kenotron_models.attention_cp import attend_cut
from kenotron_models.attention_mask import AttentionMask, starts_of
from kenotron_models.attention_reference import attend_masked
from kenotron_models.context import Context

OWN_ATTENTION = "kenotron"
"""``attn_implementation`` of models whose attention is computed here."""
ADVICE = f", which attn_implementation: {OWN_ATTENTION} does not know: set it to null"
"""End of errors about models whose attention cannot be computed here."""
_SAYS_NOTHING = {
    "sliding_window",
    "position_ids",
    "is_causal",
    "use_cache",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
}
"""Arguments of a call that repeat what is known: masks say what is seen."""
_Token = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A mask of transformers: (row, head, query, key) -> True where it is seen."""


class _CurrentRows(NamedTuple):
    """The micro-batch that layers compute."""

    context: Context
    documents: bool
    """A token sees its own document only."""


_rows: ContextVar[_CurrentRows | None] = ContextVar("rows", default=None)


@contextmanager
def attending(context: Context, documents: bool) -> Iterator[None]:
    """Give the attention of all layers called inside the micro-batch that they compute."""
    before = _rows.set(_CurrentRows(context, documents))
    try:
        yield
    finally:
        _rows.reset(before)


def context_now() -> Context | None:
    """Return the micro-batch that layers of transformers compute; None: they compute none."""
    rows = _rows.get()
    return None if rows is None else rows.context


def attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' interface asks for it: (B, n, H/t, K), and no weights.

    Collective over cp where rows are cut.

    Args:
        module: the attention that calls.
        query: (B, H/t, n, K).
        key: (B, G/t, n, K).
        value: (B, G/t, n, K).
        attention_mask: what ``window_mask`` returned.
        scaling: factor of the scores; None: 1/sqrt(K).
        softcap: cap of the scores.
        s_aux: sinks (H/t,).
        dropout: 0.
        others: arguments that are None, or repeat what is known.

    Raises:
        ValueError: a mask that the model made itself, or an argument that changes the scores and is
            not known here.
    """
    name = type(module).__name__
    given = {word for word, each in others.items() if each is not None and each is not False}
    if unknown := sorted(given - _SAYS_NOTHING):
        raise ValueError(f"{name} calls its attention with {', '.join(unknown)}{ADVICE}")
    mask, rows = attention_mask, _rows.get()
    assert rows is not None and not dropout
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, softcap, s_aux)
    if rows.context.cache is not None:
        return attend_masked(query.transpose(1, 2), key, value, mask, scoring).contiguous(), None
    if others.get("is_causal") is False or mask is None or mask.numel() != 1 or mask.is_cuda:
        raise ValueError(f"{name} calls its attention with a mask that it made itself{ADVICE}")
    window, context = int(mask), rows.context
    sight = AttentionMask(context, window or None, rows.documents)
    if window < 0:
        chunked = partial(_in_chunks, context, -window, rows.documents)
        sight = AttentionMask(context.once(("chunks", window), chunked), None, True)
    how = attend if context.cut is None else attend_cut
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if vars(module).get("attn_temperature_tuning") and not module.use_rope:
        q = _tempered(module, q, context)
    return how(q, k, v, sight, scoring).contiguous(), None


def _in_chunks(context: Context, size: int, documents: bool) -> Context:
    """Return a context whose documents are the chunks of rows, or of each document: Llama-4's."""

    def begin_again(positions_BS: Tensor) -> Tensor:
        places = torch.arange(positions_BS.shape[1], device=positions_BS.device)
        own = places - starts_of(positions_BS) if documents else places.expand_as(positions_BS)
        return own % size

    if (cut := context.cut) is not None:
        whole = begin_again(cut.whole_positions_BS)
        return Context(context.positions_BS, cut=replace(cut, whole_positions_BS=whole))
    host = context.host_positions_BS
    on_host = None if host is None else begin_again(host)
    return Context(begin_again(context.positions_BS), host_positions_BS=on_host)


def _tempered(module: Any, q_BnHK: Tensor, context: Context) -> Tensor:
    """Return queries with the temperature of their places in whole rows.

    Llama-4's attention without rotary embedding (2501.19399) takes the tokens of this rank for the
    first of a row.
    """
    if context.cut is None:
        return q_BnHK
    places = (
        to_device(context.cut.places_S, q_BnHK.device),
        torch.arange(q_BnHK.shape[1], device=q_BnHK.device),
    )
    due, done = (
        torch.log1p(torch.floor((each.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1
        for each in places
    )
    return (q_BnHK * (due / done)[:, None, None]).to(q_BnHK.dtype)


def window_mask(*, mask_function: _Token, use_vmap: bool = False, **sizes: Any) -> Tensor:
    """Return the window of a mask of transformers, 0 for none: int64 (1, 1, 1, 1) on the CPU.

    Of chunks it is their size, negative. In a pass with a cache: which slots each token sees, bool
    (B, 1, n, L).

    Args:
        mask_function: the tokens that are seen.
        use_vmap: true for a function that a model added to masks.
        sizes: of queries and keys, and padding; a pass with a cache reads them.

    Raises:
        ValueError: a token sees something else than the last so many tokens, or those of its chunk.
    """
    rows = _rows.get()
    assert rows is not None
    context = rows.context
    if context.cache is not None and not use_vmap:
        return _seen_slots(mask_function, sizes)
    length = context.positions_BS.shape[1] if context.cut is None else context.cut.sequence
    with torch.device("cpu"):  # no device waits for the host
        keys, zero = torch.arange(length)[None], torch.zeros((), dtype=torch.int64)
        queries = torch.tensor([0, length // 2, max(length - 2, 0), length - 1])[:, None]
        seen = torch.ones(4, length, dtype=torch.bool)  # unlike all masks
        if not use_vmap:
            seen = mask_function(zero, zero, queries, keys).expand(4, length)
        window, past = int(seen[-1].sum()), keys <= queries
        if not torch.equal(seen, past & (keys > queries - window)):
            first = mask_function(zero, zero, keys, zero) if not use_vmap else keys < 0
            size = max(int(first.sum()), 1)  # tokens that see the first one
            if not torch.equal(seen, past & (keys // size == queries // size)):
                raise ValueError(
                    "a mask of this model is not causal with a window or chunks, in rows of "
                    f"{length} tokens{ADVICE}"
                )
            window = -size
        return torch.full((1, 1, 1, 1), 0 if window == length else window)


def _seen_slots(mask_function: _Token, sizes: Any) -> Tensor:
    """Slots of a cache that each token of a pass sees, bool (B, 1, n, L); padding sees itself."""
    padding = sizes["attention_mask"]  # (B, L), of all slots that were ever filled
    device = padding.device
    queries = torch.arange(sizes["q_length"], device=device)[:, None] + sizes["q_offset"]
    keys = torch.arange(sizes["kv_length"], device=device) + sizes["kv_offset"]
    row = torch.arange(len(padding), device=device)[:, None, None, None]
    seen = mask_function(row, torch.zeros_like(row), queries, keys)
    return (seen & padding[:, None, None, keys].bool()) | (queries == keys)
