"""Bytes, transfers and seconds of a training on any layout, from the code that trains."""

from kenotron_cost.cost_plan import CostPlan, cost_plan, mesh_sizes
from kenotron_cost.host import (
    MachineMemory,
    check_machine,
    device_memory,
    host_cautions,
    machine_cautions,
    shortage,
    without_gpus,
)
from kenotron_cost.knobs import SEARCH_KEYS, SEARCH_REMARKS, search_names
from kenotron_cost.layouts import (
    RECOMPUTES,
    PlannedLayout,
    Refused,
    legal_layouts,
    own_layout,
    with_layout,
)
from kenotron_cost.machine_file import Machine, MachineNumber, known_machines, machine_named
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.memory import NOT_COUNTED, PeakMemory, instants, peak_memory
from kenotron_cost.model_folder import with_model
from kenotron_cost.problems import problems_of
from kenotron_cost.recomputed import recomputed
from kenotron_cost.run_plan import Planned, PlannedRun, plan_of_run
from kenotron_cost.search import Estimate, Found, Planner
from kenotron_cost.stage_sizes import StageSize, stage_sizes
from kenotron_cost.state_bytes import OFFLOADED, offloaded, state_of_rank
from kenotron_cost.step_time import described_parts

__all__ = [
    "OFFLOADED",
    "offloaded",
    "state_of_rank",
    "MachineMemory",
    "device_memory",
    "shortage",
    "described_parts",
    "instants",
    "RECOMPUTES",
    "SEARCH_KEYS",
    "SEARCH_REMARKS",
    "search_names",
    "NOT_COUNTED",
    "CostPlan",
    "Estimate",
    "Found",
    "Machine",
    "MachineNumber",
    "MeasuredModel",
    "PeakMemory",
    "Planned",
    "PlannedLayout",
    "PlannedRun",
    "Planner",
    "Refused",
    "StageSize",
    "check_machine",
    "cost_plan",
    "host_cautions",
    "known_machines",
    "legal_layouts",
    "machine_cautions",
    "machine_named",
    "mesh_sizes",
    "own_layout",
    "peak_memory",
    "plan_of_run",
    "problems_of",
    "recomputed",
    "stage_sizes",
    "with_layout",
    "with_model",
    "without_gpus",
]
