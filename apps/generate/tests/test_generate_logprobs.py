"""Log-probabilities of prompts and texts: those of transformers, on every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from kenotron_generate.cli import main

PROMPTS = ("abc", "the second is longer")


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", ("--tp", "2", "--pp", "2")), ("starcoder2", ("--cp", "2")), ("mamba", ())],
    ids=str,
)
def test_they_are_those_of_transformers(name: str, layout: tuple[str, ...], tmp_path: Path) -> None:
    folder, out = tiny.write_model(tmp_path / "model", name), tmp_path / "out.jsonl"
    words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    words += ["--max-new-tokens", "5", "--temperature", "1.5", "--no-check", "--logprobs", "3"]
    assert main(["--ckpt-path", str(folder), *words, "--jsonl", str(out), *layout]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for result in map(json.loads, out.read_text().splitlines()):
        assert result["bits"] is None  # no training in the reproducible mode
        text = torch.tensor([result["prompt_token_ids"] + result["tokens"]])
        with torch.no_grad():
            want = model(text).logits[0, :-1].float().log_softmax(-1)
        own = [*result["prompt_logprobs"], *result["logprobs"]]
        best = [*result["prompt_top_logprobs"], *result["top_logprobs"]]
        assert own[0] is None and best[0] is None
        assert len(result["prompt_logprobs"]) == result["prompt_tokens"]
        assert own[1:] == pytest.approx(
            want.gather(1, text[0, 1:, None])[:, 0].tolist(), rel=1e-4, abs=1e-4
        )
        values, ids = want.topk(3)
        assert [[token for token, _ in each] for each in best[1:]] == ids.tolist()
        found = torch.tensor([[logprob for _, logprob in each] for each in best[1:]])
        assert torch.allclose(found, values, rtol=1e-4, atol=1e-4)


def test_flags_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, told in (
        (["--logprobs", "-1", "--jsonl", "-"], "--logprobs -1: give a number of likeliest tokens"),
        (["--logprobs", "0"], "--logprobs 0: log-probabilities are written as JSON lines: give"),
    ):
        assert main(["--ckpt-path", "/nowhere", *flags]) == 1
        assert told in capsys.readouterr().err
