"""Families and kinds of blocks: what one file and one line in the registry bring."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from toy_family import TOY, ShiftSpec, ToyConfig

from kenotron_dist import Axis, Mesh, spawn
from kenotron_dist.init import initialize
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_models import (
    FAMILIES,
    Build,
    Context,
    LayerStack,
    Recompute,
    build_decoder,
    config_from_json,
    family_of,
    forward_flops,
    layer_costs,
    parameter_count,
    registry,
    standard_init,
)
from kenotron_models.families import LlamaConfig, Qwen2Config
from kenotron_models.hf import config_to_hf, differences
from kenotron_models.layers import AttentionSpec, BlockSpec, KVCache, MLPSpec
from kenotron_tp import TPMode


def toy_numbers(mesh: Mesh, mode: TPMode, recompute: Recompute) -> dict[str, list[float]]:
    """Logits, and gradients of whole tensors."""
    config = ToyConfig()
    stack = LayerStack(build_decoder(config, Build(mesh["tp"], mode), recompute=recompute))
    layouts = parameter_layouts(stack, mesh.sizes)
    stack.to_empty(device="cpu")
    rule = standard_init(config, 0.5)
    initialize(stack, layouts, mesh.view, seed=1, initializer=rule)
    tokens = torch.arange(3 * 7) * 5 % 21
    out = stack(tokens, Context(torch.arange(7).expand(3, 7)))
    out.square().mean().backward()
    found = {path: p.grad.tolist() for path, p in named_parameters(stack).items()}
    return found | {"logits": out[:, : 21 // mesh["tp"].size].tolist()}


def test_a_toy_family_computes_the_same_on_two_ranks() -> None:
    [want] = spawn(toy_numbers, TPMode(), "none")
    for again in ("full", "selective"):
        assert spawn(toy_numbers, TPMode(), again) == [want]
    for mode in (TPMode(), TPMode(sequence_parallel=True)):
        first = spawn(toy_numbers, mode, "none", tp=2)[0]
        assert set(first) == set(want)
        wanted = torch.tensor(want["logits"])[:, :10]
        torch.testing.assert_close(torch.tensor(first["logits"]), wanted)


def test_a_mixer_that_keeps_nothing_refuses_a_cache() -> None:
    stack = LayerStack(build_decoder(ToyConfig(), Build(Axis("tp", 0, (0,)), device="cpu")))
    context = Context(torch.zeros(1, 1, dtype=torch.int64), cache=KVCache(4))
    with pytest.raises(ValueError, match=r"layers.0.shift keeps nothing .* cached=False"):
        stack(torch.zeros(1, dtype=torch.int64), context)


def test_a_toy_mixer_is_counted_costed_and_drawn() -> None:
    config = ToyConfig()
    one = Build(Axis.solo("tp"))
    stack = LayerStack(build_decoder(config, one))
    layouts = parameter_layouts(stack, {"tp": 1})
    assert parameter_count(config) == sum(
        torch.Size(each.shape).numel() for path, each in layouts.items() if path == each.name
    )
    shift, mlp = 2 * 16 * 24, 3 * 16 * 32
    assert forward_flops(config, 2, 5) == 20 * (2 * shift + mlp + 16 * 21) + 2 * 2 * 5 * 24
    assert layer_costs(config) == [0.0, float(shift + mlp), float(shift), 0.0, 16.0 * 21]
    assert {path: layouts[path].role for path in layouts if path.startswith("layers.1")} == {
        "layers.1.shift_norm.weight": "norm",
        "layers.1.shift_norm.bias": "norm_bias",
        "layers.1.shift.read.weight": "hidden",
        "layers.1.shift.write.weight": "residual",
        "layers.1.shift.write.bias": "bias",
    }
    assert all(standard_init(config, 0.1)(layout) for layout in layouts.values())


def test_a_toy_family_is_one_line_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ToyConfig(depth=3)
    with pytest.raises(ValueError, match="ToyConfig is the config of no known family: it is Llama"):
        family_of(config)
    monkeypatch.setattr(registry, "FAMILIES", (*FAMILIES, TOY))
    assert family_of(config) is TOY
    assert config_from_json(json.loads(json.dumps(asdict(config)))) == config
    with pytest.raises(ValueError, match="Hugging Face has no Toy"):
        config_to_hf(config)


def test_a_toy_family_may_lie_among_the_others(tmp_path: Path) -> None:
    """It is copied there as it is: nothing that it imports needs the registry."""
    package = tmp_path / "kenotron_models"
    shutil.copytree(Path(registry.__file__).parent, package)
    shutil.copy(Path(__file__).with_name("toy_family.py"), package / "families/toy.py")
    file = package / "registry.py"
    text = file.read_text().replace("    TRANSFORMERS,\n)", "    TRANSFORMERS,\n    TOY,\n)")
    place = "from kenotron_models.family import"
    file.write_text(
        text.replace(place, f"from kenotron_models.families.toy import TOY\n{place}", 1)
    )
    words = "from kenotron_models import FAMILIES, config_from_json as read; "
    words += "print(FAMILIES[-1].marker, read({'is_toy_config': True}).decoder.vocab_size)"
    found = subprocess.run(
        [sys.executable, "-c", words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.stdout == "is_toy_config 21\n", found.stderr


def test_every_part_of_a_block_says_what_it_is() -> None:
    block = BlockSpec(mixer=None, feed_forward=MLPSpec(features=4))
    assert [part.name for part in block.parts] == ["mlp"]
    assert [part.name for part in BlockSpec(mixer=ShiftSpec(features=2), feed_forward=None).parts]
    assert AttentionSpec(heads=4, kv_heads=2, head_dim=16).factor == 0.25


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.marker)
def test_no_family_has_the_keys_of_another(family) -> None:
    names = {each.name for each in fields(family.config)}
    markers = {each.marker for each in FAMILIES}
    assert names & markers == {family.marker}
    assert not {"rms_norm_eps", "layer_norm_epsilon"} <= names


def test_a_key_of_another_family_is_an_unknown_key() -> None:
    with pytest.raises(ValueError, match="Starcoder2: .* unexpected keyword argument 'rms_norm_e"):
        config_from_json({"is_starcoder2_config": True, "rms_norm_eps": 1e-5})
    with pytest.raises(ValueError, match="Llama: .* unexpected keyword argument 'sliding_window_"):
        config_from_json({"is_llama_config": True, "sliding_window_size": 4})


def test_markers_that_older_checkpoints_hold_are_passed_over() -> None:
    config = Qwen2Config(hidden_size=64, num_attention_heads=4)
    assert config_from_json(asdict(config) | {"is_llama_config": False}) == config
    with pytest.raises(ValueError, match="is_qwen2_config: false was given; it must be true"):
        Qwen2Config(is_qwen2_config=False)


def test_differences_name_the_layer_that_differs() -> None:
    base = Qwen2Config(hidden_size=64, num_attention_heads=4, num_hidden_layers=4)
    near = Qwen2Config(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=4, no_rope_layer=2,
        rms_norm_eps=1e-3,
    )  # fmt: skip
    assert differences(base.decoder, near.decoder) == [
        "norm.eps: 1e-06 and 0.001",
        "layers.1.attention.rope: {theta: 10000.0, interleaved: False, share: 1.0} and null",
    ]
    fewer = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3)
    assert differences(base.decoder, fewer.decoder) == ["num_hidden_layers: 4 and 3"]
