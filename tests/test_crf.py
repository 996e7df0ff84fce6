"""``sx.nn.CRF`` against brute force, case by case of what pytorch-crf documents, and beyond it."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re

import pytest
import torch
from torch import Tensor

import structmax as sx

REDUCTIONS = ["none", "sum", "mean", "token_mean"]

MASKS = {  # (B = 3, n = 4)
    "none": None,
    "full": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
    "prefix": [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
    "no item is full": [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]],
    "late": [[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]],
    "holes": [[1, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1]],
}


def make(num_tags: int = 3, batch_first: bool = False, seed: int = 0, scale: float = 1.0):
    torch.manual_seed(seed)
    crf = sx.nn.CRF(num_tags, batch_first)
    for parameter in crf.parameters():
        torch.nn.init.uniform_(parameter, -scale, scale)
    return crf.double()


def problem(mask: str = "none", num_tags: int = 3, seed: int = 0):
    """Emissions, tags and mask, batch first."""
    torch.manual_seed(seed)
    rows = MASKS[mask]
    emissions = torch.randn(3, 4, num_tags, dtype=torch.float64)
    return (
        emissions,
        torch.randint(num_tags, (3, 4)),
        None if rows is None else torch.tensor(rows).bool(),
    )


def layout(crf, *tensors: Tensor | None):
    """Batch-first tensors as the module takes them."""
    if crf.batch_first:
        return tensors
    return tuple(None if t is None else t.transpose(0, 1) for t in tensors)


def kept(mask: Tensor | None, item: int, n: int = 4) -> list[int]:
    """The positions that count."""
    return list(range(n)) if mask is None else mask[item].nonzero().flatten().tolist()


def path_score(crf, emissions: Tensor, tags) -> Tensor:
    """The score of one sequence, by the definition."""
    total = crf.start_transitions[tags[0]] + crf.end_transitions[tags[-1]]
    total = total + sum(emissions[t, tag] for t, tag in enumerate(tags))
    return total + sum(crf.transitions[i, j] for i, j in itertools.pairwise(tags))


def every_path(crf, emissions: Tensor) -> list[tuple[list[int], Tensor]]:
    paths = itertools.product(range(crf.num_tags), repeat=len(emissions))
    return [(list(p), path_score(crf, emissions, p)) for p in paths]


def brute_log_likelihood(crf, emissions: Tensor, tags: Tensor, mask: Tensor | None) -> Tensor:
    out = []
    for item in range(len(emissions)):
        at = kept(mask, item)
        own = path_score(crf, emissions[item, at], tags[item, at].tolist())
        scores = torch.stack([s for _, s in every_path(crf, emissions[item, at])])
        out.append(own - scores.logsumexp(0))
    return torch.stack(out)


# -- construction -------------------------------------------------------------------------------


def test_parameters_have_the_names_and_shapes_of_pytorch_crf():
    crf = sx.nn.CRF(10)
    assert crf.num_tags == 10
    assert not crf.batch_first
    assert isinstance(crf.start_transitions, torch.nn.Parameter)
    assert {name: tuple(p.shape) for name, p in crf.named_parameters()} == {
        "start_transitions": (10,),
        "end_transitions": (10,),
        "transitions": (10, 10),
    }


def test_parameters_start_uniform():
    crf = sx.nn.CRF(50)
    values = torch.cat([p.detach().flatten() for p in crf.parameters()])
    assert values.abs().max() <= 0.1
    assert values.std() == pytest.approx(0.2 / math.sqrt(12), rel=0.1)
    before = crf.transitions.clone()
    crf.reset_parameters()
    assert not torch.equal(before, crf.transitions)


@pytest.mark.parametrize("num_tags", [0, -1])
def test_needs_a_tag(num_tags):
    with pytest.raises(ValueError, match=f"invalid number of tags: {num_tags}"):
        sx.nn.CRF(num_tags)


def test_repr():
    assert repr(sx.nn.CRF(5)) == "CRF(num_tags=5)"
    assert repr(sx.nn.CRF(5, batch_first=True)) == "CRF(num_tags=5)"


def test_loads_a_checkpoint_of_pytorch_crf(tmp_path):
    state = {
        "start_transitions": torch.randn(4),
        "end_transitions": torch.randn(4),
        "transitions": torch.randn(4, 4),
    }
    torch.save(state, tmp_path / "crf.pt")
    crf = sx.nn.CRF(4, batch_first=True)
    crf.load_state_dict(torch.load(tmp_path / "crf.pt"), strict=True)
    assert list(crf.state_dict()) == list(state)
    assert all(torch.equal(crf.state_dict()[name], t) for name, t in state.items())
    again = pickle.loads(pickle.dumps(crf))
    emissions = torch.randn(2, 3, 4)
    assert again.decode(emissions) == crf.decode(emissions)


# -- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_log_likelihood(mask, batch_first, reduction):
    crf = make(batch_first=batch_first)
    emissions, tags, on = problem(mask)
    each = brute_log_likelihood(crf, emissions, tags, on)
    positions = tags.numel() if on is None else on.sum()
    expected = {
        "none": each,
        "sum": each.sum(),
        "mean": each.mean(),
        "token_mean": each.sum() / positions,
    }[reduction]
    got = crf(*layout(crf, emissions, tags, on), reduction=reduction)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected)
    assert (each < 0).all()


def test_the_default_is_the_sum_without_a_mask():
    crf = make()
    emissions, tags, _ = layout(crf, *problem())
    on = torch.ones_like(tags, dtype=torch.bool)
    torch.testing.assert_close(crf(emissions, tags), crf(emissions, tags, on, reduction="sum"))


def test_batch_first_is_the_transpose():
    crf = make()
    first = sx.nn.CRF(3, batch_first=True).double()
    first.load_state_dict(crf.state_dict())
    emissions, tags, on = problem("prefix")
    torch.testing.assert_close(
        first(emissions, tags, on), crf(*(t.transpose(0, 1) for t in (emissions, tags, on)))
    )
    assert first.decode(emissions) == crf.decode(emissions.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_masks_of_numbers(dtype):
    crf = make(batch_first=True)
    emissions, tags, on = problem("prefix")
    torch.testing.assert_close(crf(emissions, tags, on.to(dtype)), crf(emissions, tags, on))
    assert crf.decode(emissions, on.to(dtype)) == crf.decode(emissions, on)


@pytest.mark.parametrize("mask", MASKS)
def test_gradients(mask):
    crf = make(batch_first=True)
    emissions, tags, on = problem(mask)
    emissions.requires_grad_()
    wanted = [emissions, *crf.parameters()]
    expected = torch.autograd.grad(brute_log_likelihood(crf, emissions, tags, on).sum(), wanted)
    got = torch.autograd.grad(crf(emissions, tags, on), wanted)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("mask", ["prefix", "late", "holes"])
def test_what_is_masked_has_no_effect(mask):
    crf = make(batch_first=True)
    emissions, tags, on = problem(mask)
    dirty = torch.where(on[..., None], emissions, math.nan).requires_grad_()
    ignored = torch.where(on, tags, -100)
    value = crf(dirty, ignored, on)
    torch.testing.assert_close(value, crf(emissions, tags, on))
    value.backward()
    assert dirty.grad.isfinite().all()
    assert (dirty.grad[~on] == 0).all()
    assert all(p.grad.isfinite().all() for p in crf.parameters())
    assert crf.decode(dirty, on) == crf.decode(emissions, on)
    torch.testing.assert_close(crf.marginals(dirty, on), crf.marginals(emissions, on))


def test_second_derivatives():
    crf = make(batch_first=True)
    emissions, tags, on = problem("holes")
    assert torch.autograd.gradgradcheck(lambda e: crf(e, tags, on), emissions.requires_grad_())


# -- decode -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_decode(mask, batch_first):
    crf = make(batch_first=batch_first)
    emissions, _, on = problem(mask)
    got = crf.decode(*layout(crf, emissions, on))
    assert isinstance(got, list) and isinstance(got[0], list) and isinstance(got[0][0], int)
    for item, tags in enumerate(got):
        own = emissions[item, kept(on, item)]
        assert tags == max(every_path(crf, own), key=lambda pair: pair[1])[0]


def test_decode_without_a_mask_is_that_of_a_full_one():
    crf = make()
    emissions, tags, _ = layout(crf, *problem())
    assert crf.decode(emissions) == crf.decode(emissions, torch.ones_like(tags).bool())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("k", [1, 5, 100])
def test_k_best(mask, k):
    crf = make(batch_first=True)
    emissions, _, on = problem(mask)
    got = crf.decode(emissions, on, k=k)
    assert len(got) == 3
    for item, ranked in enumerate(got):
        own = emissions[item, kept(on, item)]
        paths = sorted(every_path(crf, own), key=lambda pair: -pair[1])[:k]
        assert len(ranked) == len(paths)  # an item may have fewer than k
        assert [tags for tags, _ in ranked] == [tags for tags, _ in paths]
        assert [score for _, score in ranked] == pytest.approx([s.item() for _, s in paths])
    assert [ranked[0][0] for ranked in got] == crf.decode(emissions, on)


def test_forbidden_transitions():
    """BIO: I may not follow O, nor come first."""
    O, B, I = range(3)
    crf = make(batch_first=True)
    with torch.no_grad():
        crf.transitions[O, I] = crf.start_transitions[I] = -math.inf
    emissions, tags, _ = problem()
    emissions[..., I] += 3
    for ranked in crf.decode(emissions, k=10):
        for found, score in ranked:
            assert score > -math.inf
            assert found[0] != I and (O, I) not in itertools.pairwise(found)
    crf(emissions, torch.full_like(tags, B)).backward()
    assert all(p.grad.isfinite().all() for p in crf.parameters())
    assert crf(emissions, torch.full_like(tags, I)) == -math.inf


FOLLOWS = torch.tensor([[True, True, False], [True, True, True], [True, False, True]])
STARTS, ENDS = torch.tensor([True, True, False]), torch.tensor([True, False, True])


def constrained(batch_first: bool = True, seed: int = 0):
    torch.manual_seed(seed)
    return sx.nn.CRF(3, batch_first, constraints=(FOLLOWS, STARTS, ENDS)).double()


@pytest.mark.parametrize("mask", ["none", "prefix", "holes"])
def test_constraints_are_those_of_minus_infinity(mask):
    crf, plain = constrained(), make(batch_first=True)
    with torch.no_grad():
        for mine, other, allowed in zip(
            (crf.transitions, crf.start_transitions, crf.end_transitions),
            (plain.transitions, plain.start_transitions, plain.end_transitions),
            (FOLLOWS, STARTS, ENDS), strict=True,
        ):  # fmt: skip
            other.copy_(torch.where(allowed, mine, -math.inf))
            mine[~allowed] = math.nan  # whatever the parameters are there
    emissions, tags, on = problem(mask)
    torch.testing.assert_close(crf.marginals(emissions, on), plain.marginals(emissions, on))
    assert crf.decode(emissions, on) == plain.decode(emissions, on)
    for ranked in crf.decode(emissions, on, k=30):
        for found, score in ranked:
            assert score > -math.inf and STARTS[found[0]] and ENDS[found[-1]]
            assert all(FOLLOWS[i, j] for i, j in itertools.pairwise(found))
    tags = torch.zeros_like(tags)
    loss = crf(emissions, tags, on)
    torch.testing.assert_close(loss, plain(emissions, tags, on))
    loss.backward()
    for parameter, allowed in zip(
        (crf.transitions, crf.start_transitions, crf.end_transitions), (FOLLOWS, STARTS, ENDS),
        strict=True,
    ):  # fmt: skip
        assert parameter.grad.isfinite().all() and not parameter.grad[~allowed].any()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ([0, 0, 2, 0], "(2) is 2, which may not follow 0"),
        ([2, 0, 0, 0], "(0) is 2, which may not come first"),
        ([0, 0, 0, 1], "(3) is 1, which may not come last"),
    ],
)
def test_gold_tags_that_constraints_forbid(batch_first, tags, said):
    crf = constrained(batch_first)
    emissions, gold, _ = problem()
    gold[:] = 0
    gold[1] = torch.tensor(tags)
    i = int(said[1])
    place = [1, i] if batch_first else [i, 1]
    said = f"CRF: tags{place}" + said[3:] + " by the constraints. Correct the tags of item 1"
    with pytest.raises(ValueError, match=re.escape(said)):
        crf(*layout(crf, emissions, gold))
    on = torch.ones(3, 4).bool()
    on[1, i] = False  # without it the sentence is allowed
    assert crf(*layout(crf, emissions, gold, on)).isfinite()
    each = torch.func.vmap(lambda e, t: crf(e[None], t[None], reduction="none")[0])
    if batch_first:
        assert each(emissions, gold).isneginf().tolist() == [False, True, False]


def test_constraints_are_in_no_checkpoint():
    crf, plain = constrained(), make()
    assert list(crf.state_dict()) == list(plain.state_dict())
    crf.load_state_dict(plain.state_dict())
    emissions, tags, _ = problem()
    for other in (copy.deepcopy(crf), pickle.loads(pickle.dumps(crf))):
        assert other.decode(emissions) == crf.decode(emissions)
    with torch.device("meta"):
        empty = sx.nn.CRF(3, True, constraints=(FOLLOWS.tolist(), STARTS.tolist(), ENDS.tolist()))
    filled = empty.double().to_empty(device="cpu")
    filled.load_state_dict(crf.state_dict())
    assert filled.decode(emissions) == crf.decode(emissions)
    assert "constraints on transitions, starts, ends" in repr(crf)


@pytest.mark.parametrize("average", ["weight decay", "swa", "swa of buffers", "ema", "adafactor"])
def test_constraints_survive_averages_of_weights(average):
    """−inf in a parameter became NaN: −inf − (−inf), or 0 times it."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    crf = constrained()
    if average == "adafactor":
        optimizer = torch.optim.Adafactor(crf.parameters(), lr=0.1, weight_decay=0.1)
    else:
        optimizer = torch.optim.AdamW(crf.parameters(), lr=0.1, weight_decay=0.5)
    averaged = {
        "swa": lambda: AveragedModel(crf),
        "swa of buffers": lambda: AveragedModel(crf, use_buffers=True),
        "ema": lambda: AveragedModel(crf, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    }.get(average, lambda: None)()
    emissions, tags, _ = problem()
    tags[:] = 0
    for _ in range(5):
        optimizer.zero_grad()
        (-crf(emissions, tags)).backward()
        optimizer.step()
        if averaged is not None:
            averaged.update_parameters(crf)
    found = crf if averaged is None else averaged.module
    assert all(p.isfinite().all() for p in found.parameters())
    assert found(emissions, tags).isfinite()
    for ranked in found.decode(emissions, k=30):
        for best, _ in ranked:
            assert STARTS[best[0]] and ENDS[best[-1]]
            assert all(FOLLOWS[i, j] for i, j in itertools.pairwise(best))


@pytest.mark.parametrize(
    ("constraints", "said"),
    [
        (FOLLOWS, "three masks of what is allowed, (transitions, starts, ends)"),
        ((FOLLOWS, STARTS), "got tuple of 2"),
        ((FOLLOWS[:2], None, None), "transitions must be booleans (3, 3)"),
        ((None, STARTS.float(), None), "starts must be booleans (3,)"),
        ((None, None, ENDS.to("meta")), "on meta"),
    ],
)
def test_errors_of_constraints(constraints, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        sx.nn.CRF(3, constraints=constraints)


def test_constraints_of_no_sentence():
    crf = sx.nn.CRF(2, True, constraints=(None, [True, False], [False, True]))
    with pytest.raises(ValueError, match=r"^CRF\.decode: item 0 allows no structure"):
        crf.decode(torch.zeros(1, 1, 2))


# -- beyond pytorch-crf -------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["late", "holes"])
def test_holes_are_skipped(mask):
    crf = make(batch_first=True)
    emissions, tags, on = problem(mask)
    each = crf(emissions, tags, on, reduction="none")
    marginals = crf.marginals(emissions, on)
    for item in range(3):
        at = kept(on, item)
        own, own_tags = emissions[None, item, at], tags[None, item, at]
        torch.testing.assert_close(each[item], crf(own, own_tags))
        torch.testing.assert_close(marginals[item, at], crf.marginals(own)[0])
        assert crf.decode(emissions, on)[item] == crf.decode(own)[0]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_marginals(mask, batch_first):
    crf = make(batch_first=batch_first)
    emissions, _, on = problem(mask)
    got = crf.marginals(*layout(crf, emissions, on))
    got, *_ = layout(crf, got)
    expected = torch.zeros_like(emissions)
    for item in range(3):
        at = kept(on, item)
        paths = every_path(crf, emissions[item, at])
        probs = torch.stack([s for _, s in paths]).softmax(0)
        for (tags, _), p in zip(paths, probs, strict=True):
            for t, tag in zip(at, tags, strict=True):
                expected[item, t, tag] += p.item()
    torch.testing.assert_close(got, expected)
    if on is not None:
        assert (got[~on] == 0).all()


@pytest.mark.parametrize("mask", ["none", "prefix", "holes"])
def test_marginals_are_differentiable(mask):
    crf = make(num_tags=2, batch_first=True)
    emissions, _, on = problem(mask, num_tags=2)
    assert torch.autograd.gradcheck(lambda e: crf.marginals(e, on), emissions.requires_grad_())


@pytest.mark.parametrize("mask", MASKS)
def test_structure(mask):
    crf = make()
    emissions, _, on = problem(mask)
    chain = crf.structure(*layout(crf, emissions, on))
    assert isinstance(chain, sx.LinearChain)
    assert chain.batch_shape == (3,)
    for item in range(3):
        paths = every_path(crf, emissions[item, kept(on, item)])
        logits = torch.stack([s for _, s in paths])
        torch.testing.assert_close(
            chain.entropy()[item], torch.distributions.Categorical(logits=logits).entropy()
        )
    assert chain.sample((7,)).shape == (7, 3, 4, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parameters", ["float32", "half"])
@pytest.mark.parametrize("mask", ["none", "prefix", "holes"])
def test_half_precision(dtype, parameters, mask):
    emissions, tags, on = problem(mask)
    emissions = (8 * emissions).to(dtype)
    crf = make(batch_first=True).to(dtype)
    reference = make(batch_first=True)
    reference.load_state_dict(crf.state_dict())  # the rounded parameters, in float64
    if parameters == "float32":
        crf.float()
    half = emissions.clone().requires_grad_()
    value = crf(half, tags, on)
    assert value.dtype == torch.float32
    wide = emissions.double().requires_grad_()
    expected = reference(wide, tags, on)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-4)
    value.backward()
    expected.backward()
    assert half.grad.dtype == dtype
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(half.grad.double(), wide.grad, rtol=tolerance, atol=tolerance)
    assert crf.decode(half, on) == reference.decode(wide, on)
    marginals = crf.marginals(half, on)
    assert marginals.dtype == dtype
    torch.testing.assert_close(
        marginals.double(), reference.marginals(wide, on), rtol=tolerance, atol=tolerance
    )


def test_autocast_changes_nothing():
    emissions, tags, on = problem("holes")
    emissions = emissions.float()
    crf = make(batch_first=True).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, marginals = crf(emissions, tags, on), crf.marginals(emissions, on)
    assert value.dtype == marginals.dtype == torch.float32
    assert torch.equal(value, crf(emissions, tags, on))
    assert torch.equal(marginals, crf.marginals(emissions, on))
    layer = torch.nn.Linear(6, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = -crf(layer(torch.randn(3, 4, 6)), tags, on)
    assert loss.dtype == torch.float32
    loss.backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("batch_first", [False, True])
def test_one_position(batch_first):
    crf = make(batch_first=batch_first)
    emissions, tags, _ = problem()
    emissions, tags = emissions[:, :1], tags[:, :1]
    logits = emissions[:, 0] + crf.start_transitions + crf.end_transitions
    expected = logits.log_softmax(-1).gather(1, tags)[:, 0]
    got = crf(*layout(crf, emissions, tags), reduction="none")
    torch.testing.assert_close(got, expected)
    assert crf.decode(*layout(crf, emissions)) == logits.argmax(-1, keepdim=True).tolist()
    marginals, *_ = layout(crf, crf.marginals(*layout(crf, emissions)))
    torch.testing.assert_close(marginals[:, 0], logits.softmax(-1))


def test_one_tag():
    crf = make(num_tags=1, batch_first=True)
    emissions = torch.randn(2, 3, 1, dtype=torch.float64)
    assert crf(emissions, torch.zeros(2, 3).long()).item() == pytest.approx(0)
    assert crf.decode(emissions, k=4) == [
        [([0, 0, 0], pytest.approx(path_score(crf, e, [0, 0, 0]).item()))] for e in emissions
    ]


@pytest.mark.parametrize("masked", [False, True])
def test_an_empty_batch(masked):
    crf = make(batch_first=True)
    emissions, tags, on = (t[:0] for t in problem("prefix"))
    on = on if masked else None
    assert crf(emissions, tags, on) == 0
    assert crf(emissions, tags, on, reduction="none").shape == (0,)
    assert crf.decode(emissions, on) == []
    assert crf.decode(emissions, on, k=2) == []
    assert crf.marginals(emissions, on).shape == (0, 4, 3)


@pytest.mark.parametrize("mask", ["none", "prefix", "holes"])
def test_compiles(mask):
    crf = make(batch_first=True)
    emissions, tags, on = problem(mask)
    torch._dynamo.reset()
    compiled = torch.compile(crf, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(emissions, tags, on), crf(emissions, tags, on))


@pytest.mark.parametrize("mask", ["none", "prefix", "holes"])
def test_gradients_of_each_item(mask):
    """By vmap of grad, as in training with differential privacy."""
    crf = make(batch_first=True)
    emissions, tags, on = problem(mask)
    on = torch.ones_like(tags, dtype=torch.bool) if on is None else on
    parameters = dict(crf.named_parameters())

    def loss(parameters, *item):
        return torch.func.functional_call(crf, parameters, tuple(part[None] for part in item))

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0))(parameters, emissions, tags, on)
    for item, value in enumerate(crf(emissions, tags, on, reduction="none")):
        want = torch.autograd.grad(value, list(parameters.values()), retain_graph=True)
        for name, grad in zip(parameters, want, strict=True):
            torch.testing.assert_close(each[name][item], grad)


def test_inputs_are_left_alone():
    crf = make(batch_first=True)
    emissions, tags, on = problem("holes")
    before = emissions.clone(), tags.clone(), on.clone()
    crf(emissions, tags, on)
    crf.decode(emissions, on, k=2)
    crf.marginals(emissions, on)
    assert not emissions.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, (emissions, tags, on), strict=True))


# -- errors -------------------------------------------------------------------------------------

CALLS = {
    "forward": lambda crf, e, mask=None: crf(e, torch.zeros(e.shape[:2]).long(), mask),
    "decode": lambda crf, e, mask=None: crf.decode(e, mask),
    "marginals": lambda crf, e, mask=None: crf.marginals(e, mask),
    "structure": lambda crf, e, mask=None: crf.structure(e, mask),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_errors_of_shape(call):
    crf = sx.nn.CRF(10)
    with pytest.raises(ValueError, match="emissions must have dimension of 3, got 2"):
        call(crf, torch.randn(1, 10))
    with pytest.raises(ValueError, match="expected last dimension of emissions is 10, got 7"):
        call(crf, torch.randn(1, 2, 7))
    message = r"dimensions of emissions and mask must match, got \(1, 2\) and \(2, 2\)"
    with pytest.raises(ValueError, match=message):
        call(crf, torch.randn(1, 2, 10), torch.ones(2, 2).bool())


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (1, 2, 1)])
def test_errors_of_tags(shape):
    crf = sx.nn.CRF(10)
    with pytest.raises(
        ValueError, match=r"dimensions of emissions and tags must match, got \(1, 2"
    ):
        crf(torch.randn(1, 2, 10), torch.zeros(shape).long())


@pytest.mark.parametrize("tag", [-1, 3])
def test_a_tag_that_does_not_exist(tag):
    crf = make(batch_first=True)
    emissions, tags, _ = problem()
    tags[1, 2] = tag
    with pytest.raises(ValueError, match=rf"CRF: .*between 0 and 2, got {tag} at tags\[1, 2\]"):
        crf(emissions, tags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_tags_must_be_integers(dtype):
    with pytest.raises(ValueError, match=f"^tags must be integers, got {dtype}"):
        sx.nn.CRF(3)(torch.randn(6, 2, 3), torch.zeros(6, 2, dtype=dtype))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_emissions_must_be_floating(call):
    with pytest.raises(ValueError, match=r"^emissions must be floating point, got torch.int64"):
        call(sx.nn.CRF(3), torch.ones(6, 2, 3).long())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_errors_name_the_callers_place(call, batch_first, bad):
    """Whatever the layout, and the order in which a mask with holes leaves the positions."""
    crf = make(batch_first=batch_first)
    emissions, tags, on = problem("holes")
    emissions[0, 1] = bad  # a hole
    call(crf, *layout(crf, emissions, on))
    emissions[0, 3, 1] = bad
    place = [0, 3, 1] if batch_first else [3, 0, 1]
    with pytest.raises(ValueError, match=re.escape(f"CRF: emissions{place} is {bad}.")) as caught:
        call(crf, *layout(crf, emissions, on))
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    emissions, tags[0, 1], tags[0, 3] = problem()[0], 9, 7
    with pytest.raises(ValueError, match=re.escape(f"got 7 at tags{place[:2]}.")):
        crf(*layout(crf, emissions, tags, on))
    with torch.no_grad():
        crf.transitions[0, 2] = bad
    with pytest.raises(ValueError, match=rf"^CRF: transitions\[0, 2\] is {bad}"):
        call(crf, *layout(crf, emissions, on))


def test_errors_of_the_chain_are_kept():
    crf = make()
    emissions = problem()[0]
    emissions[:, 1] = -math.inf
    with pytest.raises(ValueError, match="is on cpu but emissions is on meta"):
        crf.marginals(emissions.to("meta"))


@pytest.mark.parametrize("k", [None, 2])
def test_errors_name_the_callers_query(k):
    crf = make()
    emissions = problem()[0]
    emissions[:, 1] = -math.inf
    if k is None:  # else there are none of k
        with pytest.raises(ValueError, match=r"^CRF\.decode: item 1 allows no structure"):
            crf.decode(emissions)
    with pytest.raises(ValueError, match=r"^CRF\.marginals: item 1 allows no structure"):
        crf.marginals(emissions)
    with pytest.raises(ValueError, match=r"^CRF\.decode: k must be at least 1"):
        crf.decode(emissions, k=0)


@pytest.mark.parametrize("masked", [False, True])
def test_labels_to_be_ignored_need_a_mask(masked):
    crf = make(batch_first=True)
    emissions, labels, _ = problem()
    labels[1, 2] = labels[2, 0] = -100
    on = torch.ones(3, 4).bool() if masked else None
    hint = "mask=mask & (labels != -100)." if masked else "mask=labels != -100."
    with pytest.raises(
        ValueError,
        match=re.escape(f"got -100 at tags[1, 2]. What is to be ignored is masked out: {hint}"),
    ):
        crf(emissions, labels, on)
    assert crf(emissions, labels, labels != -100).isfinite()


def test_error_of_reduction():
    crf = make(batch_first=True)
    emissions, tags, _ = problem()
    with pytest.raises(ValueError, match="invalid reduction: foo"):
        crf(emissions, tags, reduction="foo")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_mask_that_leaves_nothing(call, batch_first):
    crf = make(batch_first=batch_first)
    emissions, _, on = problem("full")
    on[1] = False
    with pytest.raises(ValueError, match="mask is off at every position of item 1"):
        call(crf, *layout(crf, emissions, on))


@pytest.mark.parametrize("k", [0, -1])
def test_error_of_k(k):
    with pytest.raises(ValueError, match="k must be at least 1"):
        make().decode(problem()[0], k=k)


# -- training -----------------------------------------------------------------------------------


def test_learns_a_rule_that_emissions_do_not_show():
    """Tags alternate; the emissions say only which one is first."""
    torch.manual_seed(0)
    first = torch.randint(2, (64, 1))
    tags = (first + torch.arange(6)) % 2  # (B, n)
    emissions = torch.zeros(64, 6, 2)
    emissions[:, 0] = torch.nn.functional.one_hot(first[:, 0], 2).float()
    on = torch.arange(6) < torch.randint(2, 7, (64, 1))
    crf = sx.nn.CRF(2, batch_first=True)
    optimizer = torch.optim.Adam(crf.parameters(), lr=0.2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = -crf(emissions, tags, on, reduction="mean")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    for found, row, n in zip(crf.decode(emissions, on), tags.tolist(), on.sum(1), strict=True):
        assert found == row[:n]


# -- the original -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "full", "prefix"])
def test_against_pytorch_crf(mask, batch_first):
    torchcrf = pytest.importorskip("torchcrf")
    peer = torchcrf.CRF(5, batch_first=batch_first).double()
    crf = sx.nn.CRF(5, batch_first=batch_first).double()
    crf.load_state_dict(peer.state_dict())
    emissions, tags, on = layout(crf, *problem(mask, num_tags=5))
    for reduction in REDUCTIONS:
        torch.testing.assert_close(
            crf(emissions, tags, on, reduction=reduction),
            peer(emissions, tags, on, reduction=reduction),
        )
    crf(emissions, tags, on).backward()
    peer(emissions, tags, on).backward()
    for name, parameter in peer.named_parameters():
        torch.testing.assert_close(crf.get_parameter(name).grad, parameter.grad)
    assert crf.decode(emissions, on) == peer.decode(emissions, on)
    assert repr(crf) == repr(peer)
