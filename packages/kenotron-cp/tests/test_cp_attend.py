"""Attention over a cut sequence is that of one process, bit by bit."""

from functools import cache

import pytest
import torch
from cp_cases import WAYS, Case, cases, on_this_rank
from cp_dense import normal, whole

from kenotron_cp import PLAIN, Layout, Visibility, attend, cut_sequence, join_sequence
from kenotron_cp.ulysses import sum_of_copies
from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float64: 1e-13}


class OneRank(dict):
    """The part of a mesh that the cases use."""


@cache
def alone():
    """On one rank, without processes."""
    return on_this_rank(OneRank(cp=Axis.solo("cp")))


def check_values(found):
    for (name, way), tensors in found.items():
        case = cases()[name]
        tolerance = TOLERANCES[case.dtype]
        for what, ours, right in zip(("out", "q", "k", "v"), tensors, case.expected(), strict=True):
            assert ours.dtype == case.dtype and ours.shape == right.shape
            error = (ours.double() - right).abs().max() / right.abs().max().clamp(min=1)
            assert error <= tolerance, (name, way, what, float(error))


@pytest.mark.parametrize("name", cases())
def test_one_rank_is_dense_attention(name):
    found = {key: tensors for key, tensors in alone().items() if key[0] == name}
    check_values(found)
    assert len(found) == len(WAYS)


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.by_turns(1)
def test_bits_do_not_depend_on_the_number_of_ranks_nor_on_the_way(cp):
    expected = alone()
    for rank, found in enumerate(on_ranks(on_this_rank, cp=cp)):
        assert found.keys() == expected.keys()
        for (name, way), tensors in found.items():
            case = cases()[name]
            heads = case.kv_heads * case.options.get("copies", 1)
            repeated = way == "ulysses" and heads < cp  # added in another order
            pairs = list(zip(tensors, expected[name, "ring"], strict=True))
            for ours, right in pairs[:2] if repeated else pairs:
                assert torch.equal(ours, right), (rank, name, way)
        if rank == 0:
            check_values(found)


def on_three(mesh):
    case = Case(Visibility.of_lengths([20, 31]), 6, 3)
    tensors = [whole(mesh, case.tensors(), case.sight, way=way) for way in WAYS]
    for other in tensors[1:]:
        assert all(map(torch.equal, tensors[0], other))
    for ours, right in zip(tensors[0], case.expected(), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=3e-6)
    return on_this_rank(mesh)


@pytest.mark.smoke
def test_three_ranks_compute_the_same():
    for found in on_ranks(on_three, cp=3):
        check_values(found)


def documents_apart(mesh):
    sight = Visibility.of_lengths([21, 30, 13])
    q, k, v, grad = Case(sight, 8, 2).tensors()
    second = (sight.documents == 1)[None, :, None, None]
    for layout in (Layout(), Layout("contiguous")):
        for way in WAYS:
            tensors = (q, k, v, grad * second)
            _, *grads = whole(mesh, tensors, sight, way=way, layout=layout)
            for x in grads:
                assert x[:, 21:51].abs().amin(dim=(0, 2)).amax() > 0
                assert (x[:, :21] == 0).all() and (x[:, 51:] == 0).all()


@pytest.mark.parametrize("cp", [2, 4])
def test_a_documents_loss_has_no_gradient_in_another_exactly(cp):
    on_ranks(documents_apart, cp=cp)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_finite_differences(way):
    sight = Visibility(19, 6, torch.arange(19) // 8)
    tensors = [normal(1, 19, h, 4, seed=h, dtype=torch.float64).requires_grad_() for h in (4, 2, 2)]
    axis = Axis.solo("cp")
    layout = Layout(block=1)

    def attention(q, k, v):
        return attend(q, k, v, axis, sight, way=way, layout=layout)

    assert torch.autograd.gradcheck(attention, tensors, fast_mode=True)


def gradcheck_on_ranks(mesh):
    """The same perturbation on all ranks, through the cut and the join."""
    axis, sight = mesh["cp"], Visibility(11, documents=torch.arange(11) // 6)
    for way in WAYS:

        def joined(*tensors, way=way):
            parts = [cut_sequence(x, axis) for x in tensors]
            return join_sequence(attend(*parts, axis, sight, way=way, kernel=PLAIN), axis, 11)

        tensors = [normal(1, 11, 2, 3, seed=h, dtype=torch.float64) for h in range(3)]
        leaves = [x.requires_grad_() for x in tensors]
        assert torch.autograd.gradcheck(joined, leaves, fast_mode=True)


def test_gradients_are_those_of_finite_differences_on_two_ranks():
    on_ranks(gradcheck_on_ranks, cp=2)


def test_a_kernel_is_injected():
    calls = []

    def counted(q, k, v, tile):
        calls.append((q.shape[2], k.shape[2]))
        return PLAIN.forward(q, k, v, tile)

    kernel = PLAIN.__class__("counted", counted, PLAIN.backward, PLAIN.dtype)
    q, k, v, _ = Case(Visibility(64)).tensors()
    attend(q, k, v, Axis.solo("cp"), Visibility(64), kernel=kernel)
    assert calls == [(4, 4)] * (16 * 17 // 2)  # of 16 x 16 blocks those that see something
    calls.clear()
    attend(q, k, v, Axis.solo("cp"), Visibility(64, window=4), kernel=kernel)
    assert len(calls) == 16 + 15
    calls.clear()
    attend(q, k, v, Axis.solo("cp"), Visibility.of_lengths([16] * 4), kernel=kernel)
    assert len(calls) == 4 * 10


def test_inputs_are_left_alone():
    q, k, v, _ = Case(Visibility(20)).tensors()
    copies = [x.clone() for x in (q, k, v)]
    attend(q, k, v, Axis.solo("cp"), Visibility(20))
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), copies, strict=True))


def test_half_precision_gradients_are_added_in_fp32():
    """Blocks give 1 + 2^-9, which bf16 has not, and -1: two of them add to 2^-9."""

    def backward(grad, q, k, v, out, lse, tile):
        value = -1 if tile.causal else 1 + 2**-9
        return tuple(torch.full_like(x, value) for x in (q, k, v))

    kernel = PLAIN.__class__("constant", PLAIN.forward, backward, PLAIN.dtype)
    case = Case(Visibility(64), 2, 2, dtype=torch.bfloat16)
    *leaves, grad = case.tensors()
    leaves = [x.requires_grad_() for x in leaves]
    attend(*leaves, Axis.solo("cp"), case.sight, kernel=kernel).backward(grad)
    q, k, v = (x.grad for x in leaves)
    assert (q[:, 4:8] == 2**-9).all()  # sees two blocks
    assert (k[:, 56:60] == 2**-9).all() and (v[:, 56:60] == 2**-9).all()  # two see it


def test_copies_of_a_key_head_are_added_in_fp32():
    parts = [torch.tensor(x, dtype=torch.bfloat16) for x in (1, 2**-8, 2**-8, 2**-8)]
    assert sum_of_copies(parts) == 1 + 2**-6  # rounded once; 1 + 2**-7 where each sum is
