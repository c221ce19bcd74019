"""A small copy of a config has the structure of the real one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml

from kenotron_config import DEFAULT_CONFIG, Config, dump_config, unavailable
from kenotron_models import parameter_count
from kenotron_optim import MuonConfig
from kenotron_train.config_file import load_config, parse_config
from kenotron_train.verify.changes import changes
from kenotron_train.verify.shrink import has_documents, on_one_process, shrink
from kenotron_train.verify.shrink_layout import few, fewer_ranks, small_accumulation, small_depth
from kenotron_train.verify.shrink_model import small_heads, small_vocabulary

BASE = yaml.safe_load(DEFAULT_CONFIG.read_text())
FILES = sorted(
    [
        *runs.APP.glob("configs/*.yaml"),
        *runs.APP.glob("examples/[!t]*/*.yaml"),  # tasks are of lm-eval
        DEFAULT_CONFIG,
        runs.TINY_LLAMA,
    ]
)
LLAMA3 = {"factor": 8.0, "rope_type": "llama3", "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "rope_type": "yarn", "original_max_position_embeddings": 32768}


def published(
    family: str, hidden: int, width: int, layers: int, heads: int, kv: int | None, vocab: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Sizes of a model that somebody has published."""
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "vocab_size": vocab, f"is_{family}_config": True}
    if kv is not None:
        sizes["num_kv_heads" if family == "starcoder2" else "num_key_value_heads"] = kv
    return sizes | more


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama 3 8b": (
        published("llama", 4096, 14336, 32, 32, 8, 128256, rope_theta=5e5),
        {"dp": 16, "tp": 8, "tp_mode": "REDUCE_SCATTER"},
    ),
    "llama 3.1 405b": (
        published("llama", 16384, 53248, 126, 128, 8, 128256, rope_scaling=LLAMA3),
        {"dp": 128, "pp": 16, "tp": 8, "pp_engine": "interleaved", "pp_chunks": 4},
    ),
    "llama 3.2 1b": (
        published("llama", 2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
        {"dp": 4, "pp": 2, "recompute": "selective", "recompute_layers": 5, "pp_engine": "zb-v"},
    ),
    "smollm 135m": (
        published("llama", 576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
        {"dp": 2, "pp": 4, "tp": 3, "pp_engine": "zb-h1"},
    ),
    "mistral 7b": (
        published("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window_size=512),
        {"dp": 2, "pp": 5, "tp": 16, "recompute_layer": True},
    ),
    "qwen2 0.5b": (
        published(
            "qwen2", 896, 4864, 24, 14, 2, 151643, tie_word_embeddings=True, attention_bias=True
        ),
        {"dp": 8, "tp": 2, "tp_linear_async_communication": True, "tp_mode": "REDUCE_SCATTER"},
    ),
    "qwen2 7b": (
        published(
            "qwen2", 3584, 18944, 28, 28, 4, 152064, attention_bias=True, use_doc_masking=True,
            rope_scaling=YARN,
        ),
        {"dp": 32, "pp": 4, "tp": 4},
    ),
    "smollm3": (
        published(
            "qwen2", 2048, 11008, 36, 16, 4, 128256, no_rope_layer=4, z_loss_enabled=True,
            sliding_window_size=1024, full_attention_layers=list(range(3, 36, 4)),
        ),
        {"dp": 48, "pp": 1, "tp": 8},
    ),
    "qwen3 0.6b": (
        published("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
        {"dp": 1, "pp": 7, "tp": 1, "pp_engine": "1f1b"},
    ),
    "qwen3 32b": (
        published("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
        {"dp": 4, "pp": 8, "tp": 8, "tp_mode": "REDUCE_SCATTER", "tp_recompute_allgather": False},
    ),
    "starcoder2 3b": (
        published(
            "starcoder2", 3072, 12288, 30, 24, 2, 49152, grouped_query=True,
            sliding_window_size=4096, global_attn_layers=[0, 15],
        ),
        {"dp": 2, "pp": 4, "tp": 4},
    ),
    "one kv head": (
        published("starcoder2", 2048, 8192, 24, 16, None, 49280, use_position_embeddings=True,
                  use_rotary_embeddings=False),
        {"dp": 2, "tp": 2},
    ),
    "olmoe 7b": (
        published("olmoe", 2048, 1024, 16, 16, None, 50304, num_experts=64, num_experts_per_tok=8),
        {"dp": 4, "pp": 2, "tp": 2, "ep": 8, "pp_engine": "zb-h1"},
    ),
    "glm 4.5 air": (
        published(
            "glm4_moe", 4096, 10944, 46, 96, 8, 151552, head_dim=128, attention_bias=True,
            use_qk_norm=True, rope_theta=1e6,
        ),
        {"dp": 16, "pp": 4, "tp": 4, "ep": 16, "tp_mode": "REDUCE_SCATTER"},
    ),
    "fewer layers than stages": (
        published("llama", 512, 1024, 2, 8, 8, 1000), {"dp": 1, "pp": 4, "tp": 1},
    ),
}  # fmt: skip


def configure(name: str, **sections: dict[str, Any]) -> Config:
    """The config of a published model; further values by section."""
    sizes, layout = SHAPES[name]
    data = yaml.safe_load(yaml.safe_dump(BASE))
    sequence = {"sequence_length": 4096, "micro_batch_size": 3, "train_steps": 10**5}
    data["parallelism"] = {"dp": 1, "pp": 1, "tp": 1} | layout
    data["model"] |= {"model_config": sizes, "dtype": "bfloat16"}
    data["tokens"] = sequence | {"batch_accumulation_per_replica": 16}
    for section, values in sections.items():
        data[section] |= values
    return parse_config(yaml.safe_dump(data), name)


def structure(config: Config) -> dict[str, Any]:
    """Everything that must not change, but the sizes of axes."""
    spec, sizes, tokens = config.decoder, config.parallelism, config.tokens
    optim, layers = config.optimizer, range(config.decoder.num_hidden_layers)
    depth, stages = spec.num_hidden_layers, sizes.pp * sizes.schedule.chunks
    unit = config.model.make_vocab_size_divisible_by * sizes.tp
    sequence = config.longest_sequence
    mixers, block = [block.mixer for block in spec.blocks], spec.blocks[0]
    first, windows = mixers[0], [mixer.window for mixer in mixers]
    shared = sum(window is None for window in windows)
    ropes = [mixer.rope for mixer in mixers if mixer.rope is not None]
    again = {sizes.recompute_of(layer) for layer in layers}
    whole = first.heads * first.head_dim
    return {
        "family": type(config.model.model_config),
        "tied": spec.tie_word_embeddings,
        "axes": (sizes.dp > 1, sizes.pp > 1, sizes.tp > 1),
        "mode": (sizes.mode, sizes.schedule.name),
        "layers over stages": (depth % stages == 0, depth < stages),
        "kv heads": (first.kv_heads == first.heads, first.kv_heads < sizes.tp),
        "heads": (whole > spec.hidden_size) - (whole < spec.hidden_size),
        "vocabulary": (spec.vocab_size % sizes.tp == 0, spec.vocab_size % unit == 0),
        "windows": (spec.window is not None, (spec.window or sequence) < sequence),
        "without window": (shared == 0, shared == depth),
        "positions": ({(r.theta, r.interleaved) for r in ropes}, spec.learned_positions),
        "a part turns": {r.share < 1 for r in ropes},
        "no positions": {mixer.rope is None for mixer in mixers},
        "stretched": {rope.scaling and rope.scaling.rope_type for rope in ropes},
        "biases": (first.qkv_bias, first.out_bias, getattr(block.feed_forward, "bias", False)),
        "feed-forwards": {getattr(block.feed_forward, "name", "") for block in spec.blocks},
        "norms": (spec.norm, block.norm, first.qk_norm, first.qk_norm_over),
        "experts": {getattr(block.feed_forward, "shared_gate", None) for block in spec.blocks},
        "loss": (spec.z_loss, spec.embedding_dropout, block.dropout),
        "documents": has_documents(config) if tokens.train_steps > 10 else None,
        "again": again,
        "compile": config.model.compile,
        "micro-batches": (
            tokens.batch_accumulation_per_replica > 1,
            tokens.batch_accumulation_per_replica >= sizes.pp,
            tokens.batch_accumulation_per_replica % sizes.pp == 0,
        ),
        "optimizer": (optim.zero_stage, optim.weight_decay, type(optim.optimizer_factory)),
        "clips": optim.clip_grad is not None,
        "rates": optim.learning_rate_scheduler.lr_decay_style,
    }


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_shape_keeps_its_structure(name: str) -> None:
    config = configure(name)
    small = shrink(config, 8, 3)
    before, after = structure(config), structure(small)
    assert after == before | {"documents": None}
    assert small.world_size <= 8
    assert parameter_count(small.decoder) < 3e6
    assert structure(on_one_process(small))["tied"] == before["tied"]
    assert parse_config(dump_config(small), "small") == small


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_files_of_the_repository_keep_their_structure(path: Path) -> None:
    config = load_config(path)
    small = shrink(config, 8, 3)
    assert structure(small) | {"documents": None} == structure(config) | {"documents": None}
    assert small.global_batch_size == on_one_process(small).global_batch_size
    assert on_one_process(small).world_size == 1
    assert not unavailable(small)


@pytest.mark.parametrize("name", ["llama 3 8b", "qwen2 7b"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 16])
def test_the_copy_has_no_more_ranks_than_are_given(name: str, ranks: int) -> None:
    small = shrink(configure(name), ranks, 3)
    assert math.ceil(ranks / 2) <= small.world_size <= ranks


def test_what_the_copy_does_not_need_is_gone() -> None:
    config = load_config(
        DEFAULT_CONFIG,
        [
            "checkpoints.resume_checkpoint_path=/nowhere/5",
            "model.init_method={path: /nowhere/model}",
            "tokenizer.tokenizer_name_or_path=/nowhere/tokenizer",
            "s3_upload={upload_s3_path: 's3://bucket/x'}",
            "data_stages.0.data.dataset={dataset_folder: /nowhere/tokens}",
        ],
    )
    assert "nowhere" not in dump_config(shrink(config, 8, 3))
    assert shrink(config, 8, 3).s3_upload is None
    assert has_documents(config)


def test_rules_for_layers_that_the_copy_has_not_are_left_out() -> None:
    patterns = [r"layers\.31\..*", r"head\..*", r"head\.weight", r"layers\..*"]
    config = configure(
        "llama 3 8b",
        optimizer={
            "lr_multipliers": [{"pattern": p, "multiplier": 2.0} for p in patterns if "t" not in p],
            "weight_decay_exclude_named_params": patterns[:2],
        },
    )
    small = shrink(config, 8, 3).optimizer
    assert [rule.pattern for rule in small.lr_multipliers] == [r"head\..*", r"layers\..*"]
    assert small.weight_decay_exclude_named_params == (r"head\..*",)
    muon = replace(
        config.optimizer, optimizer_factory=MuonConfig(adamw_named_params=(patterns[0],))
    )
    rule = shrink(replace(config, optimizer=muon), 8, 3).optimizer.optimizer_factory
    assert isinstance(rule, MuonConfig) and rule.adamw_named_params == ()


def test_every_change_is_told() -> None:
    config = configure("qwen3 32b")
    told = {key: (old, new) for key, old, new in changes(config, shrink(config, 8, 3))}
    assert told["parallelism.tp"] == ("8", "2")
    assert told["model.dtype"] == ("bfloat16", "float32")
    assert told["model.model_config.head_dim"] == ("128", "8")
    assert "model.model_config.tie_word_embeddings" not in told
    assert "parallelism.tp_mode" not in told


@pytest.mark.parametrize(
    ("given", "ranks", "kept"),
    [
        ((16, 64, 8), 8, (2, 2, 2)),
        ((1, 64, 1), 8, (1, 8, 1)),
        ((4, 1, 8), 8, (2, 1, 4)),
        ((1, 3, 2), 8, (1, 3, 2)),
        ((2, 2, 2), 4, (2, 1, 2)),
        ((2, 2, 2), 2, (1, 1, 2)),
    ],
)
def test_axes_keep_two_ranks_while_they_can(given: tuple, ranks: int, kept: tuple) -> None:
    names = ("pp", "dp", "tp")
    section = replace(configure("one kv head").parallelism, **dict(zip(names, given, strict=True)))
    small = fewer_ranks(section, ranks)
    assert tuple(getattr(small, name) for name in names) == kept


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((32, 8, 8, 2), (8, 2)),
        ((32, 32, 8, 4), (8, 8)),
        ((32, 1, 1, 1), (4, 1)),
        ((32, 4, 8, 2), (4, 1)),
        ((32, 2, 8, 4), (8, 1)),
        ((14, 2, 2, 2), (6, 2)),
        ((36, 12, 4, 4), (16, 8)),
        ((27, 9, 1, 1), (9, 3)),
    ],
)
def test_heads_lie_on_ranks_as_before(given: tuple, kept: tuple) -> None:
    assert small_heads(*given) == kept


def test_numbers_stay_even_or_odd() -> None:
    assert [few(n, 4) for n in (1, 2, 3, 4, 5, 6, 7)] == [1, 2, 3, 4, 3, 4, 3]
    assert [few(n, 2) for n in (1, 2, 3, 4)] == [1, 2, 2, 2]
    assert small_vocabulary(32000, (16, 16 * 128), (2, 2 * 8)) == 98
    assert small_vocabulary(32000, (16, 16), (2, 2)) == 96
    assert small_vocabulary(257, (2, 2), (2, 2)) == 97
    assert small_depth(61, 4, 2, None) == (3, 1)
    assert small_depth(36, 4, 2, 4) == (4, 4)
    assert small_depth(2, 4, 4, None) == (2, 2)
    assert [small_accumulation(n, 4, 2) for n in (1, 3, 4, 16, 5)] == [1, 1, 2, 4, 3]


@pytest.mark.parametrize(
    ("sequence", "cp", "ranks", "length"),
    [
        (4096, 8, 8, 32),  # 16 strips divide both
        (50, 2, 8, 31),  # neither, so that both have padding
        (4100, 4, 2, 31),
        (4098, 3, 4, 30),  # 6 strips
        (4099, 3, 4, 32),
        (4100, 2, 1, 32),  # one process has no padding
        (20, 2, 8, 20),
    ],
)
def test_samples_have_padding_where_they_had(
    sequence: int, cp: int, ranks: int, length: int
) -> None:
    layout = {"dp": 1, "pp": 1, "tp": 1, "cp": cp}
    config = configure("llama 3.2 1b", parallelism=layout, tokens={"sequence_length": sequence})
    small = shrink(config, ranks, 2)
    assert small.longest_sequence == length and small.parallelism.cp == min(cp, ranks)
