import marimo

__generated_with = "0.25.2"
app = marimo.App()

with app.setup:
    import marimo as mo
    import torch
    from torch import Tensor

    import structmax as sx
    from structmax.draw import bars_svg, beside, heat_svg, lines_svg, polytope_svg, simplex_svg


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 2. Maps on the simplex

    A map from scores to probabilities sits at the end of most networks, and inside every attention
    layer. Softmax is one of many. All of them are one idea: *argmax, regularised*,

    $$\operatorname{argmax}_\Omega(s) = \arg\max_{p \in \triangle}\ \langle p, s\rangle - \Omega(p),
    \qquad \textstyle\max_\Omega(s) = \text{the maximum itself},$$

    where $\triangle$ is the set of probability vectors and $\Omega$ is convex (Niculae & Blondel
    2017; Blondel, Martins & Niculae 2020). Without $\Omega$ the best $p$ is a corner, the argmax.
    With $\Omega$ one pays for being at a corner.

    | $\Omega(p)$ | map | from |
    |---|---|---|
    | $\sum p \log p$ (Shannon) | softmax | Boltzmann, Gibbs |
    | $\tfrac12(\lVert p\rVert^2 - 1)$ (Gini) | sparsemax | Martins & Astudillo 2016 |
    | $\tfrac{1}{\alpha(\alpha-1)} \sum (p^\alpha - p)$ (Tsallis) | α-entmax | Peters et al. 2019 |

    Two options with the scores $(t, 0)$:
    """)
    return


@app.cell
def _():
    t = torch.linspace(-3, 3, 121)
    pairs = torch.stack([t, torch.zeros_like(t)], -1)  # (121, 2)
    assert torch.allclose(sx.softmax(pairs)[:, 0], torch.sigmoid(t))
    assert torch.allclose(sx.sparsemax(pairs)[:, 0], ((t + 1) / 2).clamp(0, 1), atol=1e-6)
    lines_svg(
        t,
        {
            "softmax": sx.softmax(pairs)[:, 0],
            "entmax, α = 1.5": sx.entmax(pairs, 1.5)[:, 0],
            "sparsemax": sx.sparsemax(pairs)[:, 0],
        },
        "t",
        "p₁",
    )
    return (pairs,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Softmax never reaches 0. Sparsemax does, at a difference of 1, and so does every entmax with
    $\alpha > 1$, at $1/(\alpha - 1)$. Move α from 1, which is softmax, to 2, which is sparsemax,
    and beyond:
    """)
    return


@app.cell
def _():
    alpha = mo.ui.slider(1.0, 4.0, 0.25, value=1.5, label="α", show_value=True)
    alpha
    return (alpha,)


@app.cell
def _(alpha):
    words = ["the", "cat", "sat", "on", "a", "mat"]
    scores = torch.tensor([0.1, 1.6, 1.2, -0.5, 0.0, 1.0])
    p = sx.entmax(scores, alpha.value)
    print(int((p > 0).sum()), "of 6 words have some weight")
    bars_svg(words, p)
    return scores, words


@app.cell
def _(scores):
    assert torch.allclose(sx.entmax(scores, 1.0), sx.softmax(scores))
    assert torch.allclose(sx.entmax(scores, 2.0), sx.sparsemax(scores))
    support = [int((sx.entmax(scores, a) > 0).sum()) for a in (1.0, 1.5, 2.0, 4.0)]
    print("words with weight at α = 1, 1.5, 2, 4:", support)
    assert support == sorted(support, reverse=True)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Sparsemax is a projection

    With $\Omega = \frac12\lVert p\rVert^2$, maximising $\langle p, s\rangle - \Omega(p)$ is
    minimising $\frac12\lVert p - s\rVert^2$: sparsemax is the point of the simplex nearest to $s$.
    It subtracts a threshold and cuts at zero, $p_i = \max(s_i - \tau, 0)$.
    """)
    return


@app.cell
def _(scores):
    _p = sx.sparsemax(scores)
    _others = torch.distributions.Dirichlet(torch.full((6,), 0.3)).sample((5000,))
    assert ((_others - scores).norm(dim=-1) >= (_p - scores).norm()).all()
    threshold = (scores - _p)[_p > 0]
    assert torch.allclose(threshold, threshold[0].expand_as(threshold), atol=1e-6)
    print("threshold τ =", round(threshold[0].item(), 3))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    In the picture the corners are the three options. The dotted curve is softmax at all
    temperatures: it leads from the middle (hot) to the argmax (cold) and only touches the border at
    its end. The diamond is sparsemax, which may lie on an edge: one option is out.
    """)
    return


@app.cell
def _():
    heat = mo.ui.slider(0.2, 3.0, 0.1, value=1.0, label="temperature", show_value=True)
    heat
    return (heat,)


@app.cell
def _(heat):
    _three = sx.Choice(torch.tensor([0.8, 0.4, -0.6]) / heat.value)
    # SparseMAP of a single choice is sparsemax
    assert torch.allclose(_three.sparsemap().marginals, sx.sparsemax(_three.scores), atol=1e-6)
    polytope_svg(_three)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Jacobians

    Where does a gradient go? With $S$ the options that have some weight,

    $$J_{\text{softmax}} = \operatorname{diag}(p) - p p^\top, \qquad
    J_{\text{sparsemax}} = \operatorname{diag}(1_S) - \tfrac{1}{|S|}\, 1_S 1_S^\top .$$

    Sparsemax passes nothing to options out of the support. That is what makes it sparse, and it is
    a risk: an option that is out gets no gradient, and comes back only if the others change.
    """)
    return


@app.cell
def _(scores):
    _p, _q = sx.softmax(scores), sx.sparsemax(scores)
    _in = (_q > 0).float()
    soft, sparse = (torch.func.jacrev(f)(scores) for f in (sx.softmax, sx.sparsemax))
    assert torch.allclose(soft, _p.diag() - _p.outer(_p), atol=1e-6)
    assert torch.allclose(sparse, _in.diag() - _in.outer(_in) / _in.sum(), atol=1e-6)
    assert (sparse[_q == 0] == 0).all() and (sparse[:, _q == 0] == 0).all()
    beside([("|J|, softmax", heat_svg(soft.abs())), ("|J|, sparsemax", heat_svg(sparse.abs()))])
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The map is a gradient

    By Danskin's theorem $\nabla \max_\Omega(s) = \operatorname{argmax}_\Omega(s)$. The smoothed
    maximum lies above the maximum, and not by much: with our $\Omega$, which is 0 at the corners,

    $$0 \;\le\; \textstyle\max_\Omega(s) - \max(s) \;\le\; -\min_p \Omega(p),$$

    which is $\log n$ for Shannon and $\frac12(1 - \frac1n)$ for Gini. Tutorial 4 puts these maxima
    into dynamic programs.
    """)
    return


@app.cell
def _(pairs, scores):
    for _omega, _map in ((sx.Shannon(), sx.softmax), (sx.Gini(), sx.sparsemax)):
        _gradient = torch.func.grad(lambda s, o=_omega: sx.smoothed_max(s, o))(scores)
        assert torch.allclose(_gradient, _map(scores), atol=1e-6)
    for _omega, _most in ((sx.Shannon(), torch.tensor(2.0).log()), (sx.Gini(), 0.25)):
        _gap = sx.smoothed_max(pairs, _omega) - pairs.amax(-1)
        assert (_gap >= -1e-6).all() and (_gap <= _most + 1e-6).all()
    lines_svg(
        pairs[:, 0],
        {
            "log-sum-exp": sx.smoothed_max(pairs, sx.Shannon()),
            "Gini": sx.smoothed_max(pairs, sx.Gini()),
            "max": pairs.amax(-1),
        },
        "t",
        "maxΩ(t, 0)",
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Temperature

    Multiplying $\Omega$ by $\gamma$ is dividing scores by $\gamma$:
    $\operatorname{argmax}_{\gamma\Omega}(s) = \operatorname{argmax}_\Omega(s/\gamma)$. Cold maps
    are nearly argmax, and have a gradient that is nearly zero, or steep. In the picture γ falls,
    and points go from the middle to a corner; click one to see it again.
    """)
    return


@app.cell
def _(scores):
    for _gamma in (0.1, 0.5, 2.0):
        _cold = torch.func.grad(lambda s, g=_gamma: sx.smoothed_max(s, sx.Shannon(g)))(scores)
        assert torch.allclose(_cold, sx.softmax(scores / _gamma), atol=1e-6)
    cold, hot = sx.softmax(scores / 0.05), sx.softmax(scores / 100)
    assert cold.max() > 0.99 and (hot - 1 / 6).abs().max() < 0.01
    _gammas = torch.logspace(1.0, -1.5, 60)[:, None]
    _three = torch.tensor([1.0, 0.6, 0.0]) / _gammas
    _falling = {"softmax": sx.softmax(_three), "entmax, α = 1.5": sx.entmax(_three, 1.5),
                "sparsemax": sx.sparsemax(_three)}  # fmt: skip
    simplex_svg(_falling)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Shapes

    $\Omega$ can ask for more than sparsity: equal weights for neighbours (fusedmax) or for
    clusters of options anywhere (oscarmax), at most so much for each (csparsemax), or several
    options at once, each at most one, that sum to $k$ (budgetmax).
    """)
    return


@app.cell
def _(scores, words):
    maps = {
        "sparsemax": sx.sparsemax(scores),
        "fusedmax": sx.fusedmax(scores, 0.3),
        "csparsemax, p ≤ 0.4": sx.csparsemax(scores, upper=0.4),
        "budgetmax, k = 2": sx.budgetmax(scores, 2.0),
    }
    assert (maps["fusedmax"][1:3] == maps["fusedmax"][1]).all()  # cat and sat are neighbours
    assert maps["csparsemax, p ≤ 0.4"].max() <= 0.4 + 1e-6
    assert torch.isclose(maps["budgetmax, k = 2"].sum(), torch.tensor(2.0))
    beside((name, bars_svg(words, q)) for name, q in maps.items())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A loss for each map

    The Fenchel-Young loss $L_\Omega(s, y) = \max_\Omega(s) + \Omega(y) - \langle s, y\rangle$ has
    the gradient $p - y$, whatever the map. For softmax it is cross-entropy. For sparsemax it is
    exactly 0 once the right score leads by 1, and training leaves that example alone.
    """)
    return


@app.function
def loss_and_gradient(scores: Tensor, y: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    leaf = scores.clone().requires_grad_()
    loss = sx.losses.entmax_loss(leaf, y, alpha)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@app.cell
def _(scores):
    _right = torch.tensor(1)
    _y = torch.nn.functional.one_hot(_right, 6)
    for _alpha in (1.0, 1.5, 2.0):
        _loss, _g = loss_and_gradient(scores, _right, _alpha)
        assert torch.allclose(_g, sx.entmax(scores, _alpha) - _y, atol=1e-6)
    _ahead = scores + 2 * _y  # now it leads by more than 1
    zero, not_zero = (loss_and_gradient(_ahead, _right, a)[0] for a in (2.0, 1.0))
    assert zero == 0 and not_zero > 0
    print(f"sparsemax loss {zero:.3f}, cross-entropy {not_zero:.3f}")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **To remember.** $\Omega$ decides what a map looks like; the map is the gradient of a smoothed
    maximum; sparse maps give exact zeros, in the weights and in the gradient. Attention with them
    is `sx.nn.Attention`.
    """)
    return


if __name__ == "__main__":
    app.run()
