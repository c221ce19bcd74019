"""Training tokens in one order, whatever the number of ranks and wherever the run was stopped."""

from kenotron_data.ahead import WorkedAhead
from kenotron_data.batch import Batch, MicroBatch
from kenotron_data.best_fit import write_pack_index
from kenotron_data.builtin import builtin_documents
from kenotron_data.corpus import (
    Corpus,
    custom_corpus,
    has_index,
    open_section,
    random_corpus,
)
from kenotron_data.cursor import Cursor
from kenotron_data.custom import CustomSamples, IterableLoader, Source, custom_loader
from kenotron_data.fingerprints import Fingerprint, fingerprint
from kenotron_data.hub import cached_tokens
from kenotron_data.loader import Loader
from kenotron_data.mixture import Mixture
from kenotron_data.origins import origins
from kenotron_data.pack import Nanoset, PackedTokens, RandomTokens, split
from kenotron_data.packed_documents import PackedDocuments
from kenotron_data.prefetch import Prefetched
from kenotron_data.row_samples import Dataset, Int64Array, Rows
from kenotron_data.sampler import inverse_permute, permutation_key, permute
from kenotron_data.section_datasets import SectionOptions, tokenise_section
from kenotron_data.sft import SupervisedExamples, supervised
from kenotron_data.shortened import ShortenedTokens
from kenotron_data.stored_losses import LossWriter, StoredLosses
from kenotron_data.subsets import Concatenated, Subset
from kenotron_data.text import text_documents
from kenotron_data.token_file import TokenFile
from kenotron_data.token_folder import TokenFolder, tokenizer_of_folder
from kenotron_data.token_writer import TokenWriter
from kenotron_data.tokenise import tokenise
from kenotron_data.tokenizer import BYTES, TextTokenizer, open_tokenizer, tokenizer_libraries
from kenotron_data.tokens import END_OF_DOCUMENT, decode, encode
from kenotron_data.train_bpe import train_bpe
from kenotron_data.transformers_tokenizer import open_transformers
from kenotron_data.validation import hold_out, hold_out_each, validation_batches

__all__ = [
    "BYTES",
    "Batch",
    "Concatenated",
    "Corpus",
    "Cursor",
    "CustomSamples",
    "Dataset",
    "END_OF_DOCUMENT",
    "Fingerprint",
    "Int64Array",
    "IterableLoader",
    "Loader",
    "LossWriter",
    "MicroBatch",
    "Mixture",
    "Nanoset",
    "PackedDocuments",
    "PackedTokens",
    "Prefetched",
    "RandomTokens",
    "Rows",
    "SectionOptions",
    "ShortenedTokens",
    "Source",
    "StoredLosses",
    "Subset",
    "SupervisedExamples",
    "TextTokenizer",
    "TokenFile",
    "TokenFolder",
    "TokenWriter",
    "WorkedAhead",
    "builtin_documents",
    "cached_tokens",
    "custom_corpus",
    "custom_loader",
    "decode",
    "encode",
    "fingerprint",
    "has_index",
    "hold_out",
    "hold_out_each",
    "inverse_permute",
    "open_section",
    "open_tokenizer",
    "open_transformers",
    "origins",
    "permutation_key",
    "permute",
    "random_corpus",
    "split",
    "supervised",
    "text_documents",
    "tokenise",
    "tokenise_section",
    "tokenizer_libraries",
    "tokenizer_of_folder",
    "train_bpe",
    "validation_batches",
    "write_pack_index",
]
