"""Entries of transformers' tp plans that are wrong or missing, and what models cannot do here.

The test that compares every family with plain transformers (tests/test_any_model.py) found them in
transformers 5.24.
"""

from __future__ import annotations

_PARTIAL = "replicated_with_grad_allreduce"
_NORMS = {f"layers.*.self_attn.{name}": _PARTIAL for name in ("q_norm", "k_norm")}
_GATE_AND_UP = {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}
_WHOLE_HEADS = {
    f"layers.*.self_attn.{name}": "replicate"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "dt_proj")
}
CORRECTIONS: dict[str, dict[str, str]] = {
    "apertus": {"layers.*.mlp.act_fn": _PARTIAL},  # two numbers that all features share
    "apertus1p5_text": {"layers.*.mlp.act_fn": _PARTIAL},
    "sarvam_moe": _NORMS,
    "inkling_text": _GATE_AND_UP,  # not one piece: the first half is the gate
    "inkling2_text": _GATE_AND_UP,
    "inkling2_loop_text": _GATE_AND_UP,
    "doge": _WHOLE_HEADS,  # each head's mask depends on all values
}
"""By ``model_type``: styles of names, from the model without its head on."""
UNFIT = {"phimoe": "its router draws experts at random in training, on every layout others"}
"""By ``model_type``: why transformers' model cannot be trained on several layouts."""
UNCACHED = {
    "doge": "the masks of its heads are made of the values of all tokens",
    "dory": "its layers are called several times in a pass",
}
"""By ``model_type``: why texts are continued without a cache."""
