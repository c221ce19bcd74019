"""The shapes of Nanotron's and Kénotron's files: all load; what cannot be run says so, once."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from kenotron_config import (
    ConfigError,
    ExistingCheckpointInitConfig,
    MambaInitConfig,
    dump_config,
    ignored_keys,
    json_schema,
    parse_config,
    unavailable,
)
from kenotron_models import config_from_json
from kenotron_models.families import (
    LlamaConfig,
    LlaMoEConfig,
    MambaModelConfig,
    Qwen2Config,
    Starcoder2Config,
)

BASE = yaml.safe_load(Path(__file__).with_name("tiny_llama.yaml").read_text(encoding="utf-8"))
ADAM = {"adam_eps": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.95, "torch_adam_is_fused": True}


def parse(changes, drop=(), **options):
    """The base file with some sections' keys replaced; ``drop`` are dotted keys to leave out."""
    data = json.loads(json.dumps(BASE))
    for path, value in changes.items():
        *parents, name = path.split(".")
        owner = data
        for part in parents:
            owner = owner[int(part) if part.isdecimal() else part]
        owner[name] = value
    for path in drop:
        *parents, name = path.split(".")
        owner = data
        for part in parents:
            owner = owner[part]
        del owner[name]
    return parse_config(yaml.safe_dump(data), "c.yaml", **options)


QWEN = {
    "is_qwen2_config": True, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 300, "rope_theta": 100000,
    "_attn_implementation": "flash_attention_2", "_fused_rms_norm": True, "_use_qkv_packed": True,
    "_fused_rotary_emb": True, "_use_doc_masking": True, "flex_attention_mask": None,
    "sliding_window_size": 20, "no_rope_layer": 2, "z_loss_enabled": False,
    "z_loss_coefficient": 0.0001, "attention_bias": True, "pad_token_id": None,
}  # fmt: skip
MAMBA = {
    "is_mamba_config": True, "d_model": 64, "num_hidden_layers": 2, "vocab_size": 300,
    "dtype": "bfloat16", "fused_add_norm": True, "pad_token_id": None, "rms_norm": True,
    "pad_vocab_size_multiple": 8, "residual_in_fp32": True, "rms_norm_eps": 1e-5,
    "ssm_cfg": {"dt_rank": "auto", "d_state": 16, "bias": False, "dt_init": "random"},
}  # fmt: skip
LLAMOE = {
    "is_llamoe_config": True, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 300,
    "num_hidden_layers": 2, "intermediate_size": 64, "moe_num_experts": 4, "rope_scaling": None,
    "num_experts_per_tok": 2, "moe_capacity_factor": 1,
}  # fmt: skip
STARCODER = {
    "is_starcoder2_config": True, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 300,
    "num_hidden_layers": 2, "grouped_query": True, "num_kv_heads": 2, "sliding_window_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        (QWEN, Qwen2Config),
        (QWEN | {"moe_config": {"num_experts": 8, "top_k": 1, "layers": [-1]}}, Qwen2Config),
        (MAMBA, MambaModelConfig),
        (LLAMOE, LlaMoEConfig),
        (STARCODER, Starcoder2Config),
        ({"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 300}, LlamaConfig),
    ],
)
def test_models_are_told_apart_by_their_marker(sizes, kind):
    config = parse({"model.model_config": sizes})
    assert type(config.model.model_config) is kind
    assert parse_config(dump_config(config), "again") == config
    assert not any("model_config" in line for line in unavailable(config))


def test_keys_with_an_underscore_mean_those_without():
    sizes = parse({"model.model_config": QWEN}).model.model_config
    assert isinstance(sizes, Qwen2Config)
    assert (sizes.attn_implementation, sizes.use_doc_masking) == ("flash_attention_2", True)
    assert sizes.rope_theta == 1e5


def test_flat_adam_keys_are_its_factorys():
    flat = parse(
        {f"optimizer.{name}": value for name, value in ADAM.items()},
        drop=["optimizer.optimizer_factory"],
    )
    assert flat == parse({"optimizer.optimizer_factory": ADAM | {"name": "adamW"}})


def test_changes_on_the_command_line_meet_either_spelling():
    old = json.loads(json.dumps(BASE))
    old["optimizer"].update(old["optimizer"].pop("optimizer_factory"))
    old["optimizer"].pop("name", None)
    old["data"] = old.pop("data_stages")[0]["data"]
    old["datastates"] = {"host_cache_size": 2}
    text = yaml.safe_dump(old)
    for spellings in (
        ("optimizer.adam_eps=3", "optimizer.optimizer_factory.adam_eps=3"),
        ("data.seed=3", "data_stages.0.data.seed=3"),
        ("datastates.parser_threads=3", "checkpoints.datastates.parser_threads=3"),
        ("parallelism.context_parallel_size=2", "parallelism.cp=2"),
    ):
        one, two = (parse_config(text, "c.yaml", [spelling]) for spelling in spellings)
        assert one == two != parse_config(text, "c.yaml")


def test_top_level_data_is_one_stage():
    config = parse({"data": BASE["data_stages"][0]["data"]}, drop=["data_stages"])
    assert [stage.start_training_step for stage in config.data_stages] == [1]


def test_top_level_datastates_chooses_the_engine():
    pool = {"host_cache_size": 2, "parser_threads": 3, "pin_host_cache": False}
    config = parse({"datastates": pool})
    assert config.checkpoints.checkpointing_engine == "datastates"
    assert config.checkpoints.datastates.parser_threads == 3
    named = parse(
        {"checkpoints.datastates": pool, "checkpoints.checkpointing_engine": "DATASTATES"}
    )
    assert named == config


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": {"seed": 1, "dataset": None}}, "data: data_stages is given, too; keep one"),
        ({"optimizer.adam_eps": 1}, "optimizer.adam_eps: optimizer.optimizer_factory is given"),
        (
            {"datastates": {}, "checkpoints.datastates": {}},
            "datastates: checkpoints.datastates is given, too; keep one",
        ),
        (
            {"parallelism.context_parallel_size": 2, "parallelism.cp": 4},
            "parallelism.context_parallel_size: cp is given, too, with another value; keep one",
        ),
    ],
)
def test_what_is_said_twice_is_reported(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse(changes)


def test_old_names_of_keys_mean_the_new_ones():
    config = parse(
        {"model.model_config.interleaved_rotary": True, "parallelism.moe_layer_recompute": False},
        drop=["model.model_config.rope_interleaved"]
        if "rope_interleaved" in BASE["model"]["model_config"]
        else [],
    )
    assert all(block.mixer.rope.interleaved for block in config.decoder.blocks)


@pytest.mark.parametrize(
    ("sizes", "ours", "meant"),
    [
        ({"_attn_implementation": "ring"}, {}, ("ring", 1)),
        ({"_attn_implementation": "ring_flash_triton"}, {}, ("ring", 1)),
        (
            {"_attn_implementation": "llama3_ring_attention", "ring_attn_heads_k_stride": 2},
            {},
            ("gather", 2),
        ),
        ({"_attn_implementation": "ring"}, {"parallelism.cp_attention": "gather"}, ("gather", 1)),
        ({"_attn_implementation": "sdpa"}, {}, ("auto", 1)),
        ({}, {"parallelism.cp_attention": "gather", "parallelism.cp_stride": 4}, ("gather", 4)),
        (
            {"_attn_implementation": "llama3_ring_attention", "ring_attn_heads_k_stride": 2},
            {"parallelism.cp_stride": 2},
            ("gather", 2),
        ),
        ({"_attn_implementation": "ring", "sliding_window_size": 20}, {}, ("ring", 1)),
        ({"_attn_implementation": "ring_flash_triton", "sliding_window_size": 5}, {}, ("ring", 1)),
    ],
)
def test_nanotrons_context_parallelism_means_what_it_says(sizes, ours, meant):
    model = QWEN | {"sliding_window_size": None} | sizes
    changes = {"parallelism.context_parallel_size": 2, "model.model_config": model}
    config = parse(changes | ours)
    assert config.parallelism.cp == 2 and not unavailable(config)
    assert config.world_size == 2 * parse({}).world_size
    assert config.cp_way == meant
    assert parse_config(dump_config(config), "again") == config


def test_two_strides_are_one_too_many():
    ring = {"_attn_implementation": "llama3_ring_attention", "ring_attn_heads_k_stride": 2}
    said = "parallelism.cp_stride: 4 was given; model.model_config.ring_attn_heads_k_stride is 2; "
    with pytest.raises(ConfigError, match=f"{said}keep one"):
        parse({"model.model_config": QWEN | ring, "parallelism.cp_stride": 4})


@pytest.mark.parametrize("attention", ["auto", "plain", "sdpa", "blocked", "flash_attn"])
def test_orders_that_cp_does_not_follow_are_named(attention):
    changes = {"model.model_config": QWEN | {"_attn_implementation": attention}}
    assert ignored_keys(parse(changes)) == ignored_keys(parse({"model.model_config": QWEN}))
    found = ignored_keys(parse(changes | {"parallelism.cp": 2}))
    named = [line for line in found if "attn_implementation" in line]
    assert len(named) == (attention not in ("auto", "plain"))
    for line in named:
        assert line == (
            f"model.model_config.attn_implementation: {attention} has no effect: with "
            "parallelism.cp 2 the kernels of kenotron-cp compute attention; of the orders they "
            "follow only plain"
        )


def test_the_marker_of_another_family_may_say_false_as_older_files_do():
    markers = {"model.model_config.is_qwen2_config": True}
    config = parse({**markers, "model.model_config.is_llama_config": False})
    assert isinstance(config.model.model_config, Qwen2Config)
    with pytest.raises(ConfigError, match="is_qwen2_config: is not a known key"):
        parse({**markers, "model.model_config.is_llama_config": True})


def test_what_cannot_be_evaluated_loads_and_says_so_in_one_sentence():
    config = parse({"lighteval": {"tasks": {"tasks": "lighteval|unknown|0|0"}}})
    assert parse_config(dump_config(config), "again") == config
    (line,) = unavailable(config)
    assert line.startswith("lighteval.tasks.tasks: ")
    assert unavailable(parse({"parallelism.moe_layer_recompute": True})) == []


DATA = [
    ("tokenizer.tokenizer_name_or_path", "gpt2"),
    ("data_stages.0.sequence_length", 16),
    ("data_stages.0.data.dataset", {"hf_dataset_or_datasets": "a", "sft_dataloader": True}),
    ("data_stages.0.data.dataset.hf_dataset_or_datasets", ["a", "b"]),
    ("data_stages.0.data.dataset.hf_dataset_or_datasets", {"a": 0.5, "b": 1}),
    ("data_stages.0.data.dataset.hf_dataset_splits", ["train", "test"]),
    ("data_stages.0.data.dataset.text_column_name", "content"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), DATA)
def test_every_shape_of_data_can_be_run(path, value):
    config = parse({path: value, "model.model_config.vocab_size": 300})
    assert parse_config(dump_config(config), "again") == config
    assert unavailable(config) == []


def test_kinds_of_init_are_told_apart_by_their_keys():
    assert isinstance(
        parse({"model.init_method": {"path": "p"}}).model.init_method, ExistingCheckpointInitConfig
    )
    assert isinstance(
        parse({"model.init_method": {"initializer_range": 0.1}}).model.init_method, MambaInitConfig
    )


def test_stretched_positions_survive_a_checkpoint():
    values = {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = parse({"model.model_config.rope_scaling": values})
    assert unavailable(config) == []
    saved = json.loads(json.dumps(asdict(config.model.model_config)))
    assert config_from_json(saved) == config.model.model_config


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("profiler", {"profiler_export_path": "p", "wait": 1, "warmup": 1, "active": 1}),
        ("metrics_logging", {"log_level": 1, "log_detail_interval": 5}),
        ("metrics_logging", {"log_level": 0}),
        ("general.benchmark_csv_path", "speeds.csv"),
        ("logging.trackers", ["wandb", "tensorboard"]),
    ],
)
def test_every_way_of_watching_can_be_run(path, value):
    config = parse({path: value})
    assert parse_config(dump_config(config), "again") == config
    assert unavailable(config) == []


def test_what_makes_no_difference_to_a_profile_is_said():
    config = parse({"profiler": {"profiler_export_path": "p", "export_chrome_trace": True}})
    assert ignored_keys(config) == [
        "profiler.export_chrome_trace: true has no effect: every trace can be opened in a browser"
    ]


def test_weights_may_be_scaled_by_their_layer():
    assert unavailable(parse({"model.init_method.scaling_method": "layer_index"})) == []


def test_a_profile_must_fit_into_the_training():
    with pytest.raises(ConfigError, match=r"profiler.skip_first: 3 was given; .* needs 33 steps"):
        parse({"profiler": {"profiler_export_path": "p", "active": 28}})


def test_the_schema_names_every_section():
    schema = json.loads(json_schema())
    assert {"general", "model", "data_stages", "lighteval", "doremi"} <= set(schema["properties"])


def test_keys_of_another_loader_are_ignored_aloud():
    nanoset = {"dataset_folder": "a", "skip_in_stream": True, "use_old_brrr_dataloader": True}
    config = parse({"data_stages.1.data.dataset": nanoset})
    path = "data_stages.1.data.dataset"
    assert ignored_keys(config) == [
        f"{path}.skip_in_stream: true has no effect: any sample is found at once",
        f"{path}.use_old_brrr_dataloader: true has no effect: there is one loader",
    ]


OLD_EP = "parallelism.expert_parallel_size"
EXPERTS = QWEN | {"moe_config": {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 16}}
JOINT = QWEN | {"moe_config": {**EXPERTS["moe_config"], "router_aux_loss_type": "all_layers"}}


def test_nanotrons_expert_parallelism_is_a_part_of_a_stages_ranks():
    changes = {"model.model_config": EXPERTS, "parallelism.dp": 2}
    config = parse(changes | {OLD_EP: 2})
    assert config == parse(changes | {"parallelism.ep": 2}, drop=[OLD_EP])
    assert config.world_size == 2 and config.global_batch_size == parse(changes).global_batch_size
    assert not unavailable(config)
    with pytest.raises(ConfigError, match="expert_parallel_size: ep is given, too, with another"):
        parse(changes | {OLD_EP: 2, "parallelism.ep": 1})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.model_config": QWEN, "parallelism.dp": 2, OLD_EP: 2}, "has no experts"),
        ({"model.model_config": EXPERTS, "parallelism.dp": 3, OLD_EP: 3}, "divide the 8 experts"),
        ({"model.model_config": LLAMOE | {"moe_capacity_factor": 2}}, "no token is dropped"),
        ({"model.model_config": EXPERTS | {"moe_config": {"top_k": 9}}}, "be above num_experts"),
        ({"model.model_config": EXPERTS | {"moe_config": {"layers": [7]}}}, "numbers from 0 to"),
        ({"model.model_config": EXPERTS | {"moe_config": {"layers": [1, 1]}}}, "each once"),
        ({"parallelism.ep_chunks": 10**6}, "ep_chunks: 1000000 was given; a rank routes"),
        (
            {"model.model_config": JOINT, "parallelism.pp": 2},
            r"model.model_config.moe_config.router_aux_loss_type: all_layers was given with "
            r"parallelism.pp 2 and pp_engine \w+; this loss needs all layers in one part",
        ),
        (
            {"model.model_config": EXPERTS | {"moe_config": {"expert_capacity_factor": 4}}},
            r"expert_capacity_factor: 4.0 was given; from num_experts / top_k \(4\) on",
        ),
    ],
)
def test_experts_that_do_not_fit_are_named(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse(changes)


def test_a_key_that_a_family_does_not_read_is_refused_by_name():
    """Llama's files have them in Nanotron, and load; other families would ignore them."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 300, "use_cache": True}
    assert parse({"model.model_config": sizes}).model.model_config.use_cache
    for marker in ("is_mistral_config", "is_jamba_config"):
        with pytest.raises(ConfigError) as caught:
            parse({"model.model_config": sizes | {marker: True, "rope_thet": 1.0}})
        said = str(caught.value)
        assert "model.model_config.use_cache: is not a key of this family" in said
        assert "leave it out" in said and "model.model_config.rope_thet: is not a known key" in said


def test_a_saved_config_may_have_keys_that_its_family_had_once():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 300, "use_cache": True}
    config = parse({"model.model_config": sizes | {"is_mistral_config": True}}, saved=True)
    assert type(config.model.model_config).__name__ == "MistralConfig"
    with pytest.raises(ConfigError, match="rope_thet: is not a known key"):
        parse({"model.model_config": sizes | {"is_jamba_config": True, "rope_thet": 1}}, saved=True)
