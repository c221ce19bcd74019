"""Names of a model's tensors in transformers, and what is saved under them."""

from __future__ import annotations

from kenotron_dist.placement import parameter_layouts
from kenotron_models.decoder import LayerStack
from kenotron_models.hf_tensors import Whole
from kenotron_models.transformers_layers import TransformersLayer
from kenotron_models.transformers_meta import layers_on_meta
from kenotron_models.transformers_saved import saved_parts
from kenotron_models.transformers_spec import TransformersSpec


def transformers_names(spec: TransformersSpec) -> dict[str, tuple[str, ...]]:
    """Return the names in transformers of each logical tensor; several where it is tied."""
    layers = layers_on_meta(spec)
    theirs = {
        f"{entry}.{own}": name
        for entry, layer in layers
        if isinstance(layer, TransformersLayer)
        for own, name in layer.hf_names.items()
    }
    layouts = parameter_layouts(LayerStack(layers), {"tp": 1, "ep": 1})
    found: dict[str, tuple[str, ...]] = {}
    for path, layout in layouts.items():
        found[layout.name] = (*found.get(layout.name, ()), theirs[path])
    return found


def transformers_tensors(spec: TransformersSpec) -> dict[str, Whole]:
    """Return our tensors by logical name, and the ones that ``save_pretrained`` makes of them."""
    layers = layers_on_meta(spec)
    shapes = {
        each.name: each.shape
        for each in parameter_layouts(LayerStack(layers), {"tp": 1, "ep": 1}).values()
    }
    saved = saved_parts(spec)
    names = transformers_names(spec)
    return {name: Whole(shapes[name], saved[theirs[0]]) for name, theirs in names.items()}


def is_tied_copy(name: str, spec: TransformersSpec) -> bool:
    """Return True for a tensor of a file that is read under another name."""
    saved = saved_parts(spec)
    copies = [n for names in transformers_names(spec).values() for n in names[1:]]
    return any(name == part.name for each in copies for part in saved[each])
