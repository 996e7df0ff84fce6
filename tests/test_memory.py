"""Memory: nothing grows from call to call, caches are bounded, the impossible is refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import structmax as sx
from structmax import checks
from structmax.cache import Cache
from structmax.forest import topology

N = 100_000


def resident() -> float:
    """MiB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def step(i: int) -> None:
    """Ten calls, of queries, losses and maps, with gradients; sizes change from step to step."""
    n = 3 + i % 7
    tree = torch.randn(4, n, n, requires_grad=True)
    unary = torch.randn(4, n, 3, requires_grad=True)
    chain = sx.LinearChain(unary, torch.zeros(3, 3), smoothing=[sx.Shannon(), sx.Gini()][i % 2])
    total = sx.BinaryTree(tree).marginals().square().sum() + chain.log_partition().sum()
    total = total + sx.losses.perceptron(chain, chain.argmax())
    total = total + sx.sparsemax(tree).square().sum() + sx.losses.SoftDTW()(unary, unary).sum()
    total.backward()
    with torch.no_grad():
        sx.DependencyTree(tree.detach()).sample((2,))
        chain.topk(3), sx.KSubset(tree[0], 2).entropy()
        if i % 10 == 0:
            chain.sparsemap()
    draw = sx.ForestBuilder()  # a user's own forest lives no longer than its structure
    draw.edges(draw.node(), -1, -1, range(4))
    sx.Hyperpath(draw.build(), torch.zeros(4)).log_partition()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("calls", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_grows(calls: int) -> None:
    torch.manual_seed(0)
    for i in range(30):  # kernels are compiled, forests drawn, the allocator's pools filled
        step(i)
    gc.collect()
    before, forests = resident(), len(topology._user_forests)
    for i in range(calls // 10):
        step(i)
    gc.collect()
    assert len(topology._user_forests) == forests
    assert resident() - before < 24, "MiB more than before"


def test_forest_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: Cache = Cache(most=200_000)
    monkeypatch.setattr(topology, "_cache", cache)
    for n in range(2, 40):
        sx.BinaryTree(torch.zeros(n, n), smoothing=sx.Gini()).marginals()
        topology.lookup(topology.name_of("choice", [n]))  # what grew is measured again
        assert cache.bytes <= cache.most or len(cache) == 1
    # forests that were dropped are drawn again
    assert sx.BinaryTree(torch.zeros(2, 2), smoothing=sx.Gini()).log_partition() == 0


# -- what cannot be -----------------------------------------------------------------------------


def zeros(*shape: int) -> torch.Tensor:
    """Scores that take no memory themselves."""
    return torch.zeros(()).expand(shape)


IMPOSSIBLE: dict[str, Callable[[], object]] = {
    "binary tree": lambda: sx.BinaryTree(zeros(N, N)),
    "projective tree": lambda: sx.DependencyTree(zeros(N, N), projective=True),
    "dependency tree": lambda: sx.DependencyTree(zeros(N, N)),
    "spanning tree": lambda: sx.SpanningTree(zeros(N, N)),
    "grammar": lambda: sx.PCFG(zeros(5), zeros(5, 10, 10), zeros(N, 5)),
    "dtw": lambda: sx.Alignment(zeros(N, N)),
    "edit": lambda: sx.Alignment(zeros(N, N), kind="edit"),
    "monotone": lambda: sx.Alignment(zeros(N, N), kind="monotone"),
    "soft-dtw": lambda: sx.losses.SoftDTW()(zeros(N, 1), zeros(N, 1)),
    "grid": lambda: sx.GridPath(zeros(N, N)),
    "free grid": lambda: sx.GridPath(zeros(N, N), moves="all"),
    "segments": lambda: sx.SemiMarkov(zeros(N, N, 2)),
    "matching": lambda: sx.Assignment(zeros(N, N)),
    "subset": lambda: sx.KSubset(zeros(10 * N), N),
    "ctc": lambda: sx.CTC(zeros(N, 3), torch.ones(N // 2, dtype=torch.long), None, None),
    "chain in a batch": lambda: sx.LinearChain(zeros(N, N, 3), zeros(3, 3)),
    "k best": lambda: sx.Choice(zeros(100)).topk(10**9),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_sizes_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, without an allocation, with the size and what to do."""
    monkeypatch.setattr(checks, "memory_of", lambda device: 16 << 30)
    before = resident()
    with pytest.raises(MemoryError, match=r"at least [\d,.]+ GiB, and .* has 16.0 GiB. Shorten"):
        IMPOSSIBLE[name]()
    assert resident() - before < 100


@pytest.mark.parametrize("projective", [False, True])
def test_graphs_that_do_not_fit(projective: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of 20,000 words fit into 16 GiB, the graph of their trees does not."""
    monkeypatch.setattr(checks, "memory_of", lambda device: 16 << 30)
    scores = zeros(20_000, 20_000)
    with pytest.raises(MemoryError, match=r"graph of 20,000 positions would need"):
        sx.DependencyTree(scores, projective=True) if projective else sx.BinaryTree(scores)


def test_forests_that_cannot_be_numbered() -> None:
    with pytest.raises(ValueError, match="nodes are too many to be numbered"):
        sx.ForestBuilder().nodes(2**31)


def test_users_forests_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "memory_of", lambda device: 1 << 30)
    draw = sx.ForestBuilder()
    with pytest.raises(MemoryError, match="Forest: 100,000,000 nodes"):
        draw.nodes(100_000_000)
    node = draw.node()
    with pytest.raises(MemoryError, match="Forest: 100,000,000 edges"):
        draw.edges(node, -1, -1, zeros(1).int().expand(100_000_000).numpy())


def test_memory_of_this_machine() -> None:
    assert 1 << 28 < checks.memory_of(torch.device("cpu")) < 1 << 50


def test_memory_that_this_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cpu = checks.memory_of(torch.device("cpu")), torch.device("cpu")
    ask = checks.memory_of.__wrapped__  # what is known is kept otherwise
    for said, wanted in (("1000\n", 1000), ("max\n", None), (f"{1 << 60}\n", None)):
        monkeypatch.setattr(Path, "read_text", lambda self, said=said: said)
        assert ask(cpu) == wanted if wanted else ask(cpu) >= whole
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    assert ask(cpu) == 1 << 62


def test_possible_sizes_are_not_refused() -> None:
    """A quarter of a gigabyte of scores is no reason to complain."""
    sx.LinearChain(zeros(1000, 2000, 30), zeros(30, 30))
    sx.Choice(zeros(50_000_000))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_under_a_limit_the_error_comes_first() -> None:
    """In a process that may have 6 GiB: the error, and no crash."""
    code = (
        "import resource, torch, structmax as sx\n"
        "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
        "try: sx.BinaryTree(torch.zeros(()).expand(400_000, 400_000)).log_partition()\n"
        "except MemoryError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("BinaryTree: ") and "GiB" in run.stdout
