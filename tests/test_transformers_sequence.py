"""Layers of transformers with tokens cut over tp compute what the plain model computes."""

from __future__ import annotations

import json
import logging
import warnings

import any_model
import pytest
from tiny_transformers import tiny_json

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_models import layers_on_meta, run_on_meta
from kenotron_models.families import TransformersConfig
from kenotron_tp import TPMode

pytest.importorskip("transformers")
CUT = TPMode(sequence_parallel=True)
SUMMED = {  # modules of two layers that get all tokens, and those whose sum is scattered
    "llama": (4, 4),
    "qwen3": (4, 4),  # norms of heads
    "mistral": (4, 4),
    "gemma2": (4, 4),  # a tied head, norms behind attention
    "mixtral": (4, 2),  # experts and their routers compute all tokens
    "phi": (4, 0),  # biases, and attention next to the feed-forward network
    "qwen3_next": (4, 2),  # linear attention is whole on every rank
}


def compare(mesh: Mesh, kinds: list[str]) -> dict[str, dict[str, float]]:
    """Deviations of logits and every gradient by name; 15 tokens, which two ranks do not divide."""
    warnings.simplefilter("ignore")  # of transformers
    logging.disable(logging.WARNING)
    return {k: any_model.deviations(mesh, k, None, CUT, (3, 5))[0] for k in kinds}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_logits_and_gradients_are_those_of_the_plain_model(sizes):
    kinds = [k for k in SUMMED if "ep" not in sizes or k in ("mixtral", "qwen3_next")]
    for found in on_ranks(compare, kinds, **sizes, preload=any_model.PRELOAD):
        for kind, deviations in found.items():
            assert len(deviations) > 10
            limit = 1e-5 if kind == "qwen3_next" else 2e-6  # states add up rounding
            assert max(deviations.values()) < limit, (kind, deviations)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SUMMED)
def test_modules_between_norms_are_found(kind):
    spec = TransformersConfig(config_json=tiny_json(kind)).decoder
    layers = layers_on_meta(spec, 2, 1, CUT)
    gathering = [m for _, each in layers for m in each.modules() if hasattr(m, "gathers_over")]
    assert (len(gathering), sum(m.sums for m in gathering)) == SUMMED[kind]


@pytest.mark.filterwarnings("ignore")
def test_layers_that_need_whole_tokens_are_named():
    for kind, words in (
        ("gemma3n_text", "a gemma3n_text is not split into layers: its tokens stay whole"),
        ("longcat_flash", "layers.0.self_attn is a ModuleList, whose modules the layer"),
    ):
        spec = TransformersConfig(config_json=tiny_json(kind)).decoder
        with pytest.raises(ValueError, match=words):
            layers_on_meta(spec, 2, 1, CUT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bloom", "mpt", "ctrl"])
def test_layers_that_need_whole_tokens_inside_are_found_on_meta(kind):
    text = tiny_json(kind)
    with pytest.raises(ValueError, match="names suggest ") as told:
        layers_on_meta(TransformersConfig(config_json=text).decoder, 2)
    plan = json.loads(str(told.value).partition("names suggest ")[2])
    spec = TransformersConfig(config_json=text, tp_plan=plan).decoder
    run_on_meta(spec, 2, 1, TPMode())
    with pytest.raises(ValueError, match="is called with two tensors of hidden features"):
        run_on_meta(spec, 2, 1, CUT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["falcon", "gpt_neo"])
def test_families_with_classes_of_attention_have_none_of_ours(kind):
    spec = TransformersConfig(config_json=tiny_json(kind), attn_implementation="kenotron").decoder
    with pytest.raises(ValueError, match=f"kenotron was given; a {kind} chooses among classes"):
        layers_on_meta(spec)


@pytest.mark.filterwarnings("ignore")
def test_communication_of_cut_tokens_is_in_no_program():
    spec = TransformersConfig(config_json=tiny_json("llama")).decoder
    layers = layers_on_meta(spec, 2, 1, CUT)
    for _, each in layers:
        each.compile_block()
    gathering = [m for _, each in layers for m in each.modules() if hasattr(m, "gathers_over")]
    assert len(gathering) == 4
    for each in gathering:
        assert all(hasattr(way, "_torchdynamo_disable") for way in (each.enter, each.leave))
