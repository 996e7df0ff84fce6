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
        return lambda *args, stream: self.kernel.ran.append((grid, args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launch.triton, "JITFunction", Kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
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


def test_functions_repeat_their_launches(kernel: Kernel) -> None:
    quick, calls = launch.quick(kernel), []

    @launch.Repeated
    def twice(x: torch.Tensor, y: torch.Tensor) -> None:
        calls.append((x, y))
        quick[(len(x),)](x, len(x), scale=0.5, SIZE=16)
        quick[(2, 3)](y, 7, SIZE=16, scale=0.5)

    for n in (4, 5):
        twice(n, torch.zeros(n), torch.zeros(64))
    for n in (5, 4):
        x, y = torch.zeros(n), torch.zeros(64)
        twice(n, x, y)
        first, second = (x.data_ptr(), n, 0.5, 16), (y.data_ptr(), 7, 0.5, 16)
        assert kernel.ran[-2:] == [((n, 1, 1), first), ((2, 3, 1), second)]
    assert len(calls) == 2  # once for each key
    twice(4, x, y[1:])  # not aligned: compiled otherwise
    assert len(calls) == 3
    twice(4, x, x)  # one tensor in both places
    assert kernel.ran[-1][1][0] == kernel.ran[-2][1][0] == x.data_ptr()
    kept = [arg for launches in twice.kept.values() for _, args, _ in launches for arg in args]
    assert not any(isinstance(arg, torch.Tensor) for arg in kept)  # it would stay alive


def test_what_is_written_down_is_forgotten(kernel: Kernel) -> None:
    quick = launch.quick(kernel)

    @launch.Repeated
    def fails(x: torch.Tensor) -> None:
        quick[(1,)](x, 1, scale=0.5, SIZE=16)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fails(0, torch.zeros(4))
    assert not fails.kept and launch._notes.launches is None


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
