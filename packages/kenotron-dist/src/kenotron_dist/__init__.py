"""Meshes, collectives, placements and random streams: who talks to whom."""

from kenotron_dist.axis import Axis
from kenotron_dist.background_mesh import background_mesh
from kenotron_dist.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
)
from kenotron_dist.cores import usable_cores
from kenotron_dist.counted_mesh import counted_mesh
from kenotron_dist.defer import DeferredGradients, WeightQueue, deferring
from kenotron_dist.device import gpu_problem, to_device, visible_gpus
from kenotron_dist.environment import World, resolve
from kenotron_dist.exit_process import STALLED, leave
from kenotron_dist.fake_world import host_numbers
from kenotron_dist.gradients import clip_gradients, sum_gradients
from kenotron_dist.grid import DATA_AXES, coords_of
from kenotron_dist.grid_view import GridView, ViewOf, views_of
from kenotron_dist.handle import Handle, settle
from kenotron_dist.inplace_collectives import gather_pieces, gather_rows, sum_rows
from kenotron_dist.launch import from_env
from kenotron_dist.mesh import Mesh, MeshConfig
from kenotron_dist.objects import broadcast_object, gather_objects
from kenotron_dist.page_locked import page_locked
from kenotron_dist.point_to_point import Route, receive, send, shift
from kenotron_dist.rank_error import RankError
from kenotron_dist.roles import MATRICES, Role, Roles, declare_roles, named_roles
from kenotron_dist.shutdown import shutdown
from kenotron_dist.signals import Signals, listening
from kenotron_dist.signed_store import MessageRefused
from kenotron_dist.spawn import spawn
from kenotron_dist.start import explained, first_cause, first_to_say, start
from kenotron_dist.store_messages import StoreMessages
from kenotron_dist.sum_tree import tree_sum, wide_tree_sum

__all__ = [
    "Axis",
    "DATA_AXES",
    "DeferredGradients",
    "GridView",
    "Handle",
    "MATRICES",
    "Mesh",
    "MeshConfig",
    "MessageRefused",
    "StoreMessages",
    "RankError",
    "Role",
    "Roles",
    "Route",
    "STALLED",
    "Signals",
    "ViewOf",
    "WeightQueue",
    "World",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "background_mesh",
    "barrier",
    "broadcast",
    "broadcast_object",
    "clip_gradients",
    "coords_of",
    "counted_mesh",
    "declare_roles",
    "deferring",
    "explained",
    "first_cause",
    "first_to_say",
    "from_env",
    "gather_objects",
    "gather_pieces",
    "gather_rows",
    "gpu_problem",
    "host_numbers",
    "leave",
    "listening",
    "named_roles",
    "page_locked",
    "receive",
    "reduce_scatter",
    "resolve",
    "send",
    "settle",
    "shift",
    "shutdown",
    "spawn",
    "start",
    "sum_gradients",
    "sum_rows",
    "to_device",
    "tree_sum",
    "wide_tree_sum",
    "usable_cores",
    "views_of",
    "visible_gpus",
]
