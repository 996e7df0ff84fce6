"""With the JIT off (``NUMBA_DISABLE_JIT=1``) kernels run as Python and answer the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import structmax as sx


def answers() -> dict[str, list[float]]:
    """Queries whose kernels use each of the intrinsics."""
    draw = torch.Generator().manual_seed(0)
    unary, transition = torch.randn(3, 5, 9, generator=draw), torch.randn(9, 9, generator=draw)
    out = {}
    for dtype in (torch.float32, torch.float64):
        for scale in (1.0, 100.0):  # near 0 no maximum is subtracted
            chain = sx.LinearChain((scale * unary).to(dtype), transition.to(dtype))
            out[f"chain {dtype} {scale}"] = chain.log_partition()
    chain = sx.LinearChain(unary.double(), transition.double())
    out["sparse chain"] = chain.sparsemap().marginals
    arcs = torch.randn(2, 12, 12, generator=draw)
    arcs[0, 1:, 3] = -torch.inf  # only the root is left
    out["trees"] = sx.DependencyTree(arcs, root="multi").argmax()
    out["sparse trees"] = sx.DependencyTree(arcs.double(), root="multi").sparsemap().marginals
    out["arcs"] = sx.DependencyTree(arcs, projective=True).marginals()
    out["arcs, multi"] = sx.DependencyTree(arcs, projective=True, root="multi").marginals()
    out["spans"] = sx.BinaryTree(torch.randn(2, 10, 10, generator=draw)).marginals()
    emission = torch.randn(2, 4, 2, generator=draw)
    tree = sx.PCFG(torch.zeros(2), torch.randn(2, 4, 4, generator=draw), emission)
    out["grammar"], out["sparse grammar"] = tree.argmax(), tree.sparsemap().marginals
    return {name: value.flatten().tolist() for name, value in out.items()}


def test_same_answers() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    off = json.loads(done.stdout)
    for name, wanted in answers().items():
        assert off[name] == pytest.approx(wanted, rel=1e-5, abs=1e-6), name


if __name__ == "__main__":
    print(json.dumps(answers()))
