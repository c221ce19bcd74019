"""What the log begins with: machine, model, plan, and keys without effect."""

from __future__ import annotations

from kenotron_dist import Mesh
from kenotron_dist.device import visible_gpus
from kenotron_dist.launch import debugging, local_ranks
from kenotron_models import parameter_count
from kenotron_optim import describe
from kenotron_train.assemble import Training
from kenotron_train.config import cautions, ignored_keys
from kenotron_train.figures import short
from kenotron_train.report import Report


def introduce(training: Training, report: Report, remark: str) -> None:
    """Say what is about to be trained; ``remark`` is about the checkpoint that it goes on from."""
    config, mesh = training.config, training.mesh
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.sizes.items())
    report.say(f"Project {config.general.project} | {sizes} | device {mesh.device}")
    if mesh.device.type == "cpu":
        report.say(*_why_cpu(mesh))
    if debugging() and mesh.world.size > 1:
        report.say("KENOTRON_DEBUG: calls of all ranks are compared before they start", "warning")
    count = parameter_count(config.decoder)
    report.say(
        f"Parameters: {count:,} ({short(count)}) | global batch: {config.global_batch_size} "
        f"samples, {short(config.batch_tokens(0))} tokens | steps: {config.tokens.train_steps}"
    )
    stages = config.data_stages
    report.say(
        f"[Training Plan] There are {len(stages)} training stages\n"
        + "\n".join(f"[Stage {s.name}] start from step {s.start_training_step}" for s in stages)
    )
    report.say(
        f"Optimizer: {config.optimizer.optimizer_factory.name}, groups of parameters:\n"
        + describe(training.groups, training.model.layouts, training.grads.whole)
    )
    for line in cautions(config):
        report.say(line, "warning")
    for line in ignored_keys(config):
        report.say(f"Ignored: {line}", "warning")
    if remark:
        report.say(remark)


def _why_cpu(mesh: Mesh) -> tuple[str, str]:
    """Why ranks compute on CPUs, and how loud to say so."""
    gpus, ranks = visible_gpus(), local_ranks(mesh.world.size)
    seen = f"{gpus} GPU{'s' * (gpus != 1)} can be seen on this host, which has "
    seen += f"{ranks} rank{'s' * (ranks != 1)}: all ranks compute on CPUs"
    if not gpus:
        return seen, "info"
    return (
        f"{seen}, for a GPU serves one rank; to use GPUs start at most {gpus} on a host (lower "
        "parallelism.dp, pp or tp, or take more hosts); CUDA_VISIBLE_DEVICES= chooses CPUs without "
        "this warning",
        "warning",
    )
