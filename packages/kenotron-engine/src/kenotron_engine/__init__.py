"""From models to a training: assembly on any mesh, the objective, the step, evaluation, speed."""

from kenotron_engine.assembly import (
    Layouts,
    Model,
    Records,
    assemble,
    build_model,
    decoder_layers,
)
from kenotron_engine.conditions import (
    Conditions,
    as_trained,
    changed_conditions,
    model_as_trained,
    process_conditions,
)
from kenotron_engine.continuation import continue_texts
from kenotron_engine.cuda_graphs import MicroBatchGraphs
from kenotron_engine.device_read import DeviceRead
from kenotron_engine.domain_losses import DomainObjective
from kenotron_engine.domain_weights import DomainWeights, domain_weights_update
from kenotron_engine.evaluation import Validation, batch_losses, evaluate, perplexity
from kenotron_engine.gathered_tensors import (
    GRADIENT_FLOOR,
    GRADIENT_TOLERANCE,
    Piece,
    Whole,
    differences,
    gradient_bounds,
    gradient_deviations,
    gradients_of,
    join_pieces,
    largest_difference,
    pieces_of,
    replica_deviations,
    slice_pieces,
    weight_pieces,
    write_slices,
)
from kenotron_engine.layer_metrics import LayerMetrics
from kenotron_engine.model_on_mesh import ModelOnMesh
from kenotron_engine.model_plan import ModelPlan
from kenotron_engine.objective import (
    FurtherToken,
    MicroLoss,
    NextToken,
    Objective,
    Parts,
    global_counts,
    objective_of,
    sum_over,
    token_losses,
)
from kenotron_engine.recompute_budget import StageLayers, recompute_within
from kenotron_engine.row_scores import Row, Score, score_rows
from kenotron_engine.sequence import NO_TARGET, CPMode, Share, way_of
from kenotron_engine.stages import stages_of
from kenotron_engine.step import StepResult, gradient, training_step
from kenotron_engine.throughput import flops_utilization, tflops_per_rank
from kenotron_engine.token_scores import TokenScore, score_tokens
from kenotron_engine.training import Training, build_training

__all__ = [
    "GRADIENT_FLOOR",
    "GRADIENT_TOLERANCE",
    "NO_TARGET",
    "CPMode",
    "Conditions",
    "DeviceRead",
    "DomainObjective",
    "DomainWeights",
    "FurtherToken",
    "LayerMetrics",
    "Layouts",
    "MicroBatchGraphs",
    "MicroLoss",
    "Model",
    "ModelOnMesh",
    "ModelPlan",
    "NextToken",
    "Objective",
    "Parts",
    "Piece",
    "Records",
    "Row",
    "Score",
    "Share",
    "StageLayers",
    "StepResult",
    "TokenScore",
    "Training",
    "Validation",
    "Whole",
    "as_trained",
    "assemble",
    "batch_losses",
    "build_model",
    "build_training",
    "changed_conditions",
    "continue_texts",
    "decoder_layers",
    "differences",
    "domain_weights_update",
    "evaluate",
    "flops_utilization",
    "global_counts",
    "gradient",
    "gradient_bounds",
    "gradient_deviations",
    "gradients_of",
    "join_pieces",
    "largest_difference",
    "objective_of",
    "model_as_trained",
    "perplexity",
    "pieces_of",
    "process_conditions",
    "recompute_within",
    "replica_deviations",
    "score_rows",
    "score_tokens",
    "slice_pieces",
    "stages_of",
    "sum_over",
    "tflops_per_rank",
    "token_losses",
    "training_step",
    "way_of",
    "weight_pieces",
    "write_slices",
]
