"""``general.reproducible`` refuses what is not proved, by its key, and nothing else."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kenotron_config import ConfigError, ignored_keys, load_config
from kenotron_optim import OptimizerConfig

FILE = Path(__file__).parent / "tiny_llama.yaml"
FITTING = (
    "general.reproducible=true",
    "optimizer.optimizer_factory.torch_adam_is_fused=false",
    "parallelism.tp=1",
    "parallelism.dp=1",
    "parallelism.pp=1",
    "parallelism.tp_mode=ALL_REDUCE",
    "optimizer.accumulate_grad_in_fp32=true",
)
STARCODER = (
    "model.model_config={is_starcoder2_config: true, hidden_size: 16, intermediate_size: 24, "
    "num_hidden_layers: 2, num_attention_heads: 2, vocab_size: 257, max_position_embeddings: 64, "
    "grouped_query: true, num_kv_heads: 2, attn_pdrop: 0.1, embd_pdrop: 0.2, resid_pdrop: 0.3}"
)
QWEN = (
    "model.model_config={is_qwen2_config: true, hidden_size: 16, intermediate_size: 24, "
    "num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, vocab_size: 257, "
    "max_position_embeddings: 64, moe_config: {num_experts: 4, top_k: 2, "
    "moe_intermediate_size: 8}}"
)
MAMBA = (
    "model.model_config={is_mamba_config: true, d_model: 16, num_hidden_layers: 2, vocab_size: 257}"
)
MUON = "optimizer.optimizer_factory={name: muon, adamw_named_params: []}"
OF_TWELVE_HEADS = (
    "model.model_config={is_llama_config: true, hidden_size: 24, intermediate_size: 24, "
    "num_hidden_layers: 2, num_attention_heads: 12, vocab_size: 257, max_position_embeddings: 64}"
)
"""3 divides all that tp cuts, and is no power of two."""
OF_SIX_FEATURES = OF_TWELVE_HEADS.replace("num_attention_heads: 12", "num_attention_heads: 4")
ONE_KEY_HEAD = (
    "model.model_config={is_llama_config: true, hidden_size: 16, intermediate_size: 24, "
    "num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, vocab_size: 257, "
    "max_position_embeddings: 64}"
)
OLMO = (
    "model.model_config={is_olmo2_config: true, hidden_size: 16, intermediate_size: 24, "
    "num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 257, max_position_embeddings: 64}"
)
PROXY = (
    "doremi={domain_names: [a, b], ref_model_resume_checkpoint_path: reference/100}",
    "data_stages.0.data.dataset.hf_dataset_or_datasets={a: 0.5, b: 0.5}",
)
CHUNKS, ALONE = "general.reproducible_max_cp=2", "general.reproducible_max_tp=1"
REFUSED = {
    "parallelism.tp: 3": ("parallelism.tp=3", OF_TWELVE_HEADS),
    "parallelism.tp: 4": ("parallelism.tp=4", "general.reproducible_max_tp=3", OF_TWELVE_HEADS),
    "parallelism.cp: 2": ("parallelism.cp=2",),
    "parallelism.cp: 4": ("parallelism.cp=4", "general.reproducible_max_cp=2", ALONE),
    "parallelism.cp: 3": ("parallelism.cp=3", "general.reproducible_max_cp=4", ALONE),
    "general.reproducible_max_cp: 2": (CHUNKS, ALONE, OF_SIX_FEATURES),
    "cp must divide the 1 query heads of each of 4 virtual shards": (
        "parallelism.cp=2",
        CHUNKS,
        "general.reproducible_max_tp=4",
        "parallelism.cp_attention=ulysses",
    ),
    "model.compile: true": ("model.compile=true",),
    "model.cuda_graph: true": ("model.cuda_graph=true",),
    "model.dtype: float16": ("model.dtype=float16",),
    "optimizer.optimizer_factory.torch_adam_is_fused: true": (
        MUON.replace("[]", "[], torch_adam_is_fused: true"),
    ),
    "optimizer.shard_ranks: 1": ("optimizer.shard_ranks=1",),
    "optimizer.state_dtype: bfloat16": ("optimizer.state_dtype=bfloat16",),
    "optimizer.offload: True": ("optimizer.offload=true",),
    "optimizer.accumulate_grad_in_fp32: False": ("optimizer.accumulate_grad_in_fp32=false",),
    "tasks of evaluate score texts": (CHUNKS, ALONE, "evaluate={tasks: [arc_easy]}"),
    "metrics_logging: a section": ("metrics_logging={log_level: 1}",),
}
"""The begin of a problem, and settings that have it."""
PROVED = {
    "optimizer_factory", "zero_stage", "reduce", "regather", "weight_decay", "clip_grad",
    "learning_rate_scheduler", "weight_decay_exclude_named_params", "weight_decay_exclude_kinds",
    "lr_multipliers", "nonfinite", "max_rollbacks", "loss_scale", "weight_average", "spikes",
}  # fmt: skip
"""Keys of the optimizer whose values change nothing that depends on a layout."""


@pytest.mark.parametrize("problem", REFUSED)
def test_what_is_not_proved_is_refused(problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(FILE, [*FITTING, *REFUSED[problem]])
    [line] = [each for each in str(error.value).splitlines() if problem in each]
    assert "was given" in line or "were given" in line
    assert "with general.reproducible: true; " in line


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("parallelism.dp=3", "optimizer.zero_stage=3", "optimizer.regather=step"),
        ("parallelism.pp=2", "parallelism.pp_engine=zb-v", "parallelism.recompute=full"),
        ("model.dtype=bfloat16", "optimizer.optimizer_factory={name: sgd, momentum: 0.9}"),
        ("general.reproducible_threads=4", "optimizer.nonfinite=skip"),
        ("parallelism.tp=2", "parallelism.tp_mode=REDUCE_SCATTER", "parallelism.dp=2"),
        ("parallelism.dp=2", QWEN, "evaluate={tasks: [arc_easy]}"),
        ("parallelism.dp=2", STARCODER, MUON),
        ("parallelism.tp=2", "model.mtp={weight: 0.3}", "optimizer.spikes={}"),
        ("model.init_method={use_mup: true, base: {hidden_size: 8}}",),
        ("optimizer.weight_average={decay: 0.9}", CHUNKS, ALONE, STARCODER),
        PROXY,
        (CHUNKS, *PROXY),
        ("parallelism.cp=2", "general.reproducible_max_cp=4", ALONE),
        ("parallelism.cp=2", CHUNKS, "parallelism.tp=2", "parallelism.tp_mode=REDUCE_SCATTER"),
        ("parallelism.cp=2", CHUNKS, "model.mtp={weight: 0.3}"),
        ("parallelism.dp=4", "parallelism.ep=2", "optimizer.zero_stage=3", QWEN),
        ("parallelism.dp=2", "parallelism.tp=2", "parallelism.ep=4", QWEN),
        ("parallelism.cp=2", CHUNKS, "parallelism.tp=2", "parallelism.ep=4", QWEN),
        ("parallelism.cp=2", CHUNKS, "parallelism.tp=2", OLMO),
        ("parallelism.cp=2", CHUNKS, "parallelism.tp=2", MAMBA),
        ("parallelism.cp=2", CHUNKS, ALONE, "parallelism.cp_attention=ulysses", ONE_KEY_HEAD),
    ],
)
def test_the_rest_is_taken(sets: tuple[str, ...]) -> None:
    assert load_config(FILE, [*FITTING, *sets]).general.reproducible


def test_without_the_mode_nothing_is_refused() -> None:
    for sets in REFUSED.values():
        try:
            load_config(FILE, [*FITTING, "general.reproducible=false", *sets])
        except ConfigError as error:
            assert "reproducible" not in str(error)


def test_every_key_of_the_optimizer_is_proved_or_refused() -> None:
    refused = {key.split(":")[0].split(".")[1] for key in REFUSED if key.startswith("optimizer.")}
    assert {field.name for field in fields(OptimizerConfig)} == PROVED | refused


def test_a_time_of_reduction_has_no_effect() -> None:
    config = load_config(FILE, [*FITTING, "optimizer.zero_stage=2", "optimizer.reduce=step"])
    assert "optimizer.reduce: step has no effect" in "\n".join(ignored_keys(config))


def test_ways_to_send_tokens_have_no_effect() -> None:
    model = QWEN.replace("top_k: 2", "top_k: 2, token_dispatcher_type: allgather")
    sets = ("parallelism.dp=2", "parallelism.ep=2", "parallelism.ep_chunks=2", model)
    told = "\n".join(ignored_keys(load_config(FILE, [*FITTING, *sets])))
    assert "parallelism.ep_chunks: 2 has no effect: with general.reproducible" in told
    assert "moe_config.token_dispatcher_type: allgather has no effect" in told


def test_an_ep_that_does_not_divide_the_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="parallelism.ep: 3 was given; it must divide the 4"):
        load_config(FILE, [*FITTING, "parallelism.dp=3", "parallelism.ep=3", QWEN])


def test_a_largest_cp_is_a_power_of_two() -> None:
    told = "general.reproducible_max_cp: 6 was given; it must be a power of two: set it to 4 or 8"
    with pytest.raises(ConfigError, match=told):
        load_config(FILE, ["general.reproducible_max_cp=6"])


def test_a_cp_that_is_refused_names_the_keys_that_fit() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(FILE, [*FITTING, "parallelism.cp=4", CHUNKS, ALONE])
    assert "cp must divide general.reproducible_max_cp (2)" in str(error.value)
    assert "a power of two up to 2, or general.reproducible_max_cp to 4" in str(error.value)


def test_with_chunks_the_order_of_tokens_has_an_effect() -> None:
    sets = [*FITTING, CHUNKS, ALONE, "parallelism.cp_layout=contiguous", "parallelism.cp_block=64"]
    assert not [line for line in ignored_keys(load_config(FILE, sets)) if "cp_" in line]


def test_with_chunks_nothing_is_selected_to_be_computed_again() -> None:
    sets = [*FITTING, "parallelism.recompute=selective"]
    told = "parallelism.recompute: selective has no effect: samples in chunks keep all"
    assert told in "\n".join(ignored_keys(load_config(FILE, [*sets, CHUNKS, ALONE])))
    assert told not in "\n".join(ignored_keys(load_config(FILE, sets)))


def test_a_tp_that_is_refused_names_the_one_that_fits() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(FILE, [*FITTING, "parallelism.tp=3", OF_TWELVE_HEADS])
    assert "the model has 4 virtual shards" in str(error.value)
    assert "general.reproducible_max_tp (8)" in str(error.value)
    assert "set it to a power of two up to 4" in str(error.value)


@pytest.mark.parametrize(
    "key", ["reproducible_threads", "reproducible_max_tp", "reproducible_max_cp"]
)
def test_threads_and_shards_are_numbers(key: str) -> None:
    with pytest.raises(ConfigError, match=f"general.{key}: 0 was given"):
        load_config(FILE, [f"general.{key}=0"])
