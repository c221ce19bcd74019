"""Nanotron's checkpoints of a Mamba: imported bit for bit from every tp, rows of x before z."""

import nanotron_cases as cases
import pytest
import torch

from kenotron_ckpt import load, read_manifest
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout
from kenotron_nanotron import import_nanotron

H, C, N, R, W, VOCAB = 16, 32, 6, 3, 4, 40
MAMBA = {
    "is_llama_config": False, "is_mamba_config": True, "d_model": H, "num_hidden_layers": 2,
    "vocab_size": VOCAB, "ssm_cfg": {"d_state": N, "dt_rank": R, "bias": True}, "rms_norm": True,
    "fused_add_norm": True, "residual_in_fp32": True, "pad_vocab_size_multiple": 8,
    "pad_token_id": None, "dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip
LAYER = {
    "norm.weight": ("mamba_norm.weight", (H,), None),
    "mixer.in_proj.weight": ("mamba.in_proj.weight", (2 * C, H), (0, [2 * C])),
    "mixer.conv1d.weight": ("mamba.conv.weight", (C, 1, W), (0, [C])),
    "mixer.conv1d.bias": ("mamba.conv.bias", (C,), (0, [C])),
    "mixer.x_proj.weight": ("mamba.x_proj.weight", (R + 2 * N, C), (1, [C])),
    "mixer.dt_proj.weight": ("mamba.dt_proj.weight", (C, R), (0, [C])),
    "mixer.dt_proj.bias": ("mamba.dt_proj.bias", (C,), (0, [C])),
    "mixer.A_log": ("mamba.A_log", (C, N), (0, [C])),
    "mixer.D": ("mamba.D", (C,), (0, [C])),
    "mixer.out_proj.weight": ("mamba.out_proj.weight", (H, C), (1, [C])),
}


def made():
    """Tensors by Nanotron's name and how they are cut, and ours."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    theirs = {cases.EMBEDDING: (drawn(VOCAB, H), (0, [VOCAB]))}
    theirs["model.final_layer_norm.pp_block.weight"] = drawn(H), None
    ours = {
        "embedding.weight": theirs[cases.EMBEDDING][0],
        "norm.weight": theirs["model.final_layer_norm.pp_block.weight"][0],
    }
    for i in range(2):
        for name, (own, shape, how) in LAYER.items():
            value = drawn(*shape)
            ours[f"layers.{i}.{own}"] = value
            if "in_proj" in name:  # x and z by turns
                value = torch.stack([value[:C], value[C:]], 1).flatten(0, 1)
            theirs[f"model.decoder.{i}.pp_block.{name}"] = value, how
    return theirs, ours


def imported(folder, tensors, prefix=""):
    wanted = {
        name: (torch.empty(each.shape, dtype=each.dtype), TensorLayout(prefix + name, each.shape))
        for name, each in tensors.items()
    }
    load(folder, wanted, Mesh.connect())
    return {name: tensor for name, (tensor, _) in wanted.items()}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_tensor_arrives_with_its_state(tmp_path, tp):
    theirs, ours = made()
    cases.write(tmp_path / "t", tp=tp, tensors=theirs, optimizer=cases.STEPS, **MAMBA)
    import_nanotron(tmp_path / "t", tmp_path / "ours", optimizer=True)
    records = read_manifest(tmp_path / "ours").records
    assert {name for name in records if not name.startswith("optimizer.")} == set(ours)
    assert all(
        torch.equal(got, ours[name]) for name, got in imported(tmp_path / "ours", ours).items()
    )
    due = cases.moments(theirs)["exp_avg", "model.decoder.1.pp_block.mixer.in_proj.weight"]
    turned = torch.cat([due[0::2], due[1::2]])
    name = "layers.1.mamba.in_proj.weight"
    found = imported(tmp_path / "ours", {name: turned}, "optimizer.exp_avg.")
    assert torch.equal(found[name], turned)


def test_its_config_is_a_mambas(tmp_path):
    theirs, _ = made()
    cases.write(tmp_path / "t", tensors=theirs, **MAMBA)
    import_nanotron(tmp_path / "t", tmp_path / "ours")
    state = read_manifest(tmp_path / "ours").state
    ssm = {"d_state": N, "dt_rank": R, "bias": False}  # theirs is not read
    assert state["model_config"]["is_mamba_config"] is True
    assert state["model_config"]["ssm_cfg"] == ssm
    assert "rope_interleaved" not in str(state["imported"]["notes"])


def test_a_rank_that_is_no_number_is_named(tmp_path):
    theirs, _ = made()
    cases.write(tmp_path / "t", tensors=theirs, **MAMBA | {"ssm_cfg": {"dt_rank": "half"}})
    with pytest.raises(ValueError, match="ssm_cfg.dt_rank is 'half'; it must be a whole number or"):
        import_nanotron(tmp_path / "t", tmp_path / "ours")
