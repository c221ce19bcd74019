"""The head as accelerators compute it, on the CPU: against plain torch, and its chunks."""

import itertools
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from test_tp_losses import CAPPED, TERMS, check_sum
from torch.testing import assert_close
from tp_ranks import normal

from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks
from kenotron_tp import cross_entropy, fused_cross_entropy
from kenotron_tp.fused_cross_entropy import tokens_at_a_time
from kenotron_tp.softmax_once import computes_once, local_shares


@contextmanager
def as_on_an_accelerator():
    """Yield how often logits were worked on so."""
    once = mock.patch.object(
        fused_cross_entropy, "computes_once", lambda _, terms: not terms.label_smoothing
    )
    with (
        once,
        mock.patch.object(fused_cross_entropy, "local_shares", wraps=local_shares) as shares,
    ):
        yield shares


def check_all(mesh):
    with as_on_an_accelerator() as shares:
        for terms, dtype in itertools.product([*TERMS, *CAPPED], (torch.float32, torch.bfloat16)):
            for sequence, chunk in ((False, 1), (True, 5), (False, 64)):
                check_sum(mesh, dtype, sequence, chunk, terms)
        assert shares.called


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_the_sum_is_that_of_whole_logits(tp):
    on_ranks(check_all, tp=tp)


def sums(x, weight, labels, **options):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss, z = cross_entropy(x, labels, Axis.solo("tp"), weight=weight, reduction="sum", **options)
    loss.backward()
    return loss.detach(), z, x.grad, weight.grad


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_agrees_with_its_plain_twin(dtype, scale):
    x, weight = normal(40, 16, seed=1, dtype=dtype), normal(300, 16, seed=2, dtype=dtype) * scale
    labels = torch.arange(40) * 7
    labels[3] = -100
    options = {"vocab_size": 290, "z_loss": 1e-3, "times": 1 / 40}
    want = sums(x, weight, labels, **options)
    with as_on_an_accelerator():
        found = sums(x, weight, labels, **options)
    close = {"rtol": 1e-2, "atol": 1e-5 * max(scale, 1)} if dtype == torch.bfloat16 else {}
    for each, twin in zip(found, want, strict=True):
        assert_close(each, twin, **close)


def test_a_sure_prediction_keeps_the_gradient_of_its_label():
    """1 - p is 4e-4: in bfloat16, where p is 1, it would be 0."""
    logits = torch.tensor([[0.0, -8.5, -9.0]], dtype=torch.bfloat16)
    weight, labels = torch.eye(3, dtype=torch.bfloat16), torch.tensor([0])
    want = (logits.double().softmax(-1) - torch.eye(3)[:1]).bfloat16()
    with as_on_an_accelerator():
        _, _, dx, _ = sums(logits, weight, labels)
    assert_close(dx, want, rtol=1e-2, atol=0)
    assert dx[0, 0] < -2e-4


def test_where_it_is_computed():
    terms = {smooth: mock.Mock(label_smoothing=smooth) for smooth in (0.0, 0.1)}
    cpu, meta = torch.zeros(2, 3), torch.zeros(2, 3, device="meta")
    assert [computes_once(meta, terms[0.0]), computes_once(meta, terms[0.1])] == [True, False]
    assert not computes_once(cpu, terms[0.0])


@pytest.mark.parametrize(
    ("tokens", "width", "device", "size"),
    [
        (4096, 128256, "cpu", 261),
        (4096, 128256, "cuda", 4096),
        (8192, 128256, "cuda", 4096),
        (8192, 16032, "cuda", 8192),
        (5000, 512000, "cuda", 1667),
        (0, 128256, "cuda", 1),
        (7, 0, "cuda", 7),
    ],
)
def test_chunks_are_large_on_an_accelerator_and_of_equal_size(tokens, width, device, size):
    assert tokens_at_a_time(tokens, width, device) == size
