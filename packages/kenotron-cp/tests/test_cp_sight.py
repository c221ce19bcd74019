"""Who sees whom, on single tokens and on blocks, strips and chunks."""

import pytest
import torch

from kenotron_cp import Cut, Layout, Visibility

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3], [4, 5, 5, 5, 5, 5, -1, -1, 6, 6, 6]])


def brute(sequence, window, documents):
    """The mask by its definition."""
    ids = torch.zeros(1, sequence) if documents is None else documents.view(-1, sequence)
    mask = torch.zeros(len(ids), 1, sequence, sequence, dtype=torch.bool)
    for b, row in enumerate(ids.tolist()):
        for q in range(sequence):
            for k in range(q + 1):
                near = window is None or q - k < window
                mask[b, 0, q, k] = near and row[q] == row[k] and row[q] >= 0
    return mask


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("documents", [None, IDS, IDS[0]])
def test_blocks_strips_and_chunks_agree_with_the_mask(window, documents):
    sight = Visibility(11, window, documents)
    mask = brute(11, window, documents)
    assert torch.equal(sight.dense_mask(), mask)
    for ranks, layout in ((1, Layout(block=2)), (2, Layout(block=1)), (3, Layout("contiguous"))):
        cut = Cut(11, ranks, layout)
        table = sight.over(cut)
        padded = torch.zeros(len(mask), cut.padded, cut.padded, dtype=torch.bool)
        padded[:, :11, :11] = mask[:, 0]
        for u in range(cut.strips):
            for w in range(cut.strips):
                for i in cut.blocks(u):
                    for j in cut.blocks(w):
                        part = padded[:, slice(*i), slice(*j)]
                        assert table.sees(i, j) >= part.any()
                        if table.whole(i, j):
                            assert part.all()
                        if table.causal(i, j):
                            assert (part == part.new_ones(part.shape[1:]).tril()).all()
                length = cut.strip_length
                part = padded[:, u * length : (u + 1) * length, w * length : (w + 1) * length]
                assert table.strip_sees(u, w) >= part.any()
        for a in range(ranks):
            for b in range(ranks):
                part = padded[:, cut.positions(b)][:, :, cut.positions(a)]
                assert bool(table.sent(a, b)) >= part.any()
                assert bool(table.returned(b, a)) == bool(table.sent(a, b))


def test_what_is_never_seen_is_skipped():
    table = Visibility(64, window=4).over(Cut(64, 8))
    assert [table.sent(0, r) for r in range(8)] == [[0, 15], [0], *[[]] * 6]
    lone = Visibility(64, documents=torch.arange(64)).over(Cut(64, 4))
    assert not any(lone.sent(a, b) for a in range(4) for b in range(4) if a != b)


def test_lengths_make_documents():
    assert Visibility.of_lengths([2, 1, 3]).documents.tolist() == [0, 0, 1, 2, 2, 2]
    assert Visibility.of_lengths([2, 1, 3], window=2).window == 2


def test_errors_name_the_value_and_what_to_do():
    with pytest.raises(ValueError, match="window is 0, it must be at least 1"):
        Visibility(8, window=0)
    with pytest.raises(ValueError, match=r"int64 \(4,\); they must be integers of shape \(8,\)"):
        Visibility(8, documents=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="float32"):
        Visibility(4, documents=torch.zeros(4))
    with pytest.raises(ValueError, match=r"lengths \[2, 0\] must be one or more"):
        Visibility.of_lengths([2, 0])
    with pytest.raises(ValueError, match="describes 8 tokens and the cut 16"):
        Visibility(8).over(Cut(16, 2))
