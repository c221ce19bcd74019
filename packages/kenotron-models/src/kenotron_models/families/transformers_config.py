"""Any causal model of transformers, by the folder that has its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from kenotron_dist import Axis
from kenotron_dist.placement import materialize
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.decoder import LayerStack, build_decoder
from kenotron_models.families.transformers_small import HEADS, kv_heads_of, small_json
from kenotron_models.family import Family
from kenotron_models.hub_folder import hub_folder, missing
from kenotron_models.small import SmallSizes
from kenotron_models.transformers_attention import OWN_ATTENTION
from kenotron_models.transformers_meta import layers_on_meta
from kenotron_models.transformers_model import config_of, spec_of
from kenotron_models.transformers_spec import TransformersSpec

CONFIG = "config.json"
ATTENTIONS = ("sdpa", "eager", OWN_ATTENTION)
MOST = 100_000_000
"""Parameters of a copy."""
OF_A_FILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of config.json that say nothing of the model."""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """A causal model of transformers that has no family of its own here; transformers computes it.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_hf_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    path: str | None = None
    """Folder with the model's config.json, or its name on the hub, if it is in the cache. Its
    weights are read with `model.init_method.path`."""
    attn_implementation: str | None = None
    """Attention backend of transformers: `sdpa` or `eager`; None: its own choice, `sdpa` for nearly
    all. `kenotron`: attention is computed here, which cp needs, and honours documents."""
    separate_documents: bool = False
    """True: a token sees its own document only, where samples hold several."""
    tp_plan: dict[str, str] | None = None
    """Styles of `kenotron_tp.parallelize` by name, with `*` for one word, that replace those of the
    family's plan, or are the plan of a family that has none."""
    config_json: str | None = None
    """Contents of that config.json; None: read from path. Checkpoints have it, so that they can be
    read without the folder."""

    def __post_init__(self) -> None:
        """Check all fields, and read the file."""
        found = []
        if not self.is_hf_config:
            found.append("is_hf_config: false was given; it must be true, or be left out")
        if self.attn_implementation not in (None, *ATTENTIONS):
            found.append(
                f"attn_implementation: {self.attn_implementation} was given; it must be one of "
                f"{', '.join(ATTENTIONS)}, or null"
            )
        if self.path is not None and self.config_json is None:
            object.__setattr__(self, "path", hub_folder(self.path))
        try:
            object.__setattr__(self, "config_json", _read(self.path, self.config_json))
        except ValueError as error:
            found.append(str(error))
        if found:
            raise ValueError("\n".join(found))

    @property
    def decoder(self) -> TransformersSpec:
        """Decoder that the file describes.

        Raises:
            ImportError: transformers is not installed.
            ValueError: transformers has no causal model of this kind.
        """
        assert self.config_json is not None
        plan = tuple((self.tp_plan or {}).items())
        return spec_of(self.config_json, self.attn_implementation, self.separate_documents, plan)

    @property
    def vocab_size(self) -> int:
        """Token numbers that exist, without padding."""
        return self.decoder.vocab_size

    @property
    def keys(self) -> dict[str, Any]:
        """All keys of the model, also those that its config.json leaves out."""
        assert self.config_json is not None
        values = json.loads(config_of(self.config_json).to_json_string(use_diff=False))
        return {key: value for key, value in values.items() if key not in OF_A_FILE}

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, in features."""
        return self.decoder.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """Layers."""
        return self.decoder.depth

    @property
    def num_attention_heads(self) -> int:
        """Query heads of each layer; of a model without attention those that say its width."""
        return self.decoder.heads or HEADS

    @property
    def kv_heads(self) -> int:
        """Key and value heads of each layer."""
        assert self.config_json is not None
        return kv_heads_of(self.config_json, self.num_attention_heads)

    def small(self, sizes: SmallSizes) -> Self:
        """Return a narrow copy of the same structure, or one of few layers and token numbers.

        Raises:
            ValueError: neither of them can be built.
        """
        assert self.config_json is not None
        refused = []
        for narrow in (True, False):
            try:
                text = small_json(self.config_json, sizes, narrow=narrow)
                found = replace(self, config_json=text)
                layers = layers_on_meta(found.decoder, sizes.tp, sizes.ep)
                if narrow:
                    _compute(found.decoder)
                _check_small(layers)
                return found
            except Exception as error:  # of any kind: models of transformers have their own
                refused.append(f"{'few features' if narrow else 'few layers'}: {error}")
        raise ValueError(self._no_copy(refused))

    def _no_copy(self, refused: list[str]) -> str:
        values = json.loads(self.config_json or "{}")
        keys = [k for k, each in values.items() if type(each) is int and each > 1]
        return "\n  ".join(
            [
                f"path: a {values['model_type']} has no narrow copy: its sizes "
                f"({', '.join(sorted(keys)) or 'those of the class'}) are not made small together "
                "here; give the config.json of a small model of this kind",
                *refused,
            ]
        )


def _check_small(layers: list[tuple[str, nn.Module]]) -> None:
    """Raise ValueError where a rank has too many parameters for a copy."""
    count = sum(each.numel() for _, layer in layers for each in layer.parameters())
    if count > MOST:
        raise ValueError(f"{count:,} parameters, which are more than {MOST:,}")


def _compute(spec: TransformersSpec) -> None:
    """Run a model of few features, whose weights are 0, on a short text."""
    stack = LayerStack(build_decoder(spec, Build(Axis.solo("tp"), dtype=torch.float32)))
    materialize(stack, "cpu")
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.zero_()
        stack.fill_buffers(torch.device("cpu"))
        stack(torch.arange(8) % spec.vocab_size, Context(torch.arange(8)[None]))


def _read(path: str | None, given: str | None) -> str:
    """Return the contents of config.json as one line, without what says nothing of the model."""
    if given is None and path is None:
        raise ValueError("path: nothing was given; it must name a folder with a config.json")
    text, name = given, "config_json: it"
    if text is None:
        file = Path(path or "") / CONFIG
        name = f"path: {file}"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            hint = f"give a model's folder{missing(path or '')}"
            raise ValueError(f"{name} cannot be read ({error}); {hint}") from None
    try:
        values: Any = json.loads(text)
    except RecursionError:
        raise ValueError(f"{name} is not read: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ValueError(f"{name} has no model_type; take the config.json that transformers wrote")
    kept = {key: value for key, value in values.items() if key not in OF_A_FILE}
    return json.dumps(kept, sort_keys=True)


TRANSFORMERS = Family(marker="is_hf_config", config=TransformersConfig)
