"""A whole training in one file: a Llama, from its blocks to its loss curve, on pp x dp x tp ranks.

    python train.py --pp 2 --dp 2 --tp 2 --steps 50    # eight processes of this machine
    python train.py --steps 100                        # one process resumes where they ended
    torchrun --nproc-per-node 4 train.py --dp 4        # any launcher
    python train.py --check                            # layouts of two have the losses of one

The losses are the same on every layout, up to rounding. Only Kénotron's packages are used: read
from ``main`` on, then what interests you in theirs. Checkpoints go to ./one_file, and a run resumes
from the newest; to start from scratch, delete it. Sizes that fit: dp and tp 1, 2 or 4, pp up to 7.

Shapes: T tokens of a micro-batch, V vocabulary; ``/t`` is divided by tp size.
"""

import argparse
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kenotron_ckpt import Checkpoint, Saver, has_manifests, read_preferred
from kenotron_data import Batch, Cursor, Loader, builtin_documents, custom_loader
from kenotron_dist import Mesh, MeshConfig, all_reduce, shutdown, start
from kenotron_dist.init import initialize
from kenotron_dist.placement import TensorLayout, named_parameters, parameter_layouts, tie_storages
from kenotron_models import (
    Build,
    Context,
    DecoderSpec,
    LayerStack,
    build_decoder,
    layer_costs,
    standard_init,
)
from kenotron_models.layers import AttentionSpec, BlockSpec, MLPSpec, NormSpec, Rope
from kenotron_optim import (
    GlobalNorm,
    GradAccumulator,
    LRSchedule,
    LRSchedulerConfig,
    SlicedOptimizer,
    clip_coefficient,
    learning_rate,
    parameter_groups,
)
from kenotron_pp import Pipeline, Stages, one_f_one_b
from kenotron_tp import cross_entropy

SEED, FOLDER = 42, Path("one_file")
SEQUENCE, ROWS, MICROBATCHES = 64, 16, 4  # rows of a global batch, and in how many parts it comes
SCHEDULE = LRSchedule.from_config(
    LRSchedulerConfig(learning_rate=3e-3, lr_warmup_steps=10, min_decay_lr=3e-4), train_steps=200
)


def llama(layers: int = 4, width: int = 64) -> DecoderSpec:
    """Say what the model is made of: blocks of attention and a gated MLP, each behind a norm."""
    norm = NormSpec(kind="rms_norm", eps=1e-5)
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=width // 4, rope=Rope(theta=10_000.0))
    block = BlockSpec(mixer=attention, feed_forward=MLPSpec(features=3 * width), norm=norm)
    return DecoderSpec(
        hidden_size=width,
        vocab_size=256,  # bytes
        max_position_embeddings=SEQUENCE,
        blocks=(block,) * layers,
        norm=norm,
        tie_word_embeddings=True,
    )


@dataclass(frozen=True)
class Training:
    """What a rank has of the model, and what updates it."""

    mesh: Mesh
    pipeline: Pipeline
    grads: GradAccumulator
    norm: GlobalNorm
    optimizer: SlicedOptimizer
    parameters: dict[str, tuple[Tensor, TensorLayout]]
    """This stage's parameters with their layouts, as checkpoints want them."""


def build(mesh: Mesh) -> Training:
    """Cut the model over the mesh and fill it from the seed. Collective."""
    spec, stage = llama(), mesh["pp"].rank
    # 1. All layers in order, on the meta device: shapes without memory. Each is cut over tp.
    layers = build_decoder(spec, Build(mesh["tp"]))
    # 2. Consecutive layers make the stages of the pipeline; the tied head may be on another stage
    #    than the embedding. A layout says of a tensor which rank has what part of it.
    stages = Stages.balanced(layers, layer_costs(spec), mesh["pp"].size, one_f_one_b)
    layouts = parameter_layouts(LayerStack(layers), mesh.sizes, stages.of_parameter)
    # 3. Memory for this stage alone. First values are a function of seed, name and index.
    own = LayerStack(stages.own(layers, stage))
    own.to_empty(device=mesh.device)
    tie_storages(own)
    initialize(own, layouts, mesh.view, seed=SEED, initializer=standard_init(spec, std=0.02))
    # 4. The pipeline calls forward and backward; hooks add the gradients up in fp32.
    others = [mesh["tp"], mesh["dp"], mesh.world]  # where ranks wait when one of them fails
    pipeline = Pipeline(
        stages.chunks(layers, stage),
        mesh["pp"],
        one_f_one_b,
        mesh.device,
        pairs=mesh.pairs("pp"),
        closes=others,
    )
    grads = GradAccumulator(named_parameters(own), layouts, mesh)
    # 5. Each data rank updates its slices of the parameters (ZeRO-1) and sends them to the others.
    groups = parameter_groups(grads.names, 0.1, exclude_kinds=["norms"], layouts=layouts)
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), foreach=False)
    optimizer = SlicedOptimizer(grads, adamw, groups, stage=1)
    parameters = {
        layouts[path].name: (parameter.detach(), layouts[path])
        for path, parameter in named_parameters(own).items()
    }
    return Training(mesh, pipeline, grads, GlobalNorm(grads), optimizer, parameters)


def data(mesh: Mesh, cursor: Cursor) -> Loader:
    """Give this data rank's rows of every global batch, from a cursor on."""
    if ROWS % (MICROBATCHES * mesh["dp"].size):
        raise ValueError(
            f"--dp {mesh['dp'].size}: {ROWS} rows in {MICROBATCHES} micro-batches need 1, 2 or 4"
        )
    text = "".join(builtin_documents(limit=200_000)).encode()
    loader = custom_loader(
        lambda i: list(text[i * SEQUENCE : (i + 1) * SEQUENCE + 1]),
        samples=(len(text) - 1) // SEQUENCE,
        seed=SEED,
        microbatches=MICROBATCHES,
        micro_batch_size=ROWS // MICROBATCHES // mesh["dp"].size,
        dp_rank=mesh["dp"].rank,
        dp_size=mesh["dp"].size,
        cursor=cursor,
    )
    assert isinstance(loader, Loader)  # an iterable would have another kind
    return loader


def training_step(training: Training, batch: Batch, step: int) -> tuple[float, float]:
    """One update; loss and gradient norm of the global batch. Collective."""
    mesh, micros = training.mesh, list(batch)

    def loss_of(logits: Tensor, microbatch: int) -> Tensor:  # (T, V/t), on the last stage
        labels = micros[microbatch].labels_BS.flatten()
        each = cross_entropy(logits, labels, mesh["tp"], vocab_size=256)[0]
        return each.sum() / (ROWS * SEQUENCE)  # sums over micro-batches and ranks are the mean

    training.grads.start(backwards=MICROBATCHES)
    loss = training.pipeline.run(
        [micro.tokens_BS.flatten() for micro in micros],
        loss_of,
        [Context(micro.positions_BS) for micro in micros],
    )
    slices = training.grads.finish()  # this rank's part of the summed gradient
    norm = training.norm(slices)
    training.optimizer.step(
        slices, learning_rate(step, SCHEDULE), coefficient=clip_coefficient(norm, 1.0)
    )
    return all_reduce(loss, mesh["dp"]).item(), float(norm)


def resume(training: Training) -> tuple[int, Cursor]:
    """Load the newest checkpoint that is whole, of whatever layout: its step and cursor."""
    if not has_manifests(FOLDER):
        return 0, Cursor()

    def read(checkpoint: Checkpoint) -> tuple[int, Cursor]:
        checkpoint.load(training.parameters)
        checkpoint.load(training.optimizer.wanted())  # after them: fp32 masters are parameters
        state = checkpoint.manifest.state
        training.optimizer.steps = state["step"]
        training.optimizer.publish()
        return state["step"], Cursor.from_dict(state["cursor"])

    return read_preferred(FOLDER, training.mesh, read)


def main(mesh: Mesh, steps: int) -> list[float]:
    """Train up to a step, print the curve, save at its end: the losses. Runs on every rank."""
    training = build(mesh)
    done, cursor = resume(training)
    losses = []
    with data(mesh, cursor) as loader, Saver(FOLDER, mesh, every=50, keep=2) as saver:
        for step in range(done + 1, steps + 1):
            saver.wait()  # what is being saved has been copied: parameters may change
            loss, norm = training_step(training, next(loader), step)
            losses.append(loss)
            if mesh.rank == 0:
                print(f"step {step:4}  loss {loss:.4f}  norm {norm:.3f}", flush=True)
            if step == steps or saver.due(step):
                tensors = training.parameters | training.optimizer.state()
                saver.save(step, tensors, {"step": step, "cursor": loader.cursor.to_dict()})
    return losses


def fresh(mesh: Mesh, folder: str, steps: int) -> list[float]:
    """Train in an empty folder. Runs on every rank."""
    os.chdir(folder)
    return main(mesh, steps)


def check(steps: int = 4) -> None:
    """Compare the losses of layouts of two processes with those of one."""
    one: list[float] = []
    for layout in (MeshConfig(), MeshConfig(tp=2), MeshConfig(pp=2), MeshConfig(dp=2)):
        with tempfile.TemporaryDirectory() as folder:
            losses = start(fresh, folder, steps, config=layout)
        one = one or losses
        apart = max(abs(a - b) for a, b in zip(one, losses, strict=True))
        assert apart < 2e-4, f"{layout}: a loss is {apart} from that of one process"
        print(f"{layout}: losses within {apart:.0e} of one process", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, size in (("pp", 1), ("dp", 1), ("tp", 1), ("steps", 100)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--check", action="store_true", help="compare layouts, and end")
    given = parser.parse_args()
    layout = MeshConfig(pp=given.pp, dp=given.dp, tp=given.tp)
    try:
        check() if given.check else start(main, given.steps, config=layout)
    finally:
        shutdown()
