"""A table cut over the vocabulary is the whole table, bit by bit, whatever its size."""

import pytest
import torch
from torch import nn
from tp_ranks import check_parameters, equal, on_ranks, part, whole_numbers

from kenotron_dist import Axis, Chunk, Shard
from kenotron_tp import VocabParallelEmbedding, vocabulary_chunk

WIDTH = 8


def check(mesh, vocab, sequence, dtype, divisible_by):
    axis, n, me = mesh["tp"], mesh["tp"].size, mesh["tp"].rank
    torch.manual_seed(4)
    table = VocabParallelEmbedding(
        vocab, WIDTH, axis, sequence_parallel=sequence, divisible_by=divisible_by, dtype=dtype
    )
    torch.manual_seed(4)
    whole = nn.Embedding(vocab, WIDTH, dtype=dtype)
    chunks = (vocabulary_chunk(vocab, n, divisible_by),)
    assert table.placements == {"weight": Shard("tp", 0, chunks)}
    assert len(table.weight) % divisible_by == 0
    equal(table.weight.detach(), part(whole.weight.detach(), 0, mesh, chunks))
    ids = torch.cat([torch.arange(vocab), torch.arange(vocab).flip(0), torch.zeros(3).long()])
    ids = torch.cat([ids, ids.new_zeros(-len(ids) % (2 * n))])
    ids = ids if sequence else ids.view(2, -1)
    y, expected = table(ids), whole(ids)
    equal(y.detach(), expected.detach().chunk(n)[me] if sequence else expected.detach())
    weight = whole_numbers(*expected.shape, seed=2, dtype=dtype)
    y.backward(weight.chunk(n)[me] if sequence else weight)
    expected.backward(weight)
    check_parameters(table, whole, mesh, equal)


def check_grid(mesh):
    for vocab, divisible_by in ((257, 1), (2, 1), (5, 8), (64, 4)):
        for sequence in (False, True):
            for dtype in (torch.float32, torch.bfloat16):
                check(mesh, vocab, sequence, dtype, divisible_by)
    table = VocabParallelEmbedding(5, WIDTH, mesh["tp"])
    if mesh["tp"].size > 1:
        assert table(torch.tensor([-1, -100, 10**9])).eq(0).all()
    return tuple(table.weight.shape)


@pytest.mark.parametrize(("tp", "rows"), [(1, 5), (2, 3), (3, 2), (4, 2)])
def test_looking_up_is_exact(tp, rows):
    assert on_ranks(check_grid, tp=tp) == [(rows, WIDTH)] * tp


def uneven_tokens(mesh):
    table = VocabParallelEmbedding(5, WIDTH, mesh["tp"], sequence_parallel=True)
    with pytest.raises(ValueError) as error:
        table(torch.zeros(3, dtype=torch.int64))
    return str(error.value)


def test_tokens_that_the_ranks_cannot_share_are_an_error():
    assert on_ranks(uneven_tokens, tp=2) == [
        "reduce_scatter: cannot split dim 0 of size 3 over 2 tp ranks"
    ] * 2  # fmt: skip


def test_one_rank_says_what_torch_says_of_a_foreign_id():
    table = VocabParallelEmbedding(5, WIDTH, Axis.solo("tp"))
    with pytest.raises(IndexError, match="index out of range"):
        table(torch.tensor([5]))


@pytest.mark.parametrize(
    ("vocab", "ranks", "divisible_by", "pad"),
    [(256, 2, 1, 0), (257, 2, 1, 1), (257, 4, 64, 255), (1, 4, 1, 3), (50257, 1, 128, 47)],
)
def test_padding_fills_the_last_rank(vocab, ranks, divisible_by, pad):
    assert vocabulary_chunk(vocab, ranks, divisible_by) == Chunk(vocab, pad=pad)


@pytest.mark.parametrize(("vocab", "divisible_by"), [(0, 1), (5, 0), (-3, 2)])
def test_sizes_that_are_not_positive_are_an_error(vocab, divisible_by):
    words = f"vocab_size {vocab} and divisible_by {divisible_by} must be positive"
    with pytest.raises(ValueError, match=words):
        vocabulary_chunk(vocab, 2, divisible_by)


def test_a_table_on_meta_has_the_shape_of_its_part():
    axis = Axis("tp", 1, (0, 1))
    table = VocabParallelEmbedding(257, 4, axis, device="meta", dtype=torch.bfloat16)
    assert table.weight.is_meta and table.weight.shape == (129, 4)
    assert table.weight.dtype == torch.bfloat16
