"""Convert a model of Hugging Face, continue its training on tp 2, and give it back.

All steps are words of the command ``kenotron``; the model is made here, so nothing is downloaded.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

MODEL = LlamaConfig(
    vocab_size=257, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=256,
    eos_token_id=256, pad_token_id=None,
)  # fmt: skip
TEXT = b"def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def __init__(self):\n"
"""Bytes are the tokens."""


def kenotron(folder: Path, *words: str) -> str:
    """Run a word of the command; what it printed."""
    command = [sys.executable, "-m", "kenotron_command", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"kenotron {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def read(model: Path) -> tuple[torch.Tensor, float]:
    """Logits (1, S, V) of TEXT, and its loss, as transformers computes them."""
    tokens = torch.tensor([list(TEXT)])
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(model)(tokens, labels=tokens)
    return found.logits, float(found.loss)


def train(folder: Path, steps: int) -> list[float]:
    """Continue from the weights in ``imported`` on two ranks. Returns the losses."""
    model = json.loads(kenotron(folder, "convert", "config", "--hf", "theirs"))
    keys = {
        "parallelism.tp": 2, "tokens.train_steps": steps, "checkpoints.checkpoint_interval": steps,
        "model.init_method": {"path": "imported"}, "model.model_config": model,
        "tokens.sequence_length": 128, "optimizer.learning_rate_scheduler.lr_warmup_steps": 2,
    }  # fmt: skip
    changes = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    kenotron(folder, "train", *(word for each in changes for word in ("--set", each)))
    lines = (folder / "checkpoints/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["lm_loss"] for line in lines]


def draw(losses: Sequence[float], ends: tuple[float, float], file: str) -> None:
    """Draw the losses of the training, and transformers' before and after."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kenotron", "font.size": 11}
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=2, label="training on tp 2")
    axes.plot([1, len(losses)], ends, "o", color="#d9661f", label="transformers, on one text")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="From Hugging Face and back")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def main(steps: int, file: str) -> None:
    """Make, convert, compare, train, export, compare and draw."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        LlamaForCausalLM(MODEL).save_pretrained(folder / "theirs")
        print(kenotron(folder, "convert", "hf-to-kenotron", "--hf", "theirs", "--out", "imported"))
        kenotron(folder, "convert", "kenotron-to-hf", "--ckpt", "imported", "--out", "same")
        (theirs, before), (same, _) = read(folder / "theirs"), read(folder / "same")
        print(f"converted and back: logits differ by {(theirs - same).abs().max():.0e}")
        assert torch.equal(theirs, same)
        losses = train(folder, steps)
        export = ("convert", "kenotron-to-hf", "--ckpt", "checkpoints", "--out", "ours")
        print(kenotron(folder, *export))
        _, after = read(folder / "ours")
    print(f"transformers' loss of a text: {before:.3f} -> {after:.3f}")
    assert after < before
    draw(losses, (before, after), file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="hugging_face.svg", help="the picture")
    given = parser.parse_args()
    main(given.steps, given.out)
