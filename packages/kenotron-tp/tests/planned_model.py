"""A decoder of plain torch with what plans stumble over, and a plan for it."""

import torch
import torch.nn.functional as F
from torch import nn

from kenotron_dist.placement import Chunk

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD, INNER = 53, 16, 8, 4, 4, 24


class Attention(nn.Module):
    """Grouped queries, norms of heads and of the width, slopes, a count of heads."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HEAD
        self.q_norm = nn.RMSNorm(HEAD)
        self.read_norm = nn.LayerNorm(WIDTH)
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH)
        self.register_buffer("slopes", torch.linspace(0.1, 0.5, HEAD))

    def forward(self, x):
        x = self.read_norm(x)
        q = self.q_proj(x).view(*x.shape[:2], self.num_heads, HEAD)
        k, v = (f(x).unflatten(-1, (-1, HEAD)) for f in (self.k_proj, self.v_proj))
        q, k, v = (each.transpose(1, 2) for each in (self.q_norm(q) * self.slopes, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, a gated feed-forward with fused matrices, and a plain one that is gathered."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.ffn = nn.ModuleDict(
            {
                "gate_up": nn.Linear(WIDTH, 2 * INNER),
                "down": nn.Linear(INNER, WIDTH, bias=False),
            }
        )
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        x = x + self.attention(x)
        gate, up = self.ffn["gate_up"](x).chunk(2, -1)
        x = x + self.ffn["down"](F.silu(gate) * up)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Token ids (B, S) -> logits (B, S, V)."""

    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


PLAN = {
    "layers.*.attention.q_proj": "colwise",
    "layers.*.attention.k_proj": "colwise",
    "layers.*.attention.v_proj": [Chunk(KV_HEADS * HEAD, parts=KV_HEADS)],
    "layers.*.attention.o_proj": "rowwise",
    "layers.*.attention.q_norm": "replicated_with_grad_allreduce",
    "layers.*.attention.read_norm": "replicate",
    "layers.*.attention.slopes": "replicate",
    "layers.*.attention.num_heads": "divide",
    "layers.*.ffn.gate_up": "packed_colwise",
    "layers.*.ffn.down": "rowwise",
    "layers.*.up": "colwise_rep",
    "layers.*.down": "rowwise_split_input",
    "embedding": "embedding_rowwise",
    "head": "colwise_gather_output",
}
TIED = {"embedding": "rowwise"}
