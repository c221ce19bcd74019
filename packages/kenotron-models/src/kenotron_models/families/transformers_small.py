"""A narrow copy of a config.json of transformers, by the names that its families give to sizes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kenotron_models.families.routing_keys import few_experts
from kenotron_models.families.transformers_depth import chosen_layers, fewer_layers
from kenotron_models.small import SHORTEST_ORIGINAL, SmallSizes
from kenotron_models.transformers_model import config_of

HEADS = 8
"""Heads of a model that has no attention: they only say how wide it becomes."""
MORE_PLACES = 8
"""Further positions of a table of them: some families begin to count after the padding."""
MULTIPLE = 8
"""Features of a feed-forward network on each rank are so many, or a multiple."""
INNER = re.compile(
    r"(moe_|shared_|expert_|dense_|moe_shared_)*(experts?_)?(intermediate|ffn_hidden)_size(_mlp)?"
    r"|((en|de)coder_)?ffn_dim|dim_ff|dff|n_inner|d_inner|feed_forward_size"
)
"""Widths of feed-forward networks."""
EXPERTS = re.compile(r"(moe_)?num_(local_)?experts|n_routed_experts|zero_expert_num")
TOP_K = re.compile(r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts")
GROUPS = ("n_group", "num_expert_group")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
LENGTHS = re.compile(
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length"
    r"|max_target_positions"
)
"""Longest texts."""
WINDOWS = re.compile(
    r"sliding_window(_size)?|(local_)?attention_window_(size|len)|local_attention|window_size"
    r"|attention_chunk_size|keep_window_size|swa_window_size|index_topk|indexer_budget|rel_extent"
)
"""Tokens that a token sees."""
VOCABULARY = re.compile(r"(unpadded_|decoder_)?vocab_size(_per_layer_input)?")
TOKEN = re.compile(r"\w*(token_id|_index)s?")
"""Numbers of single tokens."""
MOST = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 8, "index_head_dim": 8,
    "linear_head_dim": 8, "linear_key_head_dim": 8, "mamba_d_state": 8, "ssm_state_size": 8,
    "state_size": 8, "mamba_d_head": 8, "mamba_head_dim": 8, "hidden_size_per_layer_input": 8,
    "laurel_rank": 8, "hc_lowrank": 8, "d_rel": 8, "rotary_dim": 4, "gated_norm_rank": 4,
    "n_groups": 2, "mamba_n_groups": 2, "o_groups": 2, "adapter_rank": 8, "loop_gate_rank": 8,
    "router_hidden_size": 16, "position_bias_num_buckets": 32, "prompt_length": 4,
}  # fmt: skip
"""Largest values of sizes that stand for themselves."""
COUNTS = re.compile(r"indexer?_n_heads|linear_num_(key_)?heads|n_mamba_heads")
"""Heads of other kinds, which ranks of tp share."""
WIDTHS = ("head_dim", "kv_channels", "d_head", "dim_head", "attention_head_size")
"""Keys of the features of a head."""
FEATURES = re.compile(r"\w*(size|dim|width|channels|embd|rank|d_model)\w*")
"""Names of sizes that may be those of another key."""
SKIPPED = re.compile(r"(vision|audio|vq)\w*config|id2label|label2id")


def kv_heads_of(config_json: str, heads: int) -> int:
    """Return the key and value heads of a layer of a model with so many query heads."""
    text = config_of(config_json).get_text_config(decoder=True).to_dict()
    several = text.get("new_decoder_architecture") or not text.get("multi_query")
    if not several:  # Falcon, GPT-BigCode
        return 1
    inner = text.get("attn_config") or {}
    found = text.get("num_key_value_heads") or text.get("num_kv_heads") or inner.get("kv_n_heads")
    return found if isinstance(found, int) else heads


def small_json(config_json: str, sizes: SmallSizes, *, narrow: bool = True) -> str:
    """Return the contents of a config.json with few features, layers and token numbers.

    Args:
        config_json: contents of the file.
        sizes: what it is made small by.
        narrow: False: features and heads stay.

    Raises:
        ValueError: transformers does not know the model, or refuses the copy.
    """
    config = config_of(config_json)
    values = json.loads(config.to_json_string(use_diff=False))
    text = config.get_text_config(decoder=True)
    inside = next((k for k in config.sub_configs if getattr(config, k, None) is text), None)
    own = values if inside is None else values[inside]
    names = {theirs: ours for ours, theirs in type(text).attribute_map.items()}
    depth = int(text.num_hidden_layers)
    kept = chosen_layers(own, depth, sizes.layers)
    own.update(fewer_layers(own, depth, kept))
    _vocabulary(own, sizes)
    if inside is not None:
        _vocabulary(values, sizes)
    if narrow:
        _Narrow(own, names, sizes).apply()
    return json.dumps(values, sort_keys=True)


def _vocabulary(values: dict[str, Any], sizes: SmallSizes) -> None:
    """Make the vocabulary small, and every token's number one of it."""
    last = sizes.vocab_size - 1
    for key, value in values.items():
        if VOCABULARY.fullmatch(key) and value:
            values[key] = sizes.vocab_size
        elif TOKEN.fullmatch(key) and isinstance(value, int) and type(value) is int:
            values[key] = min(value, last)
        elif TOKEN.fullmatch(key) and isinstance(value, list):
            values[key] = [min(each, last) for each in value]


class _Narrow:
    """Rules by which one config becomes narrow: old and new sizes that others depend on."""

    def __init__(self, values: dict[str, Any], names: Mapping[str, str], sizes: SmallSizes) -> None:
        self.values, self.sizes = values, sizes
        self.names = names
        old = {names.get(key, key): value for key, value in values.items()} | values
        self.old = old
        hidden, heads = int(old["hidden_size"]), old.get("num_attention_heads") or HEADS
        heads = max(heads) if isinstance(heads, list) else int(heads)
        own = next((old[key] for key in WIDTHS if old.get(key)), hidden // heads)
        latent = bool(old.get("qk_nope_head_dim"))
        width = min(sizes.head_dim, max(own, 2))
        small = sizes.heads * width
        if not latent and heads * own > hidden:
            small //= 2
        elif not latent and heads * own < hidden:
            small *= 2
        self.hidden, self.width, self.small_hidden, self.own = hidden, width, small, own
        self.experts = few_experts(sizes, min(self._all(EXPERTS), default=1))

    def _all(self, names: re.Pattern[str]) -> Iterator[int]:
        inner = [each for each in self.values.values() if isinstance(each, dict)]
        for mapping in (self.values, *inner):
            found = (v for k, v in mapping.items() if names.fullmatch(k))
            yield from (each for each in found if type(each) is int and each > 1)

    def apply(self) -> None:
        """Change all sizes in place."""
        for mapping in self._mappings(self.values):
            for key, value in mapping.items():
                if isinstance(value, list) and value and all(type(x) is int for x in value):
                    mapping[key] = [self._small(key, each) for each in value]
                elif type(value) is int:
                    mapping[key] = self._small(key, value)
        self._relations()
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := self.values.get(key), dict):
                for each in rope.values() if _by_kind(rope) else [rope]:
                    self._rope(each)

    def _mappings(self, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield values
        for key, value in values.items():
            if isinstance(value, dict) and not key.startswith("rope") and not SKIPPED.match(key):
                yield from self._mappings(value)

    def _small(self, key: str, value: int) -> int:
        """Return a size after; the same where no rule is known."""
        name, sizes = self.names.get(key, key), self.sizes
        for known in (key, name):
            if (rule := RULES.get(known)) is not None and value > 0:
                return rule(self, value)
        if value <= 1 or TOKEN.fullmatch(key) or VOCABULARY.fullmatch(key):
            return value
        for names, act in PATTERNS.items():
            if names.fullmatch(key) or names.fullmatch(name):
                return act(self, value)
        if key in MOST:
            return min(value, MOST[key])
        if COUNTS.fullmatch(key):
            return min(value, sizes.tp * max(1, 2 // sizes.tp))
        if FEATURES.fullmatch(key):
            for old, new in ((self.hidden, self.small_hidden), (self.own, self.width),
                             (2 * self.hidden, 2 * self.small_hidden)):  # fmt: skip
                if value == old:
                    return new
        return value

    def inner(self, value: int) -> int:
        """Return the width of a feed-forward; kernels of experts take multiples of a few."""
        unit = self.sizes.tp * MULTIPLE
        return max(1, self.sizes.inner(value, self.hidden, self.small_hidden) // unit) * unit

    def _relations(self) -> None:
        """Set the sizes that are made of several others."""
        values, old, tp = self.values, self.old, self.sizes.tp
        # Latent attention: features with positions and without.
        if nope := old.get("qk_nope_head_dim"):
            rope = int(old["qk_rope_head_dim"])
            small = max(self.width // 2, 2)
            both = {"qk_rope_head_dim": small, "qk_nope_head_dim": self.width}
            both |= {"qk_head_dim": small + self.width, "v_head_dim": self.width}
            values.update({k: v for k, v in both.items() if type(old.get(k)) is int})
            if old.get("head_dim") in (rope, nope + rope):
                values["head_dim"] = small if old["head_dim"] == rope else small + self.width
        # Recurrences: heads share the widened features, and groups of heads their states.
        if value_heads := old.get("linear_num_value_heads"):
            ratio = max(1, min(4, value_heads // old["linear_num_key_heads"]))
            values["linear_num_value_heads"] = ratio * values["linear_num_key_heads"]
            wide = max(1, min(4, old["linear_value_head_dim"] // old["linear_key_head_dim"]))
            values["linear_value_head_dim"] = wide * values["linear_key_head_dim"]
        expand = old.get("mamba_expand") or old.get("expand") or 1
        for heads, features in MAMBA:
            if type(old.get(heads)) is int and type(old.get(features)) is int:
                inner = int(expand * self.small_hidden)
                if (own := old.get("mamba_d_ssm")) is not None:
                    inner = values["mamba_d_ssm"] = max(1, own // self.hidden) * self.small_hidden
                values[features] = min(8, old[features])
                values[heads] = inner // values[features]
        for key in ("time_step_rank", "mamba_dt_rank"):
            if type(old.get(key)) is int:
                values[key] = max(1, self.small_hidden // 16)
        # Experts: as many groups as divide them, and no token wants more than there are.
        for key in GROUPS:
            if type(old.get(key)) is int:
                values[key] = math.gcd(self.experts, min(old[key], 4))
                if type(old.get("topk_group")) is int:
                    values["topk_group"] = min(old["topk_group"], values[key])
                    most = values["topk_group"] * self.experts // values[key]
                    chosen = [k for k in values if TOP_K.fullmatch(k) and values[k]]
                    values.update({k: min(values[k], most) for k in chosen})
        for key in MOST.keys() & values.keys() & {"n_groups", "mamba_n_groups"}:
            if type(old[key]) is int and old[key] > 1:
                values[key] = max(2, tp)
        # Zamba's attention reads the residual stream twice.
        if type(old.get("attention_head_dim")) is int:
            values["attention_hidden_size"] = 2 * self.small_hidden
            values["attention_head_dim"] = 2 * self.small_hidden // self.sizes.heads

    def _rope(self, rope: dict[str, Any]) -> None:
        """Stretch around the shorter length; lists have a number for each pair of features."""
        features = self.values.get("head_dim") or self.values.get("qk_rope_head_dim") or self.width
        share = rope.get("partial_rotary_factor", self.old.get("partial_rotary_factor")) or 1.0
        pairs = max(1, int(features * share) // 2)
        if before := rope.get("original_max_position_embeddings"):
            small = min(before, max(self.sizes.length(before), SHORTEST_ORIGINAL))
            rope["original_max_position_embeddings"] = small
            if (longest := self.old.get("max_position_embeddings") or 0) > before:
                grown = max(self.values["max_position_embeddings"], 2 * small)
                self.values["max_position_embeddings"] = min(longest, grown)
            if rope.get("rope_type") == "yarn":
                slow, fast = rope.get("beta_slow") or 1.0, rope.get("beta_fast") or 32.0
                rope["beta_fast"] = max(min(fast, small / 8), 1.5 * slow)
        for key in ("short_factor", "long_factor"):
            if given := rope.get(key):
                rope[key] = [given[i * len(given) // pairs] for i in range(pairs)]
        if given := rope.get("mrope_section"):
            small = [max(1, each * pairs // sum(given)) for each in given]
            rope["mrope_section"] = [pairs - sum(small[1:]), *small[1:]]


def _by_kind(rope: Mapping[str, Any]) -> bool:
    """Return True where each kind of layer has angles of its own."""
    return bool(rope) and all(isinstance(each, dict) for each in rope.values())


MAMBA = (
    ("mamba_n_heads", "mamba_d_head"), ("num_heads", "head_dim"), ("n_mamba_heads", "mamba_headdim")
)  # fmt: skip
"""Keys of heads of a recurrence, and of their features."""
Rule = Callable[[_Narrow, int], int]
RULES: dict[str, Rule] = {
    "hidden_size": lambda it, _: it.small_hidden,
    "num_attention_heads": lambda it, _: it.sizes.heads,
    "num_attention_heads_per_layer": lambda it, _: it.sizes.heads,
    "swa_num_attention_heads": lambda it, _: it.sizes.heads,
    "num_query_groups": lambda it, _: it.sizes.heads,
    "encoder_attention_heads": lambda it, _: it.sizes.heads,
    "decoder_attention_heads": lambda it, _: it.sizes.heads,
    "mamba_num_heads": lambda it, value: min(value, it.sizes.tp * max(1, 4 // it.sizes.tp)),
    "num_key_value_heads": lambda it, _: it.sizes.kv_heads,
    "swa_num_key_value_heads": lambda it, _: it.sizes.kv_heads,
    "num_kv_heads": lambda it, _: it.sizes.kv_heads,
    "kv_n_heads": lambda it, _: it.sizes.kv_heads,
    "query_pre_attn_scalar": lambda it, _: it.width,
    "swa_head_dim": lambda it, _: it.width,
    "global_head_dim": lambda it, _: it.width,
    "chunk_size": lambda it, value: max(8, it.sizes.length(value)),
    "mamba_chunk_size": lambda it, value: max(8, it.sizes.length(value)),
    "indexer_head_dim": lambda it, _: it.width,
    **dict.fromkeys(WIDTHS, lambda it, _: it.width),
}
"""What a size becomes, by its key."""
PATTERNS: dict[re.Pattern[str], Rule] = {
    INNER: lambda it, value: it.inner(value),
    EXPERTS: lambda it, value: few_experts(it.sizes, value),
    TOP_K: lambda it, value: min(value, max(1, it.experts // 2)),
    LENGTHS: lambda it, value: it.sizes.reach(value) + MORE_PLACES,
    WINDOWS: lambda it, value: it.sizes.reach(value),
}
