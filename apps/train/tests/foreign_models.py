"""Models of transformers that this repository has no code for, tiny, and runs that train them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_data import Batch
from kenotron_dist import Mesh, spawn
from kenotron_engine import gradients_of, join_pieces, weight_pieces
from kenotron_train.assemble import build_training
from kenotron_train.config_file import load_config
from kenotron_train.run.initial import load_initial
from kenotron_train.run.loop import train

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop", "transformers.models.auto.modeling_auto")
SEQUENCE, ROWS, STEPS, VOCAB = 24, 4, 4, 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
UNDROPPED = dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "hidden_dropout",
     "residual_dropout"),
    0.0,
)  # fmt: skip
DELTA = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
CONVOLVED = {"layer_types": ["conv", "full_attention", "conv"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": GROUPED | {"logit_scale": 0.25, "tie_word_embeddings": True},
    "gpt_neox": SMALL | {"tie_word_embeddings": False, "hidden_act": "gelu"},
    "granite": GROUPED
    | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "phi": GROUPED | {"tie_word_embeddings": False, "partial_rotary_factor": 0.5},
    "glm": GROUPED | {"head_dim": 8, "pad_token_id": 0},
    "gemma2": GROUPED | {"head_dim": 8, "tie_word_embeddings": True, "sliding_window": 8},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": SMALL
    | {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4,
       "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": SMALL
    | {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4,
       "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
       "n_group": 2, "topk_group": 1, "head_dim": 4},
}  # fmt: skip
"""With plans for tp and pp."""
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3": GROUPED | {"head_dim": 8},
    "llama": GROUPED | {"tie_word_embeddings": False},
    "gpt_oss": GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                          "sliding_window": 8},
    "qwen3_moe": GROUPED | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                            "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "glm4_moe": GROUPED | {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
                           "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    "gemma3n_text": GROUPED | {"head_dim": 8, "hidden_size_per_layer_input": 8, "sliding_window": 8,
                               "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0,
                               "laurel_rank": 8},
    "minimax_m2": GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "seed_oss": GROUPED | UNDROPPED | {"head_dim": 8},
    "ernie4_5": GROUPED | {"head_dim": 8},
    "ernie4_5_moe": GROUPED | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
                               "moe_num_shared_experts": 1},
    "qwen3_5_text": GROUPED | DELTA,
    "qwen3_5_moe_text": GROUPED | DELTA
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
       "shared_expert_intermediate_size": 16},
    "lfm2": GROUPED | CONVOLVED,
    "lfm2_moe": GROUPED | CONVOLVED
    | {"num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 16},
}  # fmt: skip
"""For single tests."""
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4} | UNDROPPED
WITHOUT_PLAN: dict[str, dict[str, Any]] = {
    "stablelm": GROUPED | {"tie_word_embeddings": False},
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4} | UNDROPPED,
    "gpt2": GPT | {"n_positions": 64},
    "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32} | UNDROPPED,
    "openai-gpt": GPT | {"n_positions": 64},
}
"""The last one is called as a whole: its layers take a mask of the dtype of its weights."""
HYBRID = GROUPED | {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "attn_layer_indices": [1],
    "mamba_chunk_size": 8,
    "mamba_n_groups": 1,
}
FOUND: dict[str, dict[str, Any]] = {
    "bamba": HYBRID,
    "gemma4_text": GROUPED
    | {
        "head_dim": 8,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 8,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "llama4_text": GROUPED
    | {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layers": [0, 2],
        "no_rope_layers": [1, 0, 0],
        "floor_scale": 5,
        "attention_chunk_size": 8,
    },
}
"""With a plan for tp alone: their layers are found."""


def folder_of(family: str, target: Path, **changes: Any) -> Path:
    """A folder with config.json and weights, as ``save_pretrained`` writes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    values = {**FAMILIES, **OTHERS, **WITHOUT_PLAN, **FOUND}[family] | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
    for parameter in model.parameters():  # biases and norms too
        parameter.data += 0.05 * torch.randn(parameter.shape)
    model.save_pretrained(target)
    return target


def sample(i: int) -> list[int]:
    """Ids that a small model can learn something from."""
    return [(3 * i + 5 * place + place * place % 7) % VOCAB for place in range(SEQUENCE + 1)]


class Rows:
    """Samples in order."""

    def __iter__(self):
        return map(sample, range(1000))


def configure(
    model: Path | str, run: Path, changes: dict[str, object] | None = None, **keys: object
) -> Config:
    """A run in ``run`` that begins with the weights of a folder; ``keys`` are of model_config."""
    sizes = {"is_hf_config": True, "path": str(model), **keys}
    values: dict[str, object] = {
        "model.model_config": json.dumps(sizes),
        "model.init_method": json.dumps({"path": str(model)}),
        "parallelism.tp": 1,
        "parallelism.tp_mode": "ALL_REDUCE",
        "tokens.sequence_length": SEQUENCE,
        "tokens.micro_batch_size": ROWS // 2,
        "tokens.batch_accumulation_per_replica": 2,
        "tokens.train_steps": STEPS,
        "tokens.limit_val_batches": 0,
        "optimizer.learning_rate_scheduler.lr_warmup_steps": 2,
        "checkpoints.checkpoints_path": run,
        "checkpoints.checkpoint_interval": 2,
        "data_stages.0.data.dataset": "null",
    } | (changes or {})
    return load_config(DEFAULT_CONFIG, [f"{key}={value}" for key, value in values.items()])


def trace(mesh: Mesh, config: Config) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of every step."""
    return [(step.loss, step.grad_norm, step.lr) for step in train(mesh, config, loader=Rows())]


def alone(
    folder: Path, rates: list[float], config: Config, adapter: Path | None = None
) -> tuple[list[float], Any]:
    """Losses of transformers' own model in plain torch with the same rows, and the model.

    ``adapter``: of peft, which alone learns.
    """
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    rule = config.optimizer.optimizer_factory
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], eps=rule.adam_eps,
        betas=(rule.adam_beta1, rule.adam_beta2), weight_decay=config.optimizer.weight_decay,
    )  # fmt: skip
    losses, rows = [], iter(Rows())
    for rate in rates:
        ids = torch.tensor([next(rows) for _ in range(ROWS)])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + balance(model, ids) + squares(model, logits)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def balance(model: Any, ids: torch.Tensor, calls: int = 2) -> torch.Tensor | float:
    """The mean of the model's own balance losses of micro-batches, with its weight."""
    if not getattr(model.config, "output_router_logits", False):
        return 0.0
    micros = [model(input_ids=rows[:, :-1], use_cache=False) for rows in ids.chunk(calls)]
    return model.router_aux_loss_coef * sum(each.aux_loss for each in micros) / calls


def squares(model: Any, logits: torch.Tensor) -> torch.Tensor | float:
    """The model's own z-loss, as its forward with labels adds it."""
    weight = getattr(model, "z_loss_coefficient", 0)
    return weight * logits.logsumexp(-1).pow(2).mean() if weight else 0.0


def run(config: Config) -> list[tuple[float, float, float]]:
    """The trace of a run in processes of its own, the same on all ranks."""
    sizes = config.parallelism
    ranks = spawn(trace, config, **sizes.grid, ep=sizes.ep, preload=PRELOAD)
    assert all(found == ranks[0] for found in ranks)
    return ranks[0]


def measure(
    mesh: Mesh, config: Config, positions: list[int] | None = None
) -> tuple[float, Any, Any]:
    """Loss, and pieces of every gradient and of the first weights."""
    training = build_training(config, mesh)
    load_initial(training)
    ids = torch.tensor([[sample(i)] for i in range(ROWS)])  # micro-batches of a row
    own = ids.chunk(mesh["dp"].size)[mesh["dp"].rank]
    places = torch.tensor(positions or range(SEQUENCE)).expand(len(own), 1, -1)
    numbers = torch.zeros(len(own), 1, dtype=torch.int64)
    batch = Batch(own[..., :-1], own[..., 1:].contiguous(), places, numbers)
    weights = weight_pieces(training)
    loss, gradients = gradients_of(training, batch)
    return loss, gradients, weights


def whole(
    config: Config, positions: list[int] | None = None
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """The same of all ranks, joined."""
    sizes = config.parallelism
    ranks = spawn(measure, config, positions, **sizes.grid, ep=sizes.ep, preload=PRELOAD)
    return ranks[0][0], *(join_pieces([rank[i] for rank in ranks]) for i in (1, 2))
