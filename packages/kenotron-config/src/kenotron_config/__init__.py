"""The YAML of a training run: its sections, their checks, and errors that name the key."""

from kenotron_config.availability import unavailable
from kenotron_config.batch_sizes import BatchSizes
from kenotron_config.cautions import cautions
from kenotron_config.config import Config
from kenotron_config.doremi_section import DoReMiConfig
from kenotron_config.elastic import for_processes
from kenotron_config.eval_sections import LightEvalConfig
from kenotron_config.evaluate_section import EvaluateConfig, EvaluationJobConfig
from kenotron_config.ignored import ignored_keys, unread_model_keys
from kenotron_config.init_sections import (
    ExistingCheckpointInitConfig,
    MambaInitConfig,
    RandomInitConfig,
    SpectralMupInitConfig,
)
from kenotron_config.masking import EnvText, Mask, credentials, masked, public
from kenotron_config.parallelism_section import ParallelismConfig
from kenotron_config.parametrisation import multipliers_in
from kenotron_config.reference import config_reference, json_schema
from kenotron_config.sections import (
    Device,
    GeneralConfig,
    LoggingConfig,
    ModelConfig,
    TokenizerConfig,
    TokensConfig,
)
from kenotron_config.watch_sections import MetricsLoggingConfig, ProfilerConfig
from kenotron_config.yaml_config import (
    DEFAULT_CONFIG,
    ConfigError,
    dump_config,
    load_config,
    parse_config,
)

__all__ = [
    "DEFAULT_CONFIG",
    "BatchSizes",
    "Config",
    "ConfigError",
    "Device",
    "DoReMiConfig",
    "EnvText",
    "EvaluateConfig",
    "EvaluationJobConfig",
    "ExistingCheckpointInitConfig",
    "GeneralConfig",
    "LightEvalConfig",
    "LoggingConfig",
    "MambaInitConfig",
    "Mask",
    "MetricsLoggingConfig",
    "ModelConfig",
    "ParallelismConfig",
    "ProfilerConfig",
    "RandomInitConfig",
    "SpectralMupInitConfig",
    "TokenizerConfig",
    "TokensConfig",
    "cautions",
    "config_reference",
    "credentials",
    "dump_config",
    "for_processes",
    "ignored_keys",
    "json_schema",
    "load_config",
    "masked",
    "multipliers_in",
    "parse_config",
    "public",
    "unavailable",
    "unread_model_keys",
]
