"""Loading packed samples: this package against torch's DataLoader over a memory map.

The contestants read random samples of the same uint16 tokens and give tokens, labels and positions
as int64, of the same shape; each works in one thread of its own process, and they take turns.
Printed are medians in million tokens per second of CPU time, and their ratio to ours, in Markdown.
Then: how long it takes until the first batch comes, by the size of the data (sparse files).

    python packages/kenotron-data/benchmarks/bench_loader.py [--million 200] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from kenotron_data import (
    Loader,
    Mixture,
    Nanoset,
    PackedDocuments,
    PackedTokens,
    TokenFile,
    TokenFolder,
    TokenWriter,
    write_pack_index,
)

ROWS = 32
VOCAB = 50_000


class MemoryMapped(TorchDataset):
    """What is commonly written: a memory map and `__getitem__`."""

    def __init__(self, path: Path, sequence_length: int) -> None:
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.sequence_length = sequence_length
        self.positions = torch.arange(sequence_length)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, ...]:
        first = i * self.sequence_length
        ids = self.tokens[first : first + self.sequence_length + 1].astype(np.int64)
        ids = torch.from_numpy(ids)
        return ids[:-1], ids[1:], self.positions


def nano_batches(path: Path, sequence_length: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """As small training scripts do: random places, one stack for tokens and one for labels."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    positions = torch.arange(sequence_length).repeat(ROWS, 1)
    while True:
        starts = torch.randint(len(tokens) - sequence_length - 1, (ROWS,)).tolist()
        read = [tokens[i : i + sequence_length].astype(np.int64) for i in starts]
        labels = [tokens[i + 1 : i + 1 + sequence_length].astype(np.int64) for i in starts]
        yield (
            torch.stack([torch.from_numpy(row) for row in read]),
            torch.stack([torch.from_numpy(row) for row in labels]),
            positions.clone(),
        )


def torch_batches(path: Path, sequence_length: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """torch's DataLoader, shuffled, in this process."""
    return iter(DataLoader(MemoryMapped(path, sequence_length), batch_size=ROWS, shuffle=True))


def ours(dataset, **options) -> Loader:
    """Our loader, in this thread, with the check of the vocabulary."""
    sizes = {"micro_batch_size": ROWS, "microbatches": 1}
    return Loader(dataset, **sizes, prefetch=0, vocab_size=VOCAB, **options)


def contestants(root: Path, sequence_length: int) -> dict[str, Callable[[], Iterator]]:
    """Contestants by name."""
    folder, s = TokenFolder(root), sequence_length
    file = folder.files[0]
    if not (root / f"{file.path.name}.pack{s}").exists():
        write_pack_index(file, s)
    half = {"a": PackedTokens(file, s), "b": Nanoset(folder, s)}
    return {
        "ours, packed": lambda: ours(PackedTokens(file, s)),
        "ours, Nanoset of a folder": lambda: ours(Nanoset(folder, s)),
        "ours, documents told apart": lambda: ours(PackedTokens(file, s, separate_documents=True)),
        "ours, best fit": lambda: ours(PackedDocuments(file, s)),
        "ours, mixture of 2": lambda: ours(Mixture(half, {"a": 3, "b": 1})),
        "torch DataLoader": lambda: torch_batches(file.path, s),
        "stacked slices": lambda: nano_batches(file.path, s),
    }


def speed(make: Callable[[], Iterator], sequence_length: int, tokens: int) -> float:
    """Million tokens per second of CPU time."""
    batches = make()
    for _ in islice(batches, 3):
        pass
    count = max(1, tokens // (ROWS * sequence_length))
    begin = time.process_time()
    for _ in islice(batches, count):
        pass
    return count * ROWS * sequence_length / (time.process_time() - begin) / 1e6


def write_tokens(root: Path, million: int) -> None:
    """Write files of random tokens in documents of 500 tokens in the mean."""
    rng = np.random.default_rng(0)
    for number, share in enumerate((0.8, 0.1, 0.1)):
        with TokenWriter(root / f"{number}.ds", 2, "random") as writer:
            left = int(million * 1e6 * share)
            while left > 0:
                lengths = rng.geometric(1 / 500, size=2000)
                ids = rng.integers(0, VOCAB, size=lengths.sum(), dtype=np.uint16)
                writer.add(np.split(ids, np.cumsum(lengths)[:-1]))
                left -= len(ids)


def sparse(path: Path, tokens: int, documents: int) -> Path:
    """Make a file of tokens that are all 0, and its index, without writing them."""
    for name, size in ((path, 2 * tokens), (path.with_name(f"{path.name}.index"), 8 * documents)):
        with name.open("wb") as file:
            file.truncate(size)
    with path.with_name(f"{path.name}.index").open("r+b") as file:
        file.seek(8 * (documents - 1))
        file.write(np.uint64(tokens).tobytes())
    return path


def start(path: Path, sequence_length: int) -> float:
    """Milliseconds from the path to the first batch."""
    begin = time.perf_counter()
    next(ours(PackedTokens(TokenFile(path), sequence_length)))
    return (time.perf_counter() - begin) * 1e3


def torch_start(path: Path, sequence_length: int) -> float:
    """Milliseconds from the path to torch's first batch."""
    begin = time.perf_counter()
    next(torch_batches(path, sequence_length))
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", type=int, default=200, help="tokens of the files, in millions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_tokens(root, chosen.million)
        for length in (128, 2048, 8192):
            times = found.setdefault(f"S = {length}", {})
            for turn in range(chosen.rounds + 1):
                for who, make in contestants(root, length).items():
                    value = speed(make, length, 20_000_000 if who.startswith("ours") else 4_000_000)
                    if turn:
                        times.setdefault(who, []).append(value)
        starts = found.setdefault("start", {})
        for tokens in (10**7, 10**9, 10**10):
            path = sparse(root / f"sparse{tokens}.ds", tokens, tokens // 500)
            for who, begin in (("ours", start), ("torch DataLoader", torch_start)):
                rounds = chosen.rounds if who == "ours" else 1
                values = [begin(path, 2048) for _ in range(rounds)]
                starts[f"{who}, {tokens:.0e} tokens"] = values
            path.unlink()
    report(found)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


def report(found: dict[str, dict[str, list[float]]]) -> None:
    """Print the tables."""
    for what, times in found.items():
        base = statistics.median(next(iter(times.values())))
        unit = "ms to the first batch" if what == "start" else "M tokens/s a core"
        print(f"\n| {what} | {unit} | over the first |\n|---|---|---|")
        for who, values in times.items():
            middle = statistics.median(values)
            print(f"| {who} | {middle:.2f} | {middle / base:.2f} |")


if __name__ == "__main__":
    main()
