"""``verify`` on every kind of layout: one process of the same config can be made, and agrees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import grid
import grid_run
import pytest
from grid_table import rows_of

from kenotron_config import DEFAULT_CONFIG, Config, ParallelismConfig
from kenotron_optim import OptimizerConfig
from kenotron_train.cli import main
from kenotron_train.config_file import load_config
from kenotron_train.verify.shrink import OF_THE_LAYOUT, on_one_process, shrink

MODEL = (
    "{is_qwen2_config: true, hidden_size: 256, intermediate_size: 96, vocab_size: 257, "
    "num_hidden_layers: 8, num_attention_heads: 8, num_key_value_heads: 8, moe_config: "
    "{num_experts: 8, top_k: 2, moe_intermediate_size: 24, router_aux_loss_coef: 0.01}}"
)
BASE = {
    "dp": 8, "pp": 2, "tp": 2, "cp": 2, "ep": 4, "pp_engine": "interleaved", "pp_chunks": 2,
    "tp_mode": "REDUCE_SCATTER",
}  # fmt: skip
"""A layout with every axis; a key of it may be another one."""
LAYOUTS: dict[str, list[dict[str, object]]] = {
    "dp": [{"dp": 4}],
    "dp_auto": [{"dp_auto": "true"}],
    "leave_out_slow": [{"leave_out_slow": 5, "dp_auto": "true"}],
    "pp": [{"pp": 4}],
    "tp": [{"tp": 4}],
    "pp_engine": [{"pp_engine": e, "pp_chunks": "null"} for e in ("1f1b", "afab", "zb-h1", "zb-v")],
    "pp_chunks": [{"pp_chunks": 4}],
    "tp_mode": [{"tp_mode": "ALL_REDUCE"}],
    "tp_linear_async_communication": [{"tp_linear_async_communication": "true"}],
    "recompute_layer": [{"recompute_layer": "true"}],
    "recompute": [{"recompute": each} for each in ("full", "selective", "mixer", "feed_forward")],
    "recompute_layers": [{"recompute": "full", "recompute_layers": 1}],
    "recompute_memory_gb": [{"recompute_memory_gb": 1}],
    "tp_recompute_allgather": [{"tp_recompute_allgather": "false"}],
    "ep": [{"ep": 1}],
    "ep_chunks": [{"ep_chunks": 2}],
    "cp": [{"cp": 4}],
    "cp_attention": [{"cp_attention": each} for each in ("gather", "ulysses", "ring")],
    "cp_layout": [{"cp_layout": "contiguous"}],
    "cp_stride": [{"cp_attention": "gather", "cp_stride": 4}],
    "cp_block": [{"cp_block": 64}],
    "moe_layer_recompute": [{"moe_layer_recompute": "true"}],
}
"""A value, or several, of every key of ``parallelism``, with what it needs next to it."""
OPTIMIZERS: dict[str, list[dict[str, object]]] = {
    "zero_stage": [{"zero_stage": stage} for stage in range(4)],
    "reduce": [{"zero_stage": 2, "reduce": "step"}],
    "regather": [{"zero_stage": 3, "regather": "step"}],
    "shard_ranks": [{"zero_stage": 3, "shard_ranks": each} for each in (1, 2, 4, 8)],
    "offload": [{"offload": "true"}],
}
"""The same for the keys of the optimizer that belong to the layout."""
OF_NUMBERS = {
    "optimizer_factory", "state_dtype", "weight_decay", "clip_grad", "accumulate_grad_in_fp32",
    "learning_rate_scheduler", "weight_decay_exclude_named_params", "weight_decay_exclude_kinds",
    "lr_multipliers", "nonfinite", "max_rollbacks", "weight_average", "spikes", "loss_scale",
}  # fmt: skip
"""Keys of the optimizer that one process keeps."""


def configs() -> Iterator[tuple[str, Config]]:
    for key, values in [*LAYOUTS.items(), *OPTIMIZERS.items()]:
        for each in values:
            layout = {**BASE, **each} if key in LAYOUTS else BASE
            sets = [f"parallelism.{name}={value}" for name, value in layout.items()]
            if key in OPTIMIZERS:
                sets += [f"optimizer.{name}={value}" for name, value in each.items()]
            yield str(each), load_config(DEFAULT_CONFIG, [f"model.model_config={MODEL}", *sets])


def test_every_key_is_of_the_layout_or_of_the_numbers() -> None:
    assert LAYOUTS.keys() == {field.name for field in fields(ParallelismConfig)}
    assert OPTIMIZERS.keys() == set(OF_THE_LAYOUT)
    assert {field.name for field in fields(OptimizerConfig)} == OF_NUMBERS | set(OF_THE_LAYOUT)


def plain(config: Config) -> Config:
    """The config of one process, which must have no key of a layout."""
    one = on_one_process(config)
    assert one.parallelism == ParallelismConfig(dp=1, pp=1, tp=1)
    defaults = {field.name: field.default for field in fields(OptimizerConfig)}
    defaults["zero_stage"] = 0
    assert all(getattr(one.optimizer, name) == defaults[name] for name in OF_THE_LAYOUT)
    return one


@pytest.mark.parametrize("ranks", [8, 1])
def test_one_process_has_no_key_of_a_layout(ranks: int) -> None:
    for _, config in configs():
        small = shrink(config, ranks, 2)
        one = plain(small)
        samples = [
            each.tokens.batch_accumulation_per_replica * each.parallelism.dp
            for each in (small, one)
        ]
        assert samples[0] == samples[1]
    for text in ("model.cuda_graph=true", "model.compile=true"):
        alone = load_config(DEFAULT_CONFIG, [text, "parallelism.tp=1"])
        assert plain(shrink(alone, ranks, 2)).model.cuda_graph is False


@pytest.mark.parametrize("section", grid.SECTIONS)
def test_rows_of_the_grid_have_one_process(section: str, tmp_path: Path) -> None:
    for row in rows_of(section):
        plain(shrink(grid_run.configure(row, tmp_path, "run", 2, None), 8, 2))


@pytest.mark.parametrize(
    "sets",
    [
        ("parallelism.dp=4", "optimizer.zero_stage=3", "optimizer.shard_ranks=2",
         "optimizer.regather=step", "optimizer.reduce=step", "optimizer.offload=true"),
        ("parallelism.dp=2", "parallelism.tp=2", "parallelism.tp_mode=REDUCE_SCATTER",
         "parallelism.recompute=mixer", "optimizer.zero_stage=2", "optimizer.shard_ranks=1"),
        ("parallelism.dp=2", "parallelism.cp=2", "parallelism.cp_attention=gather",
         "parallelism.cp_stride=1", "parallelism.cp_layout=contiguous", "model.compile=false"),
    ],
    ids=["shards", "blocks", "cp"],
)  # fmt: skip
def test_keys_of_a_layout_are_verified(sets: tuple[str, ...], tmp_path: Path) -> None:
    flags = [part for each in ("parallelism.tp=1", *sets) for part in ("--set", each)]
    found = tmp_path / "found.json"
    assert main(["verify", "--steps", "2", "--json", str(found), *flags]) == 0
    assert json.loads(found.read_text())["passed"]
