"""Mamba-2's scan in chunks against the recurrence, token by token in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from scan_cases import (
    MASKS,
    Inputs,
    R,
    bf16_is_computed_in_fp32,
    documents_are_apart,
    drawn_inputs,
    gradients_are_those_of_differences,
    kept_bytes,
    same_as_recurrence,
)
from torch import Tensor

from kenotron_models.selective_scan import Constants, Scanned
from kenotron_models.ssd import structured_scan

H, P, G, N = 4, 3, 2, 5
LIMITS = (0.05, 1.5)


def inputs(length: int, dtype: torch.dtype = torch.float64) -> Inputs:
    return drawn_inputs(
        ((H, P), (H,), (G, N), (G, N)), ((H,), (H,), (H,), (H, P, N)), length, dtype
    )


def recurrence(
    given: Inputs, goes_on: Tensor | None = None, real: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition."""
    x, step, b, c, a, skip, bias, state = given
    d, outs = F.softplus(step + bias).clamp(*LIMITS), []
    if real is not None:
        d = d * real[..., None]
    b, c = (each.repeat_interleave(H // G, 2) for each in (b, c))
    for t in range(x.shape[1]):
        if goes_on is not None:
            state = state * goes_on[:, t, None, None, None]
        fed = torch.einsum("rh,rhp,rhn->rhpn", d[:, t], x[:, t], b[:, t])
        state = torch.exp(d[:, t] * a)[..., None, None] * state + fed
        outs.append(torch.einsum("rhpn,rhn->rhp", state, c[:, t]) + skip[:, None] * x[:, t])
    return torch.stack(outs, 1), state, d.sum(1)


def scanned(given: Inputs, chunk: int, **masks: Tensor | None) -> Scanned:
    x, step, b, c, *constants, first = given
    how = {"limits": LIMITS, "first": first, "chunk": chunk, **masks}
    return structured_scan(x, step, b, c, Constants(*constants), **how)


@pytest.mark.parametrize("chunk", [1, 4, 13, 64])
@pytest.mark.parametrize("length", [1, 4, 13])
@pytest.mark.parametrize("mask", MASKS)
def test_outputs_states_and_gradients_are_those_of_the_recurrence(
    mask: str, length: int, chunk: int
) -> None:
    same_as_recurrence(inputs, recurrence, scanned, mask, length, chunk)


def test_its_gradients_are_those_of_differences() -> None:
    gradients_are_those_of_differences(inputs, scanned)


@pytest.mark.parametrize("chunk", [3, 8])
def test_nothing_passes_from_one_document_to_another(chunk: int) -> None:
    documents_are_apart(inputs, scanned, chunk)


def test_bf16_is_computed_in_fp32() -> None:
    bf16_is_computed_in_fp32(inputs(96, torch.bfloat16), recurrence, scanned, 1e-4)


def test_memory_is_linear_in_the_sequence_and_has_no_scores() -> None:
    for length in (256, 512):
        kept = kept_bytes(inputs(length, torch.float32), scanned)
        assert kept <= length // 64 * R * H * P * N * 4
