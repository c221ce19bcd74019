"""Every field of a scoring with every kernel: computed as defined, or refused by its name."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from cp_cases import DROPPED, SINKS, WAYS, Case
from cp_dense import whole
from torch.testing import assert_close

from kenotron_cp import EFFICIENT, FLASH_CPU, PLAIN, Kernel, Scoring, Visibility, attend
from kenotron_cp.attend import AROUND_KERNELS
from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks

KERNELS = {kernel.name: kernel for kernel in (PLAIN, FLASH_CPU, EFFICIENT)}
SETTINGS = {  # a scoring for each field
    "scale": Scoring(0.4),
    "cap": Scoring(0.25, cap=0.9),
    "sinks": Scoring(0.25, sinks=SINKS),
    "dropout": DROPPED,
}
TABLE = [(kernel, field) for kernel in KERNELS for field in SETTINGS]
SOLO = Axis.solo("cp")


def supports(kernel: Kernel) -> frozenset[str]:
    return kernel.supports | AROUND_KERNELS


def case(scoring: Scoring) -> Case:
    return Case(Visibility.of_lengths([20, 31], 13), 8, 4, {"scoring": scoring, "stride": 3})


def test_the_table_has_every_field_and_no_other():
    names = {field.name for field in fields(Scoring)}
    assert names == set(SETTINGS) == supports(PLAIN)
    for kernel in KERNELS.values():
        assert "scale" in kernel.supports <= names


@pytest.mark.parametrize(("kernel", "field"), TABLE)
def test_a_field_that_a_kernel_does_not_apply_is_refused(kernel: str, field: str):
    found, tensors = KERNELS[kernel], case(SETTINGS[field]).tensors()[:3]
    refused = SETTINGS[field].unsupported(supports(found))
    assert refused == ([] if field in supports(found) else [field])
    if refused:
        with pytest.raises(ValueError, match=f"kernel {kernel} has no {field}: leave out kernel"):
            attend(*tensors, SOLO, case(SETTINGS[field]).sight, SETTINGS[field], kernel=found)


def computed(mesh):
    """Joined results of every pair of the table that runs on a CPU, by all ways."""
    found = {}
    for name, field in TABLE:
        if KERNELS[name] is EFFICIENT or field not in supports(KERNELS[name]):
            continue
        made = case(SETTINGS[field])
        options = made.options | {"kernel": KERNELS[name]}
        for way in WAYS:
            found[name, field, way] = whole(mesh, made.tensors(), made.sight, way=way, **options)
    return found


@pytest.mark.parametrize("cp", [1, 2])
def test_a_field_that_a_kernel_applies_is_computed_as_defined(cp: int):
    for ranks in on_ranks(computed, cp=cp):
        assert len(ranks) == 3 * (len(PLAIN.supports) + len(FLASH_CPU.supports) + 2)
        for (name, field, way), tensors in ranks.items():
            for ours, right in zip(tensors, case(SETTINGS[field]).expected(), strict=True):
                error = (ours.double() - right).abs().max() / right.abs().max().clamp(min=1)
                assert error <= 3e-6, (name, field, way)


@dataclass(frozen=True, eq=False)
class Tempered(Scoring):
    """A further field, as a variant of attention would add it."""

    temperature: torch.Tensor | None = None
    """Factor of each head's products, (H,)."""


def test_a_new_field_is_refused_by_every_kernel_without_it():
    *tensors, _ = case(DROPPED).tensors()
    scoring = Tempered(0.25, temperature=torch.ones(8))
    for name, kernel in KERNELS.items():
        with pytest.raises(ValueError, match=f"kernel {name} has no temperature: leave out kern"):
            attend(*tensors, SOLO, case(scoring).sight, scoring, kernel=kernel)
    with pytest.raises(ValueError, match="the kernel plain has no temperature"):
        attend(*tensors, SOLO, case(scoring).sight, scoring)
    with pytest.raises(ValueError, match=r"temperature \(3,\) for 8 query heads: give one each"):
        attend(*tensors, SOLO, case(scoring).sight, replace(scoring, temperature=torch.ones(3)))


def warm_forward(q, k, v, tile):
    return PLAIN.forward(q * tile.scoring.temperature[:, None, None], k, v, tile)


def warm_backward(grad, q, k, v, out, lse, tile):
    factor = tile.scoring.temperature[:, None, None]
    dq, dk, dv = PLAIN.backward(grad, q * factor, k, v, out, lse, tile)
    return dq * factor, dk, dv


WARM = Kernel("warm", warm_forward, warm_backward, PLAIN.dtype, PLAIN.supports | {"temperature"})


def tempered(mesh):
    """Joined results of a kernel with the new field, and of queries that have the factor."""
    temperature = torch.linspace(0.5, 2, 8)
    scoring = Tempered(**(vars(DROPPED) | {"cap": 1.0, "sinks": SINKS}), temperature=temperature)
    made = case(scoring)
    q, k, v, grad = made.tensors()
    warmed = (q * temperature[:, None], k, v, grad)
    without = made.options | {"scoring": replace(scoring, temperature=None), "kernel": PLAIN}
    for way in WAYS:
        ours = whole(mesh, (q, k, v, grad), made.sight, way=way, kernel=WARM, **made.options)
        out, dq, dk, dv = whole(mesh, warmed, made.sight, way=way, **without)
        for a, b in zip(ours, (out, dq * temperature[:, None], dk, dv), strict=True):
            assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_new_field_needs_a_kernel_and_nothing_in_between(cp: int):
    on_ranks(tempered, cp=cp)
