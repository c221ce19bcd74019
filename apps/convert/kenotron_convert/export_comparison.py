"""An exported folder, compared with its checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from kenotron_ckpt import Checkpoint
from kenotron_models import AnyConfig, Multipliers
from kenotron_models.hf import Wanted, compare, load_theirs
from kenotron_models.hf_import import OtherModel


def compare_export(
    checkpoint: Checkpoint,
    config: AnyConfig,
    multipliers: Multipliers,
    folder: Path,
    dtype: torch.dtype | None,
) -> float | None:
    """Return how far an exported folder is from its checkpoint.

    Args:
        checkpoint: of any layout.
        config: its model.
        multipliers: of its model.
        folder: that was written.
        dtype: of the weights there, where it is another one; None: they are the checkpoint's.

    Returns:
        The largest deviation, see ``compare``; None where multipliers were folded into weights that
        were rounded then: transformers loads them, and logits are not compared.

    Raises:
        ValueError: as ``compare``, or transformers is not installed.
    """

    def load(wanted: Wanted) -> None:
        checkpoint.load(wanted, verify=False)  # it was, when it was opened

    try:
        if dtype is not None and multipliers.change:
            load_theirs(folder)
            return None
        spec = multipliers.applied(config.decoder)
        return compare(load, spec, folder, dtype=dtype, gradient=not multipliers.change)
    except ImportError as error:
        raise ValueError(
            f"the export is compared by transformers, which cannot be imported ({error}): pip "
            "install transformers, or give --no-check"
        ) from error
    except OtherModel as error:
        raise ValueError(
            f"{error}\nThe export was not kept. Please report this; --no-check writes it all the "
            "same"
        ) from error
