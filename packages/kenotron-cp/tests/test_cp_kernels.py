"""Kernels of one pair of blocks, and the merge of their results."""

import pytest
import torch
from cp_dense import normal
from torch.nn.functional import scaled_dot_product_attention

from kenotron_cp import EFFICIENT, FLASH_CPU, PLAIN, Kernel, PartialAttention, Scoring, Tile
from kenotron_cp.kernels import SHAPES, default_kernel
from kenotron_cp.partial import finite, merge

KERNELS = [PLAIN, FLASH_CPU]


SIZES = (2, 3, 5, 6), (2, 3, 7, 6), (2, 3, 7, 4)


def some(depth=8, width=8, dtype=torch.float64):
    """q, k, v and a gradient: 2 rows, 3 heads, 6 queries and keys."""
    shapes = ((2, 3, 6, depth), (2, 3, 6, depth), (2, 3, 6, width), (2, 3, 6, width))
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def mask_with_blind_row():
    mask = normal(2, 1, 6, 6, seed=9) > 0
    mask[0, 0, 2] = False
    mask[:, 0, 3] = True
    return mask


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("depth", "width"), [(8, 8), (12, 8), (4, 8)])
@pytest.mark.parametrize("case", ["all", "causal", "mask"])
def test_a_kernel_is_torchs_attention(kernel: Kernel, depth, width, case):
    q, k, v, grad = (x.requires_grad_() for x in some(depth, width))
    mask = {"mask": mask_with_blind_row(), "all": None, "causal": None}[case]
    full = torch.ones(6, 6, dtype=torch.bool)
    seen = {"mask": mask, "all": full, "causal": full.tril()}[case]
    tile = Tile(Scoring(0.3), case == "causal", mask)
    part = kernel.forward(*(x.detach() for x in (q, k, v)), tile)
    blind = ~seen.any(-1)
    scores = (0.3 * q @ k.mT).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(part.lse, scores.logsumexp(-1).detach())
    assert (part.lse == -torch.inf).any() == blind.any()
    out = scaled_dot_product_attention(q, k, v, seen, scale=0.3)
    out = out.masked_fill(blind[..., None], 0)
    torch.testing.assert_close(part.out, out.detach())
    expected = torch.autograd.grad(out, (q, k, v), grad)
    lse = finite(part.lse)
    found = kernel.backward(*(x.detach() for x in (grad, q, k, v)), part.out, lse, tile)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(0))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_results_of_two_halves_merge_to_the_whole(kernel):
    q, k, v, _ = some()
    mask = mask_with_blind_row()
    mask[1, 0, 4, :3] = False  # sees the second half only
    whole = kernel.forward(q, k, v, Tile(Scoring(1.0), mask=mask))
    halves = [
        kernel.forward(q, k[:, :, s], v[:, :, s], Tile(Scoring(1.0), mask=mask[..., s]))
        for s in (slice(0, 3), slice(3, 6))
    ]
    merged = merge(*halves)
    torch.testing.assert_close(merged.out, whole.out)
    torch.testing.assert_close(merged.lse, whole.lse)
    assert (merged.out[0, :, 2] == 0).all() and (merged.lse[0, :, 2] == -torch.inf).all()


def test_merging_with_nothing_changes_no_bit():
    out, lse = normal(2, 3, 5, 4, seed=0), normal(2, 3, 5, seed=1)
    nothing = PartialAttention(torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    some = PartialAttention(out, lse)
    for left, right in ((some, nothing), (nothing, some)):
        merged = merge(PartialAttention(*(x.clone() for x in left)), right)
        assert torch.equal(merged.out, out) and torch.equal(merged.lse, lse)


def test_half_precision_is_computed_in_fp32_on_cpus():
    for kernel in KERNELS:
        assert kernel.dtype(torch.bfloat16) == kernel.dtype(torch.float32) == torch.float32
        assert kernel.dtype(torch.float64) == torch.float64
    assert EFFICIENT.dtype(torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "depth", "width", "kernel"),
    [
        ("cpu", torch.float64, 3, 5, FLASH_CPU),
        ("cuda", torch.bfloat16, 64, 64, EFFICIENT),
        ("cuda", torch.float16, 8, 16, EFFICIENT),
        ("cuda", torch.float32, 12, 4, EFFICIENT),
        ("cuda", torch.float64, 64, 64, PLAIN),
        ("cuda", torch.bfloat16, 12, 16, PLAIN),
        ("cuda", torch.bfloat16, 16, 12, PLAIN),
        ("cuda", torch.float32, 6, 8, PLAIN),
        ("xpu", torch.float32, 64, 64, PLAIN),
    ],
)
def test_what_torchs_kernel_does_not_take_is_computed_plainly(device, dtype, depth, width, kernel):
    assert default_kernel(device, dtype, depth, width) is kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_on_meta_nothing_is_computed_and_shapes_are_those_of_the_plain_kernel(dtype):
    assert default_kernel("meta", dtype, 6, 4) is SHAPES and SHAPES.dtype(dtype) == PLAIN.dtype(
        dtype
    )
    q, k, v = (torch.empty(size, dtype=SHAPES.dtype(dtype), device="meta") for size in SIZES)
    tile = Tile(Scoring(scale=0.5, cap=2.0))
    plain, found = PLAIN.forward(q, k, v, tile), SHAPES.forward(q, k, v, tile)
    grads = [kernel.backward(plain.out, q, k, v, *plain, tile) for kernel in (PLAIN, SHAPES)]
    for one, other in zip((*plain, *grads[0]), (*found, *grads[1]), strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
