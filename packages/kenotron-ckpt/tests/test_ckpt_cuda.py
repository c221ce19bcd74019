"""Saving from an accelerator: copies beside the work, values of the moment of the call."""

import pytest
import torch

from kenotron_ckpt import Saver, load
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")


def device():
    return str(torch.accelerator.current_accelerator())


def tensors(count=6, size=3_000_000):
    """Large and small ones, one strided, one of two bytes an element."""
    found = {}
    for number in range(count):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        tensor = torch.randn(size >> number, 4, device=device()).to(dtype)
        found[f"w{number}"] = tensor.t() if number == 2 else tensor
    return {k: (t, TensorLayout(k, tuple(t.shape))) for k, t in found.items()}


def work(x):
    for _ in range(60):
        x = torch.tanh(x @ x)
    return x


@pytest.mark.parametrize("pool_bytes", [1 << 33, 1 << 20], ids=["it fits", "piece by piece"])
@pytest.mark.parametrize("pin", [True, False])
def test_the_file_holds_the_moment_of_the_call(tmp_path, pool_bytes, pin):
    mesh = Mesh.connect(device=device())
    live = tensors()
    busy = torch.randn(4096, 4096, device=device())
    with Saver(tmp_path, mesh, pool_bytes=pool_bytes, pin=pin) as saver:
        for step in range(1, 4):
            busy = work(busy)  # the device is behind the process
            for tensor, _ in live.values():
                tensor.add_(1)
            due = {key: tensor.clone() for key, (tensor, _) in live.items()}
            saver.save(step, live, {}, volatile=["w3"])
            live["w3"][0].zero_()
            busy = work(busy)
            saver.wait()
            for tensor, _ in live.values():
                tensor.mul_(-1)
            saver.finish()
            blank = {key: (torch.zeros_like(t), layout) for key, (t, layout) in live.items()}
            assert load(tmp_path, blank, mesh).step == step
            assert all(torch.equal(blank[key][0], due[key]) for key in due)
            live["w3"][0].copy_(due["w3"])


def test_the_call_does_not_wait_for_the_device(tmp_path):
    mesh, live = Mesh.connect(device=device()), tensors(size=30_000_000)
    with Saver(tmp_path, mesh) as saver:
        saver.reserve(live)
        saver.save(1, live, {})
        saver.finish()
        busy = work(torch.randn(8192, 8192, device=device()))
        saver.save(2, live, {})
        saver.wait()
        ended = torch.Event()
        ended.record()
        assert not ended.query()  # the product is still under way, and so is the copy
        torch.accelerator.synchronize()
        assert busy.isfinite().all()
