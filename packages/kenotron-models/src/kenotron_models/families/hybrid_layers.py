"""Keys of families whose layers have different mixers, as text or as Hugging Face's list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kenotron_models.families.decoder_keys import DecoderKeys
from kenotron_models.families.keys import key
from kenotron_models.families.layer_pattern import pattern_problems, split_pattern
from kenotron_models.part import PartSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class HybridKeys(DecoderKeys):
    """A decoder whose layers have one of several mixers."""

    words: ClassVar[Mapping[str, str]] = {}
    """Letter of a mixer -> Hugging Face's word for it in ``layer_types``."""
    rare: ClassVar[str] = "*"
    """The letter of the layers that are fewer."""
    layers: str | None = key(None)
    """A letter for each layer, and | between the stages of a pipeline; None: layer_types."""
    layer_types: tuple[str, ...] | None = key(None)
    """Hugging Face's word for each layer; None: layers says it, or the pattern of the family."""
    use_doc_masking: bool = key(
        False,
        at=tuple(f"{part}.separate_documents" for part in ("mamba", "mamba2", "gated_delta")),
    )
    """True: a token sees its own document only, and states begin again with it."""

    def pattern(self) -> str:
        """Return the letters of all layers where the config does not say them."""
        raise AssertionError(f"{type(self).__name__} has no pattern")

    @property
    def letters(self) -> str:
        """The letter of each layer, with None filled in."""
        if self.layers is not None:
            return split_pattern(self.layers)[0]
        if self.layer_types is None:
            return self.pattern()
        known = {word: letter for letter, word in self.words.items()}
        return "".join(known[word] for word in self.layer_types)

    @property
    def stage_starts(self) -> tuple[int, ...]:
        """Layers (from 0) that begin a further stage."""
        return () if self.layers is None else split_pattern(self.layers)[1]

    def problems(self) -> list[str]:
        """Name letters and words that do not exist, or are not one for each layer."""
        found, depth, given = super().problems(), self.num_hidden_layers, self.layer_types
        words = self.words.values()
        if self.layers is not None:
            wrong = pattern_problems("layers", self.layers, "".join(self.words))
            if given is not None:
                wrong.append(f"layers: {self.layers!r} was given, and layer_types, too; keep one")
            if not wrong and len(self.letters) != depth:
                wrong.append(
                    f"layers: {self.layers!r} was given; it must have {depth} letters "
                    "(num_hidden_layers)"
                )
            return found + wrong
        if given is not None and (len(given) != depth or not {*given} <= {*words}):
            found.append(
                f"layer_types: {list(given)} was given; it must be {depth} times "
                f"{' or '.join(words)}"
            )
        return found

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the layers of a narrow copy, without cuts."""
        letters, rare = self.letters, self.rare
        found = [i for i, letter in enumerate(letters) if letter == rare]
        kept = sizes.some_layers(found, len(letters))
        other = next((letter for letter in letters if letter != rare), rare)
        text = "".join(rare if i in kept else other for i in range(sizes.layers))
        return super().small_keys(sizes) | {"layers": text, "layer_types": None}

    def by_letter(self, mixers: Mapping[str, PartSpec]) -> list[PartSpec]:
        """Return the mixer of each layer."""
        return [mixers[letter] for letter in self.letters]


def layer_words(spec: DecoderSpec, words: Mapping[type[Any], str]) -> list[str]:
    """Return Hugging Face's word for the mixer of each layer. Raises ValueError for another one.

    Args:
        spec: the model.
        words: those of the kinds of mixers that the family has.
    """
    unknown = [type(b.mixer).__name__ for b in spec.blocks if type(b.mixer) not in words]
    if unknown:
        raise ValueError(
            f"layers of this family of Hugging Face mix tokens by {', '.join(words.values())}, and "
            f"none by {unknown[0].removesuffix('Spec')}"
        )
    return [words[type(block.mixer)] for block in spec.blocks]
