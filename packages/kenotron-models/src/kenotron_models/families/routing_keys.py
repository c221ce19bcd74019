"""Keys of experts: routing that all families share, biased sigmoid scores, and Qwen's layers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from kenotron_models.expert_layers import expert_layers
from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.keys import NOT_NEGATIVE, POSITIVE, SHARE, KeyTable, key, one_of
from kenotron_models.families.places import name_at, placed
from kenotron_models.hf_tensors import LLAMA_NAMES, FusedModules, Names, Stacked
from kenotron_models.router import Balance, RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

QWEN_EXPERTS: Names = {
    **LLAMA_NAMES,
    "experts_norm": FusedModules("post_attention_layernorm"),
    "experts.router": FusedModules("mlp.gate"),
    "experts.gate_up": Stacked("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "experts.down": Stacked("mlp.experts.{e}.down_proj"),
    "experts.shared.gate_up": FusedModules(
        "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"
    ),
    "experts.shared.down": FusedModules("mlp.shared_expert.down_proj"),
    "experts.shared_gate": FusedModules("mlp.shared_expert_gate"),
}
"""Names of Qwen2-MoE and Qwen3-MoE."""
SMALL_EXPERTS = 8
"""Most experts of a layer of a small copy."""
EXPERTS, TOP_K = "experts.router.experts", "experts.router.top_k"


def experts_key(default: int, least: int = 1) -> int:
    """Return a field for the experts of a layer; a small copy has about 8, a multiple of ep."""
    return key(default, least=least, hf=True, at=EXPERTS, small=few_experts)


def top_k_key(default: int, hf: str | bool = True) -> int:
    """Return a field for the experts of a token."""
    return key(default, least=1, hf=hf, at=TOP_K)


def balance_key(default: float, hf: str | bool = True) -> float:
    """Return a field for the weight of the balance loss."""
    return key(default, rule=NOT_NEGATIVE, hf=hf, at="experts.router.balance_loss")


def few_experts(sizes: SmallSizes, experts: int) -> int:
    """Return a few experts, which ``ep`` divides."""
    return min(experts, max(SMALL_EXPERTS // sizes.ep, 1) * sizes.ep)


@dataclass(frozen=True, kw_only=True)
class ExpertKeys(KeyTable):
    """Rules of the keys, which each family names, for experts of a layer and of a token."""

    @property
    def has_experts(self) -> bool:
        """True where a layer may have experts."""
        return True

    @property
    def counts(self) -> dict[str, int]:
        """Experts of a layer and of a token, by key, in this order."""
        names = (name_at(type(self), place) or "" for place in (EXPERTS, TOP_K))
        return {name: getattr(self, name) for name in names}

    def problems(self) -> list[str]:
        """Name more experts of a token than there are."""
        (experts, number), (top_k, each) = self.counts.items()
        few = f"{top_k}: {each} was given; it must not be above {experts} ({number})"
        return super().problems() + [few] * (self.has_experts and each > number)

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the experts of a token of a narrow copy."""
        (_, number), (top_k, each) = self.counts.items()
        few = few_experts(sizes, number) if self.has_experts else each
        return super().small_keys(sizes) | {top_k: min(each, few)}

    def router(self, **more: Any) -> RouterSpec:
        """Return what these keys, and further fields of the spec, say of a router."""
        return RouterSpec(**placed(self, "experts.router"), **more)


@dataclass(frozen=True, kw_only=True)
class RoutingKeys(ExpertKeys):
    """Keys of how tokens are spread over experts."""

    router_aux_loss_type: Balance = key(
        "sample", rule=one_of(*get_args(Balance)), at="experts.router.balance"
    )
    """Over which tokens router_aux_loss_coef spreads the load. sample: those of each sample, in
    each layer (seq_aux_loss of Megatron-LM). micro_batch: those of a micro-batch, in each layer
    (its aux_loss). all_layers: those of a micro-batch, in all layers together, one loss for the
    model (Hugging Face's load_balancing_loss_func); pp must be 1. With an even load the first two
    are 1 in each layer, the third is the number of experts of a token."""
    router_jitter_noise: float = key(0.0, rule=SHARE, at="experts.router.jitter")
    """In a training, features that a router reads are multiplied by uniform random numbers from 1
    minus this to 1 plus this. Experts read the features without noise (ST-MoE); Hugging Face's
    Mixtral multiplies those, too."""
    expert_capacity_factor: float | None = key(None, rule=POSITIVE, at="experts.capacity_factor")
    """In a training an expert keeps of each sample at most this many times its even share of
    choices, rounded up; later tokens go without it, also where the balance is bad. Evaluation and
    generation drop nothing. None: nothing is ever dropped."""

    def problems(self) -> list[str]:
        """Name room for every choice."""
        found, factor = super().problems(), self.expert_capacity_factor
        (experts, number), (top_k, each) = self.counts.items()
        if self.has_experts and each <= number and factor and factor * each >= number:
            found.append(
                f"expert_capacity_factor: {factor} was given; from {experts} / {top_k} "
                f"({number / each:g}) on there is room for every choice and nothing is dropped: "
                "give less, or null"
            )
        return found

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the room of the experts of a narrow copy, where there is less than for all."""
        found, factor = super().small_keys(sizes), self.expert_capacity_factor
        (_, number), (top_k, _) = self.counts.items()
        few = few_experts(sizes, number) if self.has_experts else number
        room = None if factor is None or factor * found[top_k] >= few else factor
        return found | {"expert_capacity_factor": room}

    def routed(
        self, layers: Iterable[int], router: RouterSpec | None = None, **experts: Any
    ) -> dict[int, ExpertsSpec]:
        """Return the experts of the ``layers`` (from 0).

        Args:
            layers: those that have experts.
            router: how they are chosen; None: as the keys say.
            experts: fields of the spec that no key says.
        """
        numbers = [*dict.fromkeys(layers)]
        depth = len(numbers) if self.router_aux_loss_type == "all_layers" else 1
        chosen = replace(router or self.router(), layers=depth)
        spec = ExpertsSpec(router=chosen, **placed(self, "experts") | experts)
        return dict.fromkeys(numbers, spec)


@dataclass(frozen=True, kw_only=True)
class SigmoidRoutingKeys(RoutingKeys):
    """Keys of experts that are chosen by biased sigmoid scores (DeepSeek-V3, arXiv 2412.19437)."""

    n_routed_experts: int = experts_key(256)
    """Experts of a layer."""
    num_experts_per_tok: int = top_k_key(8)
    """Experts that each token is sent to."""
    moe_intermediate_size: int = key(2048, least=1, hf=True, at="experts.features")
    """Width of an expert, in features; ``intermediate_size`` is that of layers without experts."""
    n_group: int = key(8, least=1, divides="n_routed_experts", hf=True, at="experts.router.groups")
    """Groups of neighbouring experts."""
    topk_group: int = key(4, least=1, hf=True, at="experts.router.top_groups")
    """Groups that the experts of a token are chosen from."""
    norm_topk_prob: bool = key(True, hf=True, at="experts.router.normalize")
    """True: the weights of a token's experts add up to ``routed_scaling_factor``."""
    routed_scaling_factor: float = key(2.5, rule=POSITIVE, hf=True, at="experts.router.scale")
    """Factor of the routing weights."""
    router_bias_rate: float = key(0.001, rule=NOT_NEGATIVE, at="experts.router.bias_rate")
    """Number that each update adds to the choice bias of an expert with too few tokens, and
    subtracts from one with too many; 0: the bias stays."""

    def problems(self) -> list[str]:
        """Name groups with too few experts for a token."""
        found, groups, top = super().problems(), self.n_group, self.topk_group
        if top > groups:
            found.append(f"topk_group: {top} was given; it must not be above n_group ({groups})")
        # A token chooses groups first, then experts in them.
        inside = top * (self.n_routed_experts // groups)
        if self.num_experts_per_tok > inside:
            found.append(
                f"num_experts_per_tok: {self.num_experts_per_tok} was given; topk_group ({top}) "
                f"groups have {inside} experts"
            )
        return found

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the groups of a narrow copy; one of them has the experts of a token."""
        found, factor = super().small_keys(sizes), self.expert_capacity_factor
        # Fewer experts in fewer groups: groups must divide them, and one must have enough for a
        # token.
        number = few_experts(sizes, self.n_routed_experts)
        groups = math.gcd(number, min(self.n_group, 4))
        each = min(found["num_experts_per_tok"], number // groups)
        return found | {
            "num_experts_per_tok": each,
            "expert_capacity_factor": factor if factor and factor * each < number else None,
            "n_group": groups,
            "topk_group": min(self.topk_group, groups),
        }

    def router(self, **more: Any) -> RouterSpec:
        """Return what these keys, and further fields of the spec, say of a router."""
        return super().router(scoring="sigmoid", choice_bias=True, **more)


def sparse_layers(layers: int, step: int, without: Collection[int]) -> list[int]:
    """Return the layers with experts: every ``step``-th one, but for those ``without``."""
    return [i for i in range(layers) if (i + 1) % step == 0 and i not in without]


def sparse_from_hf(values: Mapping[str, Any]) -> list[int]:
    """Return the layers with experts of Qwen's keys. Raises ValueError, naming the key."""
    step, without = values["decoder_sparse_step"], values.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        raise ValueError(f"decoder_sparse_step: {step!r} was given; it must be at least 1")
    if not isinstance(without, list | tuple) or any(type(each) is not int for each in without):
        raise ValueError(f"mlp_only_layers: {without!r} was given; it must be a list of layers")
    found = sparse_layers(values["num_hidden_layers"], step, without)
    if not found:
        raise ValueError(
            "decoder_sparse_step, mlp_only_layers: no layer has experts; such a model is of the "
            "family without"
        )
    return found


def sparse_to_hf(spec: DecoderSpec) -> dict[str, Any]:
    """Return the keys that ``sparse_from_hf`` reads. Raises ValueError without experts."""
    found = expert_layers(spec)
    if not found:
        raise ValueError("Hugging Face's families of these keys have experts")
    without = [i for i in range(spec.num_hidden_layers) if i not in found]
    return {"decoder_sparse_step": 1, "mlp_only_layers": without}
