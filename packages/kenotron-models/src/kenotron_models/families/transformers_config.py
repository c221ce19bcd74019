"""Any causal model of transformers, by the folder that has its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kenotron_models.family import Family
from kenotron_models.transformers_attention import OWN_ATTENTION
from kenotron_models.transformers_model import spec_of
from kenotron_models.transformers_spec import TransformersSpec

CONFIG = "config.json"
ATTENTIONS = ("sdpa", "eager", OWN_ATTENTION)
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
    """Folder with the model's config.json. Its weights are read with `model.init_method.path`."""
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
            raise ValueError(f"{name} cannot be read ({error}); give a model's folder") from None
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
