"""An extension of griffe: arguments that a docstring describes together get a line each."""

import re
from typing import Any

import griffe

TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +\S.*)*)", re.MULTILINE)


class ArgumentsTogether(griffe.Extension):
    """Read ``device, dtype: of the table`` as the same text for each of the two."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the part of the docstring that begins with its arguments."""
        if obj.docstring:
            text, args, rest = obj.docstring.value.partition("Args:\n")
            obj.docstring.value = text + args + TOGETHER.sub(_one_each, rest)


def _one_each(found: re.Match[str]) -> str:
    return "\n".join(f"{found[1]}{name}{found[3]}" for name in found[2].split(", "))
