"""Continue prompts on a mesh; one result for each prompt."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kenotron_command import printable
from kenotron_dist import Mesh, broadcast_object, gather_objects
from kenotron_generate.load import Description, load_model, remark_on
from kenotron_generate.logprobs import OF_TRAINING, check_lengths, score_texts
from kenotron_generate.prompts import Prompt, with_stdin
from kenotron_generate.shared_passes import SharedPasses
from kenotron_generate.tokenizer_io import PromptTokenizer, Writer, open_words
from kenotron_models import Sampling, cache_problem, generate


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of a generation."""

    prompts: list[Prompt | None]
    """None: what rank 0 finds on standard input."""
    max_new_tokens: int
    batch_size: int
    """Texts that are continued together on one replica."""
    sampling: Sampling
    stop: list[str]
    template: bool
    """Texts are turns of a chat where the tokenizer has a template."""
    special: bool | None
    """Prompts get the tokens that the tokenizer puts around a text; None: Hugging Face's do."""
    cached: bool
    tokenizer: str | None
    """Name of the tokenizer; None: the checkpoint's."""
    check: bool
    """A folder of Hugging Face is compared with transformers first."""
    logprobs: int | None
    """Number of likeliest tokens at each place whose log-probabilities are reported with those of
    the text's own tokens; None: there are no reports."""
    threads: int | None
    """CPU threads of each rank that were asked for."""
    jsonl: str | None
    """A file for the results; ``-``: standard output."""


@dataclass
class Result:
    """Result for one prompt."""

    index: int
    prompt: Prompt
    completion: str
    prompt_tokens: int
    tokens: list[int]
    """The new ones."""
    finish: str
    """``eos``, ``stop`` (a string), or ``length``."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further keys of its line of JSON."""

    def to_json(self) -> dict[str, Any]:
        """Return its line of JSON."""
        found = asdict(self)
        return found | found.pop("more")


def tokenizer_name(described: Description, request: Request) -> str | None:
    """The tokenizer that is asked for, or else the checkpoint's; None: bytes."""
    return described.tokenizer if request.tokenizer is None else request.tokenizer


def continue_prompts(mesh: Mesh, described: Description, request: Request) -> None:
    """Print what the model adds to the prompts. Collective over the mesh.

    The replicas, which are the ranks of dp and cp, share the prompts: a text is continued whole by
    one of them. Raises ValueError for bad input, OSError.
    """
    read = with_stdin(request.prompts) if mesh.rank == 0 else None
    prompts: list[Prompt] = broadcast_object(read, mesh.world)
    name = tokenizer_name(described, request)
    special = described.hub if request.special is None else request.special
    words = open_words(name, described.ends, described.begin, special=special)
    if name is None and mesh.rank == 0:
        print(f"{described.folder} names no tokenizer: bytes are read", file=sys.stderr)
    texts = [words.read(prompt, template=request.template) for prompt in prompts]
    if request.logprobs is not None:
        check_lengths(texts, described, request.max_new_tokens, request.logprobs)
    passes = SharedPasses(load_model(described, mesh), mesh)
    if request.check and described.is_foreign and mesh.rank == 0:
        print(remark_on(described), file=sys.stderr, flush=True)
    if request.cached and mesh.rank == 0 and (problem := cache_problem(described.model)):
        print(f"no cache is used, each token reads all of its text: {problem}", file=sys.stderr)
    run = _BatchedRun(mesh, described, request, words, passes)
    started = time.perf_counter()
    replicas = mesh["dp", "cp"]
    share = -(-len(prompts) // replicas.size)  # consecutive, so that numbers follow one another
    first = replicas.rank * share
    own = prompts[first : first + share]
    results: list[Result] = []
    for begin in range(0, len(own), request.batch_size):
        batch = own[begin : begin + request.batch_size]
        results += run.batch(first + begin, batch, alone=len(prompts) == 1)
    passes.finish()
    gathered = gather_objects([asdict(result) for result in results], replicas)
    whole = [Result(**values) for part in gathered for values in part]
    del passes, run  # two models need not fit at once
    if request.logprobs is not None:
        _add_logprobs(mesh, described, request, texts, whole)
    if mesh.rank == 0:
        _tell(whole, request.jsonl)
        _report(whole, time.perf_counter() - started)


def _add_logprobs(
    mesh: Mesh,
    described: Description,
    request: Request,
    prompts: Sequence[Sequence[int]],
    results: Sequence[Result],
) -> None:
    """Add to each result the tokens of its prompt, and scores of all. Collective over the mesh."""
    assert request.logprobs is not None
    texts = [[*prompt, *each.tokens] for prompt, each in zip(prompts, results, strict=True)]
    scores, bits = score_texts(
        mesh,
        described,
        texts,
        batch_size=request.batch_size,
        likeliest=request.logprobs,
        threads=request.threads,
    )
    if bits is not None and bits != OF_TRAINING and mesh.rank == 0:
        print(f"--logprobs: {bits}", file=sys.stderr)
    for result, prompt, found in zip(results, prompts, scores, strict=True):
        result.more = {
            "prompt_token_ids": prompt,
            **found.to_json(len(prompt), request.logprobs),
            "bits": bits,
        }


@dataclass
class _BatchedRun:
    mesh: Mesh
    described: Description
    request: Request
    words: PromptTokenizer
    forward: SharedPasses

    def batch(self, first: int, prompts: Sequence[Prompt], *, alone: bool) -> list[Result]:
        """Continue some prompts together; one that is alone is shown while it grows."""
        request, words = self.request, self.words
        texts = [words.read(prompt, template=request.template) for prompt in prompts]
        self._say_what_is_cut(first, texts)
        writers = [Writer(words.to_text, text, request.stop) for text in texts]
        new: list[list[int]] = [[] for _ in texts]
        finish = ["length"] * len(texts)
        shown = alone and self.mesh.rank == 0 and request.jsonl is None
        if shown:
            _show(prompts[0] if isinstance(prompts[0], str) else "")

        def ends(text: int, token: int) -> bool:
            new[text].append(token)
            if token in words.ends:
                finish[text] = "eos"
                return True
            said = writers[text].add(token)
            if shown:
                _show(said)
            if writers[text].stopped:
                finish[text] = "stop"
            return writers[text].stopped

        steps = generate(
            self.forward,
            texts,
            self.mesh,
            window=self.described.sequence_length,
            vocab_size=self.described.model.vocab_size,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            ends=ends,
            cached=request.cached and cache_problem(self.described.model) is None,
            first_text=first,
        )
        for _ in steps:
            pass
        for text, writer in enumerate(writers):
            said = writer.rest()
            if writer.stopped:  # also by what was held back until now
                finish[text] = "stop"
            if shown:
                _show(said + "\n")
        return [
            Result(first + i, prompts[i], writers[i].text, len(texts[i]), new[i], finish[i])
            for i in range(len(prompts))
        ]

    def _say_what_is_cut(self, first: int, texts: Sequence[Sequence[int]]) -> None:
        window = self.described.sequence_length
        if self.mesh["tp"].rank or self.mesh["pp"].rank:
            return
        for number, text in enumerate(texts, start=first):
            if len(text) > window:
                print(
                    f"prompt {number} has {len(text)} tokens and the model reads {window}: it goes "
                    f"on from the last {window // 2}",
                    file=sys.stderr,
                )


def _show(text: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _tell(results: list[Result], jsonl: str | None) -> None:
    """Write the results down, where they have not been shown."""
    if jsonl is not None:
        lines = "".join(json.dumps(result.to_json()) + "\n" for result in results)
        if jsonl == "-":
            print(lines, end="", flush=True)
        else:
            Path(jsonl).write_text(lines, encoding="utf-8")
        return
    if len(results) == 1:
        return
    for result in results:
        begin = result.prompt if isinstance(result.prompt, str) else ""
        _show(f"--- {result.index} ({result.finish})\n{begin}{result.completion}\n")


def _report(results: list[Result], seconds: float) -> None:
    new = sum(len(result.tokens) for result in results)
    print(
        f"{new} tokens for {len(results)} prompt{'s' * (len(results) != 1)} in {seconds:.2f} s: "
        f"{new / seconds:.1f} tokens/s",
        file=sys.stderr,
    )
