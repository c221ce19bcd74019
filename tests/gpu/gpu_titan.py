"""torchtitan's Llama as a contestant: its model and its compiled blocks, one GPU, bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_items import Setting
from gpu_trainer import Micro, fill_on_device

MODULES = ("torchtitan", "triton")
"""What has to be there; torchtitan imports triton."""


def titan_step(setting: Setting, config: Any, batch: Micro) -> Callable[[], object]:
    """Return a step of torchtitan's Llama: blocks compiled one by one, loss in fp32, fused AdamW.

    On CUDA attention is its kernel for sequences of several lengths; elsewhere torch's own.
    """
    device = torch.device(setting.device)
    with torch.device("meta"):
        model = titan_config(config, on_cuda=device.type == "cuda").build().to(torch.bfloat16)
    model.to_empty(device=device)
    model.init_states(buffer_device=device)  # tables of angles
    fill_on_device(model)
    for block in model.layers.values():
        block.compile(fullgraph=True)
    places = torch.arange(batch.tokens_BS.shape[1], device=device).expand_as(batch.tokens_BS)
    masks = model.get_attention_masks(places) if device.type == "cuda" else None
    loss_of = torch.compile(_loss)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss_of(model(batch.tokens_BS, places, masks), batch.labels_BS).backward()
        adam.step()
        adam.zero_grad()

    return step


def titan_config(config: Any, *, on_cuda: bool) -> Any:
    """Return torchtitan's config of a model of the sizes of ours."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    width, vocab = config.hidden_size, config.vocab_size
    rope = ComplexRoPE.Config(
        dim=width // config.num_attention_heads,
        max_seq_len=config.max_position_embeddings,
        theta=config.rope_theta,
    )
    layers = llama3._build_llama3_layers(  # its named models have sizes of their own only
        n_layers=config.num_hidden_layers,
        dim=width,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        hidden_dim=config.intermediate_size,
        rope=rope,
        attn_backend="varlen",
    )
    for layer in layers if not on_cuda else ():
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=width),
        norm=RMSNorm.Config(normalized_shape=width),
        lm_head=Linear.Config(in_features=width, out_features=vocab),
        layers=layers,
    )


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
