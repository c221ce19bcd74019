"""The kernel for CUDA against the plain one, where there is a GPU; its arguments everywhere."""

import pytest
import torch
from test_cp_kernels import mask_with_blind_row, some
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron_cp import EFFICIENT, PLAIN, Scoring, Tile
from kenotron_cp.partial import finite


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["all", "causal", "mask"])
@pytest.mark.parametrize("order", ["tokens first", "heads first"])
def test_the_cuda_kernel_is_the_plain_one(dtype, case, order):
    q, k, v, grad = (x.to("cuda", dtype) for x in some())
    mask = mask_with_blind_row().cuda() if case == "mask" else None
    tile = Tile(Scoring(0.3), case == "causal", mask)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    ours = EFFICIENT.forward(q, k, v, tile)
    theirs = PLAIN.forward(q.float(), k.float(), v.float(), tile)
    torch.testing.assert_close(ours.out, theirs.out, **close)
    torch.testing.assert_close(ours.lse, theirs.lse, **close)
    out = ours.out.to(dtype).contiguous()  # in memory: heads first, as merged results lie
    out = out if order == "heads first" else out.transpose(1, 2).contiguous().transpose(1, 2)
    args = (grad, q, k, v, out)
    found = EFFICIENT.backward(*args, finite(ours.lse), tile)
    expected = PLAIN.backward(*(x.float() for x in args), finite(ours.lse), tile)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b, **close)


class Outputs(TorchDispatchMode):
    """Keeps the output that torch's backward of efficient attention is given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_efficient_attention_backward.default:
            self.given.append(args[5])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
def test_the_cuda_kernel_is_given_outputs_with_tokens_first_in_memory(masked):
    """Its backward reads them so in half precision, whatever their strides."""
    q, k, v, grad = (x.to("meta", torch.bfloat16) for x in some())
    tile = Tile(Scoring(0.3), False, mask_with_blind_row().to("meta") if masked else None)
    out, lse = torch.empty_like(v), torch.empty(2, 3, 6, device="meta")
    with Outputs() as seen:
        EFFICIENT.backward(grad, q, k, v, out, lse, tile)
    [given] = seen.given
    assert given.shape == out.shape and given.transpose(1, 2).is_contiguous()
