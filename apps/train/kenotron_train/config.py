"""A whole training config: the sections of the app and of the packages, and what they imply."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from kenotron_ckpt.config import CheckpointsConfig
from kenotron_ckpt.s3_config import S3UploadConfig
from kenotron_data.config import DatasetStageConfig
from kenotron_models import DecoderSpec
from kenotron_models.config_experimental import LlaMoEConfig, MambaModelConfig
from kenotron_optim.config import OptimizerConfig
from kenotron_train.checks import Sections, cross_problems
from kenotron_train.eval_sections import DoReMiConfig, LightEvalConfig
from kenotron_train.init_sections import ExistingCheckpointInitConfig, RandomInitConfig
from kenotron_train.sections import (
    GeneralConfig,
    LoggingConfig,
    ModelConfig,
    ParallelismConfig,
    TokenizerConfig,
    TokensConfig,
)
from kenotron_train.watch_sections import MetricsLoggingConfig, ProfilerConfig

WITHOUT_EFFECT = {
    "general.step": "a checkpoint knows its own step",
    "general.consumed_train_samples": "a checkpoint knows the samples it has seen",
    "general.ignore_sanity_checks": "there are no optional checks",
    "model.model_config.pad_token_id": "padded positions carry no label",
    "model.model_config.pretraining_tp": "parallelism.tp decides",
    "model.model_config.use_cache": "training keeps no cache",
    "checkpoints.checkpoints_path_is_shared_file_system": "every rank writes its own files",
    "s3_upload.s5cmd_numworkers": "the training process uploads, without s5cmd",
    "s3_upload.s5cmd_concurrency": "the training process uploads, without s5cmd",
    "s3_upload.s5cmd_path": "the training process uploads, without s5cmd",
    "logging.log_level_replica": "only the first rank prints",
    "tokens.limit_test_batches": "there is no test beside the validation",
}
STAGE_WITHOUT_EFFECT = {
    "data.num_loading_workers": "the training process reads the tokens itself",
    "data.dataset.dataset_processing_num_proc_per_process": "text is made into tokens "
    "by one process",
    "data.dataset.dataset_overwrite_cache": "no cache is kept",
    "data.dataset.skip_in_stream": "any sample is found at once",
    "data.dataset.pad_samples_to_global_batch_size": "epochs follow one another within a batch",
    "data.dataset.use_old_brrr_dataloader": "there is one loader",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that determines a training.

    Raises:
        ValueError: sections contradict one another; one line for each problem.
    """

    general: GeneralConfig
    """Names and seed of the run."""
    parallelism: ParallelismConfig
    """How ranks share the work."""
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
    """What is printed."""
    data_stages: tuple[DatasetStageConfig, ...]
    """What is read, in the order of the training."""
    profiler: ProfilerConfig | None = None
    """torch's profiler over some steps."""
    lighteval: LightEvalConfig | None = None
    """Evaluations beside the training."""
    s3_upload: S3UploadConfig | None = None
    """Copies of checkpoints in a remote store; None: there are none."""
    metrics_logging: MetricsLoggingConfig | None = None
    """Figures of every layer in the log."""
    doremi: DoReMiConfig | None = None
    """Weights of domains that are learned."""

    def __post_init__(self) -> None:
        """Check the sections against one another."""
        sections = Sections(
            parallelism=self.parallelism,
            model=self.model,
            tokenizer=self.tokenizer,
            tokens=self.tokens,
            profiler=self.profiler,
            data_stages=self.data_stages,
        )
        if problems := cross_problems(sections):
            raise ValueError("\n".join(problems))

    @cached_property
    def decoder(self) -> DecoderSpec:
        """What the model is made of. Raises ValueError for one that cannot be built."""
        sizes = self.model.model_config
        if isinstance(sizes, MambaModelConfig | LlaMoEConfig):
            raise ValueError(f"model.model_config: {type(sizes).__name__} cannot be built yet")
        return sizes.decoder

    @property
    def draws(self) -> tuple[float, str] | None:
        """Standard deviation of the initial weights, and what scales those of residual outputs;
        None: weights are read.
        """
        method = self.model.init_method
        if isinstance(method, ExistingCheckpointInitConfig):
            return None
        if not isinstance(method, RandomInitConfig):
            raise ValueError(f"model.init_method: {type(method).__name__} is not available yet")
        return method.std, method.scaling_method

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return self.parallelism.world_size

    @property
    def global_batch_size(self) -> int:
        """Samples of one update, over all ranks."""
        tokens = self.tokens
        samples = tokens.micro_batch_size * tokens.batch_accumulation_per_replica
        return samples * self.parallelism.dp

    @property
    def global_batch_tokens(self) -> int:
        """Tokens of one update, over all ranks."""
        return self.global_batch_size * self.tokens.sequence_length


def ignored_keys(config: Config) -> list[str]:
    """Name the keys that ask for something and have no effect.

    Args:
        config: the config of a training.

    Returns:
        One line for each key that is not at its default, `key.path: value has no effect: reason`.
    """
    found = [line for path, why in WITHOUT_EFFECT.items() for line in _ignored(config, path, why)]
    for number, stage in enumerate(config.data_stages):
        for path, why in STAGE_WITHOUT_EFFECT.items():
            found += [f"data_stages.{number}.{line}" for line in _ignored(stage, path, why)]
    return found


def _ignored(root: object, path: str, why: str) -> Iterator[str]:
    *parents, name = path.split(".")
    owner: Any = root
    for parent in parents:
        owner = getattr(owner, parent)
    if owner is None:  # a stage without dataset, a training without upload
        return
    defaults = {each.name: each.default for each in fields(owner)}
    if name not in defaults:  # another kind of dataset
        return
    default = defaults[name]
    if (value := getattr(owner, name)) != default:
        yield f"{path}: {str(value).lower()} has no effect: {why}"
