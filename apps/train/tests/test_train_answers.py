"""Fine-tuning: prompts and chats of which the answers alone count in loss and gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import own_runs
import pytest
import torch
from own_runs import DATASET, LAYOUTS, configure, jsonl, run

from kenotron_config import ConfigError, ignored_keys
from kenotron_data import Cursor
from kenotron_dist import Mesh, spawn
from kenotron_dist.placement import named_parameters
from kenotron_engine import NO_TARGET, global_counts, training_step
from kenotron_models import Context
from kenotron_train.assemble import build_training, data_plan
from kenotron_train.data.stage_dataset import open_corpus, open_loader

PAIRS = [{"prompt": f"what is {i} ", "completion": f"it is {i * i % 17}"} for i in range(60)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"question {i}"},
            {"role": "assistant", "content": f"answer {i % 7}"},
        ]
    }
    for i in range(60)
]
TOKENIZER = "tokenizer.tokenizer_name_or_path"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return own_runs.tokenizer(tmp_path_factory.mktemp("bpe"))


def section(path, **more):
    return {"hf_dataset_or_datasets": str(path), "sft_dataloader": True} | more


def by_hand(mesh: Mesh, config, planted: int | None) -> tuple[float, float, float, int]:
    """Loss and norm of a step, its loss by hand over answers alone, and the tokens it had.

    ``planted`` replaces all labels that the mask leaves out of the loss.
    """
    training = build_training(config, mesh)
    with open_loader(
        data_plan(config), mesh, open_corpus(data_plan(config), 0), Cursor()
    ) as loader:
        batch = next(loader)
    total, count = 0.0, 0
    with torch.no_grad():
        for micro in batch:
            stack = named_parameters(training.model.stack)
            assert stack
            tokens, context = micro.tokens_BS.flatten(), Context(micro.positions_BS)
            logits = training.model.pipeline.forward([tokens], [context])[0]
            size = config.model.model_config.vocab_size
            logp = logits[:, :size].float().log_softmax(-1)
            labels = micro.labels_BS.flatten()
            kept = labels != NO_TARGET
            total -= float(logp[kept, labels[kept]].sum())
            count += int(kept.sum())
    if planted is not None:
        batch.labels_MBS[batch.labels_MBS == NO_TARGET] = planted
    result = training_step(training, batch, 1)
    return result.loss, result.grad_norm, total / count, count


def test_only_answers_count_in_loss_and_gradient(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", PAIRS)
    config = configure(tmp_path, section(path))
    ((loss, norm, wanted, count),) = spawn(by_hand, config, None, preload=own_runs.PRELOAD)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert count < 4 * 12  # completions of at most 8 bytes and their end, in 4 rows
    ((wrong, wrong_norm, *_),) = spawn(by_hand, config, 0, preload=own_runs.PRELOAD)
    assert abs(wrong - loss) > 1e-3
    assert abs(wrong_norm - norm) > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_the_same_on_several_ranks(tmp_path, layout):
    path = jsonl(tmp_path / "a.jsonl", PAIRS)
    one = run(tmp_path / "1", section(path))
    many = run(tmp_path / "2", section(path), LAYOUTS[layout])
    assert [loss for loss, _ in many] == pytest.approx([loss for loss, _ in one], rel=1e-5)
    assert [norm for _, norm in many] == pytest.approx([norm for _, norm in one], rel=1e-4)
    assert one[-1][0] < one[0][0]


def test_chats_are_read_with_the_tokenizers_template(tmp_path, bpe):
    path = jsonl(tmp_path / "a.jsonl", CHATS)
    changes = {TOKENIZER: bpe, "model.model_config.vocab_size": 300, "tokens.limit_val_batches": 1}
    config = configure(tmp_path, section(path), changes)
    corpus = open_corpus(data_plan(config), 0)
    assert (len(corpus.training), len(corpus.validation[str(path)])) == (54, 6)
    rows = corpus.training.rows(torch.arange(1).numpy())
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(bpe)
    assert opened.decode(rows.tokens[0][rows.targets[0]]) == "answer 0<|im_end|>\n"
    losses = [loss for loss, _ in run(tmp_path / "1", section(path), changes)]
    assert losses[-1] < losses[0]
    assert all(map(math.isfinite, losses))


def test_samples_are_counted_over_all_sets_and_long_examples_left_out(tmp_path):
    paths = [jsonl(tmp_path / f"{name}.jsonl", PAIRS) for name in "abc"]
    given = {"hf_dataset_or_datasets": [str(path) for path in paths], "sft_dataloader": True}
    corpus = open_corpus(data_plan(configure(tmp_path, given | {"debug_max_samples": 70})), 0)
    assert len(corpus.training) == 70
    assert list(corpus.training.sources) == [str(path) for path in paths[:2]]
    short = configure(tmp_path, section(paths[0]), {"tokenizer.tokenizer_max_length": 18})
    found = open_corpus(data_plan(short), 0)
    fits = [p for p in PAIRS if len(p["prompt"] + p["completion"]) + 1 <= 18]
    assert 0 < len(found.training) == len(fits) < 60
    assert f"{60 - len(fits)} too long" in found.about


def test_keys_of_the_cache_are_ignored_aloud(tmp_path):
    config = configure(tmp_path, section("a.jsonl", dataset_overwrite_cache=True))
    (line,) = ignored_keys(config)
    assert line.startswith(f"{DATASET}.dataset_overwrite_cache: true has no effect: every rank")


def test_what_is_wrong_with_examples_names_the_key(tmp_path, bpe):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(ValueError, match=f"{DATASET}.hf_dataset_or_datasets: examples need the"):
        open_corpus(data_plan(configure(tmp_path, section(path))), 0)
    chats = jsonl(tmp_path / "b.jsonl", CHATS)
    with pytest.raises(ValueError, match="chats need a tokenizer of transformers"):
        open_corpus(data_plan(configure(tmp_path, section(chats))), 0)
    endless = own_runs.tokenizer(tmp_path / "t", eos=None)
    changes = {TOKENIZER: endless, "model.model_config.vocab_size": 300}
    with pytest.raises(ValueError, match=f"^{TOKENIZER}: .* names no token that ends an answer"):
        open_corpus(data_plan(configure(tmp_path, section(chats), changes)), 0)
    with pytest.raises(ConfigError, match="answers are read as bytes and ended by 256"):
        configure(tmp_path, section(chats), {"model.model_config.vocab_size": 256})


def masked(mesh: Mesh, config) -> dict[str, float]:
    """Losses of one batch under several masks, and with tokens changed."""
    training = build_training(config, mesh)
    with open_loader(
        data_plan(config), mesh, open_corpus(data_plan(config), 0), Cursor()
    ) as loader:
        batch = next(loader)

    def loss(labels, tokens=batch.tokens_MBS) -> float:
        changed = replace(batch, labels_MBS=labels, tokens_MBS=tokens)
        count = global_counts(changed, mesh)[0]
        share = training.share_of(changed)
        whole = training.objective.loss(training, share, count)
        found = training.model.pipeline.evaluate(
            share.inputs, lambda x, m: whole(x, m).total, share.contexts
        )
        return float(found)

    labels, learned = batch.labels_MBS, batch.labels_MBS != NO_TARGET
    which = learned.flatten().nonzero()[:, 0]

    def only(places: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(labels.flatten(), NO_TARGET)
        kept[places] = labels.flatten()[places]
        return kept.view_as(labels)

    pads = batch.documents_MBS == -1
    first = batch.tokens_MBS.clone()
    first[..., 0] += 1
    found = {
        "all": loss(labels),
        "half": loss(only(which[::2])),
        "one": loss(only(which[:1])),
        "other padding": loss(labels, batch.tokens_MBS.masked_fill(pads, 7)),
        "other prompt": loss(labels, first),
        "padding": float(pads.sum()),
    }
    assert global_counts(replace(batch, labels_MBS=only(which[:0])), mesh)[0] == 0
    return found


def test_masks_and_tokens_count_and_padding_does_not(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", PAIRS)
    (found,) = spawn(masked, configure(tmp_path, section(path)), preload=own_runs.PRELOAD)
    assert found["padding"] > 0
    for name in ("half", "one", "other prompt"):
        assert abs(found[name] - found["all"]) > 1e-6
    assert found["other padding"] == pytest.approx(found["all"], rel=1e-6)
