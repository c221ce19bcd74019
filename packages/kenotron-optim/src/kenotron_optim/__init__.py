"""From the last backward to updated parameters: accumulation, reduction, clipping, ZeRO-1."""

from kenotron_optim.accumulate import GradAccumulator, Slices
from kenotron_optim.clip import GlobalNorm, clip_
from kenotron_optim.config import AdamWConfig, LRSchedulerConfig, OptimizerConfig
from kenotron_optim.groups import ParameterGroup, decay_groups
from kenotron_optim.lr import LRSchedule, learning_rate
from kenotron_optim.zero1 import SlicedOptimizer

__all__ = [
    "AdamWConfig",
    "GlobalNorm",
    "GradAccumulator",
    "LRSchedule",
    "LRSchedulerConfig",
    "OptimizerConfig",
    "ParameterGroup",
    "SlicedOptimizer",
    "Slices",
    "clip_",
    "decay_groups",
    "learning_rate",
]
