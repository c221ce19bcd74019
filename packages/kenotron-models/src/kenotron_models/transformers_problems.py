"""Reasons why a model of transformers cannot do something, before it is built with its weights."""

from __future__ import annotations

from functools import lru_cache

import torch

from kenotron_models.context import Context
from kenotron_models.kv_cache import KVCache
from kenotron_models.spec import DecoderSpec
from kenotron_models.transformers_attention import OWN_ATTENTION
from kenotron_models.transformers_cache import cache_word
from kenotron_models.transformers_model import empty_model
from kenotron_models.transformers_rows import cut_rows_problem
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_models.transformers_split import split_of


@lru_cache(maxsize=8)
def sequence_problem(spec: TransformersSpec) -> str | None:
    """Return why rows of a model cannot be cut over cp; None: they can."""
    if spec.attention != OWN_ATTENTION:
        return "attention of transformers needs whole rows: set attn_implementation to kenotron"
    model = empty_model(spec, None)
    split = split_of(spec)
    skeleton = None if split is None else split.skeleton(model, False)
    return cut_rows_problem(model, skeleton, spec.hidden_size)


@lru_cache(maxsize=8)
def cache_problem(spec: DecoderSpec) -> str | None:
    """Return why layers of transformers cannot continue texts from their cache; None: they can.

    Two passes are made without weights, where layers are known.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the model cannot be built here.
    """
    if not isinstance(spec, TransformersSpec):
        return None
    model, split, cache = empty_model(spec, None), split_of(spec), KVCache(4)
    try:
        cache_word(model)
        if split is None:
            return None
        skeleton = split.skeleton(model, False)
        with torch.device("cpu"):
            skeleton.fill_buffers(torch.device("cpu"))
            for places in (torch.arange(3).expand(2, -1), torch.full((2, 1), 3)):
                context = Context(places, cache=cache)
                calls = skeleton.calls(torch.zeros(*places.shape, spec.hidden_size), context)
    except Exception as error:  # of any kind: caches of transformers have their own
        return str(error)
    lengths = cache.others[id(model)].lengths
    given = [[id(each) for each in (*call.args, *call.options.values())] for call in calls]
    without = [i for i, each in enumerate(given) if id(lengths) not in each]
    return f"layer {without[0]} of a {model.config.model_type} has no cache" if without else None
