"""Part ``probe``: what this GPU and this torch can do, and where a training step waits.

Shapes: M tokens, B rows, H query heads, S sequence, K features of a head.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_items import Result, Setting, first_line, item
from gpu_program import waiting_lines as program_lines
from gpu_trainer import Trainer, draw_batch, llama
from gpu_waiting import synchronisations
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kenotron_dist import Mesh

TOKENS = (261, 512, 1024, 2048, 4096)
"""M of the products: 261 tokens are one chunk of the head today, 4096 a row."""
PRODUCTS = {  # name -> (out, in) features
    "8b qkv": (6144, 4096),
    "8b out": (4096, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b head": (128256, 4096),
    "1b qkv": (3072, 2048),
    "1b out": (2048, 2048),
    "1b gate_up": (16384, 2048),
    "1b down": (2048, 8192),
    "1b head": (128256, 2048),
}
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
DOCUMENT = 512
"""Tokens of a document, where a row holds several."""


def square_tflops(setting: Setting) -> float:
    """Return TFLOP/s of a large bf16 product of random values: the ceiling of this machine."""
    n = setting.pick(8192, 64)
    a, b = (torch.randn(n, n, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / setting.median_ms(lambda: torch.mm(a, b, out=out), repeats=20) / 1e9


@item("copy bandwidth", 40)
def copy_bandwidth(setting: Setting) -> Iterator[Result]:
    """Copies within the device; bytes read and written both count."""
    for mib in setting.pick((64, 1024, 4096), (1,)):
        source = torch.randn(mib << 18, device=setting.device)
        target = torch.empty_like(source)
        ms = setting.median_ms(lambda t=target, s=source: t.copy_(s))
        yield {f"copy of {mib} MiB": {"ms": ms, "GB/s": 2 * source.nbytes / ms / 1e6}}
        del source, target


@item("products", 60)
def products(setting: Setting) -> Iterator[Result]:
    """bf16 products of random values, as a forward of a layer makes them: x W^T."""
    yield {"8192 x 8192 x 8192 TFLOP/s": square_tflops(setting)}
    for name, (out, inputs) in PRODUCTS.items():
        out, inputs = setting.pick((out, inputs), (32, 16))
        weight = torch.randn(out, inputs, device=setting.device, dtype=torch.bfloat16)
        row: dict[str, float] = {}
        for tokens in TOKENS:
            x = torch.randn(
                setting.pick(tokens, 8), inputs, device=setting.device, dtype=torch.bfloat16
            )
            ms = setting.median_ms(lambda x=x, w=weight: F.linear(x, w))
            row[f"M={tokens} TFLOP/s"] = 2 * len(x) * out * inputs / ms / 1e9
        yield {name: row}


def attention_inputs(setting: Setting, width: int, heads: int, kv_heads: int) -> list[Tensor]:
    """Return q, k, v (1, H, S, K) with gradients, random bf16."""
    length = setting.pick(4096, 32)
    return [
        torch.randn(
            1, n, length, width, device=setting.device, dtype=torch.bfloat16, requires_grad=True
        )
        for n in (heads, kv_heads, kv_heads)
    ]


def forward_backward(call: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    """Return what runs ``call`` forward and backward."""
    gradient = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), inputs, gradient)


@item("sdpa back ends", 80)
def sdpa(setting: Setting) -> Iterator[Result]:
    """Forward and backward, ms at s=4096: back end x width of heads x groups x what is hidden."""
    length, (heads, groups) = setting.pick(4096, 32), setting.pick((32, 8), (4, 2))
    places = torch.arange(length, device=setting.device)
    document = places // setting.pick(DOCUMENT, 8)
    mask = (document[:, None] == document) & (places[:, None] >= places)
    hides = {"causal": {"is_causal": True}, "mask": {"attn_mask": mask[None, None]}, "none": {}}
    for backend, chosen in BACKENDS.items():
        for width in (128, 64):
            row: dict[str, Any] = {}
            for kv_heads in (heads, groups):
                q, k, v = attention_inputs(setting, width, heads, kv_heads)
                for hidden, options in hides.items():
                    grouped = kv_heads != heads

                    def call(
                        q: Tensor = q, k: Tensor = k, v: Tensor = v, grouped: bool = grouped,
                        options: dict[str, Any] = options, chosen: SDPBackend = chosen,
                    ) -> Tensor:  # fmt: skip
                        with sdpa_kernel([chosen]):
                            return F.scaled_dot_product_attention(
                                q, k, v, enable_gqa=grouped, **options
                            )

                    name = f"{'grouped' if grouped else 'equal heads'}, {hidden} ms"
                    row[name] = milliseconds(setting, call, [q, k, v])
            yield {f"{backend}, K={width}": row}
            setting.empty_cache()


def milliseconds(setting: Setting, call: Callable[[], Tensor], inputs: list[Tensor]) -> float | str:
    """Return the median of forward and backward, or ``no: <why>`` where it cannot run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each back end that refuses says why in a warning
            return setting.median_ms(forward_backward(call, inputs), repeats=5, warmup=2)
    except RuntimeError as error:
        return f"no: {first_line(error)}"[:100]


@item("varlen attention", 30, gpu="its kernels exist on CUDA only")
def varlen(setting: Setting) -> Iterator[Result]:
    """torch.nn.attention.varlen on documents of 512 tokens, and what its arguments are here."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    yield {"signature": str(inspect.signature(varlen_attn))}
    starts = torch.arange(0, 4097, DOCUMENT, device=setting.device, dtype=torch.int32)
    causal = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    for kv_heads in (32, 8):
        options = causal | ({"enable_gqa": kv_heads != 32} if "enable_gqa" in known else {})
        inputs = [
            torch.randn(
                4096, n, 128, device=setting.device, dtype=torch.bfloat16, requires_grad=True
            )
            for n in (32, kv_heads, kv_heads)
        ]

        def call(inputs: list[Tensor] = inputs, options: dict[str, Any] = options) -> Any:
            return varlen_attn(*inputs, starts, starts, DOCUMENT, DOCUMENT, **options)

        yield {f"{kv_heads} kv heads of 32, K=128": {"ms": milliseconds(setting, call, inputs)}}


@item("lines that synchronise", 60, gpu="the CPU never waits for itself")
def waiting_lines(setting: Setting) -> Iterator[Result]:
    """File and line, and how often in one training step of 2 micro-batches built on the libraries.

    Lines of the optimizer's own kernels in torch are counted under the line that called them.
    """
    mesh, config = Mesh.connect(device=setting.device), llama(setting, "tiny")
    trainer = Trainer(config, mesh, dtype=torch.bfloat16, seed=0)
    batch = draw_batch(config, mesh, micros=2, rows=1, length=64, seed=0)
    for _ in range(3):
        trainer.step(batch)
    setting.synchronize()
    with synchronisations() as found:
        torch.cuda.set_sync_debug_mode("warn")
        loss = trainer.step(batch)
        torch.cuda.set_sync_debug_mode("default")
    yield {"synchronisations in a step": found.total(), "loss": loss.item()}
    yield {line: {"times": count} for line, count in found.most_common()}


@item("two equal steps", 40)
def equal_steps(setting: Setting) -> Iterator[Result]:
    """Whether the gradient of one step made twice has the same bits, without deterministic mode."""
    mesh, config = Mesh.connect(device=setting.device), llama(setting, "1b", layers=2)
    trainer = Trainer(config, mesh, dtype=torch.bfloat16)
    batch = draw_batch(config, mesh, micros=2, rows=1, length=setting.pick(2048, 16), seed=0)
    found = []
    for _ in range(2):
        slices, loss = trainer.gradient(batch)
        found.append(({name: each.clone() for name, each in slices.items()}, loss.item()))
    (one, loss), (two, again) = found
    differing = [name for name in one if not torch.equal(one[name], two[name])]
    worst = max(((one[n] - two[n]).norm() / one[n].norm()).item() for n in one)
    yield {
        "equal losses": loss == again,
        "tensors": len(one),
        "tensors whose gradient differs": len(differing),
        "largest relative difference of a gradient": worst,
        "first that differ": ", ".join(differing[:5]),
    }


ITEMS = [copy_bandwidth, products, sdpa, waiting_lines, equal_steps, varlen, program_lines]
