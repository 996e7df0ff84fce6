import marimo

__generated_with = "0.25.2"
app = marimo.App()

with app.setup:
    import marimo as mo
    import torch
    from torch import Tensor, nn

    import structmax as sx
    from structmax.draw import bars_svg, lines_svg, polytope_svg


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 1. Discrete choices and their gradients

    A network has to pick one of several options on the way to its answer. Nobody says which one is
    right: the choice is *latent*. This page is about the gradient of such a choice.

    The story is that of the ACL 2019 tutorial *Latent structure models for natural language
    processing* (Martins, Mihaylova, Nangia & Niculae): a latent category selects a regression.
    An input has two parts. A point $x$ hides a category $z$, one of three. A number $u$ is to be
    multiplied by the slope of that category:

    $$y = a_z\, u + \text{noise}, \qquad a = (-2,\ \tfrac12,\ 2).$$

    We see $x$, $u$ and $y$, and never $z$.
    """)
    return


@app.function
def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Points x around one of three centres, numbers u, and answers y."""
    centres = torch.tensor([[0.0, 1.0], [-0.87, -0.5], [0.87, -0.5]])
    z = torch.randint(3, (count,), generator=generator)
    x = centres[z] + 0.25 * torch.randn(count, 2, generator=generator)
    u = torch.randn(count, generator=generator)
    noise = 0.1 * torch.randn(count, generator=generator)
    return x, u, torch.tensor([-2.0, 0.5, 2.0])[z] * u + noise


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The model has an *encoder*, which gives each category a score $s_k(x)$, and a *decoder*, which
    holds three slopes. A choice is a 0/1 vector $z$ with a single one, a corner of the simplex, and

    $$L(z) = \bigl(\langle z, \hat a\rangle\, u - y\bigr)^2 .$$

    ## Argmax has no gradient

    Take one example, and scores $s$ that are wrong: the right slope is the third, and the first is
    chosen.
    """)
    return


@app.function
def cost(z: Tensor) -> Tensor:
    """Squared errors (...) of choices z (..., 3), where u = 1 and y = 2."""
    return (z @ torch.tensor([-2.0, 0.5, 2.0]) - 2.0) ** 2


@app.cell
def _():
    scores = torch.tensor([1.0, 0.5, 0.2])
    choice = sx.Choice(scores)
    choice.draw(["slope −2", "slope ½", "slope 2"])
    return choice, scores


@app.cell
def _(choice, scores):
    # a small step in any score changes nothing: the derivative is zero
    _before = cost(choice.argmax())
    for _k in range(3):
        _moved = scores.clone()
        _moved[_k] += 0.01
        assert cost(sx.Choice(_moved).argmax()) == _before
    print("L(argmax) =", _before.item(), "whichever score moves by 0.01")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    $L(\operatorname{argmax} s)$ is a staircase in $s$: flat, with jumps where two scores cross.
    Back-propagation through it is correct and useless.

    ## Three objectives

    So one trains something else. There are three families.

    - $L(\operatorname{argmax})$ with a made-up gradient.
    - $\mathbb E[L(z)]$: the choice is random, $p = \operatorname{softmax}(s)$.
    - $L(\mathbb E[z])$: the decoder sees the mean $p$ itself, a mixture of options.

    With the third score moving from left to right:
    """)
    return


@app.cell
def _(scores):
    _places = torch.linspace(-3, 5, 161)
    _moving = sx.Choice(torch.stack([scores.clone().index_fill(0, torch.tensor(2), t)
                                     for t in _places]))  # fmt: skip
    hard = cost(_moving.argmax())
    relaxed = cost(_moving.marginals())
    expected = sx.estimators.ExactExpectation().loss(_moving, cost)
    assert (relaxed <= expected + 1e-6).all()  # Jensen: this cost is convex in z
    lines_svg(
        _places,
        {"L(argmax)": hard, "E[L(z)]": expected, "L(E[z])": relaxed},
        "the third score",
        "cost",
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The two smooth curves are different objectives, not a good and a bad picture of the same one.
    Their gap is Jensen's inequality. A relaxed decoder can mix the slopes $-2$ and $2$ to get $0$,
    which is no option.

    ## The exact gradient

    With three options we can afford the sum $\mathbb E[L(z)] = \sum_k p_k L_k$. Its derivative is

    $$\frac{\partial}{\partial s_k}\,\mathbb E[L(z)] = p_k\,\bigl(L_k - \mathbb E[L]\bigr):$$

    options that are cheaper than the average gain. `ExactExpectation` does that sum.
    """)
    return


@app.function
def gradient(estimator: sx.estimators.Estimator, scores: Tensor) -> Tensor:
    """∂/∂s of the loss, by this estimator."""
    leaf = scores.clone().requires_grad_()
    return torch.autograd.grad(estimator.loss(sx.Choice(leaf), cost), leaf)[0]


@app.cell
def _(choice, scores):
    exact = gradient(sx.estimators.ExactExpectation(), scores)
    _p, _costs = choice.marginals(), cost(torch.eye(3))
    assert torch.allclose(exact, _p * (_costs - (_p * _costs).sum()), atol=1e-5)
    exact
    return (exact,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Relaxation and straight-through

    `Marginals` differentiates $L(\mathbb E[z])$. That is exact too, for its own objective.
    `StraightThrough` uses the argmax forward, and backward pretends that it was the identity, so
    that $\partial L/\partial s := \partial L/\partial z$ (Bengio, Léonard & Courville 2013). With
    `backward="marginals"` it pretends that it was the softmax. Both are biased: the true
    gradient is zero, and these are gradients of something else.
    """)
    return


@app.cell
def _(exact, scores):
    _estimators = {
        "L(E[z]), marginals": sx.estimators.Marginals(),
        "straight-through": sx.estimators.StraightThrough(),
        "straight-through, marginals": sx.estimators.StraightThrough(backward="marginals"),
    }
    print(f"{'∇E[L(z)]':28s}", exact.numpy().round(3))
    for _name, _estimator in _estimators.items():
        _g = gradient(_estimator, scores)
        _cosine = torch.cosine_similarity(_g, exact, dim=0)
        print(f"{_name:28s}", _g.numpy().round(3), f" cosine {_cosine:.2f}")
        assert not torch.allclose(_g, exact, atol=0.1)  # none of them is the other's gradient
        assert _g.argmin() == exact.argmin() == 2  # here all agree on what to raise
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    On the simplex, where corners are choices: the dashed arrow is the step of straight-through,
    which leaves the simplex. The solid one is that of SPIGOT, brought back to it by a projection.
    Tutorial 5 is about that.
    """)
    return


@app.cell
def _(choice):
    polytope_svg(choice, cost, step=0.1)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## REINFORCE

    Often the sum over all $z$ is too long, and a cost can only be evaluated, not differentiated.
    Then one draws $z \sim p$ and uses (Williams 1992)

    $$\nabla \mathbb E[L(z)] = \mathbb E\bigl[(L(z) - b)\,\nabla \log p(z)\bigr].$$

    It is unbiased for every constant $b$, since $\mathbb E[\nabla \log p] = 0$. Its enemy is
    variance. Adding 30 to every cost changes no gradient, but without a baseline it is paid for in
    noise; the mean cost of the other draws as $b$ (leave-one-out, Kool, van Hoof & Welling 2019)
    takes it away again. Where costs are centred already, a baseline may gain nothing. Choose the
    number of draws:
    """)
    return


@app.cell
def _():
    samples = mo.ui.slider(2, 32, value=4, label="samples", show_value=True)
    samples
    return (samples,)


@app.cell
def _(exact, samples, scores):
    def measure(baseline: str | None, shift: float) -> tuple[float, float]:
        """Bias in standard errors, and variance of the gradient, from 1000 repetitions."""
        torch.manual_seed(0)
        estimator = sx.estimators.Reinforce(samples.value, baseline)
        leaf = scores.repeat(1000, 1).requires_grad_()
        estimator.loss(sx.Choice(leaf), lambda z: cost(z) + shift).sum().backward()
        variance = leaf.grad.var(0).sum()
        error = (variance / 1000).sqrt()
        return float((leaf.grad.mean(0) - exact).norm() / error), float(variance)

    variances = {}
    for _shift in (0.0, 30.0):
        for _baseline in (None, "leave-one-out"):
            _bias, _variance = measure(_baseline, _shift)
            print(f"cost + {_shift:2g}, baseline {_baseline or 'none':14s}"
                  f"variance {_variance:8.2f}, bias {_bias:.1f} standard errors")  # fmt: skip
            assert _bias < 4  # none that 1000 repetitions can see
            variances[_shift, _baseline] = _variance
    assert variances[30, None] > 5 * variances[30, "leave-one-out"]
    assert abs(variances[30, "leave-one-out"] / variances[0, "leave-one-out"] - 1) < 1e-3
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    `sx.diagnose` makes this comparison for any small structure and any estimator: bias and
    variance, relative to the exact gradient of each estimator's own objective. `print(table)` has
    the numbers. A hollow diamond is a bias that may be none.
    """)
    return


@app.cell
def _(choice):
    table = sx.diagnose(
        choice,
        cost,
        ["exact-expectation", "marginals", "straight-through", "reinforce",
         "gumbel-straight-through", "sum-and-sample"],
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    _errors = {r["estimator"]: r["bias"] / (r["error"] + 1e-6) for r in table.records}
    assert _errors["reinforce"] < 4 < _errors["gumbel-straight-through"]
    table.draw()
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Train

    The whole model, with each of them. The error is that of the argmax on new data, over the
    variance of $y$: 1 is as good as a constant.
    """)
    return


@app.function
def train(estimator: sx.estimators.Estimator | None, steps: int = 150) -> float:
    """The error after training with this estimator, or through the bare argmax."""
    torch.manual_seed(1)
    data = torch.Generator().manual_seed(1)
    encoder, slopes = nn.Linear(2, 3), nn.Parameter(0.5 * torch.randn(3))
    optimizer = torch.optim.Adam([*encoder.parameters(), slopes], lr=0.05)
    for _ in range(steps):
        x, u, y = draw(64, data)
        structure = sx.Choice(encoder(x))

        def squares(z: Tensor, u: Tensor = u, y: Tensor = y) -> Tensor:
            return (z @ slopes * u - y) ** 2

        losses = squares(structure.argmax()) if estimator is None else estimator.loss(
            structure, squares
        )  # fmt: skip
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    x, u, y = draw(1000, data)
    with torch.no_grad():
        return float(((sx.Choice(encoder(x)).argmax() @ slopes * u - y) ** 2).mean() / y.var())


@app.cell
def _():
    errors = {
        "bare argmax": train(None),
        "marginals": train(sx.estimators.Marginals()),
        "straight-through": train(sx.estimators.StraightThrough()),
        "straight-through, marginals": train(sx.estimators.StraightThrough(backward="marginals")),
        "gumbel straight-through": train(sx.estimators.GumbelStraightThrough()),
        "reinforce": train(sx.estimators.Reinforce(4, "leave-one-out")),
        "exact expectation": train(sx.estimators.ExactExpectation()),
    }
    bars_svg(list(errors), list(errors.values()))
    return (errors,)


@app.cell
def _(errors):
    assert errors["bare argmax"] > 0.2  # only the slopes learned
    for _name in ("marginals", "gumbel straight-through", "reinforce", "exact expectation"):
        assert errors[_name] < 0.05
    assert errors["straight-through"] > 0.1  # the bias of the identity shows
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Through the bare argmax the encoder stays as it was drawn, and only the slopes adapt. The
    identity of plain straight-through moves every score by the slope of the cost there, however
    far that option is from being chosen; the version with marginals weighs by $p$. One run of one
    toy is no ranking: measure on your own problem, with `sx.diagnose`.

    **To remember.** Ask first which objective you want. $L(\mathbb E[z])$ is easy to optimise, and
    differs from what a hard choice will do at test time. $\mathbb E[L(z)]$ has unbiased
    estimators with variance. $L(\operatorname{argmax})$ only has biased ones.
    """)
    return


if __name__ == "__main__":
    app.run()
