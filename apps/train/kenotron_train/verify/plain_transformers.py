"""transformers' own model in plain torch, on the steps that a layout has made.

Nothing of this repository computes here but the batches, the groups of parameters and the learning
rates: the model is ``AutoModelForCausalLM``, the loss ``cross_entropy``, the update AdamW of torch.
As in ``comparison`` each update is made from the layout's gradient.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kenotron_config import Config
from kenotron_data import Batch, Corpus, Cursor
from kenotron_dist import Mesh
from kenotron_dist.boxes import local_boxes, view_of
from kenotron_engine import Piece, Whole
from kenotron_models import TransformersSpec, plain_model, transformers_names
from kenotron_optim import AdamWConfig, learning_rate
from kenotron_train.assemble import TrainingRun, build_training, data_plan
from kenotron_train.data.stage_dataset import open_loader
from kenotron_train.verify.measured import ComparedStep, Measured
from kenotron_train.verify.synthetic_tokens import MadeUpTokens

MOVED = 0.05
"""Standard deviation of what is added to the draws of transformers."""
WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of a model that hold the weight of its balance loss."""


def measure_plain(
    mesh: Mesh, config: Config, documents: bool, weights: list[Whole], forced: list[Whole]
) -> Measured:
    """Train all steps of a small config of one process with transformers and torch alone.

    Args:
        mesh: of one process.
        config: the small one.
        documents: samples are of several documents.
        weights: before the first step, and after each one.
        forced: gradients that updates are made from, step by step.
    """
    spec = cast(TransformersSpec, config.decoder)
    seed = config.data_stages[0].data.seed
    sequence = config.tokens.sequence_length
    corpus = Corpus(MadeUpTokens(config.decoder.vocab_size, sequence, seed, documents))
    training, model = build_training(config, mesh), plain_model(spec)
    own = tensors_of(model, spec)
    fill(own, weights[0])
    initial = _pieces(own)
    optimizer = _adamw(training, config, own)
    steps = []
    with open_loader(data_plan(config), mesh, corpus, Cursor()) as loader:
        for number, (gradient, after) in enumerate(zip(forced, weights[1:], strict=True), start=1):
            model.zero_grad(set_to_none=True)
            loss = _backward(model, spec, next(loader))
            learning = {name: x for name, x in own.items() if x.requires_grad}
            found = {name: _gradient(x) for name, x in learning.items()}
            norm = torch.stack([x.double().norm() for x in found.values()]).norm().item()
            pieces = _pieces(found)
            if optimizer is None:
                fill(own, after)
            else:
                _update(training, optimizer, learning, gradient, number)
            steps.append(ComparedStep(loss, norm, pieces, _pieces(own)))
    return Measured(initial, steps)


def draw(training: TrainingRun, seed: int) -> None:
    """Fill this rank's weights from transformers' own draws, the same on every layout.

    Biases, norms and what begins with zeros are moved, so that each of them matters.
    """
    spec, mesh = cast(TransformersSpec, training.plan.spec), training.mesh
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drawn = tensors_of(plain_model(spec), spec)
        for tensor in drawn.values():
            tensor += MOVED * torch.randn(tensor.shape)
        for tensor, layout in training.first_records().values():
            if layout.name in drawn:  # not an adapter
                view = mesh.view(layout)
                for box in local_boxes(layout, view):
                    place = tuple(
                        slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True)
                    )
                    view_of(tensor, layout, view, box).copy_(drawn[layout.name][place])
    if training.plan.adapter is None:
        training.optimizer.reload()


def updates_by_torch(config: Config) -> bool:
    """Return True where AdamW of torch makes the update of a config."""
    section = config.optimizer
    return isinstance(section.optimizer_factory, AdamWConfig) and section.state_dtype == "float32"


def tensors_of(model: Any, spec: TransformersSpec) -> dict[str, Tensor]:
    """Return its parameters and saved buffers, of any shape, by our logical names."""
    held = model.state_dict(keep_vars=True)
    return {name: held[theirs[0]] for name, theirs in transformers_names(spec).items()}


def fill(own: dict[str, Tensor], weights: Whole) -> None:
    """Overwrite tensors of any shape with weights of the same."""
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(torch.from_numpy(weights[name]))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _pieces(tensors: dict[str, Tensor]) -> list[Piece]:
    return [
        (name, (0,) * x.ndim, x.detach().float().numpy().copy(), tuple(x.shape))
        for name, x in tensors.items()
    ]


def _adamw(
    training: TrainingRun, config: Config, own: dict[str, Tensor]
) -> torch.optim.Optimizer | None:
    """Return AdamW of torch over the groups of a training; None for another update rule."""
    rule = config.optimizer.optimizer_factory
    if not isinstance(rule, AdamWConfig) or not updates_by_torch(config):
        return None
    groups = [
        {
            "params": [own[name] for name in group.names],
            "weight_decay": group.weight_decay,
            "multiplier": group.lr_multiplier,
        }
        for group in training.groups
    ]
    betas = (rule.adam_beta1, rule.adam_beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=rule.adam_eps)


def _update(
    training: TrainingRun,
    optimizer: torch.optim.Optimizer,
    learning: dict[str, Tensor],
    gradient: Whole,
    step: int,
) -> None:
    """Make the update of a step from a gradient that is given."""
    for name, parameter in learning.items():
        parameter.grad = torch.from_numpy(gradient[name].copy())
    if (most := training.optim.clip_grad) is not None:
        torch.nn.utils.clip_grad_norm_(learning.values(), most)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, training.schedule) * group["multiplier"]
    optimizer.step()


def _backward(model: Any, spec: TransformersSpec, batch: Batch) -> float:
    """Return the mean loss of the targets of a global batch, without balance and z-losses.

    The gradients of all of them are added up.
    """
    targets = int((batch.labels_MBS != -100).sum())
    total, straight = 0.0, torch.arange(batch.tokens_MBS.shape[-1])
    for m in range(len(batch)):
        ids, positions = batch.tokens_MBS[m], batch.positions_MBS[m]
        places: dict[str, Tensor] = {}
        if not torch.equal(positions, straight.expand_as(positions)):
            places["position_ids"] = positions
            if not spec.documents:  # without a mask they separate documents
                places["attention_mask"] = torch.ones_like(ids)
        made = model(input_ids=ids, use_cache=False, **places)
        logits = made.logits.float()
        loss = cross_entropy(logits.flatten(0, 1), batch.labels_MBS[m].flatten(), reduction="sum")
        whole = loss / targets
        if spec.z_loss:
            z = logits.flatten(0, 1).logsumexp(-1)[batch.labels_MBS[m].flatten() != -100]
            whole = whole + spec.z_loss * z.square().sum() / targets
        if spec.balances:
            weight = next(x for name in WEIGHTS if (x := getattr(model, name, None)) is not None)
            whole = whole + made.aux_loss * weight * ids.numel() / batch.tokens_MBS.numel()
        whole.backward()
        total += float(loss.detach())
    return total / targets
