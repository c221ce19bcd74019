"""What libraries of kernels are asked for, with stand-ins that compute what these document."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from decoder_gradients import DELTA, MAMBA, MAMBA2
from torch import Tensor

from kenotron_dist import Axis
from kenotron_models import Build, Context, scan_kernels
from kenotron_models.delta_rule import Delta, delta_rule
from kenotron_models.selective_scan import Constants, selective_scan
from kenotron_models.ssd import structured_scan

ONE = Build(Axis.solo("tp"), device="cpu")
CALLS: list[str] = []
KINDS = {"mamba": MAMBA, "mamba2": MAMBA2, "gated_delta": DELTA}


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
    return_last_state=False,
) -> Tensor:  # fmt: skip
    """u, delta (B, D, L); A (D, N); B, C (B, N, L); D, delta_bias (D,) in fp32."""
    CALLS.append("mamba")
    assert delta_softplus and z is None and not return_last_state
    assert u.shape == delta.shape and B.shape == C.shape == (len(u), A.shape[1], u.shape[2])
    assert A.dtype == D.dtype == delta_bias.dtype == torch.float32
    return selective_scan(u.mT, delta.mT, B.mT, C.mT, Constants(A, D, delta_bias)).y.mT


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
) -> Tensor:  # fmt: skip
    """x (B, L, H, P); dt (B, L, H); A, D, dt_bias (H,); B, C (B, L, G, N); seq_idx (B, L) int32."""
    CALLS.append("mamba2")
    assert dt_softplus and z is None and initial_states is None and not return_final_states
    goes_on = None
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32
        goes_on = torch.nn.functional.pad(seq_idx.diff(dim=1) == 0, (1, 0))
    given = x, dt, B, C, Constants(A, D, dt_bias)
    return structured_scan(*given, limits=dt_limit, goes_on=goes_on, chunk=chunk_size).y


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None,
) -> tuple[Tensor, None]:  # fmt: skip
    """q, k (B, L, H, K); v (B, L, H, V); g, the logarithm of the decay, and beta (B, L, H)."""
    CALLS.append("gated_delta")
    assert initial_state is None and not output_final_state and not use_qk_l2norm_in_kernel
    assert q.dtype == k.dtype == v.dtype and g.dtype == torch.float32
    return delta_rule(Delta(q * scale, k, v, g, beta))[0], None


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, function in (
        ("mamba_ssm.ops.selective_scan_interface", selective_scan_fn),
        ("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined),
        ("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
    ):
        parts = path.split(".")
        for depth in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType("library"))
        module = ModuleType(path)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(scan_kernels, "installed", lambda module: True)
    monkeypatch.setattr(scan_kernels, "check_device", lambda mixer, x: None)
    CALLS.clear()


def both(name: str, documents: bool) -> tuple[Any, Any]:
    """A mixer with the plain scan, and the same with the library's kernel."""
    spec = replace(KINDS[name], separate_documents=documents)
    plain, fast = spec.build(24, ONE), replace(spec, kernel="library").build(24, ONE)
    fast.load_state_dict(plain.state_dict())
    return plain, fast


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("name", "documents"),
    [("mamba", False), ("mamba2", False), ("mamba2", True), ("gated_delta", False)],
)
def test_a_library_is_asked_for_the_same_numbers(
    libraries: None, name: str, documents: bool, again: bool
) -> None:
    x = torch.randn(18, 24)
    places = torch.tensor([[*range(5), *range(4)], [*range(9)]])
    found = []
    for mixer in both(name, documents):
        given = x.clone().requires_grad_()
        norm = torch.nn.Identity() if again else None
        y = mixer(given, Context(places), norm=norm)
        y.square().sum().backward()
        found.append([y, given.grad, *(p.grad for p in mixer.parameters())])
    assert CALLS and set(CALLS) == {name}
    for fast, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_without_the_library_or_a_gpu_the_message_says_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, package = scan_kernels.PACKAGES[name]
    spec = replace(KINDS[name], separate_documents=False, kernel="library")
    monkeypatch.setattr(scan_kernels, "installed", lambda module: False)
    missing = (
        rf"kernel of {name}: library was given and {module} is not installed; install {package}"
    )
    with pytest.raises(ValueError, match=missing):
        spec.build(24, ONE)
    spec.build(24, replace(ONE, device="meta", shapes_only=True))  # nothing is computed
    monkeypatch.setattr(scan_kernels, "installed", lambda module: True)
    with pytest.raises(ValueError, match="tensors are on cpu; it needs a CUDA device: choose plai"):
        spec.build(24, ONE)(torch.randn(6, 24), Context(torch.arange(6)[None]))
    with pytest.raises(ValueError, match="'triton' was given; it must be plain or library"):
        replace(spec, kernel="triton").build(24, ONE)


@pytest.mark.parametrize("name", ["mamba", "gated_delta"])
def test_documents_that_a_kernel_would_join_are_refused(libraries: None, name: str) -> None:
    spec = replace(KINDS[name], separate_documents=True, kernel="library")
    with pytest.raises(ValueError, match=f"kernel of {name}: library was given with separate docu"):
        spec.build(24, ONE)
