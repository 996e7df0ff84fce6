"""How exact the kernels are: ``python -m structmax.testing.precision`` prints a table.

An error is max |a − b| / max |b| over all entries of an answer, b being the better one. Float32 is
held against float64 on the same scores, at the sizes given and with standard normal scores; again
with scores of spread 100. Float64 is held against enumeration in 50 digits by mpmath, on small
structures. The names of ops as arguments print only those; ``--markdown`` a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import structmax as sx
from structmax.testing.contract import _make
from structmax.testing.examples import ROWS

Answer = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Op:
    """``answer`` of standard normal scores of some ``shapes``; ``row``: a small structure of the
    table of examples whose exact answer is known by enumeration, for value or marginals."""

    answer: Answer
    shapes: tuple[tuple[int, ...], ...]
    row: str = ""


def structure(
    make: Callable[..., sx.Structure], *shapes: tuple[int, ...], row: str
) -> Iterator[tuple[str, Op]]:
    """Value, marginals and entropy of a structure."""
    for query in ("log_partition", "marginals", "entropy"):
        yield query, Op(partial(_ask, make, query), shapes, row)


def _ask(make: Callable[..., Any], query: str, x: list[Tensor]) -> Tensor:
    answer = getattr(make(*x), query)()
    return answer.marginals if query == "sparsemap" else answer


def _call(function: Callable[..., Tensor], x: list[Tensor]) -> Tensor:
    return function(*x)


def gradient(function: Callable[..., Tensor]) -> Answer:
    def answer(x: list[Tensor]) -> Tensor:
        leaf = x[0].clone().requires_grad_()
        return torch.autograd.grad(function(leaf, *x[1:]).sum(), leaf)[0]

    return answer


def _structures() -> Iterator[tuple[str, Op]]:
    dependency: Any = sx.DependencyTree  # abstract: it chooses the class of its trees
    table: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
        "LinearChain": (sx.LinearChain, ((4, 64, 16), (16, 16)), "chain-step"),
        "SemiMarkov": (sx.SemiMarkov, ((4, 40, 8, 4),), "semi-markov"),
        "BinaryTree": (sx.BinaryTree, ((4, 40, 40),), "binary-tree"),
        "PCFG": (sx.PCFG, ((4, 6), (4, 6, 12, 12), (4, 20, 6)), "pcfg"),
        "DependencyTree, projective": (
            partial(dependency, projective=True),
            ((4, 41, 41),),
            "projective",
        ),
        "DependencyTree": (dependency, ((4, 41, 41),), "nonprojective"),
        "SpanningTree": (sx.SpanningTree, ((4, 40, 40),), "spanning-tree"),
        "Alignment, dtw": (sx.Alignment, ((4, 64, 64),), "dtw"),
        "Alignment, edit": (lambda x: sx.Alignment(x, kind="edit"), ((4, 64, 64),), "edit"),
        "GridPath": (sx.GridPath, ((4, 40, 40),), "grid-8"),
        "KSubset": (lambda x: sx.KSubset(x, 20), ((4, 200),), "subset"),
    }
    for name, (make, shapes, row) in table.items():
        for query, op in structure(make, *shapes, row=f"{row}/shannon"):
            yield f"{name}: {query}", op
    for omega in (sx.Gini(), sx.Tsallis(1.5)):
        chain = partial(sx.LinearChain, smoothing=omega)
        name = f"LinearChain, {type(omega).__name__}: marginals"
        yield name, Op(partial(_ask, chain, "marginals"), ((4, 32, 8), (8, 8)))
    yield "BinaryTree: sparsemap", Op(partial(_ask, sx.BinaryTree, "sparsemap"), ((4, 12, 12),))
    yield "DependencyTree: sparsemap", Op(partial(_ask, dependency, "sparsemap"), ((4, 13, 13),))


def _maps() -> Iterator[tuple[str, Op]]:
    shape = ((8, 1000),)
    upper = torch.full((1000,), 0.05)
    maps: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": sx.softmax,
        "sparsemax": sx.sparsemax,
        "entmax, α = 1.2": lambda x: sx.entmax(x, 1.2),
        "entmax, α = 1.5": lambda x: sx.entmax(x, 1.5),
        "normmax, α = 2": lambda x: sx.normmax(x, 2.0),
        "budgetmax, k = 5": lambda x: sx.budgetmax(x, 5),
        "fusedmax": lambda x: sx.fusedmax(x, 0.1),
        "oscarmax": lambda x: sx.oscarmax(x, 0.01),
        "csoftmax": lambda x: sx.csoftmax(x, upper.to(x.dtype)),
        "csparsemax": lambda x: sx.csparsemax(x, upper.to(x.dtype)),
    }
    for name, function in maps.items():
        yield name, Op(partial(_call, function), shape)
    series = ((4, 64, 3), (4, 80, 3))
    loss = sx.losses.SoftDTW()
    yield "SoftDTW: value", Op(lambda x: loss(*x), series)
    yield "SoftDTW: gradient", Op(gradient(loss), series)
    divergence = sx.losses.SoftDTW(divergence=True)
    yield "SoftDTW, divergence: value", Op(lambda x: divergence(*x), series)


OPS: dict[str, Op] = {**dict(_structures()), **dict(_maps())}


def error(found: Tensor, better: Tensor) -> float:
    found, better = found.detach().double(), better.detach().double()
    return float((found - better).abs().max() / better.abs().max().clamp(min=1e-300))


def against_float64(op: Op, spread: float = 1.0) -> float:
    """The error of float32, on scores that float32 holds exactly."""
    seed = torch.Generator().manual_seed(0)
    scores = [spread * torch.randn(shape, generator=seed) for shape in op.shapes]
    return error(op.answer(scores), op.answer([x.double() for x in scores]))


def against_mpmath(name: str, op: Op) -> float | None:
    """The error of float64 on a small structure; None where enumeration says nothing."""
    if not op.row:
        return None
    import mpmath

    s = _make(ROWS[op.row])
    every = s.enumerate_support()
    found = getattr(s, name.rpartition(": ")[2])()
    exact = []
    with mpmath.workdps(50):
        for item in range(len(s)):
            # sums of few float64 numbers: their own rounding is below what is looked for
            scores = [mpmath.mpf(x) for x in s.score(every)[:, item].tolist()]
            weights = [mpmath.exp(x) for x in scores]
            total = mpmath.fsum(weights)
            if "log_partition" in name:
                exact.append(torch.tensor(float(mpmath.log(total)), dtype=torch.float64))
            elif "entropy" in name:
                mean = mpmath.fsum(w * x for w, x in zip(weights, scores)) / total
                exact.append(torch.tensor(float(mpmath.log(total) - mean), dtype=torch.float64))
            else:
                p = torch.tensor([float(w / total) for w in weights], dtype=torch.float64)
                exact.append(torch.einsum("k,k...->...", p, every[:, item]))
    return error(found, torch.stack(exact))


def table(names: Sequence[str] = ()) -> dict[str, tuple[float, float, float | None]]:
    """For each op: float32 against float64, the same at spread 100, float64 against mpmath."""
    picked = {name: op for name, op in OPS.items() if not names or name in names}
    return {
        name: (against_float64(op), against_float64(op, 100.0), against_mpmath(name, op))
        for name, op in picked.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m structmax.testing.precision", description=about
    )
    parser.add_argument("names", nargs="*", metavar="op", help=f"of {', '.join(OPS)}")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(OPS)
    if unknown:
        parser.error(f"no such ops: {sorted(unknown)}; there are {[*OPS]}")
    columns = ("op", "sizes", "float32", "float32, spread 100", "float64 by mpmath")
    rows = [columns]
    for name, errors in table(options.names).items():
        sizes = " ".join("×".join(map(str, shape)) for shape in OPS[name].shapes)
        rows.append((name, sizes, *("–" if e is None else f"{e:.0e}" for e in errors)))  # type: ignore[arg-type]
    if options.markdown:
        rows.insert(1, ("---", "---", "--:", "--:", "--:"))
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    else:
        widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
