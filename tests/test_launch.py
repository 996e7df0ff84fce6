"""Kernels are launched as if nothing were kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import structmax as sx

launch = pytest.importorskip("structmax.launch")


class Kernel:
    """A stand-in: says what it was compiled for, and with what it was launched."""

    arg_names = ("X", "n", "scale", "SIZE")

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.ran: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            self.compiled.append((grid, args, named))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.kernel.ran.append((grid, args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launch.triton, "JITFunction", Kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def test_launches_again_without_looking(kernel: Kernel) -> None:
    quick, x = launch.quick(kernel), torch.zeros(64)
    for count in (3, 4):
        quick[(count,)](x, 5, num_warps=4, SIZE=16, scale=0.5)
    assert len(kernel.compiled) == 1
    # in the order of the parameters, addresses for tensors, without what is no parameter
    assert kernel.ran == [((4, 1, 1), (x.data_ptr(), 5, 0.5, 16))]


def test_what_decides_is_looked_at(kernel: Kernel) -> None:
    quick, x = launch.quick(kernel), torch.zeros(64)
    others = [
        ((x[1:], 5), {}),  # an address that is no multiple of 16
        ((x.double(), 5), {}),
        ((x, 6), {}),
        ((x, 1), {}),
        ((x, 1.0), {}),
        ((x, True), {}),
        ((x, (5, 6)), {}),
        ((x, 5), {"scale": 0.25}),
        ((x, 5), {"SIZE": 32}),
        ((x, 5), {"num_warps": 8}),
    ]
    for args, named in [((x, 5), {}), *others]:
        quick[(1,)](*args, **{"scale": 0.5, "SIZE": 16, "num_warps": 4, **named})
    assert len(kernel.compiled) == 1 + len(others) and not kernel.ran


def test_what_is_kept_is_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST", 10)
    quick, x = launch.quick(kernel), torch.zeros(64)
    for n in range(100):
        quick[(1,)](x, n, scale=0.5, SIZE=16)
        assert len(quick.kept) <= 10


def test_interpreted_kernels_stay_as_they_are() -> None:
    kernel = Kernel()
    assert launch.quick(kernel) is kernel


def test_old_versions_launch_as_they_do(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.quick(kernel) is not kernel
    monkeypatch.setattr(launch.triton, "__version__", "3.2.0")
    assert launch.quick(kernel) is kernel


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_answers_on_a_gpu() -> None:
    """Again and again, with other dtypes and addresses between."""
    torch.manual_seed(0)
    room = torch.randn(2 * 5 * 3 + 1)
    unary, transition = room[1:].view(2, 5, 3), torch.randn(3, 3)
    there = room.cuda()[1:].view(2, 5, 3), transition.cuda()
    exact = sx.LinearChain(unary.double(), transition.double()).marginals()
    for _ in range(3):
        for u in (there[0], there[0].clone()):
            for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
                found = sx.LinearChain(u.to(dtype), there[1].to(dtype)).marginals()
                torch.testing.assert_close(found.cpu().double(), exact, rtol=limit, atol=limit)
