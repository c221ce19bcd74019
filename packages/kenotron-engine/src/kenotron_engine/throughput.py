"""Speed of a step: FLOP/s of each rank, and the share of a device's peak."""

from __future__ import annotations

from kenotron_models import DecoderSpec, training_flops


def tflops_per_rank(
    spec: DecoderSpec,
    samples: int,
    sequence: int,
    *,
    seconds: float,
    ranks: int,
    useful: float = 1.0,
    causal: bool = False,
) -> float:
    """Return the TFLOP/s of each rank in a training step; activations computed again do not count.

    Args:
        spec: what the model is made of.
        samples: rows of the global batch.
        sequence: tokens of a row.
        seconds: duration of the step.
        ranks: processes that share the work.
        useful: share of the tokens that are no padding.
        causal: leave out attention scores that no token sees.
    """
    flops = training_flops(spec, samples, sequence, causal=causal)
    return flops * useful / seconds / ranks / 1e12


def flops_utilization(tflops: float, peak: float | None) -> float | None:
    """Return the share of a device's peak.

    Args:
        tflops: TFLOP/s of a rank.
        peak: FLOP/s that its device can reach (``kenotron_models.peak_bf16_flops``); None: unknown.

    Returns:
        A number from 0 to 1, or None where the peak is unknown.
    """
    return tflops * 1e12 / peak if peak else None
