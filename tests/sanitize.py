"""Launches every Triton kernel of the package at odd sizes, for a sanitizer to watch::

    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py

It ends with the kernels that were launched, and fails if one of the package was not.
"""

from __future__ import annotations

import ast
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # to try the script itself
sys.path.insert(0, str(Path(__file__).parent))

import triton
from table import ROWS

import structmax as sx

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(sx.__file__).parent
QUERIES = ("log_partition", "marginals", "argmax", "entropy", "max_marginals", "sample")
STRUCTURES = [
    *("chain-step/shannon", "chain-shared/shannon", "chain-item/gini", "binary-tree/shannon"),
    *("binary-tree-labelled/gini", "projective/shannon", "projective-multi/tsallis-1.3"),
    *("dtw/shannon", "dtw-band/gini", "grid-8/shannon", "path/shannon", "ctc/shannon"),
    *("subset/shannon", "pcfg/shannon", "semi-markov/shannon", "assignment/shannon"),
    *("nonprojective/shannon", "nonprojective-multi/shannon", "projective/hard"),
]
OPTIONS = {"budgetmax": (2,), "fusedmax": (0.1,), "oscarmax": (0.1,), "normmax": (2.0,)}
launched: set[str] = set()


def kernels() -> set[str]:
    """The functions that triton compiles and no other of them calls."""
    made, used = set(), set()
    for path in ROOT.rglob("*gpu*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            if any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                made.add(node.name)
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                used |= names - {node.name}
    return made - used


def watch() -> None:
    """Writes down what is launched."""
    from triton.runtime import interpreter, jit

    for cls in (jit.KernelInterface, interpreter.InterpretedFunction):
        if "__getitem__" not in vars(cls):
            continue
        original = cls.__getitem__

        def note(self: Any, grid: Any, original: Any = original) -> Any:
            launched.add(self.fn.__name__)
            return original(self, grid)

        cls.__getitem__ = note


def structures() -> None:
    for row in STRUCTURES:
        torch.manual_seed(0)
        s: Any = ROWS[row]().to(DEVICE)
        for query in QUERIES:
            if s.supports(query):
                getattr(s, query)()
        names = [name for name, (t, _) in s._tensors().items() if t.is_floating_point()]
        tensors = {name: t.detach() for name, (t, _) in s._tensors().items()}
        leaves = [tensors[name].requires_grad_() for name in names]
        if not row.endswith("hard"):
            t = s._rebuild(**tensors)
            (t.marginals() ** 2).sum().backward(inputs=leaves)
        print(row, flush=True)
    for shape in ((3, 7, 5), (2, 9, 33)):
        unary, transition = torch.randn(*shape), torch.randn(shape[-1], shape[-1])
        chain = sx.LinearChain(unary.to(DEVICE), transition.to(DEVICE))
        chain.marginals(), chain.argmax_tags(), chain.sample()
    for n in (5, 17):
        scores = torch.randn(3, n + 1, n + 1, device=DEVICE)
        tree = sx.DependencyTree(scores, torch.tensor([n, 3, 1], device=DEVICE))  # type: ignore[abstract]
        tree.argmax(), tree.marginals(), tree.sparsemap(max_iter=5)
        sx.Assignment(torch.randn(3, n, n + 2, device=DEVICE)).argmax()
    sx.LinearChain(
        torch.randn(3, 7, 5, device=DEVICE), torch.randn(5, 5, device=DEVICE)
    ).sparsemap()


def maps() -> None:
    for rows, width in ((3, 7), (5, 131), (2, 1025)):
        for name in ("softmax", "sparsemax", "fusedmax", "oscarmax", "normmax", "budgetmax"):
            x = torch.randn(rows, width, device=DEVICE, requires_grad=True)
            extra = OPTIONS.get(name, ())
            (getattr(sx, name)(x, *extra) ** 2).sum().backward()
        for alpha in (1.25, 1.5, 1.7, 3.0, torch.full((rows, 1), 1.4, device=DEVICE)):
            x = torch.randn(rows, width, device=DEVICE, requires_grad=True)
            (sx.entmax(x, alpha) ** 2).sum().backward()
        x = torch.randn(rows, width, device=DEVICE, requires_grad=True)
        bounds = torch.full((rows, width), 0.4, device=DEVICE)
        (sx.csparsemax(x, bounds) ** 2).sum().backward()
        (sx.csoftmax(x, bounds) ** 2).sum().backward()
        print("maps", rows, width, flush=True)


def alignments() -> None:
    for n, m in ((7, 5), (33, 70)):
        x = torch.randn(3, n, 2, device=DEVICE, requires_grad=True)
        y = torch.randn(3, m, 2, device=DEVICE)
        (g,) = torch.autograd.grad(sx.losses.SoftDTW(gamma=0.5)(x, y).sum(), x, create_graph=True)
        g.square().sum().backward()
        print("soft-dtw", n, m, flush=True)


def main() -> int:
    watch()
    broken, began = 0, time.time()
    with sx.backend("gpu"):
        for part in (structures, maps, alignments):
            try:
                part()
            except Exception:
                broken += 1
                traceback.print_exc()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    missing = kernels() - launched
    print(f"{len(launched)} kernels launched in {time.time() - began:.0f} s (triton "
          f"{triton.__version__}): {' '.join(sorted(launched))}")  # fmt: skip
    print(f"not launched: {' '.join(sorted(missing)) or 'none'}")
    return 1 if broken or missing else 0


if __name__ == "__main__":
    sys.exit(main())
