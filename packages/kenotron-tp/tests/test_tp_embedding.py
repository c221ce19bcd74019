"""A table cut over the vocabulary is the whole table, bit by bit, whatever its size."""

from unittest import mock

import pytest
import torch
from torch import nn
from tp_ranks import check_parameters, equal, own_rows, part, whole_numbers

from kenotron_dist import Axis
from kenotron_dist.placement import Chunk, Shard
from kenotron_dist.testing import on_ranks
from kenotron_tp import VocabParallelEmbedding, embedding, vocabulary_chunk

WIDTH = 8


def check(mesh, vocab, sequence, dtype, divisible_by, padding_idx):
    axis, n = mesh["tp"], mesh["tp"].size
    torch.manual_seed(4)
    options = {"padding_idx": padding_idx, "dtype": dtype}
    table = VocabParallelEmbedding(
        vocab, WIDTH, axis, sequence_parallel=sequence, divisible_by=divisible_by, **options
    )
    torch.manual_seed(4)
    whole = nn.Embedding(vocab, WIDTH, **options)
    chunks = (vocabulary_chunk(vocab, n, divisible_by),)
    assert table.placements == {"weight": Shard("tp", 0, chunks)}
    assert len(table.weight) % divisible_by == 0
    equal(table.weight.detach(), part(whole.weight.detach(), 0, mesh, chunks))
    ids = torch.cat([torch.arange(vocab), torch.arange(vocab).flip(0), torch.zeros(3).long()])
    ids = ids[:-1].view(2, -1).t() if sequence else ids  # odd lengths, not contiguous
    y, expected = table(ids), whole(ids)
    equal(y.detach(), own_rows(expected.detach(), mesh) if sequence else expected.detach())
    weight = whole_numbers(*expected.shape, seed=2, dtype=dtype)
    y.backward(own_rows(weight, mesh) if sequence else weight)
    expected.backward(weight)
    check_parameters(table, whole, mesh, equal)
    if sequence:
        with torch.no_grad():
            equal(table(ids, sequence_parallel=False), expected.detach())


def check_grid(mesh):
    for vocab, divisible_by, padding_idx in ((257, 1, None), (2, 1, 1), (5, 8, -2), (64, 4, 63)):
        for sequence in (False, True):
            for dtype in (torch.float32, torch.bfloat16):
                check(mesh, vocab, sequence, dtype, divisible_by, padding_idx)
    table = VocabParallelEmbedding(5, WIDTH, mesh["tp"])
    checked = (-1, 5, 10**9) if mesh.device.type == "cpu" else ()  # a check would stop the device
    for strange in checked:
        words = rf"id {strange} at position \(0, 1\) is outside the embedding's 0\.\.4"
        with pytest.raises(IndexError, match=words):
            table(torch.tensor([[0, strange]]))
    with pytest.raises(ValueError, match="sequence_parallel=True in forward, but the layer was"):
        table(torch.tensor([0]), sequence_parallel=True)
    assert table(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, WIDTH)
    return tuple(table.weight.shape)


@pytest.mark.parametrize(("tp", "rows"), [(1, 5), (2, 3), (3, 2), (4, 2), (8, 1)])
def test_looking_up_is_exact(tp, rows):
    assert on_ranks(check_grid, tp=tp) == [(rows, WIDTH)] * tp


def unchecked(mesh):
    """Ids outside the table where nobody looks for them, as on an accelerator."""
    for divisible_by in (1, 4):
        for padding_idx in (None, 0, 3):
            options = {"divisible_by": divisible_by, "padding_idx": padding_idx}
            torch.manual_seed(4)
            table = VocabParallelEmbedding(5, WIDTH, mesh["tp"], **options)
            with torch.no_grad():  # a table whose padding is no longer zero
                table.weight[max(0, 5 - mesh["tp"].rank * len(table.weight)) :] = 7.0
            ids = torch.tensor([[0, 5, 4, -1], [7, 10**9, 3, 0]])
            good = (ids >= 0) & (ids < 5)
            expected = table(ids.where(good, 0)).detach()
            weight = whole_numbers(*expected.shape, seed=2)
            table(ids.where(good, 0)).backward(weight * good.unsqueeze(-1))
            gradient, table.weight.grad = table.weight.grad, None
            with mock.patch.object(embedding, "_on_host", lambda ids: False):
                y = table(ids)
            y.backward(weight)
            equal(y.detach(), expected * good.unsqueeze(-1))
            equal(table.weight.grad, gradient)
    return True


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ids_outside_the_table_have_rows_of_zeros_where_they_are_not_looked_for(tp):
    assert all(on_ranks(unchecked, tp=tp))


def test_ids_are_whole_numbers():
    with pytest.raises(ValueError, match="ids are torch.float32: they are int64 or int32"):
        VocabParallelEmbedding(5, 4, Axis.solo("tp"))(torch.zeros(2))


def test_a_padding_index_outside_the_table_is_an_error():
    for strange in (5, -6):
        with pytest.raises(ValueError, match=f"padding_idx {strange} is outside the table of 5"):
            VocabParallelEmbedding(5, 4, Axis.solo("tp"), padding_idx=strange)


@pytest.mark.parametrize(
    ("vocab", "ranks", "divisible_by", "pad"),
    [(256, 2, 1, 0), (257, 2, 1, 1), (257, 4, 64, 255), (1, 4, 1, 3), (50257, 1, 128, 47)],
)
def test_padding_fills_the_last_rank(vocab, ranks, divisible_by, pad):
    assert vocabulary_chunk(vocab, ranks, divisible_by) == Chunk(vocab, pad=pad)


@pytest.mark.parametrize(("vocab", "ranks", "divisible_by"), [(0, 2, 1), (5, 2, 0), (5, 0, 1)])
def test_sizes_that_are_not_positive_are_an_error(vocab, ranks, divisible_by):
    words = f"vocab_size {vocab}, ranks {ranks} and divisible_by {divisible_by} must be positive"
    with pytest.raises(ValueError, match=words):
        vocabulary_chunk(vocab, ranks, divisible_by)


def test_a_table_on_meta_has_the_shape_of_its_part():
    axis = Axis("tp", 1, (0, 1))
    table = VocabParallelEmbedding(257, 4, axis, device="meta", dtype=torch.bfloat16)
    assert table.weight.is_meta and table.weight.shape == (129, 4)
    assert table.weight.dtype == torch.bfloat16
