import marimo

__generated_with = "0.25.2"
app = marimo.App()

with app.setup:
    from itertools import pairwise

    import marimo as mo
    import torch
    from torch import Tensor

    import structmax as sx
    from structmax.draw import beside, heat_svg, lines_svg


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 3. Structures and marginals

    A choice of one among $n$ is a vector with a single one. A *structure* is a vector with several
    ones that have to fit: the tags of a sentence, the arcs of a tree, the cells of an alignment.
    Each coordinate is a *part*, each part $i$ has a score $\theta_i$, and the score of a structure
    is the sum over its parts,

    $$\operatorname{score}(z) = \langle \theta, z\rangle, \qquad
    p(z) = \exp\bigl(\langle\theta, z\rangle - A(\theta)\bigr), \qquad
    A(\theta) = \log \sum_{z \in Z} \exp\langle\theta, z\rangle .$$

    There are exponentially many structures. There are few parts, and dynamic programs sum over the
    former in time that grows with the latter.

    ## One sentence, all its tag sequences

    A linear chain has a score for every tag of every word, and for every step from a tag to the
    next.
    """)
    return


@app.cell
def _():
    words, tags = ["they", "fish", "the", "pond"], ["DET", "NOUN", "PRON", "VERB"]
    unary = torch.zeros(4, 4, dtype=torch.float64)
    for _word, _tag, _score in [(0, 2, 2.0), (1, 3, 1.5), (1, 1, 1.5), (2, 0, 2.0), (3, 1, 1.5)]:
        unary[_word, _tag] = _score
    transition = torch.zeros(4, 4, dtype=torch.float64)
    for _from, _to in [(2, 3), (3, 0), (0, 1)]:  # PRON VERB, VERB DET, DET NOUN
        transition[_from, _to] = 1.0
    chain = sx.LinearChain(unary, transition)
    chain.draw(words, labels=tags)
    return chain, transition, unary, words


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Four words with four tags have 256 sequences, few enough to list. So every claim about the
    dynamic program can be checked against a plain sum.
    """)
    return


@app.cell
def _(chain):
    every = chain.enumerate_support()  # (256, words, tags)
    scores = chain.score(every)
    p = scores.softmax(0)
    assert len(every) == 256
    assert torch.isclose(chain.log_partition(), scores.logsumexp(0))  # the sum
    assert torch.isclose(chain.score(chain.argmax()), scores.max())  # the best
    assert torch.allclose(chain.marginals(), torch.einsum("s,snc->nc", p, every))  # the mean
    assert torch.isclose(chain.entropy(), -(p * p.log()).sum())
    print("best:", chain.decode(chain.argmax()), "with probability", round(p.max().item(), 3))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Marginals are a gradient

    $\mu_i = P(z_i = 1)$ are the *marginals*. They are also $\mathbb E[z]$, the mean structure, and

    $$\mu = \nabla A(\theta):$$

    the derivative of a log-sum-exp is a softmax, whatever the sum runs over. So the algorithm that
    computes $A$, differentiated, is the algorithm that computes $\mu$: forward becomes
    forward-backward, inside becomes inside-outside (Eisner 2016). The transitions get theirs too.
    """)
    return


@app.cell
def _(chain, transition, unary):
    _leaves = [unary.clone().requires_grad_(), transition.clone().requires_grad_()]
    _tags, _steps = torch.autograd.grad(sx.LinearChain(*_leaves).log_partition(), _leaves)
    assert torch.allclose(_tags, chain.marginals())
    assert torch.allclose(_steps, chain.edge_marginals().sum(0))
    # and the mean of samples tends to them
    torch.manual_seed(0)
    _mean = chain.sample((20_000,)).mean(0)
    assert (_mean - chain.marginals()).abs().max() < 0.02
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Forbidding a part removes all structures that have it; what is left of the sum says how likely
    it was. That is `condition`, with $P(\text{part}) = \exp(A_{\text{with it}} - A)$.
    """)
    return


@app.cell
def _(chain):
    _verb = torch.zeros(4, 4, dtype=torch.bool)
    _verb[1, 3] = True  # "fish" is a VERB
    _with = chain.condition(include=_verb)
    _chance = (_with.log_partition() - chain.log_partition()).exp()
    assert torch.isclose(_chance, chain.marginals()[1, 3])
    print(f"P(fish is a verb) = {_chance:.3f}")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The same questions, other structures

    A dependency tree gives every word a head. The questions are the same; the algorithm is the
    matrix-tree theorem (Koo, Globerson, Carreras & Collins 2007) instead of forward-backward. The
    best head of each word, one by one, need not be a tree; the argmax is one.
    """)
    return


@app.cell
def _():
    arcs = torch.zeros(4, 4, dtype=torch.float64)  # [head, word], 0 is the root
    arcs[1, 2], arcs[2, 1], arcs[0, 1], arcs[0, 3], arcs[2, 3] = 2.0, 2.2, 0.5, 0.1, 1.0
    tree = sx.DependencyTree(arcs)
    _all = tree.enumerate_support()
    _p = tree.score(_all).softmax(0)
    assert torch.allclose(tree.marginals(), torch.einsum("s,shm->hm", _p, _all))
    _greedy = arcs[:, 1:].argmax(0).tolist()
    print(
        len(_all), "trees; best heads word by word:", _greedy, "argmax:", tree.decode(tree.argmax())
    )
    assert _greedy[:2] == [2, 1]  # a cycle: 1 and 2 are each other's head
    beside([("marginals", tree.draw(["a", "b", "c"])),
            ("argmax", tree.draw(["a", "b", "c"], "argmax"))])  # fmt: skip
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## EM: marginals are expected counts

    Suppose that $\theta$ are log-probabilities of a generative model, and that we see the data but
    not the structure. The EM algorithm (Dempster, Laird & Rubin 1977) repeats two steps:

    - **E**: expected counts of every parameter under $p(z \mid \text{data})$. Those are marginals,
      and with $A$ the log-likelihood, they are its gradient in the log-parameters.
    - **M**: the new parameters are those counts, normalised.

    The log-likelihood never falls. That is a theorem, so it can be asserted.

    ### IBM Model 1

    Each foreign word was translated from one word of the English sentence, and nobody says which
    (Brown, Della Pietra, Della Pietra & Mercer 1993). With a table $t(f \mid e)$, every foreign
    word has its own choice among the $l$ English words:

    $$\log p(f \mid e) = \sum_j \log \frac1l \sum_i t(f_j \mid e_i).$$
    """)
    return


@app.cell
def _():
    pairs = [
        ("the house", "das haus"),
        ("the book", "das buch"),
        ("a book", "ein buch"),
        ("the house is small", "das haus ist klein"),
        ("a book is old", "ein buch ist alt"),
    ]
    english = sorted({e for pair in pairs for e in pair[0].split()})
    foreign = sorted({f for pair in pairs for f in pair[1].split()})
    sentences = [
        (torch.tensor([english.index(e) for e in source.split()]),
         torch.tensor([foreign.index(f) for f in target.split()]))
        for source, target in pairs
    ]  # fmt: skip
    return english, foreign, sentences


@app.cell
def _(english, foreign, sentences):
    def likelihood(table: Tensor) -> Tensor:
        """log p of all sentences, where table (e, f) is log t(f | e)."""
        total = table.new_zeros(())
        for source, target in sentences:
            links = sx.Choice(table[source][:, target].T)  # (foreign words, English words)
            total = total + (links.log_partition() - torch.tensor(len(source)).log()).sum()
        return total

    shape = len(english), len(foreign)
    table = torch.full(shape, 1 / shape[1], dtype=torch.float64).log()
    model_1 = []
    for _ in range(40):
        _leaf = table.clone().requires_grad_()
        _value = likelihood(_leaf)
        counts = torch.autograd.grad(_value, _leaf)[0]  # E: expected counts
        table = (counts / counts.sum(-1, keepdim=True)).log()  # M
        model_1.append(_value.item())
    assert torch.isclose(counts.sum(), torch.tensor(14.0).double())  # one for each foreign word
    assert all(b >= a - 1e-9 for a, b in pairwise(model_1))
    heat_svg(table.exp(), english, foreign)
    return model_1, table


@app.cell
def _(english, foreign, table):
    learned = {e: foreign[int(row.argmax())] for e, row in zip(english, table)}
    print(learned)
    assert learned["house"] == "haus" and learned["book"] == "buch" and learned["the"] == "das"
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    From five sentences *house* is *haus*, since *das* is explained by *the* elsewhere. Words that
    always came together could not be told apart.

    ### A hidden Markov model

    The same loop, with a chain instead of a choice: the E step is `log_partition` and its gradient,
    which is the Baum-Welch algorithm. Two dice, a fair and a loaded one, are swapped now and then,
    and we see only the numbers.
    """)
    return


@app.cell
def _():
    torch.manual_seed(2)
    true_states, rolls = [0], []
    for _ in range(400):
        _loaded = true_states[-1] == 1
        rolls.append(int(torch.tensor([1.0] * 5 + [9.0 if _loaded else 1.0]).multinomial(1)))
        _swap = bool(torch.rand(()) < 0.06)
        true_states.append(1 - true_states[-1] if _swap else true_states[-1])
    states, seen = torch.tensor(true_states[:-1]), torch.tensor(rolls)
    return seen, states


@app.cell
def _(seen):
    torch.manual_seed(0)
    parameters = [  # log-probabilities of the first state, of steps, and of numbers
        torch.zeros(2).double().log_softmax(-1),
        torch.tensor([[2.0, 0.0], [0.0, 2.0]]).double().log_softmax(-1),
        (0.3 * torch.randn(2, 6)).double().log_softmax(-1),
    ]
    baum_welch = []
    for _ in range(40):
        _leaves = [t.clone().requires_grad_() for t in parameters]
        _value = sx.HMM(*_leaves, seen).log_partition()
        _counts = torch.autograd.grad(_value, _leaves)  # E
        parameters = [(c / c.sum(-1, keepdim=True)).log() for c in _counts]  # M
        baum_welch.append(_value.item())
    assert all(b >= a - 1e-9 for a, b in pairwise(baum_welch))
    return baum_welch, parameters


@app.cell
def _(baum_welch, model_1):
    beside([
        ("IBM Model 1", lines_svg(range(40), {"log-likelihood": model_1}, "iteration")),
        ("HMM", lines_svg(range(40), {"log-likelihood": baum_welch}, "iteration")),
    ], widest=700)  # fmt: skip
    return


@app.cell
def _(parameters, seen, states):
    dice = sx.HMM(*parameters, seen)
    loaded = int(parameters[2][:, 5].argmax())
    six = parameters[2].exp()[loaded, 5].item()
    guess = dice.marginals()[:, loaded] > 0.5  # the most likely state of each roll
    right = ((guess == (states == 1)).double().mean()).item()
    print(f"P(6 | loaded) = {six:.2f}, truly {9 / 14:.2f}; {right:.0%} of states are right")
    assert abs(six - 9 / 14) < 0.15 and right > 0.75
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    EM climbs to a local maximum, not to the best one: another start may end elsewhere. Gradient
    ascent on the same `log_partition` works as well, and is what remains once scores come from a
    network.

    **To remember.** A structure is a set of 0/1 vectors; $A$ is the sum, its gradient the
    marginals, and marginals are probabilities, means and expected counts at once. The verbs are the
    same for every structure.
    """)
    return


if __name__ == "__main__":
    app.run()
