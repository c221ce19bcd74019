"""From a YAML mapping to the dataclasses that it describes.

Key names are held against the fields, choices are found whatever their case, unions of dataclasses
differ by a name, a marker or their keys; pydantic judges single values. Every problem is
reported with its key path, and what is right is built all the same.
"""

import difflib
import functools
import json
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from kenotron_config.masking import TAG, EnvText, keep_tags, public

Report = Callable[[str, str], None]
"""Takes the dotted path of a problem and a sentence about it."""

WRONG = object()
"""Stands for a value that has problems, which were reported."""
SHOWN_CHARACTERS = 60
MOST_UNKNOWN = 20
"""Unknown keys of a section that are named each by itself."""
OLD_SECTIONS = ("data", "datastates")
"""Sections of older files, which are rewritten before anything is built."""
MAPPING = "a mapping, 'key: value' lines"
NEEDED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (quotes make text of a number)",
    "tuple_type": "a list, one '- item' a line",
    "list_type": "a list, one '- item' a line",
    "dict_type": MAPPING,
}


def build(hint: Any, value: Any, path: str, report: Report) -> Any:
    """Build what a type hint asks for.

    Args:
        hint: a type hint; dataclasses are followed to their fields, tuples to their items.
        value: the data of the YAML: mappings, lists, scalars. Not changed.
        path: dotted path of the value, empty for the whole file.
        report: called for every problem.

    Returns:
        The value, made of the types that the hint names; WRONG when there was a problem.
    """
    kind, optional = _without_none(hint)
    if value is None and optional:
        return None
    kind = _one_or_named(kind, value)
    if get_origin(kind) is dict and isinstance(value, dict) and _dataclasses(get_args(kind)[1]):
        item = get_args(kind)[1]
        named = {name: build(item, each, join(path, name), report) for name, each in value.items()}
        return WRONG if any(each is WRONG for each in named.values()) else named
    if members := _dataclasses(kind):
        if not isinstance(value, dict):
            report(path, f"{shown(value)} was given; it must be {MAPPING}")
            return WRONG
        member = _chosen(members, value, path, report)
        return WRONG if member is None else _fields(member, value, path, report)
    if get_origin(kind) is tuple and isinstance(value, list) and _dataclasses(get_args(kind)[0]):
        item = get_args(kind)[0]
        found = [build(item, each, join(path, n), report) for n, each in enumerate(value)]
        return WRONG if any(each is WRONG for each in found) else tuple(found)
    return _leaf(hint, _spelled(kind, value), path, report)


def join(path: str, name: str | int) -> str:
    """The dotted path of a key below another."""
    return f"{path}.{name}" if path else str(name)


def shown(value: Any) -> str:
    """A value as a problem quotes it; that of a variable by its name."""
    if isinstance(value, EnvText):
        return f"{TAG} {value.written}"
    text = json.dumps(public(value), default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def sections(kind: type, value: dict[str, Any], report: Report) -> dict[str, Any]:
    """The fields of the outermost dataclass that are right, by name."""
    built = _built_fields(kind, value, "", report)
    return {name: each for name, each in built.items() if each is not WRONG}


def _fields(kind: type, value: dict[str, Any], path: str, report: Report) -> Any:
    """Build one dataclass from a mapping."""
    problems: list[str] = []

    def note(where: str, sentence: str) -> None:
        problems.append(where)
        report(where, sentence)

    built = _built_fields(kind, value, path, note)
    if problems:
        return WRONG
    try:
        return kind(**built)
    except ValueError as error:
        for line in str(error).splitlines():
            name, _, sentence = line.partition(": ")
            report(join(path, name), sentence)
        return WRONG


def _built_fields(kind: type, value: dict[str, Any], path: str, report: Report) -> dict[str, Any]:
    hints, known = get_type_hints(kind), {each.name: each for each in fields(kind)}
    value = _renamed(value, known)
    former = [name for name in value if name not in known and name in getattr(kind, "former", ())]
    for name in former:
        report(join(path, name), "is not a key of this family: it would not be read; leave it out")
    _report_unknown({k: v for k, v in value.items() if k not in former}, list(known), path, report)
    built = {}
    for name, each in known.items():
        given, optional = value.get(name), _without_none(hints[name])[1]
        if given is None and _has_default(each) and not (optional and name in value):
            continue
        if name not in value or (given is None and not optional):
            report(join(path, name), "is missing; it has no default, so add it")
            continue
        built[name] = build(hints[name], given, join(path, name), report)
    return built


def _renamed(value: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """``_attn_implementation`` means ``attn_implementation``, where that is known."""
    return {
        name.lstrip("_") if name.startswith("_") and name.lstrip("_") in known else name: each
        for name, each in value.items()
    }


def _report_unknown(value: dict[str, Any], known: list[str], path: str, report: Report) -> None:
    unknown = [name for name in value if name not in known]
    for number, name in enumerate(unknown):
        if number == MOST_UNKNOWN:  # to look for similar keys takes time
            rest = len(unknown) - number
            report(join(path, name), f"is not a known key, nor are {rest - 1} others")
            break
        near = _nearest(name, known if path else [*known, *OLD_SECTIONS])
        advice = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
        report(join(path, name), f"is not a known key; {advice}")


def _nearest(name: str, known: list[str]) -> str | None:
    """The key that a wrong one may mean: a similar one, or one that begins with it."""
    longer = sorted((key for key in known if len(name) > 2 and key.startswith(name)), key=len)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    rough = difflib.get_close_matches(name, known, n=1)
    return next(iter([*longer, *close, *rough]), None)


def _chosen(
    members: tuple[type, ...], value: dict[str, Any], path: str, report: Report
) -> type | None:
    """Of several dataclasses the one that a mapping means: by name, by marker, by its keys."""
    if len(members) == 1:
        return members[0]
    names = {_name_of(member): member for member in members}
    if None not in names:
        given = str(value.get("name") or next(iter(names))).lower()
        for name, member in names.items():
            if str(name).lower() == given:
                value["name"] = name
                return member
        rule = "it must be one of " + ", ".join(f"'{name}'" for name in names)
        report(join(path, "name"), f"{shown(value['name'])} was given; {rule}")
        return None
    for member in members:
        marker = next((f.name for f in fields(member) if _marks(f)), None)
        if marker is not None and value.get(marker):
            return member
    best = max(members, key=lambda member: _fitness(member, value))
    own, every = ({f.name for m in each for f in fields(m)} for each in ((best,), members))
    for name in value:
        if name in every - own and not any(_marks(f) for m in members for f in fields(m)):
            others = ", ".join(key for key in value if key in own)
            report(path, f"{name} excludes {others}; set the whole section: {path}={{{name}: ...}}")
            return None
    return best


def _fitness(member: type, value: dict[str, Any]) -> tuple[int, bool]:
    """Count the keys that the class has, and say whether they are all that it needs."""
    known = {each.name: each for each in fields(member)}
    needed = {name for name, each in known.items() if not _has_default(each)}
    count = len(set(_renamed(value, known)) & set(known))
    return count, count > 0 and needed <= set(value)


def _name_of(member: type) -> str | None:
    hint = get_type_hints(member).get("name")
    return get_args(hint)[0] if get_origin(hint) is Literal else None


def _marks(each: Field[Any]) -> bool:
    return each.name.startswith("is_") and each.name.endswith("_config") and each.default is True


def _has_default(each: Field[Any]) -> bool:
    return each.default is not MISSING or each.default_factory is not MISSING


def _without_none(hint: Any) -> tuple[Any, bool]:
    """A hint without ``| None``, and whether it had that."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, hint is type(None)
    kinds = tuple(kind for kind in get_args(hint) if kind is not type(None))
    rest = functools.reduce(operator.or_, kinds)
    return rest, len(kinds) < len(get_args(hint))


def _one_or_named(kind: Any, value: Any) -> Any:
    """Of ``D | dict[str, D]`` the one that is meant: the second when all values are mappings."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    named = [each for each in members if get_origin(each) is dict]
    if len(members) != 2 or len(named) != 1 or not _dataclasses(get_args(named[0])[1]):
        return kind
    several = isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values())
    return named[0] if several else next(each for each in members if each is not named[0])


def _dataclasses(kind: Any) -> tuple[type, ...]:
    """The dataclasses that a hint allows, when it allows nothing else."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return members if all(isinstance(m, type) and is_dataclass(m) for m in members) else ()


def _spelled(kind: Any, value: Any) -> Any:
    """`reduce_scatter` as the type has it: `REDUCE_SCATTER`; also within lists."""
    if get_origin(kind) is tuple and isinstance(value, list):
        return [_spelled(get_args(kind)[0], each) for each in value]
    if get_origin(kind) is Literal and isinstance(value, str):
        spelled = {str(choice).lower(): choice for choice in get_args(kind)}
        return spelled.get(value.lower(), value)
    return value


def _leaf(hint: Any, value: Any, path: str, report: Report) -> Any:
    """A value that is no dataclass, as pydantic reads it from strict JSON."""
    try:
        made = TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
        return keep_tags(value, made)
    except ValidationError as error:
        for where, sentence in _sentences(path, value, error.errors()):
            report(where, sentence)
        return WRONG


def _sentences(path: str, given: Any, details: list[ErrorDetails]) -> Iterator[tuple[str, str]]:
    """One sentence for a value; of a union of types, all that it could have been."""
    places = {tuple(_keys(given, detail["loc"])): detail for detail in details}
    if isinstance(given, EnvText):
        details = [{**detail, "input": given} for detail in details]
        places = {(): details[-1]}
    several = len(details) > len(places)
    for keys, detail in places.items():
        where = ".".join((path, *keys))
        if several:
            kinds = [_needed(each) for each in details if tuple(_keys(given, each["loc"])) == keys]
            rule = "it must be " + " or ".join(dict.fromkeys(kinds))
            yield where, f"{shown(detail['input'])} was given; {rule}"
        else:
            yield where, f"{shown(detail['input'])} was given; {_rule(detail)}"


def _keys(given: Any, place: Iterable[Any]) -> Iterator[str]:
    """The keys of a place; pydantic adds which of several types it tried."""
    for part in place:
        if not isinstance(given, dict | list):
            return
        if isinstance(given, dict) and part not in given:
            continue
        if isinstance(given, list) and not (isinstance(part, int) and part < len(given)):
            continue
        given = given[part]
        yield str(part)


def _rule(detail: ErrorDetails) -> str:
    needed = _needed(detail)
    return f"it must be {needed}" if needed != detail["msg"].lower() else needed


def _needed(detail: ErrorDetails) -> str:
    if detail["type"] == "literal_error":
        return str(detail["ctx"]["expected"])
    return NEEDED.get(detail["type"], detail["msg"].lower())
