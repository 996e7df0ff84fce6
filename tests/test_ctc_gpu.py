"""The Triton kernels of CTC against the definition and the kernels of the CPU.

With a CUDA device they run on it; without one, under Triton's interpreter on the CPU.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton")

import structmax as sx
from structmax.forest.ctc import ops
from structmax.primitive import backend

# The interpreter computes with numpy, which warns of −inf and of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
INF, f32, f64 = math.inf, torch.float32, torch.float64
SHANNON = [1.0, 1.0, 1.0]


def scores(*shape: int, dtype: torch.dtype = f64, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=f64).to(DEVICE, dtype)


def item(*targets: list[int], frames: list[int]) -> list[Tensor]:
    """Constants: targets that −7 pads, and how many frames and symbols each item has."""
    most = max(map(len, targets))
    rows = [target + [-7] * (most - len(target)) for target in targets]
    count = torch.tensor([len(target) for target in targets], device=DEVICE)
    rows = torch.tensor(rows, dtype=torch.long, device=DEVICE).reshape(len(targets), most)
    return [rows, torch.tensor(frames, device=DEVICE), count]


def run(
    name: str, theta: Tensor, v: Tensor, of: list[Tensor], blank: int, gamma: float
) -> list[Tensor]:
    args = of, str(blank), [1.0, gamma, 1.0]
    with backend(name):
        return [*ops.ctc.gradient_op([theta], *args), *ops.ctc.hvp_op([theta], [v], *args)]


def agree(
    theta: Tensor, of: list[Tensor], blank: int = 0, gamma: float = 1.0, cpu: bool = True
) -> list[Tensor]:
    """Compares A, μ and w with the definition, which runs in float64, and with the kernels of the
    CPU. Returns ours."""
    v = scores(*theta.shape, seed=1)
    ours = run("gpu", theta, v.to(theta.dtype), of, blank, gamma)
    with backend("gpu"):
        ours.append(ops.ctc.value_op([theta], of, str(blank), [1.0, gamma, 1.0]))
    theirs = run("naive", theta.double(), v, of, blank, gamma)
    every = [theirs]
    if cpu:
        there = [t.cpu() for t in (theta.double(), v)]
        every.append(run("cpu", *there, [t.cpu() for t in of], blank, gamma))
    for others in every:
        for mine, reference in zip(ours, [*others, others[0]], strict=True):
            assert mine.dtype == theta.dtype
            limit = TOLERANCE[mine.dtype] * max(1.0, 1.0 / gamma)
            torch.testing.assert_close(mine.double(), reference.to(DEVICE), rtol=limit, atol=limit)
    return ours


def test_curvature_does_not_drift() -> None:
    """In float32, at an offset of −1e4 in scores and direction."""
    theta = (scores(1, 30, 4) * 8).round().float() / 8 - 1e4
    of = item([1, 1, 3, 2], frames=[30])
    found = [
        [run(name, x, v.to(x), of, 0, 1.0)[-1] for v in (theta, torch.ones_like(theta))]
        for name, x in (("gpu", theta), ("naive", theta.double()))
    ]
    (slope, flat), (exact, _) = found
    assert flat.abs().max() < 1e-6
    torch.testing.assert_close(slope.double(), exact, atol=1e-5, rtol=0)


RAGGED = item(
    [1, 1, 3], [3, 1], [], [2, 2, 2], frames=[5, 3, 2, 4]
)  # there is no room for the last


@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_agrees_with_the_definition(dtype: torch.dtype) -> None:
    """Ragged items, a forbidden symbol, an infeasible item, and NaN wherever no path goes."""
    theta = scores(4, 5, 4, dtype=dtype)
    theta[0, 2, 1] = -INF
    usable = sx.CTC(theta, *RAGGED)._usable_parts()
    ours = agree(torch.where(usable, theta, math.nan), RAGGED, gamma=0.5)
    assert ours[0][3] == -INF and not bool(ours[1][~usable].any() | ours[2][~usable].any())


def test_another_blank_and_any_strides() -> None:
    of = item([0, 2, 0], [1, 0, 0], frames=[5, 4])
    theta = scores(4, 3, 5, 2, dtype=f64).permute(3, 2, 0, 1)[..., 1]  # (2, 5, 4)
    agree(theta, [of[0].int().mT.contiguous().mT, of[1].int(), of[2].short()], blank=3)


@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_extreme_scores(dtype: torch.dtype) -> None:
    theta = (scores(4, 3, 3) * 64).round() / 64
    theta = torch.stack([theta[0] * 1e3, theta[1] + 1e4, theta[2] - 1e4, theta[3] * 1e30])
    agree(theta.to(dtype), item(*[[1, 2]] * 4, frames=[3] * 4), cpu=False)


def test_nan_and_infeasible_items_stay_alone() -> None:
    of = item(*[[1, 2]] * 3, frames=[3] * 3)
    theta = scores(3, 3, 3)
    theta[1, 1, 2], theta[2, 2] = math.nan, -INF
    a, mu, w = run("gpu", theta, scores(3, 3, 3, seed=1), of, 0, 1.0)
    assert a.isnan().tolist() == [False, True, False]
    assert a[2] == -INF and not mu[2].any() and not w[2].any()
    assert mu[1].isnan().all() and w[1].isnan().all()
    alone = run("gpu", theta[:1], scores(3, 3, 3, seed=1)[:1], [t[:1] for t in of], 0, 1.0)
    assert all(torch.equal(t[:1], one) for t, one in zip((a, mu, w), alone, strict=True))


@pytest.mark.parametrize("name", ["naive", "cpu", "gpu"])
def test_what_nobody_looked_at_gives_nan(name: str) -> None:
    """Targets out of range or blank, and impossible lengths, in the constants of the op."""
    if name == "cpu" and DEVICE == "cuda":
        pytest.skip("numba kernels want tensors of the CPU")
    targets = torch.tensor([[1, 2], [0, 1], [1, 9], [-1, 2], *[[1, 2]] * 4], device=DEVICE)
    frames = torch.tensor([3, 3, 3, 3, 4, 0, 3, 3], device=DEVICE)
    count = torch.tensor([2, 2, 2, 2, 2, 1, 3, -1], device=DEVICE)
    theta = scores(8, 3, 4)
    a, mu, w = run(name, theta, theta, [targets, frames, count], 0, 1.0)
    assert a.isnan().tolist() == [False] + [True] * 7
    for t in (mu, w):
        assert t.flatten(1).isnan().any(1).tolist() == [False] + [True] * 7


def test_structure() -> None:
    """Queries of the structure by these kernels, in half precision and with gradients."""
    targets = torch.tensor([[1, 1], [2, 1]], device=DEVICE)
    theta = scores(2, 4, 3).requires_grad_()
    found = []
    for name in ("gpu", "naive"):
        with backend(name):
            s = sx.CTC(theta, targets, torch.tensor([4, 3], device=DEVICE))
            (g,) = torch.autograd.grad((s.marginals() ** 2).sum() + s.log_partition().sum(), theta)
            found.append(g)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    with backend("gpu"):
        s = sx.CTC(theta.detach().bfloat16(), targets)
        assert s.log_partition().dtype == f32 and s.marginals().dtype == torch.bfloat16
        blanks = sx.CTC(theta[0].detach(), targets[0, :0])
        torch.testing.assert_close(blanks.log_partition(), theta[0, :, 0].detach().sum())
        assert sx.CTC(theta[:0], targets[:0]).marginals().shape == (0, 4, 3)
        with pytest.raises(ValueError, match="not blank"):
            sx.CTC(theta, targets - 1)
        with pytest.raises(ValueError, match="input_lengths"):
            sx.CTC(theta, targets, torch.tensor([4, 5], device=DEVICE))
        with pytest.raises(ValueError, match=r"log_probs\[0, 1, 0\] is nan"):
            sx.CTC(
                theta.detach().index_fill(1, torch.tensor([1], device=DEVICE), math.nan), targets
            )


def test_longer_targets_are_left_to_the_forest(monkeypatch: pytest.MonkeyPatch) -> None:
    s = sx.CTC(scores(3, 3), torch.tensor([1, 2], device=DEVICE))
    with backend("gpu"):
        assert s._is_dense
        monkeypatch.setattr(ops, "MOST_ON_GPU", 1)
        assert not s._is_dense


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
class TestOnTheDevice:
    """What the interpreter cannot show: several warps, capture, no synchronisation."""

    @pytest.mark.parametrize(
        ("batch", "T", "S", "V"), [(16, 400, 100, 60), (3, 50, 20, 5000), (2, 2200, 1000, 30)]
    )
    @pytest.mark.parametrize("dtype", [f64, f32], ids=str)
    def test_real_sizes(self, batch: int, T: int, S: int, V: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(0)
        targets = torch.randint(1, V, (batch, S), generator=random)
        frames = torch.randint(2 * S + 2, T + 1, (batch,), generator=random)
        count = torch.randint(S // 2, S + 1, (batch,), generator=random)
        of = [t.to(DEVICE) for t in (targets, frames, count)]
        theta, v = scores(batch, T, V, dtype=dtype), scores(batch, T, V, dtype=dtype, seed=1)
        ours = run("gpu", theta, v, of, 0, 1.0)
        again = run("gpu", theta, v, of, 0, 1.0)
        assert all(torch.equal(x, y) for x, y in zip(ours, again, strict=True))
        there = [t.double().cpu() for t in (theta, v)]
        theirs = run("cpu", *there, [targets, frames, count], 0, 1.0)
        limit = TOLERANCE[dtype] * (10 if dtype == f32 else 1)
        for mine, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.double().cpu(), reference, rtol=limit, atol=limit)

    def test_no_synchronisation(self) -> None:
        theta = scores(4, 30, 9, dtype=f32).requires_grad_()
        targets = torch.randint(1, 9, (4, 8), device=DEVICE)
        frames = torch.tensor([30, 20, 25, 30], device=DEVICE)

        def query() -> None:
            s = sx.CTC(theta, targets, frames, validate_args=False)
            torch.autograd.grad(s.log_partition().sum(), theta)

        query()
        torch.cuda.set_sync_debug_mode("error")
        try:
            query()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_capture(self) -> None:
        of = [t[:2] for t in RAGGED]
        theta = scores(2, 5, 4, dtype=f32)
        with backend("gpu"):
            expected = ops.ctc.gradient_op([theta], of, "", SHANNON)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = ops.ctc.gradient_op([theta], of, "", SHANNON)
        for _ in range(2):
            graph.replay()
            assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))
