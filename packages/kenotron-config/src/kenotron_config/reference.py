"""The reference of all keys of a config, and its JSON schema, from the dataclasses."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from kenotron_config.config import Config
from kenotron_models import ATTENTIONS

KNOWN = {"one of ATTENTIONS": f"one of {', '.join(ATTENTIONS)}"}
"""Names of constants that sentences mention, spelt out."""
PLAIN = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
HEAD = """\
# Every key of a config

This page is made from the dataclasses that read configs; a test fails when it is stale:

```bash
python apps/train config-reference > configuration.md
```

Keys are Nanotron's where Nanotron has them. Sections that several forms may take are told apart by
`name`, by the marker `is_*_config`, or by their keys. `[]` stands for the number of an item in a
list. `--set section.key=value` changes one value on the command line (`data_stages.0.data.seed=1`),
and `!env NAME` in a file reads an environment variable (`!env NAME other`: `other` where it is not
set). Files of a run, trackers and the log have the tag instead of the value, and `***` for
credentials in URLs.

```bash
python apps/train --config-file my.yaml --check
python apps/train --json-schema > schema.json
```

The first prints what a file means with all defaults filled in, and the second a schema with which
editors complete and check YAML.
"""


def config_reference() -> str:
    """All sections, keys, types and defaults, in Markdown."""
    blocks = [HEAD]
    for name, hint in get_type_hints(Config).items():
        blocks += _sections(name, hint)
    return "\n".join(dict.fromkeys(blocks)).rstrip()


def json_schema() -> str:
    """Return a JSON schema of the config, for editors that complete and check YAML files."""
    schema: dict[str, Any] = TypeAdapter(Config).json_schema()
    return json.dumps(schema, indent=2)


def field_docs(kind: type) -> dict[str, str]:
    """The sentence below each field of a dataclass, those of its bases included."""
    found: dict[str, str] = {}
    for each in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        # A field's documentation is the string below it, which Python itself does not keep.
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    said = " ".join(str(after.value.value).split())
                    for name, spelt in KNOWN.items():
                        said = said.replace(name, spelt)
                    found[node.target.id] = re.sub(r"\bNone\b", "null", said)
    return found


def _sections(path: str, hint: Any) -> Iterator[str]:
    """One block for every dataclass that a key may hold, and for those inside it."""
    forms = list(dict.fromkeys(_dataclasses(hint)))
    path += "[]" if get_origin(hint) in (tuple, list) else ""
    for form in forms:
        base = next((b for b in form.__mro__[1:] if b in forms), None)
        title = f"`{path}`" if len(forms) == 1 else f"`{path}`: {_called(form)}"
        yield f"## {title}\n\n{_about(form)}\n{_table(path, form, base)}"
    # Sections inside come after all forms of this key; a form repeats none of its base's.
    for form in forms:
        base = next((b for b in form.__mro__[1:] if b in forms), None)
        inherited = set() if base is None else {each.name for each in fields(base)}
        for name, inner in get_type_hints(form).items():
            if name not in inherited:
                yield from _sections(f"{path}.{name}", inner)


def _table(path: str, form: type, base: type | None) -> str:
    hints, docs = get_type_hints(form), field_docs(form)
    own = vars(form).get("__annotations__", {}) if base else {each.name for each in fields(form)}
    rows = [
        f"| `{each.name}` | {_type_text(hints[each.name])} | {_default(each)} | "
        f"{docs[each.name].replace('|', chr(92) + '|')}{_rules(each)} |"
        for each in fields(form)
        if each.name in own
    ]
    more = f"The keys of {_called(base)}, and:\n\n" if base else ""
    return f"{more}| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _rules(each: Field) -> str:
    """The rules of a key of a model and its name in config.json, where that is another one."""
    if (key := each.metadata.get("key")) is None:
        return ""
    said = [f"At least {key.least}."] if key.least is not None else []
    said += [f"Divides `{key.divides}`."] if key.divides else []
    said += [f"In config.json: `{key.hf}`."] if key.hf not in ("", "=", each.name) else []
    return "".join(f" {sentence}" for sentence in said)


def _about(form: type) -> str:
    """A class docstring up to its lists of arguments and errors."""
    said = inspect.cleandoc(form.__doc__ or "").split("\n\n")
    kept = [part for part in said if not part.startswith(("Raises:", "Building "))]
    return "\n\n".join(kept) + "\n"


def _called(form: type) -> str:
    """``LlamaConfig`` is a ``Llama``, unless its marker is a name."""
    name = next((each.default for each in fields(form) if each.name == "name"), MISSING)
    if isinstance(name, str):
        return f"`name: {name}`"
    given = [each.name for each in fields(form) if each.default is True]
    marks = [name for name in given if name.startswith("is_") or name == "sft_dataloader"]
    if marks:
        return f"`{marks[-1]}: true`"
    needed = next((e.name for e in fields(form) if _is_required(e)), None)
    return f"with `{needed}`" if needed else form.__name__.removesuffix("Config")


def _dataclasses(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for each in get_args(hint):
        yield from _dataclasses(each)


def _is_required(each: Field) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _default(each: Field) -> str:
    if _is_required(each):
        return "required"
    if each.default_factory is not MISSING:
        return "its defaults"
    return f"`{_yaml_text(each.default)}`"


def _yaml_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _type_text(hint: Any) -> str:
    """A type hint in words, for a cell of a table."""
    if hint in PLAIN:
        return PLAIN[hint]
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return ", ".join(f"`{each}`" for each in inner)
    if kind in (Union, UnionType):
        words = [_type_text(each) for each in inner]
        return " or ".join(dict.fromkeys(words))
    if kind in (tuple, list):
        text = _type_text(inner[0])
        return f"list of {text}{'' if '`' in text or text == 'text' else 's'}"
    if kind is dict:
        return f"mapping of {_type_text(inner[0])} to {_type_text(inner[1])}"
    return "section"
