"""transformers' own modules: built on meta, and given buffers.

The only file that imports transformers, and only when a model of it is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_models.transformers_attention import OWN_ATTENTION, attend_rows, window_mask
from kenotron_models.transformers_corrections import UNFIT
from kenotron_models.transformers_plan import base_of
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_models.transformers_twin import meta_twin

UNSET = torch.iinfo(torch.int64).min
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
def spec_of(
    config_json: str, attention: str | None, documents: bool, tp_plan: tuple[tuple[str, str], ...]
) -> TransformersSpec:
    """Return what a config.json says of a causal model.

    Args:
        config_json: contents of the file.
        attention: ``attn_implementation`` of transformers.
        documents: whether a token sees its own document only.
        tp_plan: styles by name that replace those of the family.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers has no causal model of this kind, or its weights are quantised.
    """
    config = config_of(config_json)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 0
    heads = heads if isinstance(heads, int) else max(heads)
    width = int(text.hidden_size)
    # Not read as an attribute: it raises where layers differ.
    head_dim = text.to_dict().get("head_dim") or (width // heads if heads else 0)
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
        tp_plan=tp_plan,
        balances=bool(getattr(text, "output_router_logits", False)),
        z_loss=float(getattr(text, "z_loss_coefficient", None) or 0),
    )


def _tagged_float(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as a mapping, such as an infinite time step."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def config_of(config_json: str) -> Any:
    """Return the config object of transformers.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers has no causal model of this kind, or its weights are quantised.
    """
    transformers = _transformers()
    values = json.loads(config_json, object_hook=_tagged_float)
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
        ValueError: it drops activations at random, which depends on the layout, or has buffers
            that cannot be filled.
    """
    config, transformers = config_of(spec.config_json), _transformers()
    if spec.balances:  # computed here, see transformers_balance
        config.get_text_config(decoder=True).output_router_logits = False
    if OWN_ATTENTION not in transformers.AttentionInterface():  # see attend_outside_programs
        transformers.AttentionInterface.register(OWN_ATTENTION, attend_rows)
    transformers.AttentionMaskInterface.register(OWN_ATTENTION, window_mask)
    kind = config.get_text_config(decoder=True).model_type
    dtype = dtype or torch.get_default_dtype()
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=spec.attention
            )
    except KeyError as error:
        if error.args != (spec.attention,):
            raise
        raise ValueError(
            f"attn_implementation: {spec.attention} was given; a {kind} chooses among classes of "
            "its own, and has none of this name: leave it out"
        ) from None
    if why := UNFIT.get(kind):
        raise ValueError(f"a {kind} cannot be trained on several layouts: {why}")
    if dropped := [*_dropping(model)]:
        raise ValueError(
            f"{dropped[0]} is not 0: modules of transformers draw other numbers on every layout: "
            "set the rates of dropout and jitter in config.json to 0"
        )
    freeze_buffers(model)
    return model.train()


def plain_model(spec: TransformersSpec) -> Any:
    """Return transformers' own model in float32 with random weights, as its users make it.

    Its attention is transformers' own, also where it would be computed here.
    """
    chosen = None if spec.attention == OWN_ATTENTION else spec.attention
    model = _transformers().AutoModelForCausalLM.from_config(
        config_of(spec.config_json), dtype=torch.float32, attn_implementation=chosen
    )
    return model.train()


def dynamic_cache(model: Any) -> Any:
    """Return an empty cache of transformers with a layer of each layer's kind."""
    return _transformers().DynamicCache(config=model.config.get_text_config(decoder=True))


def attend_outside_programs() -> None:
    """Let programs of ``torch.compile`` call the attention that is computed here."""
    attend = torch.compiler.disable(attend_rows)
    _transformers().AttentionInterface.register(OWN_ATTENTION, attend)


def _dropping(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            yield f"{path}.p ({module.p})"
        for name, value in vars(module).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float) and value:
                yield f"{path}.{name} ({value})"


def fill_buffers(model: Any, inside: nn.Module, device: torch.device) -> None:
    """Give the buffers of a part of a model their values; ValueError for an unknown one."""
    for path, module in inside.named_modules():
        own = {name: each for name, each in module._buffers.items() if each is not None}
        if not own:
            continue
        twin = meta_twin(module)
        twin._buffers = {name: _unset(each, device) for name, each in own.items()}
        with torch.no_grad():
            base_of(model)._init_weights(twin)
        for name in own:
            value = module._buffers[name] = twin._buffers[name]
            if value is None or not value.is_meta and _has_unset(value):
                raise ValueError(f"{path}.{name}: transformers does not compute this buffer again")


def _has_unset(value: Tensor) -> bool:
    return bool((value == UNSET).any() | value.isnan().any())


def _unset(buffer: Tensor, device: torch.device) -> Tensor:
    """A buffer without values: NaN or the least integer, so that one that stays so is seen."""
    empty = torch.nan if buffer.is_floating_point() else UNSET
    return torch.full(buffer.shape, empty, dtype=buffer.dtype, device=device)


def freeze_buffers(model: Any) -> None:
    """Make buffers that are saved with the weights parameters that do not learn.

    Raises ValueError for those that are no floating-point numbers.
    """
    for path, module in model.named_modules():
        for name, each in [*module._buffers.items()]:
            if each is None or name in module._non_persistent_buffers_set:
                continue
            if not each.is_floating_point():
                raise ValueError(
                    f"{path}.{name}: this buffer of {each.dtype} is saved with the weights: a model"
                    " with it cannot be trained here"
                )
            del module._buffers[name]
            module.register_parameter(name, nn.Parameter(each, requires_grad=False))
