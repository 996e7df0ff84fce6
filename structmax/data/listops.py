"""ListOps: arithmetic on nested lists, where only a reader of the right tree succeeds."""

from __future__ import annotations

import lzma
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from structmax.data.folder import fault, quoted, read_lines
from structmax.data.trees import REDUCE, SHIFT, Trees

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
VOCABULARY = ("<pad>", *OPERATORS, "]", *map(str, range(10)))
INDEX = {token: i for i, token in enumerate(VOCABULARY)}
CLASSES = 10


class Expression(NamedTuple):
    """Token numbers ``(n)``, the value 0–9, and the gold tree as transitions ``(2n−1)``."""

    tokens: np.ndarray
    label: int
    transitions: np.ndarray

    @property
    def words(self) -> list[str]:
        return [VOCABULARY[t] for t in self.tokens]

    def __str__(self) -> str:
        return " ".join(self.words)


def evaluate(words: Sequence[str]) -> int:
    """The value of an expression: minimum, maximum, ⌊median⌋, or sum modulo 10.

    >>> evaluate("[MAX 2 [MED 1 4 9 8 ] [SM 5 7 ] ]".split())
    6
    """
    stack: list[tuple[str, list[int]]] = [("", [])]
    for at, word in enumerate(words):
        if word in OPERATORS:
            stack.append((word, []))
        elif word == "]":
            operator, values = stack.pop()
            if not operator or not values:
                what = "closes nothing" if not operator else f"closes {operator} without arguments"
                raise ValueError(f"token {at} ']' {what}")
            stack[-1][1].append(_apply(operator, values))
        elif len(word) == 1 and word in "0123456789":
            stack[-1][1].append(int(word))
        else:
            raise ValueError(f"token {at} is {quoted(word)}, not one of {' '.join(VOCABULARY[1:])}")
    if len(stack) > 1:
        raise ValueError(f"{stack[-1][0]} is never closed")
    if len(stack[0][1]) != 1:
        raise ValueError(f"there must be one expression, got {len(stack[0][1])}")
    return stack[0][1][0]


def _apply(operator: str, values: list[int]) -> int:
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    values, half = sorted(values), len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) // 2


def brackets(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Where the lists of an expression begin and end: what any tree that computes it must have,
    however it splits a list.

    >>> brackets(parse("[MAX 2 [SM 9 4 ] ]").tokens)
    [(2, 5), (0, 6)]
    """
    opened, found = [], []
    for at, token in enumerate(tokens):
        if 1 <= token <= len(OPERATORS):
            opened.append(at)
        elif token == INDEX["]"]:
            found.append((opened.pop(), at))
    return found


def brackets_found(tokens: Tensor, trees: Trees) -> tuple[int, int]:
    """How many of the brackets of all expressions ``(B, n)`` trees have, and how many there are."""
    there = total = 0
    for row, bounds, length in zip(tokens.tolist(), trees.bounds.tolist(), trees.lengths.tolist()):
        mine = brackets(row[:length])
        there += len(set(mine) & set(map(tuple, bounds[: length - 1])))
        total += len(mine)
    return there, total


def parse(text: str) -> Expression:
    """An expression without parentheses, evaluated; the gold tree comes from the operators.

    The tree is left-binarised, the operator and ``]`` included: ((([MAX 2) 9) ]).

    >>> e = parse("[MAX 2 [SM 9 4 ] ]")
    >>> e.label, e.transitions.tolist()
    (3, [0, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1])
    """
    words = text.split()
    label = evaluate(words)
    actions: list[int] = []
    depth = 0
    for word in words:
        actions.append(SHIFT)
        if word in OPERATORS:
            depth += 1
            continue
        if word == "]":
            actions.append(REDUCE)
            depth -= 1
        if depth:  # a value, or a list just closed, joins what stands left of it
            actions.append(REDUCE)
    return _expression(words, label, actions)


def _expression(words: Sequence[str], label: int, actions: Sequence[int]) -> Expression:
    tokens = np.array([INDEX[word] for word in words], np.int16)
    return Expression(tokens, label, np.array(actions, np.int8))


def generate(
    count: int,
    seed: int = 0,
    max_depth: int = 20,
    max_args: int = 5,
    operator_prob: float = 0.25,
    min_length: int = 1,
    max_length: int | None = None,
    exclude: Collection[str] = (),
) -> list[Expression]:
    """Distinct expressions from the published grammar, in random order; same seed, same list.

    A value is a digit, or with ``operator_prob`` (above ``max_depth``) one of four operators and 2
    to ``max_args`` values (Nangia & Bowman, "ListOps: A diagnostic dataset for latent tree
    learning", NAACL 2018). As in the published set expressions are drawn until so many differ,
    which makes short ones rarer than in the grammar: 100,000, split into 90,000 and 10,000, have
    the lengths of the official files. Any part of the list is a fair sample of it.

    Args:
        count: how many
        max_depth: of a digit below nested operators, which are at most ``max_depth − 1`` deep
        max_args: the most arguments of an operator
        operator_prob: of an operator where one is allowed
        min_length, max_length: in tokens; others are drawn again
        exclude: expressions (``str``) that must not appear, such as those of a test set

    Trees matter where expressions nest. Left-branching trees have all spans of [MAX 2 9 ], and few
    of longer expressions:

    >>> from structmax.data import Trees
    >>> nested = generate(100, seed=1, max_depth=5, min_length=12, max_length=30)
    >>> str(nested[0])
    '[MED 5 4 [MED 6 6 8 4 ] 8 3 ]'
    >>> gold = Trees.from_transitions([e.transitions for e in nested])
    >>> bool(Trees.left(gold.lengths).f1(gold).mean() < 0.4)
    True
    """
    if not (count >= 0 and max_depth >= 1 and max_args >= 2 and 0 <= operator_prob <= 1):
        raise ValueError(
            "listops.generate: count ≥ 0, max_depth ≥ 1, max_args ≥ 2 and 0 ≤ operator_prob ≤ 1 "
            f"are needed, got {count}, {max_depth}, {max_args} and {operator_prob}."
        )
    rng = random.Random(seed)
    most = float("inf") if max_length is None else max_length
    found: dict[str, None] = {}
    exclude, misses = set(exclude), 0
    while len(found) < count:
        words = _draw(rng, max_depth, max_args, operator_prob)
        text = " ".join(words)
        if min_length <= len(words) <= most and text not in found and text not in exclude:
            found[text], misses = None, 0
        elif (misses := misses + 1) > 200_000:
            raise ValueError(
                f"listops.generate: found {len(found)} of {count} expressions, and none new in the "
                "last 200,000 drawn. Ask for fewer, or allow more lengths or depth."
            )
    texts = list(found)
    rng.shuffle(texts)
    return [parse(text) for text in texts]


def _draw(rng: random.Random, max_depth: int, max_args: int, operator_prob: float) -> list[str]:
    """One expression of the grammar, without recursion: a stack of how many arguments are due."""
    words: list[str] = []
    due = [1]
    while True:
        while due and due[-1] == 0:
            due.pop()
            if due:
                words.append("]")
        if not due:
            return words
        due[-1] -= 1
        if len(due) < max_depth and rng.random() < operator_prob:
            words.append(OPERATORS[rng.randrange(len(OPERATORS))])
            due.append(rng.randint(2, max_args))
        else:
            words.append(str(rng.randrange(10)))


def read(path: str | Path) -> list[Expression]:
    """The expressions of a file in the official format, possibly compressed (``.xz``).

    A line has a label, a tab, and tokens with parentheses, which give the gold tree. A broken line
    raises ``ValueError`` with the file, the line's number and what is wrong with it.
    """
    found: list[Expression] = []
    for number, line in read_lines(path):
        try:
            found.append(parse_line(line))
        except ValueError as error:
            raise fault(path, number, str(error)) from None
    return found


def parse_line(line: str) -> Expression:
    """One line of the official format.

    >>> parse_line("9\\t( ( ( [MAX 2 ) 9 ) ] )").transitions.tolist()
    [0, 0, 1, 0, 1, 0, 1]
    >>> parse_line("4\\t( ( ( [MAX 2 ) 9 ) ] )")
    Traceback (most recent call last):
    ValueError: the label is 4 but the expression's value is 9
    """
    label, tab, text = line.partition("\t")
    if not tab:
        raise ValueError(f"expected a label, a tab and an expression, got {quoted(line)}")
    if len(label) != 1 or label not in "0123456789":
        raise ValueError(f"the label must be a digit, got {quoted(label)}")
    words: list[str] = []
    actions: list[int] = []
    due: list[int] = []  # how many children each open parenthesis has so far
    for token in text.split():
        if token == "(":
            due.append(0)
            continue
        if token == ")":
            if not due or due[-1] != 2:
                got = f"a node with {due[-1]} children, not 2" if due else "nothing"
                raise ValueError(f"')' after token {len(words) - 1} closes {got}")
            due.pop()
            actions.append(REDUCE)
        else:
            words.append(token)
            actions.append(SHIFT)
        if due:
            due[-1] += 1
    if due:
        raise ValueError(f"{len(due)} '(' never closed")
    value = evaluate(words)
    if value != int(label):
        raise ValueError(f"the label is {label} but the expression's value is {value}")
    if len(actions) != 2 * len(words) - 1:
        raise ValueError(
            f"{len(words)} tokens need {len(words) - 1} pairs of parentheses, got "
            f"{len(actions) - len(words)}"
        )
    return _expression(words, value, actions)


def write(path: str | Path, expressions: Sequence[Expression]) -> None:
    """Write the official format, compressed if the name ends in ``.xz``."""
    path = Path(path)
    with lzma.open(path, "wt") if path.suffix == ".xz" else path.open("w") as out:
        for e in expressions:
            out.write(f"{e.label}\t{_bracketed(e)}\n")


def _bracketed(e: Expression) -> str:
    stack: list[str] = []
    words = iter(e.words)
    for action in e.transitions:
        if action == SHIFT:
            stack.append(next(words))
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(f"( {left} {right} )")
    return stack[0]
