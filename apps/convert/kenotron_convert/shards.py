"""Distribution of tensors over files, as Hugging Face does it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kenotron_ckpt import TensorSize

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of ``5GB``, ``500MB``, ``2GiB`` or a plain number. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B)?", text.strip().upper())
    unit = UNITS.get((found[2] or "").removeprefix("B")) if found else None
    if found is None or unit is None or (size := int(float(found[1]) * unit)) < 1:
        raise ValueError(
            f"--max-shard-size {text}: give a size above 0 with its unit, as 5GB, 500MB or 2GiB"
        )
    return size


def deal(sizes: Iterable[tuple[str, TensorSize]], limit: int) -> dict[str, dict[str, TensorSize]]:
    """The tensors of each file, by its name; a file has at most ``limit`` bytes, or one tensor."""
    batches: list[dict[str, TensorSize]] = []
    room = 0
    for name, size in sizes:
        if not batches or size.nbytes > room:
            batches.append({})
            room = limit
        batches[-1][name] = size
        room -= size.nbytes
    if len(batches) == 1:
        return {"model.safetensors": batches[0]}
    count = len(batches)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": batch
        for number, batch in enumerate(batches, 1)
    }
