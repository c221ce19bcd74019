"""Checkpoints with experts as Nanotron and Kénotron write them, made from the description alone.

Shapes: E experts, F features of an expert, h hidden.
"""

from pathlib import Path

import nanotron_cases as cases
import torch

QWEN2 = {
    "is_llama_config": False, "is_qwen2_config": True, "attention_bias": True,
    "tie_word_embeddings": True, "num_key_value_heads": 2, "_attn_implementation": "sdpa",
    "moe_config": {
        "num_experts": 6, "top_k": 2, "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 12, "router_aux_loss_coef": 0.01, "layers": [1],
        "enable_shared_expert": True, "token_dispatcher_type": "alltoall",
    },
}  # fmt: skip
LLAMOE = {
    "is_llama_config": False, "is_llamoe_config": True, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_capacity_factor": 1,
}  # fmt: skip
MATRICES = "block_sparse_moe.experts.mlp.{}.module.weight"


def qwen2(changes=None):
    """Tensors of a Qwen2 by Nanotron's name (see ``cases.values``), and ours that they become."""
    config = cases.LLAMA | QWEN2 | (changes or {})
    section, hidden = config["moe_config"], config["hidden_size"]
    tensors = cases.values(config)
    ours = {cases.ours(name): tensor for name, (tensor, _) in tensors.items()}
    generator = torch.Generator().manual_seed(11)
    e, f, s = (
        section[key]
        for key in ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
    )

    def make(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator).to(dtype)

    layers = range(config["num_hidden_layers"])
    chosen = layers if section["layers"] == [-1] else section["layers"]
    for i in layers:
        theirs, here = f"model.decoder.{i}.pp_block", f"layers.{i}"
        heads, kv = 4 * 4, 2 * 4
        bias = make(heads + 2 * kv)
        tensors[f"{theirs}.attn.qkv_proj.bias"] = bias, (0, [heads, kv, kv])
        ours[f"{here}.attention.qkv.bias"] = bias
        if i not in chosen:
            continue
        for name in ("gate_up_proj", "down_proj"):
            del tensors[f"{theirs}.mlp.{name}.weight"]
            del ours[f"{here}.mlp.{name.removesuffix('_proj')}.weight"]
        ours[f"{here}.experts_norm.weight"] = ours.pop(f"{here}.mlp_norm.weight")
        gates, ups, downs = make(e, f, hidden), make(e, f, hidden), make(e, hidden, f)
        router = make(e, hidden, dtype=torch.float32)
        merged = torch.stack([torch.cat([gates[j].t(), ups[j].t()], 1) for j in range(e)])
        shared_in, shared_out, gate = make(2 * s, hidden), make(hidden, s), make(1, hidden)
        tensors |= {
            f"{theirs}.mlp.router.weight": (router, None),
            f"{theirs}.mlp.experts.merged_gate_up_proj": (merged, None),
            f"{theirs}.mlp.experts.merged_down_proj": (
                torch.stack([downs[j].t() for j in range(e)]), None
            ),
        }  # fmt: skip
        ours |= {
            f"{here}.experts.router.weight": router,
            f"{here}.experts.gate_up.weight": torch.cat([gates, ups], 1),
            f"{here}.experts.down.weight": downs,
        }
        if section["enable_shared_expert"]:
            tensors |= {
                f"{theirs}.mlp.shared_expert.gate_up_proj.weight": (shared_in, (0, [s, s])),
                f"{theirs}.mlp.shared_expert.down_proj.weight": (shared_out, (1, [s])),
                f"{theirs}.mlp.shared_expert_gate.weight": (gate, None),
            }
            ours |= {
                f"{here}.experts.shared.gate_up.weight": shared_in,
                f"{here}.experts.shared.down.weight": shared_out,
                f"{here}.experts.shared_gate.weight": gate,
            }
    return tensors, ours


def llamoe(config):
    """Tensors of a LlaMoE that are cut as others are; matrices of experts by layer; ours."""
    hidden, f, e = (config[k] for k in ("hidden_size", "intermediate_size", "moe_num_experts"))
    tensors, matrices = cases.values(config | {"tie_word_embeddings": False}), {}
    ours = {cases.ours(name): tensor for name, (tensor, _) in tensors.items()}
    generator = torch.Generator().manual_seed(12)
    for i in range(config["num_hidden_layers"]):
        theirs, here = f"model.decoder.{i}.pp_block", f"layers.{i}"
        for name in ("gate_up_proj", "down_proj"):
            del tensors[f"{theirs}.mlp.{name}.weight"]
            del ours[f"{here}.mlp.{name.removesuffix('_proj')}.weight"]
        ours[f"{here}.experts_norm.weight"] = ours.pop(f"{here}.mlp_norm.weight")
        router, up, down = (
            torch.randn(shape, generator=generator).bfloat16()
            for shape in ((e, hidden), (e, f, hidden), (e, hidden, f))
        )
        tensors[f"{theirs}.block_sparse_moe.gate.layer.weight"] = router, None
        ours |= {
            f"{here}.experts.router.weight": router,
            f"{here}.experts.up.weight": up,
            f"{here}.experts.down.weight": down,
        }
        matrices[theirs] = up, down
    return tensors, matrices, ours


def write_llamoe(run: Path, *, tp=1, ep=1, transposed=True, **changes):
    """A run folder of a LlaMoE; returns its step folder and our tensors.

    ``transposed``: with one tp rank, w1 is turned after its metadata was made, as Nanotron does.
    """
    config = LLAMOE | {"num_key_value_heads": 2} | changes
    tensors, matrices, ours = llamoe(cases.LLAMA | config)
    one = config["moe_num_experts"] == 1
    if one:
        for theirs, (up, down) in matrices.items():
            for name, matrix, dim in (("w1", up[0], 0), ("w2", down[0], 1)):
                how = dim, [matrix.shape[dim]]
                tensors[f"{theirs}.{MATRICES.format(name)}"] = matrix, how
    folder, _ = cases.write(run, tp=tp, tensors=tensors, **config)
    for theirs, (up, down) in matrices.items():
        if not one:
            for name, stack in (("w1", up), ("w2", down.transpose(1, 2))):
                turned = transposed and name == "w1" and tp == 1
                write_stack(folder, f"{theirs}.{MATRICES.format(name)}", stack, tp, ep, turned)
    return folder, ours


def write_stack(folder, name, stack, tp, ep, turned):
    """Files of a stack (E, F, h): each rank has a slice of each of its experts.

    Their metadata is Nanotron's: rows of all ranks one after another.
    """
    *modules, last = name.split(".")
    experts, features, hidden = stack.shape
    for e in range(ep):
        for rank in range(tp):
            own = stack.chunk(ep)[e].chunk(tp, 1)[rank].reshape(-1, hidden)
            first = (e * tp + rank) * len(own)
            said = {
                "version": "1.4",
                "local_global_slices_pairs": cases.pairs_text(
                    [((0, len(own)), (first, first + len(own)))], 0, 2
                ),
                "unsharded_shape": f"({experts * features}, {hidden})",
            }
            suffix = f"_exp-rank-{e}-of-{ep}" * (ep > 1)
            file = f"model_{last}_pp-rank-0-of-1_tp-rank-{rank}-of-{tp}{suffix}.safetensors"
            data = own.t() if turned else own
            place = folder.joinpath("model", *modules) / file
            cases.write_tensor(place, data.contiguous(), said, False)
