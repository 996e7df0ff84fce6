import marimo

__generated_with = "0.25.2"
app = marimo.App()

with app.setup:
    import copy
    import random

    import marimo as mo
    import torch
    from torch import Tensor

    import structmax as sx
    from structmax.data import Trees, collate, listops
    from structmax.draw import Drawing, bars_svg, beside, lines_svg, tree_svg
    from structmax.nn.classifier import TreeClassifier


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 7. From REINFORCE to PPO on ListOps

    Some structures have no dynamic program. A shift-reduce parser decides step by step, and each
    decision depends on vectors that it has composed so far: there is no table of scores to sum
    over. What is left is to draw a tree, see what it costs, and make it more or less likely.

    The task is ListOps (Nangia & Bowman 2018): the value of a nested list such as
    `[MAX 2 [MIN 9 4 ] ]`, here of 7 to 11 tokens with minima and maxima only, so that a page can
    train on them. Havrylov, Kruszewski & Joulin (2019) showed on the full task which tricks it
    takes; we measure them one by one.
    """)
    return


@app.cell
def _():
    examples = [
        e
        for e in listops.generate(6000, max_depth=4, max_args=3, operator_prob=0.4,
                                  min_length=7, max_length=11)
        if not {"[MED", "[SM"} & set(e.words) and e.words.count("]") > 1
    ]  # fmt: skip
    train_set, test = examples[200:], collate(examples[:200])
    print(len(train_set), "expressions to train on, such as", train_set[3])
    return examples, test, train_set


@app.function
def accuracy(model: TreeClassifier, batch, trees: Trees | None = None) -> float:
    """How many values are right, along given trees or the model's own best ones."""
    with torch.no_grad():
        logits = model(batch.tokens, batch.lengths, trees=trees)
    return float((logits.argmax(-1) == batch.labels).float().mean())


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A reader that knows how to compose

    A tree classifier has two parts: a *composer*, which makes one vector of two, and a *parser*,
    which decides what to compose. To see the parser's problem alone we give the composer the right
    trees first, and freeze it. (Learning both at once is harder, and slower than a page.)
    """)
    return


@app.cell
def _(test, train_set):
    torch.manual_seed(0)
    _rng = random.Random(0)
    model = TreeClassifier(len(listops.VOCABULARY), 10, "spinn", hidden_size=48)
    _optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(160):
        _batch = collate(_rng.sample(train_set, 64))
        _loss = model(*_batch[:3], trees=_batch.trees).mean()
        _optimizer.zero_grad()
        _loss.backward()
        _optimizer.step()
    for _p in model.composer_parameters():
        _p.requires_grad_(False)
    start = copy.deepcopy(model.state_dict())
    along_gold, along_own = accuracy(model, test, test.trees), accuracy(model, test)
    print(f"along the right trees {along_gold:.0%}, along its own {along_own:.0%}")
    assert along_gold > 0.9 > along_own + 0.1
    return along_own, model, start


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The gradient that we want

    With $p(z)$ the parser's distribution over trees and $L(z)$ the cross-entropy along tree $z$,

    $$\nabla\,\mathbb E[L(z)] = \mathbb E\bigl[L(z)\,\nabla\log p(z)\bigr] .$$

    Seven tokens have 132 trees, so for a few short expressions the expectation can be summed. That
    is the reference against which we measure.
    """)
    return


@app.cell
def _(examples, model):
    short = collate([e for e in examples if len(e.tokens) == 7][:4])

    def gradient(estimator: sx.estimators.Estimator) -> Tensor:
        """That of the parser's parameters, in one vector."""
        losses = model(*short[:3], estimator=estimator)
        return torch.cat([g.flatten() for g in torch.autograd.grad(
            losses.mean(), model.parser_parameters())])  # fmt: skip

    exact = gradient(sx.estimators.ExactExpectation())
    assert len(model.structure(short.tokens, short.lengths)[0].enumerate_support()) == 132
    print("‖∇E[L]‖ =", round(exact.norm().item(), 3))
    return exact, gradient


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Tricks, measured

    Any number $b$ that does not depend on the drawn tree may be subtracted from its cost:

    $$\bigl(L(z) - b\bigr)\,\nabla\log p(z) .$$

    - **ema**: $b$ is a running mean of earlier costs;
    - **self-critic**: the cost of the greedy tree of the same input (Rennie et al. 2017);
    - **leave-one-out**: the mean cost of the other draws for the same input (Kool, van Hoof &
      Welling 2019).

    All with four draws. Variance is $\mathbb E\lVert g - \mathbb E g\rVert^2 / \lVert \nabla
    \rVert^2$. The bias of each is within the error of so many repetitions.
    """)
    return


@app.cell
def _():
    repetitions = mo.ui.slider(40, 400, 20, value=80, label="repetitions", show_value=True)
    repetitions
    return (repetitions,)


@app.cell
def _(exact, gradient, repetitions):
    tricks = {
        "one draw": sx.estimators.Reinforce(),
        "four draws": sx.estimators.Reinforce(4),
        "four, ema": sx.estimators.Reinforce(4, "ema"),
        "four, self-critic": sx.estimators.Reinforce(4, "self-critic"),
        "four, leave-one-out": sx.estimators.Reinforce(4, "leave-one-out"),
        "three best and a draw": sx.estimators.SumAndSample(k=3),
    }
    torch.manual_seed(0)
    variance = {}
    for _name, _estimator in tricks.items():
        for _ in range(10):  # running means settle
            gradient(_estimator)
        _seen = torch.stack([gradient(_estimator) for _ in range(repetitions.value)])
        _spread = (_seen - _seen.mean(0)).square().sum(-1).mean()
        _error = (_spread / len(_seen)).sqrt()
        _bias = ((_seen.mean(0) - exact).norm() / _error).item()
        variance[_name] = (_spread / exact.norm() ** 2).item()
        print(f"{_name:22s} variance {variance[_name]:8.2f}   bias {_bias:.2f} standard errors")
        assert _bias < 2.5
    assert variance["four draws"] < variance["one draw"]
    assert variance["four, leave-one-out"] < variance["four draws"]
    return (variance,)


@app.cell
def _(variance):
    _most = max(variance.values())
    bars_svg(list(variance), [v / _most for v in variance.values()],
             [f"{v:.2f}" for v in variance.values()])  # fmt: skip
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The last row is another way: sum over a few likely trees, found by a beam, and draw only from
    the rest (Liu, Regier, Tripuraneni, Jordan & McAuliffe 2019). It is unbiased as well, and for a
    parser that is as undecided as this one a few trees are a small part of the sum.

    ## PPO: several updates from the same draws

    Trees and costs are expensive, gradients of $\log p$ less so. Proximal policy optimisation
    (Schulman et al. 2017) uses the same draws again after the parser has changed. With
    $r = p_{\text{new}}(z)/p_{\text{old}}(z)$ and the advantage $A = L(z) - b$ it minimises

    $$\mathbb E\bigl[\max\bigl(r A,\ \operatorname{clip}(r, 1-\varepsilon, 1+\varepsilon)\,A\bigr)
    \bigr] .$$

    The first update has $r = 1$: it *is* REINFORCE. Later ones are biased, by the clipping, which
    stops the gradient of trees whose probability has moved far enough, and by costs that have aged.
    """)
    return


@app.cell
def _(gradient):
    def seeded(kind: type, **options) -> Tensor:
        return gradient(kind(samples=4, baseline="leave-one-out",
                             generator=torch.Generator().manual_seed(1), **options))  # fmt: skip

    first, reinforce = seeded(sx.estimators.PPO, updates=3), seeded(sx.estimators.Reinforce)
    assert torch.equal(first, reinforce)
    return


@app.cell
def _():
    # clipping, on one choice: the first option is cheap, and has become likelier by a lot
    _old = torch.zeros(2, requires_grad=True)
    ppo = sx.estimators.PPO(clip=0.2, updates=3, samples=64, baseline="leave-one-out",
                            generator=torch.Generator().manual_seed(0))  # fmt: skip
    ppo.loss(sx.Choice(_old), lambda z: z[..., 1])
    _near = torch.tensor([0.1, 0.0], requires_grad=True)
    _far = torch.tensor([2.0, 0.0], requires_grad=True)
    slopes = [torch.autograd.grad(ppo.replay(sx.Choice(s)), s)[0].norm() for s in (_near, _far)]
    assert slopes[0] > 0.1 and slopes[1] == 0
    print("slope near the old scores", round(slopes[0].item(), 3), "and far from them", 0.0)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Train the parser

    The same number of draws for each: 32 batches of 32 expressions, four trees each. PPO makes
    three updates of every batch. Expressions are tested along the greedy tree.
    """)
    return


@app.cell
def _(model, start, test, train_set):
    def train(estimator: sx.estimators.Estimator, batches: int = 32) -> list[float]:
        """Accuracy on the test set, every eight batches."""
        model.load_state_dict(start)
        torch.manual_seed(0)
        rng = random.Random(0)
        optimizer = torch.optim.Adam(model.parser_parameters(), lr=0.01)
        found = [accuracy(model, test)]
        for i in range(1, batches + 1):
            batch = collate(rng.sample(train_set, 32))
            for update in range(getattr(estimator, "updates", 1)):
                if update == 0:
                    losses = model(*batch[:3], estimator=estimator)
                else:
                    losses = estimator.replay(model.structure(batch.tokens, batch.lengths))
                optimizer.zero_grad()
                losses.mean().backward()
                optimizer.step()
            if i % 8 == 0:
                found.append(accuracy(model, test))
        return found

    return (train,)


@app.cell
def _(along_own, model, test, train):
    def trees_of(item: int) -> Drawing:
        """The model's tree of a test expression; what the right tree does not have is dashed."""
        found, n = model.parse(test.tokens, test.lengths), int(test.lengths[item])
        words = [listops.VOCABULARY[t] for t in test.tokens[item, :n]]
        own, gold = (t.spans()[item].nonzero().tolist() for t in (found, test.trees))
        return tree_svg(words, [s for s in own if s[0] < s[1]], [s for s in gold if s[0] < s[1]])

    curves = {"four draws": train(sx.estimators.Reinforce(4)),
              "self-critic": train(sx.estimators.Reinforce(4, "self-critic"))}  # fmt: skip
    curves["PPO"] = train(
        sx.estimators.PPO(updates=3, samples=4, baseline="leave-one-out", normalize=True)
    )
    after = trees_of(3)
    curves["leave-one-out"] = train(sx.estimators.Reinforce(4, "leave-one-out"))
    for _name, _curve in curves.items():
        print(f"{_name:14s}", *[f"{a:.2f}" for a in _curve])
        assert max(_curve[2:]) > along_own + 0.08
    lines_svg(range(0, 33, 8), curves, "batches", "accuracy")
    return after, trees_of


@app.cell
def _(after, model, start, trees_of):
    model.load_state_dict(start)
    beside([("before", trees_of(3)), ("after PPO", after)], widest=700)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    All of them learn, and one seed on 200 expressions does not rank them: the differences are of
    the size of chance. The results page has full runs, with several seeds.

    **To remember.** REINFORCE needs only samples and costs, and it is unbiased. A baseline from the
    same input lowers its variance, which you can measure before you train. PPO spends several
    updates on each draw and pays with bias, which clipping bounds.
    """)
    return


if __name__ == "__main__":
    app.run()
