"""Dense checkpoints become checkpoints with experts that compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kenotron_convert.cli import main
from kenotron_convert.importing import import_hf
from kenotron_dist import Mesh
from kenotron_generate.load import describe, load_model
from kenotron_models import Context

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
KINDS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
}
TOKENS = torch.arange(24) * 7 % 61


@pytest.fixture(scope="module", params=KINDS)
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(KINDS[request.param]).save_pretrained(folder / "hf")
    import_hf(folder / "hf", folder / "dense")
    return folder / "dense"


def logits(folder: Path) -> torch.Tensor:
    positions = torch.arange(len(TOKENS)).view(1, -1)
    with torch.no_grad():
        return load_model(describe(folder), Mesh.connect()).forward([TOKENS], [Context(positions)])[
            0
        ]


def test_experts_compute_what_the_dense_model_does(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sparse"
    given = ["upcycle", "--ckpt", str(dense), "--out", str(out), "--experts", "4"]
    assert main(given) == 0
    before, after = logits(dense), logits(out)
    assert (after - before).abs().max() <= 2e-6 * before.abs().max()
    assert main([*given, "--overwrite", "--noise", "0.5"]) == 0
    assert (logits(out) - before).abs().max() > 1e-3 * before.abs().max()
    status = main(["kenotron-to-hf", "--ckpt", str(out), "--out", str(tmp_path / "hf")])
    said = capsys.readouterr().err
    if "qwen2" in str(dense.parent):  # Hugging Face's has a shared expert
        assert status == 1 and "a qwen2_moe has a shared expert" in said
    else:
        assert status == 0, said


def test_what_cannot_be_upcycled_is_named(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*given: str, ckpt: Path = dense) -> str:
        out = str(tmp_path / "out")
        assert main(["upcycle", "--ckpt", str(ckpt), "--out", out, *given]) == 1
        return capsys.readouterr().err

    assert "must not be above" in failing("--experts", "2", "--top-k", "3")
    assert "noise -1.0 was given; it must be a finite" in failing("--experts", "2", "--noise=-1")
    given = ["upcycle", "--ckpt", str(dense), "--out", str(tmp_path / "sparse"), "--experts", "2"]
    assert main(given) == 0
    assert "has no copies with experts" in failing("--experts", "2", ckpt=tmp_path / "sparse")
