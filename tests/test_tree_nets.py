"""Networks over trees: batched results equal those of plain recursion, one item at a time."""

from __future__ import annotations

import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

import structmax as sx
from structmax.data import Trees, collate, listops
from structmax.data.words import Vocabulary, facts
from structmax.estimators import by_name
from structmax.nn.chart_lstm import ChartLSTM
from structmax.nn.child_sum import ChildSumTreeLSTM
from structmax.nn.classifier import ENCODERS, TreeClassifier
from structmax.nn.dependency_classifier import DependencyClassifier
from structmax.nn.easy_first import EasyFirstTreeLSTM
from structmax.nn.gated_recursive import GatedRecursiveCell
from structmax.nn.latent_tree import GraphConvolution, LatentDependency, LatentTree
from structmax.nn.leaf_lstm import LeafLSTM, SentenceLSTM
from structmax.nn.pair_classifier import PairByDependency, PairByTree
from structmax.nn.pool import Pool
from structmax.nn.spinn import SPINN
from structmax.nn.tree_lstm import TreeLSTM, TreeLSTMCell
from structmax.nn.word_encoder import WordEncoder

LENGTHS = torch.tensor([6, 1, 4, 2])
CELLS = ("tree-lstm", "gated")


def padded(size, lengths=LENGTHS, seed=0):
    """Leaves with NaN in the padding, and a leaf tensor to ask gradients of."""
    torch.manual_seed(seed)
    x = torch.randn(len(lengths), int(lengths.max()), size, dtype=torch.float64)
    x[torch.arange(x.shape[1]) >= lengths[:, None]] = torch.nan
    return x.requires_grad_()


def same(module, x, batched, each):
    """Values and all gradients of a batch and of its items, one at a time."""
    torch.testing.assert_close(batched, each)
    wanted = [x, *module.parameters()]
    weight = torch.randn_like(batched)
    grads = [
        torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)
        for out in (batched, each)
    ]
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.isfinite().all()
            torch.testing.assert_close(a, b)


def compose(cell, leaves, trees, item):
    """Plain recursion along one tree."""
    states = dict(enumerate(leaves[item]))
    for t, (left, right) in enumerate(trees.children[item, : trees.lengths[item] - 1].tolist()):
        states[trees.longest + t] = cell(states[left], states[right])
    return states


def naive_roots(cell, leaves, trees):
    out = []
    for item, length in enumerate(trees.lengths.tolist()):
        states = compose(cell, leaves, trees, item)
        out.append(states[trees.longest + length - 2] if length > 1 else states[0])
    return torch.stack(out)


# -- cells and given trees ------------------------------------------------------------------------


def test_binary_cell_is_the_published_one():
    cell = TreeLSTMCell(3).double()
    left, right = torch.randn(2, 6, dtype=torch.float64)
    (hl, cl), (hr, cr) = left.split(3), right.split(3)
    gates = cell.gates.weight @ torch.cat([hl, hr]) + cell.gates.bias
    i, fl, fr, o, u = gates.split(3)
    c = i.sigmoid() * u.tanh() + (fl + 1).sigmoid() * cl + (fr + 1).sigmoid() * cr
    torch.testing.assert_close(cell(left, right), torch.cat([o.sigmoid() * c.tanh(), c]))


def test_gated_cell_is_the_published_one():
    cell = GatedRecursiveCell(3).double()
    left, right = torch.randn(2, 3, dtype=torch.float64)
    a, b, c, u = cell.outer(cell.inner(torch.cat([left, right])).relu()).split(3)
    x = a.sigmoid() * left + b.sigmoid() * right + c.sigmoid() * u
    x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(cell(left, right), x)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kind", ["left", "right", "balanced", "random"])
def test_tree_lstm_is_recursion(cell, kind):
    net = TreeLSTM(3, cell).double()
    leaves, trees = padded(net.state_size), getattr(Trees, kind)(LENGTHS)
    same(net, leaves, net(leaves, trees), naive_roots(net.cell, leaves, trees))


def test_tree_lstm_gives_all_nodes():
    net = TreeLSTM(3, "gated").double()
    leaves, trees = padded(3), Trees.random(LENGTHS)
    nodes = net(leaves, trees, nodes=True)
    for item in range(len(LENGTHS)):
        states = compose(net.cell, leaves, trees, item)
        for v, state in states.items():
            if v >= trees.longest or v < LENGTHS[item]:
                torch.testing.assert_close(nodes[item, v], state)
    assert nodes[1, 1:].eq(0).all()


def test_tree_lstm_says_what_does_not_fit():
    with pytest.raises(ValueError, match=r"leaves are \(2, 3\) but there are 1 trees"):
        TreeLSTM(2, "gated")(torch.zeros(2, 3, 2), Trees.left([3]))
    with pytest.raises(ValueError, match="cell must be one of tree-lstm, gated"):
        TreeLSTM(2, "lstm")


def naive_child_sum(net, words, heads):
    d = net.hidden_size

    def visit(word):
        children = [visit(m) for m in range(1, len(words) + 1) if heads[m - 1] == word]
        gates = net.words(words[word - 1])
        h = sum((h for h, _ in children), torch.zeros(d, dtype=words.dtype))
        i, o, u = (gates[: 3 * d] + net.sums(h)).split(d)
        c = i.sigmoid() * u.tanh()
        for h, memory in children:
            c = c + (gates[3 * d :] + net.forget(h)).sigmoid() * memory
        return o.sigmoid() * c.tanh(), c

    return sum(visit(m)[0] for m in range(1, len(words) + 1) if heads[m - 1] == 0)


def test_child_sum_tree_lstm_is_recursion():
    net = ChildSumTreeLSTM(2, 3).double()
    words = padded(2)
    heads = torch.tensor(
        [[2, 0, 5, 5, 2, 5], [0, 9, 9, 9, 9, 9], [0, 1, 2, 3, 9, 9], [0, 0, 9, 9, 9, 9]]
    )
    each = torch.stack(
        [naive_child_sum(net, words[i, :n], heads[i]) for i, n in enumerate(LENGTHS.tolist())]
    )
    same(net, words, net(words, heads, LENGTHS), each)


def test_child_sum_refuses_cycles():
    with pytest.raises(ValueError, match="form a cycle"):
        ChildSumTreeLSTM(1, 1)(torch.zeros(1, 2, 1), torch.tensor([[2, 1]]), torch.tensor([2]))


@pytest.mark.parametrize("make", [lambda: LeafLSTM(2, 4), lambda: SentenceLSTM(2, 4)])
def test_lstms_do_not_see_the_padding(make):
    net = make().double()
    x = padded(2)
    batched = net(x, LENGTHS)
    each = [net(x[i : i + 1, :n], LENGTHS[i : i + 1])[0] for i, n in enumerate(LENGTHS.tolist())]
    if batched.dim() == 3:
        each = [nn.functional.pad(row, (0, 0, 0, 6 - len(row))) for row in each]
    same(net, x, batched, torch.stack(each))


# -- charts and latent trees ----------------------------------------------------------------------


def naive_chart(net, leaves):
    def state(i, j):
        if i == j:
            return leaves[i]
        made = torch.stack([net.cell(state(i, k), state(k + 1, j)) for k in range(i, j)])
        energy = torch.cosine_similarity(net.cell.hidden(made), net.query, -1)
        return (energy / net.temperature).softmax(0) @ made

    return state(0, len(leaves) - 1)


@pytest.mark.parametrize("cell", CELLS)
def test_chart_is_recursion(cell):
    net = ChartLSTM(3, cell, temperature=0.7).double()
    leaves = padded(net.state_size)
    each = [naive_chart(net, leaves[i, :n]) for i, n in enumerate(LENGTHS.tolist())]
    same(net, leaves, net(leaves, LENGTHS), torch.stack(each))


def test_chart_parses_by_its_best_splits():
    net = ChartLSTM(3, "gated").double()
    leaves = padded(3)
    _, energies = net.encode(leaves, LENGTHS)
    spans = net.parse(leaves, LENGTHS)
    trees = Trees.from_spans(spans, LENGTHS)  # checked to be trees
    for i, j, k in [(0, 5, int(energies[0, 0, 5, :5].argmax()))]:
        assert spans[0, i, k] and spans[0, k + 1, j]
    assert trees.lengths.tolist() == LENGTHS.tolist()


@pytest.mark.parametrize("cell", CELLS)
def test_latent_tree_composes_hard_and_relaxed_alike(cell):
    net = LatentTree(4, cell).double()
    leaves = padded(net.state_size)
    structure = net.structure(leaves, LENGTHS)
    z, trees = structure.argmax(), Trees.from_spans(structure.argmax(), LENGTHS)
    each = naive_roots(net.encoder.cell, leaves, trees)
    torch.testing.assert_close(net.compose(leaves, LENGTHS, z), each)
    torch.testing.assert_close(net.compose(leaves, LENGTHS, z, relaxed=True), each)
    z = z.requires_grad_()
    torch.testing.assert_close(net.compose(leaves, LENGTHS, z), each)
    for relaxed in (False, True):
        states = net.compose(leaves, LENGTHS, z, relaxed)
        (grad,) = torch.autograd.grad(states.square().sum(), z)
        assert grad.isfinite().all() and grad[0].abs().sum() > 0


@pytest.mark.parametrize("seed", [17, 25, 50])  # in which some products are just above 0
def test_relaxed_trees_of_improbable_spans_have_gradients(seed):
    torch.manual_seed(seed)
    net, lengths = LatentTree(4), torch.tensor([7, 5])
    leaves = torch.randn(2, 7, net.state_size)
    scores = (30 * torch.randn(2, 7, 7)).requires_grad_()
    z = sx.BinaryTree(scores, lengths).marginals()
    net.compose(leaves, lengths, z, relaxed=True).square().sum().backward()
    assert scores.grad.isfinite().all()


def test_graph_convolution_is_its_definition():
    net = GraphConvolution(2, 3, layers=1).double()
    words, lengths = padded(2), LENGTHS
    z = sx.DependencyTree(torch.randn(4, 7, 7, dtype=torch.float64), lengths).marginals()
    each = []
    for x, arcs, n in zip(words, z, lengths.tolist()):
        out = 0
        for m in range(1, n + 1):
            up = sum(arcs[h, m] * x[h - 1] for h in range(1, n + 1))
            down = sum(arcs[m, h] * x[h - 1] for h in range(1, n + 1))
            out = out + arcs[0, m] * net.layers[0](torch.cat([x[m - 1], up, down])).relu()
        each.append(out)
    same(net, words, net(words, z, lengths), torch.stack(each))


@pytest.mark.parametrize("composer", ["child-sum", "gcn"])
def test_latent_dependency_trains(composer):
    torch.manual_seed(0)
    net = LatentDependency(2, 4, composer).double()
    words = padded(2)
    tree = net.structure(words, LENGTHS)
    z = by_name("straight-through")(tree)
    net.compose(words, LENGTHS, z).square().sum().backward()
    assert net.scorer.weight.grad.abs().sum() > 0
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
    if composer == "child-sum":
        with pytest.raises(ValueError, match='Use composer="gcn"'):
            net.compose(words, LENGTHS, tree.marginals(), relaxed=True)


# -- policies -------------------------------------------------------------------------------------


def naive_easy_first(policy, leaves, merges):
    """Plain lists: the root, and the log-probability of the merges."""
    row, total = list(leaves), 0.0
    for j in merges:
        parents = [policy.cell(a, b) for a, b in pairwise(row)]
        total = total + torch.stack([policy.score(p) for p in parents]).log_softmax(0)[j]
        row[j : j + 2] = [parents[j]]
    return row[0], torch.as_tensor(total, dtype=leaves.dtype)


def naive_spinn(policy, leaves, actions):
    """A Python list as the stack, without a tracker."""
    zero = torch.zeros_like(leaves[0])
    stack, buffer, total = [], list(leaves), 0.0
    for action in actions:
        seen = [buffer[0] if buffer else zero, *[zero, zero, *stack][:-3:-1]]
        scores = policy.scorer(torch.cat([policy.cell.hidden(s) for s in seen]))
        legal = torch.tensor([0.0 if buffer else -torch.inf, 0.0 if len(stack) > 1 else -torch.inf])
        total = total + (scores + legal).log_softmax(0)[action]
        if action == 0:
            stack.append(buffer.pop(0))
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(policy.cell(left, right))
    return stack[0], torch.as_tensor(total, dtype=leaves.dtype)


POLICIES = {
    "easy-first": (EasyFirstTreeLSTM, sx.EasyFirst, naive_easy_first, Trees.merges),
    "spinn": (SPINN, sx.ShiftReduce, naive_spinn, Trees.transitions),
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_their_definition(name, cell):
    make, structure, naive, form = POLICIES[name]
    policy = make(3, cell).double()
    leaves = padded(policy.state_size)
    lists = structure(policy, leaves, LENGTHS)
    steps = form(Trees.random(LENGTHS, seed=3))
    out = lists.rollout(lists.encode(steps))
    roots, total = zip(
        *[
            naive(policy, leaves[i, :n], [a for a in steps[i].tolist() if a >= 0])
            for i, n in enumerate(LENGTHS.tolist())
        ]
    )
    batched = torch.cat([policy.root(out.state), out.log_prob[:, None]], 1)
    same(policy, leaves, batched, torch.cat([torch.stack(roots), torch.stack(total)[:, None]], 1))


@pytest.mark.parametrize("tracking", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_roots_do_not_depend_on_how_trees_were_found(name, tracking):
    make, structure, _, form = POLICIES[name]
    policy = make(4, "gated", **({"tracking": tracking} if name == "spinn" else {})).double()
    leaves = padded(4)
    lists = structure(policy, leaves, LENGTHS)
    best = lists.topk(3)
    z, items = best.structures.flatten(0, 1), torch.arange(4).repeat_interleave(3)
    read = {"easy-first": Trees.from_merges, "spinn": Trees.from_transitions}[name]
    each = TreeLSTM(4, policy.cell)(leaves[items], read(z, LENGTHS[items]))
    torch.testing.assert_close(policy.root(lists.rollout(z, items).state), each)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", ["easy-first", "spinn", "tracking"])
def test_replays_are_steps(name, cell, monkeypatch):
    """What a policy makes of known actions at once is what it makes of them step by step."""
    torch.manual_seed(0)
    make, kind = POLICIES["spinn" if name == "tracking" else name][:2]
    policy = make(4, cell, **({"tracking": True} if name == "tracking" else {})).double()
    lengths = torch.tensor([7, 1, 4, 2, 7])
    x = padded(policy.state_size, lengths)
    found, items = kind(policy, x, lengths).beam(3), torch.arange(5).repeat_interleave(3)
    drawn = kind(policy, x, lengths)
    z = drawn.sample((2,))  # replayed, and kept
    assert found.log_prob.isinf().sum() == 4  # of the items of one and of two leaves
    found = found._replace(log_prob=found.log_prob.clamp(min=-1e9))
    roots = [policy.root(found.state), policy.root(drawn.rollout(z).state)]
    total = [found.log_prob.flatten(), drawn.log_prob(z).flatten()]
    at_once = torch.cat([torch.cat(roots), torch.cat(total)[:, None]], 1)

    monkeypatch.setattr(type(policy), "can_replay", False)
    structure = kind(policy, x, lengths)
    items = torch.cat([items, torch.arange(5).repeat(2)])
    every = torch.cat([found.z.flatten(0, 1), z.flatten(0, 1)])
    steps = structure.rollout(every, items)
    log_prob = torch.where(at_once[:, -1] == -1e9, -1e9, steps.log_prob)
    by_steps = torch.cat([policy.root(steps.state), log_prob[:, None]], 1)
    same(policy, x, at_once, by_steps)


def test_no_replay_while_dropping_out():
    policy = EasyFirstTreeLSTM(4, "gated", dropout=0.5)
    assert not policy.can_replay
    assert policy.eval().can_replay


@pytest.mark.parametrize("name", POLICIES)
def test_straight_through_actions_have_the_gradient_of_the_mixture(name):
    make, structure, _, form = POLICIES[name]
    torch.manual_seed(0)
    policy = make(3, "gated").double()
    leaves = padded(3)
    lists = structure(policy, leaves, LENGTHS)
    z = lists.encode(form(Trees.random(LENGTHS, seed=1))).requires_grad_()
    state = lists.rollout(z).state
    hard = policy.root(lists.rollout(z.detach()).state)
    torch.testing.assert_close(policy.root(state), hard)
    (grad,) = torch.autograd.grad(policy.root(state)[0].sum(), z)
    assert grad[0].abs().sum() > 0 and grad[1:].eq(0).all() and grad.isfinite().all()
    # the last action's gradient by hand: how the root changes as its weight does
    if name == "easy-first":
        torch.testing.assert_close(grad[0, 4, 0], hard[0].sum())


def test_pool_gradients_are_those_of_copies():
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def run(x):
        pool = Pool(x)
        a = pool.write(pool.read(torch.tensor([0, 1])).sin())
        b = pool.write(pool.read(torch.stack([a, torch.tensor([2, 2])])).prod(0))
        return pool.read(torch.cat([a, b, torch.tensor([3, 3])])).cos().sum()

    def copies(x):
        table = torch.cat([x, x[:2].sin()])
        table = torch.cat([table, table[4:6] * table[[2, 2]]])
        return table[[4, 5, 6, 7, 3, 3]].cos().sum()

    out = run(x)
    torch.testing.assert_close(out, copies(x))
    (want,) = torch.autograd.grad(copies(x), x)
    for _ in range(2):  # a second pass through the same graph starts from nothing
        (got,) = torch.autograd.grad(out, x, retain_graph=True)
        torch.testing.assert_close(got, want)


# -- classifiers ----------------------------------------------------------------------------------


def small_batch(count=6):
    return collate(
        [listops.parse("7"), *listops.generate(count - 1, seed=1, min_length=4, max_length=9)]
    )


@pytest.mark.parametrize("encoder", ENCODERS)
def test_classifiers_treat_items_alone(encoder):
    torch.manual_seed(0)
    model = TreeClassifier(len(listops.VOCABULARY), 10, encoder, 8).double().eval()
    batch = small_batch()
    trees = Trees.random(batch.lengths, 2) if encoder == "random" else None
    trees = batch.trees if encoder == "gold" else trees
    logits = model(batch.tokens, batch.lengths, trees=trees)
    tokens = torch.where(batch.tokens == 0, 3, batch.tokens)  # another padding
    torch.testing.assert_close(model(tokens, batch.lengths, trees=trees), logits)
    for i, n in enumerate(batch.lengths.tolist()):
        alone = model(
            batch.tokens[i : i + 1, :n], batch.lengths[i : i + 1], trees=_only(trees, i, n)
        )
        torch.testing.assert_close(alone[0], logits[i])
    losses = model(batch.tokens, batch.lengths, batch.labels, trees=trees)
    want = nn.functional.cross_entropy(logits, batch.labels, reduction="none")
    torch.testing.assert_close(losses, want)
    assert {id(p) for p in model.parser_parameters()}.isdisjoint(
        id(p) for p in model.composer_parameters()
    )


def _only(trees, i, n):
    if trees is None:
        return None
    return Trees.from_transitions(trees.transitions()[i : i + 1, : 2 * n - 1], [n])


@pytest.mark.parametrize("encoder", ["spinn", "easy-first", "cky", "chart"])
def test_any_encoder_takes_given_trees(encoder):
    torch.manual_seed(0)
    model = TreeClassifier(len(listops.VOCABULARY), 10, encoder, 8).eval()
    batch = small_batch()
    left = model(batch.tokens, batch.lengths, trees="left")
    torch.testing.assert_close(
        left, model(batch.tokens, batch.lengths, trees=Trees.left(batch.lengths))
    )
    own = model.parse(batch.tokens, batch.lengths)
    if encoder != "chart":
        logits = model(batch.tokens, batch.lengths)
        torch.testing.assert_close(model(batch.tokens, batch.lengths, trees=own), logits)


ESTIMATORS = {
    "cky": {
        "marginals": {},
        "straight-through": {"backward": "marginals"},
        "spigot": {},
        "perturb-and-parse": {"hard": True},
        "reinforce": {"samples": 2, "baseline": "leave-one-out"},
        "sparse-expectation": {},
        "top-k-expectation": {"k": 3},
    },
    "easy-first": {
        "straight-through": {"backward": "softmax"},
        "gumbel-straight-through": {},
        "reinforce": {"baseline": "self-critic"},
        "ppo": {"baseline": "ema"},
        "top-k-expectation": {"k": 3},
    },
    "spinn": {
        "gumbel-straight-through": {},
        "reinforce": {"baseline": "ema"},
        "top-k-expectation": {"k": 3},
    },
}


@pytest.mark.parametrize(
    ("encoder", "name"), [(encoder, name) for encoder in ESTIMATORS for name in ESTIMATORS[encoder]]
)
def test_latent_trees_train_by_estimators(encoder, name):
    torch.manual_seed(0)
    model = TreeClassifier(len(listops.VOCABULARY), 10, encoder, 8, tracking=True)
    estimator = by_name(name, **ESTIMATORS[encoder][name])
    batch = small_batch()
    losses = model(*batch[:3], estimator=estimator)
    assert losses.shape == batch.labels.shape and losses.isfinite().all()
    losses.mean().backward()
    for parameters in (model.parser_parameters(), model.composer_parameters()):
        grads = [p.grad for p in parameters if p.grad is not None]
        assert all(g.isfinite().all() for g in grads)
        assert sum(g.abs().sum() for g in grads) > 0


@pytest.mark.parametrize("encoder", ["spinn", "easy-first", "cky"])
def test_supervision_and_beams(encoder):
    torch.manual_seed(0)
    model = TreeClassifier(len(listops.VOCABULARY), 10, encoder, 16)
    batch = small_batch()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(40):
        loss = model.supervise(batch.tokens, batch.lengths, batch.trees).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model.parse(batch.tokens, batch.lengths).f1(batch.trees).mean() > 0.9
    log_probs = model(batch.tokens, batch.lengths, beam=3)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(len(batch.tokens)))


def test_classifier_errors():
    with pytest.raises(ValueError, match="Did you mean 'easy-first'"):
        TreeClassifier(5, 2, "easy_first")
    tokens, lengths = torch.ones(1, 2, dtype=torch.long), torch.tensor([2])
    with pytest.raises(ValueError, match="gold trees must be given"):
        TreeClassifier(5, 2, "gold", 4)(tokens, lengths)
    with pytest.raises(ValueError, match="has no trees"):
        TreeClassifier(5, 2, "lstm", 4)(tokens, lengths, trees="left")
    with pytest.raises(ValueError, match="unknown trees 'lefty'"):
        TreeClassifier(5, 2, "cky", 4)(tokens, lengths, trees="lefty")
    with pytest.raises(ValueError, match="no latent tree"):
        TreeClassifier(5, 2, "chart", 4).structure(tokens, lengths)
    with pytest.raises(ValueError, match="'lstm' has no trees"):
        TreeClassifier(5, 2, "lstm", 4).parse(tokens, lengths)
    with pytest.raises(ValueError, match="LeafLSTM: output_size must be even, got 3"):
        LeafLSTM(2, 3)
    with pytest.raises(ValueError, match='composer must be "child-sum" or "gcn", got \'sum\''):
        LatentDependency(2, 4, "sum")


@pytest.mark.parametrize("encoder", ["spinn", "easy-first", "cky"])
def test_words_alone_are_trees(encoder):
    """Where every item is one leaf, nothing is composed; estimators have nothing to choose."""
    torch.manual_seed(0)
    model = TreeClassifier(5, 2, encoder, 4)
    tokens, lengths = torch.tensor([[1], [2], [1]]), torch.ones(3, dtype=torch.long)
    found = model(tokens, lengths, estimator=by_name("straight-through"))
    torch.testing.assert_close(found, model(tokens, lengths))
    torch.testing.assert_close(found[0], found[2])
    structure = model.structure(tokens, lengths)
    assert structure.log_prob(structure.sample()).tolist() == [0, 0, 0]


def test_gold_trees_overfit():
    torch.manual_seed(0)
    batch = collate(listops.generate(32, seed=0, min_length=8, max_length=20))
    model = TreeClassifier(len(listops.VOCABULARY), 10, "gold", 48)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        loss = model(*batch[:3], trees=batch.trees).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    logits = model(batch.tokens, batch.lengths, trees=batch.trees)
    assert (logits.argmax(1) == batch.labels).all()


def test_a_pool_is_freed() -> None:
    pool = Pool(torch.ones(2, 3, requires_grad=True))
    total = pool.read(pool.write(2 * pool.read(torch.tensor([1])))).sum()
    table = weakref.ref(pool._table)
    total.backward()
    del pool, total
    assert table() is None  # without waiting for the garbage collector, which cannot see the graph


# -- cells that were changed ----------------------------------------------------------------------


class Doubled(GatedRecursiveCell):
    def forward(self, left, right):
        return 2 * super().forward(left, right)


def with_part(name, part):
    cell = GatedRecursiveCell(4)
    setattr(cell, name, part)
    return cell


def hooked(name):
    cell = GatedRecursiveCell(4)
    module = getattr(cell, name) if name else cell
    module.register_forward_hook(lambda module, inputs, out: 2 * out)
    return cell


def replaced_forward():
    cell = GatedRecursiveCell(4)
    cell.forward = lambda left, right: left - right
    return cell


OTHER_CELLS = {
    "subclass": lambda: Doubled(4),
    "another forward": replaced_forward,
    "norm without parameters": lambda: with_part("norm", nn.LayerNorm(4, elementwise_affine=False)),
    "norm without a shift": lambda: with_part("norm", nn.LayerNorm(4, bias=False)),
    "another norm": lambda: with_part("norm", nn.RMSNorm(4)),
    "inner without a bias": lambda: with_part("inner", nn.Linear(8, 16, bias=False)),
    "wrapped inner": lambda: with_part("inner", nn.Sequential(nn.Linear(8, 16), nn.Tanh())),
    "hook": lambda: hooked(""),
    "hook of outer": lambda: hooked("outer"),
    "weight norm": lambda: with_part(
        "outer", nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    ),
}


@pytest.mark.parametrize("other", OTHER_CELLS)
@pytest.mark.parametrize("name", POLICIES)
def test_changed_cells_are_replayed_as_they_are(name, other):
    torch.manual_seed(0)
    make, structure, naive, form = POLICIES[name]
    policy = make(4, OTHER_CELLS[other]()).double()
    assert not policy.cell.can_compose_levels and GatedRecursiveCell(4).can_compose_levels
    leaves, steps = padded(4), form(Trees.random(LENGTHS, seed=3))
    out = structure(policy, leaves, LENGTHS)
    out = out.rollout(out.encode(steps))
    root, total = naive(policy, leaves[0], steps[0].tolist())
    batched = torch.cat([policy.root(out.state)[0], out.log_prob[:1]])
    same(policy, leaves, batched, torch.cat([root, total[None]]))


# -- heads and lengths ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ([[2, 0, 2], [3, 0, 0]], r"between 0 and 2, got 3 for word 1 of item 1"),
        ([[2, 0, 2], [0, -1, 0]], r"between 0 and 2, got -1 for word 2 of item 1"),
        ([[2, 0, 9], [0, 1, 0]], r"between 0 and 3, got 9 for word 3 of item 0"),
        ([[2, 0, 2], [2, 1, 0]], r"item 1 form a cycle: \[2, 1\]"),
        ([[0, 3, 3], [0, 1, 0]], r"item 0 form a cycle: \[0, 3, 3\]"),
    ],
)
def test_heads_that_are_no_tree(heads, said):
    heads, lengths = torch.tensor(heads), torch.tensor([3, 2])
    with pytest.raises(ValueError, match=said):
        ChildSumTreeLSTM(1, 2)(torch.zeros(2, 3, 1), heads, lengths)
    words = torch.tensor([[3, 4, 5], [6, 7, 0]])
    for kind, composer in [("given", "child-sum"), ("given", "gcn"), ("latent", "gcn")]:
        model = DependencyClassifier(10, 2, kind, composer, 3, 4)
        with pytest.raises(ValueError, match=said):
            model(words, lengths, heads=heads)


@pytest.mark.parametrize("composer", ["child-sum", "gcn"])
def test_given_heads_are_an_items_own(composer):
    torch.manual_seed(0)
    model = DependencyClassifier(10, 2, "given", composer, 3, 4).double()
    words, heads = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([[2, 0, 2], [0, 0, 9]])
    both = model(words, torch.tensor([3, 2]), heads=heads)
    alone = model(words[1:, :2], torch.tensor([2]), heads=heads[1:, :2])
    torch.testing.assert_close(both[1:], alone)
    if composer == "child-sum":  # two roots: their mean
        states = model.encoder.encoder(model.embedding(words), heads, torch.tensor([3, 2]))
        want = model.head(states / torch.tensor([[1.0], [2.0]])).log_softmax(-1)
        torch.testing.assert_close(both, want)


def test_lengths_that_cannot_be():
    for lengths, got in (([3, 0], "0 for item 1"), ([4, 2], "4 for item 0")):
        said = f"lengths must be between 1 and 3, got {got}"
        with pytest.raises(ValueError, match="ChildSumTreeLSTM: " + said):
            ChildSumTreeLSTM(1, 2)(
                torch.zeros(2, 3, 1), torch.zeros(2, 3).long(), torch.tensor(lengths)
            )
        with pytest.raises(ValueError, match="compose_chart: " + said):
            ChartLSTM(2)(torch.zeros(2, 3, 4), torch.tensor(lengths))


@pytest.mark.parametrize("lengths", [[3, 2], torch.tensor([3, 2])])
def test_lengths_may_be_a_list(lengths):
    x = torch.randn(2, 3, 4)
    for net in (LeafLSTM(4, 6), SentenceLSTM(4, 6)):
        assert torch.equal(net(x, lengths), net(x, torch.tensor([3, 2])))


def test_an_empty_batch():
    none = torch.zeros(0, dtype=torch.long)
    assert LeafLSTM(4, 6)(torch.zeros(0, 3, 4), none).shape == (0, 3, 6)
    assert SentenceLSTM(4, 6)(torch.zeros(0, 3, 4), none).shape == (0, 6)
    assert TreeLSTM(4)(torch.zeros(0, 3, 8), Trees.left([])).shape == (0, 8)
    assert TreeLSTM(4)(torch.zeros(0, 3, 8), Trees.left([3])[:0], nodes=True).shape == (0, 5, 8)
    heads = torch.zeros(0, 3, dtype=torch.long)
    assert ChildSumTreeLSTM(4, 6)(torch.zeros(0, 3, 4), heads, none).shape == (0, 6)
    names = facts([["a", "cat"]], least_count=1)
    batch = Vocabulary(names).collate([])
    assert WordEncoder(names, 4, 3, 5)(batch).shape == (0, batch.words.shape[1], 10)


# -- under torch's transformations ----------------------------------------------------------------


def compiled(call, *arguments, **options):
    torch._dynamo.reset()
    return torch.compile(call, backend="eager")(*arguments, **options)


def test_networks_along_given_trees_compile():
    torch.manual_seed(0)
    net = TreeLSTM(8)
    for lengths in ([3, 2], [1, 3], [1, 1]):
        x, trees = torch.randn(2, 3, 16), Trees.left(lengths)
        torch.testing.assert_close(compiled(net, x, trees), net(x, trees))
    torch.testing.assert_close(compiled(net, x, trees, nodes=True), net(x, trees, nodes=True))
    net, x = ChildSumTreeLSTM(4, 8), torch.randn(2, 3, 4)
    step, lengths = torch.compile(net, backend="eager"), torch.tensor([3, 2])
    for heads in ([[2, 0, 2], [0, 1, 0]], [[0, 1, 2], [2, 0, 0]]):  # nothing of a plan is kept
        heads = torch.tensor(heads)
        torch.testing.assert_close(step(x, heads, lengths), net(x, heads, lengths))


@pytest.mark.parametrize("encoder", ["balanced", "spinn", "easy-first", "cky"])
def test_tree_classifiers_compile(encoder):
    torch.manual_seed(0)
    model, batch = TreeClassifier(len(listops.VOCABULARY), 10, encoder, 8), small_batch(3)
    found = compiled(model, batch.tokens, batch.lengths)
    torch.testing.assert_close(found, model(batch.tokens, batch.lengths))


@pytest.mark.parametrize("kind", ["latent", "given"])
def test_dependency_classifiers_compile(kind):
    torch.manual_seed(0)
    model = DependencyClassifier(10, 2, kind, input_size=3, hidden_size=4)
    words, lengths = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2])
    heads = torch.tensor([[2, 0, 2], [0, 1, 0]]) if kind == "given" else None
    found = compiled(model, words, lengths, heads=heads)
    torch.testing.assert_close(found, model(words, lengths, heads=heads))


@pytest.mark.parametrize("weighted", [False, True])
def test_child_sum_under_autocast(weighted):
    torch.manual_seed(0)
    net, x = ChildSumTreeLSTM(4, 8), torch.randn(2, 3, 4)
    heads, lengths = torch.tensor([[2, 0, 2], [0, 1, 0]]), torch.tensor([3, 2])
    weights = torch.ones(2, 3) if weighted else None
    with torch.autocast("cpu", torch.bfloat16):
        low = net(x, heads, lengths, weights)
    low.sum().backward()
    torch.testing.assert_close(low.float(), net(x, heads, lengths, weights), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", ["reinforce", "top-k-expectation", "ppo"])
@pytest.mark.parametrize("encoder", ["easy-first", "spinn"])
def test_policies_under_autocast(encoder, name):
    torch.manual_seed(0)
    model = PairByTree(9, 3, encoder, 6, 8)
    words, lengths = torch.tensor([[3, 4, 5, 2], [6, 7, 8, 1]]), torch.tensor([4, 4])
    estimator = by_name(name)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(words, lengths, torch.tensor([1, 1]), estimator=estimator)
    losses.mean().backward()
    grads = [p.grad for p in model.composer_parameters() if p.grad is not None]
    assert losses.isfinite().all() and all(g.isfinite().all() for g in grads)
    structure = model.structure(words, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        low = model.structure(words, lengths)
        low = low.log_prob(structure.greedy().z)
    torch.testing.assert_close(low, structure.log_prob(structure.greedy().z), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", POLICIES)
def test_functional_gradients_of_policies(name, cell):
    """torch.func.grad, of a search and of known trees."""
    torch.manual_seed(0)
    make, kind, _, form = POLICIES[name]
    policy = make(4, cell).double()
    x = padded(policy.state_size).detach()
    z = kind(policy, x, LENGTHS).encode(form(Trees.random(LENGTHS, seed=3)))

    class Ask(nn.Module):
        def __init__(self, query):
            super().__init__()
            self.policy, self.query = policy, query

        def forward(self, x):
            return self.query(kind(self.policy, x, LENGTHS))

    def searched(structure):
        found = structure.beam(2)
        return found.log_prob[0].sum() + policy.root(found.state).sum()

    for query in (lambda structure: structure.log_prob(z).sum(), searched):
        module = Ask(query)
        named = dict(module.named_parameters())
        want = torch.autograd.grad(module(x), list(named.values()), allow_unused=True)

        def value(parameters, module=module):
            return torch.func.functional_call(module, parameters, (x,))

        for grad, expected in zip(torch.func.grad(value)(named).values(), want, strict=True):
            torch.testing.assert_close(
                grad, torch.zeros_like(grad) if expected is None else expected
            )


# -- what they refuse -----------------------------------------------------------------------------


def test_one_tree_for_each_item_without_labels():
    model = TreeClassifier(5, 2, "cky", 4)
    tokens, lengths = torch.ones(2, 4, dtype=torch.long), torch.tensor([4, 2])
    with pytest.raises(ValueError, match=r"one tree for each of the 2 items, got z \(3, 2, 4, 4\)"):
        model(tokens, lengths, estimator=by_name("imle", samples=3))


def test_an_odd_sentence():
    words, lengths = torch.ones(3, 2, dtype=torch.long), torch.tensor([2, 2, 1])
    for model in (
        PairByTree(9, 3, "left", 6, 8),
        PairByDependency(9, 3, input_size=6, hidden_size=8),
    ):
        with pytest.raises(ValueError, match="even number of rows, got 3"):
            model(words, lengths)
