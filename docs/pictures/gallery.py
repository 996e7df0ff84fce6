"""The pictures of gallery.md, drawn whenever the documentation is built.

``python docs/pictures/gallery.py FOLDER`` draws them too. The page shows each function beside what
it draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import structmax as sx
from structmax.draw import Drawing, heat_svg, lines_svg, polytope_svg, simplex_svg, tree_svg

TELESCOPE = ["she", "saw", "the", "man", "with", "the", "telescope"]
TAGS = ["DET", "NOUN", "PRON", "VERB"]
HEADS = [2, 0, 4, 2, 7, 7, 2]  # of the words of TELESCOPE; 0 is the root


def likely(shape: tuple[int, ...], *places: tuple[int, ...], by: float = 3.0) -> Tensor:
    """Scores that are random but for some places, which are likely."""
    scores = 0.7 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    for place in places:
        scores[place] += by
    return scores


def telescope() -> sx.DependencyTree:
    """Who has the telescope? The last word hangs on the second or on the fourth."""
    arcs = [(head, word) for word, head in enumerate(HEADS, 1)]
    scores = likely((8, 8), *arcs, (4, 7))
    scores[4, 7] += 0.8
    return sx.DependencyTree(scores, projective=True)


def arcs() -> Drawing:
    return telescope().draw(TELESCOPE)


def arcs_sparsemap() -> Drawing:
    return telescope().draw(TELESCOPE, "sparsemap")


def arcs_top() -> Drawing:
    return telescope().draw(TELESCOPE, "top", k=2)


def arcs_labelled() -> Drawing:
    arcs = [(2, 1, 0), (0, 2, 1), (2, 3, 2)]
    tree = sx.DependencyTree(likely((4, 4, 3), *arcs))
    return tree.draw(["dogs", "chase", "cats"], "argmax", labels=["subj", "root", "obj"])


def chart() -> Drawing:
    spans = [(2, 3), (4, 6), (5, 6), (2, 6), (1, 6), (0, 6)]
    return sx.BinaryTree(likely((7, 7), *spans, by=2.0)).draw(TELESCOPE)


def tree() -> Drawing:
    spans = [(2, 3), (4, 6), (5, 6), (2, 6), (1, 6), (0, 6)]
    return sx.BinaryTree(likely((7, 7), *spans, by=2.0)).draw(TELESCOPE, "top", k=2)


def tree_compared() -> Drawing:
    found = [(0, 6), (1, 6), (1, 3), (2, 3), (4, 6), (5, 6)]
    wanted = [(0, 6), (1, 6), (2, 6), (2, 3), (4, 6), (5, 6)]
    return tree_svg(TELESCOPE, found, gold=wanted)


def grammar() -> Drawing:
    symbols = ["S", "NP", "VP", "D", "N", "V"]
    rules = likely((3, 6, 6), (0, 1, 2), (1, 3, 4), (2, 5, 1), by=8.0)
    emission = likely((5, 3), (0, 0), (1, 1), (2, 2), (3, 0), (4, 1), by=4.0)
    sentence = sx.PCFG(torch.tensor([4.0, 0.0, 0.0]), rules, emission)
    return sentence.draw(["the", "dog", "ate", "the", "bone"], "argmax", labels=symbols)


def policy_tree() -> Drawing:
    class Even(torch.nn.Module):
        """Shifts and reduces as it comes."""

        def start(self, inputs: Tensor, lengths: Tensor) -> Tensor:
            return inputs.new_zeros(len(inputs), 1)

        def scores(self, state: Tensor) -> Tensor:
            return torch.cat([torch.sin(3 * state), torch.cos(2 * state)], -1)

        def advance(self, state: Tensor, action: Tensor) -> Tensor:
            return state + 1

    return sx.ShiftReduce(Even(), torch.zeros(1, 5, 1)).draw(list("abcde"))


def they_fish() -> sx.LinearChain:
    """Words 0 to 3 have scores of tags, tags have scores of what follows."""
    words = likely((4, 4), (0, 2), (1, 3), (1, 1), (2, 0), (3, 1), by=1.5)
    return sx.LinearChain(words, likely((4, 4), (2, 3), (3, 0), (0, 1), by=1.5))


def lattice() -> Drawing:
    return they_fish().draw(["they", "fish", "the", "pond"], labels=TAGS)


def lattice_top() -> Drawing:
    return they_fish().draw(["they", "fish", "the", "pond"], "top", TAGS, k=3)


def segments() -> Drawing:
    found = [(0, 1, 0), (2, 0, 2), (3, 2, 1)]  # [start, length − 1, label]
    words = ["Ada", "Lovelace", "visited", "New", "York", "City"]
    return sx.SemiMarkov(likely((6, 3, 3), *found, by=6.0)).draw(words, labels=["PER", "LOC", "O"])


def alignment() -> Drawing:
    t = torch.linspace(0, 6, 12)
    first, second = torch.sin(t), torch.sin(t[:10] * 1.3 - 0.6)
    return sx.Alignment(-4 * (first[:, None] - second).square()).draw()


def alignment_best() -> Drawing:
    t = torch.linspace(0, 6, 12)
    first, second = torch.sin(t), torch.sin(t[:10] * 1.3 - 0.6)
    return sx.Alignment(-4 * (first[:, None] - second).square()).draw(what="argmax")


def edit() -> Drawing:
    a, b = "intention", "execution"
    same = torch.tensor([[2.0 if x == y else -1.0 for y in b] for x in a])
    return sx.Alignment(same, kind="edit").draw((list(a), list(b)))


def ctc() -> Drawing:
    frames = likely((9, 4), (1, 1), (2, 1), (4, 2), (6, 3), (7, 3), by=2.0).log_softmax(-1)
    return sx.CTC(frames, torch.tensor([1, 2, 3])).draw(labels=["–", "c", "a", "t"])


def attention() -> Drawing:
    words = ["the", "animal", "was", "tired", "so", "it", "slept"]
    weights = sx.entmax(likely((7, 7), (5, 1), (6, 5), (3, 1), (1, 0), by=2.0), 1.5)
    return heat_svg(weights, words, words)


def matching() -> Drawing:
    people, tasks = ["Ada", "Bo", "Cy", "Di"], ["cook", "wash", "shop", "sweep"]
    return sx.Assignment(likely((4, 4), (0, 2), (1, 0), (2, 1))).draw((people, tasks))


def matching_sparsemap() -> Drawing:
    people, tasks = ["Ada", "Bo", "Cy", "Di"], ["cook", "wash", "shop", "sweep"]
    assignment = sx.Assignment(likely((4, 4), (0, 2), (1, 0), (2, 1), by=0.0))
    return assignment.draw((people, tasks), "sparsemap")


def grid() -> Drawing:
    return sx.GridPath(-likely((8, 11), by=0.0).exp()).draw()


def grid_best() -> Drawing:
    return sx.GridPath(-likely((8, 11), by=0.0).exp(), moves="all", smoothing=sx.Hard()).draw()


def route() -> Drawing:
    edges = torch.tensor([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (2, 4), (3, 4)])
    return sx.Path(edges, likely((7,), by=0.0), 0, 4).draw(["home", "park", "bank", "shop", "work"])


def network() -> Drawing:
    towns = ["Jena", "Gera", "Suhl", "Gotha", "Ulm", "Bonn"]
    return sx.SpanningTree(2 * likely((6, 6), by=0.0)).draw(towns)


def choice() -> Drawing:
    fruit = ["apple", "banana", "cherry", "damson"]
    return sx.Choice(torch.tensor([1.0, 0.2, 0.8, -1.0]), smoothing=sx.Gini()).draw(fruit)


def subset() -> Drawing:
    scores = torch.tensor([1.0, 0.2, 0.8, -1.0])
    return sx.KSubset(scores, 2).draw(["apple", "banana", "cherry", "damson"], "top")


def simplex() -> Drawing:
    return polytope_svg(sx.Choice(torch.tensor([0.7, 0.3, -0.1])))


def simplex_maps() -> Drawing:
    scores, heat = torch.tensor([1.0, 0.7, 0.0]), torch.logspace(0.7, -1.5, 60)[:, None]
    x = scores / heat  # from hot to cold
    maps = {"softmax": sx.softmax(x), "entmax, α = 1.5": sx.entmax(x)}
    maps |= {"sparsemax": sx.sparsemax(x), "fusedmax": sx.fusedmax(x, 0.3)}
    return simplex_svg(maps, ["walk", "run", "fly"])


def bias_and_variance() -> Drawing:
    choice, price = sx.Choice(torch.tensor([0.5, 0.2, 0.0, -0.3])), likely((4,), by=0.0)
    names = ["marginals", "straight-through", "spigot", "gumbel-straight-through", "imle"]
    names += ["reinforce", "sum-and-sample", "exact-expectation"]
    seed = torch.Generator().manual_seed(0)

    def cost(z: Tensor) -> Tensor:
        return (z @ price + 0.5) ** 2

    return sx.diagnose(choice, cost, names, samples=100, generator=seed).draw()


def curves() -> Drawing:
    scores, gamma = torch.tensor([1.0, 0.7, 0.0]), torch.linspace(0.05, 3.0, 60)
    found = {}
    for omega in (sx.Shannon, sx.Gini):
        entropies = [sx.Choice(scores, smoothing=omega(float(g))).entropy() for g in gamma]
        found[omega.__name__] = [float(entropy) for entropy in entropies]
    return lines_svg(gamma.tolist(), found, "temperature γ", "entropy")


def polytope() -> Drawing:
    scores = likely((4, 4), (0, 2), (2, 1), (2, 3), by=0.6)
    tree = sx.DependencyTree(scores)  # three words, nine trees
    cost = torch.zeros(4, 4)
    cost[0, 2], cost[0, 3] = 1.0, -0.5
    return polytope_svg(tree, cost)


def matchings() -> Drawing:
    def cost(z: Tensor) -> Tensor:
        return (z[:, 0] @ torch.tensor([0.8, 0.2, 0.0])).square()

    return polytope_svg(sx.Assignment(likely((3, 3), by=0.0)), cost)


def long_sentence() -> Drawing:
    words = [*TELESCOPE, "and", "then", "the", "man", "saw", "her", "walk", "away"] * 3
    n, verbs = len(words), [2, 12, 17, 27, 32, 42]
    arcs = [(0, 2), *[(2, verb) for verb in verbs[1:]]]
    for word in set(range(1, n + 1)) - set(verbs):  # hangs on the nearest verb
        arcs.append((min(verbs, key=lambda verb: abs(verb - word)), word))
    scores = likely((n + 1, n + 1), *arcs, by=9.0)
    return sx.DependencyTree(scores, projective=True).draw(words)


def right_to_left() -> Drawing:
    words = ["הילד", "אכל", "תפוח", "אדום"]  # the boy ate a red apple
    arcs = [(2, 1), (0, 2), (2, 3), (3, 4)]
    return sx.DependencyTree(likely((5, 5), *arcs, by=4.0)).draw(words)


def cjk() -> Drawing:
    words = ["我", "喜欢", "自然", "语言", "处理"]  # I like natural language processing
    spans = [(3, 4), (2, 4), (1, 4), (0, 4)]
    return sx.BinaryTree(likely((5, 5), *spans)).draw(words, "argmax")


PICTURES: list[Callable[[], Drawing]] = [
    arcs, arcs_sparsemap, arcs_top, arcs_labelled, chart, tree, tree_compared, grammar, policy_tree,
    lattice, lattice_top, segments, alignment, alignment_best, edit, ctc, attention, matching,
    matching_sparsemap, grid, grid_best, route, network, choice, subset, simplex, simplex_maps,
    curves,
    polytope, matchings, bias_and_variance, long_sentence, right_to_left, cjk,
]  # fmt: skip


def draw(folder: Path) -> None:
    """Writes every picture twice: ``gallery-NAME.svg``, and as HTML to put into a page, where it
    has the colours of the page's theme."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        drawing = picture()
        drawing.save(folder / f"gallery-{picture.__name__}.svg")
        html = folder / f"gallery-{picture.__name__}.html"
        html.write_text(drawing._repr_html_(), encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
