"""Steps that succeed on all ranks or raise on all ranks: a failure never leaves a peer waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from kenotron_dist import Mesh, StoreMessages, broadcast_object, gather_objects

T = TypeVar("T")

_Failure = list[Any]  # kind, message, number of an OSError or None
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "OSError": OSError}


def on_each(mesh: Mesh, run: Callable[[], T]) -> list[T]:
    """Run a step on every rank; returns every rank's result (JSON), in rank order.

    Collective over the mesh. When it fails on some rank, every rank raises: OSError if all
    failures were, ValueError if all were one of these, else RuntimeError; the message names the
    ranks.
    """
    value, failure, error = _try(run)
    outcomes = gather_objects([value, failure], mesh.world)
    failures = [failure for _, failure in outcomes]
    if any(failures):
        raise _error(failures) from error
    return [value for value, _ in outcomes]


def on_all(mesh: Mesh, run: Callable[[], T]) -> T:
    """Run a step on every rank, as ``on_each`` does; returns this rank's result, of any type."""
    own: list[T] = []
    on_each(mesh, lambda: own.append(run()))
    return own[0]


def on_first(mesh: Mesh, run: Callable[[], T]) -> T:
    """Run a step on rank 0 only; returns its result (JSON), or raises its failure, everywhere.

    Collective over the mesh.
    """
    value, failure, error = _try(run) if mesh.rank == 0 else (None, None, None)
    value, failure = broadcast_object([value, failure], mesh.world)
    if failure:
        raise _error([failure]) from error
    return cast(T, value)


def on_first_at_length(mesh: Mesh, name: str, run: Callable[[], T]) -> T:
    """``on_first`` for work of any length, which ``name`` identifies.

    The other ranks wait for a note: no communication is under way that could time out.
    """
    notes = StoreMessages(mesh, name)
    error: Exception | None = None
    if mesh.rank == 0:
        with mesh.pulse.busy(name):
            value, failure, error = _try(run)
        notes.post("outcome", [value, failure])
    value, failure = notes.wait("outcome")
    if failure:
        raise _error([failure]) from error
    return cast(T, value)


def _try(run: Callable[[], T]) -> tuple[T | None, _Failure | None, Exception | None]:
    try:
        return run(), None, None
    except Exception as error:
        kind = next((k for k, base in _KINDS.items() if isinstance(error, base)), "")
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        return None, [kind, text, getattr(error, "errno", None)], error


def _error(failures: Sequence[_Failure | None]) -> Exception:
    """One error for all: equal messages appear once, with ranks unless all ranks failed with it."""
    ranks: dict[str, list[str]] = {}
    for rank, failure in enumerate(failures):
        if failure:
            ranks.setdefault(failure[1], []).append(str(rank))
    kinds = [failure[0] for failure in failures if failure]
    error = RuntimeError if "" in kinds else ValueError if "ValueError" in kinds else OSError
    text = "\n".join(f"rank {', '.join(at)}: {text}" for text, at in ranks.items())
    made = error(*ranks) if list(map(len, ranks.values())) == [len(failures)] else error(text)
    if isinstance(made, OSError):
        made.errno = next((failure[2] for failure in failures if failure), None)
    return made
