"""Places of the rows of LlaMoE's experts, whatever the metadata of their files says.

Nanotron cuts the experts over the ranks of tp and of experts together, and its metadata numbers the
rows of these ranks one after another. But each rank computes with a slice of each of its experts.

Shapes: E experts, F features of an expert, h hidden; t tp ranks, p expert ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kenotron_nanotron.shard_files import ShardFile

_NAMES = re.compile(r".*\.block_sparse_moe\.experts\.mlp\.w[12]\.module\.weight")


def with_own_rows(name: str, shard: ShardFile, config: Mapping[str, Any]) -> ShardFile:
    """Return a part of a tensor with the rows (E F, h) that it holds; as it is if of another kind.

    Expert rank e and tp rank r hold, for each i below E/p, rows r F/t to (r + 1) F/t of expert
    e E/p + i. With one expert, matrices are cut over tp alone, and the metadata is right.

    Args:
        name: Nanotron's name of the tensor.
        shard: the part.
        config: what ``model_config.json`` says.

    Raises:
        ValueError: each expert rank has one expert, or the part has another number of rows.
    """
    if not config.get("is_llamoe_config") or not _NAMES.fullmatch(name):
        return shard
    experts, features = config.get("moe_num_experts"), config.get("intermediate_size")
    if not isinstance(experts, int) or not isinstance(features, int) or experts == 1:
        return shard
    place = shard.place
    ranks, tp = place.size("exp"), place.size("tp")
    if ranks == experts:
        raise ValueError(
            f"{shard.path}: each of {ranks} expert ranks has one of moe_num_experts ({experts}); "
            "there Nanotron keeps other tensors under these names, which are not read: save again "
            "with a smaller expert_parallel_size"
        )
    if len(shard.shape) != 2:
        raise ValueError(f"{shard.path}: its shape is {list(shard.shape)}; it must have two dims")
    width = shard.shape[1]
    own, rows = experts // ranks, features // tp  # experts of this rank, rows of each
    if shard.shape[0] != own * rows or own * ranks != experts or rows * tp != features:
        raise ValueError(
            f"{shard.path}: it has {shard.shape[0]} rows; {experts} experts of {features} features "
            f"over {ranks} expert ranks and {tp} tp ranks make {experts * features / ranks / tp:g}"
        )
    first = place.rank("exp") * own
    pairs = tuple(
        (
            ((i * rows, 0), (rows, width)),
            (((first + i) * features + place.rank("tp") * rows, 0), (rows, width)),
        )
        for i in range(own)
    )
    return replace(shard, pairs=pairs)
