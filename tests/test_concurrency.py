"""Threads, forks, spawned processes and DataLoader workers."""

from __future__ import annotations

import builtins
import gc
import io
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from table import ROWS, diamond
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import structmax as sx
from structmax.cache import Cache
from structmax.forest import topology
from structmax.primitive import backend_for
from structmax.structures.choice import choice  # noqa: F401 (registers the family)
from structmax.threads import _openmp, run_chunks

OMEGAS = [sx.Shannon(), sx.Gini(), sx.Hard()]


def chain(seed: int, omega: sx.Smoothing | None = None, items: int = 24) -> sx.LinearChain:
    """Large enough for the kernels to go to the pool."""
    random = torch.Generator().manual_seed(seed)
    return sx.LinearChain(
        torch.randn(items, 20, 9, generator=random),
        torch.randn(9, 9, generator=random),
        lengths=torch.randint(1, 21, (items,), generator=random),
        smoothing=omega,
    )


def answers(seed: int, omega: sx.Smoothing | None = None) -> list[Tensor]:
    s = chain(seed, omega)
    unary = s.unary.clone().requires_grad_()
    live = sx.LinearChain(unary, s.transition, lengths=s.lengths, smoothing=omega)
    (g,) = torch.autograd.grad((live.marginals() ** 2).sum() + live.log_partition().sum(), unary)
    random = torch.Generator().manual_seed(seed)
    best = s.topk(2)
    return [
        s.log_partition(), s.marginals(), g, s.argmax(), best.scores, best.structures,
        s.max_marginals(), s.sample((2,), generator=random),
    ]  # fmt: skip


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether all bits are; says which are not."""
    for at, (x, y) in enumerate(zip(a, b, strict=True)):
        if not torch.equal(x, y):
            where = (x != y).nonzero()[:3].tolist()
            print(f"answer {at} {tuple(x.shape)} differs at {where}: by {(x - y).abs().max()}")
            return False
    return True


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch.set_num_threads
    torch.set_num_threads(before)


# -- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_eight_threads(omega: sx.Smoothing, threads) -> None:
    expected = [answers(seed, omega) for seed in range(8)]
    barrier = threading.Barrier(8)

    def work(seed: int) -> bool:
        barrier.wait()
        return all(same(answers(seed, omega), expected[seed]) for _ in range(3))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_threads_share_one_structure(threads) -> None:
    s, expected = chain(0), chain(0).marginals()
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: s.marginals(), range(64)):
            assert torch.equal(found, expected)


def test_threads_with_their_own_counts(threads) -> None:
    """Threads that ask for other numbers of threads make and drop pools under each other."""
    expected = answers(1)

    def work(count: int) -> bool:
        torch.set_num_threads(count)
        return all(same(answers(1), expected) for _ in range(4))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, [1, 2, 3, 4, 2, 5]))


def test_set_num_threads(threads) -> None:
    expected = answers(2)
    for count in (1, 3, 2, 8, 1):
        threads(count)
        assert same(answers(2), expected)
        assert torch.get_num_threads() == count, "the kernels changed torch's thread count"


def test_user_forests_in_threads(threads) -> None:
    """Forests that are made, used and dropped in many threads at once."""
    scores = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    expected = sx.Hyperpath(diamond(), scores).marginals()

    def work(_: int) -> bool:
        leaf = scores.clone().requires_grad_()
        mu = sx.Hyperpath(diamond(), leaf).marginals()
        gc.collect(0)
        (g,) = torch.autograd.grad((mu**2).sum(), leaf)
        return torch.equal(mu.detach(), expected) and bool(g.isfinite().all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(40)))


# -- the cache of forests ------------------------------------------------------------------------


@pytest.fixture
def small_cache(monkeypatch) -> Cache:
    cache: Cache = Cache(most=12_000)
    monkeypatch.setattr(topology, "_cache", cache)
    return cache


def test_cache_is_bounded(small_cache) -> None:
    for n in range(1, 60):
        topology.lookup(topology.name_of("choice", [n]))
        assert small_cache.bytes <= small_cache.most
    assert 1 < len(small_cache) < 59
    big = topology.lookup(topology.name_of("choice", [5000]))  # larger than the cache itself
    assert big.num_edges == 5000 and len(small_cache) == 1
    assert topology.lookup("choice:7").num_edges == 7


def test_cache_keeps_what_is_used(small_cache) -> None:
    kept = topology.lookup("choice:40")
    for n in range(1, 40):
        topology.lookup(topology.name_of("choice", [n]))
        assert topology.lookup("choice:40") is kept
    assert len(small_cache) < 30


def test_eviction_between_forward_and_backward(small_cache) -> None:
    expected = answers(3, sx.Gini())
    small_cache.most = 10
    s = chain(3, sx.Gini())
    unary = s.unary.clone().requires_grad_()
    live = sx.LinearChain(unary, s.transition, lengths=s.lengths, smoothing=sx.Gini())
    out = (live.marginals() ** 2).sum() + live.log_partition().sum()
    topology.lookup("choice:50")
    (g,) = torch.autograd.grad(out, unary)
    assert torch.equal(g, expected[2])


def test_cache_in_threads(small_cache, threads) -> None:
    """Eight threads that evict each other's forests."""

    def work(seed: int) -> bool:
        for n in torch.randint(1, 60, (60,), generator=torch.Generator().manual_seed(seed)):
            scores = torch.zeros(3, int(n), dtype=torch.float64)
            value = sx.Choice(scores).log_partition()
            if not torch.allclose(value, torch.tensor(float(n), dtype=torch.float64).log()):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    for forest in small_cache:  # what grew while another thread measured it
        topology.lookup(forest.name)
    topology.lookup("choice:61")
    assert small_cache.bytes <= small_cache.most


def run_in_child(work: Callable[[], bool]) -> bool:
    """Whether ``work`` returns True in a forked process, within ten seconds."""
    child = os.fork()
    if child == 0:  # in the child: no pytest, no exceptions past this line
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_building_a_forest_blocks_nobody_else(monkeypatch) -> None:
    """While a thread builds a forest, others are found and built, here and in a forked process."""
    started, finish = threading.Event(), threading.Event()

    def slow(n: int) -> topology.Forest:
        started.set()
        assert finish.wait(60)
        return topology._families["choice"](n)

    monkeypatch.setattr(topology, "_cache", Cache(most=1 << 20))
    monkeypatch.setitem(topology._families, "slow", slow)
    monkeypatch.setitem(topology._families, "quick", topology._families["choice"])
    known = topology.lookup("choice:3")
    with ThreadPoolExecutor(3) as pool:
        builders = [pool.submit(topology.lookup, "slow:4") for _ in range(2)]
        assert started.wait(60)
        found = pool.submit(lambda: (topology.lookup("choice:3"), topology.lookup("choice:5")))
        try:
            same_one, other = found.result(timeout=10)
            assert same_one is known and other.num_edges == 5

            def work() -> bool:
                found = [topology.lookup(name) for name in ("choice:3", "choice:6", "quick:4")]
                topology._families["slow"] = topology._families["choice"]
                found.append(topology.lookup("slow:4"))  # the builder's thread is not here
                return [forest.num_edges for forest in found] == [3, 6, 4, 4]

            assert run_in_child(work), "the forked process failed or hangs"
        finally:
            finish.set()
        first, second = (builder.result(timeout=60) for builder in builders)
    assert first is second and topology.lookup("slow:4") is first  # it was built once


# -- processes -----------------------------------------------------------------------------------


def test_fork_after_the_pool_was_used(threads) -> None:
    expected = answers(4)  # starts the pool
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # in the child: no pytest, no exceptions past this line
        code = 1
        try:
            torch.set_num_threads(2)
            code = 0 if same(answers(4), expected) else 2
        finally:
            os.write(write, bytes([code]))
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        code = pipe.read(1)
    os.waitpid(child, 0)
    assert code == b"\0", "the forked process failed, or gave other numbers"
    assert same(answers(4), expected)


def work_in_process(seed: int) -> list:
    torch.set_num_threads(2)
    return [t.tolist() for t in answers(seed)[:4]]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_process(method: str, threads) -> None:
    expected = [t.tolist() for t in answers(5)[:4]]
    with multiprocessing.get_context(method).Pool(2) as pool:
        for found in pool.map(work_in_process, [5, 5]):
            assert found == expected


def forward_in_process(s: sx.Structure, queue) -> None:
    queue.put([s.marginals().tolist(), s.log_partition().tolist()])


def test_structures_travel() -> None:
    """A structure over a user's forest, pickled to another process, has its forest with it."""
    s = sx.Hyperpath(diamond(), torch.randn(3, 12, dtype=torch.float64))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=forward_in_process, args=(s, queue))
    process.start()
    found = queue.get(timeout=120)
    process.join()
    assert found == [s.marginals().tolist(), s.log_partition().tolist()]


class Marginals(Dataset):
    """Computes marginals where a worker loads an item."""

    def __init__(self, omega: sx.Smoothing) -> None:
        self.omega, self.forest = omega, diamond()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        s = chain(i, self.omega, items=4)
        random = torch.Generator().manual_seed(i)
        h = sx.Hyperpath(self.forest, torch.randn(12, generator=random), smoothing=self.omega)
        return s.marginals(), h.marginals()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_dataloader(method: str, threads) -> None:
    data = Marginals(sx.Gini())
    expected = [data[i] for i in range(6)]  # the pool is in use before the workers start
    chain(0).marginals()
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context=method)
    for epoch in range(2):
        for b, (mu, nu) in enumerate(loader):
            for i in range(2):
                assert torch.equal(mu[i], expected[2 * b + i][0]), epoch
                assert torch.equal(nu[i], expected[2 * b + i][1]), epoch


# -- whose threads -------------------------------------------------------------------------------


@pytest.fixture(params=["torch's", "ours"])
def whose(request, monkeypatch, threads) -> str:
    threads(2)
    if request.param == "ours":
        monkeypatch.setattr("structmax.threads._openmp", lambda: None)
    elif _openmp() is None:
        pytest.skip("torch does not use GNU OpenMP here")
    else:
        monkeypatch.setattr("structmax.threads._crowded_until", 0.0)
        monkeypatch.setattr("structmax.threads.CROWDED_WAIT", math.inf)
    return request.param


def test_every_chunk_runs_once(whose: str) -> None:
    done: list[tuple[int, int]] = []
    run_chunks(lambda low, high: done.append((low, high)), 100, 10_000)
    assert sorted(i for low, high in done for i in range(low, high)) == list(range(100))


def test_an_error_in_a_thread_is_raised(whose: str) -> None:
    def task(low: int, high: int) -> None:
        if low > 20:
            raise ZeroDivisionError("in a chunk")

    with pytest.raises(ZeroDivisionError, match="in a chunk"):
        run_chunks(task, 100, 10_000)
    run_chunks(lambda low, high: None, 100, 10_000)


def test_both_kinds_of_threads_agree(whose: str, monkeypatch) -> None:
    expected = answers(3)
    monkeypatch.setattr("structmax.threads._openmp", lambda: None)
    assert same(answers(3), expected)


def test_without_openmp(monkeypatch) -> None:
    """Where torch's OpenMP is not found there are none of its threads."""
    look = _openmp.__wrapped__
    for lines in ("", "0-1 r 0 0 1 /a/libgomp.so.1\n2-3 r 0 0 1 /b/libgomp.so.1\n"):
        monkeypatch.setattr(builtins, "open", lambda *_, lines=lines: io.StringIO(lines))
        assert look() is None
    monkeypatch.setattr(builtins, "open", lambda *_: io.StringIO("0-1 r 0 0 1 /no/libgomp.so.1"))
    assert look() is None

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(builtins, "open", refuse)
    assert look() is None


def test_a_crowded_machine_uses_our_threads(threads, monkeypatch) -> None:
    threads(2)
    calls = []
    monkeypatch.setattr("structmax.threads._crowded_until", 0.0)
    monkeypatch.setattr("structmax.threads._openmp", lambda: _late(calls))
    for _ in range(3):
        run_chunks(lambda low, high: None, 100, 10_000)
    assert len(calls) == 1


def _late(calls: list):
    def parallel(region, data, count: int, flags: int) -> None:
        region(None)
        calls.append(count)
        time.sleep(0.01)

    return parallel


# -- all kinds of work at once --------------------------------------------------------------------


def jobs() -> list[Callable[[], list[Tensor]]]:
    """Work of every kind of kernel: each gives the same whenever it is done."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    spans, arcs, grid, pairs = draw(6, 9, 9), draw(6, 9, 9), draw(6, 12, 15), draw(6, 8, 8)
    rows, costs = draw(64, 500), draw(8, 40)

    def learned(make: Callable[[Tensor], sx.Structure], given: Tensor) -> list[Tensor]:
        leaf = given.clone().requires_grad_()
        s = make(leaf)
        loss = (s.marginals() ** 2).sum() + s.log_partition().sum()
        return [*torch.autograd.grad(loss, leaf), s.argmax(), s.topk(2).scores]

    def mapped(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = rows.clone().requires_grad_()
        p = function(leaf)
        return [p.detach(), *torch.autograd.grad((p**2).sum(), leaf)]

    def solved() -> list[Tensor]:
        leaf = arcs.clone().requires_grad_()
        result = sx.DependencyTree(leaf).sparsemap()  # type: ignore[abstract]
        return [*torch.autograd.grad((result.marginals**2).sum(), leaf), result.probs.detach()]

    return [
        lambda: answers(0),
        lambda: answers(1, sx.Gini()),
        lambda: learned(sx.BinaryTree, spans),
        lambda: learned(sx.DependencyTree, arcs),
        lambda: learned(lambda t: sx.DependencyTree(t, projective=True), arcs),
        lambda: learned(sx.Alignment, grid),
        lambda: learned(lambda t: sx.KSubset(t, 5), costs),
        lambda: [sx.Assignment(pairs).argmax()],
        lambda: mapped(sx.sparsemax),
        lambda: mapped(lambda t: sx.entmax(t, 1.5)),
        solved,
    ]


def everything_in_threads(seconds: float, threads: int = 8) -> int:
    """How many jobs were done in that time, each compared with what it gives alone."""
    work = jobs()
    expected = [job() for job in work]
    until, failed, done = time.monotonic() + seconds, [], [0] * threads

    def loop(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        while not failed and (done[seed] < len(work) or time.monotonic() < until):
            at = int(torch.randint(len(work), (1,), generator=random))
            if not same(work[at](), expected[at]):
                failed.append(at)
            done[seed] += 1

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(loop, range(threads)))
    assert not failed, f"jobs {failed} gave other answers in threads"
    return sum(done)


def test_all_kinds_of_work_in_eight_threads(threads) -> None:
    assert everything_in_threads(2.0) >= 88


@pytest.mark.slow
def test_all_kinds_of_work_in_eight_threads_for_a_minute(threads) -> None:
    print(everything_in_threads(60.0), "jobs")


USUAL = [f"{name}/shannon" for name in ("chain-step", "binary-tree", "nonprojective", "dtw")]


@pytest.mark.parametrize(
    "row",
    [r if r in USUAL else pytest.param(r, marks=pytest.mark.slow) for r in ROWS],
)
def test_deterministic_algorithms(row: str, threads) -> None:
    """With them demanded every query and gradient works, and gives the same bits on 1, 2 and 3
    threads."""
    assert torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(0)
    s = ROWS[row]()
    names = [name for name, (t, _) in s._tensors().items() if t.is_floating_point()]
    found = []
    for count in (1, 2, 3):
        threads(count)
        tensors = {name: t.detach().clone() for name, (t, _) in s._tensors().items()}
        leaves = [tensors[name].requires_grad_() for name in names]
        t = s._rebuild(**tensors)
        made = [t.argmax()]
        if t.supports("topk"):
            made.append(t.topk(2).scores)
        if t.supports("marginals"):
            loss = t.log_partition().sum()
            if not row.endswith("/hard"):
                loss = loss + (t.marginals() ** 2).sum()
            random = torch.Generator().manual_seed(0)
            made += [t.marginals(), t.max_marginals(), t.sample((2,), generator=random)]
            made += torch.autograd.grad(loss, leaves, materialize_grads=True)
        found.append([x.detach() for x in made])
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_a_forced_backend_is_that_of_its_thread() -> None:
    """Contexts of two threads that overlap, neither inside the other; and one that forces none."""
    x, seen = torch.zeros(1), []
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        seen.append(backend_for(x))
        with sx.backend("cpu"):
            entered.set()
            left.wait(60)
            seen.append(backend_for(x))
            with sx.backend("gpu"), sx.backend("cpu"):
                pass
            seen.append(backend_for(x))

    with sx.backend("naive"):
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(60)
        with sx.backend("gpu"):
            assert backend_for(x) == "gpu"
        assert backend_for(x) == "naive"
    left.set()
    thread.join()
    assert seen == ["cpu"] * 3 and backend_for(x) == "cpu"
