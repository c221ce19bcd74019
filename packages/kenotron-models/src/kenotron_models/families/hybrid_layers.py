"""Keys of families whose layers have different mixers, as text or as Hugging Face's list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kenotron_models.families.fields import SharedFields
from kenotron_models.families.layer_pattern import pattern_problems, split_pattern
from kenotron_models.part import PartSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class HybridFields(SharedFields):
    """A decoder whose layers have one of several mixers; a config inherits it."""

    words: ClassVar[Mapping[str, str]] = {}
    """Letter of a mixer -> Hugging Face's word for it in ``layer_types``."""
    layers: str | None = None
    """A letter for each layer, and | between the stages of a pipeline; None: layer_types."""
    layer_types: tuple[str, ...] | None = None
    """Hugging Face's word for each layer; None: layers says it, or the pattern of the family."""
    use_doc_masking: bool = False
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

    def layer_problems(self) -> list[str]:
        """Name letters and words that do not exist, or are not one for each layer."""
        layers, given = self.num_hidden_layers, self.layer_types
        if self.layers is not None:
            found = pattern_problems("layers", self.layers, "".join(self.words))
            if given is not None:
                found.append(f"layers: {self.layers!r} was given, and layer_types, too; keep one")
            if not found and len(self.letters) != layers:
                found.append(
                    f"layers: {self.layers!r} was given; it must have {layers} letters "
                    "(num_hidden_layers)"
                )
            return found
        words = self.words.values()
        if given is None or (len(given) == layers and {*given} <= {*words}):
            return []
        return [
            f"layer_types: {list(given)} was given; it must be {layers} times {' or '.join(words)}"
        ]

    def small_letters(self, sizes: SmallSizes, rare: str) -> dict[str, Any]:
        """Return the keys of the layers of a narrow copy, without cuts.

        Args:
            sizes: those of the copy.
            rare: the letter of the layers that are fewer.
        """
        letters = self.letters
        found = [i for i, letter in enumerate(letters) if letter == rare]
        kept = sizes.some_layers(found, len(letters))
        other = next((letter for letter in letters if letter != rare), rare)
        text = "".join(rare if i in kept else other for i in range(sizes.layers))
        return {"layers": text, "layer_types": None}

    def by_letter(self, mixers: Mapping[str, PartSpec]) -> list[PartSpec]:
        """Return the mixer of each layer."""
        return [mixers[letter] for letter in self.letters]


def layer_words(spec: DecoderSpec, words: Mapping[type[Any], str]) -> Sequence[str]:
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
