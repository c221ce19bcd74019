"""Keys of a family's config as a table: default, rule, names in Hugging Face, place, small copy.

A config is a frozen dataclass whose fields are made by ``key``; the text below a field documents
it. Reading and writing a config.json (``hf_keys``), checks, and small copies are derived.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, TypeVar, get_args, get_type_hints

from kenotron_models.families.types_of_keys import fits, words_of
from kenotron_models.small import SmallSizes
from kenotron_models.spec import MOST_LAYERS, DecoderSpec

T = TypeVar("T")
OF_CONFIG = "config"
"""Place of a key that is recorded for export: no part of a spec has it."""


@dataclass(frozen=True)
class Rule:
    """A rule for one value."""

    holds: Callable[[Any], bool]
    """Returns False for a value that is refused."""
    words: str
    """The rule in an error: ``it must be ...``."""


POSITIVE = Rule(lambda x: 0 < x < math.inf, "it must be a finite number above 0")
NOT_NEGATIVE = Rule(lambda x: 0 <= x < math.inf, "it must be finite and not negative")
SHARE = Rule(lambda x: 0 <= x < 1, "it must be at least 0, below 1")
TRUE = Rule(bool, "it must be true, or be left out")


def one_of(*known: object) -> Rule:
    """Return the rule that a value is one of those known."""
    if len(known) == 1:
        return Rule(lambda x: x == known[0], f"it must be {known[0]!r}")
    return Rule(lambda x: x in known, f"it must be one of {', '.join(map(str, known))}")


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a config."""

    rule: Rule | None = None
    """Rule for its value; null is not checked."""
    least: int | None = None
    """Smallest value of a whole number."""
    divides: str = ""
    """Key of the number that it must divide."""
    hf: str = ""
    """Name in config.json; empty: config.json does not have it."""
    needed: bool = False
    """config.json must have it: there is no default."""
    only: tuple[Any, ...] = ()
    """Values that a config.json may have."""
    at: tuple[str, ...] = ()
    """Places in a ``DecoderSpec`` of its value (``places``); the first that exists is written."""
    read: Callable[[Any], Any] | None = None
    """Makes its value of that in config.json."""
    write: Callable[[Any], Any] | None = None
    """Makes the value in config.json of that in the spec."""
    small: str | Callable[[SmallSizes, Any], Any] = ""
    """Value in a small copy: an attribute of the sizes, or a function of them and the value."""


def key(
    default: T,
    *,
    hf: str | bool = False,
    at: str | tuple[str, ...] = (),
    rule: Rule | None = None,
    least: int | None = None,
    divides: str = "",
    needed: bool = False,
    only: tuple[Any, ...] = (),
    read: Callable[[Any], Any] | None = None,
    write: Callable[[Any], Any] | None = None,
    small: str | Callable[[SmallSizes, Any], Any] = "",
) -> T:
    """Return a field of a config; see ``Key``. ``hf=True``: the name in config.json is the same."""
    said = "=" if hf is True else hf or ""
    places = (at,) if isinstance(at, str) else at
    made = Key(
        rule=rule, least=least, divides=divides, hf=said, needed=needed, only=only, at=places,
        read=read, write=write, small=small,
    )  # fmt: skip
    made_field: Any = field(default=default, metadata={"key": made})
    return made_field


def with_default(owner: type[Any], name: str, default: T) -> T:
    """Return a field as a group of keys has it, with the default of a family."""
    made_field: Any = field(default=default, metadata=owner.__dataclass_fields__[name].metadata)
    return made_field


def marker() -> bool:
    """Return the field that marks a YAML mapping as one of a class; always true."""
    return key(True, rule=TRUE)


@functools.cache
def key_table(kind: type[Any]) -> dict[str, Key]:
    """Return the keys of a config class by field, with their names in config.json filled in."""
    found = {each.name: each.metadata["key"] for each in fields(kind) if "key" in each.metadata}
    return {
        name: replace(each, hf=name) if each.hf == "=" else each for name, each in found.items()
    }


hints_of = functools.cache(get_type_hints)


@functools.cache
def nullable(kind: type[Any]) -> frozenset[str]:
    """Return the fields of a config class that may be null."""
    hints = hints_of(kind)
    return frozenset(name for name, hint in hints.items() if type(None) in get_args(hint))


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """Base of the configs of families, and of groups of keys that several of them have.

    Raises:
        ValueError: one line for each problem: key, value given, what is needed.
    """

    products: ClassVar[Mapping[str, str]] = {}
    """Places of a spec that no key says alone, and the keys that say them together."""
    former: ClassVar[tuple[str, ...]] = ("pretraining_tp", "use_cache")
    """Keys that nothing reads in this family, and that older checkpoints hold all the same."""

    def __post_init__(self) -> None:
        """Check all keys; rules between keys where each is right alone."""
        if found := key_problems(self) or self.problems():
            raise ValueError("\n".join(found))

    def problems(self) -> list[str]:
        """Name values that break a rule between keys. Groups and families add theirs."""
        return [
            f"{name}: {value} was given; it must divide {each.divides} ({whole}); change one of "
            "the two"
            for name, each in key_table(type(self)).items()
            if each.divides and (value := getattr(self, name)) is not None
            if (whole := getattr(self, each.divides)) % value
        ]

    def small(self, sizes: SmallSizes) -> Self:
        """Return a narrow copy of the same structure."""
        found: dict[str, Any] = {}
        for name, each in key_table(type(self)).items():
            if not each.small or (value := getattr(self, name)) is None:
                continue
            rule = each.small
            found[name] = getattr(sizes, rule) if isinstance(rule, str) else rule(sizes, value)
        return replace(self, **{**found, **self.small_keys(sizes)})

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of a narrow copy that depend on several keys."""
        return {}

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that depend on several keys of a config.json."""
        return {}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the keys of a config.json that depend on more than one place of a spec."""
        return {}


def key_problems(config: KeyTable) -> list[str]:
    """Name values of another type than their key, and those that break its rule."""
    found = []
    for name, each in key_table(type(config)).items():
        value, words, null = getattr(config, name), "", name in nullable(type(config))
        if value is None:
            words = "" if null else "it must have a value"
        elif not fits(value, hint := hints_of(type(config))[name]):
            words = f"it must be {words_of(hint)}"
        elif each.least is not None and value < each.least:
            words = f"it must be at least {each.least}"
        elif each.rule is not None and not each.rule.holds(value):
            words = each.rule.words
        elif name == "num_hidden_layers" and value > MOST_LAYERS:
            words = f"it must be at most {MOST_LAYERS}"
        if words:
            found.append(f"{name}: {shown(value)} was given; {words}{', or null' * null}")
    return found


def shown(value: object) -> str:
    """Return a value as an error quotes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, tuple):
        return str([*value])
    return repr(value)
