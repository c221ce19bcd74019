"""A decoder of plain torch whose queries, keys and values are one matrix, and plans for it."""

import planned_model
import torch
import torch.nn.functional as F
from planned_model import HEAD, INNER, WIDTH
from torch import nn

HEADS = 4


class Conv1D(nn.Module):
    """A linear layer whose weight is (I, O), as transformers' class of this name."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(0.1 * torch.randn(nx, nf))
        self.bias = nn.Parameter(0.1 * torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class PlainLinear(nn.Linear):
    """The same product by other code."""

    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class DoubleLinear(nn.Linear):
    """Another product."""

    def forward(self, x):
        return super().forward(x) * 2


class Attention(nn.Module):
    """Queries, keys and values lie as ``pieces`` says; scores have a bias of each head."""

    def __init__(self, pieces):
        super().__init__()
        self.pieces, self.num_heads, self.head_dim = pieces, HEADS, HEAD
        features = {"multi_query": WIDTH + 2 * HEAD}.get(pieces, 3 * WIDTH)
        self.qkv = Conv1D(features, WIDTH) if pieces == "qkv" else PlainLinear(WIDTH, features)
        self.dense = Conv1D(WIDTH, WIDTH) if pieces == "qkv" else nn.Linear(WIDTH, WIDTH)

    def forward(self, x, alibi=None, attention_mask=None):
        y, heads = self.qkv(x), (-1, self.num_heads)
        if self.pieces == "qkv":
            q, k, v = (each.unflatten(-1, (-1, HEAD)) for each in y.chunk(3, -1))
        elif self.pieces == "heads":
            q, k, v = y.unflatten(-1, (self.num_heads, 3, HEAD)).unbind(-2)
        else:
            q, k, v = y.unflatten(-1, (-1, HEAD)).split([self.num_heads, 1, 1], -2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        bias = attention_mask
        if alibi is not None:
            bias = bias + (alibi if alibi.ndim == 4 else alibi.unflatten(0, heads))
        mixed = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), attn_mask=bias)
        return self.dense(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, pieces):
        super().__init__()
        self.attention = Attention(pieces)
        self.up, self.down = Conv1D(INNER, WIDTH), Conv1D(WIDTH, INNER)

    def forward(self, x):
        rows, tokens = x.shape[:2]
        mask = torch.full((tokens, tokens), -torch.inf).triu(1)
        slopes = torch.linspace(0.1, 0.4, HEADS).view(1, HEADS, 1, 1) * torch.arange(tokens)
        slopes = slopes.expand(rows, -1, -1, -1)
        if self.attention.pieces == "qkv":  # (B H, 1, S)
            x = x + self.attention(x, alibi=slopes.flatten(0, 1), attention_mask=mask)
        elif self.attention.pieces == "heads":  # (B, H, 1, S)
            x = x + self.attention(x, alibi=slopes, attention_mask=mask[None, None])
        else:  # (B, H, S, S)
            x = x + self.attention(x, attention_mask=mask + slopes)
        return x + self.down(F.gelu(self.up(x)))


class Model(planned_model.Model):
    """Token ids (B, S) -> logits (B, S, V); a kind of pieces in each layer."""

    def __init__(self, tied):
        super().__init__(tied)
        self.layers = nn.ModuleList(map(Layer, ("qkv", "heads", "multi_query")))


PLAN = {
    "layers.0.attention.qkv": "qkv_colwise",
    "layers.1.attention.qkv": "heads_colwise",
    "layers.2.attention.qkv": "multi_query_colwise",
    "layers.*.attention": "own_heads_of_bias",
    "layers.*.attention.dense": "rowwise",
    "layers.*.attention.num_heads": "divide",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "embedding": "embedding_rowwise",
    "head": "colwise_gather_output",
}
