"""Structures and the tensors they are given: validated again after a write, and never cached."""

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import structmax as sx
from structmax.checks import Derived, Record
from structmax.structures.parts import PartStructure
from tests.table import ROWS

QUERIES: dict[str, Callable[[PartStructure], Tensor]] = {
    "log_partition": lambda s: s.log_partition(),
    "marginals": lambda s: s.marginals(),
    "argmax": lambda s: s.argmax(),
    "topk": lambda s: s.topk(2).scores,
    "max_marginals": lambda s: s.max_marginals(),
    "entropy": lambda s: s.entropy(),
    "primary": lambda s: s.primary,
}
USUAL = {name.split("/")[0]: name for name in reversed(ROWS)}.values()  # a row of each structure
names = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in ROWS],
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def made(name: str) -> PartStructure:
    s = ROWS[name]()
    assert isinstance(s, PartStructure)
    return s


def queries(s: PartStructure) -> Iterator[tuple[str, Callable[[PartStructure], Tensor]]]:
    for query, ask in QUERIES.items():
        if query == "primary" or s.supports(query):
            yield query, ask


def again(s: PartStructure) -> PartStructure:
    """A structure of the same tensors that has answered no query yet."""
    given = {name: t.clone() for name, (t, _) in s._tensors().items()}
    new = s._rebuild(**given)
    new._record.__init__()  # type: ignore[misc]
    return new


def equal(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# -- writes in place -----------------------------------------------------------------------------


@names
def test_impossible_integers_that_are_written_later_are_named(name: str) -> None:
    """By each query, whether or not another one came before."""
    for at in range(len(made(name)._integer_tensors)):
        for asked in (False, True):
            s = made(name)
            if asked:
                for _, ask in queries(s):
                    ask(s)
            s._integer_tensors[at].add_(10**6)
            for query, ask in queries(s):
                with pytest.raises(ValueError, match=r"must be between|no path leads") as caught:
                    ask(s)
                assert "1000" in str(caught.value), query


@names
def test_impossible_integers_that_are_written_later_are_nan_where_nobody_reads_them(
    name: str, monkeypatch
) -> None:
    for at in range(len(made(name)._integer_tensors)):
        s = made(name)
        s._integer_tensors[at].add_(10**6)
        monkeypatch.setattr("structmax.checks.can_look", lambda *tensors: False)
        assert bool((s.log_partition().isnan() | (s.log_partition() == -torch.inf)).all())
        assert bool(s.marginals().isnan().all()) and bool(s.argmax().isnan().all())
        monkeypatch.undo()


@names
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_scores_that_are_written_later_are_named(name: str, bad: float) -> None:
    """By the next query of every kind; scores that no structure has may hold anything."""
    for at, scores in enumerate(made(name)._score_tensors):
        s = made(name)
        if not scores.numel() or not bool(s._usable_parts().any()):
            continue
        for _, ask in queries(s):
            ask(s)
        s._score_tensors[at].fill_(bad)
        for query, ask in queries(s):
            with pytest.raises(ValueError, match=r"\] is (nan|inf)"):
                ask(s)
            assert query


@names
def test_values_that_are_written_later_are_answered_as_new(name: str) -> None:
    s = made(name)
    for _, ask in queries(s):
        ask(s)
    for t in s._score_tensors:
        t.copy_(-torch.rand_like(t))
    for t in s._integer_tensors:
        t.add_(0)
    fresh = again(s)
    for query, ask in queries(s):
        equal(ask(s), ask(fresh))
        assert query


def test_lengths_that_are_written_later_are_answered_as_new() -> None:
    """What was derived from them as well: masks, goals, and how long a search lasts."""
    lengths = torch.tensor([4, 4])
    chain = sx.LinearChain(torch.randn(2, 4, 3), torch.randn(3, 3), lengths=lengths)
    before = chain.log_partition()
    lengths.copy_(torch.tensor([4, 2]))
    short = sx.LinearChain(chain.unary[1, :2], chain.transition)
    torch.testing.assert_close(
        chain.log_partition(), torch.stack([before[0], short.log_partition()])
    )

    edges, target = torch.tensor([[0, 1], [1, 2], [0, 2]]), torch.tensor([2])
    path = sx.Path(edges, torch.randn(1, 3), 0, target)
    path.marginals()
    target.fill_(1)
    assert path.marginals().tolist() == [[1.0, 0.0, 0.0]]
    assert path.primary[0, 1:].tolist() == [0.0, 0.0]


def test_writes_into_inference_tensors_are_found() -> None:
    """torch does not count them, so every query validates."""
    with torch.inference_mode():
        scores, lengths = torch.zeros(2, 3, 3), torch.tensor([2, 3])
        tree = sx.BinaryTree(scores, lengths)
        tree.marginals()
        lengths[0] = 7
        with pytest.raises(ValueError, match="lengths must be between 1 and 3, got 7 for item 0"):
            tree.marginals()
        lengths[0] = 2
        scores[1, 0, 0] = torch.nan
        with pytest.raises(ValueError, match=r"scores\[1, 0, 0\] is nan"):
            tree.argmax()


def test_a_bad_score_that_is_written_into_an_item_is_found() -> None:
    """Items of a batch are views, and share its versions."""
    scores = torch.zeros(2, 3)
    item = sx.Choice(scores)[1]
    scores[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"scores\[2\] is nan"):
        item.marginals()


def test_concatenated_targets_of_ctc_that_are_written_later_are_refused() -> None:
    """They were split by the constructor, for a width that may be another now."""
    targets, lengths = torch.tensor([1, 2, 3]), torch.tensor([2, 1])
    s = sx.CTC(torch.randn(2, 5, 4), targets, target_lengths=lengths)
    s.marginals()
    copy.deepcopy(s).marginals()
    for tensor in (targets, lengths):
        s = sx.CTC(torch.randn(2, 5, 4), targets, target_lengths=lengths)
        tensor.copy_(tensor.flip(0))
        with pytest.raises(ValueError, match="CTC: concatenated targets"):
            s.log_partition()


# -- no answer depends on the query before -------------------------------------------------------


@names
def test_answers_do_not_share_storage(name: str) -> None:
    s = made(name)
    for query, ask in queries(s):
        first = ask(s)
        kept = first.clone()
        if first.numel() and first.stride() == first.contiguous().stride():
            first.zero_()
        equal(ask(s), kept)
        assert query


@names
def test_log_prob_is_the_same_after_other_queries(name: str) -> None:
    s, fresh = made(name), made(name)
    if not s.supports("log_prob"):
        pytest.skip("no probabilities")
    fresh = again(s)
    z = s.argmax()
    before = s.log_prob(z)
    for _, ask in queries(s):
        ask(s)
    equal(s.log_prob(z), before)
    equal(fresh.log_prob(z), before)


def test_log_prob_of_tags_is_the_same_after_marginals() -> None:
    chain = sx.LinearChain(1e4 + torch.randn(1, 30, 5), torch.randn(5, 5))
    tags = torch.zeros(1, 30, dtype=torch.long)
    before = chain.log_prob(tags)
    chain.marginals()
    equal(chain.log_prob(tags), before)


def test_kl_takes_one_pass_of_the_first(monkeypatch) -> None:
    p, q = (sx.LinearChain(torch.randn(4, 3), torch.randn(3, 3)) for _ in range(2))
    expected = p.cross_entropy(q) - p.entropy()
    passes = []
    run = sx.LinearChain._value_and_gradient
    monkeypatch.setattr(sx.LinearChain, "_value_and_gradient", lambda s: passes.append(s) or run(s))
    torch.testing.assert_close(torch.distributions.kl_divergence(p, q), expected)
    assert passes == [p]


# -- structures stay as they are made ------------------------------------------------------------


@names
def test_attributes_cannot_be_set(name: str) -> None:
    s = made(name)
    for field in (*s._tensors(), "smoothing", "_validate_args", "unheard_of"):
        with pytest.raises(AttributeError, match=f"{field} cannot be set.*perturb"):
            setattr(s, field, torch.zeros(()))


@names
def test_copies_answer_as_the_original(name: str) -> None:
    s = made(name)
    for other in (copy.copy(s), copy.deepcopy(s), pickle.loads(pickle.dumps(s))):
        equal(other.argmax(), s.argmax())
        with pytest.raises(AttributeError, match="cannot be set"):
            other.smoothing = sx.Shannon()


def test_a_subclass_sets_what_it_likes_in_its_constructor() -> None:
    class Named(sx.Choice):
        def __init__(self, scores: Tensor, label: str) -> None:
            super().__init__(scores)
            self.label = label

    s = Named(torch.zeros(2), "coin")
    assert s.label == "coin"
    with pytest.raises(AttributeError, match="label cannot be set"):
        s.label = "die"


# -- records -------------------------------------------------------------------------------------


def test_a_record_tells_tensors_and_versions_apart() -> None:
    record, t = Record(), torch.zeros(2)
    record.add([t])
    assert record.covers([t]) and not record.covers([t, t.clone()])
    t[0] = 1.0
    assert not record.covers([t])
    record.add([t])
    assert record.covers([t]) and not copy.deepcopy(record).covers([t])


@pytest.mark.parametrize("write", [lambda t: t.data.add_(9), lambda t: t.numpy().fill(9)])
def test_a_record_sees_integers_that_torch_counts_no_writes_into(write) -> None:
    record, lengths = Record(), torch.tensor([3, 4])
    record.add([lengths, torch.zeros(2)])
    assert record.covers([lengths])
    write(lengths)
    assert not record.covers([lengths])
    lengths = torch.tensor([3, 4])
    s = sx.SemiMarkov(torch.zeros(2, 17, 2, 2), lengths=lengths, smoothing=sx.Gini())
    s.log_partition()
    write(lengths)
    lengths.data[0] = 18  # for which the forest, whose size is rounded up, has a node
    for query in (s.log_partition, s.marginals, s.argmax):
        with pytest.raises(ValueError, match=r"must be between 1 and 17, got 18 for item 0"):
            query()


def test_infinite_scores_that_torch_counts_no_writes_into_are_refused_or_nan() -> None:
    scores = torch.randn(2, 4, 5)
    s = sx.Alignment(scores, band=1)
    scores.data[1, 3, 4] = torch.inf  # which every path meets
    with pytest.raises(ValueError, match=r"scores\[1, 3, 4\] is inf"):
        s.marginals()
    bad = sx.KSubset(torch.full((1, 3), torch.nan), (0, 2), validate_args=False)
    assert bool(bad.argmax().isnan().all())


def test_what_is_derived_follows_its_tensors() -> None:
    t, calls, derived = torch.tensor([1]), [], Derived()

    def derive() -> int:
        calls.append(1)
        return int(t.sum())

    assert [derived.get([t], derive), derived.get([t], derive)] == [1, 1] and len(calls) == 1
    t.add_(1)
    assert derived.get([t], derive) == 2 and len(calls) == 2
