"""Problems of a config that no machine solves: its sizes, and groups of parameters."""

from __future__ import annotations

from kenotron_config import Config
from kenotron_cost.cost_plan import CostPlan, cost_plan
from kenotron_cost.host import beyond_any_machine
from kenotron_cost.stage_sizes import stage_sizes
from kenotron_cost.stage_tensors import StageTensors
from kenotron_optim import parameter_groups


def problems_of(config: Config) -> list[str]:
    """Name all in the model and layout of a config that no machine can run.

    Returns:
        One line for each, `key.path: what was given; what to do`; empty when it can be run.
    """
    problems, plan = list[str](), cost_plan(config)
    try:
        stage_sizes(plan)
        problems += _groups(plan)
    except RuntimeError as error:  # of torch: the bytes of a tensor are no 64-bit number
        problems.append(f"model.model_config: a tensor of this model is too large: {error}")
    except ValueError as error:  # of recompute_memory_gb
        problems.append(str(error))
    return problems or beyond_any_machine(plan)


def _groups(plan: CostPlan) -> list[str]:
    """Find what is wrong with rules that name parameters."""
    optim, layouts = plan.optimizer, StageTensors(plan).layouts(plan)
    names = sorted({layout.name for layout in layouts.values()})
    try:
        parameter_groups(
            names,
            optim.weight_decay,
            exclude=optim.weight_decay_exclude_named_params,
            exclude_kinds=optim.weight_decay_exclude_kinds,
            layouts=layouts,
            lr_multipliers=optim.lr_multipliers,
        )
    except ValueError as error:
        return [f"optimizer: {error}"]
    return []
