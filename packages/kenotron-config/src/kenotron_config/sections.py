"""The sections of a training config that belong to the app; the others belong to the packages."""

from dataclasses import dataclass
from typing import Literal, get_args

from kenotron_config.adapter_section import AdapterConfig
from kenotron_config.field_checks import below, raise_all
from kenotron_config.init_sections import InitMethod
from kenotron_data.config import BatchRampConfig
from kenotron_models import AnyConfig

DType = Literal["float32", "bfloat16", "float16"]
TrackerName = Literal["tensorboard", "wandb"]
Device = Literal["auto", "cpu", "cuda"]
"""Device that ranks compute on."""
LogLevel = Literal["debug", "info", "warning", "error", "critical", "passive"]


@dataclass(frozen=True, kw_only=True)
class GeneralConfig:
    """Names and seed of a run."""

    project: str
    """Name of the project; used in the log."""
    run: str = "%date_%jobid"
    """Name of the run; `%date` and `%jobid` are replaced at start."""
    seed: int = 42
    """Seed of the initial weights."""
    step: int | None = None
    """No effect: steps done when Nanotron saved the file; the checkpoint has its own step."""
    consumed_train_samples: int | None = None
    """No effect: samples seen when Nanotron saved the file; the checkpoint has them."""
    benchmark_csv_path: str | None = None
    """A file that a table of speeds is added to; None: none."""
    ignore_sanity_checks: bool = True
    """False: replicas, ties, optimizer state, batches and gradients are compared over ranks at
    every step, and a difference ends the run."""
    deterministic: bool = False
    """True: the same run gives the same bits every time on an accelerator, too; slower. An
    operation without deterministic version ends the run."""
    reproducible: bool = False
    """True: losses, gradients and weights are the same bits on every dp, pp, tp, ep, micro-batch
    size, ZeRO stage, schedule and recomputation, after a resume too. Each sample is computed alone,
    and gradients are added in one binary tree over the global batch; on every cp, too, up to
    `reproducible_max_cp`. On GPUs with deterministic kernels, which is not measured yet. What is
    not shown to be the same is refused."""
    reproducible_max_tp: int = 8
    """Largest tp with reproducible: true. Layers are computed in as many virtual shards, or in the
    largest smaller power of two that divides heads and widths of the model. The bits depend on it:
    runs to be compared have the same number. 1: layers are computed whole, which is faster."""
    reproducible_max_cp: int = 1
    """Largest cp with reproducible: true, a power of two. Each rank computes its tokens as so many
    ranks would, one after the other. The bits depend on it, and above 1 on `cp_layout` and
    `cp_block`: runs to be compared have the same. 1: samples are computed whole, which is
    faster."""
    reproducible_threads: int = 1
    """Threads of each rank with reproducible: true. They are a part of what fixes the bits: runs to
    be compared have the same number."""
    device: Device = "auto"
    """Device that ranks compute on: `cuda`, a GPU for every rank; `cpu`; `auto`: cuda where there
    are GPUs enough."""

    def is_deterministic(self, device: str) -> bool:
        """Return True where the kernels of a type of device give the same bits every time."""
        return self.deterministic or (self.reproducible and device != "cpu")

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = below("seed", self.seed, 0)
        for name in ("reproducible_max_tp", "reproducible_max_cp", "reproducible_threads"):
            found += below(name, getattr(self, name), 1)
        if (most := self.reproducible_max_cp) > 0 and most & (most - 1):
            found.append(
                f"reproducible_max_cp: {most} was given; it must be a power of two: set it to "
                f"{1 << most.bit_length() - 1} or {1 << most.bit_length()}"
            )
        if self.device not in get_args(Device):
            known = ", ".join(get_args(Device))
            found.append(f"device: {self.device} was given; it must be one of {known}")
        raise_all(found)


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction: a module that learns to predict the token after the next."""

    layers: int = 1
    """Number of modules, each of which predicts one token further; 1 is what there is."""
    weight: float = 0.3
    """Factor of their cross entropy in the objective; `lm_loss` is without it."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.layers != 1:
            found.append(
                f"layers: {self.layers} was given; it must be 1, a module that predicts the token "
                "after the next: set it to 1, or leave mtp out"
            )
        if not 0 < self.weight < float("inf"):
            found.append(
                f"weight: {self.weight} was given; it must be finite and above 0: set it to 0.3, "
                "or leave mtp out"
            )
        raise_all(found)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, its initial weights and its number format."""

    model_config: AnyConfig
    """Sizes of the model; its `is_*_config` names the family."""
    init_method: InitMethod
    """Initial weights: drawn, or read."""
    mtp: MTPConfig | None = None
    """A module that predicts the token after the next, as an auxiliary objective; None: none."""
    adapter: AdapterConfig | None = None
    """Adapters of linear layers, which learn alone (LoRA); None: all weights learn."""
    dtype: DType = "bfloat16"
    """Number format of parameters and activations; masters and sums are float32."""
    make_vocab_size_divisible_by: int = 1
    """The vocabulary is padded to a multiple of this times tp."""
    compile: bool = False
    """True: torch.compile makes one program of each layer's work between communications."""
    cuda_graph: bool = False
    """True: forward and backward of a micro-batch are one CUDA graph, for small models whose host
    launches kernels too slowly. With pp and tp 1, without dropout and packed documents."""
    ddp_bucket_cap_mb: int | None = None
    """Size of the buckets that gradients are reduced in, in MiB; the numbers are the same. None: 25
    on a CPU, on an accelerator 40 million elements, or a million for each data rank."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = below("make_vocab_size_divisible_by", self.make_vocab_size_divisible_by, 1)
        if self.ddp_bucket_cap_mb is not None:
            found += below("ddp_bucket_cap_mb", self.ddp_bucket_cap_mb, 1)
        raise_all(found)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer of text; without a name text is read as bytes."""

    tokenizer_name_or_path: str | None = None
    """Folder or name of a tokenizer that transformers loads, a tokenizer.json, or `bytes`; None:
    bytes."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of a tokenizer of the hub; None: the newest."""
    tokenizer_max_length: int | None = None
    """Documents are cut after this many tokens, longer examples of answers left out; None: no
    limit."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.tokenizer_name_or_path == "":
            found.append("tokenizer_name_or_path: nothing was given; give a name, or null")
        if self.tokenizer_max_length is not None:
            found += below("tokenizer_max_length", self.tokenizer_max_length, 1)
        raise_all(found)


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Number of tokens that are read, and their portions."""

    sequence_length: int
    """Tokens of one sample."""
    train_steps: int
    """Updates of the whole training."""
    micro_batch_size: int
    """Samples of one forward and backward on one dp rank."""
    batch_accumulation_per_replica: int
    """Micro-batches of one update on one dp rank. Follows from global_batch_size where that is
    given, and may then be left out."""
    global_batch_size: int | None = None
    """Samples of one update over all ranks, on every layout. Where ranks cannot share them evenly,
    the last micro-batches have padding. None: dp x micro_batch_size x
    batch_accumulation_per_replica."""
    batch_ramp: BatchRampConfig | None = None
    """A global batch that begins small and grows with the samples that were read; None: all batches
    have their full size."""
    val_check_interval: int = -1
    """Training steps from one validation to the next; -1: only after the last step."""
    limit_val_batches: int = 0
    """Global batches of one validation; above 0 the last 10 % of each data set is held out for it,
    where hf_dataset_splits names no split for that."""
    limit_test_batches: int = 0
    """No effect: there is no test next to the validation."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        for name in (
            "sequence_length", "train_steps", "micro_batch_size", "batch_accumulation_per_replica"
        ):  # fmt: skip
            found += below(name, getattr(self, name), 1)
        if self.global_batch_size is not None:
            found += below("global_batch_size", self.global_batch_size, 1)
        if self.val_check_interval != -1 and self.val_check_interval < 1:
            found.append(
                f"val_check_interval: {self.val_check_interval} was given; it must be at least 1 "
                "step, or -1 for only after the last step"
            )
        found += below("limit_val_batches", self.limit_val_batches, 0)
        found += below("limit_test_batches", self.limit_test_batches, 0)
        raise_all(found)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Console output while training."""

    log_level: LogLevel = "info"
    """Least severity that is printed."""
    log_level_replica: LogLevel = "info"
    """No effect: only the first rank prints."""
    iteration_step_info_interval: int = 1
    """Training steps from one printed line to the next."""
    trackers: tuple[TrackerName, ...] | None = None
    """Trackers that get figures in addition to the log: tensorboard, wandb; None: wandb where
    WANDB_MODE, WANDB_PROJECT or WANDB_API_KEY is set in the environment."""
    communication: bool = False
    """True: metrics.jsonl has the bytes that left the first rank in each step, by axis."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = below("iteration_step_info_interval", self.iteration_step_info_interval, 1)
        if self.log_level not in get_args(LogLevel):
            found.append(
                f"log_level: {self.log_level} was given; it must be one of "
                f"{', '.join(get_args(LogLevel))}"
            )
        raise_all(found)
