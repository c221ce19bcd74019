"""The folder of a run; errors of writing name the key of the config to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def writing(what: str = "") -> Iterator[None]:
    """Around what writes to ``checkpoints_path``: an OSError ends with the remedy.

    ``what`` begins its message, where the error itself does not name what could not be done.
    """
    try:
        yield
    except OSError as error:
        said = f"{what}: {error}" if what else str(error)
        raise OSError(
            f"{said}; change checkpoints.checkpoints_path to a folder that can be written"
        ) from error
