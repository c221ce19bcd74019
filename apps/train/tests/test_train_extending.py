"""The examples of docs/extending.md: a family of models and a schedule of one's own."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import runs
import torch

from kenotron_config import DEFAULT_CONFIG
from kenotron_config.yaml_build import build
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.stage_sizes import stage_sizes
from kenotron_dist import Axis, spawn
from kenotron_dist.placement import tie_storages
from kenotron_models import AnyConfig, Build, Context, Family, LayerStack, build_decoder, registry
from kenotron_models.families import LlamaConfig
from kenotron_pp import SCHEDULES, Times, one_f_one_b, simulate
from kenotron_train import train
from kenotron_train.config_file import load_config

EXAMPLES = runs.APP / "examples"
sys.path[:0] = [str(EXAMPLES / "own_model"), str(EXAMPLES / "own_schedule")]
import eager  # noqa: E402 - from the folder above
import gpt2  # noqa: E402

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 16,
}


def as_ours(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of transformers' GPT-2 under our names; theirs are stored transposed."""
    inner = {
        "ln_1": "attention_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "ln_2": "mlp_norm",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    found = {"embedding.weight": theirs["wte.weight"], "embedding.positions": theirs["wpe.weight"]}
    found |= {f"norm.{kind}": theirs[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, ours in inner.items():
            for kind in ("weight", "bias"):
                value = theirs[f"h.{layer}.{name}.{kind}"]
                found[f"layers.{layer}.{ours}.{kind}"] = value.T if value.ndim == 2 else value
    return found | {"head.weight": theirs["wte.weight"]}


def test_the_example_is_transformers_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    theirs = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16,
                                        vocab_size=61)).eval()  # fmt: skip
    layers = build_decoder(gpt2.Gpt2Config(**SIZES), Build(Axis("tp", 0, (0,)), device="cpu"))
    stack = LayerStack(layers)
    tie_storages(stack)
    stack.load_state_dict(as_ours(theirs.transformer.state_dict()))
    tokens = torch.randint(61, (2, 16))
    places = torch.arange(16).expand(2, 16)
    with torch.no_grad():
        ours = stack(tokens.flatten(), Context(places))
        wanted = theirs(tokens).logits.flatten(0, 1)
    assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_the_example_trains_the_same_on_every_layout(tmp_path: Path) -> None:
    def losses(name: str, **sizes: int) -> list[float]:
        (tmp_path / name).mkdir()
        changes = {f"parallelism__{axis}": size for axis, size in sizes.items()}
        changes |= {"tokens__train_steps": 4, "model__model_config__tie_word_embeddings": "true"}
        flags = runs.arguments(tmp_path / name, **changes)
        config = load_config(DEFAULT_CONFIG, flags[1::2])
        return [result.loss for result in train(config, model=gpt2.layers).results]

    alone = losses("one")
    assert losses("cut", tp=2) == pytest.approx(alone, rel=1e-5)
    assert losses("staged", pp=2) == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0]


def test_a_family_in_the_union_and_in_the_registry_is_found_by_its_marker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems: list[tuple[str, str]] = []

    def report(path: str, sentence: str) -> None:
        problems.append((path, sentence))

    union = LlamaConfig | gpt2.Gpt2Config
    given = {"is_gpt2_config": True, **SIZES}
    found = build(union, given, "model.model_config", report)
    assert found == gpt2.Gpt2Config(**SIZES) and not problems
    build(union, given | {"hidden_size": 30}, "model.model_config", report)
    assert problems[0][0] == "model.model_config.hidden_size"
    build(union, given | {"rms_norm_eps": 1e-5}, "model.model_config", report)
    assert problems[1][0] == "model.model_config.rms_norm_eps"
    assert problems[1][1].startswith("is not a known key; ")
    other = {"is_starcoder2_config": True, "rms_norm_eps": 1e-5}
    build(AnyConfig, other, "model.model_config", report)
    assert problems[2][0] == "model.model_config.rms_norm_eps"
    assert problems[2][1].startswith("is not a known key; ")
    family = Family(marker="is_gpt2_config", config=gpt2.Gpt2Config)
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, family))
    assert registry.config_from_json(asdict(found)) == found


def test_the_schedule_is_lawful_and_hides_transfers() -> None:
    for ranks in (1, 2, 3, 5):
        for microbatches in (1, 2, 4, 9):
            simulate(eager.eager, ranks, microbatches)  # raises where it is not
    slow = Times(transfer=0.5)
    ours, plain = (simulate(each, 4, 8, slow) for each in (eager.eager, one_f_one_b))
    assert ours.ticks < plain.ticks
    assert ours.peak_live[0] == 2 * plain.peak_live[0] - 1


def test_the_schedule_computes_what_one_process_does() -> None:
    alone = spawn(eager.gradients, eager.eager)[0]
    for ranks in (2, 4):
        many = [each for rank in spawn(eager.gradients, eager.eager, pp=ranks) for each in rank]
        assert len(many) == len(alone)
        assert all(map(torch.equal, alone, many))


def test_a_schedule_in_the_table_is_one_that_configs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEDULES, "eager-1f1b", eager.eager)
    flags = runs.arguments(tmp_path, parallelism__pp=2, tokens__batch_accumulation_per_replica=4)
    config = load_config(DEFAULT_CONFIG, flags[1::2])
    parallel = replace(config.parallelism, pp_engine="eager-1f1b")
    assert parallel.schedule is eager.eager
    first, _ = stage_sizes(cost_plan(replace(config, parallelism=parallel)))
    plain = replace(config.parallelism, pp_engine="1f1b")
    less, _ = stage_sizes(cost_plan(replace(config, parallelism=plain)))
    assert first.bytes_of["activations"] == 1.5 * less.bytes_of["activations"]  # 3 micro-batches
