"""The Triton kernel of assignments against scipy.

With a CUDA device it runs on it; without one, under Triton's interpreter on the CPU.
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
from structmax.oracles import assignment, assignment_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
nan, inf = math.nan, math.inf
SCALES = {"random": 1.0, "ties": 1.0, "spread": 1e6, "tiny": 1e-6, "forbidden": 1.0, "shifted": 1.0}


def make(kind: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    scores = torch.randn(*shape, dtype=dtype) * SCALES[kind]
    if kind == "ties":
        return scores.round()
    if kind == "forbidden":
        return torch.where(torch.rand_like(scores) < 0.6, -inf, scores)
    return scores + 1e4 if kind == "shifted" else scores


def check(scores: Tensor, rows: Tensor, columns: Tensor) -> None:
    given = scores.to(DEVICE), rows.to(DEVICE), columns.to(DEVICE)
    value, z = (t.cpu() for t in assignment_gpu.argmax(*given))
    expected, _ = assignment.naive(scores, rows, columns)
    torch.testing.assert_close(value, expected, equal_nan=True)
    for b, (n, m) in enumerate(zip(rows.tolist(), columns.tolist())):
        assert not (z[b, n:] >= 0).any()
        pairs = [(i, int(c)) for i, c in enumerate(z[b, :n]) if c >= 0]
        if not math.isfinite(expected[b]):
            assert not pairs
            continue
        assert len(pairs) == min(n, m) == len({c for _, c in pairs})
        total = sum(float(scores[b, i, c]) for i, c in pairs)
        assert total == pytest.approx(float(expected[b]), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (4, 4), (3, 7), (7, 3), (17, 20)])
def test_it_is_the_best(kind: str, n: int, m: int) -> None:
    torch.manual_seed(n * m)
    size = 4 if n * m < 100 else 2
    check(make(kind, size, n, m), torch.full((size,), n), torch.full((size,), m))


def test_sizes_of_items_and_what_lies_outside() -> None:
    torch.manual_seed(0)
    scores, rows = make("random", 5, 6, 5), torch.tensor([6, 1, 3, 4, 2])
    columns = torch.tensor([5, 5, 3, 2, 5])
    for b in range(5):
        scores[b, rows[b] :], scores[b, :, columns[b] :] = nan, nan
    check(scores, rows, columns)
    check(scores.mT, columns, rows)
    check(scores.float(), rows, columns)


def test_bad_scores_and_no_assignment() -> None:
    scores = torch.zeros(4, 3, 3, dtype=torch.float64)
    scores[0, 1, 2], scores[1, 2, 2] = nan, inf
    scores[2, :, 1] = -inf  # a column that nobody may have
    three = torch.full((4,), 3)
    value, z = assignment_gpu.argmax(*(t.to(DEVICE) for t in (scores, three, three)))
    assert value.isnan().tolist() == [True, True, False, False]
    assert value[2:].tolist() == [-inf, 0.0] and (z[:3] == -1).all()
    empty = assignment_gpu.argmax(scores[:0].to(DEVICE), three[:0].to(DEVICE), three[:0].to(DEVICE))
    assert empty[0].shape == (0,) and empty[1].shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_structure_uses_it() -> None:
    torch.manual_seed(0)
    scores = torch.randn(8, 40, 33, device="cuda")
    lengths = torch.randint(1, 41, (8,)), torch.randint(1, 34, (8,))
    mine = sx.Assignment(scores, lengths=tuple(t.cuda() for t in lengths))
    host = sx.Assignment(scores.cpu(), lengths=lengths)
    assert torch.equal(mine.argmax().cpu(), host.argmax())  # no ties
