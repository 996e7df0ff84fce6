"""Writes into the tensors of a structure after it was made, and what its queries may then answer.

A case is a number: it chooses a row of the table, a query, how the query runs (eagerly, without
validation, under ``vmap`` or compiled), and what is written into which tensor by which of three
ways, two of which torch does not count. For each item the answer must be that of a fresh structure
of the same final values; where that is refused, NaN, or an error that names an item.

``python tests/overwrites.py FIRST END STEP`` runs cases. Each is printed before it runs, so that a
crash names it, and a case that takes too long ends the process. Lines of ``WRONG`` say the rest.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from table import ROWS
from torch import Tensor

from structmax import checks
from structmax.structures.base import Structure
from structmax.testing.contract import _make

SECONDS = 300  # for one case, with all that it compiles
PLACES = (-1, 0, 1, 2, 3, 4, 5, 6, 7, 17)
FAR = (10**6, -(10**6), 50_000_000, 2**31, 2**32 + 1, 2**40, -(2**40))
COMPILED = (  # the rows that are compiled, which takes seconds each
    "chain-shared/shannon", "binary-tree/shannon", "projective/gini", "semi-markov/shannon",
    "pcfg/shannon", "path-parallel/shannon", "dtw/gini", "ctc/shannon", "hyperpath/shannon",
    "subset/shannon", "assignment-padded/shannon", "nonprojective/shannon",
)  # fmt: skip
Tensors = dict[str, Tensor]


# -- queries: an answer has the batch as its first dimension ---------------------------------------


def _sampled(s: Any) -> Tensor:
    return s.sample((2,)).movedim(0, len(s.batch_shape))


def _gradient(s: Any) -> Tensor:
    """That of the value in the first scores."""
    name, (t, _) = next(iter(s._tensors().items()))
    leaf = t.detach().clone().requires_grad_()
    live = s._rebuild(**{**{k: x for k, (x, _) in s._tensors().items()}, name: leaf})
    return torch.autograd.grad(live.log_partition().sum(), leaf)[0]


QUERIES: dict[str, Callable[[Any], Tensor]] = {
    "log_partition": lambda s: s.log_partition(),
    "marginals": lambda s: s.marginals(),
    "argmax": lambda s: s.argmax(),
    "sample": _sampled,
    "topk": lambda s: s.topk(2).scores,
    "max_marginals": lambda s: s.max_marginals(),
    "entropy": lambda s: s.entropy(),
    "mbr": lambda s: s.mbr(),
    "sparsemap": lambda s: s.sparsemap().marginals,
    "gradient": _gradient,
    "log_prob": lambda s: s.log_prob(s.argmax()),
}
STRUCTURES = {"argmax", "sample", "mbr"}  # which answer structures: there may be ties
PARTS = STRUCTURES | {"marginals"}  # and only NaN says that there is nothing
MAPPED = ("log_partition", "marginals", "argmax", "topk", "max_marginals", "entropy")
TOGETHER = ("log_partition", "marginals", "argmax")  # compiled as one function
NEEDS = {"gradient": "log_partition"}


def _ask(s: Any, query: str) -> Tensor:
    return QUERIES[query](s).detach()


# -- structures ------------------------------------------------------------------------------------


def _own(s: Structure) -> Tensors:
    """Its tensors, each in memory of its own."""
    return {name: t.detach().clone() for name, (t, _) in s._tensors().items()}


def _fresh(base: Any, values: Tensors, validate_args: bool = True) -> Any:
    """A structure of other values, for which that of the table does not vouch."""
    s = base._rebuild(**values)
    object.__setattr__(s, "_record", checks.Record())
    object.__setattr__(s, "_validate_args", validate_args)
    s._validate()
    return s


def _item(base: Any, values: Tensors, i: int) -> Any:
    """A fresh structure of one item's values; its constructor validates them."""
    dims = {name: d for name, (_, d) in base._tensors().items()}
    picked = {k: t[i].clone() if t.dim() > dims[k] else t.clone() for k, t in values.items()}
    return _fresh(base, picked)


def _mapped(base: Any, values: Tensors, query: str) -> Tensor:
    """The query of every item under ``vmap``."""
    dims = {name: d for name, (_, d) in base._tensors().items()}
    axes = tuple(0 if t.dim() > dims[k] else None for k, t in values.items())

    def of_item(*given: Tensor) -> Tensor:
        return QUERIES[query](_fresh(base, dict(zip(values, given, strict=True))))

    return torch.func.vmap(of_item, in_dims=axes)(*values.values()).detach()


@cache
def _compiled(row: str) -> Callable[..., Any]:
    base = _make(ROWS[row])

    def ask(values: Tensors) -> list[Tensor]:
        s = _fresh(base, values)
        return [QUERIES[query](s) for query in TOGETHER]

    torch.compiler.reset()
    return torch.compile(ask, backend="aot_eager")


@cache
def _works(row: str, mode: str, query: str) -> bool:
    """Whether the query answers in this mode at the values of the table: some are refused."""
    base = _make(ROWS[row])
    if not base.batch_shape or not base.supports(NEEDS.get(query, query)):
        return False
    try:
        _answer(row, mode, query, base, base, _own(base))
    except (ValueError, NotImplementedError, RuntimeError):
        return False
    return True


def _answer(row: str, mode: str, query: str, base: Any, s: Any, values: Tensors) -> Tensor:
    if mode == "vmap":
        return _mapped(base, values, query)
    if mode == "compile":
        return _compiled(row)(values)[TOGETHER.index(query)].detach()
    return _ask(s, query)


# -- writes ----------------------------------------------------------------------------------------


class Chance:
    """Random choices that depend on the case alone."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.generator))

    def one_of(self, options: Any) -> Any:
        options = list(options)
        return options[self.below(len(options))]


def _write(t: Tensor, chance: Chance) -> str:
    """Writes one number, into one place or all of them; returns what was done."""
    whole = chance.below(4) == 0
    at = ... if whole else tuple(chance.below(n) for n in t.shape)
    if t.is_floating_point():
        finite = float(torch.randn((), generator=chance.generator)) * 10.0 ** chance.below(4)
        value: float = chance.one_of([float("nan"), float("inf"), finite, finite])
    else:
        value = chance.one_of([*PLACES, *PLACES, *FAR])
    way = chance.one_of(["in place", "data", "numpy"])
    if way == "in place":
        t[at] = value
    elif way == "data":
        t.data[at] = value
    else:
        t.numpy()[at] = value
    return f"{way} {'everywhere' if whole else list(at)} {value}"


# -- what is right ---------------------------------------------------------------------------------


def _truth(base: Any, values: Tensors, i: int, query: str) -> tuple[Any, Any]:
    """The fresh structure of an item and its answer; None where either is refused."""
    try:
        fresh = _item(base, values, i)
        return fresh, _ask(fresh, query)
    except ValueError:
        return None, None


def _is_unused(base: Any, values: Tensors, i: int, query: str, found: Tensor) -> bool:
    """Whether the scores that are refused belong to no structure of an item: then the answer is
    the same whatever they are. Weights of a grammar are refused even so."""
    for other in (0.0, 3.0):
        finite = {k: t.clone() for k, t in values.items()}
        for t in finite.values():
            if t.is_floating_point():
                t[~(t < torch.inf)] = other
        fresh, expected = _truth(base, finite, i, query)
        try:
            if expected is None or _wrong_item(found, fresh, expected, query):
                return False
        except ValueError:  # it is no structure
            return False
    return True


def _wrong_item(found: Tensor, fresh: Any, expected: Tensor | None, query: str) -> str:
    """What is wrong with the answer about one item; "" if nothing is."""
    if expected is None or bool(expected.isnan().any()):
        bad = found.isnan() if query in PARTS else ~found.isfinite()
        nothing = bool(bad.any()) or bool((found == -torch.inf).all())
        return "" if nothing else f"a plausible answer {found.tolist()}"
    if query in STRUCTURES:
        own, best = fresh.score(found), fresh.score(expected)
        good = bool((own > -torch.inf).all()) if query != "argmax" else torch.allclose(own, best)
        return "" if good else f"{found.tolist()} scores {own}, for {best}"
    tolerance = 1e-4 if query == "sparsemap" else 1e-6
    same = torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
    return "" if same else f"{found.tolist()} for {expected.tolist()}"


def check(number: int) -> str | None:
    """What is wrong in a case; "" if nothing is, None where there is nothing to ask."""
    chance = Chance(number)
    rows = [*ROWS]
    mode = ("eager", "eager", "unvalidated", "unvalidated", "vmap", "compile")[number % 6]
    row = COMPILED[number // 6 % len(COMPILED)] if mode == "compile" else chance.one_of(rows)
    queries = {"vmap": MAPPED, "compile": TOGETHER}.get(mode, QUERIES)
    query = chance.one_of(queries)
    if not _works(row, mode, query):
        return None
    base = _make(ROWS[row])
    values = _own(base)
    s = _fresh(base, values, mode != "unvalidated")
    if chance.below(2) and mode == "eager" and base.supports("log_partition"):
        s.log_partition()  # a query that has validated everything, before the write
    integers = [k for k, t in values.items() if not t.is_floating_point()]
    floats = [k for k in values if k not in integers]
    names = [chance.one_of(integers if integers and chance.below(3) else floats)]
    if chance.below(4) == 0:
        names.append(chance.one_of(values))
    done = [f"{name} {_write(values[name], chance)}" for name in names if values[name].numel()]
    print(f"{number}: {row} {mode} {query}: {'; '.join(done)}", flush=True)
    truths = [_truth(base, values, i, query) for i in range(len(base))]
    try:
        found = _answer(row, mode, query, base, s, values)
    except ValueError as error:
        if all(expected is not None for _, expected in truths):
            return f"refused: {error}"
        return "" if re.search(r"item|\[\d|batch", str(error)) else f"names no item: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wrong = []
    for i, (fresh, expected) in enumerate(truths):
        if expected is None and _is_unused(base, values, i, query, found[i]):
            wrong.append("")
        elif query in STRUCTURES and expected is not None:
            try:
                wrong.append(_wrong_item(found[i], fresh, expected, query))
            except ValueError as error:
                wrong.append(f"item {i} is no structure: {error}")
        else:
            wrong.append(_wrong_item(found[i], fresh, expected, query))
    return " | ".join(f"item {i}: {w}" for i, w in enumerate(wrong) if w)


def main(first: int, end: int, step: int) -> int:
    failures = asked = 0
    for number in range(first, end, step):
        signal.alarm(SECONDS)  # without a handler it ends the process, also inside of a kernel
        said = check(number)
        asked += said is not None
        if said:
            failures += 1
            print(f"WRONG {number}: {said[:400]}", flush=True)
    signal.alarm(0)
    print(f"{asked} cases, {failures} wrong", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
