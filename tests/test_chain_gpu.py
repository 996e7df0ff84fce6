"""The Triton kernels of the dense chain against the definition.

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
from structmax.forest.chain import gpu, gpu_long, ops
from structmax.primitive import backend

# The interpreter computes with numpy, which warns of log 0 and of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHANNON = [1.0, 1.0, 1.0]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
INF = math.inf


@pytest.fixture(params=["float64", "float32", "float32 in pieces"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """In pieces: by the kernels of long chains, pieces having three steps."""
    name, *pieces = request.param.split(" ", 1)
    if pieces:
        monkeypatch.setattr(gpu_long, "LONG", 2)
        monkeypatch.setattr(gpu_long, "SIZE", 3)
    return getattr(torch, name)


def scores(
    batch: int,
    n: int,
    c: int,
    dtype: torch.dtype,
    *,
    shared: bool = False,
    one_for_all: bool = False,
    spread: float = 1.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """unary ``(B, n, c)`` and transition ``(B, s, c, c)``; ``one_for_all`` has batch stride 0."""
    g = torch.Generator().manual_seed(seed)
    steps = 1 if shared else n - 1
    unary = spread * torch.randn(batch, n, c, generator=g, dtype=dtype)
    items = 1 if one_for_all else batch
    transition = spread * torch.randn(items, steps, c, c, generator=g, dtype=dtype)
    return unary.to(DEVICE), transition.to(DEVICE).expand(batch, steps, c, c)


def directions(unary: Tensor, transition: Tensor) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    pair = (unary, transition)
    return [torch.randn(x.shape, generator=g, dtype=x.dtype).to(DEVICE) for x in pair]


def full(unary: Tensor) -> Tensor:
    return torch.full(unary.shape[:1], unary.shape[1], device=DEVICE)


def ragged(batch: int, n: int) -> Tensor:
    return (torch.arange(batch, device=DEVICE) * 3) % n + 1


def close(ours: Tensor, theirs: Tensor, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(
        ours.double(),
        theirs.double(),
        rtol=tolerance,
        atol=scale * tolerance,
        equal_nan=True,
        check_stride=False,
    )


def with_ends(unary: Tensor, transition: Tensor) -> list[Tensor]:
    """The scores of the primitive, start and end being 0."""
    none = torch.zeros_like(unary[:, 0])
    return [unary, transition, none, none]


def everything(name: str, unary: Tensor, transition: Tensor, lengths: Tensor) -> list[Tensor]:
    """[A by value, A, μ_u, μ_T, w_u, w_T] by one backend."""
    theta, v = with_ends(unary, transition), with_ends(*directions(unary, transition))
    with backend(name):
        a = ops.chain.value_op(theta, [lengths], "", SHANNON)
        first = ops.chain.gradient_op(theta, [lengths], "", SHANNON)
        second = ops.chain.hvp_op(theta, v, [lengths], "", SHANNON)
    return [a, *first[:3], *second[:2]]


def agree(unary: Tensor, transition: Tensor, lengths: Tensor, scale: float = 1.0) -> list[Tensor]:
    """Compares all that is differentiable; the definition runs in float64. Returns ours."""
    ours = everything("gpu", unary, transition, lengths)
    theirs = everything("naive", unary.double(), transition.double(), lengths)
    v = directions(unary, transition)
    with backend("naive"):
        theta = with_ends(unary.double(), transition.double())
        v = with_ends(*[x.double() for x in v])
        theirs[4:] = ops.chain.hvp_op(theta, v, [lengths], "", SHANNON)[:2]
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == unary.dtype
        close(mine, reference, scale)
    return ours


def score(unary: Tensor, transition: Tensor, lengths: Tensor, tags: Tensor) -> Tensor:
    """The score of given tags, ``(B)``, in float64."""
    out = []
    for b, length in enumerate(lengths.tolist()):
        total = unary[b, 0, tags[b, 0]].double()
        for t in range(1, length):
            edges = transition[b, t - 1 if transition.shape[1] != 1 else 0]
            total = total + unary[b, t, tags[b, t]].double() + edges[tags[b, t - 1], tags[b, t]]
        out.append(total)
    return torch.stack(out)


def decodes(unary: Tensor, transition: Tensor, lengths: Tensor) -> Tensor:
    """Checks Viterbi by the score of its tags. Returns the tags."""
    with backend("gpu"):
        best, tags = ops.argmax(*with_ends(unary, transition), lengths)
    with backend("naive"):
        reference, _ = ops.argmax(*with_ends(unary.double(), transition.double()), lengths)
    assert best.dtype == unary.dtype and tags.dtype == torch.int64
    close(best, reference)
    close(score(unary, transition, lengths, tags).to(best.dtype), reference)
    padding = torch.arange(unary.shape[1], device=DEVICE) >= lengths[:, None]
    assert torch.equal(tags == -1, padding)
    return tags


@pytest.mark.parametrize("shared", [False, True], ids=["per-step", "shared"])
@pytest.mark.parametrize(
    ("n", "c"), [(1, 1), (2, 2), (3, 5), (9, 5), (3, 17), (2, 33), (1, 17), (4, 8)]
)
def test_agrees_with_the_definition(n: int, c: int, shared: bool, dtype: torch.dtype) -> None:
    unary, transition = scores(2, n, c, dtype, shared=shared)
    agree(unary, transition, full(unary))
    decodes(unary, transition, full(unary))


@pytest.mark.parametrize("shared", [False, True], ids=["per-step", "shared"])
def test_one_transition_for_the_whole_batch(shared: bool, dtype: torch.dtype) -> None:
    unary, transition = scores(3, 4, 5, dtype, shared=shared, one_for_all=True)
    assert transition.stride(0) == 0
    agree(unary, transition, ragged(3, 4))
    decodes(unary, transition, ragged(3, 4))


def test_any_strides(dtype: torch.dtype) -> None:
    unary, transition = scores(3, 4, 5, dtype)
    agree(unary.mT.contiguous().mT, transition.mT, full(unary))
    decodes(unary[:, :, ::2], transition[..., ::2, ::2], full(unary))


@pytest.mark.parametrize("shared", [False, True], ids=["per-step", "shared"])
def test_padding_holds_anything(shared: bool, dtype: torch.dtype) -> None:
    unary, transition = scores(4, 5, 3, dtype, shared=shared)
    lengths = ragged(4, 5)
    clean = agree(unary, transition, lengths)
    tags = decodes(unary, transition, lengths)
    position = torch.arange(5, device=DEVICE)
    padding = position >= lengths[:, None]
    dirty = unary.masked_fill(padding[..., None], math.nan)
    if not shared:
        transition = transition.masked_fill(padding[:, 1:, None, None], math.nan)
    ours = everything("gpu", dirty, transition, lengths)
    for mine, reference in zip(ours, clean, strict=True):
        assert torch.equal(mine, reference)
    assert (ours[2][padding] == 0).all() and (ours[4][padding] == 0).all()
    if not shared:
        assert (ours[3][padding[:, 1:]] == 0).all() and (ours[5][padding[:, 1:]] == 0).all()
    with backend("gpu"):
        assert torch.equal(ops.argmax(*with_ends(dirty, transition), lengths)[1], tags)


def test_forbidden_parts(dtype: torch.dtype) -> None:
    """B, I, O: I follows B or I only; some positions forbid some tags."""
    unary, transition = scores(4, 6, 3, dtype)
    unary[:, 0, 1] = -INF
    unary[1, 3, 2] = -INF
    transition = transition.clone()
    transition[:, :, 2, 1] = -INF
    ours = agree(unary, transition, ragged(4, 6))
    decodes(unary, transition, ragged(4, 6))
    assert all(x.isfinite().all() for x in ours)
    for scored, slopes in ((unary, (ours[2], ours[4])), (transition, (ours[3], ours[5]))):
        assert all((x[scored == -INF] == 0).all() for x in slopes)


def test_a_detour_that_underflows_is_kept(dtype: torch.dtype) -> None:
    """The only path leaves the best tags by hundreds: exp of the difference is 0 in float32."""
    unary, transition = scores(2, 5, 4, dtype)
    unary[:, :2, 0] += 900.0
    transition = transition.clone()
    transition[:, 1:, 0] = -INF
    transition[:, 1, 1] -= 900.0
    agree(unary, transition, full(unary))
    decodes(unary, transition, full(unary))


@pytest.mark.parametrize("shared", [False, True], ids=["per-step", "shared"])
def test_extreme_spreads(shared: bool, dtype: torch.dtype) -> None:
    unary, transition = scores(2, 6, 5, dtype, shared=shared, spread=1e3)
    ours = agree(unary, transition, full(unary))
    assert all(x.isfinite().all() for x in ours)
    decodes(unary, transition, full(unary))


@pytest.mark.parametrize(("shared", "shift"), [(False, 1e4), (True, -1e4)])
def test_common_shifts(shared: bool, shift: float, dtype: torch.dtype) -> None:
    unary, transition = scores(2, 6, 5, dtype, shared=shared)
    unary, transition = [(x * 256).round() / 256 for x in (unary, transition)]  # exact after it
    lengths = ragged(2, 6) + 2
    plain = everything("gpu", unary, transition, lengths)
    moved = everything("gpu", unary + shift, transition + shift, lengths)
    close(moved[0] - (2 * lengths - 1) * shift, plain[0], scale=100)
    for mine, reference in zip(moved[2:], plain[2:], strict=True):
        close(mine, reference)


def test_long_chains(dtype: torch.dtype) -> None:
    unary, transition = scores(1, 32, 3, dtype)
    agree(unary, transition, full(unary))


def test_an_infeasible_item_stays_alone(dtype: torch.dtype) -> None:
    unary, transition = scores(3, 4, 3, dtype)
    unary[1, 2] = -INF
    lengths = torch.tensor([4, 4, 2], device=DEVICE)
    ours = agree(unary, transition, lengths)
    assert ours[0][1] == -INF and ours[1][1] == -INF
    assert all((x[1] == 0).all() for x in ours[2:])
    with backend("gpu"):
        best, _ = ops.argmax(*with_ends(unary, transition), lengths)
    assert best.isinf().tolist() == [False, True, False]


def test_nan_is_loud_and_stays_alone(dtype: torch.dtype) -> None:
    """Items 1 to 4 have a NaN in either score and in either half."""
    unary, transition = scores(5, 5, 2, dtype)
    alone = everything("gpu", unary[:1], transition[:1], full(unary)[:1])
    unary[1, 0, 1] = unary[2, 3, 1] = math.nan
    transition[3, 0, 0, 1] = transition[4, 3, 0, 1] = math.nan
    ours = everything("gpu", unary, transition, full(unary))
    assert ours[0][1:].isnan().all() and ours[1][1:].isnan().all()
    for mine, reference in zip(ours[:4], alone[:4], strict=True):
        assert torch.equal(mine[:1], reference)
    assert all(w[0].isfinite().all() for w in ours[4:])
    with backend("gpu"):
        best, _ = ops.argmax(*with_ends(unary, transition), full(unary))
    assert best.isnan().tolist() == [False, True, True, True, True]


QUERIES = {
    "log_partition": lambda chain, tags: chain.log_partition(),
    "marginals": lambda chain, tags: chain.marginals(),
    "edge_marginals": lambda chain, tags: chain.edge_marginals(),
    "entropy": lambda chain, tags: chain.entropy(),
    "argmax": lambda chain, tags: chain.argmax(),
    "argmax_tags": lambda chain, tags: chain.argmax_tags(),
    "log_prob": lambda chain, tags: chain.log_prob(tags),
    "score": lambda chain, tags: chain.score(tags),
    "topk": lambda chain, tags: chain.topk(2),
    "sample": lambda chain, tags: chain.sample(),
    "one item": lambda chain, tags: chain[1],
    "condition": lambda chain, tags: chain.condition(exclude=chain.encode(tags).bool()),
}


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("query", QUERIES)
def test_the_first_query_looks_at_the_scores(query: str, bad: float) -> None:
    """Whichever it is, and the second too; bad lengths are found at once."""
    unary, transition = scores(2, 3, 2, torch.float32)
    tags = torch.zeros(2, 3, dtype=torch.long, device=DEVICE)
    where = {
        "unary[1, 2, 0]": (unary, (1, 2, 0)),
        "transition[1, 0, 1, 1]": (transition, (1, 0, 1, 1)),
    }
    with backend("gpu"):
        for name, (tensor, index) in where.items():
            kept = tensor[index].clone()
            tensor[index] = bad
            chain = sx.LinearChain(unary, transition)
            for _ in range(2):
                with pytest.raises(ValueError) as caught:
                    QUERIES[query](chain, tags)
                assert name in str(caught.value) and str(bad) in str(caught.value)
            tensor[index] = kept
        with pytest.raises(ValueError, match="lengths must be between 1 and 3"):
            sx.LinearChain(unary, transition, lengths=torch.tensor([1, 4], device=DEVICE))


def test_looking_at_values_only() -> None:
    """An item without a structure is told from one with a bad score."""
    unary, transition = scores(3, 4, 2, torch.float32)
    unary[1, 2] = -INF
    with backend("gpu"):
        chain = sx.LinearChain(unary, transition)
        assert chain.log_partition().isinf().tolist() == [False, True, False]
        for query in (chain.marginals, sx.LinearChain(unary, transition).marginals):
            with pytest.raises(ValueError, match="item 1 allows no structure"):
                query()
        unary[1, 2] = 0.0
        unary[2, 3] = transition[2, 2] = math.nan
        padded = sx.LinearChain(unary, transition, lengths=torch.tensor([4, 4, 3], device=DEVICE))
        assert padded.marginals().isfinite().all()


def test_ties_go_to_the_first_tag(dtype: torch.dtype) -> None:
    unary = torch.zeros(2, 4, 3, dtype=dtype, device=DEVICE)
    tags = decodes(unary, unary.new_zeros(2, 3, 3, 3), full(unary))
    assert (tags == 0).all()


def test_many_tags_run_the_definition() -> None:
    unary, transition = scores(1, 3, 130, torch.float64)
    agree(unary, transition, full(unary))
    decodes(unary, transition, full(unary))


def test_inputs_are_not_modified() -> None:
    unary, transition = scores(2, 3, 3, torch.float64)
    copies = unary.clone(), transition.clone()
    everything("gpu", unary, transition, ragged(2, 3))
    assert torch.equal(unary, copies[0]) and torch.equal(transition, copies[1])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("shared", [False, True], ids=["per-step", "shared"])
@pytest.mark.parametrize(
    ("batch", "n", "c"), [(64, 128, 9), (64, 128, 32), (16, 65, 64), (8, 33, 100), (8, 32, 128)]
)
def test_real_sizes(batch: int, n: int, c: int, shared: bool, dtype: torch.dtype) -> None:
    unary, transition = scores(batch, n, c, dtype, shared=shared)
    agree(unary, transition, ragged(batch, n))
    decodes(unary, transition, ragged(batch, n))


def test_loss_of_scores_far_from_zero() -> None:
    """A and the score are large, and their difference small: it is taken in float64."""
    torch.manual_seed(0)
    unary = 1e4 + torch.randn(3, 6, 5, device=DEVICE)
    theta = [unary, torch.randn(3, 1, 5, 5, device=DEVICE), *unary.new_empty(2, 3, 0)]
    lengths = torch.tensor([6, 4, 1], device=DEVICE)
    tags = torch.randint(5, (3, 6), device=DEVICE)
    exact = ops.chain_loss.value_op([t.double() for t in theta], [lengths, tags], "", SHANNON)
    with backend("gpu"):
        value, *_ = ops.chain_loss.gradient_op(theta, [lengths, tags], "", SHANNON)
        alone = ops.chain_loss.value_op(theta, [lengths, tags], "", SHANNON)
    for loss in (value, alone):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), exact, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("shared", [False, True], ids=["per-step", "shared"])
@pytest.mark.parametrize("n", [2, 5, 131])
def test_start_end_and_loss(n: int, shared: bool, dtype: torch.dtype) -> None:
    """The padding of tags holds anything."""
    unary, transition = scores(3, n, 4, dtype, shared=shared)
    g = torch.Generator().manual_seed(2)
    ends = torch.randn(2, 3, 4, generator=g, dtype=dtype).to(DEVICE)
    lengths = torch.tensor([n, (n + 1) // 2, 1], device=DEVICE)
    tags = torch.randint(4, (n, 3), generator=g).to(DEVICE).T
    tags = tags.where(torch.arange(n, device=DEVICE) < lengths[:, None], 99)
    answers = []
    for name in ("gpu", "naive"):
        wide = dtype if name == "gpu" else torch.float64
        theta = [t.to(wide) for t in (unary, transition, *ends)]
        with backend(name):
            first = ops.chain.gradient_op(theta, [lengths], "", SHANNON)
            second = ops.chain.hvp_op(theta, theta, [lengths], "", SHANNON)
            loss = ops.chain_loss.gradient_op(theta, [lengths, tags], "", SHANNON)
            alone = ops.chain_loss.value_op(theta, [lengths, tags], "", SHANNON)
            answers.append([*first, *second, *loss, alone])
    for mine, reference in zip(*answers, strict=True):
        close(mine, reference)


@pytest.mark.parametrize("shared", [False, True], ids=["per-step", "shared"])
def test_a_tag_that_is_none_makes_loss_and_gradient_nan(shared: bool) -> None:
    unary, transition = scores(3, 4, 3, torch.float32, shared=shared)
    ends = [unary[:, 0], unary[:, 1]]
    lengths = torch.tensor([3, 10**6, 2], device=DEVICE)
    tags = torch.tensor([[0, 1, 2, 99], [0, 0, 0, 0], [1, -7, 0, 0]], device=DEVICE)
    with backend("gpu"):
        found = ops.chain_loss.gradient_op([unary, transition, *ends], [lengths, tags], "", SHANNON)
    for good, *wrong in found:
        assert not bool(good.isnan().any())
        assert all(bool(item.isnan().all()) for item in wrong)


def test_wrong_items_are_marked_in_place() -> None:
    from structmax import fence_gpu

    wrong = torch.tensor([[True, False, True]], device=DEVICE)
    for shape in ((), (5,), (2, 5000)):
        for dtype in (torch.float32, torch.float64, torch.float16):
            found = torch.zeros(1, 3, *shape, dtype=dtype, device=DEVICE)
            assert fence_gpu.mark(found, wrong) is found
            expected = torch.zeros_like(found)
            expected[wrong] = math.nan
            torch.testing.assert_close(found, expected, equal_nan=True)
    assert fence_gpu.mark(found[:, :0], wrong[:, :0]).shape == (1, 0, 2, 5000)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["per-step", "shared"])
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
def test_half_precision_is_read_as_it_is(
    pieces: bool, shared: bool, half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transitions, with the bits of the same scores in float32; a copy is made where derivatives
    need it."""
    if pieces:
        monkeypatch.setattr(gpu_long, "LONG", 2)
        monkeypatch.setattr(gpu_long, "SIZE", 3)
    unary, transition = (t.to(half) for t in scores(2, 8, 5, torch.float32, shared=shared))
    if shared:
        transition = transition[:, 0]
    lengths = torch.tensor([8, 5], device=DEVICE)
    seen: list[torch.dtype] = []
    unary[0, 2, 1] = -INF
    answers = []
    with backend("gpu"):
        monkeypatch.setattr(gpu_long, "gradient", noted(gpu_long.gradient, seen))
        monkeypatch.setattr(gpu, "gradient", noted(gpu.gradient, seen))
        for dtype in (half, torch.float32):
            chain = sx.LinearChain(unary.to(dtype), transition.to(dtype), lengths=lengths)
            mu, value, edges = chain.marginals(), chain.log_partition(), chain.edge_marginals()
            assert mu.dtype == edges.dtype == dtype and value.dtype == torch.float32
            answers.append((mu, value, edges))
        seen.clear()
        watched = unary.clone().requires_grad_()
        for other in (unary, unary.float(), unary.double(), watched):
            sx.LinearChain(other, transition).marginals()
    assert seen == [half, half, torch.float64, torch.float32]
    for mine, reference in zip(*answers, strict=True):
        assert torch.equal(mine, reference.to(mine.dtype))


def noted(run: Any, seen: list[torch.dtype]) -> Any:
    """``run``, which writes down the dtype of the transitions it was given."""

    def note(unary: Tensor, transition: Tensor, *rest: Any) -> Any:
        seen.append(transition.dtype)
        return run(unary, transition, *rest)

    return note


@pytest.mark.parametrize("gamma", [0.3, 2.0])
def test_any_temperature(gamma: float, dtype: torch.dtype) -> None:
    """Scores are divided in float64, unless that is exact."""
    unary, transition = scores(2, 8, 3, dtype, shared=True)
    tags = torch.ones(2, 8, dtype=torch.long, device=DEVICE)
    answers = []
    for name in ("gpu", "naive"):
        wide = dtype if name == "gpu" else torch.float64
        theta = with_ends(unary.to(wide), transition.to(wide))
        args = [full(unary), tags], "", [1.0, gamma, 1.0]
        with backend(name):
            answers.append(ops.chain_loss.gradient_op(theta, *args))
    for mine, reference in zip(*answers, strict=True):
        assert mine.dtype == dtype
        close(mine, reference)


@pytest.mark.parametrize("shared", [False, True], ids=["per-step", "shared"])
@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_tag_that_there_is_not(wrong: int, shared: bool) -> None:
    """Where nobody looks at tags the loss of that item is NaN, and nothing else is touched."""
    unary, transition = scores(3, 5, 4, torch.float32, shared=shared)
    tags = torch.ones(3, 5, dtype=torch.long, device=DEVICE)
    args = with_ends(unary, transition), [full(unary), tags], "", SHANNON
    with backend("gpu"):
        clean = ops.chain_loss.gradient_op(*args)
        tags[1, 2] = wrong
        loss = ops.chain_loss.gradient_op(*args)
    assert loss[0].isnan().tolist() == [False, True, False]
    for mine, reference in zip(loss, clean, strict=True):
        assert torch.equal(mine[::2], reference[::2])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_more_than_2_to_the_31_entries() -> None:
    batch, n, c = 70, 2000, 128
    if torch.cuda.mem_get_info()[0] < 4 * 6 * batch * n * c * c:
        pytest.skip("needs a large device")
    unary, transition = scores(batch, n, c, torch.float32, one_for_all=True)
    with backend("gpu"):
        together = ops.chain.gradient_op(with_ends(unary, transition), [full(unary)], "", SHANNON)
        last = with_ends(unary[-1:], transition[-1:])
        alone = ops.chain.gradient_op(last, [full(unary)[-1:]], "", SHANNON)
    for mine, reference in zip(together, alone, strict=True):
        assert torch.equal(mine[-1:], reference)
