"""Corpora under Hugging Face's names: tokenised once, then read as any other token files.

The files lie in a cache folder under a key of the data, the tokenizer and the options. One process
makes them, under a lock; the others wait.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kenotron_data.builtin_domains import BUILTIN_DOMAINS
from kenotron_data.builtin_text import BuiltinText
from kenotron_data.config import EMBEDDED_CORPUS, HubDatasetsConfig, PretrainDatasetsConfig
from kenotron_data.csv_rows import is_csv
from kenotron_data.hub_reach import asked_once
from kenotron_data.json_lines import is_json_lines
from kenotron_data.source_files import file_pieces, split_of
from kenotron_data.tables import DatasetRows
from kenotron_data.text import TEXT_SUFFIXES
from kenotron_data.text_pieces import TextPiece, first_rows
from kenotron_data.token_cache import check_owner
from kenotron_data.token_folder import TokenFolder
from kenotron_data.tokenise import Progress, identity_of, part_groups, tokenise
from kenotron_data.tokenizer import TextTokenizer

SAVED = ("state.json", "dataset_dict.json")
"""Files of a folder that `save_to_disk` has written."""


def cached_tokens(
    config: PretrainDatasetsConfig,
    tokenizer: TextTokenizer,
    cache_folder: str | os.PathLike[str],
    *,
    validation: bool = False,
    progress: Progress | None = None,
) -> TokenFolder:
    """Return the tokens of a corpus; they are made if no run has made them before.

    The data sets follow one another in the order given and documents in the order of their rows;
    no token is lost. A loader shuffles samples, so documents are not shuffled here.

    Args:
        config: which corpus: a path or a name, several, or several with the fraction of each one's
            training rows to take (the first ones). A path to files of text, JSON lines, CSV or
            parquet is read without `datasets`; `save_to_disk` folders and names of the hub need it.
        tokenizer: encodes the documents.
        cache_folder: where token files are kept; all processes see it. A changed file, tokenizer or
            option makes a new entry; nothing is deleted. A read-only one will do where the entry is
            finished.
        validation: take the splits named after test or validation instead of the training ones.
        progress: see `tokenise`.

    Raises:
        FileNotFoundError: there is no such path.
        ImportError: a library is needed that is not installed.
        ValueError: a fraction, split or row is wrong, a data set cannot be loaded, or the entry is
            damaged or a stranger's.
    """
    cache = Path(cache_folder)
    sources = corpus_pieces(config, (config.text_column_name,), validation=validation)
    groups = part_groups(sources)
    words = f"1:{identity_of(groups)}:{tokenizer.fingerprint}:{tokenizer.name}:{tokenizer.end}"
    folder = cache / hashlib.blake2b(words.encode(), digest_size=12).hexdigest()
    tokenise(
        groups,
        tokenizer,
        folder,
        workers=config.dataset_processing_num_proc_per_process,
        overwrite=config.dataset_overwrite_cache,
        wait=True,
        progress=progress,
    )
    check_owner(folder)
    return TokenFolder(folder)


def corpus_pieces(
    config: HubDatasetsConfig,
    columns: Sequence[str],
    *,
    optional: Sequence[str] = (),
    validation: bool = False,
) -> list[list[TextPiece]]:
    """List the pieces of each data set of a section.

    Args:
        config: the data sets, fractions, splits and configuration.
        columns: columns that are read.
        optional: columns that are read where a data set has them; None where it has not.
        validation: take the splits named after test or validation, whole.

    Raises:
        ImportError, ValueError, FileNotFoundError: see `cached_tokens`.
    """
    sources = []
    for name, fraction in config.fractions.items():
        pieces: list[TextPiece] = []
        for split in chosen_splits(config.splits, validation=validation):
            found = data_pieces(
                name,
                columns,
                optional=optional,
                split=split,
                config_name=config.hf_dataset_config_name,
            )
            pieces += found if validation else _of_fraction(name, found, fraction)
        sources.append(pieces)
    return sources


def chosen_splits(named: Sequence[str], *, validation: bool) -> list[str]:
    """Return the splits to train on, or those to validate on.

    A single one is trained on, whatever its name is. A stretch such as `train[:10%]` belongs to the
    split it is cut from.

    Raises:
        ValueError: a name contains neither train, test nor validation, or none is left.
    """
    kinds = {name: split_of(Path(name.split("[")[0])) for name in named}
    for name, kind in kinds.items():
        if kind is None:
            raise ValueError(
                f"hf_dataset_splits: {name!r} was given; the name of a split must contain train, "
                "test or validation"
            )
    if len(named) == 1 and not validation:
        return list(named)
    found = [name for name, kind in kinds.items() if (kind != "train") == validation]
    if not found:
        raise ValueError(
            f"hf_dataset_splits: {', '.join(named)} was given; there is no split to "
            f"{'validate' if validation else 'train'} on"
        )
    return found


def data_pieces(
    name: str,
    columns: Sequence[str],
    *,
    optional: Sequence[str] = (),
    split: str = "train",
    config_name: str | None = None,
) -> list[TextPiece]:
    """List the pieces of one data set.

    Args:
        name: a path to files, to a folder of `save_to_disk`, a name of the hub,
            `python-stdlib`, or one of its domains (`python-stdlib/prose`).
        columns: columns that are read.
        optional: see `corpus_pieces`.
        split: which split; of the hub also a stretch such as `train[:10%]`.
        config_name: configuration of a data set that has several; it needs `datasets`.

    Raises:
        ImportError: `datasets` is needed and not installed.
        ValueError: the data set, the split or the configuration does not exist.
    """
    path = Path(name)
    corpus, _, domain = name.partition("/")
    saved = any((path / file).is_file() for file in SAVED)
    if config_name and (corpus == EMBEDDED_CORPUS or path.is_file() or saved):
        raise ValueError(
            f"hf_dataset_config_name: {config_name!r} was given, but {name!r} has no "
            "configurations; those are of data sets of the hub: leave it out"
        )
    if corpus == EMBEDDED_CORPUS:
        if split != "train":
            raise ValueError(f"{name!r} has no split {split!r}: all of it is 'train'")
        if domain and domain not in BUILTIN_DOMAINS:
            raise ValueError(
                f"{name!r} was given; the domains of {corpus} are {', '.join(BUILTIN_DOMAINS)}"
            )
        return [BuiltinText(domain=domain or None)]
    if path.is_file() or (path.is_dir() and not saved and not config_name and "[" not in split):
        return file_pieces(path, columns, optional=optional, split=split)
    if not path.exists() and _is_path(path, name):
        raise FileNotFoundError(f"no data at {name!r}: give a file, a folder or a name of the hub")
    loaded = _loaded(name, split, config_name, saved)
    return dataset_pieces(loaded, columns, optional=optional, name=f"{name} {split}")


def _is_path(path: Path, name: str) -> bool:
    """Return whether a name can be no name of the hub."""
    suffixes = (".parquet", *TEXT_SUFFIXES)
    a_file = is_json_lines(path) or is_csv(path) or path.suffix.lower() in suffixes
    return path.is_absolute() or name.startswith(".") or name.count("/") > 1 or a_file


def dataset_pieces(
    dataset: Any, columns: Sequence[str], *, name: str, optional: Sequence[str] = ()
) -> list[TextPiece]:
    """List the pieces of a `datasets.Dataset` that is loaded.

    Raises:
        ValueError: it is a streaming one, or several splits.
    """
    if isinstance(dataset, Mapping):
        raise ValueError(f"{name}: this is several splits ({', '.join(dataset)}): choose one")
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{name}: a streaming data set has no length and no fingerprint to cache it under: "
            "load it without streaming, or save its first rows as a data set and name that"
        )
    return [
        DatasetRows(
            dataset=dataset,
            name=f"data set {name!r}",
            columns=tuple(columns),
            optional=tuple(optional),
        )
    ]


def _of_fraction(name: str, pieces: list[TextPiece], fraction: float) -> list[TextPiece]:
    if fraction == 1:
        return pieces
    whole = sum(piece.count() for piece in pieces)
    wanted = int(fraction * whole)
    if fraction and not wanted:
        raise ValueError(
            f"data set {name!r}: {fraction:g} of its {whole} rows is less than one: give more, or "
            "leave it out"
        )
    return first_rows(pieces, wanted)


def _loaded(name: str, split: str, config_name: str | None, saved: bool) -> Any:
    """Load one split with `datasets`, which keeps one process from downloading twice."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"data set {name!r} needs datasets: install it, or kenotron-data[hub]; paths to files "
            "of text, JSON lines or parquet do without"
        ) from error
    try:
        if not saved:
            # From 4.0 on datasets runs no code of a data set.
            with asked_once(name):
                return datasets.load_dataset(name, config_name, split=split)
        found = datasets.load_from_disk(name)
    except Exception as error:  # of any class: loading runs into network, files and formats
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"data set {name!r} (configuration {config_name!r}, split {split!r}) cannot be loaded: "
            f"{said}"
        ) from error
    if isinstance(found, Mapping):
        if split not in found:
            has = ", ".join(map(str, found))
            raise ValueError(f"data set {name!r} has no split {split!r}, but {has}")
        return found[split]
    if split != "train":
        raise ValueError(f"data set {name!r} was saved without splits: {split!r} is not there")
    return found
