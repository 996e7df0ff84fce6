"""SparseMAP's Triton kernels against the solver in torch and the compiled one.

With a CUDA device they run on it; without one, under Triton's interpreter on the CPU.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton")

import structmax as sx
from structmax.sparse import active_set, active_set_gpu, fused_gpu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def chain(items: int = 3, **options: Any) -> Any:
    return sx.LinearChain(randn(items, 5, 3), randn(3, 3, seed=1), **options)


def tree(items: int = 3, **options: Any) -> Any:
    return sx.DependencyTree(randn(items, 5, 5), **options)


def forbidden() -> Any:
    unary = randn(2, 4, 3)
    unary[0, 1, :2] = -math.inf
    unary[1, 0, 0] = -math.inf
    return sx.LinearChain(unary, randn(2, 3, 3, 3, seed=1))


LENGTHS = torch.tensor([4, 1, 3])
CASES = {
    "chain": chain,
    "ragged-chain": lambda: chain(lengths=LENGTHS),
    "forbidden": forbidden,
    "tree": lambda: tree(lengths=LENGTHS),
    "many-roots": lambda: tree(2, root="multi"),
    "steps": lambda: sx.LinearChain(randn(2, 4, 3), randn(2, 3, 3, 3, seed=1)),
    "one-position": lambda: sx.LinearChain(randn(2, 1, 5), randn(5, 5, seed=1)),
    "ties": lambda: sx.DependencyTree(torch.zeros(1, 5, 5, dtype=torch.float64)),
}


def solved(structure: Any, backend: str, **options: Any) -> tuple[list[Tensor], Any]:
    """The answer and its gradients, on the CPU."""
    device = "cpu" if backend == "cpu" else DEVICE
    tensors = {name: t.detach().to(device) for name, (t, _) in structure._tensors().items()}
    leaves = [t.requires_grad_() for t in tensors.values() if t.is_floating_point()]
    with sx.backend(backend):
        result = structure._rebuild(**tensors).sparsemap(**options)
        assert result.marginals.device.type == device
        direction = randn(*result.marginals.shape).to(device)
        grads = torch.autograd.grad(result.marginals, leaves, direction, retain_graph=True)
        means = result.marginals, *(result.additional if options else ()), result.value
    return [t.detach().cpu() for t in (*means, *grads)], result


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_compiled_solver(case: str) -> None:
    structure = CASES[case]()
    ours, result = solved(structure, "gpu")
    other, _ = solved(structure, "cpu")
    for a, b in zip(ours, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert bool((result.gap < 1e-9).all()) and bool((result.probs >= 0).all())


def test_the_whole_face_of_equal_scores() -> None:
    """Of tags without any preference: derivatives are those of a projection at each position."""
    unary = torch.zeros(1, 5, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    with sx.backend("gpu"):
        result = sx.LinearChain(unary, torch.zeros_like(unary[0, :3])).sparsemap()
    direction = randn(1, 5, 3).to(DEVICE)
    (grad,) = torch.autograd.grad(result.marginals, unary, direction)
    torch.testing.assert_close(grad, direction - direction.mean(-1, keepdim=True))
    assert int(result.num_active) == 3 and result.structures.shape[1] == 3  # which are not all


@pytest.mark.parametrize("most", [32, 16])
def test_slots_grow_and_end(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the last of them another solver has to do it."""
    monkeypatch.setattr(fused_gpu, "FIRST_SLOTS", 16)
    monkeypatch.setattr(fused_gpu, "MOST_SLOTS", most)
    structure = sx.DependencyTree(0.1 * randn(1, 6, 6))
    found: list[Any] = []
    solve = fused_gpu.solve
    monkeypatch.setattr(fused_gpu, "solve", lambda *a: found.append(solve(*a)) or found[-1])
    ours, result = solved(structure, "gpu")
    other, _ = solved(structure, "cpu")
    assert int(result.num_active) > 16
    assert [f is not None for f in found] == [most == 32]
    for a, b in zip(ours, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_an_item_does_not_depend_on_its_batch() -> None:
    structure = tree(3)
    with sx.backend("gpu"):
        together = sx.DependencyTree(structure.scores.to(DEVICE)).sparsemap()
        alone = sx.DependencyTree(structure.scores[1:2].to(DEVICE)).sparsemap()
    assert torch.equal(together.marginals[1:2], alone.marginals)


def test_all_parts_penalised_and_both_gradients() -> None:
    structure = chain(2, lengths=torch.tensor([5, 3]))
    ours, _ = solved(structure, "gpu", penalize="all")
    other, _ = solved(structure, "cpu", penalize="all")
    for a, b in zip(ours, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_warm_start_and_limit() -> None:
    structure = sx.LinearChain(randn(2, 3, 3), randn(3, 3, seed=1))
    _, cold = solved(structure, "gpu")
    _, warm = solved(structure, "gpu", init=cold)
    assert bool((warm.iterations <= 2).all())
    torch.testing.assert_close(warm.marginals, cold.marginals, rtol=0, atol=1e-9)
    _, short = solved(structure, "gpu", max_iter=2)
    assert bool((short.iterations == 2).all())


@pytest.mark.parametrize("case", ["ragged-chain", "forbidden", "tree", "ties"])
def test_starts_from_other_scores(case: str) -> None:
    """With the same answer and gradients as from scratch, whatever it starts from."""
    structure = CASES[case]()
    ours, _ = solved(structure, "gpu")
    name, (scores, _) = next(iter(structure._tensors().items()))
    other = structure._rebuild(
        **{k: t for k, (t, _) in structure._tensors().items()}
        | {name: scores + 0.3 * randn(*scores.shape, seed=3)}
    )
    _, start = solved(other, "gpu")
    again, _ = solved(structure, "gpu", init=start)
    for a, b in zip(ours, [again[0], *again[-len(ours) + 1 :]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_minus_a_billion_where_nothing_is() -> None:
    scores = randn(2, 6, 6, seed=6)
    scores[:, :, 0] = scores[:, range(6), range(6)] = -1e9
    ours, _ = solved(sx.DependencyTree(scores), "gpu")
    scores[:, :, 0] = scores[:, range(6), range(6)] = 0.0
    other, _ = solved(sx.DependencyTree(scores), "cpu")
    for a, b in zip(ours, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_no_structure() -> None:
    unary = randn(2, 3, 2)
    unary[1, 1] = -math.inf
    with sx.backend("gpu"):
        given = unary.to(DEVICE), torch.zeros(2, 2, dtype=torch.float64, device=DEVICE)
        result = sx.LinearChain(*given, validate_args=False).sparsemap()
    assert not bool(result.marginals[0].isnan().any()) and bool(result.gap[1].isnan())


class _OneOfMany:
    """The vertices of a simplex: as many are active as there are scores, if these are close."""

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        value, at = scores.max(-1)
        return value, torch.nn.functional.one_hot(at, scores.shape[-1]).to(scores)

    def keep(self, index: Tensor) -> _OneOfMany:
        return self


def test_more_structures_than_slots() -> None:
    theta = 1e-3 * randn(1, active_set_gpu.Face.first_slots + 2).to(DEVICE)
    n = theta.shape[1]
    with sx.backend("gpu"):
        solution = active_set.solve(_OneOfMany(), theta, n, n, 1000, 1e-10)
    assert solution.probs.shape[1] == n
    mu = torch.einsum("bk,bkd->bd", solution.probs, solution.vertices)
    torch.testing.assert_close(mu, theta - theta.mean() + 1 / n, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_larger_batches_on_the_device(kind: str) -> None:
    torch.manual_seed(0)
    lengths = torch.randint(1, 21, (50,))
    if kind == "chain":
        structure: Any = sx.LinearChain(randn(50, 20, 7), randn(7, 7, seed=1), lengths=lengths)
    else:
        structure = sx.DependencyTree(randn(50, 21, 21), lengths=lengths)
    ours, result = solved(structure, "gpu")
    other, _ = solved(structure, "cpu")
    for a, b in zip(ours[:2], other[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
    for a, b in zip(ours[2:], other[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert bool((result.gap < 1e-8).all())


def test_what_all_scores_share_costs_no_digits() -> None:
    torch.manual_seed(0)
    grid = 2.0**20  # so that sums with it are exact
    scores = (grid * 0.3 * torch.randn(2, 6, 6, dtype=torch.float64)).round() / grid
    expected = sx.DependencyTree(scores).sparsemap()
    with sx.backend("gpu"):
        found = sx.DependencyTree((scores + 2.0**24).to(DEVICE)).sparsemap()
    torch.testing.assert_close(found.marginals.cpu(), expected.marginals, rtol=0, atol=1e-12)
    assert found.num_active.tolist() == expected.num_active.tolist()
