"""A Llama and its training step, built on the libraries as apps/train builds its own.

Shapes: M micro-batches, B rows of one, S sequence, T = B * S tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_items import Setting
from torch import Tensor, nn

from kenotron_dist import Mesh, all_reduce
from kenotron_dist.init import initialize
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    Recompute,
    build_decoder,
    compile_layers,
    layer_costs,
    standard_init,
    training_flops,
)
from kenotron_models.families import LlamaConfig
from kenotron_optim import (
    AdamWConfig,
    GlobalNorm,
    GradAccumulator,
    SlicedOptimizer,
    clip_coefficient,
    decay_groups,
    update_rule,
)
from kenotron_pp import Pipeline, Schedule, Stages, one_f_one_b
from kenotron_tp import TPMode, cross_entropy

SHAPES: dict[str, dict[str, int]] = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "8b-wide": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 509,
    },
}  # fmt: skip
"""Llama-3.2-1B's shape, 16 layers of Llama-3-8B's width, and one for checks."""
SEQUENCE = 4096
TOY_SEQUENCE = 32


def llama(setting: Setting, shape: str, *, layers: int | None = None) -> LlamaConfig:
    """Return the config of a shape; a dry run gets the tiny one, with 2 layers for large ones."""
    sizes = dict(SHAPES[setting.pick(shape, "tiny")])
    depth = layers or sizes["num_hidden_layers"]
    sizes["num_hidden_layers"] = depth if shape == "tiny" else setting.pick(depth, 2)
    return LlamaConfig(**sizes, max_position_embeddings=sequence(setting), rope_theta=500000.0)


def sequence(setting: Setting) -> int:
    """Return the tokens of a row: 4096, or a few in a dry run."""
    return setting.pick(SEQUENCE, TOY_SEQUENCE)


@dataclass(frozen=True)
class Micro:
    """Tokens and labels (B, S) of one micro-batch of this data rank, int64."""

    tokens_BS: Tensor
    labels_BS: Tensor


def draw_batch(
    config: LlamaConfig, mesh: Mesh, *, micros: int, rows: int, length: int, seed: int
) -> list[Micro]:
    """Return this rank's part of a global batch of random tokens, the same for every layout.

    Args:
        config: has the vocabulary.
        mesh: its dp ranks share the rows.
        micros: M.
        rows: rows of one micro-batch over all data ranks.
        length: S.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (micros, rows, length + 1), generator=generator)
    data = mesh["dp"]
    own = ids.view(micros, data.size, rows // data.size, length + 1)[:, data.rank]
    own = own.to(mesh.device)
    return [Micro(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in own]


def fill_on_device(module: nn.Module, std: float = 0.02) -> None:
    """Fill weights where they are: matrices from N(0, std^2), gains of norms with 1.

    The library's own initialisation draws on the host: 112 s for 8 B parameters.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
            else:
                parameter.fill_(1.0)


def positions(batch: Micro) -> Tensor:
    """Return positions (B, S) of whole rows."""
    rows, length = batch.tokens_BS.shape
    return torch.arange(length, device=batch.tokens_BS.device).expand(rows, length)


class Trainer:
    """This rank's stage of a Llama with its optimizer. Made and stepped alike on all ranks.

    Args:
        config: the model.
        mesh: the layout.
        dtype: of the parameters; masters and gradient buffers are fp32.
        seed: first values from it on the host, the same for every layout; None: on the device.
        compiled: compile the layers.
        recompute: what layers compute again in the backward.
        schedule: of the pipeline.
        mode: how layers that are cut over tp communicate.
        fused: one kernel updates all tensors.
    """

    def __init__(
        self,
        config: LlamaConfig,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        seed: int | None = None,
        compiled: bool = False,
        recompute: Recompute = "none",
        schedule: Schedule = one_f_one_b,
        mode: TPMode = TPMode(),
        fused: bool = True,
    ) -> None:
        self.config, self.mesh = config, mesh
        layers = build_decoder(config, Build(mesh["tp"], mode, dtype=dtype), recompute=recompute)
        costs = layer_costs(config.decoder)
        stages = Stages.balanced(layers, costs, mesh.sizes["pp"], schedule)
        layouts = parameter_layouts(LayerStack(layers), mesh.sizes, stages.of_parameter)
        self.layouts = layouts
        self.stack = LayerStack(stages.own(layers, mesh["pp"].rank))
        self.stack.to_empty(device=mesh.device)
        if seed is None:
            fill_on_device(self.stack)
        else:
            rule = standard_init(config, std=0.02)
            initialize(
                self.stack, layouts, mesh.view, seed=seed, initializer=rule
            )  # fmt: skip
        if compiled:
            compile_layers(self.stack)
        self.head = dict(self.stack.named_modules()).get("head")
        own = [[layer for _, layer in chunk] for chunk in stages.chunks(layers, mesh["pp"].rank)]
        chunks: Any = own if schedule.chunks > 1 else own[0]
        self.pipeline = Pipeline(chunks, mesh["pp"], schedule, mesh.device, mesh.pairs("pp"))
        self.grads = GradAccumulator(named_parameters(self.stack), layouts, mesh)
        self.norm = GlobalNorm(self.grads)
        adam = AdamWConfig(
            adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=fused
        )
        self.optimizer = SlicedOptimizer(
            self.grads, update_rule(adam), decay_groups(self.grads.names, 0.1)
        )

    def step(
        self,
        batch: Sequence[Micro],
        lr: float = 1e-3,
        before_update: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Forward, backward and update; the mean loss of the global batch, not read.

        ``before_update`` is called before any parameter changes: a checkpoint may copy it still.
        """
        slices, loss = self.gradient(batch)
        norm = self.norm(slices)
        before_update()
        self.optimizer.step(
            slices,
            lr,
            coefficient=clip_coefficient(norm, 1.0),
            blocked=~(norm.isfinite() & loss.isfinite()),
        )
        return loss

    def gradient(self, batch: Sequence[Micro]) -> tuple[dict[str, Tensor], Tensor]:
        """Return this rank's slices of the gradient, and the mean loss of the global batch."""
        count = sum(each.labels_BS.numel() for each in batch) * self.mesh["dp"].size

        def loss_of(x: Tensor, micro: int) -> Tensor:
            head, labels = self.head, batch[micro].labels_BS.flatten()
            total, _ = cross_entropy(
                x,
                labels,
                self.mesh["tp"],
                weight=head.weight,
                reduction="sum",
                vocab_size=self.config.vocab_size,
                times=1 / count,
                sequence_parallel=head.sequence_parallel,
            )
            return total

        contexts = [Context(positions(each), to_loss=True) for each in batch]
        self.grads.start(len(batch))
        inputs = [each.tokens_BS.flatten() for each in batch]
        loss = self.pipeline.run(inputs, loss_of, contexts)
        return self.grads.finish(), all_reduce(loss, self.mesh["dp"])

    def records(self) -> dict[str, Any]:
        """Return what a checkpoint holds: key -> (tensor, layout), parameters and state."""
        return self.parameter_records() | self.optimizer.state()

    def parameter_records(self) -> dict[str, Any]:
        """Return this stage's parameters: key -> (tensor, layout)."""
        found = {}
        for path, parameter in named_parameters(self.stack).items():
            found[self.layouts[path].name] = (parameter.detach(), self.layouts[path])
        return found

    def wanted(self) -> dict[str, Any]:
        """Return what ``load`` fills, the optimizer's state included."""
        return self.parameter_records() | self.optimizer.wanted()


class PlainStep:
    """The same layers and head under torch's fused AdamW: what the bare loops do."""

    def __init__(
        self, config: LlamaConfig, mesh: Mesh, batch: Micro, *, compiled: bool = True
    ) -> None:
        layers = build_decoder(config, Build(mesh["tp"], device=mesh.device, dtype=torch.bfloat16))
        self.stack, self.config, self.mesh = LayerStack(layers), config, mesh
        fill_on_device(self.stack)
        if compiled:
            compile_layers(self.stack)
        self.batch, self.positions = batch, positions(batch)
        self.optimizer = torch.optim.AdamW(self.stack.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> None:
        """One training step."""
        x, labels = self.batch.tokens_BS.flatten(), self.batch.labels_BS.flatten()
        context = Context(self.positions, to_loss=True)
        for layer in self.stack:
            x = layer(x, context)
        head = dict(self.stack.named_modules())["head"]
        loss, _ = cross_entropy(
            x,
            labels,
            self.mesh["tp"],
            weight=head.weight,
            reduction="sum",
            vocab_size=self.config.vocab_size,
            times=1 / labels.numel(),
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def step_rates(
    config: LlamaConfig, seconds: float, tokens: int, ceilings: dict[str, float | None]
) -> dict[str, Any]:
    """Return tokens a second and causal MFU of one step, against each ceiling in FLOP/s."""
    flops = training_flops(config, 1, tokens, causal=True)
    found: dict[str, Any] = {"step ms": seconds * 1e3, "tokens/s": tokens / seconds}
    for name, ceiling in ceilings.items():
        found[f"MFU of {name}"] = flops / seconds / ceiling if ceiling else "unknown"
    return found


def parameters_of(module: nn.Module) -> int:
    """Return how many elements the parameters of a module have."""
    return sum(parameter.numel() for parameter in each_once(module.parameters()))


def each_once(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors without those that share the memory of an earlier one."""
    return list({each.data_ptr(): each for each in parameters}.values())
