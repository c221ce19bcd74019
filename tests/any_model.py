"""Every family of transformers with a tp plan, on two ranks of tp, cp and ep, against plain ones.

``python tests/any_model.py`` writes the table of ``apps/train/docs/any-model-families.md`` again.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tiny_transformers import MULTIMODAL, SEQUENCE, VOCAB, families, tiny_config, tiny_json
from torch import Tensor, nn

from kenotron_cp import cut_sequence
from kenotron_dist import DATA_AXES, Mesh, all_reduce, sum_gradients
from kenotron_dist.boxes import scatter
from kenotron_dist.placement import materialize, named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    SequenceCut,
    TransformersSpec,
    build_decoder,
    sequence_problem,
    transformers_names,
)
from kenotron_models.families import TransformersConfig
from kenotron_tp import TPMode

PAGE = Path(__file__).parent.parent / "apps/train/docs/any-model-families.md"
START, END = "<!-- table -->\n", "<!-- end -->\n"
PRELOAD = ("transformers.models.auto.modeling_auto",)
LOSS, GRADIENT = 1e-5, 1e-4
"""Deviations that are rounding, as shares of the largest value of a tensor."""
BOUNDS = {"< 1e-6": 1e-6, "< 1e-5": 1e-5, "< 1e-4": 1e-4}
"""Of the largest deviation of a family, as the page has them."""
ONE_PIECE = "no: it is not split into layers"


def whole_model(kind: str, **changes: Any) -> Any:
    """Return transformers' own model with random weights, biases and norms too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(kind, **changes), dtype=torch.float32
    ).train()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor += 0.05 * torch.randn(tensor.shape)
    return model


def part_of(model: Any, spec: TransformersSpec, mesh: Mesh, mode: TPMode = TPMode()) -> LayerStack:
    """Return the layers of the same model, cut over tp, with their part of the weights."""
    stack = LayerStack(build_decoder(spec, Build(mesh["tp"], mode, ep=mesh["ep"])))
    materialize(stack, "cpu")
    for layer in stack:
        layer.fill_buffers(torch.device("cpu"))
    layouts, values = parameter_layouts(stack, mesh.axis_sizes), model.state_dict(keep_vars=True)
    names = transformers_names(spec)
    with torch.no_grad():
        for path, parameter in named_parameters(stack).items():
            layout = layouts[path]
            value = values[names[layout.name][0]].detach()
            parameter.copy_(scatter(value, layout, mesh.view(layout)))
    return stack


def deviations(
    mesh: Mesh,
    kind: str,
    plan: dict[str, str] | None = None,
    mode: TPMode = TPMode(),
    size: tuple[int, int] = (2, SEQUENCE),
    **changes: Any,
) -> tuple[dict[str, float], str, str, str]:
    """Compare logits and every gradient; say what tp cuts, what pp shares and what is recomputed.

    ``size``: rows, and tokens of each. Raises ValueError where the family is refused.
    """
    cp, here = mesh["cp"], "kenotron" if mesh["cp"].size > 1 else None
    text = tiny_json(kind, **changes)
    sizes = TransformersConfig(config_json=text, tp_plan=plan, attn_implementation=here)
    spec = sizes.decoder
    if cp.size > 1 and (problem := sequence_problem(spec)):
        raise ValueError(problem)
    stack = part_of(whole := whole_model(kind, **changes), spec, mesh, mode)
    draw, sequence = torch.Generator().manual_seed(1), size[1]
    ids = torch.randint(3, VOCAB, size, generator=draw)
    pull = torch.randn(*size, VOCAB, generator=draw)
    due = whole(input_ids=ids, use_cache=False).logits
    (due * pull).sum().backward()
    ids, pull, due = (x.chunk(mesh["dp"].size)[mesh["dp"].rank] for x in (ids, pull, due))
    columns = VOCAB // mesh["tp"].size
    own = slice(mesh["tp"].rank * columns, (mesh["tp"].rank + 1) * columns)
    places = torch.arange(sequence).expand(len(ids), -1)
    cut = None if cp.size == 1 else SequenceCut(cp, places)
    here = partial(cut_sequence, axis=cp)

    def step() -> Tensor:
        stack.zero_grad()
        context = Context(here(places), cut=cut)
        logits = stack(here(ids).flatten(), context).view(*context.positions_BS.shape, -1)
        (logits * here(pull)[..., own]).sum().backward()
        return logits.detach()

    logits = step()
    again = recomputed(stack, logits, step)
    sum_gradients(stack, mesh)
    real = slice(None) if cut is None else cut.places_S < sequence
    apart = largest_share(logits[:, real], here(due)[:, real][..., own], float(due.abs().max()))
    found = {"logits": apart}
    layouts, held = parameter_layouts(stack, mesh.axis_sizes), named_parameters(stack)
    grads = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    most = max(float(grad.abs().max()) for grad in grads.values() if grad is not None)
    for name, (theirs, *_) in transformers_names(spec).items():
        paths = [path for path, layout in layouts.items() if layout.name == name]
        layout, expected = layouts[paths[0]], grads.get(theirs)
        parts = [held[path].grad for path in paths if held[path].grad is not None]
        if expected is None:
            assert all(not part.any() for part in parts), name
            continue
        total = sum(parts, start=torch.zeros_like(held[paths[0]]))
        total = all_reduce(total, mesh[DATA_AXES[layout.grid]])
        scale = max(float(expected.abs().max()), most / 1000)  # of small ones all is rounding
        found[name] = largest_share(total, scatter(expected, layout, mesh.view(layout)), scale)
    cut = sum(bool(each.shards) for each in layouts.values())
    return found, f"{cut} of {len(layouts)} tensors", "yes" if len(stack) > 1 else "no", again


def recomputed(stack: LayerStack, logits: Tensor, step: Callable[[], Tensor]) -> str:
    """Say that a step whose layers are computed again has the same bits, or why there is none."""
    layers = [each for each in stack if hasattr(each, "recompute")]
    if not layers:
        return ONE_PIECE
    due = {name: parameter.grad for name, parameter in named_parameters(stack).items()}
    calls: list[nn.Module] = []
    for layer in layers:
        layer.recompute = "full"
        layer.block.register_forward_pre_hook(lambda module, _: calls.append(module))
    assert torch.equal(step(), logits)
    assert len(calls) == 2 * len(layers)
    for name, parameter in named_parameters(stack).items():
        grad, expected = parameter.grad, due[name]
        assert grad is expected or torch.equal(grad, expected), name  # both may be None
    return "yes"


def largest_share(found: Tensor, due: Tensor, scale: float) -> float:
    """Return the largest deviation of a tensor, as a share of a scale."""
    return float((found - due).abs().max()) / scale


def planless() -> tuple[list[str], list[str]]:
    """Return the families without a tp plan that the page names: split into layers, and whole."""
    text = PAGE.read_text(encoding="utf-8").partition("Stages can share the layers of ")[2]
    shared, _, whole = text.partition("are one piece")[0].partition(";")
    kinds = [re.findall(r"[\w-]+", re.sub(r"\band\b", "", each)) for each in (shared, whole)]
    return kinds[0], kinds[1]


def compare(mesh: Mesh, kinds: list[str]) -> list[tuple[str, str, str, str, float]]:
    """Return each family, what tp cuts or why it is refused, pp, recompute, and its deviation.

    Raises AssertionError where a cut model computes something else.
    """
    warnings.simplefilter("ignore")  # of transformers, on configs and kernels that it would use
    logging.disable(logging.WARNING)
    rows = []
    for kind in kinds:
        try:
            found, *said = deviations(mesh, kind)
        except ValueError as error:
            rows.append((kind, f"no: {_reason(error)}", "", "", 0.0))
            continue
        for name, share in found.items():
            assert share < (LOSS if name == "logits" else GRADIENT), (kind, name, share)
        rows.append((kind, *said, max(found.values())))
    return rows


def suggested(mesh: Mesh, kind: str, **changes: Any) -> tuple[dict[str, str], float]:
    """Return the plan that an error suggests for a family without one, and its deviation."""
    warnings.simplefilter("ignore")
    try:
        deviations(mesh, kind, **changes)
    except ValueError as error:
        plan = json.loads(str(error).partition("names suggest ")[2])
    return plan, max(deviations(mesh, kind, plan, **changes)[0].values())


def _reason(error: Exception) -> str:
    line = next(each for each in str(error).splitlines() if not each.endswith(":")).strip()
    line = re.sub(r"(layers|h)\.\d+\.", r"\1.*.", line)
    return re.split(r": tokens of a |, which attn_implementation|: its experts|: they can", line)[0]


HEAD = "| family | tp | pp | cp | ep | recompute | compared deviation |"
LAYOUTS = {"tp": {"tp": 2}, "cp": {"cp": 2}, "ep": {"tp": 2, "ep": 2}}
NO_EXPERTS = "no: ep 2 was given, and the model has no experts"


def walk(kinds: list[str]) -> list[str]:
    """Return the rows of families, after comparing each of them on two ranks of each axis."""
    small, page = sorted({*kinds} - {*MULTIMODAL}), written()
    found: dict[str, list[tuple[str, str, str, str]]] = {}
    most = dict.fromkeys(small, 0.0)
    for axis, sizes in LAYOUTS.items():
        ranks = on_ranks(compare, small, **sizes, preload=PRELOAD)
        for kind, *_, deviation in (row for rank in ranks for row in rank):
            most[kind] = max(most[kind], deviation)
        here, there = ([row[:-1] for row in rank] for rank in ranks)
        assert here == there
        found[axis] = here
    rows = [f"| {kind} | not tried: it has images |" + " |" * 5 for kind in {*kinds} - {*small}]
    for each in zip(*found.values(), strict=True):
        (kind, tp, pp, _), *others = each
        again = {row[3] for row in each if row[3]} or {"no"}
        assert len(again) == 1
        cells = [tp, pp, *(_said(row[1], tp) for row in others), *again]
        bound = _bound(most[kind], page.get(kind, "").rpartition(" | ")[2][:-2])
        cells.append("" if again == {"no"} else bound)
        rows.append(" | ".join([f"| {kind}", *cells]) + " |")
    return sorted(rows)


def _bound(deviation: float, written: str) -> str:
    """Return a bound with room for the rounding of other machines, or that of the page."""
    if deviation < BOUNDS.get(written, 0.0) <= max(160 * deviation, min(BOUNDS.values())):
        return written
    return next((text for text, bound in BOUNDS.items() if 4 * deviation < bound), [*BOUNDS][-1])


def _said(found: str, tp: str) -> str:
    if found.startswith(NO_EXPERTS):
        return ""
    if not found.startswith("no: "):
        return "yes"
    return "no" if found == tp else found


def written() -> dict[str, str]:
    """Return the rows of the page by family."""
    table = PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    return {row.split(" | ")[0][2:]: row for row in table.splitlines()[2:]}


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    rows = "\n".join([HEAD, "|---" * HEAD.count(" | ") + "|---|", *walk(families())])
    PAGE.write_text(f"{before}{START}{rows}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
