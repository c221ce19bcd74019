"""Peak FLOPS of accelerators: the denominator of model FLOPs utilisation."""

from __future__ import annotations

PEAK_BF16_TFLOPS: dict[str, float] = {
    "GB200": 2500,
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 PCIE": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A40": 149.7,
    "A30": 165,
    "A10G": 70,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090": 165.2,
    "RTX 3090": 71,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI250X": 383,
}
"""Dense bf16 products in TFLOP/s as the makers publish them, by a part of the device's name."""


def peak_bf16_flops(device_name: str) -> float | None:
    """Dense bf16 operations a second of a device; None for one that is not known.

    The longest known name that is among the words of ``device_name`` counts: ``NVIDIA H100 PCIe``
    is not ``H100``.
    """
    spaced = f" {device_name.upper().replace('-', ' ').replace('_', ' ')} "
    known = [name for name in PEAK_BF16_TFLOPS if f" {name} " in spaced]
    return PEAK_BF16_TFLOPS[max(known, key=len)] * 1e12 if known else None
