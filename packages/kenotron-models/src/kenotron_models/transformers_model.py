"""transformers' own modules: built on meta, cut over tp, given buffers and roles.

The only file that imports transformers, and only when a model of it is built.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Role, declare_roles
from kenotron_dist.placement import Chunk
from kenotron_models.build import Build
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_tp import Style, parallelize, vocabulary_chunk

FUSED = ("qkv_proj", "query_key_value", "qkv", "c_attn", "Wqkv", "W_pack", "in_proj")
"""Matrices that ``base_model_tp_plan`` cuts by heads: queries, keys and values of each together."""
FAR = 2**31 - 1
"""Longest text of a model that names no limit."""


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "is_hf_config: true was given, and a model of transformers needs the extra transformers"
            f' of kenotron-models, it cannot be imported ({error}): pip install "transformers>=5"'
        ) from error
    return transformers


@lru_cache(maxsize=16)
def spec_of(config_json: str, attention: str | None, documents: bool) -> TransformersSpec:
    """Return what a config.json says of a causal model.

    Args:
        config_json: contents of the file.
        attention: ``attn_implementation`` of transformers.
        documents: whether a token sees its own document only.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers has no causal model of this kind, or its weights are quantised.
    """
    config = _config(config_json)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 0
    heads = heads if isinstance(heads, int) else max(heads)
    width = int(text.hidden_size)
    head_dim = getattr(text, "head_dim", None) or (width // heads if heads else 0)
    return TransformersSpec(
        hidden_size=width,
        vocab_size=int(text.vocab_size),
        max_position_embeddings=int(getattr(text, "max_position_embeddings", None) or FAR),
        blocks=(),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        config_json=config_json,
        depth=int(text.num_hidden_layers),
        heads=heads,
        head_dim=int(head_dim),
        attention=attention,
        documents=documents,
    )


def _config(config_json: str) -> Any:
    """The config object of transformers."""
    transformers = _transformers()
    values = json.loads(config_json)
    kind = values["model_type"]
    if values.get("quantization_config"):
        raise ValueError(
            f"config.json of a {kind}: quantised weights cannot be trained: take the model that "
            "they were made from"
        )
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if kind not in known or known[kind] not in causal:
        raise ValueError(
            f"config.json: model_type {kind!r} is no causal model of transformers "
            f"{transformers.__version__}: remote code is not run"
        )
    try:
        config = known[kind].from_dict(values)
    except Exception as error:  # of any kind: validators of transformers have their own
        raise ValueError(f"config.json of a {kind}: transformers refuses it: {error}") from error
    masked = transformers.MODEL_FOR_MASKED_LM_MAPPING
    if known[kind] in masked and getattr(config, "is_decoder", None) is False:
        why = "is_decoder is false, and tokens see later ones: set it to true"
        raise ValueError(f"config.json of a {kind}: {why}")
    config.use_cache = False
    return config


def empty_model(spec: TransformersSpec, dtype: torch.dtype | None) -> Any:
    """Return transformers' model on meta, with all its modules.

    Raises:
        ValueError: it drops activations at random, which depends on the layout.
    """
    config = _config(spec.config_json)
    with torch.device("meta"):
        model = _transformers().AutoModelForCausalLM.from_config(
            config, dtype=dtype or torch.get_default_dtype(), attn_implementation=spec.attention
        )
    if dropped := [*_dropping(model)]:
        raise ValueError(
            f"{dropped[0]} is not 0: modules of transformers drop other features on every layout: "
            "set the rates of dropout in config.json to 0"
        )
    return model.train()


@lru_cache(maxsize=8)
def saved_names(spec: TransformersSpec) -> dict[str, str]:
    """Return what ``save_pretrained`` calls each parameter, by its name in the modules.

    One that it cuts up or joins with others keeps its name, which no file has.
    """
    model = empty_model(spec, None)
    revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    named = model.named_parameters(remove_duplicate=False)
    given = {name: parameter.detach() for name, parameter in named}  # tied ones are two
    saved = {id(tensor): name for name, tensor in revert(model, given).items()}
    return {name: saved.get(id(tensor), name) for name, tensor in given.items()}


def _dropping(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            yield f"{path}.p ({module.p})"
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float) and value:
                yield f"{path}.{name} ({value})"


def tp_plan(model: Any) -> dict[str, str] | None:
    """Return transformers' plan for the layers, by full names; None: it has none."""
    plan = getattr(model.config.get_text_config(decoder=True), "base_model_tp_plan", None)
    if not plan:
        return None
    prefix = path_of(model, model.base_model)
    start = f"{prefix}." if prefix else ""
    return {start + name: style for name, style in plan.items()}


def path_of(model: nn.Module, module: nn.Module) -> str:
    """Return the name of a module in a model."""
    return next(path for path, each in model.named_modules() if each is module)


def cut_model(model: Any, build: Build) -> None:
    """Cut a model over tp in place: layers by their plan, embedding and head over the vocabulary.

    Raises:
        ValueError: there is no plan and tp is not 1, or the plan cannot be followed.
    """
    tp, plan = build.tp, tp_plan(model)
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ValueError(f"a {model.config.model_type} has no linear layer that makes logits")
    if plan is None and tp.size > 1:
        raise ValueError(
            f"tp {tp.size} was given, but transformers has no base_model_tp_plan for a "
            f"{model.config.model_type}: set tp to 1"
        )
    try:
        parallelize(model, _styles(model, plan, tp.size), tp, overlap=build.mode.overlap)
    except ValueError:
        if tp.size > 1:
            raise
        parallelize(model, {}, tp)  # it trains on one rank
    _declare_roles(model, plan or {})


def _styles(model: Any, plan: dict[str, str] | None, ranks: int) -> dict[str, Style]:
    """The plan of all layers, of embedding and head too; empty where transformers has none."""
    if plan is None:
        return {}
    styles = {name: _style(model, name, style, ranks) for name, style in plan.items()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    styles[path_of(model, head)] = (vocabulary_chunk(head.out_features, ranks),)
    if type(embedding) is nn.Embedding:
        styles[path_of(model, embedding)] = "embedding_rowwise"
    return styles


def _style(model: Any, pattern: str, style: str, ranks: int) -> Style:
    """A style of transformers; its fused matrices are cut head by head."""
    words = pattern.split(".")
    if style != "colwise" or words[-1] not in FUSED:
        return style
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    layer = model.get_submodule(".".join("0" if word == "*" else word for word in words))
    if heads % ranks:
        raise ValueError(
            f"tp {ranks} was given, and {pattern} has {heads} heads: choose a tp that divides them"
        )
    return (Chunk(layer.out_features, parts=heads),)


def _declare_roles(model: Any, plan: dict[str, str]) -> None:
    """Declare what parameters are where their shape does not tell: first values ask for it."""
    declare_roles(model.get_output_embeddings(), weight="output")
    for pattern, style in plan.items():
        if not style.startswith("rowwise"):
            continue
        for layer in _matching(model, pattern):
            if isinstance(layer, nn.Module) and "weight" in layer._parameters:
                declare_roles(layer, weight="residual")
    for module in model.modules():
        small = [n for n, p in module._parameters.items() if p is not None and p.ndim < 2]
        plain = isinstance(module, nn.Linear | nn.LayerNorm) or hasattr(module, "roles")
        if small and not plain:
            declare_roles(module, **_constants(model, module, small))


def _matching(model: nn.Module, pattern: str) -> Iterator[nn.Module]:
    words = pattern.split(".")
    for path, module in model.named_modules():
        parts = path.split(".")
        if len(parts) == len(words) and all(
            a in ("*", b) for a, b in zip(words, parts, strict=True)
        ):
            yield module


def _constants(model: Any, module: nn.Module, names: list[str]) -> dict[str, Role]:
    """Roles of vectors, from the constants that transformers begins them with."""
    twin = copy.copy(module)
    unset = {
        name: nn.Parameter(torch.full(p.shape if name in names else (1, 1), torch.nan))
        for name, p in module._parameters.items()
        if p is not None
    }
    twin._parameters = dict(unset)
    try:
        with torch.no_grad():
            model._init_weights(twin)
    except (AttributeError, RuntimeError, IndexError):  # it looks at what the twin does not have
        return {}
    found: dict[str, Role] = {}
    for name in names:
        values = twin._parameters[name]
        if values is None:
            continue
        if bool((values == 1).all()):
            found[name] = "norm"
        elif bool((values == 0).all()):
            found[name] = "norm_offset" if name == "weight" else "norm_bias"
    return found


def fill_buffers(model: Any, inside: nn.Module, device: torch.device) -> None:
    """Give the buffers of a part of a model their values; ValueError for an unknown one."""
    for path, module in inside.named_modules():
        own = {name: each for name, each in module._buffers.items() if each is not None}
        if not own:
            continue
        twin = copy.copy(module)  # which has no parameters that could be drawn again
        twin._parameters = {
            name: None if p is None else nn.Parameter(torch.empty_like(p, device="meta"))
            for name, p in module._parameters.items()
        }
        twin._buffers = {name: _unset(each, device) for name, each in own.items()}
        with torch.no_grad():
            model._init_weights(twin)
        for name in own:
            value = module._buffers[name] = twin._buffers[name]
            if value is None or bool(value.isnan().any()):
                raise ValueError(f"{path}.{name}: transformers does not compute this buffer again")


def _unset(buffer: Tensor, device: torch.device) -> Tensor:
    """A buffer without values: NaN, so that one that stays so is seen."""
    return torch.full(buffer.shape, torch.nan, dtype=buffer.dtype, device=device)


def check_buffers(model: Any) -> None:
    """Raise ValueError for buffers that cannot be filled, before anything is."""
    for path, module in model.named_modules():
        for name, each in module._buffers.items():
            if each is None:
                continue
            kept = name not in module._non_persistent_buffers_set
            if kept or not each.is_floating_point():
                raise ValueError(
                    f"{path}.{name}: this buffer is saved with the weights, or is not computed "
                    "from the config: a model with it cannot be trained here"
                )
