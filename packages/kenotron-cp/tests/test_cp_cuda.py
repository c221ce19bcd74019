"""The kernel for CUDA against the plain one; skipped where there is no GPU."""

import pytest
import torch
from test_cp_kernels import mask_with_blind_row, some

from kenotron_cp import EFFICIENT, PLAIN, Tile
from kenotron_cp.partial import finite


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["all", "causal", "mask"])
def test_the_cuda_kernel_is_the_plain_one(dtype, case):
    q, k, v, grad = (x.to("cuda", dtype) for x in some())
    mask = mask_with_blind_row().cuda() if case == "mask" else None
    tile = Tile(0.3, case == "causal", mask)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    ours = EFFICIENT.forward(q, k, v, tile)
    theirs = PLAIN.forward(q.float(), k.float(), v.float(), tile)
    torch.testing.assert_close(ours.out, theirs.out, **close)
    torch.testing.assert_close(ours.lse, theirs.lse, **close)
    args = (grad, q, k, v, ours.out.to(dtype))
    found = EFFICIENT.backward(*args, finite(ours.lse), tile)
    expected = PLAIN.backward(*(x.float() for x in args), finite(ours.lse), tile)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b, **close)
