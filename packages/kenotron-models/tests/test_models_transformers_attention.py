"""Attention of Llama-4's kinds, called as transformers does, against a mask of all tokens."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kenotron_cp import cut_sequence
from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_models.context import Context
from kenotron_models.sequence_cut import SequenceCut
from kenotron_models.transformers_attention import attend_rows, attending

TOKENS = 14
CASES = [(0, False), (0, True), (3, False), (3, True)]
"""Tokens of a chunk, 0 for none, and True where documents are separate."""
POSITIONS = torch.tensor([[*range(5), *range(9)], [*range(7), *range(4), *range(3)]])
"""Documents of two rows."""
LAYER = SimpleNamespace(attn_temperature_tuning=True, use_rope=False, floor_scale=2, attn_scale=0.5)
"""What attention without rotary embedding has."""


def inputs() -> list[Tensor]:
    """Queries, keys and values (B, H, S, K)."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, TOKENS, 4, generator=draw) for _ in range(3)]


def attended(mesh: Mesh) -> list[Tensor]:
    """Return the places of this rank's tokens in a row (n,), and for each case (B, n, H, K)."""
    axis = mesh["cp"]
    cut = SequenceCut(axis, POSITIONS)
    q, k, v = (cut_sequence(x.transpose(1, 2), axis).transpose(1, 2) for x in inputs())
    q = q * temperature(torch.arange(q.shape[2]))  # as their code has it: of this rank's tokens
    real = cut.places_S < TOKENS
    found = [cut.places_S[real]]
    for chunks, documents in CASES:
        context = Context(cut_sequence(POSITIONS, axis), cut=cut if axis.size > 1 else None)
        mask = torch.full((1, 1, 1, 1), -chunks)
        with attending(context, documents):
            y, _ = attend_rows(LAYER, q, k, v, mask, is_causal=True)
        found.append(y[:, real])
    return found


def temperature(places: Tensor) -> Tensor:
    """Return the factor of queries at these places of a row (n, 1)."""
    return (1 + 0.5 * torch.log1p(torch.floor((places + 1.0) / 2)))[:, None]


def expected(chunks: int, documents: bool) -> Tensor:
    """The same of whole rows, with a mask."""
    places = torch.arange(TOKENS).expand(2, -1)
    number = (POSITIONS == 0).cumsum(1) if documents else torch.zeros_like(places)
    chunk = (POSITIONS if documents else places) // chunks if chunks else torch.zeros_like(places)
    seen = places[:, :, None] >= places[:, None]
    for each in (number, chunk):
        seen = seen & (each[:, :, None] == each[:, None])
    q, k, v = inputs()
    scores = (q * temperature(places[0])) @ k.transpose(2, 3) / 2
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("cp", [1, 2])
def test_queries_of_llama_4_see_their_chunk_with_the_temperature_of_their_place(cp: int) -> None:
    for places, *ranks in on_ranks(attended, cp=cp):
        for case, found in zip(CASES, ranks, strict=True):
            torch.testing.assert_close(found, expected(*case)[:, places])
