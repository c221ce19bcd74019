"""Explicit tensor-parallel layers: how one layer is cut over ranks."""

from kenotron_tp.cross_entropy import cross_entropy
from kenotron_tp.embedding import VocabParallelEmbedding, vocabulary_chunk
from kenotron_tp.fused_cross_entropy import tokens_at_a_time
from kenotron_tp.linear import ColumnParallelLinear, RowParallelLinear
from kenotron_tp.logit_cap import capped_logits
from kenotron_tp.logits import check_sampling, choose_tokens, likeliest, likeliest_ids
from kenotron_tp.matmul import How, matmul
from kenotron_tp.mode import TPMode
from kenotron_tp.parallelize import parallelize
from kenotron_tp.planned_layers import (
    GatheredColumnLinear,
    SplitRowLinear,
    Style,
    features_of,
    is_linear,
)
from kenotron_tp.planned_modules import HEAD_BIASES
from kenotron_tp.products import product
from kenotron_tp.sequence import join_tokens, mark_partial, split_tokens
from kenotron_tp.virtual_cross_entropy import virtual_logits
from kenotron_tp.virtual_shards import OwnChunk, from_shards, shards_of, to_shards

__all__ = [
    "ColumnParallelLinear",
    "GatheredColumnLinear",
    "HEAD_BIASES",
    "How",
    "OwnChunk",
    "RowParallelLinear",
    "SplitRowLinear",
    "Style",
    "TPMode",
    "VocabParallelEmbedding",
    "capped_logits",
    "check_sampling",
    "choose_tokens",
    "cross_entropy",
    "features_of",
    "from_shards",
    "is_linear",
    "join_tokens",
    "likeliest",
    "likeliest_ids",
    "mark_partial",
    "matmul",
    "parallelize",
    "product",
    "shards_of",
    "split_tokens",
    "to_shards",
    "tokens_at_a_time",
    "virtual_logits",
    "vocabulary_chunk",
]
