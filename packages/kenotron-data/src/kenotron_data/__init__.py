"""Training tokens in one order, whatever the number of ranks and wherever the run was stopped."""

from kenotron_data.batch import Batch, MicroBatch, TargetMask
from kenotron_data.builtin import builtin_documents
from kenotron_data.cursor import Cursor
from kenotron_data.loader import Loader, validation_batches
from kenotron_data.pack import Dataset, PackedTokens, RandomTokens, split
from kenotron_data.prefetch import Prefetched
from kenotron_data.sampler import inverse_permute, permutation_key, permute
from kenotron_data.text import text_documents
from kenotron_data.token_file import TokenFile, TokenMetadata
from kenotron_data.token_folder import TokenFolder
from kenotron_data.token_writer import TokenWriter
from kenotron_data.tokens import END_OF_DOCUMENT, decode, encode, printable

__all__ = [
    "END_OF_DOCUMENT",
    "Batch",
    "Cursor",
    "Dataset",
    "Loader",
    "MicroBatch",
    "PackedTokens",
    "Prefetched",
    "RandomTokens",
    "TargetMask",
    "TokenFile",
    "TokenFolder",
    "TokenMetadata",
    "TokenWriter",
    "builtin_documents",
    "decode",
    "encode",
    "inverse_permute",
    "permutation_key",
    "permute",
    "printable",
    "split",
    "text_documents",
    "validation_batches",
]
