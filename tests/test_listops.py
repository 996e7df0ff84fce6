"""ListOps, trees in their forms, and batches."""

from __future__ import annotations

import lzma

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import structmax as sx
from structmax.data import Batches, Trees, collate, data_folder, listops

NESTED = {"max_depth": 6, "max_args": 4, "min_length": 12, "max_length": 40}


def official():
    path = data_folder() / "listops" / "test_d20s.tsv.xz"
    if not path.exists():
        pytest.skip(f"{path} is not there; set STRUCTMAX_DATA to the folder of data sets")
    return path


# -- expressions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MIN 4 2 9 ]", 2),
        ("[MAX 4 2 9 ]", 9),
        ("[MED 4 2 9 ]", 4),
        ("[MED 1 2 8 9 ]", 5),
        ("[MED 1 2 ]", 1),
        ("[SM 7 8 9 ]", 4),
        ("[SM [MAX 1 [MIN 9 8 ] ] [MED 3 3 4 ] ]", 1),
    ],
)
def test_values(text, value):
    assert listops.evaluate(text.split()) == value


def test_gold_trees_are_left_binarised():
    expression = listops.parse("[MAX 2 [SM 9 4 ] 1 ]")
    tree = Trees.from_transitions([expression.transitions])
    assert tree.brackets(0, expression.words) == "(((([MAX 2) ((([SM 9) 4) ])) 1) ])"


def test_generator_is_deterministic_and_distinct():
    a, b = listops.generate(300, seed=3), listops.generate(300, seed=3)
    assert [str(e) for e in a] == [str(e) for e in b]
    assert len({str(e) for e in a}) == 300
    assert [str(e) for e in a] != [str(e) for e in listops.generate(300, seed=4)]
    rest = listops.generate(300, seed=3, exclude={str(e) for e in a})
    assert not {str(e) for e in a} & {str(e) for e in rest}


def test_generator_keeps_to_its_limits():
    for e in listops.generate(300, seed=0, max_depth=4, max_args=3, min_length=5, max_length=20):
        depth = np.cumsum([w in listops.OPERATORS for w in e.words])
        depth = depth - np.cumsum([w == "]" for w in e.words])
        assert 5 <= len(e.tokens) <= 20 and depth.max() <= 3
        assert e.label == listops.evaluate(e.words)
        assert max(len(args) for args in arguments(e.words)) <= 3


def arguments(words):
    """The numbers of arguments of each list, as lists of their first tokens."""
    open_lists, closed = [[]], []
    for word in words:
        if word == "]":
            closed.append(open_lists.pop())
            continue
        open_lists[-1].append(word)
        if word in listops.OPERATORS:
            open_lists.append([])
    return closed


def test_generator_that_cannot_go_on_says_so():
    with pytest.raises(ValueError, match="found 10 of 11 expressions"):
        listops.generate(11, max_depth=1)
    with pytest.raises(ValueError, match="max_args ≥ 2"):
        listops.generate(1, max_args=1)


def test_nested_sets_need_trees():
    gold = Trees.from_transitions([e.transitions for e in listops.generate(500, **NESTED)])
    trivial = {
        "left": Trees.left(gold.lengths),
        "right": Trees.right(gold.lengths),
        "balanced": Trees.balanced(gold.lengths),
        "random": Trees.random(gold.lengths, seed=1),
    }
    f1 = {name: trees.f1(gold).mean().item() for name, trees in trivial.items()}
    assert max(f1, key=f1.get) == "left" and f1["left"] < 0.6


@pytest.mark.slow
def test_statistics_are_the_published_ones():
    lengths = np.array([len(e.tokens) for e in listops.generate(100_000, seed=0)[:90_000]])
    assert abs(lengths.mean() - 43) < 1
    assert np.median(lengths) == 16
    assert abs(np.percentile(lengths, 90) - 107) < 3
    assert abs((lengths > 100).mean() - 0.107) < 0.003


@pytest.mark.data
def test_evaluator_reproduces_the_official_labels():
    expressions = listops.read(official())  # the reader compares each label with the value
    assert len(expressions) == 10_000
    for e in expressions[::7]:  # brackets and operators give the same tree
        assert np.array_equal(listops.parse(str(e)).transitions, e.transitions)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["set.tsv", "set.tsv.xz"])
def test_files_round_trip(tmp_path, name):
    expressions = listops.generate(50, seed=2)
    listops.write(tmp_path / name, expressions)
    for a, b in zip(expressions, listops.read(tmp_path / name), strict=True):
        assert str(a) == str(b) and a.label == b.label
        assert np.array_equal(a.transitions, b.transitions)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("4 ( 1 2 )", "a label, a tab"),
        ("x\t4", "the label must be a digit"),
        ("4\t( ( [MAX 4 ) ]", "1 '(' never closed"),
        ("4\t( ( [MAX 4 ) ] ) )", "closes nothing"),
        ("4\t( ( [MAX 4 5 ) ] )", "a node with 3 children"),
        ("4\t( ( [MAX 12 ) ] )", "token 1 is '12'"),
        ("4\t( [MAX ] )", "without arguments"),
        ("4\t( ( ] 4 ) ] )", "closes nothing"),
        ("4\t( [MAX 4 )", "[MAX is never closed"),
        ("4\t( 4 4 )", "there must be one expression, got 2"),
        ("4\t", "there must be one expression, got 0"),
        ("3\t( ( [MAX 4 ) ] )", "the label is 3 but the expression's value is 4"),
        ("4\t[MAX 4 ]", "3 tokens need 2 pairs of parentheses, got 0"),
    ],
)
def test_broken_lines_are_named(tmp_path, line, wrong):
    path = tmp_path / "broken.tsv"
    path.write_text(f"1\t1\n{line}\n")
    with pytest.raises(ValueError) as error:
        listops.read(path)
    assert str(error.value).startswith(f"{path}:2: ") and wrong in str(error.value)


def test_truncated_archives_are_named(tmp_path):
    path = tmp_path / "cut.tsv.xz"
    path.write_bytes(lzma.compress(b"1\t1\n" * 9)[:-20])
    with pytest.raises(ValueError, match=r"cut.tsv.xz:\d+: Compressed file ended"):
        listops.read(path)


# -- trees ----------------------------------------------------------------------------------------


@st.composite
def random_trees(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return Trees.random(lengths, draw(st.integers(0, 10_000)))


@settings(max_examples=50, deadline=None)
@given(random_trees())
def test_forms_of_trees_agree(trees):
    lengths, n = trees.lengths, trees.longest
    others = [
        Trees.from_transitions(trees.transitions(), lengths),
        Trees.from_merges(trees.merges(), lengths),
        Trees.from_spans(trees.spans(), lengths),
        Trees.from_spans(trees.spans() & ~torch.eye(n, dtype=torch.bool), lengths),
        Trees.from_transitions(one_hot(trees.transitions(), 2), lengths),
        Trees.from_merges(one_hot(trees.merges(), max(n - 1, 1))[:, : n - 1, : n - 1], lengths),
    ]
    for other in others:
        assert torch.equal(other.spans(), trees.spans())
        assert [other.brackets(i) for i in range(len(trees))] == [
            trees.brackets(i) for i in range(len(trees))
        ]
        assert other.f1(trees).eq(1).all()


def test_spans_are_those_of_binary_trees():
    trees = Trees.random([5, 3], seed=1)
    structure = sx.BinaryTree(torch.zeros(2, 5, 5), torch.tensor([5, 3]))
    assert structure.log_prob(trees.spans().float()).isfinite().all()  # checked to be trees
    assert trees[1].f1(trees[[1]]).eq(1).all()


def one_hot(steps, choices):
    return (steps[..., None] == torch.arange(choices)).float()


def test_simple_trees():
    for name, text in {
        "left": "(((0 1) 2) 3)",
        "right": "(0 (1 (2 3)))",
        "balanced": "((0 1) (2 3))",
    }.items():
        assert getattr(Trees, name)([4, 1]).brackets(0) == text
        assert getattr(Trees, name)([4, 1]).brackets(1) == "0"
    assert Trees.balanced([5]).brackets(0) == "(((0 1) 2) (3 4))"


def test_f1_counts_shared_spans():
    a = Trees.from_transitions([[0, 0, 1, 0, 1, 0, 1]])  # (((0 1) 2) 3)
    b = Trees.from_transitions([[0, 0, 0, 1, 1, 0, 1]])  # ((0 (1 2)) 3)
    assert torch.allclose(a.f1(b), torch.tensor([2 / 3]))
    with pytest.raises(ValueError, match="same lengths"):
        a.f1(Trees.left([3]))


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: Trees.from_transitions([[0, 0, 1], [0, 1, 0]]), "step 1 .* item 1 cannot be 1"),
        (lambda: Trees.from_transitions([[0, 0, 0]]), "step 2 .* item 0 cannot be 0"),
        (lambda: Trees.from_merges([[0, 0], [0, 1]]), "step 1 of the merges of item 1"),
        (lambda: Trees.from_spans(torch.eye(3)[None], [3]), "item 0 are no binary tree"),
        (lambda: Trees.from_merges(torch.zeros(1, 2)), "integers or one-hot"),
        (lambda: Trees.from_merges([[0]], [3]), "between 1 and 2, got 3 for item 0"),
    ],
)
def test_bad_trees_are_named(make, wrong):
    with pytest.raises(ValueError, match=wrong):
        make()


def test_crossing_spans_are_named():
    z = torch.zeros(1, 3, 3)
    z[0, 0, 1] = z[0, 1, 2] = 1
    with pytest.raises(ValueError, match=r"\[\(0, 1\), \(1, 2\)\]"):
        Trees.from_spans(z, [3])


# -- batches --------------------------------------------------------------------------------------


def test_batches_visit_each_item_once_with_like_lengths():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    batches = Batches(lengths, batch_size=16, max_tokens=400, seed=5)
    for epoch in range(2):
        found = batches.epoch(epoch)
        assert sorted(np.concatenate(found)) == list(range(500))
        for batch in found:
            size = lengths[batch].max() * len(batch)
            assert len(batch) <= 16 and (size <= 400 or len(batch) == 1)
        assert np.mean([np.ptp(lengths[b]) for b in found]) < 6
    first, second = ([b.tolist() for b in batches.epoch(e)] for e in range(2))
    assert first != second
    assert first == [b.tolist() for b in Batches(lengths, 16, 400, seed=5).epoch(0)]
    assert first != [b.tolist() for b in Batches(lengths, 16, 400, seed=6).epoch(0)]


def test_batches_resume_at_any_position():
    lengths = np.random.default_rng(0).integers(1, 30, 70)
    whole = Batches(lengths, batch_size=8)
    seen = [b.tolist() for _ in range(3) for b in whole]
    for stop in (0, 1, 8, 9, 15, 20):
        batches = Batches(lengths, batch_size=8)
        head = []
        while len(head) < stop:
            for batch in batches:
                head.append(batch.tolist())
                if len(head) == stop:
                    break
        later = Batches(lengths, batch_size=8)
        later.load_state_dict(batches.state_dict())
        tail = []
        while len(head) + len(tail) < len(seen):
            tail += [b.tolist() for b in later]
        assert head + tail == seen


def test_shards_are_the_parts_of_each_batch():
    lengths = np.random.default_rng(0).integers(1, 30, 70)
    whole = list(Batches(lengths, batch_size=8))
    parts = [list(Batches(lengths, batch_size=8, shard=(rank, 2))) for rank in range(2)]
    for batch, *shares in zip(whole, *parts, strict=True):
        assert sorted(batch) == sorted(np.concatenate(shares))


def test_bad_batches_are_named():
    with pytest.raises(ValueError, match="batch_size and max_tokens must be positive"):
        Batches([1], batch_size=0)
    with pytest.raises(ValueError, match="rank < world"):
        Batches([1], shard=(2, 2))


def test_collate_pads():
    batch = collate(listops.generate(5, seed=1, max_length=9))
    assert batch.tokens.shape == (5, int(batch.lengths.max()))
    for row, length in zip(batch.tokens, batch.lengths):
        assert (row[:length] > 0).all() and (row[length:] == 0).all()
    assert batch.to("cpu").trees is batch.trees


def test_trees_of_tensors_and_words() -> None:
    """Of different lengths; and as many words as leaves."""
    rows = [torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1, 0, 1])]
    trees = Trees.from_transitions(rows)
    assert trees.lengths.tolist() == [2, 3]
    assert (
        trees.brackets(1, list("abc")) == "((a b) c)" and trees.brackets(0, list("ab")) == "(a b)"
    )
    with pytest.raises(ValueError, match="item 0 has 2 leaves, and there are 3 words"):
        trees.brackets(0, list("abc"))
