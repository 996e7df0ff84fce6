"""CoNLL-U: Universal Dependencies, with enhanced graphs (needs the package ``conllu``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from structmax.data.folder import fault, quoted, read_lines

MOST_STEPS = 10_000  # through the empty nodes of a sentence; there may be 2ⁿ ways through n
LONGEST_LABEL = 1000  # characters, of such a way
FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
EXPECTED = {"id": "a number, as 3, 3-4 or 3.1", "head": "a number", "deps": "head:label|…"}


class Sentence(NamedTuple):
    """A sentence of n words; word t has number t + 1, and 0 is the root.

    Heads are ``None`` where the file has ``_``. An arc of the enhanced graph is a triple ``(head,
    word, label)``; a word may have several, and the graph may have cycles.
    """

    words: list[str]
    upos: list[str]
    heads: list[int | None]
    deprels: list[str]
    enhanced: list[tuple[int, int, str]]


def read(path: str | Path) -> list[Sentence]:
    """The sentences of a file, possibly compressed (``.xz``).

    A malformed line raises ``ValueError`` with the file, the line's number and what is wrong.
    """
    return parse(read_lines(path), str(path))


def parse(lines: Iterable[tuple[int, str]], source: str = "line") -> list[Sentence]:
    """The sentences of numbered lines.

    Of a multiword token (``2-3``) the words 2 and 3 count, not the surface form. Empty nodes
    (``2.1``) are no words: in the enhanced graph, a path through them becomes one arc whose label
    joins theirs by ``>``.

    >>> text = '''# text = du vin
    ... 1-2 du  _ _    _ _ _ _    _        _
    ... 1   de  _ ADP  _ _ 3 case 3.1:case _
    ... 2   le  _ DET  _ _ 3 det  _        _
    ... 3   vin _ NOUN _ _ 0 root 0:root   _
    ... 3.1 bon _ ADJ  _ _ _ _    3:amod   _'''
    >>> rows = [line if line[0] == "#" else "\\t".join(line.split()) for line in text.split("\\n")]
    >>> (sentence,) = parse(enumerate(rows, 1))
    >>> sentence.words, sentence.heads
    (['de', 'le', 'vin'], [3, 3, 0])
    >>> sentence.enhanced
    [(3, 1, 'amod>case'), (0, 3, 'root')]
    """
    try:
        from conllu.exceptions import ParseException
        from conllu.parser import DEFAULT_FIELD_PARSERS
    except ImportError as error:
        raise ImportError("CoNLL-U needs a package: pip install 'structmax[tasks]'") from error
    parsers = {name: DEFAULT_FIELD_PARSERS[name] for name in ("id", "head", "deps")}
    sentences: list[Sentence] = []
    rows: list[tuple[int, Any]] = []
    for number, line in lines:
        if not line.strip():
            if rows:
                sentences.append(_sentence(rows, source))
                rows = []
        elif not line.startswith("#"):
            fields = line.split("\t")
            if len(fields) != len(FIELDS):
                raise fault(source, number, f"expected 10 columns between tabs, got {len(fields)}")
            if "" in fields:
                at = fields.index("") + 1
                raise fault(source, number, f"column {at} is empty; what is not there is a _")
            row: dict[str, Any] = dict(zip(FIELDS, fields, strict=True))
            for at, name in enumerate(FIELDS):  # conllu's parse_line would split at two spaces too
                if name in parsers:
                    try:
                        row[name] = parsers[name](fields, at)
                    except ParseException:
                        message = f"the {name} must be {EXPECTED[name]}, got {quoted(fields[at])}"
                        raise fault(source, number, f"column {at + 1}: {message}") from None
                    except ValueError as error:  # of thousands of digits
                        raise fault(source, number, f"column {at + 1}: {error}") from None
            rows.append((number, row))
    if rows:  # the last sentence of a file without an empty line at its end
        sentences.append(_sentence(rows, source))
    return sentences


def _sentence(rows: list[tuple[int, Any]], source: str) -> Sentence:
    words = [(number, row) for number, row in rows if isinstance(row["id"], int)]
    if not words:
        raise fault(source, rows[0][0], "a sentence without words")
    for expected, (number, row) in enumerate(words, 1):
        if row["id"] != expected:
            raise fault(source, number, f"expected word {expected}, got {row['id']}")
        head = row["head"]
        if head is not None and (head == expected or not 0 <= head <= len(words)):
            message = f"the head must be another of 0 to {len(words)}, got {head}"
            raise fault(source, number, message)
    return Sentence(
        [row["form"] for _, row in words],
        [row["upos"] for _, row in words],
        [row["head"] for _, row in words],
        [row["deprel"] for _, row in words],
        _enhanced(rows, source),
    )


def _enhanced(rows: list[tuple[int, Any]], source: str) -> list[tuple[int, int, str]]:
    heads: dict[Any, list[tuple[str, Any]]] = {}
    for number, row in rows:
        node, deps = row["id"], row["deps"]
        if isinstance(node, tuple) and node[1] == "-":
            continue
        if deps is not None and not isinstance(deps, list):
            raise fault(source, number, f"expected head:label|… in column 9, got {quoted(deps)}")
        heads[node] = deps or []
    heads[0] = []
    for number, row in rows:
        for _, head in heads.get(row["id"], []):
            if head not in heads:
                raise fault(source, number, f"column 9 has a head {head} that is not there")

    steps = 0

    def above(node: Any, label: str, seen: tuple[Any, ...]) -> list[tuple[int, str]]:
        """The words that a node hangs from, through any empty nodes between."""
        nonlocal steps
        found = []
        for name, head in heads[node]:
            joined = f"{name}>{label}" if label else name
            if isinstance(head, int):
                found.append((head, joined))
            elif head not in seen:
                steps += 1
                if steps > MOST_STEPS or len(joined) > LONGEST_LABEL:
                    message = "the graph has too many ways through empty nodes, or too long ones"
                    raise fault(source, rows[0][0], message)
                found += above(head, joined, (*seen, head))
        return found

    words = [node for node in heads if isinstance(node, int) and node]
    return [(head, word, label) for word in words for head, label in above(word, "", ())]
