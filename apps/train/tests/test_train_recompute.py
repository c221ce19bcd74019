"""What layers compute again: parts by name, and as much as a memory asks for."""

from __future__ import annotations

import json

import pytest
from own_runs import configure, documents, jsonl, run

from kenotron_config import ConfigError
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.recomputed import recomputed
from kenotron_cost.stage_sizes import stage_sizes
from kenotron_train.run.preview import preview

EXPERTS = {
    "model.model_config": json.dumps({
        "is_qwen2_config": True, "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "moe_config": {
            "num_experts": 4, "top_k": 2, "moe_intermediate_size": 16, "layers": [1]},
    }),
}  # fmt: skip


@pytest.fixture
def dataset(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents()])
    return {"hf_dataset_or_datasets": str(path)}


def test_parts_that_are_computed_again_change_no_bit(tmp_path, dataset):
    want = run(tmp_path / "none", dataset)
    for again in ("mixer", "feed_forward"):
        assert run(tmp_path / again, dataset, {"parallelism.recompute": again}) == want
        more = {
            "parallelism.recompute": again,
            "parallelism.pp": 2,
            "parallelism.pp_engine": "zb-h1",
        }
        more |= {"optimizer.zero_stage": 3}
        assert run(tmp_path / f"{again} pp2", dataset, more) == want


def test_a_memory_decides_what_is_computed_again(tmp_path, dataset):
    def config_of(room: object, **more: object):
        changes = {"parallelism.recompute_memory_gb": room} | more
        return configure(tmp_path / "1", dataset, changes)

    plan = cost_plan(config_of("null"))
    measured = MeasuredModel(plan)
    none, selective, full = (measured.kept(plan, 0, way) for way in ("none", "selective", "full"))
    assert recomputed(cost_plan(config_of(2 * none / 1e9))) == ("none", "none")
    assert recomputed(cost_plan(config_of((none + selective) / 1e9))) == ("selective", "none")
    assert recomputed(cost_plan(config_of((full + selective) / 1e9))) == ("full", "selective")
    tight = config_of((full + selective) / 1e9)
    (size,) = stage_sizes(cost_plan(tight))
    assert size.bytes_of["activations"] <= full + selective
    want = run(tmp_path / "all", dataset)
    assert run(tmp_path / "less", dataset, {
        "parallelism.recompute_memory_gb": (full + selective) / 1e9
    }) == want  # fmt: skip
    with pytest.raises(ValueError, match="parallelism.recompute_memory_gb: .* were given for"):
        recomputed(cost_plan(config_of(full / 1e9)))
    assert "even where all layers compute everything again" in preview(config_of(full / 1e9))


def test_experts_alone_are_computed_again(tmp_path, dataset):
    want = run(tmp_path / "1", dataset, EXPERTS)
    experts = EXPERTS | {"parallelism.moe_layer_recompute": "true"}
    assert recomputed(cost_plan(configure(tmp_path, dataset, experts))) == ("none", "feed_forward")
    assert run(tmp_path / "2", dataset, experts) == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute_memory_gb": 0}, "recompute_memory_gb: 0.0 was given; it must be above 0"),
        ({"recompute_memory_gb": 1, "recompute": "full"}, "it decides what is computed again"),
        ({"recompute": "attention"}, "recompute: \"attention\" was given; it must be 'none'"),
    ],
)
def test_bad_values_are_named(tmp_path, dataset, changes, message):
    with pytest.raises(ConfigError) as caught:
        configure(tmp_path, dataset, {f"parallelism.{k}": v for k, v in changes.items()})
    assert message in str(caught.value)
