"""Is the installation well? Versions, devices, and kernels that compile and agree."""

from __future__ import annotations

import importlib.metadata
import platform
import time

import torch

import structmax as sx

REQUIRED = ("structmax", "torch", "numpy", "scipy", "numba")
OPTIONAL = ("triton", "typer", "rich", "safetensors", "tensorboard")


def examine() -> list[tuple[str, str, bool]]:
    """Rows of a report: what, how it is, and whether that is well.

    >>> examine()[0]
    ('python', '3...', True)
    """
    rows = [("python", platform.python_version(), True)]
    for name in (*REQUIRED, *OPTIONAL):
        try:
            version = importlib.metadata.version(name)
            # torch itself also says which build it is, such as 2.13.0+cu130
            rows.append((name, torch.__version__ if name == "torch" else version, True))
        except importlib.metadata.PackageNotFoundError:
            optional = name in OPTIONAL
            rows.append((name, "not installed (optional)" if optional else "missing", optional))
    rows.append(("cpu kernels", *_kernels(torch.device("cpu"))))
    if not torch.cuda.is_available():
        rows.append(("gpu", "none that torch can use", True))
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        rows.append(
            (f"gpu {number}", f"{properties.name}, {properties.total_memory >> 30} GiB", True)
        )
        rows.append((f"gpu {number} kernels", *_kernels(torch.device("cuda", number))))
    return rows


def _kernels(device: torch.device) -> tuple[str, bool]:
    """Whether a chain and a tree give what plain torch gives."""
    draw = torch.Generator().manual_seed(0)
    scores = [
        torch.randn(size, generator=draw).to(device) for size in [(2, 5, 3), (3, 3), (2, 6, 6)]
    ]
    start = time.monotonic()
    try:
        found = _marginals(*scores)
        with sx.backend("naive"):
            wanted = _marginals(*scores)
        agree = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, wanted))
    except Exception as error:
        return f"fail: {' '.join(str(error).split()) or type(error).__name__}", False
    seconds = time.monotonic() - start
    return (f"compile and agree ({seconds:.1f} s)" if agree else "disagree with torch"), agree


def _marginals(
    unary: torch.Tensor, transition: torch.Tensor, spans: torch.Tensor
) -> list[torch.Tensor]:
    return [sx.LinearChain(unary, transition).marginals(), sx.BinaryTree(spans).marginals()]
