"""Variables of CUDA, its allocator and cuBLAS that ranks have unless the user set them."""

from __future__ import annotations

from collections.abc import Mapping

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names under which torch reads the settings of its allocator."""

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC = (":4096:8", ":16:8")
"""Settings of it with which cuBLAS gives the same bits every time; the first is the faster one."""


def missing_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``environ`` lacks. Pure.

    - Expandable segments: blocks of many sizes, as of packed documents, fragment the allocator's
      memory otherwise. Not added where the user configured the allocator under any of its names.
    - Eager loading of kernels: the first use of a kernel may wait for all that the device runs, and
      a receive that was posted runs until its peer sends, so two ranks could wait for one another.
    """
    found = {"CUDA_MODULE_LOADING": "EAGER"}
    if not any(name in environ for name in ALLOCATOR):
        found[ALLOCATOR[0]] = "expandable_segments:True"
    return {name: value for name, value in found.items() if name not in environ}


def deterministic_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``environ`` lacks for deterministic matrix products. Pure.

    Raises:
        ValueError: the user's own setting makes cuBLAS choose its workspace again in each call.
    """
    given = environ.get(CUBLAS_WORKSPACE)
    if given is None:
        return {CUBLAS_WORKSPACE: DETERMINISTIC[0]}
    if given not in DETERMINISTIC:
        raise ValueError(
            f"{CUBLAS_WORKSPACE}={given} was given in the environment, but deterministic runs need "
            f"{' or '.join(DETERMINISTIC)}: unset it, set one of these, or turn determinism off "
            "(general.deterministic: false)"
        )
    return {}
