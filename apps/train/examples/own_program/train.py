"""A program of one's own: its model (no attention), its data, and a look at every tenth step."""

import sys

import torch
from torch import Tensor, nn

from kenotron_config import Config
from kenotron_dist import Mesh, declare_roles, shutdown
from kenotron_engine import StepResult
from kenotron_models import Context
from kenotron_train import STOPPED, LifeCycle, OwnData, train
from kenotron_train.assemble import TrainingRun
from kenotron_train.progress import Progress


class Window(nn.Module):
    """Tokens (T,) -> features (T, D): each sees itself and the three before it in its text."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(vocab, width, device="meta") for _ in range(4))

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """Add what each place has to say."""
        places = context.positions_BS.flatten()
        seen = [(places >= i)[:, None] * f(tokens.roll(i)) for i, f in enumerate(self.tables)]
        return torch.stack(seen).sum(0).relu()


class Head(nn.Module):
    """Features (T, D) -> logits (T, V)."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, vocab, bias=False, device="meta")
        declare_roles(self.project, weight="output")  # optimizers and first values ask for roles

    def forward(self, features: Tensor, context: Context) -> Tensor:
        """One product."""
        return self.project(features)


def layers(config: Config, mesh: Mesh) -> list[tuple[str, nn.Module]]:
    """The model, for any number of pipeline stages up to two."""
    vocab, width = config.decoder.vocab_size, config.decoder.hidden_size
    return [("window", Window(vocab, width)), ("head", Head(vocab, width))]


class Watch(LifeCycle):
    """Says how far off the model is."""

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """On the first rank."""
        if training.mesh.rank == 0 and progress.step % 10 == 0:
            print(f"step {progress.step}: {result.loss:.2f} nats off", flush=True)


def sample(i: int) -> list[int]:
    """Squares, from a place of their own."""
    return [(i * 7 + j * j) % 50 for j in range(33)]


if __name__ == "__main__":
    try:
        data = OwnData(sample, samples=500)
        outcome = train(sys.argv[1], model=layers, loader=data, hooks=[Watch()])
        sys.exit(STOPPED if outcome.stopped else 0)  # so launchers see that it can be resumed
    finally:
        shutdown()
