"""Tokens per CPU-second of tokenising JSON lines: this package, `datasets.map`, datatrove.

All read the same file with the same byte-level BPE, add the same end of document, write the ids and
work in one process without threads. They take turns, each round in fresh processes; the time is CPU
time of the process after its imports. That all wrote the same tokens is checked. Contestants that
are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from kenotron_data import TokenFolder, builtin_documents

END = "<|endoftext|>"


def ours(text: Path, tokenizer: Path, out: Path) -> np.ndarray:
    from kenotron_data.source_files import file_pieces
    from kenotron_data.tokenise import part_groups, tokenise
    from kenotron_data.tokenizer import open_tokenizer

    with clock():
        tokenise(part_groups([file_pieces(text)]), open_tokenizer(str(tokenizer)), out)
    return np.concatenate(list(TokenFolder(out)))


def map_of_datasets(text: Path, tokenizer: Path, out: Path) -> np.ndarray:
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    with clock():
        encoder = Tokenizer.from_file(str(tokenizer))
        end = [encoder.token_to_id(END)]

        def encode(batch: dict) -> dict:
            return {"ids": [found.ids + end for found in encoder.encode_batch(batch["text"])]}

        rows = datasets.load_dataset("json", data_files=str(text), cache_dir=str(out))["train"]
        made = rows.map(encode, batched=True, remove_columns=rows.column_names)
    return np.concatenate([column.values.to_numpy() for column in made.data.column("ids").chunks])


def datatrove(text: Path, tokenizer: Path, out: Path) -> np.ndarray:
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from loguru import logger

    logger.remove()
    with clock():
        reader = JsonlReader(str(text.parent), glob_pattern=text.name)
        writer = DocumentTokenizer(
            str(out),
            tokenizer_name_or_path=str(tokenizer),
            eos_token=END,
            shuffle_documents=False,
        )
        for _ in writer(reader(None, 0, 1), 0, 1) or ():
            pass
    return np.concatenate([np.fromfile(p, "<u2") for p in sorted(out.rglob("*.ds"))])


class clock:
    """Measures CPU time of this process and of its children."""

    seconds = 0.0

    def __enter__(self) -> None:
        self.begin = sum(os.times()[:4])

    def __exit__(self, *error: object) -> None:
        clock.seconds = sum(os.times()[:4]) - self.begin


CONTESTANTS = {"kenotron": ours, "datasets.map": map_of_datasets, "datatrove": datatrove}
NEEDED = {"kenotron": "tokenizers", "datasets.map": "datasets", "datatrove": "datatrove"}


def measure(name: str, folder: Path) -> tuple[float, int, int]:
    """Run one contestant in a process of its own: CPU seconds, tokens, their checksum."""
    command = [sys.executable, __file__, "--contestant", name, "--folder", str(folder)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["seconds"], found["tokens"], found["checksum"]


def prepare(folder: Path, megabytes: float) -> None:
    """Write the file of JSON lines and the tokenizer."""
    from kenotron_data.source_files import file_pieces
    from kenotron_data.train_bpe import train_bpe

    size, written = megabytes * 1e6, 0
    documents = builtin_documents()
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        while written < size:  # each document in paragraphs, as corpora have them
            for document in documents:
                for start in range(0, len(document), 3000):
                    written += file.write(json.dumps({"text": document[start : start + 3000]}))
                    file.write("\n")
                if written >= size:
                    break
    train_bpe([file_pieces(folder / "text.jsonl")], 16_384, folder / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        out = Path(tempfile.mkdtemp(dir=arguments.folder))
        shutil.rmtree(out)
        files = arguments.folder / "text.jsonl", arguments.folder / "tokenizer.json"
        tokens = CONTESTANTS[arguments.contestant](*files, out).astype(np.int64)
        places = np.arange(1, len(tokens) + 1)
        checksum = int((tokens * places).sum())
        print(json.dumps({"seconds": clock.seconds, "tokens": len(tokens), "checksum": checksum}))
        return
    found = compare(arguments.rounds, arguments.megabytes)
    if arguments.json:
        found |= {"megabytes": arguments.megabytes, "machine": platform.platform()}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def compare(rounds: int, megabytes: float) -> dict:
    """Let the contestants take turns; print the table; return all speeds by name."""
    names = [name for name, module in NEEDED.items() if find_spec(module)]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder, megabytes)
        for number in range(rounds):
            found = {}
            for name in names if number % 2 == 0 else names[::-1]:
                begin = time.perf_counter()
                seconds, *found[name] = measure(name, folder)
                speeds[name].append(found[name][0] / seconds / 1e6)
                wall = time.perf_counter() - begin
                print(f"  {name}: {speeds[name][-1]:.3f} M/s, {wall:.1f} s", file=sys.stderr)
            if len({tuple(value) for value in found.values()}) > 1:
                raise SystemExit(f"the tokens differ: {found}")
    print("| tokenising | M tokens per CPU-second | lowest, highest | kenotron is |")
    print("|---|---|---|---|")
    first = statistics.median(speeds[names[0]])
    for name, values in speeds.items():
        median = statistics.median(values)
        spread = f"{min(values):.3f}, {max(values):.3f}"
        print(f"| {name} | {median:.3f} | {spread} | {first / median:.2f} x |")
    return {"million_tokens_per_cpu_second": speeds}


if __name__ == "__main__":
    main()
