import marimo

__generated_with = "0.25.2"
app = marimo.App()

with app.setup:
    import math
    from itertools import pairwise

    import marimo as mo
    import torch
    from torch import Tensor, nn

    import structmax as sx
    from structmax.draw import bars_svg, beside, heat_svg, lines_svg


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 6. Perturb-and-MAP and I-MLE

    Suppose that the only thing you can do with a structure is to find the best one: a solver, an
    argmax, MAP. Then noise turns it into a distribution. Add noise $\varepsilon$ to the scores, and
    look at

    $$z = \operatorname{argmax}(\theta + \varepsilon).$$

    ## The Gumbel trick

    For a single choice, with independent Gumbel noise, this is an exact draw from
    $\operatorname{softmax}(\theta)$ (Gumbel 1954), and the mean of the maximum is the log-partition
    function up to Euler's constant, $\mathbb E[\max_k (\theta_k + \varepsilon_k)] = A(\theta) +
    0.577$.
    """)
    return


@app.cell
def _():
    scores = torch.tensor([1.0, 0.5, 0.2, -0.3], dtype=torch.float64)
    torch.manual_seed(0)
    noise = -torch.empty(50_000, 4, dtype=torch.float64).exponential_().log()  # Gumbel
    frequencies = sx.Choice(scores + noise).argmax().mean(0)
    assert (frequencies - sx.softmax(scores)).abs().max() < 0.01
    _best = (scores + noise).amax(-1).mean()
    assert abs(_best - (scores.logsumexp(-1) + 0.5772)) < 0.02
    _names = ["a", "b", "c", "d"]
    beside([("argmax with noise", bars_svg(_names, frequencies)),
            ("softmax", bars_svg(_names, sx.softmax(scores)))])  # fmt: skip
    return (scores,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Structures: noise on parts

    For structures the trick would need independent noise for every *structure*, and there are too
    many. Noise on the *parts* is cheap (Papandreou & Yuille 2011), but structures that share parts
    share noise. The result is a distribution of its own, and not that of Gibbs. For subsets of two
    out of four:
    """)
    return


@app.cell
def _(scores):
    pairs = sx.KSubset(scores, 2)
    _every = pairs.enumerate_support()  # 6 subsets
    torch.manual_seed(0)
    _draws = sx.estimators.PerturbAndMAP(samples=50_000)(pairs)
    perturbed = (_draws[:, None] == _every).all(-1).double().mean(0)
    gibbs = pairs.log_prob(_every).exp()
    distance = (perturbed - gibbs).abs().sum().item() / 2  # total variation
    print(f"distance from Gibbs {distance:.3f}; the error of 50,000 draws is below 0.01")
    assert 0.02 < distance < 0.2
    _names = ["".join("abcd"[i] for i in pairs.decode(z)) for z in _every]
    beside([("perturb-and-MAP", bars_svg(_names, perturbed)), ("Gibbs", bars_svg(_names, gibbs))])
    return (pairs,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Close, and measurably different. Is that bad? Not as such: it is a model like another. But what
    is trained under it should be used under it, and its probabilities are not those of `log_prob`.

    ## A smooth argmax

    The mean $\mathbb E[\operatorname{argmax}(\theta + \sigma\varepsilon)]$ is smooth in $\theta$,
    and its derivative needs no derivative of the solver (Berthet et al. 2020): for noise with the
    density $e^{-\nu(\varepsilon)}$ it is $\mathbb E[z\, \nabla\nu(\varepsilon)^\top]/\sigma$. That
    is `Perturbed`. On a choice with Gumbel noise the mean is the softmax, so we know what to
    expect.
    """)
    return


@app.cell
def _(scores):
    _mean = sx.estimators.Perturbed(samples=50_000, noise="gumbel",
                                    generator=torch.Generator().manual_seed(0))  # fmt: skip
    _leaf = scores.clone().requires_grad_()
    _z = _mean(sx.Choice(_leaf))
    (_row,) = torch.autograd.grad(_z[0], _leaf)
    _exact = torch.func.jacrev(sx.softmax)(scores)[0]
    print("by noise:", _row.numpy().round(3), "exactly:", _exact.numpy().round(3))
    assert (_row - _exact).abs().max() < 0.03
    return


@app.cell
def _():
    sigma = mo.ui.slider(0.1, 2.0, 0.1, value=0.5, label="σ", show_value=True)
    sigma
    return (sigma,)


@app.cell
def _(sigma):
    _t = torch.linspace(-3, 3, 61)
    _options = torch.stack([_t, torch.zeros_like(_t)], -1)
    torch.manual_seed(0)
    _curves = {}
    for _samples in (1, 10, 1000):
        _smooth = sx.estimators.Perturbed(sigma.value, _samples)
        _curves[f"{_samples} draws"] = _smooth(sx.Choice(_options))[:, 0]
    _exact = 0.5 * (1 + torch.erf(_t / sigma.value / 2))  # a difference of two normal variables
    assert (_curves["1000 draws"] - _exact).abs().max() < 0.08
    lines_svg(_t, _curves, "t", "first of (t, 0)")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## I-MLE

    `Perturbed` gives a mean of structures. Implicit maximum likelihood (Niepert, Minervini &
    Franceschi 2021) gives single ones, and a gradient from two calls of the solver *at the same
    noise*. With $g = \partial L/\partial z$ at $z = \operatorname{MAP}(\theta + \varepsilon)$,

    $$\nabla_\theta L := \tfrac1\lambda\bigl[\operatorname{MAP}(\theta + \varepsilon) -
    \operatorname{MAP}(\theta - \lambda g + \varepsilon)\bigr]:$$

    where would the solution go if the scores moved against the cost? Without noise it is the
    `BlackBox` gradient (Vlastelica et al. 2020).
    """)
    return


@app.cell
def _(pairs, scores):
    _costs = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    _leaf = scores.clone().requires_grad_()
    _imle = sx.estimators.IMLE(lam=2.0, generator=torch.Generator().manual_seed(5))
    _z = _imle(sx.KSubset(_leaf, 2))
    (_g,) = torch.autograd.grad((_z * _costs).sum(), _leaf)
    _e = sx.estimators.noise.draw("gumbel", pairs, generator=torch.Generator().manual_seed(5))
    _by_hand = (sx.KSubset(scores + _e, 2).argmax()
                - sx.KSubset(scores - 2.0 * _costs + _e, 2).argmax()) / 2.0  # fmt: skip
    assert torch.equal(_g, _by_hand)
    print("drawn:", pairs.decode(_z), "gradient:", _g.tolist())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## λ: bias against variance

    A small λ rarely changes the solution. When it does, the gradient is $1/\lambda$: almost
    unbiased, and noisy. A large λ always finds the cheapest structure: stable, and biased. On a
    choice with a linear cost the exact answer is known, and both can be measured.
    """)
    return


@app.function
def measure(estimator: sx.estimators.Estimator, scores: Tensor) -> tuple[float, ...]:
    """Bias, its standard error, deviation, relative to ∇E[L], and cosine; costs 0, 1, 2, 4."""
    costs = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=scores.dtype)
    count = 20_000
    leaf = scores.repeat(count, 1).requires_grad_()
    estimator.loss(sx.Choice(leaf), lambda z: z @ costs).sum().backward()
    p = sx.softmax(scores)
    exact = p * (costs - p @ costs)
    deviation = leaf.grad.var(0).sum().sqrt() / exact.norm()
    mean = leaf.grad.mean(0)
    bias, cosine = (mean - exact).norm() / exact.norm(), torch.cosine_similarity(mean, exact, 0)
    return float(bias), float(deviation) / math.sqrt(count), float(deviation), float(cosine)


@app.cell
def _(scores):
    lams = [0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
    torch.manual_seed(0)
    found = [measure(sx.estimators.IMLE(lam=lam), scores) for lam in lams]
    for _lam, (_bias, _error, _deviation, _cosine) in zip(lams, found):
        print(f"λ = {_lam:5.2f}  bias {_bias:.2f} ± {_error:.2f}  deviation {_deviation:6.2f}  "
              f"cosine {_cosine:.3f}")  # fmt: skip
    assert found[0][0] < 4 * found[0][1] + 0.05  # no bias to be seen
    assert found[-1][0] > 0.8 and found[-1][3] > 0.7  # too short, in about the right direction
    assert all(a[2] > b[2] for a, b in pairwise(found))  # the deviation falls with λ
    lines_svg(
        [math.log10(lam) for lam in lams],
        {"bias": [f[0] for f in found], "standard deviation": [f[2] for f in found]},
        "log₁₀ λ",
        log=True,
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Much of the bias of a large λ is in the length, which an optimiser like Adam does not mind; the
    cosine says what is left. `IMLE(lam="adaptive")` looks for a λ at which solutions just change.

    ## What all of these cannot see

    I-MLE, like `BlackBox`, SPIGOT and straight-through, knows the cost by its slope $g$ at one
    structure. Take two costs that agree on every structure, and differ in between: the linear one,
    and one with slope zero at all corners. $\mathbb E[L(z)]$ is the same function for both.
    """)
    return


@app.cell
def _(scores):
    _costs = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)

    def linear(z: Tensor) -> Tensor:
        return z @ _costs

    def flat_at_corners(z: Tensor) -> Tensor:
        return (3 * z**2 - 2 * z**3) @ _costs

    _corners = torch.eye(4, dtype=torch.float64)
    assert torch.equal(linear(_corners), flat_at_corners(_corners))

    def gradient(estimator: sx.estimators.Estimator, cost) -> Tensor:
        leaf = scores.repeat(20_000, 1).requires_grad_()
        estimator.loss(sx.Choice(leaf), cost).sum().backward()
        return leaf.grad.mean(0)

    torch.manual_seed(0)
    for _estimator in (sx.estimators.IMLE(lam=0.3), sx.estimators.Reinforce()):
        _both = [gradient(_estimator, cost) for cost in (linear, flat_at_corners)]
        print(f"{type(_estimator).__name__:10s}", *[g.numpy().round(2) for g in _both])
        if isinstance(_estimator, sx.estimators.IMLE):
            assert _both[0].norm() > 0.1 and (_both[1] == 0).all()
        else:
            assert (_both[0] - _both[1]).abs().max() < 0.1  # it never asks for a slope
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Learn the terrain from paths

    A map has three kinds of terrain, and crossing them costs $w_1, w_2, w_3$, unknown. We see maps
    and the best paths on them. The model guesses $w$, finds its own best path, and is told how many
    cells differ. This goes through a shortest-path solver.
    """)
    return


@app.cell
def _():
    true_costs = torch.tensor([0.3, 1.0, 2.5])
    torch.manual_seed(0)
    raw = nn.Parameter(torch.zeros(3))
    imle, optimizer = sx.estimators.IMLE(lam=1.0), torch.optim.Adam([raw], lr=0.1)
    differing = []
    for _ in range(80):
        _maps = torch.randint(3, (24, 6, 6))
        _seen = sx.GridPath(-true_costs[_maps]).argmax()
        _costs = nn.functional.softplus(raw)[_maps]
        _paths = sx.GridPath(-_costs, smoothing=sx.Shannon(0.2))  # noise is as wide as γ

        def hamming(z: Tensor, seen: Tensor = _seen) -> Tensor:
            return (z * (1 - seen) + (1 - z) * seen).sum((-2, -1))

        _loss = imle.loss(_paths, hamming).sum()
        optimizer.zero_grad()
        _loss.backward()
        optimizer.step()
        differing.append(hamming(_paths.argmax()).mean().item())
    learned = nn.functional.softplus(raw).detach()
    print("ratios of costs, true:", (true_costs / true_costs[1]).numpy().round(2),
          "learned:", (learned / learned[1]).numpy().round(2))  # fmt: skip
    assert (learned.diff() > 0).all() and sum(differing[-10:]) < 0.3 * sum(differing[:1]) * 10
    lines_svg(range(80), {"cells that differ": differing}, "step")
    return (learned, true_costs)


@app.cell
def _(learned, true_costs):
    torch.manual_seed(7)
    _maps = torch.randint(3, (500, 6, 6))
    _true, _own = (sx.GridPath(-costs[_maps]) for costs in (true_costs, learned))
    right = (_true.score(_own.argmax()) > _true.score(_true.argmax()) - 1e-4).float().mean().item()
    print(f"on {right:.0%} of 500 new maps, the path is a best one")
    assert right > 0.6
    _pictures = []
    for _name, _path in (("true", _true[0].argmax()), ("learned", _own[0].argmax())):
        _cells = [(int(i), int(j)) for i, j in _path.nonzero()]
        _pictures.append((_name, heat_svg(_maps[0] / 2, path=_cells)))
    beside(_pictures)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **To remember.** Noise and a solver make a distribution; for structures it is not Gibbs.
    `Perturbed` differentiates its mean without bias. I-MLE gives single structures and a
    gradient from one more call of the solver, biased by λ and by seeing only slopes.
    """)
    return


if __name__ == "__main__":
    app.run()
