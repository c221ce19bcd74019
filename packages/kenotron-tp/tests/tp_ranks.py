"""What a whole tensor is to one of several ranks."""

import torch

from kenotron_dist import GridView, all_reduce
from kenotron_dist.boxes import gradient_sums, scatter
from kenotron_dist.placement import Shard, TensorLayout, parameter_layouts


def whole_numbers(*shape, seed, dtype=torch.float32):
    """Small integers: sums of products of them are exact, in bf16 too, in any order."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-2, 3, shape, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def normal(*shape, seed, dtype=torch.float32):
    """Draws that every rank can repeat."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def part(whole, dim, mesh, chunks=None):
    """This rank's part of a dimension of a whole tensor; padding is zero."""
    dim = dim % whole.ndim
    layout = TensorLayout("x", tuple(whole.shape), (Shard("tp", dim, chunks),))
    return scatter(whole, layout, mesh.view(layout))


def own_rows(x, mesh):
    """This rank's rows of a whole tensor, zeros where they end."""
    n, me = mesh["tp"].size, mesh["tp"].rank
    rows = -(-len(x) // n)
    missing = torch.zeros(rows * n - len(x), *x.shape[1:], dtype=x.dtype)
    return torch.cat([x, missing])[me * rows : (me + 1) * rows]


def parts_of_all(whole, dim, mesh, chunks=None):
    """The parts of all ranks, connected to the whole by autograd."""
    dim = dim % whole.ndim
    layout = TensorLayout("x", tuple(whole.shape), (Shard("tp", dim, chunks),))
    names = torch.arange(1, whole.numel() + 1).view(whole.shape)
    found = []
    for rank in range(mesh.sizes["tp"]):
        index = scatter(names, layout, GridView(mesh.sizes, {**mesh.coords, "tp": rank}))
        padded = torch.cat([whole.new_zeros(1), whole.flatten()])
        found.append(padded[index])
    return found


def whole_gradients(layer, mesh):
    """Gradients after the sums that the placements ask for, and the layouts."""
    layouts = parameter_layouts(layer, mesh.sizes)
    found = {}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad.clone()
        for each in gradient_sums(layouts[name], mesh.view(layouts[name])):
            axis = mesh.subaxis(each.axis, each.parts)
            for box in each.boxes:
                view = box.of_local(grad)
                view.copy_(all_reduce(view, axis))
        found[name] = grad
    return found, layouts


def check_parameters(layer, reference, mesh, close, *, summed=False):
    """Values and gradients of every parameter are this rank's part of the reference's."""
    grads, layouts = whole_gradients(layer, mesh)
    if summed:
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert set(layouts) == {name for name, _ in reference.named_parameters()}
    for name, whole in reference.named_parameters():
        assert layouts[name].shape == whole.shape
        own = dict(layer.named_parameters())[name]
        assert torch.equal(own, scatter(whole.detach(), layouts[name], mesh.view(layouts[name])))
        close(grads[name], scatter(whole.grad, layouts[name], mesh.view(layouts[name])))


def equal(found, expected):
    """Bitwise, dtype and shape too."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
