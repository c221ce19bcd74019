"""What decoder layers keep for the backward, and which of them compute it again.

Nothing is allocated: layers are built on torch's meta device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kenotron_config import Config, ParallelismConfig
from kenotron_dist import Axis, MeshConfig, TensorLayout, parameter_layouts
from kenotron_engine import CPMode, StageLayers, recompute_within, stages_of
from kenotron_models import (
    Build,
    LayerStack,
    Recompute,
    build_decoder,
    expert_layers,
    kept_bytes,
    layer_costs,
)
from kenotron_pp import NamedLayers, simulate


def cp_mode_of(config: Config) -> CPMode:
    """Return how attention runs over cp."""
    sizes = config.parallelism
    return CPMode(*config.cp_way, sizes.cp_layout, sizes.cp_block)


def mesh_sizes(parallel: ParallelismConfig) -> MeshConfig:
    """Return the sizes of the axes."""
    return MeshConfig(**parallel.grid, ep=parallel.ep)


def row_tokens(config: Config) -> int:
    """Return the tokens of a row on one rank of cp, padding included."""
    cut = cp_mode_of(config).cut(config.longest_sequence, config.parallelism.cp)
    return cut.local


def layer_activation(config: Config, layer: int, again: Recompute) -> int:
    """Return the bytes that one rank keeps of a micro-batch for the backward of a block.

    The block of the module of `mtp` counts as one more layer.
    """
    spec, parallel = config.decoder, config.parallelism
    return kept_bytes(
        spec.trained_blocks[layer],
        spec.hidden_size,
        config.tokens.micro_batch_size,
        row_tokens(config),
        tp=parallel.tp,
        mode=parallel.mode,
        dtype=getattr(torch, config.model.dtype),
        residual=torch.float32 if spec.residual_in_fp32 else None,
        recompute=again,
        fused_norms=_fuses_norms(config.general.device, config.model.dtype),
    )


@dataclass(frozen=True)
class Stages:
    """The layers of each pipeline rank, in one of its tp and dp ranks, on meta."""

    ranks: list[tuple[NamedLayers, StageLayers]]
    """All of them, and which decoder layers are among them."""
    layouts: dict[str, TensorLayout]
    """Of the whole model's parameters."""


def layers_by_rank(config: Config) -> Stages:
    """Return the layers of each pipeline rank."""
    parallel, spec = config.parallelism, config.decoder
    tp, ep = (  # meta tensors are not communicated
        Axis(name, 0, tuple(range(getattr(parallel, name)))) for name in ("tp", "ep")
    )
    layers = build_decoder(
        spec,
        Build(tp, parallel.mode, dtype=getattr(torch, config.model.dtype), ep=ep),
        vocab_divisible_by=config.model.make_vocab_size_divisible_by,
    )
    schedule = parallel.schedule
    stages = stages_of(layers, layer_costs(spec), spec.stage_starts, parallel.pp, schedule)
    layouts = parameter_layouts(
        LayerStack(layers), mesh_sizes(parallel).axis_sizes, stages.of_parameter
    )
    trace = simulate(schedule, parallel.pp, config.batches.most_microbatches)
    found: list[tuple[NamedLayers, StageLayers]] = []
    for rank in range(parallel.pp):
        own = stages.own(layers, rank)
        numbers = [int(name.split(".")[1]) for name, _ in own if name.startswith("layers.")]
        numbers += [spec.num_hidden_layers for name, _ in own if name == "mtp.0"]
        live = trace.peak_live[rank] / max(1, schedule.chunks)
        found.append((own, StageLayers(numbers, live)))
    return Stages(found, layouts)


def recomputed(config: Config) -> tuple[Recompute, ...]:
    """Return what each decoder layer computes again in the backward, then the module of `mtp`.

    Raises:
        ValueError: ``parallelism.recompute_memory_gb`` is too small for any choice.
    """
    parallel, depth = config.parallelism, config.decoder.num_hidden_layers
    if (room := parallel.recompute_memory_gb) is None:
        again = [parallel.recompute_of(layer) for layer in range(depth)]
        experts = expert_layers(config.decoder) if parallel.moe_layer_recompute else ()
        found: list[Recompute] = [
            "feed_forward" if way == "none" and layer in experts else way
            for layer, way in enumerate(again)
        ]
        return (*found, *found[-1:] * len(config.decoder.mtp_blocks))
    stages = [stage for _, stage in layers_by_rank(config).ranks]
    try:
        return recompute_within(
            room * 1e9, stages, lambda layer, again: layer_activation(config, layer, again)
        )
    except ValueError as error:
        raise ValueError(
            f"parallelism.recompute_memory_gb: {error}: raise it, lower tokens.micro_batch_size, "
            "or use more tp, cp or pp"
        ) from error


def _fuses_norms(device: str, dtype: str) -> bool:
    """Whether RMSNorm is one kernel: on an accelerator, for which half precision is meant."""
    if device == "cpu":
        return False
    return torch.accelerator.is_available() or dtype != "float32"
