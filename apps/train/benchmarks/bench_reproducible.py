"""Cost of ``general.reproducible``: seconds of a step with it and without, layout by layout.

Two local processes of one thread each and a model of ordinary width: with rows of few tokens, or
narrow layers, fixed costs of a pass count most. Both contestants of a layout take the same global
batch of ``SAMPLES`` rows; usual ones compute it in one pass and a fused AdamW, or in passes of one
row under pp. In every round each contestant runs once, after a barrier; a round counts as long as
its slowest rank, and the table shows medians over the rounds, their ratio, and what it may be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from bench_step import flags, ours, race, slowest, surroundings

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh, spawn
from kenotron_train.config_file import parse_config

SAMPLES = 4
MODEL = (
    "is_qwen2_config: true, hidden_size: 512, intermediate_size: 1408, num_hidden_layers: 2, "
    "num_attention_heads: 8, num_key_value_heads: 4, vocab_size: 2048, "
    "max_position_embeddings: 2048"
)
EXPERTS = "moe_config: {num_experts: 8, top_k: 2, moe_intermediate_size: 704}"
WHOLE = ("general.reproducible_max_tp=1",)
"""Layers are computed whole: no virtual shards, for trainings without tp."""
CHUNKS = ("general.reproducible_max_cp=2", *WHOLE)
MODE = ", reproducible"
Sizes = dict[str, int]
LAYOUTS: dict[str, tuple[Sizes, str, tuple[str, ...], tuple[str, ...], float]] = {
    "dp 2": ({"dp": 2}, "", (), WHOLE, 1.25),
    "dp 2, ZeRO 3": ({"dp": 2}, "", ("optimizer.zero_stage=3",), WHOLE, 1.25),
    "pp 2": ({"pp": 2}, "", (), WHOLE, 1.25),
    "cp 2": ({"cp": 2}, "", (), CHUNKS, 1.25),
    "dp 2, ep 2": ({"dp": 2, "ep": 2}, EXPERTS, (), WHOLE, 1.25),
    "tp 2": ({"tp": 2}, "", (), ("general.reproducible_max_tp=2",), 1.4),
    "tp 2, 8 shards": ({"tp": 2}, "", (), (), 1.4),
    "dp 2, 8 shards": ({"dp": 2}, "", (), (), 1.4),
}
"""Sizes, further keys of the model, of both contestants and of the mode; the largest ratio."""


def configure(
    sizes: Sizes, model: str, keys: tuple[str, ...], more: tuple[str, ...], *, mode: bool
) -> Config:
    """The training; ``more``: keys that come last."""
    axes = {"pp": 1, "dp": 1, "tp": 1} | sizes
    rows = SAMPLES // axes["dp"]
    micro = 1 if axes["pp"] > 1 else rows
    changes = {
        "data_stages.0.data.dataset": "null",
        "general.reproducible": str(mode).lower(),
        "model.model_config": f"{{{MODEL}, {model}}}" if model else f"{{{MODEL}}}",
        "optimizer.optimizer_factory.torch_adam_is_fused": str(not mode).lower(),
        "parallelism.tp_mode": "REDUCE_SCATTER" if axes["tp"] > 1 else "ALL_REDUCE",
        "tokens.batch_accumulation_per_replica": rows // micro,
        "tokens.micro_batch_size": micro,
        "tokens.sequence_length": 2048,
        **{f"parallelism.{name}": size for name, size in axes.items()},
    }
    text = DEFAULT_CONFIG.read_text()
    return parse_config(
        text, "default.yaml", [*(f"{k}={v}" for k, v in changes.items()), *keys, *more]
    )


def measure(
    mesh: Mesh, rounds: int, more: tuple[str, ...], only: tuple[str, ...]
) -> dict[str, list[float]]:
    """Seconds of every round on this rank, by contestant; two of a layout at a time."""
    times: dict[str, list[float]] = {}
    for name in only or LAYOUTS:
        sizes, model, keys, of_mode, _ = LAYOUTS[name]
        of = Mesh.connect(**sizes)
        usual = ours(configure(sizes, model, keys, more, mode=False), of)
        exact = ours(configure(sizes, model, (*keys, *of_mode), more, mode=True), of)
        pair = {name: (usual, True), name + MODE: (exact, True)}
        times |= race(mesh, rounds, pair, warm_up=1)
    return times


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print the layouts that flags name."""
    options = flags("Cost of general.reproducible, by layout.", 5, LAYOUTS).parse_args(words)
    ranks = spawn(measure, options.rounds, tuple(options.set), tuple(options.only), dp=2)
    medians = slowest(ranks)
    print(f"{'layout':<16} {'usual ms':>9} {'reproducible ms':>16} {'ratio':>6} {'at most':>8}")
    for name in options.only or LAYOUTS:
        usual, exact = medians[name], medians[name + MODE]
        print(
            f"{name:<16} {usual * 1e3:>9.0f} {exact * 1e3:>16.0f} {exact / usual:>6.2f} "
            f"{LAYOUTS[name][-1]:>8}"
        )
    if options.json:
        options.json.write_text(
            json.dumps({**surroundings(), "median_s": medians}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
