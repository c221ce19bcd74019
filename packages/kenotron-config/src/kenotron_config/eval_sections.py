"""The section `lighteval` of Nanotron: the keys of it that say something here."""

from dataclasses import dataclass

WITHOUT_EFFECT = {
    "": (
        "slurm_script_dir", "checkpoints_path", "generation", "logging",
        "wandb", "logs_path", "local_checkpoint_dir", "s3_save_path", "upload_to_wandb",
        "wandb_project", "wandb_entity", "output_dir", "nanotron_path", "eval_config_override",
        "eval_interval_file",
    ),
    "tasks": (
        "num_fewshot_seeds", "dataset_loading_processes", "multichoice_continuations_start_space",
        "no_multichoice_continuations_start_space",
    ),
    "parallelism": (
        "pp_engine", "tp_mode", "tp_linear_async_communication", "recompute_layer",
        "tp_recompute_allgather",
    ),
    "slurm": ("hf_cache",),
}  # fmt: skip
"""Keys of Nanotron by section, which are read and left out: where results go, how text is drawn."""


@dataclass(frozen=True, kw_only=True)
class EvalTasksConfig:
    """Nanotron's tasks of an evaluation."""

    tasks: str | None = None
    """Names of tasks, with commas between."""
    custom_tasks: str | None = None
    """A module of tasks of lighteval, which is not read."""
    max_samples: int | None = None
    """Most samples of a task."""


@dataclass(frozen=True, kw_only=True)
class EvalParallelismConfig:
    """Ranks of an evaluation."""

    dp: int = 1
    """Ranks that share the samples."""
    pp: int = 1
    """Ranks that share the layers."""
    tp: int = 1
    """Ranks that share every layer."""
    expert_parallel_size: int = 1
    """Ranks that share the experts."""
    context_parallel_size: int = 1
    """Ranks that share the sequence."""


@dataclass(frozen=True, kw_only=True)
class EvalSlurmConfig:
    """The Slurm job of an evaluation."""

    gpus_per_node: int = 8
    """GPUs of a node."""
    partition: str = "hopper-prod"
    """Partition."""
    cpus_per_task: int = 88
    """Cores of a task."""
    qos: str = "low"
    """Quality of service."""
    time: str = "24:00:00"
    """Longest time."""
    reservation: str | None = "smollm"
    """Reservation."""


@dataclass(frozen=True, kw_only=True)
class LightEvalConfig:
    """Evaluations during training, as Nanotron and Kénotron ask for them.

    Tasks whose names have a counterpart in lm-eval are evaluated; others are reported when the run
    starts. `evaluate` has all that can be chosen. Nanotron's other keys are left out.
    """

    slurm_template: str | None = None
    """Template of the job's script: any means a job, whose script is its own."""
    parallelism: EvalParallelismConfig | None = None
    """Ranks."""
    batch_size: int | None = None
    """Samples at a time."""
    tasks: EvalTasksConfig | None = None
    """Tasks to evaluate."""
    slurm: EvalSlurmConfig | None = None
    """The job."""
    eval_interval: int | None = None
    """Training steps from one evaluation to the next."""
