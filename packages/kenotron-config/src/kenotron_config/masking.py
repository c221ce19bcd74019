"""Config as a run writes it: variables by name, passwords masked, nothing for terminals.

A value that `!env` reads is an `EnvText`, which remembers how it was written. Files of a run,
its trackers and its log get the tag, and `***` for credentials in URLs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from kenotron_command import printable

TAG = "!env"
_SHORTEST = 4
"""Characters of a text that is looked for in others; a shorter one may be part of any word."""
_USER = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]*)://(?P<who>[^/\s'\"]*)@")
_QUERY = re.compile(
    r"([?&](?:access_?token|token|key|api_?key|secret|password|sig|signature"
    r"|x-amz-(?:signature|credential|security-token))=)[^&#\s'\"]+",
    re.IGNORECASE,
)


class EnvText(str):
    """Text of an environment variable that a config names.

    Attributes:
        written: what follows `!env` in the file: the name, and perhaps a default.
    """

    written: str

    def __new__(cls, text: str, written: str = "") -> EnvText:
        """Make it of the variable's text and what the file has."""
        made = super().__new__(cls, text)
        made.written = written
        return made

    def __reduce__(self) -> tuple[type[EnvText], tuple[str, str]]:
        return EnvText, (str(self), self.written)


def keep_tags(given: Any, made: Any) -> Any:
    """Return `made`, a copy of `given`, with the `EnvText`s of `given` in their places."""
    if isinstance(given, EnvText):
        return given if type(made) is str and made == given else made
    if isinstance(given, dict) and isinstance(made, dict) and len(given) == len(made):
        pairs = zip(made.items(), given.values(), strict=True)
        return {key: keep_tags(before, value) for (key, value), before in pairs}
    if isinstance(given, list | tuple) and isinstance(made, list | tuple):
        if len(given) == len(made):
            return type(made)(map(keep_tags, given, made))
    return made


def masked(text: str) -> str:
    """Return a text with `***` for credentials in URLs."""
    return _QUERY.sub(r"\1***", _USER.sub(_masked_user, text)) if "://" in text else text


def _masked_user(match: re.Match[str]) -> str:
    if ":" not in match["who"] and re.search("ssh|sftp", match["scheme"].lower()):
        return match[0]  # a name alone is no secret there
    return f"{match['scheme']}://{_without(match)}"


def _without(match: re.Match[str]) -> str:
    """Return the user of an address, without a password."""
    user, colon, _ = match["who"].partition(":")
    return f"{user + ':' if colon else ''}***@"


def public(value: Any) -> Any:
    """Return JSON values as files of a run may have them: tags for variables, masked URLs."""
    if isinstance(value, EnvText):
        return f"{TAG} {value.written}"
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {key: public(each) for key, each in value.items()}
    return [public(each) for each in value] if isinstance(value, list | tuple) else value


def credentials(value: Any, path: str = "") -> list[str]:
    """Return the dotted paths of values, in mappings and lists, whose URLs have credentials."""
    if isinstance(value, str):
        return [path] if not isinstance(value, EnvText) and masked(value) != value else []
    items = value.items() if isinstance(value, Mapping) else ()
    items = enumerate(value) if isinstance(value, list | tuple) else items
    return [each for key, v in items for each in credentials(v, f"{path}.{key}".lstrip("."))]


class Mask:
    """Makes texts of a run fit to be printed or sent: each variable's text becomes its tag.

    Credentials of the config's URLs are masked in any text, where the scheme is cut off, too.

    Args:
        config: the dataclass that the run is described by; None: no text is a variable's.
    """

    def __init__(self, config: Any = None) -> None:
        texts = [] if config is None else [*_texts(asdict(config))]
        found = {text for text in texts if isinstance(text, EnvText) and len(text) >= _SHORTEST}
        self._texts = sorted(found, key=len, reverse=True)
        urls = [match for text in texts for match in _USER.finditer(text)]
        self._who = {f"{match['who']}@": _without(match) for match in urls if ":" in match["who"]}

    def __call__(self, text: str) -> str:
        """Return the text with tags for variables, and with URLs masked."""
        for hidden in self._texts:
            text = text.replace(hidden, f"{TAG} {hidden.written}")
        for who, shown in self._who.items():
            text = text.replace(who, shown)
        return masked(text)

    def keys(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a mapping with this done to its keys."""
        return {self(key) if self._texts else key: value for key, value in values.items()}

    def line(self, text: str) -> str:
        """Return a text for a terminal: also without anything that a terminal would obey."""
        return self(printable(text))


def _texts(value: Any) -> Iterator[str]:
    """All texts in mappings and lists, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in (*value.keys(), *value.values()):
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
