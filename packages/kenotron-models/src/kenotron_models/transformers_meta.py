"""A model of transformers on meta, cut over ranks that are not there, to check a config."""

from __future__ import annotations

from torch import nn

from kenotron_dist import Axis
from kenotron_models.build import Build
from kenotron_models.decoder import build_decoder
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_tp import TPMode


def layers_on_meta(
    spec: TransformersSpec, tp: int = 1, ep: int = 1, mode: TPMode = TPMode()
) -> list[tuple[str, nn.Module]]:
    """Return the layers of the first of so many ranks by name; nothing is communicated.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the model cannot be trained here, or not cut over so many ranks.
    """
    axes = [Axis(name, 0, tuple(range(size))) for name, size in (("tp", tp), ("ep", ep))]
    return build_decoder(spec, Build(axes[0], mode, ep=axes[1]))
