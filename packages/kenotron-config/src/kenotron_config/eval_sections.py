"""The section `lighteval`, in Kénotron's and Nanotron's shapes: read and checked."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How an evaluation generates."""

    sampler: str | None = None
    """greedy, top_k or top_p."""
    temperature: float | None = None
    """Divides logits."""
    top_k: int | None = None
    """So many of the likeliest tokens."""
    top_p: float | None = None
    """The likeliest tokens that have this share."""
    n_samples: int | None = None
    """Samples of each prompt."""
    eos: str | None = None
    """Text that ends a sample."""
    seed: int = 42
    """Seed of the draws."""
    use_cache: bool = False
    """Whether keys and values are kept."""


@dataclass(frozen=True, kw_only=True)
class EvalTasksConfig:
    """What an evaluation asks."""

    tasks: str | None = None
    """Names of tasks, or a file of them."""
    custom_tasks: str | None = None
    """A module of tasks."""
    max_samples: int | None = None
    """Most samples of a task."""
    num_fewshot_seeds: int | None = None
    """Seeds of few-shot examples."""
    dataset_loading_processes: int = 8
    """Processes that read data sets."""
    multichoice_continuations_start_space: bool | None = None
    """True: answers begin with a blank."""
    no_multichoice_continuations_start_space: bool | None = None
    """True: they do not."""


@dataclass(frozen=True, kw_only=True)
class EvalLoggingConfig:
    """Where an evaluation's results go."""

    local_output_path: str | None = None
    """Folder of results."""
    push_results_to_hub: bool | None = None
    """Whether results go to the Hub."""
    push_details_to_hub: bool | None = None
    """Whether details go to the Hub."""
    push_results_to_tensorboard: bool | None = None
    """Whether results go to TensorBoard."""
    hub_repo_results: str | None = None
    """Repository of results."""
    hub_repo_details: str | None = None
    """Repository of details."""
    hub_repo_tensorboard: str | None = None
    """Repository of TensorBoard files."""
    tensorboard_metric_prefix: str | None = None
    """What names of metrics begin with."""


@dataclass(frozen=True, kw_only=True)
class EvalWandbConfig:
    """Weights & Biases of an evaluation."""

    wandb_project: str
    """Project; not empty."""
    wandb_entity: str | None = None
    """Team or user."""
    wandb_run_name: str | None = None
    """Name of the run."""

    def __post_init__(self) -> None:
        """Check the field."""
        if not self.wandb_project:
            raise ValueError("wandb_project: nothing was given; it must name a project")


@dataclass(frozen=True, kw_only=True)
class EvalParallelismConfig:
    """Ranks of an evaluation; the keys of the training's section, as far as they matter."""

    dp: int = 1
    """Ranks that share the samples."""
    pp: int = 1
    """Ranks that share the layers."""
    tp: int = 1
    """Ranks that share every layer."""
    pp_engine: str | None = None
    """Order of the pipeline."""
    tp_mode: str | None = None
    """Activations between layers."""
    tp_linear_async_communication: bool | None = None
    """Whether communication over tp overlaps with products."""
    recompute_layer: bool | None = None
    """No effect: nothing is trained."""
    tp_recompute_allgather: bool | None = None
    """No effect: nothing is trained."""
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
    hf_cache: str = "~/.cache/huggingface"
    """Folder of downloads."""
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
    starts. `evaluate` has all that can be chosen.
    """

    slurm_template: str | None = None
    """Template of the job's script."""
    slurm_script_dir: str | None = None
    """Folder of scripts."""
    checkpoints_path: str | None = None
    """Folder of the checkpoints to evaluate."""
    parallelism: EvalParallelismConfig | None = None
    """Ranks."""
    batch_size: int | None = None
    """Samples at a time."""
    generation: GenerationConfig | dict[str, GenerationConfig] | None = None
    """How text is generated; several ways have names."""
    tasks: EvalTasksConfig | None = None
    """What is asked."""
    logging: EvalLoggingConfig | None = None
    """Where results go."""
    wandb: EvalWandbConfig | None = None
    """Weights & Biases."""
    slurm: EvalSlurmConfig | None = None
    """The job."""
    logs_path: str | None = None
    """Folder of logs."""
    local_checkpoint_dir: str = "/scratch"
    """Folder that checkpoints are copied to."""
    s3_save_path: str | None = None
    """Where results are kept."""
    upload_to_wandb: bool = False
    """Whether results go to Weights & Biases."""
    wandb_project: str | None = None
    """Project of the results."""
    wandb_entity: str | None = None
    """Team or user of the results."""
    output_dir: str | None = None
    """Folder of results."""
    nanotron_path: str = "./"
    """Folder of the program."""
    eval_config_override: str | None = None
    """A YAML file with other values."""
    eval_interval: int | None = None
    """Training steps from one evaluation to the next."""
    eval_interval_file: str | None = None
    """A file that marks a running training."""
