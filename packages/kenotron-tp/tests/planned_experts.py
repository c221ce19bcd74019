"""A decoder of plain torch with experts and latent attention, and a plan for it."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HEADS, NOPE, ROPE, LATENT, INNER, EXPERTS = 53, 18, 4, 6, 4, 10, 8, 3


class LatentAttention(nn.Module):
    """Keys from a latent, and one more that all heads share; sinks; a gate's bias of each head."""

    def __init__(self):
        super().__init__()
        self.qk_rope_head_dim = ROPE
        self.q_proj = nn.Linear(WIDTH, HEADS * (NOPE + ROPE))
        self.kv_a_proj = nn.Linear(WIDTH, LATENT + ROPE)
        self.kv_a_norm = nn.RMSNorm(LATENT)
        self.kv_b_proj = nn.Linear(LATENT, HEADS * 2 * NOPE)
        self.key_norm = nn.LayerNorm(ROPE)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.o_proj = nn.Linear(HEADS * NOPE, WIDTH)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (-1, NOPE + ROPE)).transpose(1, 2)
        latent, key = self.kv_a_proj(x).split([LATENT, ROPE], -1)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).unflatten(-1, (-1, 2 * NOPE)).transpose(1, 2)
        k, v = kv.chunk(2, -1)
        shared = self.key_norm(key)[:, None].expand(-1, k.shape[1], -1, -1)
        scores = q @ torch.cat([k, shared], -1).transpose(-1, -2)
        seen = torch.ones(scores.shape[-2:]).tril().bool()
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores.masked_fill(~seen, -1e9), sinks], -1)
        mixed = scores.softmax(-1)[..., :-1] @ v
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Experts in stacks; the last one is the identity."""

    def __init__(self, transposed):
        super().__init__()
        self.transposed = transposed
        up, down = (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER)
        if transposed:
            up, down = ((e, i, o) for e, o, i in (up, down))
        self.gate_up_proj = nn.Parameter(torch.randn(up) / 4)
        self.down_proj = nn.Parameter(torch.randn(down) / 4)
        self.middle_norm = nn.Parameter(torch.ones(EXPERTS))
        self.identity = nn.Identity()

    def forward(self, x, weights, *, scale):
        result = weights[..., -1:] * self.identity(x)
        for i in range(EXPERTS):
            up, down = self.gate_up_proj[i], self.down_proj[i]
            if self.transposed:
                up, down = up.T, down.T
            gate, up = F.linear(x, up).chunk(2, -1)
            y = F.linear(F.silu(gate) * up * self.middle_norm[i], down)
            result = result + weights[..., i : i + 1] * scale * y
        return result


class SharedExperts(nn.Module):
    """Matrices that are parameters of the module itself."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(INNER, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(WIDTH, INNER) / 4)

    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self.up_proj)), self.down_proj)


class Scaled(nn.Embedding):
    """An embedding that multiplies its rows."""

    def __init__(self):
        super().__init__(VOCAB, WIDTH, padding_idx=40)
        self.weight.data *= 0.2
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, ids):
        return super().forward(ids) * self.scale


class Layer(nn.Module):
    """Attention, routed and shared experts."""

    def __init__(self, transposed):
        super().__init__()
        self.attention, self.experts = LatentAttention(), Experts(transposed)
        self.router, self.shared = nn.Linear(WIDTH, EXPERTS + 1), SharedExperts()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        x = x + self.attention(x)
        weights = self.router(x).softmax(-1)
        return x + self.experts(x, weights, scale=self.scale) + self.shared(x)


class Model(nn.Module):
    """Token ids (B, S) -> logits (B, S, V)."""

    def __init__(self, tied):
        super().__init__()
        self.embedding, self.more = Scaled(), nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(transposed) for transposed in (False, True))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.more(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


PLAN = {
    "layers.*.attention": "local_params",
    "layers.*.attention.q_proj": "colwise",
    "layers.*.attention.kv_a_proj": "mla_kv_a_proj",
    "layers.*.attention.kv_a_norm": "replicate",
    "layers.*.attention.kv_b_proj": "colwise",
    "layers.*.attention.key_norm": "replicated_with_grad_allreduce",
    "layers.*.attention.sinks": "colwise",
    "layers.*.attention.o_proj": "rowwise",
    "layers.*.experts": "moe_tp_experts",
    "layers.*.experts.identity": "moe_identity_expert",
    "layers.*.experts.middle_norm": "replicated_with_grad_allreduce",
    "layers.0.experts.gate_up_proj": "packed_colwise",
    "layers.0.experts.down_proj": "rowwise",
    "layers.1.experts.gate_up_proj": "packed_rowwise",
    "layers.1.experts.down_proj": "colwise",
    "layers.*.shared": "all_reduce",
    "layers.*.shared.up_proj": "colwise",
    "layers.*.shared.down_proj": "rowwise",
    "embedding": "embedding_rowwise",
    "more": "embedding_colwise",
    "head": "colwise_gather_output",
}
