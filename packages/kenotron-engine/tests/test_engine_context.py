"""A whole model over cp: documents that stay apart, and blocks of another size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_cases import ADAMW, LLAMA

from kenotron_data import Batch
from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    NO_TARGET,
    CPMode,
    ModelPlan,
    Piece,
    build_training,
    gradients_of,
    join_pieces,
)

FIRST, SECOND = 7, 6
"""Tokens of two documents; together an odd number, so that every cut has padding."""
OWN = 20
"""Token numbers that one document has, and no other."""


def two_documents() -> Batch:
    """Two micro-batches of a row; only the second document has targets."""
    tokens = torch.cat([torch.arange(FIRST), OWN + torch.arange(SECOND)])
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])
    labels = tokens.roll(-1)
    labels[:FIRST] = labels[-1] = NO_TARGET
    rows = (x.expand(2, 1, -1).contiguous() for x in (tokens, labels, positions))
    return Batch(*rows, torch.tensor([[0], [1]]))


def documents_apart(mesh: Mesh, mode: CPMode) -> list[Piece]:
    """Pieces of the gradient of the loss of the second document."""
    spec = replace(LLAMA, tie_word_embeddings=False).decoder
    blocks = (
        replace(each, mixer=replace(each.mixer, separate_documents=True)) for each in spec.blocks
    )
    plan = ModelPlan(spec=replace(spec, blocks=tuple(blocks)), cp_mode=mode)
    return gradients_of(build_training(plan, ADAMW, mesh, 4), two_documents())[1]


@pytest.mark.parametrize(
    ("axes", "mode"),
    [
        ({}, CPMode()),
        ({"cp": 2, "tp": 2}, CPMode("ring")),
        ({"cp": 2, "tp": 2}, CPMode("ulysses", order="contiguous")),
        ({"cp": 2, "pp": 2}, CPMode("gather", block=1)),
        ({"cp": 4}, CPMode("ring", order="contiguous")),
    ],
    ids=str,
)
def test_no_gradient_of_one_document_reaches_the_tokens_of_another(
    axes: dict[str, int], mode: CPMode
) -> None:
    gradient = join_pieces(on_ranks(documents_apart, mode, **axes))["embedding.weight"]
    assert (gradient[:FIRST] == 0).all()
    second = abs(gradient[OWN : OWN + SECOND - 1]).max(1)  # the last token predicts nothing
    assert (second > 0).all()
