"""What a model of transformers cannot do, and folders that are none, are refused by name."""

from __future__ import annotations

import json
import sys

import pytest
import runs
import torch
from foreign_models import configure, folder_of
from torch import nn

from kenotron_config import ConfigError
from kenotron_convert import transformers_export
from kenotron_convert.exporting import export_hf
from kenotron_dist import Axis, Mesh
from kenotron_models import Build, Context, build_decoder
from kenotron_models.families import TransformersConfig
from kenotron_models.kv_cache import KVCache
from kenotron_models.transformers_cache import cache_of
from kenotron_models.transformers_model import (
    empty_model,
    fill_buffers,
    freeze_buffers,
    spec_of,
)
from kenotron_models.transformers_plan import cut_model
from kenotron_models.transformers_skeleton import Call, Skeleton, check_documents
from kenotron_train.assemble import build_training
from kenotron_train.run.initial import load_initial

PROBLEMS = {
    "parallelism.cp=2": "parallelism.cp: 2 was given; attention of transformers needs whole rows",
    "parallelism.ep=2": "parallelism.ep: ep 2 was given, and the model has no experts: set it to",
    "parallelism.recompute=selective": "parallelism.recompute: selective was given; a model of",
    "model.mtp={}": "model.mtp.layers: 1 was given; layers of transformers have no such module",
    "model.cuda_graph=true": "model.cuda_graph: true was given; a model of transformers",
    "model.make_vocab_size_divisible_by=8": "make_vocab_size_divisible_by: 8 was given; the vocab",
    "parallelism.pp=9": r"parallelism.pp: 9 was given \(9 parts\); the model has 5 layers",
    "parallelism.tp=4": "parallelism.tp: a cohere over tp 4: .*k_proj: its 2 heads of 8 features "
    "cannot be .*; model.model_config.tp_plan gives a name another style, .* tp is 4",
}


@pytest.mark.parametrize("change", PROBLEMS)
def test_what_a_model_of_transformers_cannot_do_is_refused_by_name(change, tmp_path):
    folder = folder_of("cohere", tmp_path / "model")
    key, _, value = change.partition("=")
    changes = {key: value}
    if key == "parallelism.ep":
        changes["parallelism.tp"] = 2
    with pytest.raises(ConfigError, match=PROBLEMS[change]):
        configure(folder, tmp_path / "run", changes)


def test_tokens_that_cannot_be_cut_are_refused_by_name(tmp_path):
    cut = {"parallelism.tp": 2, "parallelism.tp_mode": "REDUCE_SCATTER"}
    plan = {"model.decoder.layers.*.fc1": "colwise", "model.decoder.layers.*.fc2": "rowwise"}
    whole = ("self_attn", "self_attn_layer_norm", "final_layer_norm")
    plan |= {f"model.decoder.layers.*.{name}": "replicate" for name in whole}
    for family, words, keys in (
        ("gemma3n_text", "given; a gemma3n_text is not split into layers: its tokens stay", {}),
        ("opt", "given; .*layers.0.fc1 is cut over tp and has no module of its own", plan),
    ):
        folder = folder_of(family, tmp_path / family)
        with pytest.raises(ConfigError, match=f"tp_mode: REDUCE_SCATTER was {words}"):
            configure(folder, tmp_path / "run", cut, **({"tp_plan": keys} if keys else {}))


def test_layers_that_need_whole_tokens_inside_are_refused_before_the_start(tmp_path):
    folder, layout = folder_of("bloom", tmp_path / "model"), {"parallelism.tp": 2}
    with pytest.raises(ConfigError, match="names suggest ") as told:
        configure(folder, tmp_path / "run", layout)
    plan = json.JSONDecoder().raw_decode(str(told.value).partition("names suggest ")[2])[0]
    layout |= {"parallelism.tp_mode": "REDUCE_SCATTER"}
    words = "tp_mode: REDUCE_SCATTER was given; a .* is called with two tensors of hidden"
    with pytest.raises(ConfigError, match=words):
        configure(folder, tmp_path / "run", layout, tp_plan=plan)


def test_models_that_cannot_be_used_are_refused_by_name(tmp_path):
    def refused(words, changes=None, path=tmp_path / "model", **keys):
        with pytest.raises(ConfigError, match=words):
            configure(path, tmp_path / "run", changes, **keys)

    folder_of("stablelm", tmp_path / "model")
    refused(
        "tp: tp 2 was given, but .* no base_model_tp_plan for a stablelm", {"parallelism.tp": 2}
    )
    drawn_with = {"model.init_method": json.dumps({"std": 0.1})}
    refused("scaling_method: NUM_LAYERS was given; without a base_model_tp_plan", drawn_with)
    whole = folder_of("openai-gpt", tmp_path / "whole")
    refused(
        "pp: 2 was given; transformers computes this model in one", {"parallelism.pp": 2}, whole
    )
    refused(
        "compile: true was given; transformers computes this model in one piece, and layers are",
        {"model.compile": True},
        whole,
    )
    refused(
        "recompute: full was given; transformers computes this model in one piece, and layers are",
        {"parallelism.recompute": "full"},
        whole,
    )
    refused("but a openai-gpt is not split into layers", path=whole, separate_documents=True)
    refused("attn_implementation: flash was given", attn_implementation="flash")
    refused("model_config.path: .*none/config.json cannot be read", path=tmp_path / "none")
    written = tmp_path / "model/config.json"
    values = json.loads(written.read_text())
    for change, words in (
        ({"model_type": "nothing"}, "model_type 'nothing' is no causal model of transformers"),
        ({"model_type": None}, "has no model_type; take the config.json that transformers wrote"),
        ({"quantization_config": {"bits": 4}}, "quantised weights cannot be trained"),
        ({"model_type": "phimoe"}, "a phimoe cannot be trained on several layouts: its router"),
        ({"hidden_dropout": 0.1}, "hidden_dropout|dropout.p .* is not 0: modules of transformers"),
    ):
        written.write_text(json.dumps(values | change))
        refused(words)
    written.write_text("{")
    refused("config.json is not JSON")
    written.write_text("[" * 10**5)
    refused("config.json is not read: its JSON is nested too deeply")
    with pytest.raises(ValueError, match="path: nothing was given; it must name a folder"):
        TransformersConfig()
    with pytest.raises(ValueError, match="is_hf_config: false was given"):
        TransformersConfig(path=str(tmp_path), is_hf_config=False)
    with pytest.raises(ValueError, match="config_json: it is not JSON"):
        TransformersConfig(config_json="{")


def test_without_transformers_the_extra_is_named(tmp_path, monkeypatch):
    folder_of("cohere", tmp_path / "model")
    spec_of.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = r'needs the extra transformers of kenotron-models.*: pip install "transformers>=5"'
    with pytest.raises(ConfigError, match=words):
        configure(tmp_path / "model", tmp_path / "run")
    with pytest.raises(ImportError, match=words):
        TransformersConfig(path=str(tmp_path / "model")).decoder  # noqa: B018 (it is computed)


def test_encoders_and_values_that_transformers_refuses():
    encoder = TransformersConfig(config_json='{"model_type": "roformer", "is_decoder": false}')
    with pytest.raises(ValueError, match="of a roformer: is_decoder is false, and tokens see"):
        encoder.decoder  # noqa: B018 (it is computed)
    wrong = TransformersConfig(config_json='{"model_type": "cohere", "hidden_size": "wide"}')
    with pytest.raises(
        ValueError, match="config.json of a cohere: transformers refuses it: .*hidd"
    ):
        wrong.decoder  # noqa: B018 (it is computed)


def test_plans_of_ones_own_that_cannot_be_followed(tmp_path):
    folder = folder_of("mixtral", tmp_path / "model", intermediate_size=42)
    for plan, words in (
        (
            {"model.layer.*.mlp": "rowwise"},
            "with the tp_plan that is given: .*model.layer.*: no such name",
        ),
        ({"model.norm": "rows"}, "model.norm: there is no style 'rows'"),
        ({"lm_head": "colwise"}, "lm_head: it is cut over the vocabulary, for the loss: leave it"),
        ({"model.layers.*.mlp.experts": "replicate"}, "nothing adds up what ranks compute with"),
    ):
        with pytest.raises(ConfigError, match=words):
            configure(folder, tmp_path / "run", tp_plan=plan)
    folder_of("gpt_neox", fused := tmp_path / "fused")
    own = {"gpt_neox.layers.*.attention.query_key_value": "colwise"}
    with pytest.raises(ConfigError, match="colwise does not say how its pieces lie"):
        configure(fused, tmp_path / "run", tp_plan=own)
    words = "a mixtral over tp 4: .*gate_up_proj: 2 pieces of dim 1 of size 84 cannot be cut over 4"
    with pytest.raises(ConfigError, match=words):
        configure(folder, tmp_path / "run", {"parallelism.tp": 4})


def test_heads_that_ranks_cannot_share_in_a_fused_matrix(tmp_path):
    folder_of("gpt_neox", tmp_path / "model")
    spec = TransformersConfig(path=str(tmp_path / "model")).decoder
    words = r"a gpt_neox over tp 3: gpt_neox.layers.\*.attention.query_key_value has 4 heads"
    with pytest.raises(ValueError, match=words):
        build_decoder(spec, Build(Axis("tp", 0, (0, 1, 2))))


class Fake(nn.Module):
    """A model with a buffer, whose layers nothing calls."""

    class config:
        """Its kind."""

        model_type = "fake"

        @staticmethod
        def get_text_config(decoder):
            return Fake.config

    def __init__(self, persistent):
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])
        self.register_buffer("angles", torch.ones(3), persistent=persistent)

    @property
    def base_model(self):
        return self

    def get_input_embeddings(self):
        return None

    def get_output_embeddings(self):
        return None

    def _init_weights(self, module):
        pass

    def forward(self, **_):
        return None


def test_models_of_other_shapes_are_refused():
    kept, computed = Fake(True), Fake(False)
    freeze_buffers(kept)
    assert not kept.angles.requires_grad and [*kept.state_dict()] == ["angles"]
    kept.register_buffer("table", torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="table: this buffer of torch.int64 is saved with the"):
        freeze_buffers(kept)
    freeze_buffers(computed)
    assert not [*computed.parameters()]
    with pytest.raises(ValueError, match="angles: transformers does not compute this buffer again"):
        fill_buffers(computed, computed, torch.device("cpu"))
    with pytest.raises(ValueError, match="a fake has no linear layer that makes logits"):
        cut_model(computed, Build(Axis.solo("tp")))
    skeleton = Skeleton(computed, computed.layers, False, (), 0)
    context = Context(torch.arange(4)[None])
    with pytest.raises(RuntimeError, match="Fake.forward did not call its layers"):
        skeleton.embed(torch.zeros(1, 4, dtype=torch.int64), context)


def test_a_mask_that_shows_other_documents_is_refused():
    places = torch.tensor([[0, 1, 0, 1]])
    causal = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    apart = causal.clone()
    apart[..., 2:, :2] = False
    for mask in (apart, torch.where(apart, 0.0, -1e9)):
        assert check_documents([Call((), {"attention_mask": mask})], places, "fake")
    for mask in (causal, None, torch.where(causal, 0.0, -1e9)):
        calls = [Call((), {"attention_mask": apart}), Call((), {"attention_mask": mask})]
        with pytest.raises(
            ValueError, match="but layer 1 of a fake sees tokens of other documents"
        ):
            check_documents(calls, places, "fake")
    assert not check_documents([], torch.arange(4)[None], "fake")


def test_padding_in_a_later_pass_of_a_cache_is_refused(tmp_path):
    folder_of("cohere", tmp_path / "model")
    spec = TransformersConfig(path=str(tmp_path / "model")).decoder
    model, cache, places = empty_model(spec, None), KVCache(8), torch.arange(4)[None]
    cache_of(model, Context(places, cache=cache))
    with pytest.raises(ValueError, match="padding_BS was given in a later pass of a cache"):
        cache_of(model, Context(places + 4, cache=cache, padding_BS=places == 3))


def test_weights_of_another_model_are_refused(tmp_path):
    folder, other = folder_of("cohere", tmp_path / "model"), tmp_path / "other"
    folder_of("cohere", other, logit_scale=0.5)
    init = {"model.init_method": json.dumps({"path": str(other)})}
    training = build_training(configure(folder, tmp_path / "run", init), Mesh.connect())
    words = "config.json is of another model than model.model_config.*\n  logit_scale: 0.25 and 0.5"
    with pytest.raises(ValueError, match=words):
        load_initial(training)
    done = runs.train(tmp_path, *runs.arguments(tmp_path, tokens__train_steps=1))
    assert done.returncode == 0, done.stderr
    init = {"model.init_method": json.dumps({"path": str(tmp_path / "checkpoints")})}
    training = build_training(configure(folder, tmp_path / "run", init), Mesh.connect())
    with pytest.raises(ValueError, match="one of them is of transformers"):
        load_initial(training)


def test_a_checkpoint_with_other_tensors_is_not_exported(tmp_path, monkeypatch):
    folder = folder_of("cohere", tmp_path / "model")
    from kenotron_train.run.loop import train

    config = configure(folder, tmp_path / "run", {"tokens.train_steps": 2})
    from foreign_models import Rows

    train(Mesh.connect(), config, loader=Rows())
    monkeypatch.setattr(transformers_export, "transformers_names", lambda spec: {"x": ("x",)})
    with pytest.raises(
        ValueError, match="its tensors are not those of its model_config: head.model"
    ):
        export_hf(tmp_path / "run", tmp_path / "out")
