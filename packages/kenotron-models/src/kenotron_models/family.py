"""Definition of a family of decoders: a config, and Hugging Face's keys and names for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from kenotron_models.hf_tensors import LLAMA_NAMES, Names, Outside
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

Values = Mapping[str, Any]
"""The keys of a config.json."""


class FamilyConfig(Protocol):
    """The config of a family: a frozen dataclass with the keys that its users know."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the keys describe."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token numbers that exist, without padding."""
        ...


class SizedConfig(FamilyConfig, Protocol):
    """A config that can be made small, for checks of a layout that run anywhere."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, in features."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Blocks."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """Query heads of each layer."""
        ...

    @property
    def kv_heads(self) -> int:
        """Key and value heads of each layer."""
        ...

    def small(self, sizes: SmallSizes) -> Self:
        """Return a narrow copy of the same structure."""
        ...


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """Hugging Face's names of a family, its keys and its tensors."""

    model_type: str
    """``model_type`` of its config.json."""
    architecture: str
    """Its class in transformers, of ``architectures``."""
    defaults: Values = field(default_factory=dict)
    """Keys that a config.json may leave out where its default is not that of our key."""
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Keys that change what is computed and are none of ours, and the values that can be said."""
    read: Callable[[Values], FamilyConfig] | None = None
    """Our config from all keys, defaults filled in and ``only`` checked; None: as the table of keys
    says."""
    write: Callable[[DecoderSpec], dict[str, Any]] | None = None
    """Keys next to those of the table. Raises ValueError for other parts than it has."""
    names: Names = field(default_factory=lambda: LLAMA_NAMES)
    """Modules of a block, and those of Hugging Face's that each is made of."""
    outside: Outside = Outside()
    """Their names of the tensors outside of blocks."""
    ties: bool = True
    """False: transformers has a head of its own whatever ``tie_word_embeddings`` is."""
    further_layers: bool = False
    """Files have layers beyond the last one, which predict further tokens: they are left out."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family that can be built: one file each, and one line in the registry."""

    marker: str
    """Key that marks its config in YAML and in checkpoints."""
    config: type[Any]
    """The class of its config, a ``FamilyConfig``."""
    hf: HuggingFace | None = None
    """Its names in Hugging Face; None: it trains, and is not converted."""
    others: tuple[HuggingFace, ...] = ()
    """Further families of Hugging Face that this config can express."""
