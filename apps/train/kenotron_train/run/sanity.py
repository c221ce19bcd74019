"""Checks of every step that ``general.ignore_sanity_checks: false`` asks for.

Those of the state are made after the first steps of every model of transformers, too: a plan that
leaves out a parameter with a partial gradient lets its replicas differ.
"""

from __future__ import annotations

from kenotron_data import Batch
from kenotron_dist import gather_objects
from kenotron_dist.diagnosis import check_equal
from kenotron_dist.placement import named_parameters
from kenotron_engine import StepResult
from kenotron_models import TransformersSpec
from kenotron_train.assemble import TrainingRun
from kenotron_train.failures.nonfinite_record import samples_of

UNSYNCHRONISED = (
    " This is a model of transformers: if ranks of tp each have a part of the gradient of the "
    "first one, give it replicated_with_grad_allreduce in model.model_config.tp_plan"
)


def check_batch(training: TrainingRun, batch: Batch, step: int) -> None:
    """Ranks of one data rank must read the same, data ranks something else. Collective.

    Raises ValueError on all ranks, naming step and ranks.
    """
    mesh = training.mesh
    parts = {
        "tokens": batch.tokens_MBS,
        "labels": batch.labels_MBS,
        "positions": batch.positions_MBS,
        "samples": batch.samples_MB,
    }
    for axis in ("tp", "cp", "pp"):
        try:
            check_equal(parts, mesh[axis])
        except ValueError as error:
            raise ValueError(f"step {step}: the batch: {error}") from error
    samples = samples_of(batch, mesh)
    if len(set(samples)) < len(samples):
        own = gather_objects(batch.samples_MB.flatten().tolist(), mesh["dp"])
        twice = sorted({each for each in samples if samples.count(each) > 1})
        ranks = [r for r, part in zip(mesh["dp"].ranks, own, strict=True) if set(part) & {*twice}]
        raise ValueError(
            f"step {step}: sample {twice[0]} and {len(twice) - 1} more are twice in the global "
            f"batch, on ranks {', '.join(map(str, ranks))}: data ranks must read different samples"
        )
    kept = [
        path for path, p in named_parameters(training.model.stack).items() if p.grad is not None
    ]
    if kept:
        raise ValueError(
            f"step {step}: rank {mesh.rank}: {len(kept)} parameters have a gradient before the "
            f"backward, first {kept[0]!r}: does a hook call backward?"
        )


def check_state(training: TrainingRun, result: StepResult, step: int) -> None:
    """Replicas, ties, optimizer state and gradients after an update. Collective over the mesh.

    Raises ValueError naming step, tensor, axis and ranks, FloatingPointError for an update that
    was made with a gradient that is not finite.
    """
    mesh = training.mesh
    if result.nonfinite is not None and not result.skipped:
        raise FloatingPointError(f"step {step}: {result.nonfinite}, and the update was made")
    try:
        training.check_replicas()
        state = training.optimizer.state()
        check_equal(
            {
                layout.name: tensor
                for tensor, layout in state.values()
                if layout.grid == "dense" and all(shard.axis != "tp" for shard in layout.shards)
            },
            mesh["tp"],
        )
    except ValueError as error:
        planned = isinstance(training.plan.spec, TransformersSpec)
        raise ValueError(f"after step {step}: {error}{UNSYNCHRONISED * planned}") from error
