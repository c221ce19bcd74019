"""Check that the hub can be asked: one request, instead of retries for a minute."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Literal

SECONDS = 10.0
Kind = Literal["data set", "tokenizer"]
_SWITCHES = {
    "data set": ("datasets.config", "huggingface_hub.constants"),
    "tokenizer": ("huggingface_hub.constants",),
}
"""Modules that tell the loader of each kind to use the cache alone."""


@contextmanager
def asked_once(name: str, kind: Kind = "data set") -> Iterator[None]:
    """Surround the loader of `datasets` or `transformers`; without the hub it uses its cache alone.

    A path that exists needs no hub.

    Raises:
        ValueError: the hub says that it has no such data set or tokenizer.
    """
    if Path(name).exists() or _is_reachable(name, kind):
        yield
        return
    modules = [import_module(module) for module in _SWITCHES[kind]]
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            vars(module)["HF_HUB_OFFLINE"] = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            vars(module)["HF_HUB_OFFLINE"] = value


def _is_reachable(name: str, kind: Kind) -> bool:
    """Ask the hub for the data set or the tokenizer, in one request.

    Raises:
        ValueError: it answers that there is none.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        ask = HfApi().dataset_info if kind == "data set" else HfApi().model_info
        ask(name, timeout=SECONDS)
    except RepositoryNotFoundError:
        raise ValueError(
            f"the hub has no {kind} of this name, or shows it only with a token (HF_TOKEN)"
        ) from None
    except HfHubHTTPError:  # it answers with an error: left to the loader
        return True
    except Exception:  # of the HTTP library, of any class: no answer
        return False
    return True
