"""Preview of a config without training: layout, sizes and memory of every pipeline rank.

Nothing is started and nothing is allocated: layers are built on torch's meta device.
"""

from __future__ import annotations

import math
from pathlib import Path

from kenotron_command import short
from kenotron_config import Config, Mask, ParallelismConfig, cautions, dump_config, ignored_keys
from kenotron_cost import (
    CostPlan,
    MeasuredModel,
    cost_plan,
    machine_cautions,
    offloaded,
    peak_memory,
    problems_of,
    recomputed,
    stage_sizes,
    without_gpus,
)
from kenotron_data.config import EMBEDDED_CORPUS, HubDatasetsConfig, NanosetDatasetsConfig
from kenotron_models import TransformersSpec, describe, parameter_count
from kenotron_train.evaluate.evaluator import check_evaluate
from kenotron_train.log.instrumentation import check_watching
from kenotron_train.log.parametrisation import parametrisation
from kenotron_train.run.initial import other_model

GB = 1e9


def preview(config: Config) -> str:
    """The resolved config, then the layout, sizes, an estimate of memory, and what is ignored."""
    sections = [dump_config(config).rstrip(), _layout(config)]
    plan, general, model = cost_plan(config), config.general, config.model
    problems, warnings = cannot_run(config), [*cautions(config), *missing_paths(config)]
    warnings += other_model(model, plan.spec)
    # These sections build layers on device meta, which needs a config that can be run.
    if not problems:
        sections += [
            describe(config.decoder, config.parallelism.ep),
            *parametrisation(config.multipliers, config.scales),
            _memory(plan),
        ]
        problems = without_gpus(general.device, cuda_graph=model.cuda_graph)
        warnings += [] if problems else machine_cautions(plan)
    sections += _notes("Ignored", ignored_keys(config))
    sections += _notes("Warning", warnings)
    sections += _notes("Cannot be run", problems)
    return Mask(config)("\n\n".join(sections))


def cannot_run(config: Config) -> list[str]:
    """Name all for which no machine can run this config with what is installed here.

    Returns:
        One line for each, `key.path: what was given; what to do`; empty when it can be run.
    """
    problems = problems_of(config)
    try:
        check_watching(config.logging.trackers, config.general.benchmark_csv_path)
        check_evaluate(config.evaluate)
    except (ValueError, ImportError) as error:
        problems += str(error).splitlines()
    return problems


def missing_paths(config: Config) -> list[str]:
    """Paths that the config names and that are not there now: a run may be elsewhere."""
    named = {
        "checkpoints.resume_checkpoint_path": config.checkpoints.resume_checkpoint_path,
        "model.adapter.path": getattr(config.model.adapter, "path", None),
        "model.init_method.path": getattr(config.model.init_method, "path", None),
    }
    if config.doremi is not None:
        key = "doremi.ref_model_resume_checkpoint_path"
        named[key] = config.doremi.ref_model_resume_checkpoint_path
    places = [(key, path) for key, path in named.items() if path is not None]
    tokenizer = config.tokenizer.tokenizer_name_or_path
    if tokenizer is not None and _is_path(tokenizer):
        places.append(("tokenizer.tokenizer_name_or_path", tokenizer))
    for number in range(len(config.data_stages)):
        key, section = f"data_stages.{number}.data.dataset", config.section_of(number)
        if isinstance(section, HubDatasetsConfig):
            key += ".hf_dataset_or_datasets"
            places += [(key, name) for name in section.fractions if _is_path(name)]
        elif isinstance(section, NanosetDatasetsConfig):
            places += [(f"{key}.dataset_folder", name) for name in section.folders]
    return [
        f"{key}: {path} does not exist here"
        for key, path in places
        if "://" not in path and not Path(path).exists()
    ]


def _is_path(name: str) -> bool:
    """Return whether a name is that of a file or folder rather than one of the hub."""
    built_in = name.partition("/")[0] == EMBEDDED_CORPUS
    return not built_in and ("/" in name or "." in name)


def _layout(config: Config) -> str:
    sizes, stages = config.parallelism, range(len(config.data_stages))
    sizes_of = config.batches
    samples = " or ".join(f"{n:,}" for n in sorted({sizes_of.full(stage) for stage in stages}))
    tokens = {sizes_of.full(stage) * config.sequence_of(stage) for stage in stages}
    batches = f"{samples} samples, {' or '.join(f'{n:,}' for n in sorted(tokens))} tokens"
    if (ramp := sizes_of.ramp) is not None:
        batches += f", from {ramp.start} samples on by {ramp.increment} in {ramp.samples:,} samples"
    total = sum(sizes_of.samples(stage) * config.sequence_of(stage) for stage in stages)
    lines = [
        f"Layout: {config.world_size} processes = {sizes.described}; rank = {_rank_of(sizes)}",
        f"Global batch: {batches}; "
        f"{config.tokens.train_steps:,} steps, {short(total)} tokens in all",
    ]
    if sizes.pp > 1:
        chunks = sizes.schedule.chunks
        parts = f"{chunks} part{'s' * (chunks != 1)} of the model a rank"
        lines.append(f"Pipeline: {sizes.pp_engine}, {parts}")
    if sizes.tp > 1:
        hidden = ", behind the products of layers" if sizes.tp_linear_async_communication else ""
        lines.append(f"Communication over tp: {sizes.tp_mode}{hidden}")
    if sizes.cp > 1:
        lines.append(_attention_over_cp(cost_plan(config)))
    return "\n".join(lines)


def _attention_over_cp(plan: CostPlan) -> str:
    """The way of attention, and the tokens of a sample that each rank has."""
    sizes, mode = plan.parallelism, plan.cp_mode
    cut = mode.cut(plan.sequence, sizes.cp)
    padding = cut.padded - plan.sequence
    note = f" ({padding:,} of {cut.padded:,} are padding)" if padding else ""
    way = plan.cp_way
    stride = mode.stride
    heads = f", {stride} key head{'s' * (stride != 1)} at a time" if way == "gather" else ""
    return (
        f"Attention over cp: {way}{heads}, {sizes.cp_layout}; {cut.local:,} tokens a rank{note}, "
        f"in blocks of at most {sizes.cp_block:,}"
    )


def _rank_of(sizes: ParallelismConfig) -> str:
    """Return the formula that numbers ranks."""
    outer = f"(pp * {sizes.dp} + dp) * "
    if sizes.cp > 1:
        outer = f"({outer}{sizes.cp} + cp) * "
    return f"{outer}{sizes.tp} + tp"


def _memory(plan: CostPlan) -> str:
    own = plan.adapter.tensors() if plan.adapter else {}
    learn = sum(math.prod(each.shape) for each in own.values())
    adapters = f", and {learn:,} of adapters, which alone learn" if learn else ""
    lines = [f"Parameters: {parameter_count(plan.spec):,}{adapters}"]
    # Classes of memory of each stage first; below, the instant at which most of it is in use at
    # once.
    for rank, stage in enumerate(stage_sizes(plan)):
        parts = ", ".join(f"{what} {size / GB:.3g}" for what, size in stage.bytes_of.items())
        names = f"{stage.layers[0]} ... {stage.layers[-1]}"
        lines.append(
            f"pp rank {rank}: {names}, {stage.parameters:,} parameters a rank; about "
            f"{sum(stage.bytes_of.values()) / GB:.3g} GB a process ({parts}; all in GB, buffers of "
            "transfers and of the allocator not counted)"
        )
        if host := offloaded(plan.optimizer, stage.bytes_of):
            lines.append(f"pp rank {rank} has {host / GB:.3g} of them in host memory (offload)")
        if isinstance(plan.spec, TransformersSpec) and plan.parallelism.cp > 1:
            lines.append("What attention of transformers' layers sends over cp is not counted")
        if "activations" not in stage.bytes_of:
            lines.append("Activations of a model of transformers in one piece are not counted")
        if stage.sent:
            sent = ", ".join(f"{axis} {size / GB:.3g}" for axis, size in stage.sent.items())
            lines.append(f"pp rank {rank} sends in a step, in GB a process: {sent}")
    peak = peak_memory(plan, MeasuredModel(plan, exact=True), recomputed(plan))
    parts = ", ".join(f"{what} {size / GB:.3g}" for what, size in peak.bytes_of.items())
    lines.append(
        f"Largest instant: {peak.instant}, on pp rank {peak.rank}; {peak.total / GB:.3g} GB "
        f"({parts})"
    )
    return "\n".join(lines)


def _notes(title: str, lines: list[str]) -> list[str]:
    return ["\n".join(f"{title}: {line}" for line in lines)] if lines else []
