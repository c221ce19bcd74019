"""Tokenizers that `transformers` opens."""

from __future__ import annotations

from typing import Any

from kenotron_data.hub_reach import asked_once


def open_transformers(name_or_path: str, revision: str | None = None) -> Any:
    """Open a tokenizer of `transformers`; raises ImportError or ValueError with the reason."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"tokenizer {name_or_path!r}: names and folders need transformers: install it, or "
            "kenotron-data[hub]; 'bytes' and a tokenizer.json do without"
        ) from error
    try:
        options: Any = {"revision": revision or "main", "trust_remote_code": False}
        with asked_once(name_or_path, "tokenizer"):
            return AutoTokenizer.from_pretrained(name_or_path, **options)
    except Exception as error:  # any class: transformers passes on those of its back ends
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        which = f"{name_or_path!r}" + (f", revision {revision!r}" if revision else "")
        raise ValueError(
            f"tokenizer {which}: transformers cannot open it ({said}); give 'bytes', a "
            "tokenizer.json, a folder, or a name of the hub"
        ) from error
