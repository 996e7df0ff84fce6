import marimo

__generated_with = "0.25.2"
app = marimo.App()

with app.setup:
    import math

    import marimo as mo
    import torch
    from torch import Tensor

    import structmax as sx
    from structmax.draw import beside, lines_svg


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 4. Differentiable dynamic programming

    A dynamic program is a recursion of sums and maxima. Viterbi's, for the best sequence of tags:

    $$V_t(b) = \theta_t(b) + \max_a \bigl\{ V_{t-1}(a) + T(a, b) \bigr\}.$$

    Sums are differentiable. The maximum is not, at ties, and elsewhere its derivative is a hard
    choice. Mensch & Blondel (2018) replace every maximum by a smoothed one from tutorial 2,

    $$\textstyle\max_\Omega(x) = \max_{p\in\triangle}\ \langle p, x\rangle - \Omega(p),$$

    and everything becomes differentiable at once. Here it is in plain PyTorch, with nothing of this
    library but $\max_\Omega$:
    """)
    return


@app.function
def viterbi(unary: Tensor, transition: Tensor, omega: sx.Smoothing) -> Tensor:
    """The smoothed value of the best tag sequence: unary (n, c), transition (c, c)."""
    value = unary[0]
    for scores in unary[1:]:
        value = scores + sx.smoothed_max(value[:, None] + transition, omega, dim=0)
    return sx.smoothed_max(value, omega)


@app.cell
def _():
    torch.manual_seed(1)
    unary = torch.randn(6, 3, dtype=torch.float64)
    transition = torch.randn(3, 3, dtype=torch.float64)
    smoothings = {"Hard": sx.Hard(), "Shannon": sx.Shannon(), "Gini": sx.Gini()}
    for _name, _omega in smoothings.items():
        _chain = sx.LinearChain(unary, transition, smoothing=_omega)
        _leaf = unary.clone().requires_grad_()
        _value = viterbi(_leaf, transition, _omega)
        assert torch.isclose(_value, _chain.log_partition())
        # autograd through the recursion gives what the structure calls marginals
        assert torch.allclose(torch.autograd.grad(_value, _leaf)[0], _chain.marginals())
        print(f"{_name:8s} {_value.item():.4f}")
    return smoothings, transition, unary


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    `sx.LinearChain` does the same recursion in compiled code, with a backward pass of its own. The
    smoothing is an argument.

    ## What the gradient is

    At every node the maximum over incoming edges has an argmax: under Hard a backpointer, under a
    smoothing a *distribution* over backpointers. Walk from the end to the start, drawing each step
    from it. The probability to pass through a node is the gradient of $V$ in its score. So the
    gradient is an expected path:

    - Hard: the best path (if there is one);
    - Shannon: the mean of the Gibbs distribution, the marginals of tutorial 3;
    - Gini: a sparse mean, where most paths have probability exactly 0.
    """)
    return


@app.cell
def _():
    gamma = mo.ui.slider(0.1, 3.0, 0.1, value=1.0, label="γ", show_value=True)
    gamma
    return (gamma,)


@app.cell
def _(gamma, transition, unary):
    hard, soft, sparse = (
        sx.LinearChain(unary, transition, smoothing=omega)
        for omega in (sx.Hard(), sx.Shannon(gamma.value), sx.Gini(gamma.value))
    )
    _times = [f"t{i}" for i in range(6)]
    beside([("Hard", hard.draw(_times)), (f"Shannon, γ = {gamma.value}", soft.draw(_times)),
            (f"Gini, γ = {gamma.value}", sparse.draw(_times))])  # fmt: skip
    return hard, soft, sparse


@app.cell
def _(hard, soft, sparse, transition, unary):
    assert set(hard.marginals().unique().tolist()) == {0.0, 1.0}
    assert (soft.marginals() > 0).all()
    for _chain in (soft, sparse):
        assert torch.allclose(_chain.marginals().sum(-1), torch.ones(6, dtype=torch.float64))
    _zeros = int((sx.LinearChain(unary, transition, smoothing=sx.Gini(1.0)).marginals() == 0).sum())
    print("with γ = 1, Gini gives", _zeros, "of 18 tags a probability of exactly 0")
    assert _zeros > 0
    _cold = sx.LinearChain(unary, transition, smoothing=sx.Shannon(0.01))
    assert torch.allclose(_cold.marginals(), hard.marginals(), atol=1e-3)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## How far from the maximum?

    $\mathrm{DP}_\Omega$ is convex in the scores, and lies above the true maximum by at most the
    number of maxima on a path times the most that one of them can add (their proposition 2):

    $$0 \le \mathrm{DP}_\Omega(\theta) - \mathrm{DP}(\theta) \le n\,\gamma\,h, \qquad
    h = \log c \ \text{(Shannon)}, \quad \tfrac12\bigl(1 - \tfrac1c\bigr) \ \text{(Gini)}.$$
    """)
    return


@app.cell
def _(hard, transition, unary):
    _gammas = torch.linspace(0.02, 2.0, 60)
    gaps = {"Shannon": [], "Gini": []}
    for _g in _gammas.tolist():
        for _name, _omega, _h in (("Shannon", sx.Shannon(_g), math.log(3)),
                                  ("Gini", sx.Gini(_g), (1 - 1 / 3) / 2)):  # fmt: skip
            _value = sx.LinearChain(unary, transition, smoothing=_omega).log_partition()
            gaps[_name].append((_value - hard.log_partition()).item())
            assert -1e-9 <= gaps[_name][-1] <= 6 * _g * _h + 1e-9
    lines_svg(_gammas, gaps, "γ", "DPΩ − DP")
    return


@app.cell
def _(smoothings, transition, unary):
    # convex: on the way between two scores the value lies below the straight line
    _other = torch.randn(6, 3, dtype=torch.float64)
    for _omega in smoothings.values():
        _ends = [viterbi(u, transition, _omega) for u in (unary, _other)]
        for _t in (0.2, 0.5, 0.8):
            _between = viterbi(_t * unary + (1 - _t) * _other, transition, _omega)
            assert _between <= _t * _ends[0] + (1 - _t) * _ends[1] + 1e-9
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Only Shannon does not care how the graph is drawn

    Log-sum-exp of log-sum-exps is a log-sum-exp, so under Shannon the recursion computes
    $\max_\Omega$ over *all* paths at once. It is the only $\Omega$ for which that is true (their
    proposition 1). Under Gini the local maxima are smoothed one by one, and the answer is not
    sparsemax over paths. That is no mistake, but it is another distribution, and a graph with other
    nodes would give another one. SparseMAP, in tutorial 5, is the one that does not depend on the
    graph.
    """)
    return


@app.cell
def _(transition, unary):
    for _omega, _same in ((sx.Shannon(), True), (sx.Gini(), False)):
        _chain = sx.LinearChain(unary, transition, smoothing=_omega)
        _paths = _chain.score(_chain.enumerate_support())  # 3⁶ of them
        _all = sx.smoothed_max(_paths, _omega)
        print(f"{_omega}: recursion {_chain.log_partition():.4f}, over all paths {_all:.4f}")
        assert torch.isclose(_chain.log_partition(), _all).item() is _same
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Gradients of gradients

    A layer that outputs the expected path $\mu = \nabla \mathrm{DP}_\Omega(\theta)$ is trained by
    $\nabla^2 \mathrm{DP}_\Omega \cdot g$. That product costs two more passes over the graph and
    never makes the matrix. So `marginals()` is a layer like any other.
    """)
    return


@app.cell
def _(transition, unary):
    _wanted = torch.zeros(6, 3, dtype=torch.float64)
    _wanted[:, 0] = 1.0  # a path that stays at tag 0
    losses, leaf = [], unary.clone().requires_grad_()
    for _ in range(60):
        _loss = (sx.LinearChain(leaf, transition).marginals() - _wanted).square().sum()
        (_g,) = torch.autograd.grad(_loss, leaf)
        leaf = (leaf - 1.0 * _g).detach().requires_grad_()
        losses.append(_loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert torch.autograd.gradcheck(lambda u: sx.LinearChain(u, transition).marginals(), leaf)
    lines_svg(range(60), {"‖μ − wanted‖²": losses}, "step")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Time warping

    The same idea on a grid. Dynamic time warping aligns two series by a path of moves →, ↓ and ↘,
    at the least sum of squared distances (Sakoe & Chiba 1978). Smoothed it is soft-DTW (Cuturi &
    Blondel 2017). Scores are negative costs.
    """)
    return


@app.cell
def _():
    times = torch.linspace(0, 6, 9, dtype=torch.float64)
    first, second = torch.sin(times), torch.sin(times - 1.0)
    costs = (first[:, None] - second).square()
    grids = {
        name: sx.Alignment(-4 * costs, smoothing=omega)
        for name, omega in
        {"Hard": sx.Hard(), "Shannon": sx.Shannon(), "Gini": sx.Gini()}.items()
    }  # fmt: skip
    cells = {name: int((grid.marginals() > 0).sum()) for name, grid in grids.items()}
    print("cells that are used:", cells)
    assert cells["Hard"] < cells["Gini"] < cells["Shannon"] == 81
    beside(((name, grid.draw()) for name, grid in grids.items()), widest=700)
    return first, second


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Soft-DTW is not a distance: under Shannon it counts many paths, so that it is negative for equal
    series, and its minimum in $x$ is not at $y$. The divergence
    $D(x,y) - \frac12 D(x,x) - \frac12 D(y,y)$ mends both (Blondel, Mensch & Vert 2021).
    """)
    return


@app.cell
def _(first, second):
    _x, _y = first[:, None], second[:, None]
    soft_dtw, divergence = sx.losses.SoftDTW(), sx.losses.SoftDTW(divergence=True)
    print(f"soft-DTW(x, x) = {soft_dtw(_x, _x):.3f}, divergence(x, x) = {divergence(_x, _x):.3f}")
    assert soft_dtw(_x, _x) < 0 and divergence(_x, _x).abs() < 1e-9 and divergence(_x, _y) > 0
    _leaf = _x.clone().requires_grad_()
    (_g,) = torch.autograd.grad(soft_dtw(_leaf, _x), _leaf)
    assert _g.norm() > 0.1  # x itself is no minimum of soft-DTW(·, x)
    (_g,) = torch.autograd.grad(divergence(_leaf, _x), _leaf)
    assert _g.norm() < 1e-9  # and is one of the divergence
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    A gradient in the series means that series can be learned. The mean of two shifted bumps has two
    bumps; their barycenter under soft-DTW has one.
    """)
    return


@app.cell
def _():
    _t = torch.linspace(0, 1, 40, dtype=torch.float64)
    early, late = (torch.exp(-((_t - c) ** 2) / 0.005) for c in (0.3, 0.7))
    mean = (early + late) / 2
    middle = sx.barycenter([early[:, None], late[:, None]], loss=sx.losses.SoftDTW(gamma=0.01),
                           init=early[:, None])[:, 0]  # fmt: skip
    assert middle.max() > 0.9 > 0.6 > mean.max()
    lines_svg(_t, {"early": early, "late": late, "mean": mean, "barycenter": middle}, "time")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The objective is not convex: where the bump stands depends on where the search begins, here at
    the early one.

    **To remember.** Replace max by $\max_\Omega$ and a dynamic program becomes a layer: its value
    is smooth and convex, its gradient an expected structure, its Hessian-vector product as cheap
    as two more passes. $\gamma$ trades the gap to the true maximum for smoothness.
    """)
    return


if __name__ == "__main__":
    app.run()
