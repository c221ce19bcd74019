"""Sources of text into a folder of token files: in parallel, resumable, all of it or nothing.

The work is done in `<folder>.partial`, one file a part; the folder gets its name when the last part
is made. Parts follow from the data and the size of a part alone: the number of workers changes
neither the files nor a byte in them.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kenotron_data.ahead import WorkedAhead
from kenotron_data.file_lock import locked
from kenotron_data.text_pieces import TextPiece, grouped
from kenotron_data.token_cache import check_sums, sums_of
from kenotron_data.tokenise_part import EMPTY, FilePart, PartMade, PartMaker
from kenotron_data.tokenizer import TextTokenizer

NOTE = "tokenize.json"
"""Note in a folder of tokens: its sources and settings."""
_VERSION = 1
_SMALLEST_PART, _LARGEST_PART = 4 << 20, 256 << 20
_MOST_SOURCES, _MOST_PARTS = 1000, 100_000


@dataclass(frozen=True)
class Tokenised:
    """Result of tokenising the sources.

    Args:
        folder: the folder of the token files.
        documents: documents in all files.
        tokens: tokens in all files.
        parts: parts of the sources; one without any text has no file.
        made: parts that this call has made; 0 where all was there.
    """

    folder: Path
    documents: int
    tokens: int
    parts: int
    made: int


Progress = Callable[[PartMade, int], None]
"""Called with each part that is done, in order, and the bytes of all parts."""


def part_groups(
    sources: Sequence[Sequence[TextPiece]], part_size: int | None = None
) -> list[list[tuple[TextPiece, ...]]]:
    """Cut sources into parts.

    Args:
        sources: pieces of each source, in order.
        part_size: bytes of a part, roughly; None: a 64th of all, from 4 MiB to 256 MiB.

    Returns:
        The parts of each source.

    Raises:
        ValueError: the size is not positive, or there would be too many parts.
    """
    if part_size is None:
        total = sum(piece.size for source in sources for piece in source)
        part_size = min(max(total // 64, _SMALLEST_PART), _LARGEST_PART)
    if part_size < 1:
        raise ValueError(f"the size of a part must be positive, but {part_size} bytes were given")
    groups = [grouped(source, part_size) for source in sources]
    if len(groups) > _MOST_SOURCES or max(map(len, groups), default=0) > _MOST_PARTS:
        raise ValueError(
            f"{len(groups)} sources of up to {max(map(len, groups))} parts of {part_size} bytes: "
            f"at most {_MOST_SOURCES} sources of {_MOST_PARTS} parts can be named; raise the size "
            "of a part"
        )
    return groups


def tokenise(
    groups: Sequence[Sequence[tuple[TextPiece, ...]]],
    tokenizer: TextTokenizer,
    folder: str | os.PathLike[str],
    *,
    workers: int = 1,
    token_bytes: int | None = None,
    overwrite: bool = False,
    wait: bool = False,
    progress: Progress | None = None,
) -> Tokenised:
    """Write the documents of sources as token files `<source>_<part>.ds` of a folder.

    Read in the order of their names they are the documents in the order of the sources. A run that
    was stopped continues with the parts that are missing; one that finds the folder made of the
    same data with the same tokenizer does nothing.

    Args:
        groups: the parts of each source, see `part_groups`.
        tokenizer: encodes the documents.
        folder: the folder to make.
        workers: processes; 1 works in this one. They import the program, which keeps its start
            under `if __name__ == "__main__"`, and have the environment of the first of them: set
            TOKENIZERS_PARALLELISM=false there, or each starts a thread for every core.
        token_bytes: bytes of an id, 2 or 4; None: 2 where the vocabulary allows it.
        overwrite: make the folder again, whatever it holds; True once, not in each of many
            processes: one that has waited for another to make it takes that.
        wait: wait while another process makes the same folder; False refuses at once.
        progress: see `Progress`.

    Raises:
        FileExistsError: the folder holds something else.
        ValueError: a row is wrong (file, row and rule are named), there is no text, the finished
            folder is damaged, or another process makes it.
        RuntimeError: a worker was killed.
    """
    asked = time.time()
    target = Path(os.path.abspath(folder))
    if workers < 1:
        raise ValueError(f"workers must be at least 1, but {workers} was given")
    if token_bytes is None:
        token_bytes = 2 if tokenizer.vocab_size <= 1 << 16 else 4
    if token_bytes not in (2, 4):
        raise ValueError(f"token_bytes must be 2 or 4, but {token_bytes} was given")
    note = _note(groups, tokenizer, token_bytes)
    if not overwrite and (found := _finished(target, note, None)) is not None:
        return found  # without the lock: the folder may be read-only
    with locked(target.with_name(f"{target.name}.lock"), wait=wait):
        if (found := _finished(target, note, asked if overwrite else None)) is not None:
            return found
        partial = _begin(target, note, overwrite)
        maker = PartMaker(tokenizer=tokenizer, token_bytes=token_bytes)
        try:
            made = list(_make(_parts(groups, partial), maker, workers, progress))
        except BaseException:
            if {path.suffix for path in partial.iterdir()}.isdisjoint((".ds", EMPTY)):
                shutil.rmtree(partial)  # nothing to continue
            raise
        return _finish(target, partial, note, made)


def read_note(folder: Path) -> dict[str, Any] | None:
    """Read what a folder was made of; None if it does not say."""
    try:
        found = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def identity_of(groups: Iterable[Iterable[Iterable[TextPiece]]]) -> str:
    """Return a fingerprint of the data: another one once a file, a row or an order has changed."""
    digest = hashlib.blake2b(digest_size=16)
    for number, source in enumerate(groups):
        for part in source:
            for piece in part:
                digest.update(f"{number}:{piece.identity()}\0".encode())
            digest.update(b"\1")
    return digest.hexdigest()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file of JSON; it appears when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _note(
    groups: Sequence[Sequence[tuple[TextPiece, ...]]], tokenizer: TextTokenizer, token_bytes: int
) -> dict[str, Any]:
    """Say what a folder is made of; equal notes make equal files."""
    return {
        "version": _VERSION,
        "data": identity_of(groups),
        "parts": sum(map(len, groups)),
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_name": tokenizer.name,
        "end_of_document": tokenizer.end,
        "token_bytes": token_bytes,
    }


def _finished(target: Path, note: dict[str, Any], newer_than: float | None) -> Tokenised | None:
    """Return what a folder holds if it is what was asked for. ValueError if it is damaged."""
    found = read_note(target)
    if found is None or not isinstance(done := found.pop("done", None), dict) or found != note:
        return None
    if newer_than is not None and (target / NOTE).stat().st_mtime < newer_than:
        return None
    check_sums(target, done.get("files", {}))
    return Tokenised(target, done["documents"], done["tokens"], note["parts"], 0)


def _begin(target: Path, note: dict[str, Any], overwrite: bool) -> Path:
    """Return the folder to work in, with what an earlier run of the same work has left."""
    if not overwrite and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(
            f"{str(target)!r} exists and {_difference(read_note(target), note)}: choose another "
            "folder, or say that it shall be overwritten"
        )
    partial = target.with_name(f"{target.name}.partial")
    left = read_note(partial)
    if left is not None:
        left.pop("done", None)  # it was stopped before the folder got its name
    if partial.exists() and left != note:
        if left is not None and not overwrite:
            raise FileExistsError(
                f"{str(partial)!r} was left by a run that was stopped and "
                f"{_difference(left, note)}: delete it, choose another folder, or "
                "say that it shall be overwritten"
            )
        shutil.rmtree(partial)
    write_json(partial / NOTE, note)
    return partial


def _difference(found: dict[str, Any] | None, note: dict[str, Any]) -> str:
    if found is None:
        return "holds something else"
    if found.get("data") != note["data"]:
        return "was made of other data, other columns or parts of another size"
    for key in ("tokenizer_name", "end_of_document", "token_bytes"):
        if found.get(key) != note[key]:
            return f"was made with another {key} ({found.get(key)!r}, not {note[key]!r})"
    return "was made with another tokenizer of this name, or by another version of this program"


def _parts(groups: Sequence[Sequence[tuple[TextPiece, ...]]], folder: Path) -> list[FilePart]:
    return [
        FilePart(
            path=folder / f"{source:03d}_{number:05d}.ds",
            pieces=pieces,
            size=sum(piece.size for piece in pieces),
        )
        for source, parts in enumerate(groups)
        for number, pieces in enumerate(parts)
    ]


def _make(
    parts: list[FilePart], maker: PartMaker, workers: int, progress: Progress | None
) -> Iterator[PartMade]:
    """Make the parts that are not made yet; yields what became of each, in order."""
    total = sum(part.size for part in parts)
    before = {part.path: part.made() for part in parts}
    left = [part for part in parts if before[part.path] is None]
    workers = min(workers, len(left))
    if workers > 1:
        multiprocessing.set_forkserver_preload([PartMaker.__module__])
        fresh: Iterator[PartMade] = WorkedAhead(
            maker,
            iter(left),
            workers=workers,
            depth=4 * workers,
            kind="process",
            start="forkserver",
        )
    else:
        fresh = map(maker, left)
    try:
        for part in parts:
            made = before[part.path] or next(fresh)
            if progress is not None:
                progress(made, total)
            yield made
    finally:
        if isinstance(fresh, WorkedAhead):
            fresh.close()


def _finish(
    target: Path, partial: Path, note: dict[str, Any], made: Sequence[PartMade]
) -> Tokenised:
    """Give the folder its name; what had the name before is deleted."""
    documents, tokens = sum(m.documents for m in made), sum(m.tokens for m in made)
    if not tokens:
        shutil.rmtree(partial)
        raise ValueError(f"{str(target)!r}: the sources hold no text: no token was made")
    for path in partial.iterdir():
        if path.suffix in (EMPTY, ".partial"):
            path.unlink()
    done = {"documents": documents, "tokens": tokens, "files": sums_of(partial)}
    write_json(partial / NOTE, note | {"done": done})
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    return Tokenised(target, documents, tokens, len(made), sum(not m.made_before for m in made))
