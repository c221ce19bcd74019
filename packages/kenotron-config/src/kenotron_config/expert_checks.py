"""Rules on experts that need the model and the ranks."""

from collections.abc import Sequence

from kenotron_config.parallelism_section import ParallelismConfig
from kenotron_config.sections import ModelConfig, TokensConfig
from kenotron_data.config import DatasetStageConfig
from kenotron_models import expert_layers
from kenotron_models.families import TransformersConfig
from kenotron_models.layers import ExpertsSpec


def expert_problems(model: ModelConfig, parallelism: ParallelismConfig) -> list[str]:
    """Name contradictions between a model's experts and the ranks."""
    if isinstance(model.model_config, TransformersConfig):
        return []  # it has rules of its own
    known = expert_layers(model.model_config.decoder)
    kinds = [*known.values()]
    return [*_over_ep(kinds, parallelism), *_over_pp(model, kinds, parallelism)]


def chunk_problems(
    parallelism: ParallelismConfig, tokens: TokensConfig, stages: Sequence[DatasetStageConfig]
) -> list[str]:
    """Name more parts of a rank's tokens than there are tokens."""
    lengths = [stage.sequence_length or tokens.sequence_length for stage in stages]
    shortest = min(lengths, default=tokens.sequence_length)
    own = max(1, tokens.micro_batch_size * shortest // (parallelism.cp * parallelism.tp))
    if parallelism.ep_chunks <= own:
        return []
    return [
        f"parallelism.ep_chunks: {parallelism.ep_chunks} was given; a rank routes {own} tokens of "
        "a micro-batch, which cannot be cut into more parts; 2 to 8 are enough"
    ]


def _over_ep(kinds: list[ExpertsSpec], parallelism: ParallelismConfig) -> list[str]:
    """Each rank of ep has as many experts."""
    if (ep := parallelism.ep) == 1:
        return []
    if not kinds:
        return [f"parallelism.ep: {ep} was given; the model has no experts: set it to 1"]
    return [
        f"parallelism.ep: {ep} was given; it must divide the {count} experts of a layer; change "
        "one of them"
        for count in sorted({kind.router.experts for kind in kinds})
        if count % ep
    ]


def _over_pp(
    model: ModelConfig, kinds: list[ExpertsSpec], parallelism: ParallelismConfig
) -> list[str]:
    """A loss of all layers together needs them on one rank, in one part."""
    stages = parallelism.pp * parallelism.schedule.chunks
    if stages == 1 or not any(kind.router.balances_all_layers for kind in kinds):
        return []
    section = "" if getattr(model.model_config, "moe_config", None) is None else "moe_config."
    return [
        f"model.model_config.{section}router_aux_loss_type: all_layers was given with "
        f"parallelism.pp {parallelism.pp} and pp_engine {parallelism.pp_engine}; this loss needs "
        "all layers in one part of the model: choose micro_batch or sample, or pp 1 and 1f1b"
    ]
