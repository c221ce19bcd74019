"""Families of transformers without code here train as in plain torch, on every layout."""

from __future__ import annotations

import json

import pytest
import runs
import torch
from foreign_models import (
    FAMILIES,
    FOUND,
    PRELOAD,
    WITHOUT_PLAN,
    alone,
    configure,
    folder_of,
    run,
    whole,
)
from huggingface_hub import constants
from torch import nn

from kenotron_config import Config, ConfigError
from kenotron_dist import Mesh, RankError, spawn
from kenotron_models import Context
from kenotron_tp import VocabParallelEmbedding
from kenotron_train.assemble import build_training
from kenotron_train.run.initial import load_initial
from kenotron_train.run.preview import preview

HALF = {"parallelism.dp": 2, "tokens.batch_accumulation_per_replica": 1}
LAYOUTS = {
    "tp2": {"parallelism.tp": 2},
    "pp2": {"parallelism.pp": 2},
    "dp2 zero1": HALF | {"optimizer.zero_stage": 1},
    "tp2 pp2 dp2": HALF | {"parallelism.tp": 2, "parallelism.pp": 2},
}
NO_DECAY = {"optimizer.weight_decay": 0.0}


@pytest.mark.parametrize("family", [*FAMILIES, *WITHOUT_PLAN, "gemma4_text"])
def test_one_process_trains_as_transformers_does_in_plain_torch(family, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    config = configure(folder, tmp_path / "run", NO_DECAY)
    found = run(config)
    losses, _ = alone(folder, [rate for _, _, rate in found], config)
    assert [loss for loss, _, _ in found] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_trains_as_one_process(family, layout, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    one = run(configure(folder, tmp_path / "one"))
    many = run(configure(folder, tmp_path / "many", LAYOUTS[layout]))
    for (loss, norm, _), (due, due_norm, _) in zip(many, one, strict=True):
        assert loss == pytest.approx(due, rel=1e-5)
        assert norm == pytest.approx(due_norm, rel=1e-4)


@pytest.mark.parametrize(("family", "layout"), [("cohere", {}), ("mixtral", {"parallelism.ep": 2})])
def test_gradients_in_slices_of_each_micro_batch_train_as_one_process(family, layout, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    halves = {"parallelism.dp": 2, "tokens.micro_batch_size": 1, "optimizer.zero_stage": 2}
    one = run(configure(folder, tmp_path / "one"))
    many = run(configure(folder, tmp_path / "many", layout | halves))
    assert [loss for loss, *_ in many] == pytest.approx([loss for loss, *_ in one], rel=1e-5)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "mixtral", "seed_oss", "ernie4_5", "lfm2", "qwen3_5_text"]
)
def test_tokens_cut_over_tp_train_as_transformers_does_in_plain_torch(family, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    layout = {"parallelism.tp": 2, "parallelism.pp": 2, "parallelism.tp_mode": "REDUCE_SCATTER"}
    config = configure(
        folder, tmp_path / "run", NO_DECAY | layout | {"parallelism.recompute": "full"}
    )
    found = run(config)
    losses, _ = alone(folder, [rate for _, _, rate in found], config)
    assert [loss for loss, _, _ in found] == pytest.approx(losses, rel=1e-6)
    assert losses[-1] != losses[0]


COMPILED = {
    "llama one process": ("llama", {}),
    "qwen3 tp2 recompute": ("qwen3", {"parallelism.tp": 2, "parallelism.recompute": "full"}),
    "mixtral tp2 sequence": (
        "mixtral",
        {"parallelism.tp": 2, "parallelism.tp_mode": "REDUCE_SCATTER"},
    ),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_layers_train_as_transformers_does_in_plain_torch(case, tmp_path):
    family, layout = COMPILED[case]
    balanced = {"output_router_logits": True} if family == "mixtral" else {}
    folder = folder_of(family, tmp_path / "model", **balanced)
    changes = NO_DECAY | layout | {"model.compile": True}
    found = run(config := configure(folder, tmp_path / "run", changes))
    losses, _ = alone(folder, [rate for _, _, rate in found], config)
    assert [loss for loss, _, _ in found] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("family", ["bloom", "gpt2", "opt", *FOUND])
def test_layers_that_were_found_are_shared_by_stages(family, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    one = whole(configure(folder, tmp_path / "one"))
    changes = {"parallelism.pp": 2, "parallelism.recompute": "full"}
    loss, gradients, _ = whole(configure(folder, tmp_path / "many", changes))
    assert loss == one[0] and {*gradients} == {*one[1]}
    for name, due in one[1].items():
        assert gradients[name] == pytest.approx(due, rel=1e-5, abs=1e-7), name


def test_a_plan_of_ones_own_cuts_a_family_without_one(tmp_path):
    folder, layer = folder_of("stablelm", tmp_path / "model"), "model.layers.*"
    plan = dict.fromkeys([f"{layer}.self_attn.{name}_proj" for name in "qkv"], "colwise")
    plan |= dict.fromkeys([f"{layer}.mlp.{name}_proj" for name in ("gate", "up")], "colwise")
    plan |= {f"{layer}.self_attn.o_proj": "rowwise", f"{layer}.mlp.down_proj": "rowwise"}
    with pytest.raises(ConfigError, match="0.self_attn.num_heads: StableLmAttention reads this n"):
        configure(folder, tmp_path / "many", {"parallelism.tp": 2}, tp_plan=plan)
    numbers = ("num_heads", "num_key_value_heads", "hidden_size")
    plan |= dict.fromkeys([f"{layer}.self_attn.{name}" for name in numbers], "divide")
    one = run(configure(folder, tmp_path / "one"))
    many = run(configure(folder, tmp_path / "many", {"parallelism.tp": 2}, tp_plan=plan))
    assert [loss for loss, *_ in many] == pytest.approx([loss for loss, *_ in one], rel=1e-5)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("family", ["bloom", "gpt2"])
def test_the_plan_that_an_error_suggests_trains_as_one_process(family, tmp_path):
    folder, layout = folder_of(family, tmp_path / "model"), {"parallelism.tp": 2}
    with pytest.raises(ConfigError, match="names suggest ") as told:
        configure(folder, tmp_path / "many", layout)
    plan = json.JSONDecoder().raw_decode(str(told.value).partition("names suggest ")[2])[0]
    layout |= {"parallelism.pp": 2, "parallelism.recompute": "full"}
    one = run(configure(folder, tmp_path / "one"))
    many = run(configure(folder, tmp_path / "many", layout, tp_plan=plan))
    assert [loss for loss, *_ in many] == pytest.approx([loss for loss, *_ in one], rel=1e-5)
    assert [norm for _, norm, _ in many] == pytest.approx([x for _, x, _ in one], rel=1e-4)


def test_a_parameter_that_a_plan_does_not_synchronise_ends_the_run(tmp_path):
    folder = folder_of("qwen3", tmp_path / "model")
    plan = {"model.layers.*.self_attn.q_norm": "replicate"}
    config = configure(folder, tmp_path / "run", {"parallelism.tp": 2}, tp_plan=plan)
    words = "step 1: .* equal over tp .*self_attn.q_norm.weight.* give it replicated_with_grad"
    with pytest.raises(RankError, match=words):
        run(config)


def test_a_z_loss_of_the_model_is_in_the_gradients(tmp_path):
    folder = folder_of("bamba", tmp_path / "model", z_loss_coefficient=0.1)
    plain = folder_of("bamba", tmp_path / "plain")
    for layout in ({}, {"parallelism.tp": 2}):
        config = configure(folder, tmp_path / f"run{len(layout)}", NO_DECAY | layout)
        found = run(config)
        due, model = alone(folder, [rate for _, _, rate in found], config)
        assert model.z_loss_coefficient == 0.1
        assert [loss for loss, *_ in found] == pytest.approx(due, rel=1e-6)
        other, _ = alone(plain, [rate for _, _, rate in found], config)
        assert due[1:] != pytest.approx(other[1:], rel=1e-4)


def test_a_run_begins_with_a_model_of_the_hub_by_its_name(tmp_path, monkeypatch):
    folder = folder_of("cohere", tmp_path / "model")
    model = tmp_path / "hub/models--org--tiny"
    for part in ("snapshots", "refs"):
        (model / part).mkdir(parents=True)
    (model / "refs/main").write_text("a" * 40)
    (model / "snapshots" / ("a" * 40)).symlink_to(folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    one = {"tokens.train_steps": 1, "parallelism.tp": 2}
    named = run(configure("org/tiny", tmp_path / "named", one))
    assert named == run(configure(folder, tmp_path / "run", one))


def test_a_run_resumes_on_another_layout(tmp_path):
    folder = folder_of("cohere", tmp_path / "model")
    one = run(configure(folder, tmp_path / "one"))
    layout = LAYOUTS["tp2 pp2 dp2"]
    run(configure(folder, tmp_path / "many", layout | {"tokens.train_steps": 2}))
    (tmp_path / "model").rename(tmp_path / "moved")  # a checkpoint says what its model is
    again = {"checkpoints.resume_checkpoint_path": tmp_path / "many/2"}
    resumed = run(configure(tmp_path / "moved", tmp_path / "resumed", again))
    assert [loss for loss, *_ in resumed] == pytest.approx([x for x, *_ in one[2:]], rel=1e-5)


@pytest.mark.parametrize("family", ["gpt_neox", "stablelm", "cohere", "deepseek_v3"])
def test_an_export_is_the_model_that_plain_torch_trains(family, tmp_path):
    from transformers import AutoModelForCausalLM

    # Keys' biases have no gradient: with a small eps Adam makes steps of its rounding.
    folder = folder_of(family, tmp_path / "model")
    changes = NO_DECAY | {"optimizer.optimizer_factory.adam_eps": 1e-3}
    if family in FAMILIES:
        changes |= LAYOUTS["tp2"]
    config = configure(folder, tmp_path / "run", changes)
    found = run(config)
    _, due = alone(folder, [rate for _, _, rate in found], config)
    done = runs.program(
        "apps/convert", tmp_path, "kenotron-to-hf", "--ckpt", "run", "--out", "exported"
    )
    assert done.returncode == 0, done.stderr
    assert "its logits are ours to" in done.stdout
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert {*exported} == {*due.state_dict()}
    for name, value in due.state_dict().items():
        torch.testing.assert_close(exported[name], value, rtol=1e-4, atol=2e-5)
    once_more = configure(tmp_path / "exported", tmp_path / "more", {"tokens.train_steps": 1})
    run(once_more)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("cohere", (1, 1, 1)), ("cohere", (2, 2, 1)), ("gpt_neox", (1, 1, 1)),
        ("gpt_oss", (2, 1, 1)), ("mixtral", (2, 1, 2)),
    ],
)  # fmt: skip
def test_texts_of_a_checkpoint_are_those_of_transformers(family, sizes, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = folder_of(family, tmp_path / "model")
    keys = {"attn_implementation": "kenotron"} if family == "gpt_oss" else {}
    run(configure(folder, tmp_path / "run", {"tokens.train_steps": 1}, **keys))
    export = "kenotron-to-hf", "--ckpt", "run", "--out", "exported", "--no-check"
    assert runs.program("apps/convert", tmp_path, *export).returncode == 0
    prompts, (tp, pp, ep) = ["AB", "A LONGER PROMPT"], map(str, sizes)
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    flags += ["--tokenizer", "bytes", "--temperature", "0", "--max-new-tokens", "5"]
    flags += ["--ckpt-path", "run", "--jsonl", "out", "--tp", tp, "--pp", pp]
    done = runs.program("apps/generate", tmp_path, *flags, "--ep", ep)
    assert done.returncode == 0, done.stderr
    if ep != "1":
        done = runs.program("apps/generate", tmp_path, *flags, "--ep", "3", "--dp", "3")
        assert "--ep 3: it must divide the 4 experts of a layer" in done.stderr
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    for line, prompt in zip((tmp_path / "out").read_text().splitlines(), prompts, strict=True):
        ids = torch.tensor([[*prompt.encode()]])
        due = theirs.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        found = json.loads(line)["tokens"]
        assert found == due[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seeded", [False, True])
def test_first_weights_and_gradients_are_those_of_one_process(family, seeded, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    drawn = {"model.init_method": json.dumps({"std": 0.1})} if seeded else {}
    loss, gradients, weights = whole(configure(folder, tmp_path / "run", drawn))
    for layout in ({"parallelism.tp": 2}, LAYOUTS["tp2 pp2 dp2"]):
        found = whole(configure(folder, tmp_path / "run", drawn | layout))
        assert found[0] == pytest.approx(loss, rel=1e-5)
        assert {*found[1]} == {*gradients}
        for name, due in weights.items():
            assert (found[2][name] == due).all(), name
        for name, due in gradients.items():
            assert abs(found[1][name] - due).max() <= 1e-5 * abs(due).max() + 1e-7, name


SDPA_NONE = ("gemma2", "sdpa")  # it has no soft cap


def documents(mesh: Mesh, config: Config, positions: list[int]) -> torch.Tensor:
    """How the losses of the last document move with the embeddings of the first one's tokens."""
    training = build_training(config, mesh)
    load_initial(training)
    context, found = Context(torch.tensor([positions] * 2)), []
    kinds = (nn.Embedding, VocabParallelEmbedding)
    embedding = next(m for m in training.model.stack.modules() if isinstance(m, kinds))
    embedding.register_forward_hook(
        lambda *call: found.append(call[2].detach().requires_grad_()) or found[0]
    )
    y = training.model.stack(torch.arange(2 * len(positions)), context)
    x = found[0]
    seen = y.view(2, len(positions), -1)[:, positions.index(0, 1) :]
    seen.float().logsumexp(-1).sum().backward()
    return x.grad.view(2, len(positions), -1)[:, : positions.index(0, 1)]


@pytest.mark.parametrize(
    ("family", "attention"),
    [(f, how) for f in FAMILIES for how in ("sdpa", "eager", "kenotron") if (f, how) != SDPA_NONE]
    + [("stablelm", "kenotron"), ("gpt_oss", "kenotron")],
)
def test_separate_documents_do_not_leak_at_all(family, attention, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    places = [*range(5), *range(7), 0, *range(3)]
    for apart in (True, False):
        keys = {"separate_documents": apart, "attn_implementation": attention}
        config = configure(folder, tmp_path / "run", **keys)
        (grad,) = spawn(documents, config, places, preload=PRELOAD)
        assert bool(grad.abs().max() == 0) == apart


VARIATIONS = {
    "zero bubble": {"parallelism.pp": 2, "parallelism.pp_engine": "zb-h1"},
    "two parts a rank": {"parallelism.pp": 2, "parallelism.pp_engine": "interleaved"},
    "recompute": {"parallelism.recompute": "full", "parallelism.tp": 2},
    "overlap": {"parallelism.tp": 2, "parallelism.tp_linear_async_communication": "true"},
    "muon": HALF | {"optimizer.optimizer_factory": "{name: muon}"},
    "zero 3": HALF | {"optimizer.zero_stage": 3, "parallelism.tp": 2},
}


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("family", ["gpt_neox", "deepseek_v3"])
def test_other_ways_to_compute_give_the_same(family, variation, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    changes = VARIATIONS[variation]
    same = {key: value for key, value in changes.items() if key.startswith("optimizer")}
    one = run(configure(folder, tmp_path / "one", same))
    many = run(configure(folder, tmp_path / "many", changes))
    assert [loss for loss, *_ in many] == pytest.approx([loss for loss, *_ in one], rel=1e-5)


def test_bfloat16_figures_of_layers_validation_and_the_preview(tmp_path):
    folder = folder_of("granite", tmp_path / "model")
    changes = {
        "model.dtype": "bfloat16",
        "metrics_logging": json.dumps({"log_level": 1, "log_detail_interval": 1}),
        "general.benchmark_csv_path": tmp_path / "table.csv",
    }
    one = run(configure(folder, tmp_path / "one", changes))
    config = configure(folder, tmp_path / "many", changes | LAYOUTS["tp2"])
    many = run(config)
    assert [loss for loss, *_ in many] == pytest.approx([loss for loss, *_ in one], rel=2e-3)
    row = runs.metrics(tmp_path, "many")[-1]
    assert {"embedding/model/embed_tokens/mean", "layer_1/activation/mean"} <= {*row["layers"]}
    assert "num_layers" in (tmp_path / "table.csv").read_text()
    shown = preview(config)
    assert "block.self_attn.o_proj.weight" in shown and "tp cuts dim 1" in shown
    assert "activations 0.0" in shown
