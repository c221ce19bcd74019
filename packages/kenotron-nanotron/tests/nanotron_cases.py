"""Folders as Nanotron and Kénotron write them, made from the description of their format alone."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

LLAMA = {
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 16,
    "initializer_range": 0.02, "intermediate_size": 24, "is_llama_config": True,
    "max_position_embeddings": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 4, "pad_token_id": None, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "rope_interleaved": False,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 40,
}  # fmt: skip
EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
STATES = ("exp_avg", "exp_avg_sq")
KINDS = ("master", *STATES)
STEPS = 6


def values(config, dtype=torch.bfloat16):
    """Nanotron's name -> (whole tensor, how it is cut: None, or (dimension, sizes of chunks))."""
    generator = torch.Generator().manual_seed(3)
    hidden, wide, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = hidden // heads
    q, kv = heads * head, kv_heads * head

    def make(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    found = {EMBEDDING: (make(vocab, hidden), (0, [vocab]))}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.decoder.{i}.pp_block"
        found |= {
            f"{layer}.input_layernorm.weight": (make(hidden), None),
            f"{layer}.attn.qkv_proj.weight": (make(q + 2 * kv, hidden), (0, [q, kv, kv])),
            f"{layer}.attn.o_proj.weight": (make(hidden, hidden), (1, [hidden])),
            f"{layer}.post_attention_layernorm.weight": (make(hidden), None),
            f"{layer}.mlp.gate_up_proj.weight": (make(2 * wide, hidden), (0, [wide, wide])),
            f"{layer}.mlp.down_proj.weight": (make(hidden, wide), (1, [wide])),
        }
    found["model.final_layer_norm.pp_block.weight"] = (make(hidden), None)
    if not config["tie_word_embeddings"]:
        found["model.lm_head.pp_block.weight"] = (make(vocab, hidden), (0, [vocab]))
    return found


def ours(name):
    """The name here of a tensor of Nanotron's Llama, written out apart from the package."""
    ends = {
        EMBEDDING: "embedding.weight",
        "model.final_layer_norm.pp_block.weight": "norm.weight",
        "model.lm_head.pp_block.weight": "head.weight",
    }
    if name in ends:
        return ends[name]
    layer, rest = name.removeprefix("model.decoder.").split(".pp_block.")
    for old, new in (
        ("input_layernorm", "attention_norm"), ("attn.qkv_proj", "attention.qkv"),
        ("attn.o_proj", "attention.out"), ("post_attention_layernorm", "mlp_norm"),
        ("mlp.gate_up_proj", "mlp.gate_up"), ("mlp.down_proj", "mlp.down"),
    ):  # fmt: skip
        rest = rest.replace(old, new)
    return f"layers.{layer}.{rest}"


def stage_of(name, config, pp):
    """Pipeline stage: the embedding first, layers in order, the rest last."""
    if name == EMBEDDING:
        return 0
    if "decoder" in name:
        return int(name.split(".")[2]) * pp // config["num_hidden_layers"]
    return pp - 1


def cut(tensor, how, rank, tp):
    """A tp rank's part, and its (local, global) slices along the dimension that is cut."""
    dim, chunks = how
    parts, pairs, far, near = [], [], 0, 0
    for size in chunks:
        own = size // tp
        begin = far + own * rank
        parts.append(tensor.narrow(dim, begin, own))
        pairs.append(((near, near + own), (begin, begin + own)))
        far, near = far + size, near + own
    return torch.cat(parts, dim).contiguous(), pairs


def pairs_text(pairs, dim, ndim):
    def side(edges):
        each = ["None,None,None"] * ndim
        each[dim] = f"{edges[0]},{edges[1]},None"
        return "|".join(each)

    return ";".join(f"{side(local)}#{side(far)}" for local, far in pairs)


def shape_text(shape, chunked, numpy2):
    first = f"np.int64({shape[0]})" if chunked and numpy2 else str(shape[0])
    return f"({first}, {', '.join(map(str, shape[1:]))})"


def write_tensor(path, tensor, said, datastates):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not datastates:
        save_file({"data": tensor}, path, metadata=said)
        return
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    entry = {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [0, len(raw)]}
    lean = b"a pickle that nobody opens"
    end = {"data_offsets": [len(raw), len(raw) + len(lean)]}
    header = json.dumps({"data": entry | said, "datastates_metadata": end}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw + lean)


def write_weights(folder, tensors, config, tp, pp, version, numpy2):
    datastates = version == "1.0"
    end = "datastates" if datastates else "safetensors"
    for name, (tensor, how) in tensors.items():
        *modules, last = name.split(".")
        place = folder.joinpath("model", *modules)
        if how is None:
            write_tensor(place / f"model_{last}.{end}", tensor, {}, datastates)
            continue
        stage = stage_of(name, config, pp)
        for rank in range(tp):
            part, pairs = cut(tensor, how, rank, tp)
            said = {
                "version": version,
                "local_global_slices_pairs": pairs_text(pairs, how[0], tensor.ndim),
                "unsharded_shape": shape_text(tensor.shape, len(how[1]) > 1, numpy2),
            }
            file = f"model_{last}_pp-rank-{stage}-of-{pp}_tp-rank-{rank}-of-{tp}.{end}"
            write_tensor(place / file, part, said, datastates)


def metadata(version, tp, dp):
    """In the dialect that goes with the version: 1.5 is Nanotron's, the others Kénotron's."""
    stages = [
        {"name": "stable", "start_training_step": 1, "consumed_train_samples": 20},
        {"name": "decay", "start_training_step": 6, "consumed_train_samples": 4},
    ]
    metas = {
        "consumed_train_samples": 24, "last_train_step": STEPS, "last_stage_idx": 1,
        "data_stages": stages,
    }  # fmt: skip
    found = {"version": version, "tp": tp, "dp": dp, "metas": metas, "custom_metas": None}
    if version == "1.5":
        for stage in stages:
            stage |= {"sequence_length": 32, "consumed_tokens_per_dataset_folder": {}}
        metas["consumed_tokens_total"] = 24 * 32
        return found | {"cp": 1}
    return found | {"checkpointing_engine_type": "datastates" if version == "1.0" else "torch"}


def moments(tensors):
    """(kind, name) -> whole fp32 tensor of Adam's state and of the masters."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, (tensor, _) in tensors.items():
        # A master is a little off the weight, and rounds to it.
        off = 0 if tensor.dtype == torch.float32 else 2**-12
        found["master", name] = tensor.float() * (1 + off)
        for kind in STATES:
            found[kind, name] = torch.rand(tensor.shape, generator=generator)
    return found


def write_optimizer(folder, tensors, config, tp, pp, dp, zero, masters=True, steps=STEPS):
    whole = moments(tensors)
    place = folder / "optimizer"
    place.mkdir(parents=True)
    offsets, shapes = {}, {}
    for stage in range(pp):
        names = [n for n in tensors if stage_of(n, config, pp) == stage]
        if config["tie_word_embeddings"] and stage == pp - 1 and EMBEDDING not in names:
            names.append(EMBEDDING)  # the head's copy, under the name of the embedding
        for rank in range(tp):
            parts = {}
            for name in names:
                how = tensors[name][1]
                for kind in KINDS:
                    full = whole[kind, name]
                    parts[kind, name] = full if how is None else cut(full, how, rank, tp)[0]
            for data in range(dp if zero else 1):
                own = {}
                for (kind, name), part in parts.items():
                    flat = part.reshape(-1)
                    edges = zero_edges(flat.numel(), dp)
                    low, high = edges[data], edges[data + 1]
                    if zero and low == high:
                        continue
                    own[kind, name] = flat[low:high].clone() if zero else part.clone()
                    if stage == rank == 0 and zero:
                        offsets.setdefault(name, {})[str(data)] = [str(low), str(high)]
                        shapes[name] = [str(size) for size in part.shape]
                save_pickle(place, own, names, (stage, pp), (data, dp) if zero else None,
                            (rank, tp), masters, steps)  # fmt: skip
    kind = "ZeroDistributedOptimizer" if zero else "OptimizerFromGradientAccumulator"
    sizes = {"tp_size": tp, "dp_size": dp, "pp_size": pp, "expert_parallel_size": 1}
    said = {
        "type": kind if zero or masters else "NamedOptimizer",
        "parallelism": {key: str(size) for key, size in sizes.items()},
        "configs": {},
    }
    if zero:
        said["configs"] = {"param_name_to_dp_rank_offsets": offsets, "orig_param_shapes": shapes}
    (place / "optimizer_config.json").write_text(json.dumps(said))


def zero_edges(numel, dp):
    """Where the slices of ZeRO begin: ceil(numel/dp), the last ranks one less."""
    size = (numel - 1) // dp + 1
    short = size * dp - numel
    edges = [0]
    for rank in range(dp):
        edges.append(edges[-1] + size - (rank >= dp - short))
    return edges


def save_pickle(place, own, names, pp, dp, tp, masters, steps):
    held = [name for name in names if ("exp_avg", name) in own]
    state = {
        "state": {
            i: {"step": torch.tensor(float(steps))} | {kind: own[kind, name] for kind in STATES}
            for i, name in enumerate(held)
        }
        if steps
        else {},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(len(held)))}],
        "names": dict(enumerate(held)) if steps else {},
    }
    if masters:
        state["gradient_accumulator"] = {name: own["master", name] for name in held}
    middle = f"_dp-{dp[0]}-of-{dp[1]}" if dp else ""
    torch.save(
        state,
        place / f"optimizer_pp-{pp[0]}-of-{pp[1]}{middle}_tp-{tp[0]}-of-{tp[1]}_exp-0-of-1.pt",
    )


def write(run: Path, *, tp=1, pp=1, dp=1, version="1.4", numpy2=False, optimizer=None, zero=False,
          masters=True, dtype=torch.bfloat16, tensors=None, **config):  # fmt: skip
    """A run folder with one step; returns the step folder and its whole tensors.

    ``optimizer``: steps of Adam's state to write; None writes none.
    """
    config = LLAMA | config
    tensors = values(config, dtype) if tensors is None else tensors
    folder = run / str(STEPS)
    write_weights(folder, tensors, config, tp, pp, version, numpy2)
    (folder / "model_config.json").write_text(json.dumps(config))
    (folder / "checkpoint_metadata.json").write_text(json.dumps(metadata(version, tp, dp)))
    (folder / "config.yaml").write_text(
        "general:\n  seed: 1\ntokens:\n  micro_batch_size: 2\n  sequence_length: 32\n"
    )
    (run / "latest.txt").write_text(str(STEPS))
    if optimizer is not None:
        write_optimizer(folder, tensors, config, tp, pp, dp, zero, masters, optimizer)
    return folder, {name: tensor for name, (tensor, _) in tensors.items()}


def change_json(path, change):
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))


def change_part(path, said=None, tensors=None):
    """Write a part again, with other metadata or another tensor."""
    with safe_open(path, framework="pt") as file:
        metadata, data = dict(file.metadata() or {}), file.get_tensor("data")
    metadata |= said or {}
    metadata = {key: text for key, text in metadata.items() if text is not None}
    save_file(tensors or {"data": data}, path, metadata=metadata)


def metadata_of(folder, change):
    change_json(folder / "checkpoint_metadata.json", change)


def config_of(folder, **values):
    change_json(folder / "model_config.json", lambda said: said.update(values))
