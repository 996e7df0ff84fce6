"""SNLI: does a premise entail a hypothesis, contradict it, or neither?

Bowman et al., "A large annotated corpus for learning natural language inference", EMNLP 2015.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from structmax.data.folder import fault, quoted, read_lines, read_objects

LABELS = ("entailment", "neutral", "contradiction")
_BY_NAME = {name: i for i, name in enumerate(LABELS)}
_FROM_ZERO = {str(i): i for i in range(3)}
_FROM_ONE = {"1": 1, "2": 2, "3": 0}  # neutral, contradiction, entailment


class Pair(NamedTuple):
    """Two sentences, as text, and the number of their label in ``LABELS``."""

    premise: str
    hypothesis: str
    label: int


def read(path: str | Path) -> list[Pair]:
    """The pairs of a file, possibly compressed (``.xz``), in one of four formats.

    - ``.jsonl``: an object per line with ``gold_label``, ``sentence1``, ``sentence2``, as published
    - text between tabs under a header with the same names, as published
    - text between tabs under a header with ``premise``, ``hypothesis``, ``label``; labels are
      0 entailment, 1 neutral, 2 contradiction
    - four columns between tabs and no header: the label twice, premise, hypothesis; labels are
      **1 neutral, 2 contradiction, 3 entailment**

    In all of them a pair has its label's place in ``LABELS``. Published pairs without a gold label
    (``-``) are left out. A malformed line raises ``ValueError`` with the file, the line's number
    and what is wrong with it.
    """
    name = Path(path).name.removesuffix(".xz")
    rows = _json(path) if name.endswith((".jsonl", ".json")) else _tabs(read_lines(path), path)
    found = []
    for number, label, labels, premise, hypothesis in rows:
        if label == "-":
            continue
        if label not in labels:
            wanted = ", ".join(labels)
            raise fault(path, number, f"the label must be of {wanted}, got {quoted(label)}")
        found.append(Pair(premise, hypothesis, labels[label]))
    return found


Row = tuple[int, str, dict[str, int], str, str]


def _json(path: str | Path) -> Iterator[Row]:
    names = ("gold_label", "sentence1", "sentence2")
    for number, row in read_objects(path, *names):
        label, premise, hypothesis = (row[name] for name in names)
        if not all(isinstance(text, str) for text in (label, premise, hypothesis)):
            raise fault(path, number, "gold_label, sentence1 and sentence2 must be text")
        yield number, label, _BY_NAME, premise, hypothesis


def _tabs(lines: Iterable[tuple[int, str]], path: str | Path) -> Iterator[Row]:
    places: list[int] = []
    labels: dict[str, int] = {}
    width = 0
    for number, line in lines:
        columns = line.split("\t")
        if number == 1:
            width = len(columns)
            for names, known in (
                (("gold_label", "sentence1", "sentence2"), _BY_NAME),
                (("label", "premise", "hypothesis"), _FROM_ZERO),
            ):
                if set(names) <= set(columns):
                    places, labels = [columns.index(name) for name in names], known
            if places:
                continue
            if width != 4:
                message = "expected a header with label, premise and hypothesis, or 4 columns"
                raise fault(path, number, message)
            places, labels = [0, 2, 3], _FROM_ONE
        if len(columns) != width:
            raise fault(path, number, f"expected {width} columns between tabs, got {len(columns)}")
        label, premise, hypothesis = (columns[place] for place in places)
        if labels is _FROM_ONE and columns[1] != label:
            got = f"{quoted(label)}, {quoted(columns[1])}"
            raise fault(path, number, f"expected one label twice, got {got}")
        yield number, label, labels, premise, hypothesis
