"""Log-probabilities that ``generate`` reports: the bits of a training forward in the mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grid_bits
import pytest
import torch
from grid import Row
from grid_run import measure, write_documents

from kenotron_data import Batch
from kenotron_dist import Mesh
from kenotron_engine import batch_losses
from kenotron_generate.cli import main
from kenotron_train.evaluate.cli import read_model

STEPS, PROMPTS = 2, ("step 3", "m", "mesh axis")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logprobs")
    write_documents(folder)
    row = Row(arch="qwen3", tied=True, layers=6, dtype="bf16")
    measure(row, folder, "run", STEPS, keys=grid_bits.keys(row))
    return folder / "run" / str(STEPS)


def scored(checkpoint: Path, *flags: str, prompts: tuple[str, ...] = PROMPTS) -> list[dict]:
    out = checkpoint.parent / "out.jsonl"
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    words = ("--temperature", "0", "--max-new-tokens", "7", "--logprobs", "2", "--jsonl", str(out))
    assert main(["--ckpt-path", str(checkpoint), *words, *given, *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def losses_of(checkpoint: Path, result: dict[str, Any]) -> list[float]:
    """Losses of the tokens of a result, in a sample of the training's length."""
    model, remark = read_model(checkpoint, Mesh.connect(), threads=torch.get_num_threads())
    assert not remark
    text = [*result["prompt_token_ids"], *result["tokens"]]
    whole = torch.zeros(1, 1, 17, dtype=torch.int64)
    whole[0, 0, : len(text)] = torch.tensor(text)
    batch = Batch(
        whole[..., :-1], whole[..., 1:], torch.arange(16)[None, None], torch.zeros(1, 1).long()
    )
    return batch_losses(model, batch)[0, : len(text) - 1].tolist()


def test_they_have_the_bits_of_a_training_forward(checkpoint: Path) -> None:
    results = scored(checkpoint, "--batch-size", "1")
    for result in results:
        assert result["bits"] == "training" and result["prompt_logprobs"][0] is None
        own = [*result["prompt_logprobs"][1:], *result["logprobs"]]
        assert len(own) == result["prompt_tokens"] + 6
        assert own == [-loss for loss in losses_of(checkpoint, result)]
        for token, best, logprob in zip(
            result["tokens"], result["top_logprobs"], result["logprobs"], strict=True
        ):
            assert len(best) == 2 and best[0][1] >= best[1][1] and [token, logprob] in best
    assert scored(checkpoint, "--tp", "2", "--pp", "2", "--batch-size", "3") == results
    # Without a cache, and with texts that another prompt begins.
    longer = (*PROMPTS, "step 3 of")
    *same, split = scored(checkpoint, "--dp", "2", "--no-cache", prompts=longer[1:])
    assert [each["logprobs"] for each in same] == [each["logprobs"] for each in results[1:]]
    assert split["prompt_logprobs"][:6] == results[0]["prompt_logprobs"]
    cut = scored(checkpoint, "--cp", "2")
    told = "not the bits of the training, since cp 2 does not divide the 1 virtual chunks"
    assert all(each["bits"] == told for each in cut)
    for result, other in zip(results, cut, strict=True):
        assert other["logprobs"] == pytest.approx(result["logprobs"], rel=0.05)


def test_what_cannot_be_scored_is_refused(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--ckpt-path", str(checkpoint), "--prompt", "step 3", "--jsonl", "-"]
    for flags, told in (
        (["--logprobs", "0", "--max-new-tokens", "12"], "--logprobs: prompt 0 has 6 tokens, and"),
        (["--logprobs", "258", "--max-new-tokens", "1"], "--logprobs 258: the vocabulary has 257"),
    ):
        assert main([*words, *flags]) == 1
        assert told in capfd.readouterr().err
