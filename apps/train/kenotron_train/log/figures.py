"""Measurements of a step: the numbers behind console lines, metrics.jsonl and trackers."""

from __future__ import annotations

import math
import os
import resource
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from kenotron_command import or_null, with_nulls
from kenotron_engine import (
    ModelPlan,
    StepResult,
    Validation,
    flops_utilization,
    perplexity,
    tflops_per_rank,
)
from kenotron_models import peak_bf16_flops
from kenotron_train.data_plan import DataPlan
from kenotron_train.log.rank_times import SlowestRank
from kenotron_train.log.stopwatch import StepTimes

PEAK_VARIABLE = "KENOTRON_PEAK_TFLOPS"
"""Environment variable: bf16 TFLOP/s of a device that ``kenotron_models`` does not list."""


@dataclass(frozen=True)
class UsedMemory:
    """Memory of a rank in a step, in GB (1e9 bytes)."""

    peak: float
    """Most that tensors took on its accelerator; of the process since it began, on a CPU."""
    reserved: float | None = None
    """Most that torch took from its accelerator; None on a CPU."""
    device: float | None = None
    """Memory in use on its accelerator, buffers of NCCL, contexts and other processes included;
    None on a CPU."""

    @staticmethod
    def of_step(device: torch.device) -> UsedMemory:
        """Return the memory since the last call, and begin to measure the next step's peaks."""
        if device.type == "cpu":
            # ru_maxrss is in bytes on macOS and in KiB on Linux.
            unit = 1 if sys.platform == "darwin" else 1024
            return UsedMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9)
        free, total = torch.get_device_module(device).mem_get_info(device)
        found = UsedMemory(
            torch.accelerator.max_memory_allocated(device) / 1e9,
            torch.accelerator.max_memory_reserved(device) / 1e9,
            (total - free) / 1e9,
        )
        torch.accelerator.reset_peak_memory_stats(device)
        return found


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """A step and what it took. Tokens are counted without padding."""

    step: int
    result: StepResult
    times: StepTimes
    tokens: int
    """Tokens of the global batch that are no padding."""
    samples: int
    """Samples of the global batch."""
    consumed_tokens: int
    """Positions read since the training began, padding included."""
    consumed_samples: int
    memory: UsedMemory
    """Of this rank."""
    validation: Validation | None = None
    evaluation: dict[str, Any] | None = None
    """Results of evaluations, as metrics.jsonl has them; None in most steps."""
    layers: dict[str, float] = field(default_factory=dict)
    """Statistics of layers by name; empty in most steps."""
    sent: dict[str, int] | None = None
    """Bytes that left this rank in the step, by mesh axis; None where they are not counted."""
    state: dict[str, Any] = field(default_factory=dict)
    """Values that decide about the next step, as ``StepState.figures``."""
    slowest: SlowestRank | None = None
    """Rank that the others wait for, at the interval of the log; of the steps before this one."""


class Meter:
    """Works out speeds. ``peak``: bf16 FLOP/s of a device, None where it is not known; ``ranks``:
    processes that train together.

    Raises ValueError for an environment variable that is no positive number.
    """

    def __init__(self, model: ModelPlan, data: DataPlan, ranks: int, device: torch.device) -> None:
        self._spec, self._data, self.ranks = model.spec, data, ranks
        self.peak = _peak(device) if model.dtype == torch.bfloat16 else None

    def sequence(self, step: int) -> int:
        """Tokens of a sample in a step."""
        return self._data.sequences[self._data.stage_at(step)]

    def tokens_per_second(self, figures: StepFigures) -> float:
        """Tokens a second of all ranks, padding not counted."""
        return figures.tokens / figures.times.step

    def tflops(self, figures: StepFigures, *, causal: bool = False) -> float:
        """TFLOP/s of each rank. ``causal``: scores that no token sees are not counted."""
        length = self.sequence(figures.step)
        return tflops_per_rank(
            self._spec,
            figures.samples,
            length,
            seconds=figures.times.step,
            ranks=self.ranks,
            useful=figures.tokens / (figures.samples * length),
            causal=causal,
        )

    def mfu(self, figures: StepFigures, *, causal: bool = False) -> float | None:
        """Share of the device's dense bf16 peak; None where that is not known."""
        return flops_utilization(self.tflops(figures, causal=causal), self.peak)

    def metrics(self, figures: StepFigures) -> dict[str, Any]:
        """The object that metrics.jsonl has of a step: JSON, nan and infinity as null."""
        result, times = figures.result, figures.times
        speed, memory = self.tokens_per_second(figures), figures.memory
        found: dict[str, Any] = {
            "step": figures.step,
            "lm_loss": or_null(result.loss),
            "grad_norm": or_null(result.grad_norm),
            "lr": result.lr,
            "consumed_tokens": figures.consumed_tokens,
            "consumed_samples": figures.consumed_samples,
            "tokens": figures.tokens,
            "tokens_per_sec": speed,
            "tokens_per_sec_per_gpu": speed / self.ranks,
            "step_time_s": times.step,
            "data_wait_s": times.data_wait,
            "save_blocked_s": times.save_blocked,
            "save_after_s": times.save_after,
            "communication_s": times.communication,
            "model_tflops_per_gpu": self.tflops(figures),
            "model_tflops_per_gpu_causal": self.tflops(figures, causal=True),
            "mfu": self.mfu(figures),
            "mfu_causal": self.mfu(figures, causal=True),
            "memory_gb": memory.peak,
        }
        # Keys below are written only where a step has them, to keep lines short.
        if memory.reserved is not None:
            found["memory_reserved_gb"] = memory.reserved
        if memory.device is not None:
            found["memory_device_gb"] = memory.device
        if result.nonfinite is not None:
            found |= {"skipped": result.skipped, "nonfinite": str(result.nonfinite)}
        if result.reason:
            found |= {"skipped": True, "spike": result.reason}
        found |= with_nulls({**result.figures, **figures.state})
        if figures.validation is not None:
            found |= _validation(figures.validation)
        if figures.evaluation is not None:
            found["evaluation"] = figures.evaluation
        if figures.sent is not None:
            found["communication_bytes"] = figures.sent
        if figures.slowest is not None:
            found["slowest_rank"] = figures.slowest.to_metrics()
        if figures.layers:
            found["layers"] = with_nulls(figures.layers)
        return found


def _validation(validation: Validation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "validation_loss": or_null(validation.loss),
        "validation_perplexity": or_null(validation.perplexity),
    }
    if validation.averaged is not None:
        found["validation_loss_averaged"] = or_null(validation.averaged)
    if len(validation.sources) > 1:
        found["validation_sources"] = {
            name: {"loss": or_null(loss), "perplexity": or_null(perplexity(loss))}
            for name, loss in validation.sources.items()
        }
    return found


def named_peak() -> float | None:
    """bf16 FLOP/s that the environment names. Raises ValueError unless they are above 0."""
    given = os.environ.get(PEAK_VARIABLE)
    if not given:
        return None
    try:
        peak = float(given) * 1e12
    except ValueError:
        peak = 0.0
    if not 0 < peak < math.inf:
        raise ValueError(
            f"{PEAK_VARIABLE}={given}: it must be a positive number, the bf16 TFLOP/s of a "
            "device; unset it to have known devices looked up"
        )
    return peak


def _peak(device: torch.device) -> float | None:
    if (named := named_peak()) is not None or device.type == "cpu":
        return named
    return peak_bf16_flops(torch.get_device_module(device).get_device_name(device))
