"""A layout against one process: the same steps on both, compared number by number.

One process follows the layout: it computes loss and gradient by itself, and then makes its update
from the layout's gradient. So both have the same weights at every step, no difference grows, and
an optimizer that turns a tiny gradient's sign into a whole update cannot hide or feign a fault.
"""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np

from kenotron_config import Config, ExistingCheckpointInitConfig, ParallelismConfig
from kenotron_data import Batch, Corpus, Cursor
from kenotron_dist import Mesh, RankError, spawn
from kenotron_dist.diagnosis import watch
from kenotron_dist.placement import named_parameters
from kenotron_engine import (
    GRADIENT_TOLERANCE,
    Piece,
    Whole,
    differences,
    gradient_bounds,
    join_pieces,
    replica_deviations,
    slice_pieces,
    training_step,
    weight_pieces,
    write_slices,
)
from kenotron_models import TransformersSpec
from kenotron_optim import Slices
from kenotron_train.assemble import TrainingRun, build_training, data_plan
from kenotron_train.data.stage_dataset import open_loader
from kenotron_train.verify.measured import (
    Check,
    ComparedStep,
    Departure,
    Findings,
    Measured,
)
from kenotron_train.verify.plain_transformers import draw, measure_plain, updates_by_torch
from kenotron_train.verify.shrink import on_one_process
from kenotron_train.verify.synthetic_tokens import MadeUpTokens

ROUNDING = 2.0**-23
"""Largest distance of two neighbouring float32 numbers, in their size."""
DEPTH = 8
"""Decoder layers from which on roundings are allowed in proportion to them."""
UPDATES = "updated weights"
PRELOAD = (__name__,)
PLAIN = measure_plain.__module__
LIMIT = timedelta(minutes=5)
"""Longest time that a rank may let others wait: compiling takes a while."""


def measure(
    mesh: Mesh, config: Config, documents: bool, forced: list[Whole] | None = None
) -> Measured:
    """Train all steps of a small config on made-up tokens, and keep everything.

    ``forced``: gradients that updates are made from, step by step, in place of its own, which are
    reported. Collective over the mesh.
    """
    vocabulary, sequence = config.decoder.vocab_size, config.tokens.sequence_length
    seed = config.data_stages[0].data.seed
    corpus = Corpus(MadeUpTokens(vocabulary, sequence, seed, documents))
    with watch(mesh, limit=LIMIT), open_loader(data_plan(config), mesh, corpus, Cursor()) as loader:
        training = build_training(config, mesh)
        if isinstance(config.model.init_method, ExistingCheckpointInitConfig):
            draw(training, seed)
        initial = weight_pieces(training)
        given = [None] * config.tokens.train_steps if forced is None else forced
        steps = [
            _step(training, next(loader), number, gradient)
            for number, gradient in enumerate(given, start=1)
        ]
    layouts, held = training.model.layouts, named_parameters(training.model.stack)
    still = (path for path, values in held.items() if not values.requires_grad)
    return Measured(initial, steps, frozenset(layouts[path].name for path in still))


def _step(training: TrainingRun, batch: Batch, number: int, forced: Whole | None) -> ComparedStep:
    pieces: list[Piece] = []
    norms: list[float] = []

    def look(slices: Slices) -> None:
        pieces.extend(slice_pieces(training, slices))
        if forced is not None:
            norms.append(training.norm(slices).item())
            write_slices(training, slices, forced)

    result = training_step(training, batch, number, look=look)
    return ComparedStep(result.loss, [*norms, result.grad_norm][0], pieces, weight_pieces(training))


def layout_gradients(layout: list[Measured]) -> list[Whole]:
    """The whole gradient of every step from what all ranks measured.

    Raises ValueError for a tensor of which some part, or all, has none.
    """
    count = len(layout[0].steps)
    found = [join_pieces([m.steps[i].gradient for m in layout], check=False) for i in range(count)]
    names = {name for m in layout for name, *_ in m.initial if name not in m.frozen}
    for whole in found:
        if missing := sorted(names - whole.keys()):
            raise ValueError(f"no rank has a gradient of {', '.join(missing)}")
    return found


def allowed(sizes: ParallelismConfig, layers: int, *, compiled: bool) -> float:
    """Largest relative deviation of what is added up in another order; 0 where nothing is.

    A pipeline alone only places layers elsewhere.
    """
    if sizes.dp == sizes.cp == sizes.tp == 1 and not compiled:
        return 0.0
    return _reordered(layers)


def _reordered(layers: int) -> float:
    """Return the relative deviation of what is added up in another order in so many layers."""
    return GRADIENT_TOLERANCE * max(1.0, layers / DEPTH)


def compare(layout: list[Measured], one: Measured, relative: float) -> list[Check]:
    """All checks in order, up to the first step in which one fails.

    Arguments: what the ranks of the layout measured; what one process did, with the layout's
    gradients for its updates; how much they may deviate (``allowed``), 0: not by a bit. Raises
    ValueError where one process itself finds nan or inf.
    """
    # Initial weights are equal to the bit.
    before = join_pieces([one.initial])
    pieces = [rank.initial for rank in layout]
    found = [_tensors(0, "initial weights", pieces, before, dict.fromkeys(before, 0.0))]
    # Each step: loss and norm, gradients, weights after the same update; a failure ends it.
    for i, own in enumerate(one.steps):
        if not all(check.passed for check in found):
            break
        _check_finite(i + 1, own)
        ranks = [rank.steps[i] for rank in layout]
        found += _numbers(i + 1, ranks, own, relative)
        gradient = join_pieces([own.gradient])
        bounds = gradient_bounds(gradient, relative)
        pieces = [rank.gradient for rank in ranks]
        found.append(_tensors(i + 1, "gradients", pieces, gradient, bounds))
        after = join_pieces([own.weights])
        bounds = update_bounds(before, after, i + 1, relative)
        pieces = [rank.weights for rank in ranks]
        found.append(_tensors(i + 1, UPDATES, pieces, after, bounds))
        before = after
    return found


def compare_with_one(small: Config, documents: bool, threads: int, bound: float) -> Findings:
    """Return all checks, or why the layout did not run.

    The layout of ``small`` and one process are started, one after the other; ``documents``: samples
    are of several documents; ``bound``: see ``allowed``. Raises ValueError where one process cannot
    train it.
    """
    sizes = small.parallelism
    try:
        layout = spawn(
            measure, small, documents, pp=sizes.pp, dp=sizes.dp, cp=sizes.cp, tp=sizes.tp,
            ep=sizes.ep, preload=PRELOAD, threads=threads,
        )  # fmt: skip
    except RankError as error:
        return Findings(broken=str(error))
    try:
        gradients = layout_gradients(layout)
    except ValueError as error:
        return Findings(broken=f"its gradients are not whole: {error}")
    one = on_one_process(small)
    try:
        alone = spawn(measure, one, documents, gradients, preload=PRELOAD, threads=threads)[0]
    except RankError as error:
        raise ValueError(f"one process cannot train the small copy: {error}") from error
    found = compare(layout, alone, bound)
    if not isinstance(small.decoder, TransformersSpec) or small.model.adapter is not None:
        return Findings(found)
    plain = _plain(one, documents, alone, gradients, threads)
    checks = compare(layout, plain, _reordered(small.decoder.depth))
    checks = [each for each in checks if each.step]  # not of what it got
    if not updates_by_torch(one):
        checks = [each for each in checks if each.what != UPDATES]
    losses = zip(layout[0].steps, plain.steps, strict=True)
    return Findings(
        found, plain=checks, curve=[(ours.loss, theirs.loss) for ours, theirs in losses]
    )


def _plain(
    one: Config, documents: bool, alone: Measured, gradients: list[Whole], threads: int
) -> Measured:
    """Return what transformers' own model makes of the same steps."""
    weights = [join_pieces([each]) for each in (alone.initial, *(s.weights for s in alone.steps))]
    try:
        return spawn(
            measure_plain, one, documents, weights, gradients,
            preload=(PLAIN,), threads=threads,
        )[0]  # fmt: skip
    except RankError as error:
        raise ValueError(f"transformers' own model of the small copy: {error}") from error


def _check_finite(step: int, own: ComparedStep) -> None:
    if not (math.isfinite(own.loss) and math.isfinite(own.norm)):
        raise ValueError(
            f"step {step}: one process itself has a loss of {own.loss:g} and a gradient of norm "
            f"{own.norm:g}, so there is nothing to compare with: lower "
            "optimizer.learning_rate_scheduler.learning_rate, or compare fewer --steps"
        )


def update_bounds(
    before: Whole, after: Whole, steps: int, relative: float = GRADIENT_TOLERANCE
) -> dict[str, float]:
    """Return the bound on every element's deviation after an update from the same gradient.

    ``relative`` of the tensor's largest change, and a rounding of its largest element for every
    step.
    """
    moved, rounding = differences(after, before), steps * ROUNDING if relative else 0.0
    return {
        name: float(relative * moved[name] + rounding * np.abs(values).max())
        for name, values in after.items()
    }


def _numbers(
    step: int, ranks: list[ComparedStep], own: ComparedStep, relative: float
) -> list[Check]:
    """Loss and norm: the rank that deviates most counts."""
    pairs = {
        "loss": ([rank.loss for rank in ranks], own.loss),
        "gradient norm": ([rank.norm for rank in ranks], own.norm),
    }
    return [
        Check(step, what, max(_relative(value, want) for value in got), relative)
        for what, (got, want) in pairs.items()
    ]


def _relative(a: float, b: float) -> float:
    """|a - b| / |b|; infinity where that is no number."""
    if a == b:
        return 0.0
    value = abs(a - b) / abs(b) if b else float("inf")
    return value if value == value else float("inf")


def _tensors(
    step: int, what: str, ranks: list[list[Piece]], want: Whole, bounds: dict[str, float]
) -> Check:
    """Every rank's pieces against whole tensors."""
    found = dict.fromkeys(want, float("inf")) | replica_deviations(ranks, want)
    departures = [
        Departure(name, found[name], bounds[name]) for name in want if found[name] > bounds[name]
    ]

    def share(name: str) -> float:
        return found[name] / bounds[name] if bounds[name] else found[name]

    worst = max(want, key=share)
    return Check(step, what, found[worst], bounds[worst], worst, departures)
