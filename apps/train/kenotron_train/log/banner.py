"""First lines of the log: machine, model, plan, and keys without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kenotron_ckpt import DataStatesConfig
from kenotron_command import short
from kenotron_config import Device, GeneralConfig
from kenotron_data.config import DatasetStageConfig
from kenotron_dist import Mesh, gpu_problem, visible_gpus
from kenotron_dist.launch import COLLECTIVES, debugging, local_ranks
from kenotron_models import parameter_count
from kenotron_optim import ParameterGroup, describe_groups
from kenotron_train.assemble import TrainingRun
from kenotron_train.log.report import Report
from kenotron_train.log.run_name import run_name
from kenotron_train.reproducible import described


def _learning(training: TrainingRun) -> list[ParameterGroup]:
    """Groups of the tensors that learn: of the adapters alone, where there are some."""
    if (adapter := training.plan.adapter) is None:
        return list(training.groups)
    own = adapter.tensors()
    return [
        replace(group, names=tuple(name for name in group.names if name in own))
        for group in training.groups
    ]


def introduce(
    training: TrainingRun,
    report: Report,
    remark: str,
    cautions: Sequence[str],
    ignored: Sequence[str],
) -> None:
    """Report what is about to be trained.

    Args:
        training: the run.
        report: takes the lines.
        remark: of the checkpoint that is resumed.
        cautions: likely mistakes in the config.
        ignored: keys without effect.
    """
    mesh, data, saved = training.mesh, training.data, training.checkpoints
    general, section = training.log.general, saved.section
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.sizes.items())
    ep = f" | ep {mesh.config.ep}" if mesh.config.ep > 1 else ""
    names = f"Project {general.project} | run {run_name(general.run)}"
    report.say(f"{names} | {sizes}{ep} | device {mesh.device}")
    if mesh.device.type == "cpu":
        report.say(*_why_cpu(mesh, general.device))
    if COLLECTIVES in debugging() and mesh.world.size > 1:
        report.say("KENOTRON_DEBUG: calls of all ranks are compared before they start", "warning")
    count = parameter_count(training.plan.spec)
    samples = data.batches.full(0)
    report.say(
        f"Parameters: {count:,} ({short(count)}) | global batch: {samples} samples, "
        f"{short(samples * data.sequences[0])} tokens | steps: {data.tokens.train_steps}"
    )
    report.say(
        f"[Training Plan] There are {len(data.stages)} training stages\n"
        + "\n".join(map(_stage, data.stages))
    )
    report.say(
        f"Optimizer: {training.optim.optimizer_factory.name}, groups of "
        f"{'parameters' if training.plan.adapter is None else 'adapters (the base is frozen)'}:\n"
        + describe_groups(_learning(training), training.model.layouts)
    )
    if mesh.sizes["dp"] > 1:
        buckets = len(training.grads.buckets)
        report.say(f"Gradients are summed over dp in {buckets} bucket{'s' * (buckets != 1)}")
    if found := saved.conditions:
        _say_reproducible(report, mesh, described(found))
    if section.checkpointing_engine == "datastates":
        own = section.datastates or DataStatesConfig()
        report.say(
            f"Checkpoints: written while training continues, {own.parser_threads} files of a rank "
            f"at a time, from at most {own.host_cache_size:g} GB of its host memory"
        )
    for line in [*cautions, *_of_gpus(general, section.datastates, mesh)]:
        report.say(line, "warning")
    for line in ignored:
        report.say(f"Ignored: {line}", "warning")
    if remark:
        loses = any(words in remark for words in ("passed over ", ": samples may come twice"))
        report.say(remark, "warning" if loses else "info")


def _say_reproducible(report: Report, mesh: Mesh, conditions: str) -> None:
    report.say(
        "Reproducible: each sample is computed alone, and gradients are added in one tree over "
        f"the global batch; {conditions}"
    )
    if mesh.device.type != "cpu":
        report.say(
            "general.reproducible: true was given on GPUs, where layouts have not been compared "
            "yet: see `verify`, which compares yours to the bit",
            "warning",
        )


def _stage(stage: DatasetStageConfig) -> str:
    workers = stage.data.num_loading_workers
    note = f", read by {workers} workers of a rank" if workers != 1 else ""
    return f"[Stage {stage.name}] start from step {stage.start_training_step}{note}"


def _of_gpus(general: GeneralConfig, own: DataStatesConfig | None, mesh: Mesh) -> Iterator[str]:
    """Keys that were changed and do something on GPUs alone."""
    if mesh.device.type != "cpu":
        return
    if general.deterministic:
        yield (
            "general.deterministic: true changes nothing on CPUs, where the same run gives the "
            "same bits in any case"
        )
    if own is not None and not own.pin_host_cache:
        yield (
            "checkpoints.datastates.pin_host_cache: false changes nothing on CPUs, from which "
            "nothing is copied to page-locked memory"
        )


def _why_cpu(mesh: Mesh, device: Device) -> tuple[str, str]:
    """Return why ranks compute on CPUs, with the level of the message."""
    gpus, ranks = visible_gpus(), local_ranks(mesh.world.size)
    seen = f"{gpus} GPU{'s' * (gpus != 1)} can be seen on this host, which has "
    seen += f"{ranks} rank{'s' * (ranks != 1)}: all ranks compute on CPUs"
    if device == "cpu":
        return f"{seen}, as general.device asks for", "info"
    if not gpus:
        problem = gpu_problem()
        if "NCCL" in problem:
            return f"{seen} ({problem})", "warning"
        return f"{seen} ({problem.partition(': install')[0]})", "info"
    return (
        f"{seen}, for a GPU serves one rank; to use GPUs start at most {gpus} on a host (lower "
        "parallelism.dp, pp, cp or tp, or take more hosts); general.device: cpu chooses CPUs "
        "without this warning",
        "warning",
    )
