"""Launches every Triton kernel of the package at odd sizes, under NVIDIA's compute-sanitizer::

    python tests/sanitize.py memcheck        (or racecheck, initcheck, synccheck)
    python tests/sanitize.py                 without a sanitizer

A sanitizer makes everything slow, so ``--jobs`` processes share the work. The command fails if a
sanitizer found something, a computation failed, or a kernel of the package was not launched.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
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


# -- the computations ------------------------------------------------------------------------------


def structure(row: str) -> None:
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


def chain(batch: int, n: int, c: int) -> None:
    unary, transition = torch.randn(batch, n, c), torch.randn(c, c)
    s = sx.LinearChain(unary.to(DEVICE), transition.to(DEVICE))
    s.marginals(), s.argmax_tags(), s.sample()
    s.log_prob(s.argmax_tags()), s._per_step().log_prob(s.argmax_tags())
    if c < 8:
        s.sparsemap(init=s.sparsemap(max_iter=2)), s.sparsemap(penalize="all")


def chain_in_pieces(batch: int, n: int, c: int) -> None:
    """As if it were long."""
    from structmax.forest.chain import gpu_long

    before, (gpu_long.LONG, gpu_long.SIZE) = (gpu_long.LONG, gpu_long.SIZE), (2, 3)
    try:
        chain(batch, n, c)
    finally:
        gpu_long.LONG, gpu_long.SIZE = before


def tree(n: int) -> None:
    scores = torch.randn(3, n + 1, n + 1, device=DEVICE)
    s = sx.DependencyTree(scores, torch.tensor([n, 3, 1], device=DEVICE))  # type: ignore[abstract]
    s.argmax(), s.marginals(), s.sparsemap(max_iter=5)
    flat = 0.1 * scores[:2].requires_grad_()  # so that the rest of the faces is looked for too
    sx.DependencyTree(flat).sparsemap()  # type: ignore[abstract]
    sx.Assignment(torch.randn(3, n, n + 2, device=DEVICE)).argmax()


def maps(rows: int, width: int) -> None:
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


def losses(rows: int, width: int) -> None:
    for alpha in (1.25, 1.5, 2.0):
        x = torch.randn(rows, width, device=DEVICE, requires_grad=True)
        target = torch.randint(width, (rows,), device=DEVICE)
        sx.losses.entmax_loss(x, target, alpha).sum().backward()


def ctc(frames: int, symbols: int) -> None:
    scores = torch.randn(3, frames, symbols, device=DEVICE).log_softmax(-1)
    sx.CTC(scores, torch.randint(1, symbols, (3, 4), device=DEVICE)).marginals()


def soft_dtw_in_blocks(n: int, m: int) -> None:
    """As if one program had room for 8 rows only."""
    from structmax.forest.grid import gpu

    before, gpu.ROWS = gpu.ROWS, 8
    try:
        soft_dtw(n, m)
    finally:
        gpu.ROWS = before


def soft_dtw(n: int, m: int) -> None:
    x = torch.randn(3, n, 2, device=DEVICE, requires_grad=True)
    y = torch.randn(3, m, 2, device=DEVICE)
    (g,) = torch.autograd.grad(sx.losses.SoftDTW(gamma=0.5)(x, y).sum(), x, create_graph=True)
    g.square().sum().backward()


WORK: dict[str, Callable[[], None]] = {
    **{row: partial(structure, row) for row in STRUCTURES},
    **{f"chain {size}": partial(chain, *size) for size in ((3, 7, 5), (2, 9, 33))},
    **{f"chain in pieces {size}": partial(chain_in_pieces, *size) for size in ((3, 7, 5),)},
    **{f"tree {n}": partial(tree, n) for n in (5, 17)},
    **{f"maps {size}": partial(maps, *size) for size in ((3, 7), (5, 131), (2, 1025))},
    **{f"losses {size}": partial(losses, *size) for size in ((3, 7), (2, 1025))},
    **{f"soft-DTW {size}": partial(soft_dtw, *size) for size in ((7, 5), (33, 70))},
    "CTC on the device": partial(ctc, 11, 7),  # its targets are looked at where they are
    "soft-DTW in blocks": partial(soft_dtw_in_blocks, 33, 21),
}


# -- processes -------------------------------------------------------------------------------------


def work(names: list[str]) -> int:
    """Runs some of the computations in this process."""
    watch()
    broken = 0
    for name in names:
        torch.manual_seed(0)
        began = time.time()
        try:
            with nullcontext() if DEVICE == "cuda" else sx.backend("gpu"):
                WORK[name]()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            print(f"done: {name}, {time.time() - began:.0f} s", flush=True)
        except Exception:
            broken += 1
            traceback.print_exc()
    print("launched:", *sorted(launched), flush=True)
    return 1 if broken else 0


def share(tool: str | None, jobs: int) -> int:
    """Runs all of them in several processes, each under the sanitizer."""
    began = time.time()
    command = [sys.executable, __file__, "--only"]
    if tool:
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        only = f"regex=^({'|'.join(kernels())})$"  # torch's own kernels are not what is asked
        command = [
            sanitizer,
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            "--kernel-name",
            only,
            *command,
        ]
    parts = [list(WORK)[i::jobs] for i in range(jobs)]
    processes = [
        subprocess.Popen([*command, *part], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for part in filter(None, parts)
    ]
    texts = []
    for process in processes:
        texts.append(process.communicate()[0].decode())
        print(texts[-1], flush=True)
    text = "\n".join(texts)
    seen = {name for line in re.findall("(?m)^launched:(.*)", text) for name in line.split()}
    finished = len(re.findall("(?m)^done:", text))
    missing = kernels() - seen
    print(
        f"{tool or 'no sanitizer'}, triton {triton.__version__}: {finished} of {len(WORK)} "
        f"computations, {len(kernels() & seen)} of {len(kernels())} kernels launched, exit codes "
        f"{sorted({p.returncode for p in processes})}, {time.time() - began:.0f} s"
    )
    print("not launched:", *(sorted(missing) or ["none"]))
    return int(bool(missing) or finished < len(WORK) or any(p.returncode for p in processes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", nargs="?", help="of compute-sanitizer")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", help="these computations, in this process")
    given = parser.parse_args()
    sys.exit(work(given.only) if given.only else share(given.tool, given.jobs))
