"""Nanotron's checkpoints with experts: imported bit for bit from every tp and expert rank."""

import nanotron_cases as cases
import nanotron_experts as experts
import pytest
import torch

from kenotron_ckpt import load, read_manifest
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout
from kenotron_nanotron import import_nanotron

W1 = "model/model/decoder/0/pp_block/block_sparse_moe/experts/mlp/w1/module/"
W1 += "model_weight_pp-rank-0-of-1_tp-rank-0-of-{}{}.safetensors"


def imported(folder, tensors, prefix=""):
    """Tensors of a checkpoint under the given names, without a prefix; no others are there."""
    wanted = {
        name: (torch.empty(each.shape, dtype=each.dtype), TensorLayout(prefix + name, each.shape))
        for name, each in tensors.items()
    }
    load(folder, wanted, Mesh.connect())
    return {name: tensor for name, (tensor, _) in wanted.items()}


def check(folder, ours):
    records = read_manifest(folder).records
    assert {n for n in records if not n.startswith("optimizer.")} == set(ours)
    assert all(torch.equal(got, ours[name]) for name, got in imported(folder, ours).items())


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layers", [[1], [-1]], ids=str)
def test_a_qwen2_with_experts(tmp_path, layers, tp):
    section = experts.QWEN2["moe_config"] | {"layers": layers}
    config = experts.QWEN2 | {"moe_config": section}
    tensors, ours = experts.qwen2({"moe_config": section})
    cases.write(tmp_path / "theirs", tp=tp, tensors=tensors, numpy2=True, **config)
    import_nanotron(tmp_path / "theirs", tmp_path / "ours")
    check(tmp_path / "ours", ours)
    state = read_manifest(tmp_path / "ours").state["model_config"]
    assert state["is_qwen2_config"] is True and state["attention_bias"] is True
    new = {
        "norm_topk_prob": False, "router_z_loss_coef": 0.0, "router_bias_rate": 0.0,
        "router_aux_loss_type": "sample", "router_jitter_noise": 0.0,
        "expert_capacity_factor": None,
    }  # fmt: skip
    assert state["moe_config"] == section | new


def test_layers_that_are_all_listed_are_all(tmp_path):
    section = experts.QWEN2["moe_config"] | {"layers": [0, 1], "enable_shared_expert": False}
    tensors, ours = experts.qwen2({"moe_config": section})
    cases.write(tmp_path / "t", tensors=tensors, **experts.QWEN2 | {"moe_config": section})
    import_nanotron(tmp_path / "t", tmp_path / "ours")
    check(tmp_path / "ours", ours)
    assert read_manifest(tmp_path / "ours").state["model_config"]["moe_config"]["layers"] == [-1]


@pytest.mark.parametrize("layers", [[], None], ids=str)
def test_a_section_without_layers_is_a_dense_model(tmp_path, layers):
    section = None if layers is None else experts.QWEN2["moe_config"] | {"layers": layers}
    config = experts.QWEN2 | {"moe_config": section}
    dense = experts.QWEN2["moe_config"] | {"layers": []}
    tensors, ours = experts.qwen2({"moe_config": dense})
    cases.write(tmp_path / "theirs", tp=2, tensors=tensors, **config)
    import_nanotron(tmp_path / "theirs", tmp_path / "ours")
    check(tmp_path / "ours", ours)
    state = read_manifest(tmp_path / "ours").state["model_config"]
    assert state["is_llama_config"] is True and "moe_config" not in state


@pytest.mark.parametrize("zero", [False, True])
def test_the_state_of_an_optimizer_is_turned_as_the_weights_are(tmp_path, zero):
    tensors, ours = experts.qwen2()
    cases.write(
        tmp_path / "theirs", tp=2, dp=2, tensors=tensors, optimizer=cases.STEPS, zero=zero,
        **experts.QWEN2,
    )  # fmt: skip
    import_nanotron(tmp_path / "theirs", tmp_path / "ours", optimizer=True)
    check(tmp_path / "ours", ours)
    due = cases.moments(tensors)
    theirs, here = "model.decoder.1.pp_block.mlp.experts.merged_", "layers.1.experts."
    for kind in cases.KINDS:
        for old, new in (("gate_up_proj", "gate_up.weight"), ("down_proj", "down.weight")):
            turned = due[kind, theirs + old].transpose(1, 2)
            found = imported(tmp_path / "ours", {here + new: turned}, f"optimizer.{kind}.")
            assert torch.equal(found[here + new], turned), (kind, new)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_a_llamoe_from_every_layout_of_its_experts(tmp_path, tp, ep):
    _, ours = experts.write_llamoe(tmp_path / "theirs", tp=tp, ep=ep, tie_word_embeddings=True)
    import_nanotron(tmp_path / "theirs", tmp_path / "ours")
    check(tmp_path / "ours", ours)
    manifest = read_manifest(tmp_path / "ours")
    state = manifest.state["model_config"]
    assert state["is_llamoe_config"] is True and not state["is_llama_config"]
    assert state["tie_word_embeddings"] is False  # Nanotron never ties it
    assert "rope_interleaved" not in str(manifest.state["imported"]["notes"])


def test_a_llamoe_whose_first_matrices_are_as_their_metadata_says(tmp_path):
    _, ours = experts.write_llamoe(tmp_path / "theirs", transposed=False)
    import_nanotron(tmp_path / "theirs", tmp_path / "ours")
    check(tmp_path / "ours", ours)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_llamoe_of_one_expert(tmp_path, tp):
    changes = {"moe_num_experts": 1, "num_experts_per_tok": 1}
    _, ours = experts.write_llamoe(tmp_path / "theirs", tp=tp, **changes)
    import_nanotron(tmp_path / "theirs", tmp_path / "ours")
    check(tmp_path / "ours", ours)


def square(folder):
    for r in ("w1", "w2"):
        for path in folder.glob(f"model/model/decoder/*/pp_block/**/{r}/module/*"):
            path.unlink()
    stack = torch.zeros(4, 4, 16)
    name = f"model.decoder.0.pp_block.{experts.MATRICES.format('w1')}"
    experts.write_stack(folder, name, stack, 1, 1, False)


DAMAGE = {
    "a size of experts is none": (
        {}, lambda f: cases.config_of(f, moe_num_experts=None),
        "model_config.json: moe_num_experts must be there, as whole numbers",
    ),
    "other experts": (
        {"tp": 2}, lambda f: cases.config_of(f, moe_num_experts=8),
        "w1/module/.*it has 48 rows; 8 experts of 24 features over 1 expert ranks and 2 tp ranks",
    ),
    "an expert for each rank": (
        {"ep": 4}, lambda f: None, "each of 4 expert ranks has one of moe_num_experts .4.; there",
    ),
    "a rank's experts are missing": (
        {"ep": 2}, lambda f: (f / W1.format(1, "_exp-rank-1-of-2")).unlink(),
        "w1.module.weight has no file of tp rank 0 of expert rank 1",
    ),
    "a square matrix": (
        {}, square, r"its matrix is square \(\[16, 16\]\), so its shape does not tell whether it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_experts_that_do_not_fit_are_named_and_nothing_is_written(tmp_path, damage):
    how, harm, sentence = DAMAGE[damage]
    folder, _ = experts.write_llamoe(tmp_path / "theirs", **how)
    harm(folder)
    with pytest.raises(ValueError, match=sentence):
        import_nanotron(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"layers": -1}, "moe_config.layers is -1"),
        ({"layers": [7]}, "moe_config.layers is .7.; it must be .-1., or numbers from 0 to 1"),
        ({"layers": [1, 1]}, "each once"),
        ({"layers": ["1"]}, "moe_config.layers is"),
        ({"top_k": 99}, "moe_config.top_k is 99; it must be from 1 to num_experts"),
    ],
)
def test_a_choice_that_cannot_be_is_named(tmp_path, keys, said):
    section = {"moe_config": experts.QWEN2["moe_config"] | keys}
    tensors, _ = experts.qwen2()
    cases.write(tmp_path / "theirs", tensors=tensors, **experts.QWEN2 | section)
    with pytest.raises(ValueError, match=said):
        import_nanotron(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_missing_size_of_a_section_is_named(tmp_path):
    section = experts.QWEN2["moe_config"] | {"moe_intermediate_size": None}
    tensors, _ = experts.qwen2()
    cases.write(tmp_path / "t", tensors=tensors, **experts.QWEN2 | {"moe_config": section})
    with pytest.raises(ValueError, match="moe_config: moe_intermediate_size must be there"):
        import_nanotron(tmp_path / "t", tmp_path / "ours")
