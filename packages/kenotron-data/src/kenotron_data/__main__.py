"""`python -m kenotron_data tokenize`: text into files of tokens.

A run that was stopped continues when it is called again.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kenotron_command import called, framed
from kenotron_data.hub import data_pieces
from kenotron_data.source_files import file_pieces
from kenotron_data.text_pieces import TextPiece
from kenotron_data.tokenise import Progress, part_groups, tokenise
from kenotron_data.tokenise_part import PartMade
from kenotron_data.tokenizer import BYTES, TextTokenizer, open_tokenizer
from kenotron_data.train_bpe import trained_bpe

_MEGABYTE = 1_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    chosen = command_parser().parse_args(arguments)
    return framed(lambda: chosen.run(chosen), ValueError, OSError, ImportError, RuntimeError)


def tokenize(chosen: argparse.Namespace) -> int:
    """Turn data sets into a folder of token files."""
    # Each process encodes on one core: processes are what works in parallel here.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = Path(chosen.output_folder)
    sources = [_pieces(name, chosen, folder) for name in [*chosen.inputs, *(chosen.dataset or [])]]
    if not sources:
        raise ValueError("no data: name a file, a folder or a data set of the hub")
    size = None if chosen.part_size is None else round(chosen.part_size * _MEGABYTE)
    groups = part_groups(sources, size)
    tokenizer = _tokenizer(chosen, folder, [part for source in groups for part in source])
    with _bar(chosen.quiet) as progress:
        made = tokenise(
            groups,
            tokenizer,
            folder,
            workers=chosen.workers,
            token_bytes=chosen.token_bytes,
            overwrite=chosen.overwrite,
            progress=progress,
        )
    again = "" if made.made == made.parts else f" ({made.parts - made.made} were there)"
    print(
        f"{made.folder}: {made.documents:,} documents, {made.tokens:,} tokens, {made.parts:,} "
        f"parts{again}"
    )
    return 0


def _pieces(name: str, chosen: argparse.Namespace, output: Path) -> list[TextPiece]:
    """List the pieces of one source."""
    columns = (chosen.column,)
    if Path(name).is_dir() and output.resolve().is_relative_to(Path(name).resolve()):
        raise ValueError(
            f"the output folder {str(output)!r} lies in the source {name!r}: choose one outside"
        )
    if chosen.glob_pattern is None:
        split, config_name = chosen.split or "train", chosen.config_name
        if chosen.split or config_name or not Path(name).exists() or _is_saved(Path(name)):
            return data_pieces(name, columns, split=split, config_name=config_name)
    return file_pieces(name, columns, glob_pattern=chosen.glob_pattern)


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _tokenizer(
    chosen: argparse.Namespace, folder: Path, parts: list[tuple[TextPiece, ...]]
) -> TextTokenizer:
    """Open the tokenizer, or train one."""
    name = chosen.tokenizer_name_or_path
    if (name is None) == (chosen.train_bpe is None):
        raise ValueError("give either --tokenizer-name-or-path or --train-bpe")
    if name is None:
        path = folder.with_name(f"{folder.name}.tokenizer.json")
        size = round(chosen.train_size * _MEGABYTE)
        trained_bpe(parts, chosen.train_bpe, path, most_bytes=size, overwrite=chosen.overwrite)
        name = str(path)
    return open_tokenizer(name, eos_token=chosen.eos_token, end_of_document=not chosen.no_eos)


@contextmanager
def _bar(quiet: bool) -> Iterator[Progress | None]:
    """Show how far it is: a bar in a terminal with rich, else a line at every tenth."""
    if quiet:
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield _lines()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    fields = "[progress.percentage]{task.percentage:>3.0f}% {task.fields[tokens]:,} tokens"
    with Bar(BarColumn(), TextColumn(fields), TimeRemainingColumn(), console=console) as bar:
        task, tokens = bar.add_task("", total=None, tokens=0), [0]

        def show(made: PartMade, total: int) -> None:
            tokens[0] += made.tokens
            bar.update(task, total=total, advance=made.size, tokens=tokens[0])

        yield show


def _lines() -> Callable[[PartMade, int], None]:
    done, tokens = [0, 0], [0]

    def show(made: PartMade, total: int) -> None:
        tokens[0] += made.tokens
        done[0] += made.size
        tenth = 10 * done[0] // max(1, total)
        if tenth > done[1]:
            done[1] = tenth
            print(f"{10 * tenth} %: {tokens[0]:,} tokens", file=sys.stderr, flush=True)

    return show


def command_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    parser = argparse.ArgumentParser(
        prog=called("python -m kenotron_data"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("tokenize", help="text into token files (.ds with .ds.index)")
    add = one.add_argument
    add("inputs", nargs="*", metavar="DATA", help="file, folder, or data set of the hub; in order")
    add("--dataset", action="append", metavar="DATA", help="the same, as an option")
    add("--output-folder", required=True, help="the folder to make")
    add(
        "--tokenizer-name-or-path",
        metavar="NAME",
        help=f"'{BYTES}', a tokenizer.json, or a folder or name that transformers loads",
    )
    add("--train-bpe", type=int, metavar="VOCAB", help="train a byte-level BPE of VOCAB ids first")
    add("--train-size", type=float, default=1000, metavar="MB", help="text it reads (1000)")
    add("--eos-token", metavar="TOKEN", help="ends a document; default: the tokenizer's own")
    add("--no-eos", action="store_true", help="let documents run on without an end")
    add("--column", "--text-column", default="text", help="column of the text (text)")
    add("--split", help="split of a data set (train)")
    add("--config-name", help="configuration of a data set")
    add("--glob-pattern", metavar="GLOB", help="files of a folder to take, such as '*/*.jsonl'")
    add(
        "--workers",
        "--n-tasks",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="processes; no number changes the files (8, or the number of cores)",
    )
    add("--part-size", type=float, metavar="MB", help="data of one part (a 64th, 4 to 268)")
    add("--token-bytes", type=int, choices=(2, 4), help="bytes of an id; default: what is needed")
    add("--overwrite", action="store_true", help="make the folder again, whatever it holds")
    add("--quiet", action="store_true", help="no progress")
    one.set_defaults(run=tokenize)
    return parser


if __name__ == "__main__":
    sys.exit(main())
