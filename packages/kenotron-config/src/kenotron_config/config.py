"""A whole training config: the sections of the app and of the packages, and what they imply."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from kenotron_ckpt import CheckpointsConfig, S3UploadConfig
from kenotron_config.adapter_checks import adapter_of
from kenotron_config.batch_sizes import BatchSizes
from kenotron_config.checks import all_problems, way_over_cp
from kenotron_config.doremi_section import DoReMiConfig
from kenotron_config.eval_sections import LightEvalConfig
from kenotron_config.evaluate_section import EvaluateConfig
from kenotron_config.init_sections import (
    ExistingCheckpointInitConfig,
    MambaInitConfig,
)
from kenotron_config.lighteval_tasks import evaluate_section_of, lighteval_problems
from kenotron_config.parallelism_section import CPAttention, ParallelismConfig
from kenotron_config.parametrisation import multipliers_in, scales_in
from kenotron_config.sections import (
    GeneralConfig,
    LoggingConfig,
    ModelConfig,
    TokenizerConfig,
    TokensConfig,
)
from kenotron_config.watch_sections import MetricsLoggingConfig, ProfilerConfig
from kenotron_data.config import (
    DatasetStageConfig,
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    SFTDatasetsConfig,
    domain_section,
)
from kenotron_models import DecoderSpec, Multipliers, ParameterScale
from kenotron_models.adapters import AdapterSpec
from kenotron_optim import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that determines a training.

    Raises:
        ValueError: sections contradict one another; one line for each problem.
    """

    general: GeneralConfig
    """Names and seed of the run."""
    parallelism: ParallelismConfig
    """Layout of the ranks that share the work."""
    model: ModelConfig
    """The model."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer."""
    tokens: TokensConfig
    """Amount and portions of the tokens."""
    optimizer: OptimizerConfig
    """The optimizer and its schedule."""
    checkpoints: CheckpointsConfig
    """Saving and resuming."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Console output."""
    data_stages: tuple[DatasetStageConfig, ...]
    """Data that are read, in the order of the training."""
    profiler: ProfilerConfig | None = None
    """torch's profiler over some steps."""
    evaluate: EvaluateConfig | None = None
    """Evaluations during training; None: there are none."""
    lighteval: LightEvalConfig | None = None
    """Evaluations during training, in Nanotron's keys."""
    s3_upload: S3UploadConfig | None = None
    """Copies of checkpoints in a remote store; None: there are none."""
    metrics_logging: MetricsLoggingConfig | None = None
    """Figures of every layer in the log."""
    doremi: DoReMiConfig | None = None
    """Domains of the data, and how their weights are learned."""

    def __post_init__(self) -> None:
        """Check the sections against one another."""
        if problems := all_problems(vars(self)):
            raise ValueError("\n".join(problems))

    @cached_property
    def decoder(self) -> DecoderSpec:
        """Parts of the model, with `mtp` and the multipliers of its parametrisation."""
        spec = self.multipliers.applied(self.model.model_config.decoder)
        mtp = self.model.mtp
        return spec if mtp is None else replace(spec, mtp_weight=mtp.weight)

    @cached_property
    def adapter(self) -> AdapterSpec | None:
        """Adapters of the model; None: there are none."""
        return adapter_of(self.model)

    @cached_property
    def multipliers(self) -> Multipliers:
        """Multipliers that `model.init_method` sets in the model that `model_config` describes."""
        return multipliers_in(self.model)

    @cached_property
    def scales(self) -> dict[str, ParameterScale] | None:
        """First values and factors of each parameter; None: `draws` say the first values."""
        return scales_in(self.model, self.optimizer)

    @property
    def draws(self) -> tuple[float, str] | tuple[float, str, int] | None:
        """Standard deviation of the initial weights, and what scales those of residual outputs, as
        ``kenotron_models.standard_init`` takes them; None: weights are read.
        """
        method = self.model.init_method
        if isinstance(method, MambaInitConfig):
            added = method.n_residuals_per_layer if method.rescale_prenorm_residual else 0
            return method.initializer_range, "FAN_IN", added
        if isinstance(method, ExistingCheckpointInitConfig):
            return None
        return method.std, method.scaling_method

    @property
    def cp_way(self) -> tuple[CPAttention, int]:
        """Method of attention over cp, and number of key heads gathered at a time.

        What `parallelism.cp_attention` leaves open is what `attn_implementation` names.
        """
        named = getattr(self.model.model_config, "ring_attn_heads_k_stride", None)
        return way_over_cp(self.model, self.parallelism), self.parallelism.cp_stride or named or 1

    @cached_property
    def evaluation(self) -> EvaluateConfig | None:
        """Evaluations during training, in whichever section they are asked for."""
        if self.evaluate is None and self.lighteval is not None:
            return None if lighteval_problems(vars(self)) else evaluate_section_of(self.lighteval)
        return self.evaluate

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return self.parallelism.world_size

    @property
    def global_batch_size(self) -> int:
        """Samples of one update, over all ranks, in stages without a batch of their own."""
        tokens = self.tokens
        samples = tokens.micro_batch_size * tokens.batch_accumulation_per_replica
        return tokens.global_batch_size or samples * self.parallelism.dp

    @property
    def global_batch_tokens(self) -> int:
        """Tokens of one update, over all ranks, in stages without sizes of their own."""
        return self.global_batch_size * self.tokens.sequence_length

    @cached_property
    def batches(self) -> BatchSizes:
        """Samples of the global batches, from stage to stage and while they grow."""
        return BatchSizes(self.parallelism.dp, self.tokens, self.data_stages)

    @property
    def longest_sequence(self) -> int:
        """Tokens of a sample in the stage that has the longest ones."""
        return max(self.sequence_of(stage) for stage in range(len(self.data_stages)))

    def section_of(
        self, stage: int
    ) -> PretrainDatasetsConfig | NanosetDatasetsConfig | SFTDatasetsConfig | None:
        """Return the section that a stage reads; with domains, a data set for each of them."""
        section = self.data_stages[stage].data.dataset
        if section is None or self.doremi is None:
            return section
        return domain_section(section, self.doremi.names)

    def sequence_of(self, stage: int) -> int:
        """Tokens of a sample in a stage."""
        return self.data_stages[stage].sequence_length or self.tokens.sequence_length
