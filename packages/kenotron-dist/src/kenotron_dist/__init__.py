"""Meshes, collectives, placements and random streams: who talks to whom."""

from kenotron_dist.agreement import check_equal, check_replicas
from kenotron_dist.boxes import Box, GradientSum, gradient_sums, local_boxes, local_shape
from kenotron_dist.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
)
from kenotron_dist.defer import DeferredGradients, WeightQueue, deferring
from kenotron_dist.distress import Distress
from kenotron_dist.divergence import Diverged
from kenotron_dist.environment import World, resolve
from kenotron_dist.gradients import clip_gradients, sum_gradients
from kenotron_dist.handle import Handle
from kenotron_dist.launch import from_env, shutdown, tell_launcher
from kenotron_dist.leave import STALLED, leave
from kenotron_dist.mesh import Axis, Mesh, MeshConfig
from kenotron_dist.notes import Notes
from kenotron_dist.objects import broadcast_object, gather_objects
from kenotron_dist.placement import (
    Chunk,
    FlatSlice,
    Partial,
    Placement,
    Placements,
    Shard,
    TensorLayout,
    Tie,
    named_parameters,
    named_placements,
    parameter_layouts,
    tie_storages,
)
from kenotron_dist.pulse import Entry
from kenotron_dist.rank_error import RankError
from kenotron_dist.recorder import Recorder, compare_collectives, record
from kenotron_dist.rows import gather_pieces, gather_rows, sum_rows
from kenotron_dist.signals import Signals, listening
from kenotron_dist.spawn import spawn
from kenotron_dist.stall import Cause, PeerLost, StallReport
from kenotron_dist.start import first_cause, first_to_say, start
from kenotron_dist.statistics import (
    Statistics,
    merge,
    moments,
    no_moments,
    statistics_of,
    sum_moments,
    tensor_moments,
)
from kenotron_dist.transfers import Route, receive, send, shift
from kenotron_dist.watchdog import Watchdog, watch

__all__ = [
    "record",
    "compare_collectives",
    "Recorder",
    "Entry",
    "Diverged",
    "STALLED",
    "Axis",
    "Box",
    "Cause",
    "Chunk",
    "DeferredGradients",
    "Distress",
    "FlatSlice",
    "GradientSum",
    "Handle",
    "Mesh",
    "MeshConfig",
    "Notes",
    "Partial",
    "PeerLost",
    "Placement",
    "Placements",
    "RankError",
    "Route",
    "Shard",
    "Signals",
    "StallReport",
    "Statistics",
    "TensorLayout",
    "Tie",
    "Watchdog",
    "WeightQueue",
    "World",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "check_equal",
    "check_replicas",
    "clip_gradients",
    "deferring",
    "first_cause",
    "first_to_say",
    "from_env",
    "gather_objects",
    "gather_pieces",
    "gather_rows",
    "gradient_sums",
    "leave",
    "listening",
    "local_boxes",
    "local_shape",
    "merge",
    "moments",
    "named_parameters",
    "named_placements",
    "no_moments",
    "parameter_layouts",
    "receive",
    "reduce_scatter",
    "resolve",
    "send",
    "shift",
    "shutdown",
    "spawn",
    "start",
    "statistics_of",
    "sum_gradients",
    "sum_moments",
    "sum_rows",
    "tell_launcher",
    "tensor_moments",
    "tie_storages",
    "watch",
]
