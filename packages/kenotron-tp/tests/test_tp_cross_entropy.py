"""Cross entropy of cut logits is that of whole ones; padding has no probability."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from tp_ranks import normal, part

from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks
from kenotron_tp import cross_entropy, vocabulary_chunk
from kenotron_tp.cross_entropy import _LogitLosses
from kenotron_tp.softmax import Terms

SHAPE = (2, 9)


def labels_of(vocab, ignore_index=-100):
    """First and last ids, some between, some without a target."""
    generator = torch.Generator().manual_seed(vocab)
    labels = torch.randint(0, vocab, SHAPE, generator=generator, device="cpu")
    labels = labels.to(torch.get_default_device())
    labels[0, :2] = torch.tensor([0, vocab - 1])
    labels[1, 3:5] = ignore_index
    return labels


def cut(whole, mesh):
    """This rank's columns; what lies in the padding must not matter."""
    chunks = (vocabulary_chunk(whole.shape[-1], mesh["tp"].size),)
    own = part(whole, -1, mesh, chunks)
    real = part(torch.ones_like(whole), -1, mesh, chunks).bool()
    return own.masked_fill(~real, 3e4), real


def compare(mesh, vocab, dtype, scale, ignore_index):
    axis = mesh["tp"]
    whole = (normal(*SHAPE, vocab, seed=1) * scale).to(dtype)
    labels, weight = labels_of(vocab, ignore_index), normal(*SHAPE, seed=2)
    own, real = cut(whole, mesh)
    kept = own.clone()
    own.requires_grad_()
    loss = cross_entropy(own, labels, axis, vocab_size=vocab, ignore_index=ignore_index)[0]
    loss.backward(weight)
    twin = whole.float().requires_grad_()
    expected = F.cross_entropy(
        twin.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=ignore_index
    ).view(SHAPE)
    expected.backward(weight)
    assert loss.dtype == torch.float32 and own.grad.dtype == dtype
    assert_close(loss.detach(), expected.detach())
    grad = cut(twin.grad, mesh)[0].masked_fill(~real, 0).to(dtype)
    assert_close(own.grad, grad)
    assert own.grad.masked_fill(real, 0).eq(0).all()
    assert torch.equal(own.detach(), kept)
    assert loss[labels == ignore_index].eq(0).all()
    return loss.detach()


def check_grid(mesh):
    found = []
    for vocab in (257, 64, 5, 2, 1):  # 2 and 1 leave ranks with padding only
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for scale in (1, 1e4):
                for ignore_index in (-100, 0):
                    found.append(compare(mesh, vocab, dtype, scale, ignore_index))
    return torch.cat(found)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_it_is_the_cross_entropy_of_the_whole(tp):
    first, *others = on_ranks(check_grid, tp=tp)
    assert all(torch.equal(first, other) for other in others)


def check_edges(mesh):
    axis, vocab = mesh["tp"], 10
    whole = normal(6, vocab, seed=3)
    own, _ = cut(whole, mesh)
    own.requires_grad_()
    labels = torch.tensor([0, 9, 10, 11, -1, -100])  # 10 and 11 may lie in the padding
    for place, strange in ((2, 10), (3, 11), (4, -1)):
        words = rf"label {strange} at position \({place},\) is outside the vocabulary 0\.\.9, and"
        with pytest.raises(IndexError, match=words):
            cross_entropy(own, labels.where(labels == strange, 0), axis, vocab_size=vocab)[0]
    # Where looking for one would stop the device its loss is NaN.
    loss, _ = _LogitLosses.apply(own, labels, Terms(axis, vocab), False)
    assert loss.isnan().tolist() == [False, False, True, True, True, False]
    assert loss[5] == 0
    loss[:2].sum().backward()
    assert own.grad[2:].eq(0).all()
    mean = F.cross_entropy(whole[:2], labels[:2])
    assert_close(loss[:2].mean().detach(), mean)

    one = cross_entropy(cut(whole, mesh)[0][0], labels[0], axis, vocab_size=vocab)[0]
    assert_close(one, loss[0].detach())
    none = cross_entropy(own[:0], labels[:0], axis, vocab_size=vocab)[0]
    assert none.shape == (0,)
    masked = whole.clone()
    masked[:, 3] = -torch.inf
    found = cross_entropy(cut(masked, mesh)[0][:2], labels[:2], axis, vocab_size=vocab)[0]
    assert_close(found, F.cross_entropy(masked[:2], labels[:2], reduction="none"))
    double = cross_entropy(own.double()[:2], labels[:2], axis, vocab_size=vocab)[0]
    assert double.dtype == torch.float64
    with torch.no_grad():
        loss = cross_entropy(own[:2], labels[:2], axis, vocab_size=vocab)[0]
        assert not loss.requires_grad
    twice = torch.stack([own, own])  # the gradient of a mean is expanded, not contiguous
    zeros = labels.expand(2, 6) * 0
    cross_entropy(twice, zeros, axis, vocab_size=vocab)[0].mean().backward()


@pytest.mark.parametrize("tp", [1, 3, 4])
def test_edges(tp):
    on_ranks(check_edges, tp=tp)


@pytest.mark.parametrize(
    ("shape", "vocab_size", "words"),
    [
        ((2, 4), None, r"logits \(3, 8\) need labels of shape \(3,\), got \(2, 4\)"),
        ((3, 1), None, r"logits \(3, 8\) need labels of shape \(3,\), got \(3, 1\)"),
        ((3,), 17, "vocab_size 17 is not within 1..16, the columns of all ranks"),
        ((3,), 0, "vocab_size 0 is not within 1..16, the columns of all ranks"),
    ],
)
def test_shapes_that_do_not_fit_are_an_error(shape, vocab_size, words):
    labels = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=words):
        cross_entropy(torch.zeros(3, 8), labels, Axis("tp", 0, (0, 1)), vocab_size=vocab_size)[0]


def test_all_columns_count_by_default():
    logits, labels = normal(4, 6, seed=0), torch.tensor([0, 5, 2, -100])
    found = cross_entropy(logits, labels, Axis.solo("tp"))[0]
    assert_close(found, F.cross_entropy(logits, labels, reduction="none"))
