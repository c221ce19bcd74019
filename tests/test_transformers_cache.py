"""Models of transformers continue texts from their own caches on every layout as one process does.

The references are transformers' own `generate` with left padding, and, for draws, its model
without a cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import any_model
import pytest
import torch
from tiny_transformers import VOCAB, tiny_json

from kenotron_dist import Axis, Mesh
from kenotron_dist.boxes import scatter
from kenotron_dist.placement import named_parameters
from kenotron_dist.testing import on_ranks
from kenotron_engine import assemble
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    Sampling,
    build_decoder,
    cache_problem,
    generate,
    transformers_names,
)
from kenotron_models.families import TransformersConfig

pytest.importorskip("transformers")
PROMPTS = [[5, 9, 30, 31, 7], [44], [8, 3, 60, 61, 62, 9, 11, 12, 13, 40, 41]]
NEW = 8
DRAWN = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=5)
KINDS = {
    "llama": None,
    "gemma2": None,  # every second layer has a window
    "qwen3_next": None,  # every second layer has a state and a convolution
    "mixtral": None,
    "gpt_oss": "kenotron",  # windows and sinks
    "bloom": None,  # without a plan: its layers are shared over pp only
    "mamba": None,
    "gemma3n_text": None,  # in one piece
}
EXPERTS = ["qwen3_next", "mixtral", "gpt_oss"]
PLANNED = ["llama", "gemma2", *EXPERTS, "gemma3n_text"]
LAYOUTS = {
    "tp": ({"tp": 2}, PLANNED),
    "pp": ({"pp": 2}, [kind for kind in KINDS if kind != "gemma3n_text"]),
    "ep": ({"dp": 2, "ep": 2}, EXPERTS),
    "tp pp": ({"tp": 2, "pp": 2}, PLANNED[:-1]),
}
Texts = list[list[int | None]]


def continued(
    forward: Any, mesh: Mesh, sampling: Sampling, window: int = 64, *, cached: bool
) -> Texts:
    """New tokens of each step."""
    return [
        *generate(
            forward, PROMPTS, mesh, window=window, vocab_size=VOCAB, max_new_tokens=NEW,
            sampling=sampling, cached=cached,
        )
    ]  # fmt: skip


def texts(mesh: Mesh, kinds: Sequence[str]) -> dict[str, tuple[Texts, Texts, Texts, list[int]]]:
    """Greedy and drawn texts, greedy ones in a short window, and tokens that passes read."""
    warnings.simplefilter("ignore")  # of transformers
    found = {}
    for kind in kinds:
        attention = KINDS[kind]
        config = TransformersConfig(config_json=tiny_json(kind), attn_implementation=attention)
        spec, values = config.decoder, any_model.whole_model(kind).state_dict()

        def read(stack: LayerStack, layouts: Any, spec=spec, values=values) -> None:
            names = transformers_names(spec)
            for path, parameter in named_parameters(stack).items():
                value = values[names[layouts[path].name][0]]
                part = scatter(value, layouts[path], mesh.view(layouts[path]))
                parameter.data.copy_(part)

        assert cache_problem(spec) is None
        layers = build_decoder(spec, Build(mesh["tp"], ep=mesh["ep"]))
        pipeline, passes = assemble(layers, mesh, read).pipeline, []

        def forward(tokens: Any, context: Context, pipeline=pipeline, passes=passes) -> Any:
            passes.append(len(tokens))
            logits = pipeline.forward([tokens], [context])
            return logits[0] if logits else None

        greedy = continued(forward, mesh, Sampling(), cached=True)
        drawn = continued(forward, mesh, DRAWN, cached=True)
        short = continued(forward, mesh, Sampling(), 14, cached=True)
        found[kind] = greedy, drawn, short, passes[:NEW]
    return found


def plain(kind: str) -> tuple[Texts, Texts, Texts]:
    """The same of transformers' own model on one process."""
    warnings.simplefilter("ignore")
    model = any_model.whole_model(kind).eval()

    def forward(tokens: Any, context: Context) -> Any:
        rows = tokens.view_as(context.positions_BS)
        logits = model(input_ids=rows, use_cache=False).logits
        return logits.flatten(0, 1)[context.outputs]

    width = max(map(len, PROMPTS))
    rows = torch.tensor([[0] * (width - len(each)) + each for each in PROMPTS])
    seen = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in PROMPTS])
    whole = model.generate(
        rows, attention_mask=seen, max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )
    mesh = Mesh.connect()
    drawn, short = (
        continued(forward, mesh, how, window, cached=False)
        for how, window in ((DRAWN, 64), (Sampling(), 14))
    )
    return whole[:, width:].T.tolist(), drawn, short


@pytest.fixture(scope="module")
def due() -> dict[str, tuple[Texts, Texts, Texts]]:
    return {kind: plain(kind) for kind in KINDS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_are_those_of_transformers_generate(layout, due):
    sizes, kinds = LAYOUTS[layout]
    for found in on_ranks(texts, kinds, **sizes, preload=any_model.PRELOAD):
        for kind, (greedy, drawn, short, passes) in found.items():
            assert greedy == due[kind][0], kind
            assert drawn == due[kind][1], kind
            assert short == due[kind][2], kind
            assert passes == [33, *[3] * (NEW - 1)], kind  # one token of each text, once read
    assert len({str(each) for kind in kinds for each in due[kind]}) > len(kinds)


@pytest.mark.filterwarnings("ignore")
def test_models_without_such_a_cache_are_named():
    for kind, words in (
        ("rwkv", "a rwkv takes no DynamicCache of transformers"),
        ("doge", "a doge cannot read from a cache: the masks of its heads are made of"),
        ("bamba", "can only be called on Attention layers"),  # this one has none
    ):
        spec = TransformersConfig(config_json=tiny_json(kind)).decoder
        assert words in str(cache_problem(spec))
    spec = TransformersConfig(config_json=tiny_json("rwkv")).decoder
    stack = LayerStack(build_decoder(spec, Build(Axis.solo("tp"))))
    with pytest.raises(ValueError, match=r"a rwkv takes .*: generate with cached=False \(--no-c"):
        continued(stack, Mesh.connect(), Sampling(), cached=True)
