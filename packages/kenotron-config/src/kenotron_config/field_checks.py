"""Problems of single fields of a section: one line each."""


def below(name: str, given: int, least: int) -> list[str]:
    """Complain of a number that is too small."""
    return [f"{name}: {given} was given; it must be at least {least}"] if given < least else []


def raise_all(found: list[str]) -> None:
    """Raise ValueError with all problems, if there are any."""
    if found:
        raise ValueError("\n".join(found))
