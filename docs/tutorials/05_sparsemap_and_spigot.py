import marimo

__generated_with = "0.25.2"
app = marimo.App()

with app.setup:
    import marimo as mo
    import torch
    from torch import Tensor, nn

    import structmax as sx
    from structmax.draw import lines_svg, polytope_svg


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 5. SparseMAP and SPIGOT

    Structures are 0/1 vectors, so they are points. Their convex hull is the *marginal polytope*

    $$\mathcal M = \operatorname{conv} Z = \Bigl\{\textstyle\sum_z p(z)\, z\Bigr\},$$

    the set of all mean structures (Wainwright & Jordan 2008). This page is about its geometry. The
    example is a dependency tree of three words: 9 trees, each a point in a space of 9 arcs.
    """)
    return


@app.cell
def _():
    scale = mo.ui.slider(0.25, 3.0, 0.25, value=1.0, label="times the scores", show_value=True)
    scale
    return (scale,)


@app.cell
def _(scale):
    arcs = torch.tensor([  # [head, word]; head 0 is the root
        [0.0, 0.2, 1.45, 0.1],
        [0.0, 0.0, 0.65, 0.3],
        [0.0, 1.5, 0.0, 1.2],
        [0.0, 0.95, 0.4, 0.0],
    ], dtype=torch.float64)  # fmt: skip
    tree = sx.DependencyTree(scale.value * arcs)
    polytope_svg(tree)
    return arcs, tree


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The dots are trees, written as the head of each word. The picture is a shadow: the polytope has
    more than two dimensions, so some of the vertices look as if they were inside. Three answers:

    - `argmax`: the vertex that lies furthest in the direction $\theta$;
    - `marginals`: the mean of the Gibbs distribution, which is always strictly inside;
    - `sparsemap`: between the two, often on an edge or a face.

    ## SparseMAP

    Niculae, Martins, Blondel & Cardie (2018) do to a polytope what sparsemax does to the simplex:

    $$\mu^\star(\theta) = \arg\max_{\mu\in\mathcal M}\ \langle\theta,\mu\rangle -
    \tfrac12\lVert\mu\rVert^2 = \operatorname{Proj}_{\mathcal M}(\theta).$$

    A projection onto a convex set is known by its angles: no vertex lies on the side of $\theta$,
    $\langle \theta - \mu^\star, z - \mu^\star\rangle \le 0$ for all $z$. And $\mu^\star$ is a mean
    of few structures, where Gibbs gives some probability to all of them.
    """)
    return


@app.cell
def _(arcs):
    one = sx.DependencyTree(arcs)
    _found, _every = one.sparsemap(), one.enumerate_support()
    _angles = ((arcs - _found.marginals) * (_every - _found.marginals)).sum((-2, -1))
    assert len(_every) == 9 and (_angles < 1e-7).all()
    _mean = torch.einsum("k,khm->hm", _found.probs, _found.structures)
    assert torch.allclose(_mean, _found.marginals, atol=1e-7)
    print(f"SparseMAP keeps {int(_found.num_active)} of {len(_every)} trees; Gibbs all of them, "
          f"the least with {one.log_prob(_every).exp().min():.3f}")  # fmt: skip
    assert _found.num_active < 9
    one.draw(["a", "b", "c"], "sparsemap")
    return (one,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## An argmax is all it takes

    The penalty is quadratic, so its slope at $\mu$ is $\theta - \mu$, and the best vertex in that
    direction is an argmax. The Frank-Wolfe algorithm is a loop around it:
    """)
    return


@app.function
def frank_wolfe(scores: Tensor, steps: int) -> list[Tensor]:
    """Points that approach SparseMAP, by calls of argmax alone."""
    mean = sx.DependencyTree(scores).argmax()
    points = [mean]
    for t in range(1, steps):
        vertex = sx.DependencyTree(scores - mean).argmax()
        mean = mean + 2 / (t + 2) * (vertex - mean)
        points.append(mean)
    return points


@app.cell
def _(arcs, one):
    _goal = one.sparsemap().marginals
    far = [(_point - _goal).norm().item() for _point in frank_wolfe(arcs, 200)]
    assert far[-1] < 0.05 < far[0]
    lines_svg(range(1, 201), {"distance to SparseMAP": far}, "calls of argmax", log=True)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    That is slow at the end. The library uses the active-set method, which ends after finitely many
    calls, and gives its duality gap. Since nothing but an argmax is needed, SparseMAP also works
    where marginals are hard. The marginals of a matching are permanents (#P-hard), its argmax is
    the Hungarian algorithm.
    """)
    return


@app.cell
def _():
    torch.manual_seed(0)
    large = sx.Assignment(torch.randn(30, 30, dtype=torch.float64))
    try:
        large.marginals()
    except sx.IntractableError as _error:
        print("marginals:", type(_error).__name__)
    else:
        raise AssertionError("these are intractable")
    matchings = large.sparsemap()
    print(f"sparsemap: {int(matchings.num_active)} matchings, gap {matchings.gap:.1e}")
    _rows, _columns = matchings.marginals.sum(-1), matchings.marginals.sum(-2)
    assert torch.allclose(_rows, torch.ones(30).double()) and torch.allclose(_columns, _rows)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Its gradient

    While the active structures stay the same, $\mu^\star$ is linear in $\theta$: it moves on a face
    of the polytope. So it is differentiable almost everywhere, and the gradient is cheap. Where the
    argmax has all the mass, the face is a vertex and the gradient is zero: with scores far apart
    SparseMAP is as flat as argmax.
    """)
    return


@app.cell
def _(arcs):
    assert torch.autograd.gradcheck(
        lambda s: sx.DependencyTree(s).sparsemap().marginals, arcs.clone().requires_grad_()
    )
    _apart = (20 * arcs).requires_grad_()
    _certain = sx.DependencyTree(_apart).sparsemap()
    assert _certain.num_active == 1
    (_g,) = torch.autograd.grad(_certain.marginals[0, 2], _apart)
    assert (_g == 0).all()
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## SPIGOT

    Now the forward pass shall use a *single* tree, $\hat z = \operatorname{argmax}$, and the
    backward pass has $g = \partial L/\partial \hat z$. Straight-through takes $g$ for the gradient
    in $\theta$, as if $\hat z$ could move to $\hat z - \eta g$. That point is no mean of trees: the
    dashed arrow leaves the polytope. Peng, Thomson & Smith (2018) project it back (the solid one),

    $$\tilde\mu = \operatorname{Proj}_{\mathcal M}(\hat z - \eta g), \qquad
    \nabla_\theta L := \hat z - \tilde\mu .$$

    The projection is SparseMAP at the scores $\hat z - \eta g$.
    """)
    return


@app.cell
def _():
    step = mo.ui.slider(0.25, 2.0, 0.25, value=1.0, label="η", show_value=True)
    step
    return (step,)


@app.cell
def _(step, tree):
    arc_costs = torch.zeros(4, 4, dtype=torch.float64)
    arc_costs[0, 2], arc_costs[0, 3], arc_costs[3, 1] = 1.0, -0.5, -0.3
    polytope_svg(tree, arc_costs, step=step.value)
    return (arc_costs,)


@app.cell
def _(arc_costs, arcs):
    _leaf = arcs.clone().requires_grad_()
    _z = sx.estimators.SPIGOT(step=1.0)(sx.DependencyTree(_leaf))
    (_g,) = torch.autograd.grad((_z * arc_costs).sum(), _leaf)
    _outside = _z.detach() - arc_costs
    _target = sx.project(sx.DependencyTree(arcs), _outside)
    assert torch.allclose(_g, _z.detach() - _target, atol=1e-7)
    # the target is a mean of trees: no arc below 0, one head for each word; z − ηg is not
    assert (_target >= -1e-9).all() and torch.allclose(_target.sum(0)[1:], torch.ones(3).double())
    assert (_outside < 0).any() or not torch.allclose(_outside.sum(0)[1:], torch.ones(3).double())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Mihaylova, Niculae & Martins (2020) read it so: the cost *pulls back* a target $\tilde\mu$ from
    $\hat z$, and $\theta$ takes a perceptron step towards it, as if somebody had labelled it. That
    is what $\hat z - \tilde\mu$ is, the gradient of $\langle\theta, \hat z - \tilde\mu\rangle$. It
    is biased: $L(\operatorname{argmax})$ has no gradient that it could estimate.

    ## Learn to sort

    A latent matching that nobody labels. The model sees four numbers $v$ and shall output them in
    order. Score for number $j$ at place $i$: $a_i v_j$, with four parameters $a$. Sorting is the
    argmax if and only if $a$ increases. The loss is the squared error of the output $z v$.
    """)
    return


@app.function
def train(estimator: sx.estimators.Estimator, steps: int = 80) -> tuple[Tensor, float]:
    """The parameters a, and how often four numbers are sorted rightly."""
    torch.manual_seed(0)
    a = nn.Parameter(0.1 * torch.randn(4))
    optimizer = torch.optim.Adam([a], lr=0.05)
    for _ in range(steps):
        v = torch.randn(32, 4)
        wanted = v.sort(-1).values
        places = sx.Assignment(a[:, None] * v[:, None])  # (32, place, number)
        losses = estimator.loss(
            places, lambda z, v=v, y=wanted: (torch.einsum("bij,bj->bi", z, v) - y).square().sum(-1)
        )
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    v = torch.randn(500, 4)
    z = sx.Assignment(a.detach()[:, None] * v[:, None]).argmax()
    right = (torch.einsum("bij,bj->bi", z, v) == v.sort(-1).values).all(-1)
    return a.detach(), float(right.float().mean())


@app.cell
def _():
    for _name, _estimator in {
        "SPIGOT": sx.estimators.SPIGOT(step=0.1),
        "SparseMAP": sx.estimators.SparseMAP(),
        "straight-through": sx.estimators.StraightThrough(),
    }.items():
        _a, _right = train(_estimator)
        print(f"{_name:17s} a = {_a.numpy().round(2)}, {_right:.0%} sorted")
        assert _right > 0.95 and (_a.diff() > 0).all()
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    All three find it: the toy is kind. What differs is what the rest of the network sees. SPIGOT
    and straight-through pass a single matching on; SparseMAP passes a mean of a few, and its
    gradient is exact for the loss of that mean.

    **To remember.** Argmax is a vertex, marginals are inside, SparseMAP is on a face. SparseMAP and
    SPIGOT ask for nothing but an argmax. The first is an exact relaxation, the second a hard
    decision with a biased but legal step.
    """)
    return


if __name__ == "__main__":
    app.run()
