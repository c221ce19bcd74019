"""Build everything a run consists of from its config: model, pipeline, optimizer, data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_data import (
    Batch,
    Cursor,
    Dataset,
    Loader,
    PackedTokens,
    RandomTokens,
    builtin_documents,
    encode,
    split,
    text_documents,
    validation_batches,
)
from kenotron_data.config import EMBEDDED_CORPUS, PretrainDatasetsConfig
from kenotron_dist import Mesh, TensorLayout, named_parameters, parameter_layouts, tie_storages
from kenotron_dist.init import initialize
from kenotron_models import LayerStack, build_decoder, layer_costs, standard_init
from kenotron_optim import (
    GlobalNorm,
    GradAccumulator,
    LRSchedule,
    MuonConfig,
    ParameterGroup,
    SlicedOptimizer,
    parameter_groups,
    parameter_kinds,
    update_rule,
    whole_matrices,
)
from kenotron_optim.config import Kind
from kenotron_pp import Pipeline, Stages
from kenotron_train.config import Config

Records = dict[str, tuple[Tensor, TensorLayout]]
"""What a checkpoint stores: logical name -> (this rank's tensor, its layout)."""
HELD_OUT = 0.1
"""Share of a corpus, its tail, that validation keeps when there is any."""


@dataclass(frozen=True)
class Model:
    """This rank's stage of the model, and what is known of the whole."""

    stack: LayerStack
    """Layers of this stage under their global names."""
    layouts: dict[str, TensorLayout]
    """Layouts of the whole model, by parameter name."""
    kinds: dict[str, frozenset[Kind]]
    """Kinds of the whole model's logical tensors (norms, biases, embeddings)."""
    pipeline: Pipeline


@dataclass(frozen=True)
class Training:
    """Everything one step needs."""

    config: Config
    mesh: Mesh
    model: Model
    grads: GradAccumulator
    norm: GlobalNorm
    groups: list[ParameterGroup]
    optimizer: SlicedOptimizer
    schedule: LRSchedule


def build_model(config: Config, mesh: Mesh) -> Model:
    """Build all layers on meta, keep this stage's, fill them from the seed.

    Collective over the mesh only where groups are made later; no communication here.
    """
    llama, tp = config.llama, mesh["tp"]
    layers = build_decoder(
        llama,
        tp,
        mode=config.parallelism.mode,
        recompute=config.parallelism.recompute_layer,
        vocab_divisible_by=config.model.make_vocab_size_divisible_by,
        dtype=getattr(torch, config.model.dtype),
    )
    schedule = config.parallelism.schedule
    stages = Stages.balanced(layers, layer_costs(llama), mesh.sizes["pp"], schedule)
    whole = LayerStack(layers)
    layouts = parameter_layouts(whole, mesh.sizes, stages.of_parameter)
    kinds = parameter_kinds(whole, layouts)
    stack = LayerStack(stages.own(layers, mesh["pp"].rank))
    stack.to_empty(device=mesh.device)
    tie_storages(stack)
    initialize(
        stack,
        layouts,
        mesh.sizes,
        mesh.coords,
        seed=config.general.seed,
        initializer=standard_init(llama, *config.draws),
    )
    chunks = [[layer for _, layer in chunk] for chunk in stages.chunks(layers, mesh["pp"].rank)]
    own = chunks if schedule.chunks > 1 else chunks[0]
    pipeline = Pipeline(own, mesh["pp"], schedule, mesh.device, mesh.twin("pp"))
    return Model(stack, layouts, kinds, pipeline)


def build_training(config: Config, mesh: Mesh) -> Training:
    """Build the model and everything that updates it. Collective over the mesh."""
    model = build_model(config, mesh)
    optim = config.optimizer
    rule = optim.optimizer_factory
    whole = (
        whole_matrices(model.layouts, model.kinds, mesh.sizes, rule.adamw_named_params)
        if isinstance(rule, MuonConfig)
        else ()
    )
    grads = GradAccumulator(
        named_parameters(model.stack),
        model.layouts,
        mesh,
        whole=whole,
        fp32=optim.accumulate_grad_in_fp32,
        bucket_mb=config.model.ddp_bucket_cap_mb,
    )
    groups = parameter_groups(
        grads.names,
        optim.weight_decay,
        exclude=optim.weight_decay_exclude_named_params,
        exclude_kinds=optim.weight_decay_exclude_kinds,
        kinds=model.kinds,
        lr_multipliers=optim.lr_multipliers,
    )
    optimizer = SlicedOptimizer(grads, update_rule(rule), groups, optim.zero_stage)
    schedule = LRSchedule.from_config(optim.learning_rate_scheduler, config.tokens.train_steps)
    return Training(config, mesh, model, grads, GlobalNorm(grads), groups, optimizer, schedule)


def model_records(model: Model) -> Records:
    """This stage's parameters as checkpoint records: logical name -> (tensor, layout)."""
    return {
        model.layouts[path].name: (parameter.detach(), model.layouts[path])
        for path, parameter in named_parameters(model.stack).items()
    }


@dataclass(frozen=True)
class Corpus:
    """The datasets of one stage of training."""

    training: Dataset
    validation: Dataset | None


def open_corpus(config: Config, stage: int) -> Corpus:
    """Read the text of a data stage, or make up tokens where its dataset is null.

    Raises ValueError when the path is missing, is no text, or holds too little of it.
    """
    source = config.data_stages[stage].data
    vocab, sequence = config.llama.vocab_size, config.tokens.sequence_length
    if source.dataset is None:
        made_up = RandomTokens(vocab, sequence, source.seed)
        held = RandomTokens(vocab, sequence, source.seed + 1, samples=config.global_batch_size)
        return Corpus(made_up, held if config.tokens.limit_val_batches else None)
    key = f"data_stages.{stage}.data.dataset.hf_dataset_or_datasets"
    try:
        documents = _documents(source.dataset)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}: {error}; give a local text file, a folder of them, or {EMBEDDED_CORPUS} "
            "(data sets are not downloaded)"
        ) from error
    tokens = encode(documents, vocab)
    if not config.tokens.limit_val_batches:
        return Corpus(PackedTokens(tokens, sequence), None)
    training, held_out = split(tokens, HELD_OUT)
    return Corpus(PackedTokens(training, sequence), PackedTokens(held_out, sequence))


def open_loader(
    config: Config,
    mesh: Mesh,
    corpus: Corpus,
    cursor: Cursor,
    target_mask: Callable[[Tensor, int], Any] | None = None,
) -> Loader:
    """This data rank's batches of a stage from ``cursor`` on."""
    data = mesh["dp"]
    return Loader(
        corpus.training,
        micro_batch_size=config.tokens.micro_batch_size,
        microbatches=config.tokens.batch_accumulation_per_replica,
        dp_rank=data.rank,
        dp_size=data.size,
        seed=config.data_stages[cursor.stage].data.seed,
        cursor=cursor,
        target_mask=target_mask,
    )


def open_validation(config: Config, mesh: Mesh, dataset: Dataset) -> Iterator[Batch]:
    """This data rank's part of the held-out samples, in order."""
    data = mesh["dp"]
    return validation_batches(
        dataset,
        micro_batch_size=config.tokens.micro_batch_size,
        microbatches=config.tokens.batch_accumulation_per_replica,
        dp_rank=data.rank,
        dp_size=data.size,
    )


def _documents(dataset: PretrainDatasetsConfig) -> list[str]:
    name = dataset.hf_dataset_or_datasets
    return builtin_documents() if name == EMBEDDED_CORPUS else text_documents(Path(name))
