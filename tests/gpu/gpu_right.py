"""Part ``right``: numbers of one GPU against fp64, against the CPU, against plain versions.

Bounds are those of a GPU: sums have another order there than on a CPU.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_items import NotRunError, Result, Setting, check, item, relative_error
from gpu_program import program
from gpu_trainer import Trainer, draw_batch, fill_on_device, llama
from torch import Tensor

from kenotron_dist import Axis, Mesh
from kenotron_dist.placement import TensorLayout
from kenotron_dist.weight_products import add_product, adds_in_fp32
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    Sampling,
    build_decoder,
    compile_layers,
    generate,
)
from kenotron_models.layers import Attention, AttentionSpec, Block
from kenotron_tp import cross_entropy

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest error over the largest magnitude of the exact result."""
CURVES = 5e-4
"""Largest relative deviation of losses of 10 steps in fp32."""
AXIS = Axis.solo("tp")


def name_of(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@item("checkpoint of device tensors", 60, needs=("xxhash",))
def checkpoint(setting: Setting) -> Iterator[Result]:
    """Every dtype, one strided; saved beside changes, loaded into other memory, bit for bit."""
    from kenotron_ckpt import Saver, load

    mesh, size = Mesh.connect(device=setting.device), setting.pick(4_000_003, 1003)
    tensors = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        tensors[name_of(dtype)] = (100 * torch.randn(size, device=setting.device)).to(dtype)
    tensors["strided"] = torch.randn(37, size // 37, device=setting.device).t()
    held = {name: (each, TensorLayout(name, tuple(each.shape))) for name, each in tensors.items()}
    due = {name: each.clone() for name, each in tensors.items()}
    with Saver(setting.scratch / "run", mesh) as saver:
        saver.save(1, held, {"step": 1})
        saver.wait()
        for each in tensors.values():
            each.zero_()
    loaded = load(setting.scratch / "run", held, mesh)
    wrong = [name for name, each in tensors.items() if not torch.equal(each, due[name])]
    yield {"records": len(loaded.loaded), "bytes": sum(each.nbytes for each in due.values())}
    check(not wrong, f"records {wrong} were not loaded as they were saved")


def train(setting: Setting, device: str, steps: int, **options: Any) -> list[float]:
    """Return the losses of some steps of the tiny model in fp32."""
    mesh, config = Mesh.connect(device=device), llama(setting, "tiny")
    trainer = Trainer(config, mesh, dtype=torch.float32, seed=0, **options)
    batch = draw_batch(config, mesh, micros=2, rows=2, length=setting.pick(64, 16), seed=1)
    return [trainer.step(batch).item() for _ in range(steps)]


def deviation(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two loss curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@item("one device against the CPU", 60)
def against_cpu(setting: Setting) -> Iterator[Result]:
    """Losses of 10 steps in fp32, the same seed and data."""
    steps = setting.pick(10, 2)
    here, there = train(setting, setting.device, steps), train(setting, "cpu", steps)
    off = deviation(here, there)
    yield {"steps": steps, "last loss": here[-1], "deviation from the CPU": off}
    check(here[-1] < here[0], f"the loss did not fall: {here[0]} to {here[-1]}")
    check(off < CURVES, f"losses deviate from the CPU's by {off:.1e}, more than {CURVES}")


@item("attention against fp64", 60)
def attention(setting: Setting) -> Iterator[Result]:
    """Output and input gradient of one attention layer: causal, a window, documents."""
    length = setting.pick(1024, 24)
    whole = torch.arange(length, device=setting.device)
    kinds = {
        "causal": ({}, whole),
        "window": ({"window": length // 4}, whole),
        "documents": ({"separate_documents": True}, whole % (length // 3)),
    }
    for (kind, (fields, places)), dtype in itertools.product(kinds.items(), BOUNDS):
        spec = AttentionSpec(heads=8, kv_heads=2, head_dim=64, **fields)
        layer = Attention(spec, 256, Build(AXIS, device=setting.device, dtype=dtype))
        fill_on_device(layer, 0.05)
        exact = Attention(spec, 256, Build(AXIS, device=setting.device, dtype=torch.float64))
        exact.load_state_dict({n: p.double() for n, p in layer.state_dict().items()})
        x = torch.randn(length, 256, device=setting.device, dtype=dtype)
        gradient = torch.randn_like(x)
        found = []
        for model, cast in ((layer, dtype), (exact, torch.float64)):
            own = x.detach().to(cast).requires_grad_()
            y = model(own, Context(places[None]))
            y.backward(gradient.to(cast))
            found.append((y, own.grad))
        errors = [relative_error(a, b) for a, b in zip(*found, strict=True)]
        yield {f"{kind}, {name_of(dtype)}": dict(zip(("output", "gradient"), errors, strict=True))}
        check(max(errors) < BOUNDS[dtype], f"{kind} in {dtype} is off by {max(errors):.1e}")


@item("head against fp64", 60)
def head(setting: Setting) -> Iterator[Result]:
    """Loss and gradients of both fused heads against F.cross_entropy of whole logits."""
    tokens, width, vocab = setting.pick((2048, 512, 32003), (24, 16, 61))
    labels = torch.randint(vocab, (tokens,), device=setting.device)
    labels[:5] = -100
    for dtype in BOUNDS:
        x = torch.randn(tokens, width, device=setting.device, dtype=dtype)
        weight = torch.randn(vocab, width, device=setting.device, dtype=dtype) * width**-0.5
        exact = gradients(
            lambda a, w: F.cross_entropy(a @ w.t(), labels, reduction="sum"),
            x.double(), weight.double(),
        )  # fmt: skip
        heads = {
            "linear_cross_entropy": lambda a, w: cross_entropy(
                a, labels, AXIS, weight=w, vocab_size=vocab, chunk=max(tokens // 3, 1)
            )[0].sum(),
            "linear_cross_entropy_sum": lambda a, w: cross_entropy(
                a, labels, AXIS, weight=w, reduction="sum", vocab_size=vocab
            )[0],
        }
        for name, call in heads.items():
            found = gradients(call, x, weight)
            errors = [relative_error(a, b) for a, b in zip(found, exact, strict=True)]
            row = dict(zip(("loss", "input gradient", "weight gradient"), errors, strict=True))
            yield {f"{name}, {name_of(dtype)}": row}
            check(max(errors) < BOUNDS[dtype], f"{name} in {dtype} is off by {max(errors):.1e}")


def gradients(call: Any, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the loss and its gradients by x and weight."""
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    loss = call(*leaves)
    return [loss, *torch.autograd.grad(loss, leaves)]


@item("fused against plain AdamW", 60)
def fused(setting: Setting) -> Iterator[Result]:
    """Losses of 10 steps with one fused kernel, and with one operation after the other."""
    steps = setting.pick(10, 2)
    one, other = (train(setting, setting.device, steps, fused=each) for each in (True, False))
    off = deviation(one, other)
    yield {"steps": steps, "deviation": off}
    check(off < CURVES, f"the fused optimizer deviates by {off:.1e}, more than {CURVES}")


@item("resume, bit for bit", 60, needs=("xxhash",))
def resume(setting: Setting) -> Iterator[Result]:
    """Six steps against three, a checkpoint, and three; deterministic algorithms."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    from kenotron_ckpt import load, save

    mesh, config = Mesh.connect(device=setting.device), llama(setting, "tiny")
    batch = draw_batch(config, mesh, micros=2, rows=2, length=setting.pick(128, 16), seed=1)

    def fresh(seed: int) -> Trainer:
        return Trainer(config, mesh, dtype=torch.bfloat16, seed=seed)

    whole = fresh(0)
    expected = [whole.step(batch).item() for _ in range(6)]
    first = fresh(0)
    found = [first.step(batch).item() for _ in range(3)]
    save(setting.scratch / "run", 3, first.records(), mesh, {})
    second = fresh(1)
    load(setting.scratch / "run", second.wanted(), mesh)
    second.optimizer.steps = 3
    second.optimizer.publish()
    found += [second.step(batch).item() for _ in range(3)]
    pairs = zip(whole.stack.parameters(), second.stack.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    yield {"losses": found, "losses of one run": expected, "equal parameters": same}
    check(found == expected and same, "a resumed run differs from one that was not stopped")


@item("generation against the CPU", 60)
def generation(setting: Setting) -> Iterator[Result]:
    """Greedy tokens of the tiny model in fp32 on the device and on the CPU."""
    config, texts = llama(setting, "tiny"), []
    layers = build_decoder(config, Build(AXIS, device="cpu", dtype=torch.float32))
    stack = LayerStack(layers)
    fill_on_device(stack, 0.2)
    prompts = [[1, 2, 3, 4, 5], [7, 8], [11]]
    for device in (setting.device, "cpu"):
        stack.to(device)
        steps = generate(
            stack, prompts, Mesh.connect(device=device), window=64,
            vocab_size=config.vocab_size, max_new_tokens=setting.pick(32, 4), sampling=Sampling(),
        )  # fmt: skip
        texts.append(list(steps))
    yield {"tokens": len(texts[0]) * len(prompts), "first text": [row[0] for row in texts[0]]}
    check(texts[0] == texts[1], f"the device continues with {texts[0]}, the CPU with {texts[1]}")


@item("compiled layer against eager", 120)
def compiled(setting: Setting) -> Iterator[Result]:
    """Output, input gradient and weight gradients of one layer."""
    config, length = llama(setting, "1b", layers=1), setting.pick(1024, 16)
    context = Context(torch.arange(length, device=setting.device)[None])
    block = config.decoder.blocks[0]
    for dtype in BOUNDS:
        eager = Block(block, config.hidden_size, Build(AXIS, device=setting.device, dtype=dtype))
        fill_on_device(eager)
        other = Block(block, config.hidden_size, Build(AXIS, device=setting.device, dtype=dtype))
        other.load_state_dict(eager.state_dict())
        compile_layers([other])
        x = torch.randn(length, config.hidden_size, device=setting.device, dtype=dtype)
        gradient, found = torch.randn_like(x), []
        for layer in (eager, other):
            own = x.detach().requires_grad_()
            y = layer(own, context)
            y.backward(gradient)
            found.append([y, own.grad, *(each.grad for each in layer.parameters())])
        errors = [relative_error(a, b) for a, b in zip(*found, strict=True)]
        yield {name_of(dtype): {"output": errors[0], "worst gradient": max(errors[1:])}}
        check(max(errors) < BOUNDS[dtype], f"{dtype}: the program is off by {max(errors):.1e}")


@item("bfloat16 products added in fp32", 20)
def products(setting: Setting) -> Iterator[Result]:
    """A weight gradient added to an fp32 buffer, and whether one kernel does it."""
    rows, width = setting.pick(2048, 24), setting.pick(1024, 16)
    like = {"device": setting.device, "dtype": torch.bfloat16}
    dy, x = torch.randn(rows, width, **like), torch.randn(rows, 2 * width, **like)
    out = torch.full((width, 2 * width), torch.nan, device=setting.device)
    add_product(out, dy.t(), x, replaces=True)
    add_product(out, dy.t(), x)
    error = relative_error(out, 2 * (dy.double().t() @ x.double()))
    yield {"one kernel": adds_in_fp32(out.device), "error": error}
    check(error < 1e-5, f"the sum of two products is off by {error:.1e}")


@item("memcheck of a tiny step", 150, gpu="compute-sanitizer checks CUDA kernels")
def memcheck(setting: Setting) -> Iterator[Result]:
    """One training step under compute-sanitizer, without torch's caching of memory."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        raise NotRunError("compute-sanitizer is not installed")
    environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    entry = Path(__file__).resolve().parent.parent / "gpu_day.py"
    command = [tool, "--tool", "memcheck", "--print-limit", "20", sys.executable, str(entry)]
    done = subprocess.run(
        [*command, "tiny-step"], capture_output=True, text=True, env=environ, check=False
    )
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    yield {"status": done.returncode, "summary": summary[-1] if summary else "none"}
    ended = "tiny step done" in done.stdout and summary and " 0 errors" in summary[-1]
    check(bool(ended), (done.stdout + done.stderr)[-1500:])


def tiny_step(device: str) -> float:
    """Make one training step of the tiny model; its loss."""
    setting = Setting(device, device == "cpu", Path())
    return train(setting, device, 1)[0]


ITEMS = [
    against_cpu, attention, head, checkpoint, resume, fused, generation, compiled, program,
    products, memcheck,
]  # fmt: skip
