"""The sections of a training config that belong to the app; the others belong to the packages."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kenotron_config.init_sections import InitMethod
from kenotron_data.config import BatchRampConfig
from kenotron_models import AnyConfig, Recompute
from kenotron_pp import Schedule, schedule_named
from kenotron_tp import TPMode

DType = Literal["float32", "bfloat16", "float16"]
TrackerName = Literal["tensorboard", "wandb"]
Device = Literal["auto", "cpu", "cuda"]
"""What ranks compute on."""
CPAttention = Literal["auto", "ring", "gather", "ulysses"]
"""How attention runs over ranks that share the tokens of a sample."""
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
    device: Device = "auto"
    """What ranks compute on: `cuda`, a GPU for every rank; `cpu`; `auto`: cuda where there are GPUs
    enough."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = _below("seed", self.seed, 0)
        if self.device not in get_args(Device):
            known = ", ".join(get_args(Device))
            found.append(f"device: {self.device} was given; it must be one of {known}")
        _raise(found)


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """How many ranks share the work, and how; there are pp x dp x cp x tp of them."""

    dp: int
    """Ranks that share the samples (data parallel)."""
    pp: int
    """Ranks that share the layers (pipeline parallel)."""
    tp: int
    """Ranks that share every layer (tensor parallel)."""
    pp_engine: Literal["afab", "1f1b", "interleaved", "zb-h1", "zb-v"] = "afab"
    """Order of the pipeline: all forwards first, one forward one backward, that over several parts
    of the model a rank, or zero-bubble with one part or two."""
    pp_chunks: int | None = None
    """Parts of the model that each pp rank has when pp_engine is interleaved; None: 2."""
    tp_mode: Literal["ALL_REDUCE", "REDUCE_SCATTER"] = "ALL_REDUCE"
    """Activations between layers: whole on every tp rank, or cut along the sequence."""
    tp_linear_async_communication: bool = False
    """Communication over tp travels while pieces are multiplied; the numbers are the same."""
    recompute_layer: bool = False
    """True: activations are computed again in the backward instead of being kept."""
    recompute: Recompute | None = None
    """What decoder layers compute again: none; full, all but their input; selective, what is cheap
    between matrix products. None: full with recompute_layer, else none."""
    recompute_layers: int | None = None
    """How many decoder layers do so, from the first one on; None: all."""
    tp_recompute_allgather: bool = True
    """With REDUCE_SCATTER: gather activations again in the backward instead of keeping them."""
    ep: int = 1
    """Ranks that share the experts (expert parallel): a part of the dp x cp x tp ranks of a
    pipeline stage, which it divides. Nanotron's name for it, expert_parallel_size, is understood;
    there it multiplies the number of processes."""
    ep_chunks: int = 1
    """Parts of a rank's tokens: one is sent over ep while another is computed. Gradients of experts
    are equal to rounding. With ep 1 nothing is sent, and it has no effect."""
    cp: int = 1
    """Ranks that share the tokens of each sample (context parallel). Nanotron's name for it,
    context_parallel_size, is understood."""
    cp_attention: CPAttention = "auto"
    """How attention runs over cp: keys travel round a ring, keys are gathered, or heads are
    exchanged for tokens (ulysses). auto: what model_config.attn_implementation names (ring,
    ring_flash_triton; llama3_ring_attention gathers); else ulysses where it sends less than the
    ring, or the ring."""
    cp_layout: Literal["zigzag", "contiguous"] = "zigzag"
    """Which tokens a cp rank has: an early and a late piece, which balances the work, or one."""
    cp_stride: int | None = None
    """Key heads that are gathered at a time; only where keys are gathered. None: what
    model_config.ring_attn_heads_k_stride says, or 1."""
    cp_block: int = 512
    """Most tokens of the blocks in which attention over cp is computed; a GPU wants larger ones."""
    moe_layer_recompute: bool = False
    """True: the activations of experts are computed again in the backward; not available yet."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        for name in ("dp", "pp", "tp", "cp", "cp_block", "ep", "ep_chunks"):
            found += _below(name, getattr(self, name), 1)
        if self.cp_stride is not None:
            found += _below("cp_stride", self.cp_stride, 1)
        if self.recompute_layer and self.recompute not in (None, "full"):
            found.append(
                f"recompute: {self.recompute} was given; recompute_layer: true means full; keep one"
            )
        if self.recompute_layers is not None:
            found += _below("recompute_layers", self.recompute_layers, 0)
        try:
            schedule_named(self.pp_engine, self.pp_chunks)
        except ValueError as error:
            found.append(f"pp_chunks: {self.pp_chunks} was given; {error}")
        stage = self.dp * self.cp * self.tp
        if self.ep > 1 and stage % self.ep:
            found.append(
                f"ep: {self.ep} was given; it must divide dp x cp x tp ({stage}), the ranks of a "
                "pipeline stage (in Nanotron it multiplies them); change one of them"
            )
        _raise(found)

    @property
    def schedule(self) -> Schedule:
        """The order of the pipeline that `pp_engine` and `pp_chunks` name."""
        return schedule_named(self.pp_engine, self.pp_chunks)

    def recompute_of(self, layer: int) -> Recompute:
        """What a decoder layer computes again in the backward."""
        if self.recompute_layers is not None and layer >= self.recompute_layers:
            return "none"
        return self.recompute or ("full" if self.recompute_layer else "none")

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return math.prod(self.grid.values())

    @property
    def grid(self) -> dict[str, int]:
        """Ranks of each axis, in the order in which ranks are numbered."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    @property
    def described(self) -> str:
        """The sizes in words: `dp 2 x pp 1 x tp 1`, with cp and ep where they are more than 1."""
        cp = f"x cp {self.cp} " if self.cp > 1 else ""
        ep = f", ep {self.ep}" if self.ep > 1 else ""
        return f"dp {self.dp} x pp {self.pp} {cp}x tp {self.tp}{ep}"

    @property
    def mode(self) -> TPMode:
        """How the layers communicate over tp."""
        return TPMode(
            sequence_parallel=self.tp_mode == "REDUCE_SCATTER" and self.tp > 1,
            overlap=self.tp_linear_async_communication,
            regather=self.tp_recompute_allgather,
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, its initial weights and its number format."""

    model_config: AnyConfig
    """Sizes of the model; its `is_*_config` names the family."""
    init_method: InitMethod
    """How weights begin: drawn, or read."""
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
        found = _below("make_vocab_size_divisible_by", self.make_vocab_size_divisible_by, 1)
        if self.ddp_bucket_cap_mb is not None:
            found += _below("ddp_bucket_cap_mb", self.ddp_bucket_cap_mb, 1)
        _raise(found)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """What makes tokens of text; without a name text is read as bytes."""

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
            found += _below("tokenizer_max_length", self.tokenizer_max_length, 1)
        _raise(found)


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """How many tokens are read, and in which portions."""

    sequence_length: int
    """Tokens of one sample."""
    train_steps: int
    """Updates of the whole training."""
    micro_batch_size: int
    """Samples of one forward and backward on one dp rank."""
    batch_accumulation_per_replica: int
    """Micro-batches of one update on one dp rank."""
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
            found += _below(name, getattr(self, name), 1)
        if self.val_check_interval != -1 and self.val_check_interval < 1:
            found.append(
                f"val_check_interval: {self.val_check_interval} was given; it must be at least 1 "
                "step, or -1 for only after the last step"
            )
        found += _below("limit_val_batches", self.limit_val_batches, 0)
        found += _below("limit_test_batches", self.limit_test_batches, 0)
        _raise(found)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is printed while training."""

    log_level: LogLevel = "info"
    """Least severity that is printed."""
    log_level_replica: LogLevel = "info"
    """No effect: only the first rank prints."""
    iteration_step_info_interval: int = 1
    """Training steps from one printed line to the next."""
    trackers: tuple[TrackerName, ...] | None = None
    """Where figures go in addition to the log: tensorboard, wandb; None: wandb where WANDB_MODE,
    WANDB_PROJECT or WANDB_API_KEY is set in the environment."""
    communication: bool = False
    """Whether metrics.jsonl has the bytes that left the first rank in each step, by axis."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = _below("iteration_step_info_interval", self.iteration_step_info_interval, 1)
        if self.log_level not in get_args(LogLevel):
            found.append(
                f"log_level: {self.log_level} was given; it must be one of "
                f"{', '.join(get_args(LogLevel))}"
            )
        _raise(found)


def _below(name: str, given: int, least: int) -> list[str]:
    return [f"{name}: {given} was given; it must be at least {least}"] if given < least else []


def _raise(found: list[str]) -> None:
    if found:
        raise ValueError("\n".join(found))
