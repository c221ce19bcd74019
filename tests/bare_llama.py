"""A Llama and its training loop in plain torch: what a fast and simple program gets.

A reference to measure against, nothing else uses it. Weights and AdamW's state are bf16, layers
and loss are compiled, and the loss may be computed in chunks of tokens, whose logits are then
computed again in the backward.

Shapes: B rows, S tokens of a row, D width, H query heads, G key and value heads, K features of a
head, F inner width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and added to its input: (B, S, D) -> same."""

    def __init__(self, width: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.features = heads, kv_heads, width // heads
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.features, bias=False)
        self.out = nn.Linear(heads * self.features, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``cos`` and ``sin`` of the rotary angles: (S, K/2)."""
        rows, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, -1, self.features)
        qkv = qkv.transpose(1, 2)  # (B, H + 2G, S, K)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn features i and i + K/2 by the angle of their position: (B, H, S, K) -> same."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


class BareLlama(nn.Module):
    """Embedding, layers, norm, and a head whose weight the loss reads."""

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        rope_theta: float = 500000.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            Layer(hidden_size, intermediate_size, num_attention_heads, num_key_value_heads)
            for _ in range(num_hidden_layers)
        )
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.features, self.theta = hidden_size // num_attention_heads, rope_theta

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) -> the head's input (B, S, D)."""
        half = torch.arange(0, self.features, 2, device=tokens.device).float() / self.features
        places = torch.arange(tokens.shape[1], device=tokens.device).float()
        angles = places[:, None] * self.theta**-half  # (S, K/2)
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


def chunk_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy of some tokens, in fp32."""
    return F.cross_entropy((x @ weight.t()).float(), labels, reduction="sum")


def loss_of(x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Mean cross entropy; the logits of ``chunk`` tokens exist at a time, in the backward too."""
    x, labels = x.flatten(0, 1), labels.flatten()
    total = x.new_zeros((), dtype=torch.float32)
    for tokens, own in zip(x.split(chunk), labels.split(chunk), strict=True):
        if chunk < len(x):
            total = total + checkpoint(chunk_loss, tokens, weight, own, use_reentrant=False)
        else:
            total = total + chunk_loss(tokens, weight, own)
    return total / len(x)


def training_step(
    model: BareLlama, tokens: Tensor, labels: Tensor, *, chunk: int
) -> Callable[[], Tensor]:
    """Return a compiled training step with fused AdamW, which returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for layer in model.layers:  # one program for all: compiling the whole model takes minutes
        layer.compile()
    loss_fn = torch.compile(loss_of)

    def step() -> Tensor:
        loss = loss_fn(model(tokens), model.head.weight, labels, chunk)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
