"""The faces of other libraries: against brute force, our own structures, and the peers."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import structmax as sx
from structmax.compat import entmax as compat_entmax
from structmax.compat import torch_struct as compat
from structmax.compat import torchcrf as compat_torchcrf

pytestmark = [  # of the peers
    pytest.mark.filterwarnings("ignore:.*arg_constraints:UserWarning"),
    pytest.mark.filterwarnings("ignore:where received a uint8:UserWarning"),
]

close = torch.testing.assert_close
nan = math.nan


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def installed(name: str) -> Any:
    """A peer, or None."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = "import sys, structmax; print([name for name in sys.modules if 'structmax.' in name])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert b"structmax.structures.linear_chain" in loaded
    for name in (b"compat", b"nn", b"estimators", b"losses", b"data", b"draw", b"train"):
        assert b"structmax." + name not in loaded


# -- torch-struct: brute force in its own conventions ----------------------------------------------

Event = list[tuple[int, ...]]  # indices of ones


def chains(n: int, c: int = 2) -> Iterator[Event]:
    for tags in itertools.product(range(c), repeat=n):
        yield [(t, tags[t + 1], tags[t]) for t in range(n - 1)]


def segmentations(n: int, at: int = 0, label: int | None = None, k: int = 3) -> Iterator[Event]:
    if label is None:
        yield from (e for first in range(2) for e in segmentations(n, 0, first))
    elif at == n - 1:
        yield []
    else:
        for width, to in itertools.product(range(1, min(k, n - at)), range(2)):
            for rest in segmentations(n, at + width, to):
                yield [(at, width, to, label), *rest]


def dependencies(n: int, projective: bool, multiroot: bool, labels: int = 0) -> Iterator[Event]:
    for heads in itertools.product(range(n + 1), repeat=n):
        if multiroot <= heads.count(0) and (multiroot or heads.count(0) == 1):
            if not _is_tree(heads) or (projective and _crosses(heads)):
                continue
            arcs = [(h - 1 if h else m, m) for m, h in enumerate(heads)]
            for choice in itertools.product(range(labels), repeat=n) if labels else ((),):
                yield [(*arc, *label) for arc, label in zip(arcs, _each(choice, n), strict=True)]


def _each(choice: tuple[int, ...], n: int) -> list[tuple[int, ...]]:
    return [(label,) for label in choice] if choice else [()] * n


def _is_tree(heads: tuple[int, ...]) -> bool:
    for word in range(1, len(heads) + 1):
        for _ in heads:
            word = heads[word - 1] if word else 0
        if word:
            return False
    return True


def _crosses(heads: tuple[int, ...]) -> bool:
    arcs = [sorted((m + 1, h)) for m, h in enumerate(heads)]
    return any(a < c < b < d for (a, b), (c, d) in itertools.product(arcs, arcs))


def trees(i: int, j: int) -> Iterator[Event]:
    splits = [[[]]] if i == j else [_joined(i, k, j) for k in range(i, j)]
    for rest in itertools.chain(*splits):
        yield from ([(i, j, label), *rest] for label in range(2))


def _joined(i: int, k: int, j: int) -> Iterator[Event]:
    for left, right in itertools.product(list(trees(i, k)), list(trees(k + 1, j))):
        yield [*left, *right]


def paths(i: int, j: int) -> Iterator[Event]:
    """To the cell (i, j) from (0, 0), which counts as entered by op 1."""
    if i == j == 0:
        yield [(0, 0, 1)]
    for op, (di, dj) in enumerate([(0, 1), (1, 1), (1, 0)]):
        if i >= di and j >= dj:
            yield from ([*path, (i, j, op)] for path in paths(i - di, j - dj))


def dependency(kind: str, multiroot: bool, labels: tuple[int, ...] = ()) -> Any:
    def make(given: Tensor, lengths: Tensor | None, library: Any = compat) -> Any:
        return getattr(library, kind)(given, lengths, multiroot=multiroot)

    projective = kind == "DependencyCRF"
    every = lambda n: dependencies(n, projective, multiroot, *labels)  # noqa: E731
    return make, (3, 3, *labels), every, [3, 2]


def plain(kind: str) -> Callable[..., Any]:
    return lambda given, lengths, library=compat: getattr(library, kind)(given, lengths=lengths)


# how it is made, the shape of its potentials, its events of a length, lengths of the items
CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], Callable[[int], Any], list[int]]] = {
    "LinearChainCRF": (plain("LinearChainCRF"), (3, 2, 2), chains, [4, 2]),
    "SemiMarkovCRF": (plain("SemiMarkovCRF"), (4, 3, 2, 2), segmentations, [5, 3]),
    "DependencyCRF": dependency("DependencyCRF", True),
    "DependencyCRF, one root": dependency("DependencyCRF", False),
    "DependencyCRF, labelled": dependency("DependencyCRF", True, (2,)),
    "NonProjectiveDependencyCRF": dependency("NonProjectiveDependencyCRF", False),
    "NonProjectiveDependencyCRF, many roots": dependency("NonProjectiveDependencyCRF", True),
    "TreeCRF": (plain("TreeCRF"), (4, 4, 2), lambda n: trees(0, n - 1), [4, 3]),
    "AlignmentCRF": (plain("AlignmentCRF"), (3, 4, 3), lambda n: paths(n - 1, 3), [3, 2]),
}
PEERS = [name for name in CASES if name != "AlignmentCRF"]  # which needs genbmm


def indicators(events: list[Event], shape: tuple[int, ...]) -> Tensor:
    """``(count, *shape)``."""
    every = torch.zeros(len(events), *shape, dtype=torch.float64)
    for z, event in zip(every, events, strict=True):
        for index in event:
            z[index] = 1.0
    return every


def one_of(values: Tensor, every: Tensor) -> bool:
    return all(bool((value == every).flatten(1).all(1).any()) for value in values)


@pytest.mark.parametrize("name", CASES)
def test_brute_force(name: str) -> None:
    make, shape, events, lengths = CASES[name]
    potentials, other = randn(2, *shape), randn(2, *shape, seed=1)
    whole = potentials.clone()
    supports = [indicators(list(events(n)), shape) for n in lengths]
    for item, every in enumerate(supports):  # NaN wherever no structure looks
        used = every.any(0) if shape[-1] != 3 or item else torch.ones(shape, dtype=torch.bool)
        whole[item] = torch.where(used, potentials[item], nan)
    whole.requires_grad_()
    p, q = make(whole, torch.tensor(lengths)), make(other, torch.tensor(lengths))
    samples, best = p.sample((50,)), p.topk(2)
    weights = randn(2, *shape, seed=2)
    (first,) = torch.autograd.grad(p.partition.sum(), whole)
    (second,) = torch.autograd.grad((p.marginals * weights).sum(), whole)
    close(first, p.marginals.detach())
    for item, every in enumerate(supports):
        theta = potentials[item].clone().requires_grad_()
        score = (every * theta).flatten(1).sum(1)
        value = score.logsumexp(0)
        chance = (score - value).exp()
        mu = torch.einsum("s,s...->...", chance, every)
        close(p.partition[item], value)
        close(p.marginals[item], mu)
        close(p.entropy[item], -(chance * (score - value)).sum())
        (expected,) = torch.autograd.grad((mu * weights[item]).sum(), theta, retain_graph=True)
        close(second[item], expected)
        close(p.max[item], score.max())
        close(p.kmax(2)[:, item], score.sort(descending=True).values[:2])
        assert one_of(p.argmax[item][None], every)
        close((best[:, item] * potentials[item]).flatten(1).sum(1), p.kmax(2)[:, item].detach())
        assert one_of(best[:, item], every) and one_of(samples[:, item], every)
        assert p.count[item] == len(every)
        log_q = (every * other[item]).flatten(1).sum(1).log_softmax(0)
        close(p.cross_entropy(q)[item], -(chance * log_q).sum())
        close(p.kl(q)[item], (chance * (score - value - log_q)).sum())
    assert p.log_prob(samples).shape == (50, 2)
    close(p.log_prob(p.argmax), p.max - p.partition)
    assert not whole.grad_fn and p.batch_shape == (2,) and p.event_shape == shape


@pytest.mark.parametrize("name", CASES)
def test_without_lengths(name: str) -> None:
    make, shape, _, lengths = CASES[name]
    potentials = randn(1, *shape)
    alone, given = make(potentials, None), make(potentials, [lengths[0]])
    close(alone.partition, given.partition)
    close(alone.marginals, given.marginals)
    with torch.no_grad():  # what was made without a gradient can be asked for one
        potentials.requires_grad_()
        later = make(potentials, None)
        later.argmax, later.partition  # noqa: B018
    (g,) = torch.autograd.grad(later.partition.sum(), potentials)
    close(g, alone.marginals.detach())


@pytest.mark.parametrize("name", CASES)
def test_forbidden(name: str) -> None:
    make, shape, events, lengths = CASES[name]
    every = indicators(list(events(lengths[0])), shape)
    part = every.mean(0) * (every.mean(0) < 1)
    where = (0, *torch.unravel_index(part.argmax(), shape))
    potentials = randn(1, *shape)
    potentials[where] = -math.inf
    allowed = every[every[(slice(None), *where[1:])] == 0]
    p = make(potentials.requires_grad_(), None)
    assert p.count == len(allowed) and p.marginals[where] == 0
    p.partition.backward()
    assert bool(potentials.grad.isfinite().all()) and potentials.grad[where] == 0
    assert p.log_prob(every[every[(slice(None), *where[1:])] == 1][:1]) == -math.inf
    if len(allowed) < 30:
        assert p.kmax(30)[-1] == -math.inf and not p.topk(30)[-1].any()


def flat(event: tuple[Tensor, ...], lead: int = 1) -> Tensor:
    """Terms, rules and roots of a grammar as one vector."""
    return torch.cat([part.flatten(lead) for part in event[:3]], -1)


def grammar(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return randn(2, 4, 2, seed=seed), randn(2, 2, 4, 4, seed=seed + 1), randn(2, 2, seed=seed + 2)


def derivations(length: int, n: int = 4) -> Tensor:
    """Terms, rules and roots of every tree of a grammar of 2 and 2 symbols, as vectors."""

    def below(i: int, j: int) -> Iterator[tuple[int, Event, Event]]:
        if i == j:
            yield from ((2 + t, [(i, t)], []) for t in range(2))
        for k, a in itertools.product(range(i, j), range(2)):
            for left, right in itertools.product(list(below(i, k)), list(below(k + 1, j))):
                yield a, left[1] + right[1], [(a, left[0], right[0]), *left[2], *right[2]]

    out = []
    for top, terms, rules in below(0, length - 1):
        parts = [torch.zeros(s, dtype=torch.float64) for s in ((n, 2), (2, 4, 4), (2,))]
        for part, indices in zip(parts, (terms, rules, [(top,)]), strict=True):
            for index in indices:
                part[index] += 1
        out.append(flat(tuple(parts), 0))
    return torch.stack(out)


def test_grammar_by_brute_force() -> None:
    given, lengths = grammar(), torch.tensor([4, 3])
    terms = given[0].clone()
    terms[1, 3] = nan
    given = tuple(t.requires_grad_() for t in (terms, *given[1:]))
    p = compat.SentCFG(given, lengths)
    mu, best, drawn = flat(p.marginals), flat(p.topk(3), 2), flat(p.sample((20,)), 2)
    first = torch.autograd.grad(p.partition.sum(), given)
    close(flat(first), mu.detach())
    theta = flat(given).nan_to_num()
    for item, length in enumerate(lengths.tolist()):
        every = derivations(length)
        score = every @ theta[item].detach()
        chance = score.softmax(0)
        close(p.partition[item], score.logsumexp(0))
        close(mu[item], chance @ every)
        close(p.entropy[item], -(chance * score.log_softmax(0)).sum())
        close(p.kmax(3)[:, item], score.sort(descending=True).values[:3])
        close(best[:, item] @ theta[item].detach(), p.kmax(3)[:, item].detach())
        assert one_of(best[:, item], every) and one_of(drawn[:, item], every)
        assert p.count[item] == len(every)
    assert p.log_prob(p.sample((20,))).shape == (20, 2)
    close(p.log_prob(p.argmax), p.max - p.partition)
    spans = p.argmax[3]
    assert spans[0, 2, 0].sum() == 1 and spans[1, 1, 0].sum() == 1  # over all words
    assert spans.sum((1, 2, 3)).tolist() == [3, 2]
    z = p.structure.argmax()
    close(flat(p.to_event(z, (2, 2), lengths)), flat(p.argmax))


def test_hmm() -> None:
    transition, emission, init = randn(3, 3), randn(5, 3, seed=1), randn(3, seed=2)
    given = [t.log_softmax(0).requires_grad_() for t in (transition, emission, init)]
    seen, lengths = torch.tensor([[0, 4, 2, 1], [3, 3, -7, 99]]), torch.tensor([4, 2])
    p = compat.HMM(*given, seen, lengths=lengths)
    chain = compat.LinearChainCRF(p.log_potentials, lengths)
    assert p.log_potentials.shape == (2, 3, 3, 3) and p.event_shape == (3, 3, 3)
    for query in ("partition", "marginals", "argmax", "entropy", "max", "count"):
        close(getattr(p, query), getattr(chain, query))
    close(p.kmax(4), chain.kmax(4))
    close(p.log_prob(chain.topk(4)), chain.log_prob(chain.topk(4)))
    one, other = (torch.autograd.grad(x.partition.sum(), given) for x in (p, chain))
    close(one, other)


# -- torch-struct: compact forms, errors -----------------------------------------------------------


def test_compact_forms() -> None:
    tags, lengths = torch.tensor([[1, 0, 2, 2], [2, 1, -5, -5]]), torch.tensor([4, 2])
    event = compat.LinearChainCRF.struct.to_parts(tags, 3, lengths)
    assert event.shape == (2, 3, 3, 3) and event[1].sum() == 1 and event[1, 0, 1, 2] == 1
    back, c = compat.LinearChainCRF.struct.from_parts(event)
    assert c == 3 and back.tolist() == [[1, 0, 2, 2], [2, 1, 0, 0]]

    labels = torch.tensor([[0, -1, 1, 0, -1, -1, 1], [1, 1, -1, -1, 0, 0, 0]])
    event = compat.SemiMarkovCRF.struct.to_parts(labels, (2, 4), lengths=torch.tensor([7, 5]))
    assert event.sum((1, 2, 3, 4)).tolist() == [3, 2] and event[1, 1, 3, 0, 1] == 1
    back, extra = compat.SemiMarkovCRF.struct.from_parts(event)
    assert extra == (2, 4) and back[0].tolist() == labels[0].tolist()
    assert back[1].tolist() == [1, 1, -1, -1, 0, -1, -1]

    heads = torch.tensor([[2, 0, 2], [0, 1, 9]])
    p = compat.DependencyCRF(randn(2, 3, 3), torch.tensor([3, 2]))
    event = p.to_event(heads, None, torch.tensor([3, 2]))
    assert p.from_event(event)[0].tolist() == [[2, 0, 2], [0, 1, 0]]
    close(p.log_prob(event), p.structure.log_prob(heads.clamp(max=3)))
    tree = compat.TreeCRF(randn(1, 3, 3, 2))
    assert tree.from_event(tree.to_event(tree.argmax, None))[0].equal(tree.argmax)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"LinearChainCRF: log_potentials must be \(B, N-1, C, C"):
        compat.LinearChainCRF(torch.zeros(2, 3, 2))
    with pytest.raises(ValueError, match=r"DependencyCRF: .* \(B, N, N\), got \(2, 3, 4\)"):
        compat.DependencyCRF(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"SemiMarkovCRF: .* \(B, N-1, K, C, C\), got"):
        compat.SemiMarkovCRF(torch.zeros(2, 3, 2, 4, 3))
    with pytest.raises(ValueError, match=r"SemiMarkovCRF: lengths must be between 1 and 4, got 5"):
        compat.SemiMarkovCRF(torch.zeros(2, 3, 2, 2, 2), torch.tensor([5, 2]))
    bad = torch.zeros(2, 3, 2, 2, 2)
    bad[1, 0, 1, 0, 1] = nan
    with pytest.raises(ValueError, match=r"SemiMarkovCRF: log_potentials\[1, 0, 1, 0, 1\] is nan"):
        compat.SemiMarkovCRF(bad)
    with pytest.raises(ValueError, match=r"first boundary of each item, got -1 for item 0"):
        compat.SemiMarkovCRF.struct.to_parts(torch.tensor([[-1, 0]]), (2, 3))
    with pytest.raises(ValueError, match="AlignmentCRF: local=True"):
        compat.AlignmentCRF(torch.zeros(1, 2, 2, 3), local=True)
    with pytest.raises(ValueError, match="AlignmentCRF: max_gap=2"):
        compat.AlignmentCRF(torch.zeros(1, 2, 2, 3), max_gap=2)
    with pytest.raises(ValueError, match=r"\(B, N, M, 3\), got \(1, 2, 2, 4\)"):
        compat.AlignmentCRF(torch.zeros(1, 2, 2, 4))
    with pytest.raises(NotImplementedError, match=r"LinearChainCRF.gumbel_crf .*Shannon\(0.5\)"):
        compat.LinearChainCRF(torch.zeros(1, 2, 2, 2)).gumbel_crf(0.5)


# -- torch-struct: the peer ------------------------------------------------------------------------


def both(name: str, potentials: Tensor, lengths: Any) -> tuple[Any, Any, Tensor, Tensor]:
    """Ours and theirs, with the leaves of each: the peer writes into what it is given."""
    peer = pytest.importorskip("torch_struct")
    mine, yours = (potentials.clone().requires_grad_() for _ in range(2))
    make = CASES[name][0]
    return make(mine, lengths), make(yours, lengths, peer), mine, yours


SIZES = {
    "LinearChainCRF": (9, 4, 4),
    "SemiMarkovCRF": (7, 4, 3, 3),
    "DependencyCRF, labelled": (7, 7, 3),
    "TreeCRF": (8, 8, 3),
}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", PEERS)
def test_against_torch_struct(name: str, ragged: bool) -> None:
    shape = SIZES.get(name, (7, 7))
    full = shape[0] + (name in ("LinearChainCRF", "SemiMarkovCRF"))
    lengths = torch.tensor([full, full - 3, full - 4]) if ragged else None
    if name == "SemiMarkovCRF" and ragged:
        pytest.skip("the peer is wrong: see test_where_torch_struct_is_wrong")
    ours, theirs, mine, yours = both(name, randn(3, *shape), lengths)
    inexact = name.startswith("NonProjective")  # the peer adds 1e-5 to each weight
    same = {"rtol": 1e-3, "atol": 1e-3} if inexact else {}
    weights = randn(3, *shape, seed=3)
    close(ours.partition, theirs.partition, **same)
    close(ours.marginals, theirs.marginals, **same)
    grads = [
        torch.autograd.grad(x.partition.sum() + (x.marginals * weights).sum(), leaf)[0]
        for x, leaf in ((ours, mine), (theirs, yours))
    ]
    close(*grads, **same)
    if inexact:
        return
    close(ours.argmax, theirs.argmax.detach())
    for query in ("max", "entropy"):
        close(getattr(ours, query), getattr(theirs, query))
    if not name.startswith("Dependency"):  # where the peer fails with recent versions of torch
        close(ours.count, theirs.count)
    close(ours.kmax(4), theirs.kmax(4))
    close(ours.topk(4), theirs.topk(4).detach())
    drawn = theirs.sample((5,))
    close(ours.log_prob(drawn), theirs.log_prob(drawn))
    for a, b in ((ours, theirs), (theirs, ours)):
        assert a.sample((4,)).shape == b.sample((4,)).shape
    if name in ("LinearChainCRF", "TreeCRF"):  # the peer has no others
        other, its, *_ = both(name, randn(3, *shape, seed=5), lengths)
        close(ours.kl(other), theirs.kl(its))
        close(ours.cross_entropy(other), theirs.cross_entropy(its))
    if name in ("LinearChainCRF", "SemiMarkovCRF", "DependencyCRF"):
        compact, extra = theirs.from_event(theirs.argmax.detach().clone())
        assert ours.from_event(ours.argmax)[0].equal(compact)
        assert ours.to_event(compact, extra, lengths).equal(ours.argmax.long())


@pytest.mark.parametrize("lengths", [None, [5, 3]])
def test_grammar_against_torch_struct(lengths: list[int] | None) -> None:
    peer = pytest.importorskip("torch_struct")
    given = randn(2, 5, 3), randn(2, 4, 7, 7, seed=1), randn(2, 4, seed=2)
    leaves = [[t.clone().requires_grad_() for t in given] for _ in range(2)]
    lengths = None if lengths is None else torch.tensor(lengths)
    ours, theirs = (
        lib.SentCFG(tuple(t), lengths) for lib, t in zip((compat, peer), leaves, strict=True)
    )
    close(ours.partition, theirs.partition)
    grads = [
        torch.autograd.grad(x.partition.sum(), t, retain_graph=True)
        for x, t in zip((ours, theirs), leaves, strict=True)
    ]
    close(*grads)
    for query in ("marginals", "argmax"):
        for one, other in zip(getattr(ours, query), getattr(theirs, query), strict=True):
            close(one, other.detach() if query == "argmax" else other)
    close(ours.max, theirs.max)
    close(ours.entropy, theirs.entropy)
    close(ours.kmax(3), theirs.kmax(3))
    close(ours.topk(3)[3], theirs.topk(3)[3].detach())


def test_hmm_against_torch_struct() -> None:
    peer = pytest.importorskip("torch_struct")
    given = randn(3, 3), randn(5, 3, seed=1), randn(3, seed=2)
    seen, lengths = torch.tensor([[0, 4, 2, 1], [3, 3, 1, 0]]), torch.tensor([4, 2])
    leaves = [[t.clone().requires_grad_() for t in given] for _ in range(2)]
    ours, theirs = compat.HMM(*leaves[0], seen, lengths), peer.HMM(*leaves[1], seen, lengths)
    for query in ("log_potentials", "partition", "marginals", "entropy"):
        close(getattr(ours, query), getattr(theirs, query))
    close(
        torch.autograd.grad(ours.partition.sum(), leaves[0]),
        torch.autograd.grad(theirs.partition.sum(), leaves[1]),
    )


def test_alignment_against_torch_struct() -> None:
    pytest.importorskip("genbmm")  # without it the peer aligns nothing
    ours, theirs, *_ = both("AlignmentCRF", randn(2, 4, 5, 3), None)
    close(ours.partition, theirs.partition)
    close(ours.marginals, theirs.marginals)


def test_where_torch_struct_is_wrong() -> None:
    """What the docstrings say is different on purpose."""
    peer = pytest.importorskip("torch_struct")
    potentials, lengths = randn(2, 6, 4, 2, 2), torch.tensor([7, 3])
    ours, theirs, *_ = both("SemiMarkovCRF", potentials, lengths)
    alone = both("SemiMarkovCRF", potentials[:1], None)[1]
    close(ours.partition[:1], alone.partition)
    assert theirs.partition[0] < alone.partition[0] - 0.1

    arcs = randn(1, 4, 4)
    many, one = (compat.DependencyCRF(arcs, multiroot=m) for m in (True, False))
    assert many.partition > one.partition
    many, one = (
        peer.DependencyCRF(arcs.clone().requires_grad_(), multiroot=m) for m in (True, False)
    )
    assert many.partition == one.partition


def test_readme_of_torch_struct() -> None:
    def calls(library: Any) -> list[Tensor]:
        torch.manual_seed(0)
        vals = torch.zeros(2, 10, 10) + 1e-5
        vals[:, :5, :5] = torch.rand(5)
        vals[:, 5:, 5:] = torch.rand(5)
        # without a gradient the peer fails with recent versions of torch
        dist = library.DependencyCRF(vals.log().requires_grad_())
        out = [dist.log_potentials[0], dist.marginals[0], dist.partition]
        out += [dist.log_prob(dist.argmax), dist.sample((1,)).detach()[0, 0].sum()]
        dist = library.DependencyCRF(vals.clone().requires_grad_(), lengths=torch.tensor([10, 7]))
        out += [dist.marginals[0], dist.marginals[1]]
        chain = torch.zeros(2, 10, 10, 10) + 1e-5
        chain[:, :, :, :] = vals.unsqueeze(-1).exp()
        chain[:, :, :, :] += torch.eye(10, 10).view(1, 1, 10, 10)
        chain[:, 0, :, 0] = 1
        chain[:, -1, 9, :] = 1
        dist = library.LinearChainCRF(chain.log())
        return [x.detach() for x in [*out, dist.marginals.detach()[0].sum(-1)]]

    ours = calls(compat)
    assert all(bool(x.isfinite().all()) for x in ours)
    if peer := installed("torch_struct"):
        close(ours, calls(peer), rtol=1e-4, atol=1e-4)  # float32


# -- pytorch-crf -----------------------------------------------------------------------------------


def test_torchcrf() -> None:
    assert compat_torchcrf.CRF is sx.nn.CRF

    def calls(crf: Any, **layout: bool) -> list[Any]:
        torch.manual_seed(0)
        seq_length, batch_size, num_tags = 3, 2, 5
        emissions = torch.randn(seq_length, batch_size, num_tags)
        tags = torch.tensor([[0, 1], [2, 4], [3, 1]])
        mask = torch.tensor([[1, 1], [1, 1], [1, 0]], dtype=torch.bool)
        model = crf(num_tags, **layout)
        out = [model(emissions, tags), model(emissions, tags, mask=mask)]
        out += [model(emissions, tags, mask=mask, reduction="token_mean")]
        return [out, model.decode(emissions), model.decode(emissions, mask=mask)]

    ours = calls(compat_torchcrf.CRF)
    assert [len(tags) for tags in ours[2]] == [3, 2]
    if peer := installed("torchcrf"):
        theirs = calls(peer.CRF)  # the same seed draws the same parameters
        close(ours[0], theirs[0])
        assert ours[1:] == theirs[1:]
        signatures = (inspect.signature(crf.forward) for crf in (sx.nn.CRF, peer.CRF))
        assert len({tuple(s.parameters) for s in signatures}) == 1


# -- entmax ----------------------------------------------------------------------------------------

MAPS = ["sparsemax", "entmax15", "sparsemax_bisect", "entmax_bisect", "normmax_bisect"]
MAPS += ["budget_bisect"]
MAP_MODULES = ["Sparsemax", "Entmax15", "SparsemaxBisect", "EntmaxBisect", "NormmaxBisect"]
MAP_MODULES += ["BudgetBisect"]
LOSSES = ["sparsemax_loss", "entmax15_loss", "sparsemax_bisect_loss", "entmax_bisect_loss"]
LOSSES += ["normmax_bisect_loss"]
LOSS_MODULES = ["SparsemaxLoss", "Entmax15Loss", "SparsemaxBisectLoss", "EntmaxBisectLoss"]
LOSS_MODULES += ["NormmaxBisectLoss"]


def gradient(f: Callable[..., Tensor], x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """A value, and the gradient of it weighted, in all that floats."""
    leaves = [x, *[t for t in others if isinstance(t, Tensor) and t.requires_grad]]
    y = f(x.requires_grad_(), *others)
    return y.detach(), *torch.autograd.grad((y * randn(*y.shape, seed=9)).sum(), leaves)


@pytest.mark.parametrize("name", [*MAPS, *MAP_MODULES, *LOSSES, *LOSS_MODULES])
def test_signatures(name: str) -> None:
    peer = pytest.importorskip("entmax")
    ours, theirs = (
        {p.name: p.default for p in inspect.signature(getattr(lib, name)).parameters.values()}
        for lib in (compat_entmax, peer)
    )
    assert list(ours.items()) == list(theirs.items())


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("name", MAPS)
def test_maps(name: str, dim: int) -> None:
    expected: dict[str, Callable[[Tensor], Tensor]] = {
        "sparsemax": lambda x: sx.sparsemax(x, dim),
        "entmax15": lambda x: sx.entmax(x, 1.5, dim),
        "sparsemax_bisect": lambda x: sx.sparsemax(x, dim),
        "entmax_bisect": lambda x: sx.entmax(x, 1.5, dim),
        "normmax_bisect": lambda x: sx.normmax(x, 2, dim),
        "budget_bisect": lambda x: sx.budgetmax(x, 2, dim),
    }
    x, function = randn(5, 4, 6), getattr(compat_entmax, name)
    ours = gradient(lambda x: function(x, dim=dim), x)
    close(ours, gradient(expected[name], x))
    module = getattr(compat_entmax, dict(zip(MAPS, MAP_MODULES, strict=True))[name])
    assert module(dim=dim)(x).equal(function(x, dim=dim))
    if peer := installed("entmax"):
        close(ours, gradient(lambda x: getattr(peer, name)(x, dim=dim), x))


@pytest.mark.parametrize("name", ["entmax_bisect", "normmax_bisect", "budget_bisect"])
def test_a_number_for_each_row(name: str) -> None:
    x, each = randn(4, 3, 6), torch.tensor([1.3, 2.0, 1.3, 1.7]).double()[:, None, None]
    function = getattr(compat_entmax, name)
    ours = gradient(function, x, each)
    rows = [gradient(lambda x, a=a: function(x, a), row) for a, row in zip(each.flatten(), x)]
    close(ours[0], torch.stack([p for p, _ in rows]))
    assert ours[1].shape == x.shape
    along = function(x.movedim(-1, 1), each, 1)
    close(along.movedim(1, -1), function(x, each))
    if peer := installed("entmax"):
        learned = name == "entmax_bisect"
        ours, theirs = (
            gradient(f, x, each.clone().requires_grad_(learned))
            for f in (function, getattr(peer, name))
        )
        close(ours, theirs)


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    x, target = randn(7, 5), torch.tensor([0, 1, 2, 3, 4, 0, 1])
    function = getattr(compat_entmax, name)
    ours = gradient(function, x, target)
    if not name.startswith("normmax"):
        alpha = 2.0 if "sparsemax" in name else 1.5
        loss = lambda x, y: sx.losses.entmax_loss(x, y, alpha, reduction="none")  # noqa: E731
        close(ours, gradient(loss, x, target))
    else:
        y = torch.nn.functional.one_hot(target, 5)
        p = sx.normmax(x, 2.0).detach()
        close(ours[1], (p - y) * randn(7, seed=9)[:, None])
    assert bool((ours[0] >= 0).all())
    if peer := installed("entmax"):
        close(ours, gradient(getattr(peer, name), x, target))


@pytest.mark.parametrize("reduction", ["elementwise_mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [-100, 2])
@pytest.mark.parametrize("name", LOSS_MODULES)
def test_loss_modules(name: str, ignore: int, reduction: str) -> None:
    x, target = randn(7, 5), torch.tensor([0, 1, 2, 3, 4, 0, 1])
    module = getattr(compat_entmax, name)(ignore_index=ignore, reduction=reduction)
    ours = gradient(module, x, target)
    each = getattr(compat_entmax, dict(zip(LOSS_MODULES, LOSSES, strict=True))[name])(x, target)
    kept = each[target != ignore]
    expected = {"elementwise_mean": kept.mean(), "sum": kept.sum(), "none": each}[reduction]
    if reduction == "none":
        expected = torch.where(target == ignore, 0.0, each)
    close(ours[0], expected.detach())
    with pytest.raises(ValueError, match='reduction must be "elementwise_mean"'):
        getattr(compat_entmax, name)(reduction="mean")
    if peer := installed("entmax"):
        theirs = getattr(peer, name)(ignore_index=ignore, reduction=reduction)
        close(ours, gradient(theirs, x, target))


@pytest.mark.parametrize("shapes", [((1, 6), (4,)), ((4, 6), (1,)), ((4, 6), (3,))], ids=str)
def test_targets_of_another_shape(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """An error instead of rows that are repeated."""
    x, target = torch.randn(shapes[0]), torch.zeros(shapes[1], dtype=torch.long)
    for name in ("Sparsemax", "SparsemaxBisect", "Entmax15", "EntmaxBisect", "NormmaxBisect"):
        with pytest.raises(ValueError, match=f"{name}Loss: target must be"):
            getattr(compat_entmax, f"{name}Loss")()(x, target)
    for name in ("sparsemax", "sparsemax_bisect", "entmax15", "entmax_bisect", "normmax_bisect"):
        with pytest.raises(ValueError, match="target must be"):
            getattr(compat_entmax, f"{name}_loss")(x, target)


def test_where_entmax_fails() -> None:
    x, target = randn(3, 4), torch.tensor([0, -100, 2])
    loss = compat_entmax.SparsemaxLoss()
    close(loss(x, target), compat_entmax.sparsemax_loss(x, target.clamp(min=0))[[0, 2]].mean())
    alpha = torch.tensor([[1.2], [1.5], [2.0]]).double().requires_grad_()
    each = compat_entmax.entmax_bisect_loss(x, torch.tensor([0, 1, 2]), alpha)
    assert each.shape == (3,) and torch.autograd.grad(each.sum(), alpha)[0].shape == (3, 1)
    close(compat_entmax.entmax_bisect(x, 1.0), x.softmax(-1))
    with pytest.raises(ValueError, match="alpha must be a finite number of at least 1"):
        compat_entmax.entmax_bisect(x, 0.5)


def test_readme_of_entmax() -> None:
    def calls(library: Any) -> list[Tensor]:
        x = torch.tensor([-2, 0, 0.5])
        out = [library.sparsemax(x, dim=0), library.entmax15(x, dim=0)]
        x = torch.tensor([[-1, 0, 0.5], [1, 2, 3.5]])
        alpha = torch.tensor(1.33, requires_grad=True)
        p = library.entmax_bisect(x, alpha)
        return [*out, p, *torch.autograd.grad(p[0, 0], alpha)]

    ours = calls(compat_entmax)
    close(ours[0], torch.tensor([0.0, 0.25, 0.75]))
    close(ours[3].item(), -0.2562, rtol=0, atol=1e-4)
    if peer := installed("entmax"):
        close(ours, calls(peer))


# -- the page --------------------------------------------------------------------------------------


def test_the_page_on_migration() -> None:
    text = (Path(__file__).parents[1] / "docs" / "migration.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "migration.md", None, 0)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.DocTestRunner(optionflags=flags).run(test).failed == 0


@pytest.mark.slow  # the peer compiles for half a minute
def test_its_table_of_soft_dtw() -> None:
    peer = pytest.importorskip("tslearn.metrics").SoftDTWLossPyTorch
    x, y = randn(3, 6, 2), randn(3, 6, 2, seed=1)
    for normalize in (False, True):
        ours = sx.losses.SoftDTW(0.5, divergence=normalize)
        theirs = peer(gamma=0.5, normalize=normalize)
        close(ours(x, y), theirs(x, y).flatten(), rtol=1e-5, atol=1e-5)  # its own is float32


def test_its_table_of_torch_struct() -> None:
    """Rows that name other scores: both sides have the same partition."""
    p = randn(2, 3, 4, 4)
    alone = sx.LinearChain(p.new_zeros(2, 4, 4), p.mT)
    close(alone.log_partition(), compat.LinearChainCRF(p).partition)
    segments, transition = randn(2, 4, 2, 3), randn(3, 3, seed=1)
    # a segment of label j: it stands at its end, and the label at the start of all is free
    joint = segments[..., None].expand(2, 4, 2, 3, 3) + transition.mT
    joint[:, 0] = segments[:, 0, ..., None].expand(2, 2, 3, 3) - math.log(3)
    joint = torch.cat([torch.zeros_like(joint[:, :, :1]), joint], 2)  # width 0
    split = sx.SemiMarkov(segments, transition)
    close(split.log_partition(), compat.SemiMarkovCRF(joint).partition)
    given = randn(3, 3), randn(5, 3, seed=1), randn(3, seed=2)
    seen = torch.tensor([[0, 4, 2, 1]])
    model = sx.HMM(given[2], given[0].mT, given[1].mT, seen)
    close(model.log_partition(), compat.HMM(*given, seen).partition)
