"""A pipeline schedule of one's own: 1F1B that keeps more micro-batches on their way.

1F1B waits for every transfer twice, there and back. A rank that has begun more micro-batches has
work meanwhile, for the memory of their activations.
"""

import torch
from torch import Tensor, nn

from kenotron_dist import Mesh, spawn
from kenotron_pp import (
    Action,
    Pipeline,
    Schedule,
    Stages,
    Times,
    draw_text,
    one_f_one_b,
    simulate,
)

LAYERS, WIDTH, MICROBATCHES = 4, 8, 8


def order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """What one rank does: forwards for the way down and back, then forward and backward in turn."""
    ahead = min(2 * (ranks - 1 - rank), microbatches)
    actions = [Action("F", i) for i in range(ahead)]
    for i in range(ahead, microbatches):
        actions += [Action("F", i), Action("B", i - ahead)]
    return actions + [Action("B", i) for i in range(microbatches - ahead, microbatches)]


eager = Schedule("eager-1f1b", order)


def gradients(mesh: Mesh, schedule: Schedule) -> list[Tensor]:
    """Train four layers once; the gradients of this rank's, from the same seed everywhere."""
    torch.manual_seed(0)
    layers = [(str(i), nn.Linear(WIDTH, WIDTH)) for i in range(LAYERS)]
    inputs = list(torch.randn(MICROBATCHES, 3, WIDTH))
    stages = Stages.balanced(layers, [1.0] * LAYERS, mesh["pp"].size, schedule)
    own = [layer for _, layer in stages.own(layers, mesh["pp"].rank)]
    Pipeline(own, mesh["pp"], schedule, pairs=mesh.pairs("pp")).run(
        inputs, lambda y, _: y.square().mean()
    )
    parameters = [each for layer in own for each in layer.parameters()]
    return [each.grad for each in parameters if each.grad is not None]


if __name__ == "__main__":
    for schedule in (one_f_one_b, eager):
        trace = simulate(schedule, 4, MICROBATCHES, Times(transfer=0.5))  # proof, without processes
        print(f"{schedule.name}: {trace}\n{draw_text(trace)}\n")
    one = spawn(gradients, eager)[0]
    four = [each for rank in spawn(gradients, eager, pp=4) for each in rank]
    assert all(map(torch.equal, one, four))
    print("4 processes have the gradients of one, bit for bit")
