"""The terms of the loss, and the head that never has all logits: against plain torch."""

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from tp_memory import PeakMemory
from tp_ranks import normal, own_rows, part

from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks
from kenotron_tp import capped_logits, cross_entropy, vocabulary_chunk

TOKENS, WIDTH, VOCAB = 13, 6, 31
TERMS = [
    {},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2, "label_smoothing": 0.3},
]


CAPPED = [{"cap": 1.5}, {"cap": 0.8, "z_loss": 1e-2}, {"cap": 3.0, "label_smoothing": 0.1}]


def labels_of(vocab=VOCAB, tokens=TOKENS, ignored=3):
    labels = torch.arange(tokens) * 7 % vocab
    labels[0], labels[1], labels[ignored] = 0, vocab - 1, -100
    return labels


def reference(logits, labels, z_loss=0.0, label_smoothing=0.0):
    """Loss and z-loss of whole logits, in their dtype."""
    loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    z = z_loss * torch.logsumexp(logits, -1).square() * (labels != -100)
    return loss + z, z


def capped(logits, terms):
    """fp32 logits as the terms cap them, and the other terms."""
    others = {name: value for name, value in terms.items() if name != "cap"}
    cap = terms.get("cap")
    logits = logits.float()
    return logits if cap is None else cap * torch.tanh(logits / cap), others


def columns(whole, mesh, dim):
    return part(whole, dim, mesh, (vocabulary_chunk(whole.shape[dim], mesh["tp"].size),))


def check_terms(mesh, dtype, in_place, terms):
    axis, labels = mesh["tp"], labels_of()
    whole = (normal(TOKENS, VOCAB, seed=1) * 3 + 5).to(dtype)
    weight = normal(TOKENS, seed=2)
    leaf = columns(whole, mesh, -1).requires_grad_()
    own = leaf * 1.0
    own.retain_grad()
    loss, z = cross_entropy(own, labels, axis, vocab_size=VOCAB, in_place=in_place, **terms)
    alone = cross_entropy(own, labels, axis, vocab_size=VOCAB, **terms)[0]
    assert torch.equal(loss, alone) and not z.requires_grad
    loss.backward(weight)
    twin = whole.float().requires_grad_()
    expected, expected_z = reference(twin, labels, **terms)
    expected.backward(weight)
    assert_close(loss.detach(), expected.detach())
    assert_close(z, expected_z.detach())
    assert_close(own.grad, columns(twin.grad, mesh, -1).to(dtype))
    assert torch.equal(leaf.grad, own.grad)
    assert torch.equal(own, leaf) != in_place


def check_head(mesh, dtype, sequence, chunk, terms):
    axis, labels = mesh["tp"], labels_of()
    x, w = normal(TOKENS, WIDTH, seed=3, dtype=dtype), normal(VOCAB, WIDTH, seed=4, dtype=dtype)
    weight = normal(TOKENS, seed=2)
    own = (own_rows(x, mesh) if sequence else x.clone()).requires_grad_()
    own_w = columns(w, mesh, 0).requires_grad_()
    options = {"vocab_size": VOCAB, "chunk": chunk, "sequence_parallel": sequence, **terms}
    loss, z = cross_entropy(own, labels, axis, weight=own_w, **options)
    assert torch.equal(cross_entropy(own, labels, axis, weight=own_w, **options)[0], loss)
    loss.backward(weight)
    x.requires_grad_()
    w.requires_grad_()
    logits, others = capped(x @ w.t(), terms)
    expected, expected_z = reference(logits, labels, **others)
    expected.backward(weight)
    close = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert_close(loss.detach(), expected.detach(), **close)
    assert_close(z, expected_z.detach(), **close)
    assert_close(own.grad, own_rows(x.grad, mesh) if sequence else x.grad, **close)
    assert_close(own_w.grad, columns(w.grad, mesh, 0), **close)


def check_sum(mesh, dtype, sequence, chunk, terms):
    axis, labels = mesh["tp"], labels_of()
    x, w = normal(TOKENS, WIDTH, seed=3, dtype=dtype), normal(VOCAB, WIDTH, seed=4, dtype=dtype)
    own = (own_rows(x, mesh) if sequence else x.clone()).requires_grad_()
    own_w = columns(w, mesh, 0).requires_grad_()
    options = {"vocab_size": VOCAB, "chunk": chunk, "sequence_parallel": sequence, **terms}
    loss, z = cross_entropy(own, labels, axis, weight=own_w, reduction="sum", **options)
    with torch.no_grad():
        again, _ = cross_entropy(own, labels, axis, weight=own_w, reduction="sum", **options)
    assert torch.equal(again, loss)
    (loss * 0.5).backward()
    x.requires_grad_()
    w.requires_grad_()
    logits, others = capped(x @ w.t(), terms)
    expected, expected_z = reference(logits, labels, **others)
    (expected.sum() * 0.5).backward()
    close = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert_close(loss.detach(), expected.sum().detach(), **close)
    assert_close(z, expected_z.sum().detach(), **close)
    assert_close(own.grad, own_rows(x.grad, mesh) if sequence else x.grad, **close)
    assert_close(own_w.grad, columns(w.grad, mesh, 0), **close)


def check_all(mesh):
    for terms in [*TERMS, *CAPPED]:
        for dtype in (torch.float32, torch.bfloat16):
            for in_place in (False, True) if terms in TERMS else ():
                check_terms(mesh, dtype, in_place, terms)
            for sequence, chunk in ((False, 1), (True, 5), (False, 64)):
                check_head(mesh, dtype, sequence, chunk, terms)
                check_sum(mesh, dtype, sequence, chunk, terms)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.by_turns(2)
def test_losses_are_those_of_whole_logits(tp):
    on_ranks(check_all, tp=tp)


def bits_of_capped(mesh):
    """Capped logits of this rank, a loss of every token, and the same from logits."""
    axis, labels = mesh["tp"], labels_of()
    x, w = normal(TOKENS, WIDTH, seed=3), normal(VOCAB, WIDTH, seed=4)
    own = columns(w, mesh, 0)
    logits = capped_logits(x @ own.t(), 0.9)
    fused = cross_entropy(x, labels, axis, weight=own, vocab_size=VOCAB, cap=0.9, chunk=4)[0]
    return logits, fused, cross_entropy(logits, labels, axis, vocab_size=VOCAB)[0]


@pytest.mark.parametrize("tp", [2, 3])
def test_a_cap_is_the_same_on_every_rank_and_with_logits(tp):
    [(want, _, _)] = on_ranks(bits_of_capped)
    ranks = on_ranks(bits_of_capped, tp=tp)
    assert_close(torch.cat([logits for logits, _, _ in ranks], -1)[:, :VOCAB], want)
    for _, fused, plain in ranks:
        assert torch.equal(fused, ranks[0][1])
        assert_close(fused, plain)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_cap_that_caps_nothing_is_refused(reduction):
    x, w = normal(TOKENS, WIDTH, seed=3), normal(VOCAB, WIDTH, seed=4)
    for cap in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="is not a finite number above 0: None caps nothing"):
            cross_entropy(x, labels_of(), Axis.solo("tp"), weight=w, reduction=reduction, cap=cap)


def gradients(mesh):
    """In fp64, by finite differences; every rank moves its own columns alone."""
    axis, labels = mesh["tp"], labels_of()[:4]
    own = columns(normal(4, 5, seed=1, dtype=torch.float64), mesh, -1)
    x = normal(4, 3, seed=2, dtype=torch.float64).requires_grad_()
    w = columns(normal(5, 3, seed=3, dtype=torch.float64), mesh, 0)
    labels = labels.where(labels == -100, labels % 5)
    found = []
    for terms in TERMS:
        options = {"vocab_size": 5, **terms}
        loss = cross_entropy(own.requires_grad_(), labels, axis, **options)[0]
        found.append(torch.autograd.grad(loss.sum(), own)[0])
        loss = cross_entropy(x, labels, axis, weight=w.requires_grad_(), chunk=2, **options)[0]
        found += torch.autograd.grad(loss.sum(), (x, w))
        total, _ = cross_entropy(x, labels, axis, weight=w, reduction="sum", chunk=3, **options)
        for own_grad, each in zip(torch.autograd.grad(total, (x, w)), found[-2:], strict=True):
            assert_close(own_grad, each, rtol=1e-12, atol=1e-12)
        if axis.size == 1:

            def cut(y, terms=options):
                return cross_entropy(y, labels, axis, **terms)[0]

            def fused(x, w, terms=options):
                return cross_entropy(x, labels, axis, weight=w, chunk=2, **terms)[0]

            torch.autograd.gradcheck(cut, own)

            torch.autograd.gradcheck(fused, (x, w))
    return found


def test_gradients_are_those_of_finite_differences():
    one = on_ranks(gradients, tp=1)[0]
    for tp in (2, 3):
        parts = on_ranks(gradients, tp=tp)
        for i, whole in enumerate(one):
            cut = -1 if i % 3 == 0 else 0
            if i % 3 == 1:  # the gradient of x is whole on every rank
                for each in parts:
                    assert_close(each[i], whole, rtol=1e-12, atol=1e-12)
                continue
            joined = torch.cat([each[i] for each in parts], cut)
            joined = joined.narrow(cut, 0, whole.shape[cut])
            assert_close(joined, whole, rtol=1e-12, atol=1e-12)


def test_the_z_loss_is_of_the_true_log_partition():
    """Shifted by the largest logit, as a stable softmax works, it would be 1e-4 log(3)^2."""
    logits, labels = torch.full((1, 3), 253.0), torch.tensor([1])
    _, z = cross_entropy(logits, labels, Axis.solo("tp"), z_loss=1e-4)
    assert_close(z, torch.tensor([1e-4 * (253 + torch.log(torch.tensor(3.0))) ** 2]))
    assert 6.4 < z.item() < 6.5


def peak(run, *known):
    with PeakMemory().ignore(*known) as counted:
        run()
    return counted.peak


def memory(mesh):
    """Peak bytes of forward and backward beyond what was there, in sizes of a rank's logits."""
    axis, tokens, vocab, width = mesh["tp"], 512, 2048, 8
    labels = torch.arange(tokens)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        size = tokens * vocab // axis.size * dtype.itemsize
        x = normal(tokens, width, seed=2, dtype=dtype).requires_grad_()
        w = normal(vocab // axis.size, width, seed=1, dtype=dtype).requires_grad_()

        def cut(logits, **options):
            loss = cross_entropy(logits, labels, axis, **options)[0]
            torch.autograd.grad(loss.sum(), logits)

        def fused(x=x, w=w):
            cross_entropy(x, labels, axis, weight=w, chunk=32)[0].sum().backward()

        for name in ("new", "in_place"):
            logits = x @ w.t()
            run = functools.partial(cut, logits, in_place=name == "in_place")
            found[name, dtype] = peak(run, logits, labels) / size
        found["head", dtype] = peak(fused, x, w, labels) / size
    return found


def memory_in_small_blocks(mesh):
    with mock.patch.dict("kenotron_tp.softmax._BLOCK", cpu=2**14):  # as for larger logits
        return memory(mesh)


@pytest.mark.parametrize("tp", [1, 2])
def test_memory_is_one_gradient_none_or_a_chunk(tp):
    for found in on_ranks(memory_in_small_blocks, tp=tp):
        for dtype in (torch.float32, torch.bfloat16):
            assert 1.0 < found["new", dtype] < 1.2, found
            assert found["in_place", dtype] < 0.2, found
            assert found["head", dtype] < 0.3, found


def cast(mesh):
    """Under autocast, products and communication are bf16 and gradients fp32."""
    axis, labels = mesh["tp"], labels_of()
    x = normal(TOKENS, WIDTH, seed=3).requires_grad_()
    w = columns(normal(VOCAB, WIDTH, seed=4), mesh, 0).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(x, labels, axis, weight=w, vocab_size=VOCAB)[0]
    loss.sum().backward()
    assert loss.dtype == x.grad.dtype == w.grad.dtype == torch.float32
    exact = cross_entropy(x, labels, axis, weight=w, vocab_size=VOCAB)[0]
    assert_close(loss, exact, rtol=2e-2, atol=2e-2)
    assert not torch.equal(loss, exact)


def test_the_head_under_autocast():
    on_ranks(cast, tp=2)


def shifted(mesh):
    """Large logits lose nothing by label smoothing: it adds up distances, not logits."""
    axis, labels = mesh["tp"], labels_of(5000, 4)
    whole = normal(4, 5000, seed=1) + 1e4
    loss = cross_entropy(
        columns(whole, mesh, -1), labels, axis, vocab_size=5000, label_smoothing=0.2
    )[0]
    expected = F.cross_entropy(whole.double(), labels, reduction="none", label_smoothing=0.2)
    return (loss - expected).abs().max()


@pytest.mark.parametrize("tp", [1, 3])
def test_smoothing_of_large_logits(tp):
    assert max(on_ranks(shifted, tp=tp)) < 4e-6


def test_autocast_around_the_backward_alone_changes_nothing():
    x, w = normal(5, WIDTH, seed=1).requires_grad_(), normal(VOCAB, WIDTH, seed=2).requires_grad_()
    labels, axis = torch.arange(5), Axis.solo("tp")
    expected = torch.autograd.grad(cross_entropy(x, labels, axis, weight=w)[0].sum(), (x, w))
    loss = cross_entropy(x, labels, axis, weight=w)[0].sum()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(loss, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("view", [False, True])
def test_a_gradient_is_not_written_over_a_leaf(view):
    logits = normal(4, 6, seed=1).requires_grad_()
    with pytest.raises(ValueError, match="in_place would write the gradient over a leaf: give"):
        cross_entropy(
            logits.view(2, 12).view(4, 6) if view else logits,
            torch.zeros(4).long(),
            Axis.solo("tp"),
            in_place=True,
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": torch.zeros(3)}, "labels are torch.float32: they are ids, int64 or int32"),
        ({"chunk": 0}, "chunk 0 is not positive: it is a number of tokens"),
        ({"reduction": "mean"}, "'mean' is neither .* give \"sum\" and times=1 / the labels of"),
        ({"times": 2.0}, 'times is of a sum: give reduction="sum", or multiply the losses'),
        ({"in_place": True}, "in_place is of logits: with weight they exist for a few tokens"),
        ({"weight": None, "chunk": 4}, "chunk is of the head's input: give weight too"),
        ({"weight": None, "sequence_parallel": True}, "sequence_parallel is of the head's input"),
        ({"weight": None, "labels": torch.zeros(2).long()}, "for the input of a head give its w"),
        ({"z_loss": -1.0}, r"z_loss -1\.0 is not a finite coefficient, 0 or more"),
        ({"z_loss": float("nan")}, "z_loss nan is not a finite coefficient, 0 or more"),
        ({"label_smoothing": 1.0}, r"label_smoothing 1\.0 is not within \[0, 1\)"),
        ({"vocab_size": 9}, r"vocab_size 9 is not within 1\.\.8, the columns of all ranks"),
        ({"labels": torch.zeros(2).long()}, r"x \(3, 2\) and weight \(8, 2\) do not fit labels"),
        ({"weight": torch.zeros(8, 3)}, r"x \(3, 2\) and weight \(8, 3\) do not fit labels"),
        ({"labels": torch.tensor([0, 1, 8])}, r"label 8 at position \(2,\) is outside the vocab"),
    ],
)
def test_what_does_not_fit_is_an_error(options, words):
    given = {"weight": torch.zeros(8, 2), "labels": torch.zeros(3).long(), **options}
    with pytest.raises((ValueError, IndexError), match=words):
        cross_entropy(torch.zeros(3, 2), axis=Axis.solo("tp"), **given)


def test_no_tokens_have_no_loss():
    x, w = torch.zeros(0, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    cross_entropy(x, torch.zeros(0).long(), Axis.solo("tp"), weight=w)[0].sum().backward()
    assert x.grad.shape == (0, 4) and w.grad.eq(0).all()


def test_labels_of_one_rank_are_not_those_of_all_tokens():
    words = r"2 labels do not fit x \(2, 4\) of 2 ranks: labels are those of all tokens"
    with pytest.raises(ValueError, match=words):
        cross_entropy(
            torch.zeros(2, 4),
            torch.zeros(2).long(),
            Axis("tp", 0, (0, 1)),
            weight=torch.zeros(3, 4),
            sequence_parallel=True,
        )


def test_a_loss_is_not_differentiated_twice():
    logits = normal(3, 4, seed=1).requires_grad_()
    loss = cross_entropy(logits, torch.zeros(3).long(), Axis.solo("tp"))[0]
    (grad,) = torch.autograd.grad(loss.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_logits_that_are_gone_are_not_used_again():
    logits = (normal(3, 4, seed=1).requires_grad_() * 1).exp()  # exp keeps its result
    loss = cross_entropy(logits, torch.zeros(3).long(), Axis.solo("tp"), in_place=True)[0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_a_sum_has_one_backward():
    x, w = normal(4, 3, seed=1).requires_grad_(), normal(5, 3, seed=2).requires_grad_()
    loss, _ = cross_entropy(x, torch.arange(4), Axis.solo("tp"), weight=w, reduction="sum")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has one backward: its gradients are gone"):
        loss.backward()


def test_gradients_that_nobody_wants_are_not_made():
    x, w = normal(4, 3, seed=1), normal(5, 3, seed=2).requires_grad_()
    loss, _ = cross_entropy(x, torch.arange(4), Axis.solo("tp"), weight=w, reduction="sum")
    loss.backward()
    want = torch.autograd.grad(F.cross_entropy(x @ w.t(), torch.arange(4), reduction="sum"), w)[0]
    assert_close(w.grad, want)
    assert x.grad is None


def test_no_tokens_have_no_sum():
    x, w = torch.empty(0, 3).requires_grad_(), normal(5, 3, seed=2).requires_grad_()
    labels = torch.empty(0, dtype=torch.int64)
    loss, _ = cross_entropy(x, labels, Axis.solo("tp"), weight=w, reduction="sum")
    loss.backward()
    assert loss == 0
    assert torch.equal(w.grad, torch.zeros(5, 3))


@pytest.mark.parametrize("summed", [True, False])
def test_many_chunks_add_up_the_weight_gradient_in_float32(summed):
    labels, axis = torch.arange(2048) * 7 % VOCAB, Axis.solo("tp")
    x, weight = normal(2048, 16, seed=1).bfloat16(), (normal(VOCAB, 16, seed=2) / 4).bfloat16()
    exact = weight.double().requires_grad_()
    F.cross_entropy(x.double() @ exact.t(), labels, reduction="sum").backward()

    def error(chunk):
        leaf = weight.clone().requires_grad_()
        if summed:
            cross_entropy(x, labels, axis, weight=leaf, reduction="sum", chunk=chunk)[0].backward()
        else:
            cross_entropy(x, labels, axis, weight=leaf, chunk=chunk)[0].sum().backward()
        return (leaf.grad.double() - exact.grad).norm() / exact.grad.norm()

    assert error(8) <= 1.5 * error(2048)
