"""Peaks of accelerators are found by their names."""

import pytest

from kenotron_models import peak_bf16_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name: str, tflops: float) -> None:
    assert peak_bf16_flops(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["", "cpu", "NVIDIA A1000", "NVIDIA L400"])
def test_other_devices_have_no_peak_and_not_a_neighbours(name: str) -> None:
    assert peak_bf16_flops(name) is None
