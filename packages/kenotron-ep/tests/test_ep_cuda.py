"""The exchange on a GPU against that on the CPU; skipped where there is no GPU."""

import pytest
import torch
from ep_cases import Case, run

from kenotron_dist import Axis


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"chunks": 3}, {"pad_to": 70}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_what_the_cpu_does(dtype, options):
    case = Case("dropped", 3, dtype=dtype)
    solo = Axis.solo("ep")
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    found = run(case, solo, "cuda", **options)
    for ours, right in zip(found, run(case, solo, **options), strict=True):
        torch.testing.assert_close(ours.cpu(), right, **close)
    again = run(case, solo, "cuda", **options)
    assert all(map(torch.equal, found, again))
