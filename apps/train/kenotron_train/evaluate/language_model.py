"""A model on any layout as a language model of lm-eval. Imports lm-eval."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kenotron_engine import Row
from kenotron_models import Sampling
from kenotron_train.evaluate.led_passes import LedPasses

MOST_NEW_TOKENS = 256
"""Of a task that does not say how many it generates, as lm-eval has it."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
_SEED = 1234
"""Of sampled texts: lm-eval's seed of torch."""


class LayoutLM(TemplateLM):
    """Answers lm-eval's requests with passes that all ranks make; lives on rank 0.

    Tokens, truncation from the left and windows of long texts are those of lm-eval's class for
    transformers.
    """

    def __init__(self, passes: LedPasses) -> None:
        super().__init__()
        self._passes, self._texts = passes, passes.texts

    @property
    def eot_token_id(self) -> int:
        """Token that stands before a text without a context.

        Raises ValueError where the tokenizer names none.
        """
        if self._texts.begin is None:
            raise ValueError(
                "the tokenizer names no token that begins or ends a text, and the task has texts "
                "without a context: give it a bos_token or an eos_token"
            )
        return self._texts.begin

    @property
    def max_length(self) -> int:
        """Most tokens that the model reads."""
        return self._passes.window

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokens of a text."""
        return self._texts.to_ids(string, add_special_tokens)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation of a text, and whether it is the greedy one."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is the greedy one."""
        for _, _, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"an answer has {len(continuation)} tokens, but the model reads "
                    f"{self.max_length}: raise evaluate.max_length, or leave the task out"
                )
        most = self.max_length + 1  # the last token is not read
        rows = [Row((before + after)[-most:], len(after)) for _, before, after in requests]
        return [(score.logprob, score.greedy) for score in self._passes.score(rows)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each text, read in windows; each token is predicted once."""
        windows, numbers = [], []
        for number, request in enumerate(requests):
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.eot_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for part in map(make_disjoint_window, parts):
                windows.append((None, *part))
                numbers.append(number)
        totals = [0.0] * len(requests)
        for number, (logprob, _) in zip(numbers, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += logprob
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuation of each text, up to the first of the strings that end it."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            _, options = _arguments(request)
            groups.setdefault(json.dumps(options, sort_keys=True), []).append(number)
        found = [""] * len(requests)
        for numbers in groups.values():
            _, options = _arguments(requests[numbers[0]])
            texts = [_arguments(requests[number])[0] for number in numbers]
            for number, text in zip(numbers, self._generate(texts, options), strict=True):
                found[number] = text
        return found

    def _generate(self, texts: Sequence[str], options: dict[str, Any]) -> list[str]:
        """Continue texts that have the same options."""
        most, stops, sampling = generation_options(options)
        if most >= self.max_length:
            raise ValueError(
                f"the task generates {most} tokens (generation_kwargs.max_gen_toks), but the model "
                f"reads {self.max_length} with its question: raise evaluate.max_length, or lower "
                "max_gen_toks in a task file of your own"
            )
        read = self.max_length - most
        prompts = [self.tok_encode(text)[-read:] or [self.eot_token_id] for text in texts]
        new = self._passes.continue_texts(prompts, most, stops, sampling)
        cut = _cutting([*stops, self._texts.end_text])
        return [cut(self._texts.to_text(tokens)) for tokens in new]


def _arguments(request: Any) -> tuple[str, dict[str, Any]]:
    """Text and options of a request to generate, which its type does not name."""
    return request.args


def generation_options(options: dict[str, Any]) -> tuple[int, list[str], Sampling]:
    """Return most new tokens, strings that end a text, and how tokens are chosen.

    Raises ValueError for an option of a task that is not known here.
    """
    known = {*_LIMITS, *_SAMPLING, "until"}
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"generation_kwargs.{unknown[0]} of the task has no counterpart here; known are "
            f"{', '.join(sorted(known))}: leave the task out, or change it in a file of your own"
        )
    limits = [options[name] for name in _LIMITS if options.get(name) is not None]
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
    most = int(limits[0]) if limits else MOST_NEW_TOKENS
    temperature = float(options.get("temperature") or 0.0)
    draws = options.get("do_sample", temperature > 0)
    penalty = float(options.get("repetition_penalty") or 1.0)
    if not draws:
        return most, stops, Sampling(repetition_penalty=penalty)
    sampling = Sampling(
        temperature=temperature or 1.0,
        top_k=options.get("top_k") or None,
        top_p=options.get("top_p"),
        repetition_penalty=penalty,
        seed=_SEED,
    )
    return most, stops, sampling


def _cutting(stops: Sequence[str]) -> Callable[[str], str]:
    """Cut a text before the first of some strings."""

    def cut(text: str) -> str:
        for stop in stops:
            text = text.split(stop)[0] if stop else text
        return text

    return cut
