"""The structures to look at: what one writes, which scores one drags, and what they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import structmax as sx

MOST = 15  # words, or cells of a side: what answers before one has let go of the mouse
RANGE, STEP = 6.0, 0.1  # of a score
TAGS = ("DET", "NOUN", "VERB", "ADP")
SEGMENTS = ("PER", "LOC", "O")
SYMBOLS = ("S", "NP", "VP", "PP", "D", "N", "V", "P")  # the last four are above words


class Problem(NamedTuple):
    """A matrix of scores with names, and the structure that they make."""

    rows: Sequence[str]
    columns: Sequence[str]
    scores: Tensor
    """``(rows, columns)``, to begin with."""
    make: Callable[[Tensor, sx.Smoothing | None], sx.Structure]
    """The structure of scores and a smoothing."""
    tokens: Any = None
    labels: Sequence[str] | None = None
    used: Tensor | None = None
    """Which scores are those of a part; all unless given."""


class Kind(NamedTuple):
    """A structure to choose: its sentence, and a second one where it has two sides."""

    problem: Callable[..., Problem]
    text: str
    other: str | None = None
    smoothed: bool = True
    """Whether Ω may be anything, as in a dynamic program, and not Shannon's alone."""


SENTENCE = "she saw the man with the telescope"
PARSED = "the woman saw the man with the telescope"
HEADS = (2, 0, 4, 2, 7, 7, 2)  # of its words; 0 is the root
TAGGED = (1, 2, 0, 1, 3, 0, 1)  # of TAGS
SPANS = ((2, 3), (4, 6), (5, 6), (2, 6), (1, 6), (0, 6))


def words_of(text: str, name: str = "the sentence") -> list[str]:
    """The words, or the letters of a single word.

    >>> words_of("a b"), words_of("cat")
    (['a', 'b'], ['c', 'a', 't'])
    """
    words = text.split()
    words = list(words[0]) if len(words) == 1 else words
    if not 1 <= len(words) <= MOST:
        raise ValueError(f"{name} must have 1 to {MOST} words here, got {len(words)}.")
    return words


def seeded(*shape: int, scale: float = 2.0) -> Tensor:
    """Scores to begin with: random, always the same, in steps of a slider."""
    x = scale * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return (x.clamp(-RANGE, RANGE) / STEP).round() * STEP


def _same(a: Sequence[str], b: Sequence[str], yes: float, no: float) -> Tensor:
    return torch.tensor([[yes if x == y else no for y in b] for x in a], dtype=torch.float64)


def choice(words: Sequence[str]) -> Problem:
    def make(x: Tensor, omega: Any) -> sx.Structure:
        return sx.Choice(x[0], smoothing=omega)

    return Problem(["score"], words, seeded(1, len(words), scale=0.7), make, words)


def subset(words: Sequence[str]) -> Problem:
    k = max(1, len(words) // 2)

    def make(x: Tensor, omega: Any) -> sx.Structure:
        return sx.KSubset(x[0], k, smoothing=omega)

    return Problem(["score"], words, seeded(1, len(words), scale=0.7), make, words)


def chain(words: Sequence[str]) -> Problem:
    follows = seeded(len(TAGS), len(TAGS), scale=0.7)

    def make(x: Tensor, omega: Any) -> sx.Structure:
        return sx.LinearChain(x, follows, smoothing=omega)

    start = seeded(len(words), len(TAGS), scale=1.0)
    if " ".join(words) == SENTENCE:
        start[range(len(words)), TAGGED] += 2
    return Problem(words, TAGS, start, make, words, TAGS)


def segments(words: Sequence[str]) -> Problem:
    longest = min(3, len(words))
    duration = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)[:longest, None]

    def make(x: Tensor, omega: Any) -> sx.Structure:
        return sx.SemiMarkov.from_positions(
            x, longest, duration=duration.expand(-1, len(SEGMENTS)), smoothing=omega
        )

    start = seeded(len(words), len(SEGMENTS), scale=1.2)
    return Problem(words, SEGMENTS, start, make, words, SEGMENTS)


def spans(words: Sequence[str]) -> Problem:
    n = len(words)

    def make(x: Tensor, omega: Any) -> sx.Structure:
        return sx.BinaryTree(x, smoothing=omega)

    used = torch.ones(n, n).triu(1).bool()  # leaves are in every tree
    start = seeded(n, n, scale=1.0)
    if " ".join(words) == SENTENCE:
        start[tuple(zip(*SPANS))] += 2
    return Problem(words, words, (start * used).clamp(-RANGE, RANGE), make, words, used=used)


def grammar(words: Sequence[str]) -> Problem:
    above = len(SYMBOLS) - 4
    rules = torch.full((above, len(SYMBOLS), len(SYMBOLS)), -6.0, dtype=torch.float64)
    for rule in ("S NP VP", "NP D N", "NP NP PP", "VP V NP", "VP VP PP", "PP P NP", "NP N N"):
        a, b, c = (SYMBOLS.index(symbol) for symbol in rule.split())
        rules[a, b, c] = 0.0
    root = torch.tensor([0.0, -4.0, -4.0, -4.0], dtype=torch.float64)

    def make(x: Tensor, omega: Any) -> sx.Structure:
        return sx.PCFG(root, rules, x, smoothing=omega)

    start = seeded(len(words), 4, scale=1.0)
    if " ".join(words) == PARSED:
        start[range(len(words)), [0, 1, 2, 0, 1, 3, 0, 1]] += 2
    return Problem(words, SYMBOLS[above:], start, make, words, SYMBOLS)


def dependencies(projective: bool) -> Callable[[Sequence[str]], Problem]:
    def problem(words: Sequence[str]) -> Problem:
        n = len(words) + 1

        def make(x: Tensor, omega: Any) -> sx.Structure:
            return sx.DependencyTree(  # type: ignore[abstract]
                x, projective=projective, smoothing=omega
            )

        used = ~torch.eye(n).bool()
        used[:, 0] = False
        names = ["root", *words]
        start = seeded(n, n, scale=1.0)
        if " ".join(words) == SENTENCE:  # with the telescope, she sees the man who has one
            start[HEADS, range(1, n)] += 3
            start[4, 7] += 4.6
        return Problem(names, names, (start * used).clamp(-RANGE, RANGE), make, words, used=used)

    return problem


def network(words: Sequence[str]) -> Problem:
    n = len(words)

    def make(x: Tensor, omega: Any) -> sx.Structure:
        return sx.SpanningTree(x, smoothing=omega)

    used = torch.ones(n, n).triu(1).bool()
    return Problem(words, words, seeded(n, n) * used, make, words, used=used)


def alignment(kind: str) -> Callable[..., Problem]:
    def problem(words: Sequence[str], others: Sequence[str]) -> Problem:
        def make(x: Tensor, omega: Any) -> sx.Structure:
            return sx.Alignment(x, kind=kind, smoothing=omega)

        start = _same(words, others, 2.0 if kind == "edit" else 0.0, -1.0)
        return Problem(words, others, start, make, (words, others))

    return problem


def matching(words: Sequence[str], others: Sequence[str]) -> Problem:
    def make(x: Tensor, omega: Any) -> sx.Structure:
        return sx.Assignment(x, smoothing=omega)

    start = seeded(len(words), len(others), scale=1.5)
    return Problem(words, others, start, make, (words, others))


def frames(words: Sequence[str]) -> Problem:
    """CTC: some frames more than letters to hear."""
    symbols = ["–", *dict.fromkeys(words)]
    target = torch.tensor([symbols.index(word) for word in words])
    repeats = sum(a == b for a, b in pairwise(words))
    n = min(MOST, max(2 * len(words), len(words) + repeats + 2))
    if n < len(words) + repeats:
        raise ValueError(f"{len(words)} letters with {repeats} repetitions need over {n} frames.")

    def make(x: Tensor, omega: Any) -> sx.Structure:
        return sx.CTC(x, target, smoothing=omega)

    start = seeded(n, len(symbols), scale=1.2)
    return Problem([f"t{i}" for i in range(n)], symbols, start, make, None, symbols)


def grid(words: Sequence[str]) -> Problem:
    """A square with as many cells along a side as there are words."""
    n = max(2, len(words))

    def make(x: Tensor, omega: Any) -> sx.Structure:
        return sx.GridPath(x, smoothing=omega)

    names = [str(i) for i in range(n)]
    return Problem(names, names, -seeded(n, n).abs(), make, (names, names))


def route(words: Sequence[str]) -> Problem:
    """From the first word to the last, over those between or past some of them."""
    n = len(words)
    if n < 2:
        raise ValueError("a path needs 2 words at least, its first and its last.")
    edges = [(i, j) for i, j in combinations(range(n), 2) if j - i <= 3]

    def make(x: Tensor, omega: Any) -> sx.Structure:
        scores = torch.stack([x[i, j] for i, j in edges])
        return sx.Path(torch.tensor(edges), scores, 0, n - 1, smoothing=omega)

    used = torch.zeros(n, n).bool()
    used[tuple(torch.tensor(edges).T)] = True
    return Problem(words, words, seeded(n, n) * used, make, words, used=used)


KINDS: dict[str, Kind] = {
    "dependency tree, projective": Kind(dependencies(True), SENTENCE),
    "dependency tree, any": Kind(dependencies(False), SENTENCE, smoothed=False),
    "binary tree": Kind(spans, SENTENCE),
    "grammar (PCFG)": Kind(grammar, PARSED),
    "chain of tags": Kind(chain, SENTENCE),
    "segments": Kind(segments, "Ada Lovelace visited New York City"),
    "alignment, DTW": Kind(alignment("dtw"), "a b b c d", "a a b c c d"),
    "alignment, edit": Kind(alignment("edit"), "intention", "execution"),
    "alignment, monotone": Kind(alignment("monotone"), "b o n j o u r", "b o j u r"),
    "CTC": Kind(frames, "cat"),
    "assignment": Kind(matching, "Ada Bo Cy Di", "cook wash shop sweep", smoothed=False),
    "spanning tree": Kind(network, "Ulm Bonn Jena Kiel Trier", smoothed=False),
    "k-subset": Kind(subset, "salt oil rice tea milk eggs"),
    "choice": Kind(choice, "red green blue"),
    "path in a graph": Kind(route, "home shop park lake hill inn"),
    "path on a grid": Kind(grid, "1 2 3 4 5 6"),
}


def problem(kind: str, text: str, other: str = "") -> Problem:
    """What a structure and its sentences make.

    >>> found = problem("assignment", "a b", "x y z")
    >>> found.scores.shape, found.make(found.scores, None).event_shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """
    chosen = KINDS[kind]
    sides = [words_of(text)]
    if chosen.other is not None:
        sides.append(words_of(other, "the second sentence"))
    return chosen.problem(*sides)
