"""The part of a config that memory and transfers follow from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from kenotron_config import Config, Device, ParallelismConfig
from kenotron_dist import MeshConfig
from kenotron_engine import CPMode, way_of
from kenotron_models import DecoderSpec, TransformersSpec, virtual_shards
from kenotron_models.adapters import AdapterSpec
from kenotron_models.block_costs import TransformersBlock, transformers_blocks
from kenotron_models.layers import BlockSpec
from kenotron_optim import OptimizerConfig, SampleLeaves


@dataclass(frozen=True, kw_only=True)
class CostPlan:
    """Values that memory and transfers of a run follow from."""

    spec: DecoderSpec
    dtype: torch.dtype
    vocab_divisible_by: int
    parallelism: ParallelismConfig
    cp_mode: CPMode
    """Attention over cp."""
    optimizer: OptimizerConfig
    sequence: int
    """Tokens of the longest samples."""
    micro_batch_size: int
    microbatches: int
    """Micro-batches of a data rank in the largest batch of the training."""
    device: Device
    bucket_mb: int | None = None
    """MiB of a bucket of gradients; None: the default."""
    adapter: AdapterSpec | None = None
    cuda_graph: bool = False
    """Whether a CUDA graph repeats forward and backward."""
    virtual_shards: int = 1
    """Parts of a layer over tp in the reproducible mode."""
    virtual_chunks: int | None = None
    """Parts of a sample in the reproducible mode, whose micro-batches are samples; None: it is
    off."""

    @property
    def cp_way(self) -> Literal["ring", "gather", "ulysses"]:
        """Method of attention over cp."""
        return way_of(self.cp_mode, self.spec, self.parallelism.grid, self.virtual_shards)

    @cached_property
    def leaves(self) -> SampleLeaves | None:
        """Leaves of the tree in which the reproducible mode adds gradients."""
        if self.virtual_chunks is None:
            return None
        sizes = self.parallelism
        virtual = {"chunks": self.virtual_chunks, "shards": self.virtual_shards}
        return SampleLeaves(self.microbatches, sizes.dp, sizes.cp, tp=sizes.tp, **virtual)

    def adapter_of(self, block: int) -> AdapterSpec | None:
        """Return the adapters of a block, named as those of layer 0."""
        return None if self.adapter is None else self.adapter.of_layer(block)

    @cached_property
    def row_tokens(self) -> int:
        """Tokens of a row on one rank of cp, padding included."""
        return self.cp_mode.cut(self.sequence, self.parallelism.cp).local

    @cached_property
    def on_accelerator(self) -> bool:
        """True where sizes are those of an accelerator, for which half precision is meant."""
        if self.device == "cpu":
            return False
        return torch.accelerator.is_available() or self.dtype != torch.float32


def measured_blocks(spec: DecoderSpec) -> tuple[BlockSpec | TransformersBlock, ...]:
    """Return the layers of a model whose activations and work are measured; blocks of one kind are
    equal. None where a model of transformers is one piece."""
    return transformers_blocks(spec) if isinstance(spec, TransformersSpec) else spec.trained_blocks


def sizes_of(spec: DecoderSpec) -> tuple[int, ...]:
    """Return sizes by which figures of another model are refused."""
    return spec.hidden_size, spec.vocab_size, spec.num_hidden_layers


def check_measured(spec: DecoderSpec) -> None:
    """Refuse a model that ``measured_blocks`` has nothing of.

    Raises:
        ValueError: it is one of transformers in one piece, or none that can be trained.
    """
    if not measured_blocks(spec):
        raise ValueError(
            "model.model_config: transformers computes this model in one piece, of which neither "
            "activations nor work are counted: see what is known with --check"
        )


def mesh_sizes(parallel: ParallelismConfig) -> MeshConfig:
    """Return the sizes of the axes."""
    return MeshConfig(**parallel.grid, ep=parallel.ep)


def cost_plan(config: Config) -> CostPlan:
    """Return what the memory and the transfers of a config's run follow from."""
    parallelism, model, general = config.parallelism, config.model, config.general
    rows = config.tokens.micro_batch_size
    samples = rows if general.reproducible else 1  # of a micro-batch, each passed by itself
    return CostPlan(
        spec=config.decoder,
        dtype=getattr(torch, model.dtype),
        vocab_divisible_by=model.make_vocab_size_divisible_by,
        parallelism=parallelism,
        cp_mode=CPMode(*config.cp_way, parallelism.cp_layout, parallelism.cp_block),
        optimizer=config.optimizer,
        sequence=config.longest_sequence,
        micro_batch_size=rows // samples,
        microbatches=config.batches.most_microbatches * samples,
        device=general.device,
        bucket_mb=model.ddp_bucket_cap_mb,
        adapter=config.adapter,
        cuda_graph=model.cuda_graph,
        virtual_shards=_virtual_shards(config),
        virtual_chunks=general.reproducible_max_cp if general.reproducible else None,
    )


def _virtual_shards(config: Config) -> int:
    """Return the virtual shards over tp of a reproducible run; without the mode there is one."""
    general, spec = config.general, config.decoder
    if not general.reproducible or isinstance(spec, TransformersSpec):
        return 1
    return virtual_shards(spec, general.reproducible_max_tp)
