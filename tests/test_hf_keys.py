"""Each key of transformers' config classes makes the model that it makes there, or is refused.

Keys are what the installed transformers has. ``--hf-keys=all`` takes each of them for all
architectures; by default every n-th one is taken, another one for each architecture.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import hf_cases
import hf_keys
import pytest
import torch

from kenotron_ckpt import StreamedTensor, open_safetensors, save_streamed
from kenotron_convert.exporting import export_hf
from kenotron_convert.importing import fresh_state
from kenotron_models import FAMILIES
from kenotron_models.families import Mamba2ModelConfig
from kenotron_models.hf import config_from_hf, hf_tensors, load_theirs
from kenotron_models.hf_import import compare_import, read_model

STRIDE = 12
"""Of the keys of an architecture one of so many is changed, unless all are asked for."""
pytestmark = pytest.mark.xdist_group("hf-keys")


def test_every_architecture_has_a_base():
    own = [family.hf.model_type for family in FAMILIES if family.hf is not None]
    own += [each.model_type for family in FAMILIES for each in family.others]
    assert {*hf_keys.BASES} == {*own}
    for model_type, case in hf_keys.BASES.items():
        assert hf_cases.config_of(case).model_type == model_type


@pytest.mark.parametrize("model_type", hf_keys.BASES)
def test_a_changed_key_is_computed_as_there_or_refused(model_type, tmp_path, request):
    every = [*hf_keys.changes(model_type)]
    assert len(every) > 20
    if request.config.getoption("--hf-keys") != "all":
        every = every[list(hf_keys.BASES).index(model_type) % STRIDE :: STRIDE]
    found = [(change, *hf_keys.check(model_type, change, tmp_path / "m")) for change in every]
    faults = [f"{change}: {said}" for change, word, said in found if word == hf_keys.FAULT]
    assert not faults, "\n".join(faults)
    assert Counter(word for _, word, _ in found)["equal"], "no key was compared"


@pytest.mark.parametrize("model_type", hf_keys.BASES)
def test_a_key_that_is_left_out_is_what_transformers_takes(model_type):
    """Both read the same model from a config.json that lacks one key; no model is built."""
    values = hf_cases.config_of(hf_keys.BASES[model_type]).to_dict()
    kind = type(hf_cases.config_of(hf_keys.BASES[model_type]))
    compared = 0
    for key, rest in hf_keys.without_one(values):
        try:
            theirs = kind.from_dict(copy.deepcopy(rest)).to_dict()
        except Exception:  # it cannot be left out there
            continue
        try:
            ours = config_from_hf(rest).decoder
        except ValueError:  # nor here
            continue
        assert ours == config_from_hf(theirs).decoder, key
        compared += 1
    assert compared > 10


def test_weights_that_transformers_scales_when_it_loads_them_are_those_of_the_file(tmp_path):
    model = hf_cases.make("mamba", rescale_prenorm_residual=True)
    model.save_pretrained(tmp_path)
    assert compare_import(read_model(open_safetensors(tmp_path))) <= 1e-5
    with torch.no_grad():
        scaled = load_theirs(tmp_path)(hf_cases.TOKENS, use_cache=False).logits
        saved = model.eval()(hf_cases.TOKENS, use_cache=False).logits
    assert (scaled - saved).abs().max() > 1e-3 * saved.abs().max(), "mended: remove as_in_the_file"


def test_bounded_steps_and_channels_of_their_own_are_those_of_transformers(tmp_path):
    for case in ("nemotron-h-bounded-steps", "mamba-own-width", "llama-biases"):
        hf_cases.save(case, tmp_path / case)
        found = compare_import(read_model(open_safetensors(tmp_path / case)))
        assert found is not None and found <= 1e-5, case


def test_heads_that_are_no_multiple_of_the_width_are_exported(tmp_path):
    """A Mamba-2 of transformers cannot have them; a Nemotron-H of such layers can."""
    config = Mamba2ModelConfig(
        hidden_size=24, num_hidden_layers=2, vocab_size=61, num_heads=5, head_dim=8, n_groups=1,
        state_size=8, chunk_size=8, tie_word_embeddings=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    sources = {
        name: StreamedTensor(
            whole.shape, torch.float32, partial(drawn, name, whole.shape, generator)
        )
        for name, whole in hf_tensors(config).items()
    }
    save_streamed(tmp_path / "run", 0, sources, fresh_state(config, torch.float32, {}))
    done = export_hf(tmp_path / "run", tmp_path / "out")
    assert done.deviation <= 1e-5
    assert load_theirs(tmp_path / "out").config.model_type == "nemotron_h"


def drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return hf_cases.ordinary(name, torch.randn(shape, generator=generator))
