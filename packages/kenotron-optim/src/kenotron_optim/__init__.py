"""From the last backward to updated parameters: accumulation, reduction, clipping, ZeRO-1."""

from kenotron_optim.accumulate import GradAccumulator, Slices
from kenotron_optim.clip import GlobalNorm, clip_, clip_coefficient
from kenotron_optim.config import (
    LRMultiplier,
    LRSchedulerConfig,
    NonFinitePolicy,
    OptimizerConfig,
    shard_ranks_problems,
)
from kenotron_optim.exact_norm import ExactNorm
from kenotron_optim.frozen_slices import zero3_cuts
from kenotron_optim.gradient_buffers import Reduce
from kenotron_optim.groups import ParameterGroup, decay_groups, describe_groups, parameter_groups
from kenotron_optim.loss_scale import LossScale, unscale_
from kenotron_optim.loss_scale_config import LossScaleConfig
from kenotron_optim.lr import LRSchedule, learning_rate
from kenotron_optim.muon_params import MatrixPart, matrix_parts
from kenotron_optim.nonfinite import NonFinite, NonFiniteStep, allows_update, find_nonfinite
from kenotron_optim.parameter_shards import Regather
from kenotron_optim.rank_costs import (
    Held,
    bucket_bytes,
    data_bytes,
    held_tensors,
    slice_ranks,
    state_bytes,
)
from kenotron_optim.rule_config import AdamWConfig, MuonConfig, SGDConfig
from kenotron_optim.sample_gradients import SampleGradients
from kenotron_optim.sample_leaves import SampleLeaves
from kenotron_optim.sample_order_checks import unordered_settings
from kenotron_optim.sliced_optimizer import SlicedOptimizer
from kenotron_optim.spikes import SpikeConfig, SpikeGuard
from kenotron_optim.step_state import Policy, StepOutcome, StepState
from kenotron_optim.update_rule import update_rule
from kenotron_optim.weight_average_config import WeightAverageConfig
from kenotron_optim.weight_averages import AVERAGE, WeightAverages
from kenotron_optim.zero_optimizer import ZeroOptimizer

__all__ = [
    "AVERAGE",
    "AdamWConfig",
    "ExactNorm",
    "GlobalNorm",
    "GradAccumulator",
    "Held",
    "LRMultiplier",
    "LRSchedule",
    "LRSchedulerConfig",
    "LossScale",
    "LossScaleConfig",
    "MatrixPart",
    "MuonConfig",
    "NonFinite",
    "NonFinitePolicy",
    "NonFiniteStep",
    "OptimizerConfig",
    "ParameterGroup",
    "Policy",
    "Reduce",
    "Regather",
    "SGDConfig",
    "SampleGradients",
    "SampleLeaves",
    "SlicedOptimizer",
    "Slices",
    "SpikeConfig",
    "SpikeGuard",
    "StepOutcome",
    "StepState",
    "WeightAverageConfig",
    "WeightAverages",
    "ZeroOptimizer",
    "allows_update",
    "bucket_bytes",
    "clip_",
    "clip_coefficient",
    "data_bytes",
    "decay_groups",
    "describe_groups",
    "find_nonfinite",
    "held_tensors",
    "learning_rate",
    "matrix_parts",
    "parameter_groups",
    "shard_ranks_problems",
    "slice_ranks",
    "state_bytes",
    "unordered_settings",
    "unscale_",
    "update_rule",
    "zero3_cuts",
]
