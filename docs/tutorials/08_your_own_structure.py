import marimo

__generated_with = "0.25.2"
app = marimo.App()

with app.setup:
    import functools

    import marimo as mo
    import torch
    from torch import Tensor, nn

    import structmax as sx
    from structmax.draw import Drawing, beside, graph_svg, lines_svg
    from structmax.testing import check_structure


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 8. Write your own structure

    If you can write the dynamic program on paper, you can have all the rest: marginals, samples,
    the k best, SparseMAP, gradients of first and second order, every estimator and every loss. Here
    it is done for a structure that the library does not have.

    ## How RNA folds

    A strand of RNA folds back on itself: letters pair up, G with C, A with U, and now and then G
    with U. A fold is a set of pairs $(i, k)$ such that no letter is in two pairs and no two pairs
    cross. The oldest model gives each pair a score and adds them up (Nussinov & Jacobson 1980).
    With $V(i, j)$ the value of the letters $i \dots j-1$, the first letter is either alone or
    paired with some $k$, which cuts the strand into an inside and a rest:

    $$V(i, j) = \max\Bigl\{\, V(i+1, j),\ \ \max_{i + \ell < k < j}\ \theta_{ik} + V(i+1, k) +
    V(k+1, j) \Bigr\}, \qquad V(i, i) = 0.$$

    A strand cannot bend on the spot, so there are at least $\ell$ letters inside a pair.

    ## Draw it

    A *forest* is this recursion as a graph. A node for each $V(i, j)$. A hyperedge for each
    candidate of the maximum, from the nodes that it adds up (its tails: none, one or two) to the
    node that it derives. A *part* is an index into the scores.
    """)
    return


@app.function
@functools.cache
def nussinov(n: int, least: int) -> tuple[sx.Forest, list[int]]:
    """The forest of folds of n letters; pair (i, k) is part i·n + k. And the node of V(0, j)."""
    draw, node = sx.ForestBuilder(), {}
    for width in range(n + 1):
        for i in range(n + 1 - width):
            j = i + width
            node[i, j] = draw.node()
            if width:
                draw.edge(node[i, j], node[i + 1, j])  # i is alone
            for k in range(i + least + 1, j):  # i is paired with k
                draw.edge(node[i, j], node[i + 1, k], node[k + 1, j], part=i * n + k)
    return draw.build(num_parts=n * n), [node[0, j] for j in range(n + 1)]


@app.function
def fold(scores: Tensor, lengths: Tensor | None = None, least: int = 1, **options) -> sx.Hyperpath:
    """The folds of strands of n letters, by scores (*B, n, n) of pairs."""
    forest, goals = nussinov(scores.shape[-1], least)
    goal = None if lengths is None else torch.tensor(goals)[lengths]
    return sx.Hyperpath(forest, scores.flatten(-2), goal, **options)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    That is all of it. The forest holds no scores and no batch. It is made once for each size, and a
    shorter strand of the same batch takes another node as its goal. (In a library the two inner
    loops would be one call of `draw.edges` with arrays.)

    ## Check it

    Two things go wrong with a dynamic program on paper. It may miss structures, or count some
    twice. Non-crossing sets of pairs are counted by the Motzkin numbers, so with $\ell = 0$ we know
    how many there should be.
    """)
    return


@app.cell
def _():
    counts = [len(fold(torch.zeros(n, n), least=0).enumerate_support()) for n in range(1, 8)]
    print("folds of 1 to 7 letters:", counts)
    assert counts == [1, 2, 4, 9, 21, 51, 127]
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    `check_structure` does the rest: it compares every query with enumeration, tries −inf and huge
    scores, half precision, batches, copies, gradients of first and second order, `vmap` and
    `torch.compile`. It is given a function that makes a small random structure.
    """)
    return


@app.cell
def _():
    def small() -> sx.Hyperpath:
        return fold(torch.randn(5, 5, dtype=torch.float64), least=0)

    check_structure(small)
    print("the contract holds")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    It would have found the classical mistake. Here is another recursion, in many a lecture: either
    the ends are paired, or the strand is cut in two, $V(i, j) = \max_k V(i, k) + V(k, j)$. Its
    *maximum* is right. But a fold can be cut in several ways, so that sums count it several times,
    and marginals and samples are wrong.
    """)
    return


@app.cell
def _():
    def cut_anywhere(n: int) -> sx.Forest:
        draw, node = sx.ForestBuilder(), {}
        for width in range(n + 1):
            for i in range(n + 1 - width):
                j = i + width
                node[i, j] = draw.node()
                if width > 1:
                    draw.edge(node[i, j], node[i + 1, j - 1], part=i * n + j - 1)
                for k in range(i + 1, j):
                    draw.edge(node[i, j], node[i, k], node[k, j])
        return draw.build(num_parts=n * n)

    _scores = torch.randn(4, 4, dtype=torch.float64)
    wrong = sx.Hyperpath(cut_anywhere(4), _scores.flatten())
    _right = fold(_scores, least=0)
    assert torch.isclose(wrong.score(wrong.argmax()), _right.score(_right.argmax()))
    assert wrong.log_partition() > _right.log_partition() + 0.1
    try:
        check_structure(lambda: sx.Hyperpath(cut_anywhere(4), torch.randn(16).double()))
    except AssertionError as _error:
        print(_error)
    else:
        raise AssertionError("it is ambiguous")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Use it

    A strand, and scores by the kind of pair. What may not pair has the score −inf, which is exact:
    no probability, no gradient, no NaN. The temperature is the smoothing.
    """)
    return


@app.function
def pair_scores(strands: list[str], weights: Tensor) -> Tensor:
    """(B, n, n): weights of the pairs GC, AU and GU; −inf for all others."""
    kinds = {"GC": 0, "CG": 0, "AU": 1, "UA": 1, "GU": 2, "UG": 2}
    n = max(map(len, strands))
    index = torch.full((len(strands), n, n), 3)
    for b, strand in enumerate(strands):
        for i, x in enumerate(strand):
            for k, y in enumerate(strand):
                index[b, i, k] = kinds.get(x + y, 3)
    return torch.cat([weights, weights.new_full((1,), -torch.inf)])[index]


@app.function
def picture(strand: str, pairs: Tensor) -> Drawing:
    """Letters from left to right, and pairs (n, n) as arcs."""
    n = len(strand)
    edges = [(i, k, float(pairs[i, k])) for i in range(n) for k in range(i, n) if pairs[i, k] > 0]
    return graph_svg(list(strand), edges, range(n))


@app.cell
def _():
    heat = mo.ui.slider(0.1, 3.0, 0.1, value=1.0, label="temperature", show_value=True)
    heat
    return (heat,)


@app.cell
def _(heat):
    strand, true_weights = "GCAAUGC", torch.tensor([1.2, 0.8, 0.3])
    hairpin = fold(pair_scores([strand], true_weights), smoothing=sx.Shannon(heat.value))[0]
    beside([(f"{name}", picture(strand, answer.reshape(7, 7))) for name, answer in {
        "argmax": hairpin.argmax(),
        "marginals": hairpin.marginals(),
    }.items()], widest=700)  # fmt: skip
    return hairpin, strand, true_weights


@app.function
def brackets(z: Tensor, n: int) -> str:
    """The usual way to write a fold."""
    text = ["."] * n
    for i, k in z.reshape(n, n).nonzero().tolist():
        text[i], text[k] = "(", ")"
    return "".join(text)


@app.cell
def _(hairpin, strand):
    _top, _sparse = hairpin.topk(3), hairpin.sparsemap()
    print(strand, " best three:")
    for _z, _score in zip(_top.structures, _top.scores):
        print(brackets(_z, 7), f" score {_score:.1f}, p = {hairpin.log_prob(_z).exp():.3f}")
    print(f"entropy {hairpin.entropy():.2f}; SparseMAP keeps {int(_sparse.num_active)} folds")
    assert brackets(hairpin.argmax(), 7) == brackets(_top.structures[0], 7)
    torch.manual_seed(0)
    _mean = hairpin.sample((20_000,)).mean(0)
    assert (_mean - hairpin.marginals()).abs().max() < 0.02
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Estimators take it like any other structure, since they only ask for queries:
    """)
    return


@app.cell
def _(strand):
    _weights = torch.tensor([1.2, 0.8, 0.3], requires_grad=True)
    torch.manual_seed(0)
    for _name in ("marginals", "sparsemap", "spigot", "imle", "reinforce"):
        _estimator, _one = sx.estimators.by_name(_name), fold(pair_scores([strand], _weights))
        _loss = _estimator.loss(_one, lambda z: z.sum(-1)).sum()  # the number of pairs
        (_g,) = torch.autograd.grad(_loss, _weights)
        print(f"{_name:10s}", _g.numpy().round(3))
        assert _g.isfinite().all()
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Learn it

    The weights of the pairs, from folds that were observed: maximum likelihood, with `log_prob` of
    a structure of your own. Strands of several lengths are one batch. The observed folds are drawn
    from the model with the true weights, so we know what should come out.
    """)
    return


@app.cell
def _(true_weights):
    torch.manual_seed(0)
    strands = ["".join("GCAU"[i] for i in torch.randint(4, (int(n),)))
               for n in torch.randint(6, 13, (200,))]  # fmt: skip
    lengths = torch.tensor([len(s) for s in strands])
    seen = fold(pair_scores(strands, true_weights), lengths).sample()

    weights = nn.Parameter(torch.zeros(3))
    _optimizer = torch.optim.Adam([weights], lr=0.1)
    losses = []
    for _ in range(50):
        _loss = -fold(pair_scores(strands, weights), lengths).log_prob(seen).mean()
        _optimizer.zero_grad()
        _loss.backward()
        _optimizer.step()
        losses.append(_loss.item())
    print("true", true_weights.numpy(), "learned", weights.detach().numpy().round(2))
    assert (weights - true_weights).abs().max() < 0.4 and losses[-1] < losses[0]
    lines_svg(range(50), {"negative log-likelihood": losses}, "step")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **To remember.** Draw nodes and hyperedges, one derivation for each structure, and the engine
    answers. `check_structure` tells you whether it is what you meant. If a part may be used twice,
    $z$ counts; if derivations are ambiguous, queries speak of derivations. To make it a class with
    names, shapes and a `decode` of its own, see how `structmax/structures/path.py` does it.
    """)
    return


if __name__ == "__main__":
    app.run()
