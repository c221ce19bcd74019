"""Checkpoints of Nanotron and Kénotron: read whole from any layout, and imported bit for bit."""

import json

import nanotron_cases as cases
import pytest
import torch

from kenotron_ckpt import load, read_manifest
from kenotron_dist import Mesh, spawn
from kenotron_dist.boxes import local_shape, scatter
from kenotron_dist.placement import Chunk, Shard, TensorLayout
from kenotron_nanotron import import_nanotron, read_nanotron

LAYOUTS = [
    {},
    {"tp": 2},
    {"tp": 4, "version": "1.5"},
    {"tp": 2, "pp": 2, "numpy2": True},
    {"tp": 4, "num_key_value_heads": 4, "numpy2": True, "version": "1.5"},
    {"tp": 2, "num_key_value_heads": 2, "numpy2": True},
    {"tp": 2, "pp": 2, "tie_word_embeddings": True},
    {"pp": 2, "tie_word_embeddings": True, "version": "1.5", "dtype": torch.float32},
    {"tp": 2, "version": "1.0", "numpy2": True},
]


def name_of(options):
    return "-".join(f"{key}{value}" for key, value in options.items()) or "one"


@pytest.mark.parametrize("options", LAYOUTS, ids=name_of)
def test_every_tensor_is_read_whole_whatever_it_was_cut_into(tmp_path, options):
    folder, tensors = cases.write(tmp_path, **options)
    for path in (tmp_path, folder):
        found = read_nanotron(path)
        assert found.folder == folder
        assert list(found.tensors) == sorted(tensors)
        for name, due in tensors.items():
            each = found.tensors[name]
            assert (each.shape, each.dtype) == (tuple(due.shape), due.dtype)
            assert torch.equal(found.tensor(name), due)


@pytest.mark.parametrize(("version", "tokens"), [("1.4", None), ("1.5", 768), ("1.0", None)])
def test_both_dialects_of_the_metadata_are_read(tmp_path, version, tokens):
    cases.write(tmp_path, tp=2, pp=2, dp=3, version=version)
    found = read_nanotron(tmp_path)
    meta = found.metadata
    assert (meta.version, meta.tp, meta.dp, meta.cp, found.pp) == (version, 2, 3, 1, 2)
    assert meta.engine == ("datastates" if version == "1.0" else "torch")
    assert (meta.consumed_train_samples, meta.last_train_step, meta.last_stage) == (24, 6, 1)
    assert meta.consumed_tokens_total == tokens
    assert [stage.consumed_train_samples for stage in meta.stages] == [20, 4]
    assert found.model_config["vocab_size"] == 40


def test_the_import_is_an_ordinary_checkpoint_with_our_names_and_the_same_bits(tmp_path):
    _, tensors = cases.write(tmp_path / "theirs", tp=4, pp=2, version="1.5", numpy2=True)
    step_folder = import_nanotron(tmp_path / "theirs", tmp_path / "ours")
    assert step_folder == tmp_path / "ours/6"
    manifest = read_manifest(tmp_path / "ours")
    assert set(manifest.records) == {cases.ours(name) for name in tensors}
    wanted = {
        name: (torch.empty(due.shape, dtype=due.dtype), TensorLayout(cases.ours(name), due.shape))
        for name, due in tensors.items()
    }
    load(tmp_path / "ours", wanted, Mesh.connect())
    for name, due in tensors.items():
        assert torch.equal(wanted[name][0], due)
    assert manifest.config is not None and "sequence_length: 32" in manifest.config


def test_the_state_says_how_far_the_run_had_come(tmp_path):
    for version in ("1.4", "1.5"):
        cases.write(tmp_path / version, version=version)
        import_nanotron(tmp_path / version, tmp_path / f"ours{version}")
        state = read_manifest(tmp_path / f"ours{version}").state
        assert (state["step"], state["optimizer_steps"]) == (6, 6)
        assert state["consumed_train_samples"] == 24
        assert state["consumed_tokens"] == 24 * 32
        assert state["cursor"] == {"stage": 1, "epoch": 0, "consumed": 4}
        assert state["imported"]["metadata"]["version"] == version
        assert any("load_optimizer: false" in note for note in state["imported"]["notes"])


def layouts():
    """The layouts of a Llama here on any tp, as its layers declare them."""
    heads = (Chunk(16, parts=4), Chunk(8, parts=2), Chunk(8, parts=2))
    rows, columns = (Shard("tp", 0),), (Shard("tp", 1),)
    found = {
        "embedding.weight": ((40, 16), (Shard("tp", 0, (Chunk(40),)),)),
        "norm.weight": ((16,), ()),
    }
    for i in range(2):
        found |= {
            f"layers.{i}.attention.qkv.weight": ((32, 16), (Shard("tp", 0, heads),)),
            f"layers.{i}.attention.out.weight": ((16, 16), columns),
            f"layers.{i}.mlp.gate_up.weight": ((48, 16), (Shard("tp", 0, (Chunk(24),) * 2),)),
            f"layers.{i}.mlp.down.weight": ((16, 24), columns),
            f"layers.{i}.mlp_norm.weight": ((16,), ()),
        }
    found["head.weight"] = ((40, 16), rows)
    return {name: TensorLayout(name, shape, cut) for name, (shape, cut) in found.items()}


def load_cut(mesh, folder, whole):
    wanted = {
        name: (torch.empty(local_shape(layout, mesh.view(layout)), dtype=torch.bfloat16), layout)
        for name, layout in layouts().items()
    }
    load(folder, wanted, mesh)
    return [
        name
        for name, (tensor, layout) in wanted.items()
        if not torch.equal(tensor, scatter(whole[name], layout, mesh.view(layout)))
    ]


def test_two_tp_ranks_load_their_parts_of_what_four_ranks_had_written(tmp_path):
    _, tensors = cases.write(tmp_path / "theirs", tp=2, pp=2, num_key_value_heads=2)
    import_nanotron(tmp_path / "theirs", tmp_path / "ours")
    whole = {cases.ours(name): tensor for name, tensor in tensors.items()}
    assert spawn(load_cut, str(tmp_path / "ours"), whole, tp=2) == [[], []]


@pytest.mark.parametrize("options", [
    {}, {"tp": 2}, {"tp": 2, "pp": 2, "tie_word_embeddings": True},
    {"masters": False}, {"tp": 2, "masters": False, "dtype": torch.float32},
    {"zero": True, "dp": 1}, {"zero": True, "dp": 3}, {"zero": True, "dp": 3, "tp": 2, "pp": 2},
    {"zero": True, "dp": 5, "tp": 4, "version": "1.5"},
    {"zero": True, "dp": 20, "tp": 2, "tie_word_embeddings": True, "pp": 2},
], ids=name_of)  # fmt: skip
def test_adams_state_becomes_our_optimizers_records(tmp_path, options):
    folder, tensors = cases.write(tmp_path / "theirs", optimizer=cases.STEPS, **options)
    import_nanotron(folder, tmp_path / "ours", optimizer=True)
    manifest = read_manifest(tmp_path / "ours")
    assert manifest.state["optimizer_steps"] == cases.STEPS
    due = cases.moments({name: (tensor, None) for name, tensor in tensors.items()})
    if not options.get("masters", True):
        due |= {("master", name): tensor.float() for name, tensor in tensors.items()}
    wanted = {
        key: (torch.empty(due[key].shape), TensorLayout(f"optimizer.{key[0]}.{cases.ours(key[1])}",
                                                        tuple(due[key].shape)))
        for key in due
    }  # fmt: skip
    load(tmp_path / "ours", wanted, Mesh.connect())
    for key, value in due.items():
        assert torch.equal(wanted[key][0], value), key
    parameters = {cases.ours(name) for name in tensors}
    assert set(manifest.records) == parameters | {layout.name for _, layout in wanted.values()}
    assert {manifest.records[layout.name].dtype for _, layout in wanted.values()} == {"float32"}


def test_before_the_first_update_there_are_masters_and_no_moments(tmp_path):
    folder, _ = cases.write(tmp_path / "theirs", optimizer=0, zero=True, dp=2)
    path = folder / "checkpoint_metadata.json"
    said = json.loads(path.read_text())
    said["metas"] |= {"last_train_step": 0}
    path.write_text(json.dumps(said))
    import_nanotron(folder, tmp_path / "ours", optimizer=True)
    manifest = read_manifest(tmp_path / "ours")
    assert (manifest.step, manifest.state["optimizer_steps"]) == (0, 0)
    kinds = {n.split(".")[1] for n in manifest.records if n.startswith("optimizer.")}
    assert kinds == {"master"}


def test_other_models_are_imported_with_names_that_the_caller_gives(tmp_path):
    folder, tensors = cases.write(
        tmp_path / "theirs", is_llama_config=False, is_starcoder2_config=True
    )
    with pytest.raises(ValueError, match="not those of is_starcoder2_config: give rename"):
        import_nanotron(folder, tmp_path / "ours")
    rename = {name: f"theirs.{name}" for name in tensors} | {cases.EMBEDDING: None}
    import_nanotron(folder, tmp_path / "ours", rename=rename)
    manifest = read_manifest(tmp_path / "ours")
    assert set(manifest.records) == {own for own in rename.values() if own}
    assert manifest.state["model_config"]["is_starcoder2_config"] is True


@pytest.mark.parametrize(("given", "kept"), [
    ({"is_llama_config": False, "is_qwen2_config": True, "moe_config": None,
      "_attn_implementation": "sdpa", "sliding_window_size": None, "z_loss_enabled": False}, {}),
    ({"rope_scaling": {"rope_type": "default"}}, {}),
    ({"attention_bias": False, "z_loss_coefficient": 1e-4}, {}),
    ({"sliding_window_size": 20}, {"sliding_window_size": 20}),
    ({"no_rope_layer": 4}, {"no_rope_layer": 4}),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}},
     {"rope_scaling": {"rope_type": "llama3", "factor": 8}}),
])  # fmt: skip
def test_what_changes_the_model_stays_in_its_configuration_and_the_rest_goes(tmp_path, given, kept):
    cases.write(tmp_path / "theirs", **given)
    import_nanotron(tmp_path / "theirs", tmp_path / "ours")
    assert read_manifest(tmp_path / "ours").state["model_config"] == cases.LLAMA | kept


def test_a_run_with_use_mup_divided_scores_by_the_features_of_a_head(tmp_path):
    folder, _ = cases.write(tmp_path / "theirs")
    config = folder / "config.yaml"
    before = config.read_text() if config.is_file() else ""
    config.write_text(f"{before}\nmodel:\n  init_method:\n    use_mup: true\n")
    import_nanotron(folder, tmp_path / "ours")
    found = read_manifest(tmp_path / "ours").state["model_config"]
    features = cases.LLAMA["hidden_size"] // cases.LLAMA["num_attention_heads"]
    scores = found["multipliers"].pop("attention")
    assert scores == pytest.approx([features**-0.5] * cases.LLAMA["num_hidden_layers"])
    assert found["multipliers"] == {"embedding": 1.0, "logits": 1.0, "residual": 1.0}
