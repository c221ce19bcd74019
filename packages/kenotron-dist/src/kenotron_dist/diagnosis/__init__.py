"""Diagnosis of hangs, failures and divergence. Nothing that only trains needs to read it.

``watchdog`` names the rank that keeps others waiting (``heartbeat``, ``hang_diagnosis``);
``failure_broadcast`` informs peers of a failure; ``comm_recorder`` lists a rank's communications,
and ``divergence`` compares such lists between ranks (with ``transfers`` and ``circular_wait``);
``dry_run`` makes them for a layout of any size, without processes (with ``meta_results``);
``replica_check`` compares values that must be equal. All of it reads ``kenotron_dist.in_flight``,
in which each communication is noted.
"""

from kenotron_dist.diagnosis.comm_recorder import Recorder, compare_collectives, record, shape_axes
from kenotron_dist.diagnosis.divergence import Diverged, first_divergence
from kenotron_dist.diagnosis.dry_run import DryRun, SimulatedRank, dry_run
from kenotron_dist.diagnosis.failure_broadcast import FailureBroadcast
from kenotron_dist.diagnosis.hang_diagnosis import Cause, PeerLost, StallReport
from kenotron_dist.diagnosis.meta_results import MetaResults
from kenotron_dist.diagnosis.replica_check import check_equal, check_replicas
from kenotron_dist.diagnosis.watchdog import Watchdog, watch
from kenotron_dist.in_flight import Entry

__all__ = [
    "Cause",
    "Diverged",
    "DryRun",
    "Entry",
    "FailureBroadcast",
    "MetaResults",
    "PeerLost",
    "Recorder",
    "SimulatedRank",
    "StallReport",
    "Watchdog",
    "check_equal",
    "check_replicas",
    "compare_collectives",
    "dry_run",
    "first_divergence",
    "record",
    "shape_axes",
    "watch",
]
