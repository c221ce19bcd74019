"""Problems of single fields of a config: one line each, `field: value; what is needed`."""

import re

INFINITY = float("inf")


def raise_all(found: list[str]) -> None:
    """Raise ValueError with all problems, if there are any."""
    if found:
        raise ValueError("\n".join(found))


def choice(name: str, given: str, known: tuple[str, ...]) -> list[str]:
    """Complain of a word that is not among those known."""
    if given in known:
        return []
    return [f"{name}: {given!r} was given; it must be one of {', '.join(known)}"]


def not_negative(name: str, given: float | None) -> list[str]:
    """Complain of a number below 0, inf or nan; None passes."""
    if given is None or 0 <= given < INFINITY:
        return []
    return [f"{name}: {given} was given; it must be finite and not negative"]


def regex(name: str, pattern: str) -> list[str]:
    """Complain of a text that is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        return [f"{name}: {pattern!r} was given; it must be a regular expression ({error})"]
    return []
