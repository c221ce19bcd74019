"""What these tests compare with: one process with a dense mask."""

import torch

from kenotron_cp import attend, cut_sequence, join_sequence


def normal(*shape, seed, dtype=torch.float32):
    """Draws that every rank can repeat."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(batch, sequence, heads, kv_heads, depth, width, dtype=torch.float32):
    """q, k, v and the gradient of the output, of the whole sequence."""
    return (
        normal(batch, sequence, heads, depth, seed=1, dtype=dtype),
        normal(batch, sequence, kv_heads, depth, seed=2, dtype=dtype),
        normal(batch, sequence, kv_heads, width, seed=3, dtype=dtype),
        normal(batch, sequence, heads, width, seed=4, dtype=dtype),
    )


def dense(q, k, v, grad, mask, scoring, factors=None):
    """Output and gradients with the mask of the whole sequence, in fp64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ keys.mT * scoring.scale
    if scoring.cap is not None:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0) * mask
    if scoring.sinks is not None:
        total = scores.exp().sum(-1, keepdim=True)
        weights = weights * (total / (total + scoring.sinks.double().exp()[:, None, None]))
    if factors is not None:
        weights = weights * factors
    out = (weights @ values).transpose(1, 2)
    sees = mask.any(-1).movedim(1, 2)[..., None]
    grads = torch.autograd.grad(torch.where(sees, out, 0), (q, k, v), grad.double())
    return (out.detach(), *(g.nan_to_num(0) for g in grads))


def whole(mesh, tensors, sight, **options):
    """Output and gradients of ``attend`` over the cut sequence, joined again."""
    axis = mesh["cp"]
    layout = {name: options[name] for name in ("layout",) if name in options}
    q, k, v, grad = (cut_sequence(x, axis, **layout) for x in tensors)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, axis, sight, **options)
    out.backward(grad)
    found = (out.detach(), *(x.grad for x in leaves))
    return [join_sequence(x, axis, sight.sequence, **layout) for x in found]
