"""What a key is changed to, and the training in which that is seen: one table of all keys.

A key that is not named here is changed to another value of its type in the training of its form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LLAMA = {
    "is_llama_config": True, "vocab_size": 257, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": 256,
    "eos_token_id": 256,
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "is_llama_config": ..., "is_mixtral_config": True, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
BASE: dict[str, Any] = {
    "general": {"project": "keys", "run": "one", "seed": 42},
    "parallelism": {"dp": 1, "pp": 1, "tp": 1},
    "model": {"dtype": "float32", "init_method": {"std": 0.02}, "model_config": LLAMA},
    "tokenizer": {"tokenizer_name_or_path": None},
    "tokens": {
        "sequence_length": 16, "train_steps": 4, "micro_batch_size": 1,
        "batch_accumulation_per_replica": 4, "limit_val_batches": 1,
    },
    "optimizer": {
        "zero_stage": 0, "weight_decay": 0.1, "clip_grad": 1.0, "accumulate_grad_in_fp32": True,
        "optimizer_factory": {
            "name": "adamW", "adam_eps": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.95,
            "torch_adam_is_fused": False,
        },
        "learning_rate_scheduler": {
            "learning_rate": 0.01, "lr_warmup_steps": 2, "lr_decay_style": "linear",
        },
    },
    "checkpoints": {"checkpoints_path": "run", "checkpoint_interval": 2},
    "data_stages": [
        {
            "name": "one", "start_training_step": 1,
            "data": {"dataset": {"hf_dataset_or_datasets": "TEXT"}, "seed": 1},
        }
    ],
}  # fmt: skip
"""A training of one process; ``TEXT``, ``TOKENS``, ``CHATS`` stand for folders of data."""

FACTORY, METHOD, DATASET = (
    "optimizer.optimizer_factory",
    "model.init_method",
    "data_stages[].data.dataset",
)
SCHEDULE = "optimizer.learning_rate_scheduler"
COUNTED = {"logging.communication": True}
DP = {"parallelism.dp": 2, "optimizer.zero_stage": 1, **COUNTED}
ZERO = {**DP, "optimizer.zero_stage": 3}
TP = {"parallelism.tp": 2, "parallelism.tp_mode": "REDUCE_SCATTER", **COUNTED}
PP = {"parallelism.pp": 2, "parallelism.pp_engine": "1f1b", **COUNTED}
CP = {"parallelism.cp": 2, **COUNTED}
EP = {"parallelism.dp": 2, "parallelism.ep": 2, "model.model_config": MIXTRAL, **COUNTED}
MUP = {METHOD: {"use_mup": True, "rule": "spectral", "base": {"hidden_size": 8}}}
QWEN = {**LLAMA, "is_llama_config": ..., "is_qwen2_config": True, "attention_bias": True}
MAMBA = {
    "is_mamba_config": True, "d_model": 16, "num_hidden_layers": 2, "vocab_size": 257,
    "ssm_cfg": {"d_state": 4}, "rms_norm": True, "fused_add_norm": True, "residual_in_fp32": True,
    "pad_vocab_size_multiple": 8, "pad_token_id": None, "dtype": "float32", "rms_norm_eps": 1e-5,
}  # fmt: skip
DOMAINS = {
    "doremi": {"domain_names": "first,second", "domain_weights": [0.5, 0.5]},
    f"{DATASET}.hf_dataset_or_datasets": "DOMAINS",
}
LONGER = {"tokens.train_steps": 6, f"{SCHEDULE}.min_decay_lr": 0.001}
PROXY = {
    "doremi.ref_model_resume_checkpoint_path": "REFERENCE",
    "doremi.reference_losses_path": "LOSSES",
}
HALF = {"model.dtype": "bfloat16"}
HIGH = {f"{SCHEDULE}.learning_rate": 1e30, "optimizer.clip_grad": None}
"""Steps that are not finite."""
JUMPS = {
    f"{SCHEDULE}.learning_rate": 1.0, "tokens.train_steps": 8,
    "optimizer.spikes": {"window": 4, "sigma": 1.0},
}  # fmt: skip
SCALED = {"model.dtype": "float16", "optimizer.loss_scale": {"initial": 2.0**24}}
RESUMED = {"checkpoints.resume_checkpoint_path": "CHECKPOINT", "tokens.train_steps": 6}
BEHIND = {"checkpoints.checkpointing_engine": "datastates"}
JOB = {"evaluate": {"perplexity": True, "ranks": "job", "interval": 2, "job": {"nodes": 1}}}

OF_FORMS: dict[str, dict[str, Any]] = {
    "SpectralMupInitConfig": MUP,
    "ExistingCheckpointInitConfig": {METHOD: {"path": "CHECKPOINT"}},
    "SGDConfig": {FACTORY: {"name": "sgd", "momentum": 0.5, "dampening": 0.1}},
    "MuonConfig": {FACTORY: {"name": "muon"}},
    "BatchRampConfig": {"tokens.batch_ramp": {"start": 2, "increment": 1, "samples": 6}},
    "MTPConfig": {"model.mtp": {"layers": 1}},
    "AdapterConfig": {"model.adapter": {"rank": 2}},
    "LRMultiplier": {"optimizer.lr_multipliers": [{"pattern": "lm_head", "multiplier": 2.0}]},
    "WeightAverageConfig": {"optimizer.weight_average": {"decay": 0.5}},
    "SpikeConfig": {"optimizer.spikes": {"window": 2, "sigma": 3.0}},
    "LossScaleConfig": {"model.dtype": "float16"},
    "DataStatesConfig": {
        "checkpoints.checkpointing_engine": "datastates",
        "checkpoints.datastates": {"host_cache_size": 1},
    },
    "NanosetDatasetsConfig": {DATASET: {"dataset_folder": "TOKENS"}},
    "SFTDatasetsConfig": {DATASET: {"hf_dataset_or_datasets": "CHATS", "sft_dataloader": True}},
    "ProfilerConfig": {"profiler": {"profiler_export_path": "traces", "skip_first": 0}},
    "EvaluateConfig": {
        "evaluate": {
            "perplexity": True,
            "interval": 2,
            "tasks": ["house_qa"],
            "task_folders": ["TASKS"],
            "trust_task_files": True,
        }
    },
    "EvaluationJobConfig": JOB,
    "S3UploadConfig": {"s3_upload": {"upload_s3_path": "BUCKET"}},
    "MetricsLoggingConfig": {"metrics_logging": {"log_level": 1, "log_detail_interval": 1}},
    "DoReMiConfig": DOMAINS,
    "MambaInitConfig": {"model.model_config": MAMBA, METHOD: {"initializer_range": 0.02}},
}
"""What makes a section take this form."""


@dataclass(frozen=True)
class Change:
    """A value for a key, in a training with other values elsewhere."""

    value: Any
    where: dict[str, Any] = field(default_factory=dict)


CHANGES: dict[str, Change | tuple[Change, ...]] = {
    "GeneralConfig.run": Change("other"),
    "GeneralConfig.ignore_sanity_checks": Change(False, DP),
    "GeneralConfig.reproducible_max_tp": Change(1, {"general.reproducible": True}),
    "GeneralConfig.reproducible_max_cp": Change(
        2, {"general.reproducible": True, "general.reproducible_max_tp": 1}
    ),
    "GeneralConfig.reproducible_threads": Change(2, {"general.reproducible": True}),
    "ParallelismConfig.dp": Change(2),
    "ParallelismConfig.pp": Change(2),
    "ParallelismConfig.tp": Change(2),
    "ParallelismConfig.pp_engine": tuple(
        Change(name, PP) for name in ("afab", "interleaved", "zb-h1", "zb-v")
    ),
    "ParallelismConfig.pp_chunks": Change(1, {**PP, "parallelism.pp_engine": "interleaved"}),
    "ParallelismConfig.tp_mode": Change("ALL_REDUCE", TP),
    "ParallelismConfig.tp_linear_async_communication": Change(True, TP),
    "ParallelismConfig.tp_recompute_allgather": Change(False, TP),
    "ParallelismConfig.recompute": tuple(
        Change(name) for name in ("full", "selective", "mixer", "feed_forward")
    ),
    "ParallelismConfig.recompute_layers": Change(1, {"parallelism.recompute": "full"}),
    "ParallelismConfig.recompute_memory_gb": Change(1e-5),
    "ParallelismConfig.ep": Change(2, {**EP, "parallelism.ep": 1}),
    "ParallelismConfig.ep_chunks": Change(2, EP),
    "ParallelismConfig.moe_layer_recompute": Change(True, EP),
    "ParallelismConfig.cp": Change(2),
    "ParallelismConfig.cp_attention": tuple(
        Change(name, {**CP, "parallelism.cp_attention": other})
        for name, other in (("ring", "gather"), ("gather", "ring"), ("ulysses", "ring"))
    ),
    "ParallelismConfig.cp_layout": Change("contiguous", CP),
    "ParallelismConfig.cp_stride": Change(2, {**CP, "parallelism.cp_attention": "gather"}),
    "ParallelismConfig.cp_block": Change(4, CP),
    "ModelConfig.make_vocab_size_divisible_by": Change(8),
    "ModelConfig.ddp_bucket_cap_mb": Change(1, {**DP, "model.model_config.vocab_size": 20_000}),
    "RandomInitConfig.scaling_method": tuple(
        Change(name) for name in ("NONE", "LAYER_INDEX", "MODEL_SCALE")
    ),
    "SpectralMupInitConfig.base": Change({"hidden_size": 4}),
    "ModelConfig.compile": Change(True),
    "ExistingCheckpointInitConfig.accept_changed_rope": Change(
        True, {"model.model_config.rope_theta": 500.0}
    ),
    "ExistingCheckpointInitConfig.check": Change(False, {METHOD: {"path": "MODEL"}}),
    "TokenizerConfig.tokenizer_max_length": Change(8),
    "TokensConfig.val_check_interval": Change(2),
    "AdapterConfig.targets": Change(["q_proj"]),
    "LRMultiplier.pattern": Change("embedding.*"),
    "LRMultiplier.role": tuple(
        Change(role, {"optimizer.lr_multipliers": [{"role": "output", "multiplier": 2.0}]})
        for role in ("embedding", "hidden", "residual", "norm", "router")
    ),
    "LRMultiplier.multiplier": Change(
        0.5, {"optimizer.lr_multipliers": [{"role": "output", "multiplier": 2.0}]}
    ),
    "LRSchedulerConfig.lr_decay_style": tuple(
        Change(style, LONGER) for style in ("cosine", "1-sqrt", "inverse-sqrt", "constant")
    ),
    "LRSchedulerConfig.lr_decay_steps": Change(2, LONGER),
    "LRSchedulerConfig.min_decay_lr": Change(0.005),
    "LRSchedulerConfig.lr_decay_starting_step": Change(3, LONGER),
    "SpikeConfig.sigma": Change(0.5, JUMPS),
    "SpikeConfig.window": Change(5, JUMPS),
    "OptimizerConfig.nonfinite": tuple(
        Change(policy, HIGH) for policy in ("skip", "rollback", "continue")
    ),
    "OptimizerConfig.max_rollbacks": Change(
        1, {**HIGH, "optimizer.nonfinite": "rollback", "checkpoints.save_initial_state": True}
    ),
    "OptimizerConfig.accumulate_grad_in_fp32": Change(False, HALF),
    "OptimizerConfig.weight_decay_exclude_named_params": Change([".*norm.*"]),
    "OptimizerConfig.weight_decay_exclude_kinds": tuple(
        Change([kind], {"model.model_config": QWEN}) for kind in ("norms", "biases", "embeddings")
    ),
    "MuonConfig.adamw_named_params": Change([".*down.*"]),
    "LossScaleConfig.growth_interval": Change(
        2, {"model.dtype": "float16", "optimizer.loss_scale": {"growth_interval": 1}}
    ),
    "LossScaleConfig.maximum": Change(
        2.0**17, {"model.dtype": "float16", "optimizer.loss_scale": {"growth_interval": 1}}
    ),
    "LossScaleConfig.backoff": Change(0.25, SCALED),
    "LossScaleConfig.minimum": Change(2.0**23, SCALED),
    "CheckpointsConfig.save_final_state": Change(False, {"tokens.train_steps": 5}),
    "CheckpointsConfig.load_optimizer": Change(False, RESUMED),
    "CheckpointsConfig.load_lr_scheduler": Change(False, RESUMED),
    "CheckpointsConfig.keep_every": Change(
        2, {"checkpoints.keep_last": 1, "tokens.train_steps": 5}
    ),
    "CheckpointsConfig.accept_changed_rope": Change(
        True, {**RESUMED, "model.model_config.rope_theta": 500.0}
    ),
    "CheckpointsConfig.on_save_failure": Change(
        "raise", {"checkpoints.checkpoints_path": "blocked"}
    ),
    "DataStatesConfig.host_cache_size": Change(2),
    "DataStatesConfig.parser_threads": Change(3),
    "LoggingConfig.log_level": tuple(
        Change(level) for level in ("warning", "error", "critical", "passive")
    ),
    "LoggingConfig.trackers": Change("tensorboard"),
    "PretrainDatasetsConfig.hf_dataset_or_datasets": Change("ROWS"),
    "PretrainDatasetsConfig.text_column_name": (
        Change("other"),
        Change("other", {f"{DATASET}.hf_dataset_or_datasets": "ROWS"}),
    ),
    "NanosetDatasetsConfig.dataset_folder": Change("MORE"),
    "NanosetDatasetsConfig.dataset_read_path": Change("MORE"),
    "NanosetDatasetsConfig.dataset_weights": Change(
        [0.5, 0.5], {DATASET: {"dataset_folder": ["TOKENS", "MORE"]}}
    ),
    "NanosetDatasetsConfig.dataset_max_tokens": Change([200]),
    "NanosetDatasetsConfig.vocab_size": Change(100),
    "NanosetDatasetsConfig.shuffle_files": Change(True),
    "SFTDatasetsConfig.debug_max_samples": Change(20),
    "DatasetStageConfig.sequence_length": Change(8),
    "DatasetStageConfig.batch_accumulation_per_replica": Change(2),
    "EvaluateConfig.max_length": Change(8),
    "EvaluateConfig.tasks": Change([]),
    "EvaluateConfig.num_fewshot": Change(2),
    "EvaluateConfig.limit": Change(2),
    **{
        f"EvaluationJobConfig.{key}": Change(2)
        for key in ("gpus_per_node", "pp", "tp", "ep", "nodes", "cpus_per_task")
    },
    **{
        f"DoReMiConfig.{key}": (Change(value), Change(value, PROXY))
        for key, value in (
            ("smoothing_param", 0.1),
            ("step_size", 0.5),
            ("reference_losses_path", "elsewhere"),
        )
    },
    "DoReMiConfig.domain_weights": Change([0.75, 0.25]),
    "DoReMiConfig.domain_names": Change("second,first"),
    "DoReMiConfig.ref_model_resume_checkpoint_path": Change("REFERENCE"),
    "S3UploadConfig.upload_s3_path": Change("file://relative"),
    "OptimizerConfig.zero_stage": tuple(Change(stage, DP) for stage in (0, 2, 3)),
    "OptimizerConfig.reduce": Change("step", {**DP, "optimizer.zero_stage": 2}),
    "OptimizerConfig.regather": Change("step", ZERO),
    "OptimizerConfig.shard_ranks": Change(1, DP),
}
"""Values that a key's type does not tell."""
ELSEWHERE = {
    "AdapterConfig.path": (
        "test_train_adapters.py", "test_training_is_that_of_peft_and_each_reads_the_others_files"
    ),
    "CheckpointsConfig.memory_every": (
        "test_train_memory_copies.py", "test_no_more_steps_are_made_again_than_asked"
    ),
    "CheckpointsConfig.memory_path": (
        "test_train_memory_copies.py", "test_the_next_start_resumes_from_memory"
    ),
    "EvaluateConfig.batch_size": ("test_train_evaluate.py", "test_so_many_texts_are_read_together"),
    "CheckpointsConfig.accept_changed_data": (
        "test_train_changed_data.py", "test_one_changed_character_of_the_text_ends_a_resumed_run"
    ),
    "ParallelismConfig.dp_auto": (
        "test_train_elastic.py", "test_ranks_are_killed_one_after_another"
    ),
    "ParallelismConfig.leave_out_slow": (
        "test_train_slow_ranks.py", "test_a_slow_rank_is_left_out"
    ),
    "TokensConfig.global_batch_size": (
        "test_train_elastic.py", "test_ranks_are_killed_one_after_another"
    ),
}  # fmt: skip
"""Keys whose effect needs more than a config, and the test that shows it."""
