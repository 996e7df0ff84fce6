"""BLEU of translations that are tokenized already."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

LONGEST = 4  # of the n-grams


class Bleu:
    """Corpus BLEU (Papineni et al., "BLEU: a method for automatic evaluation of machine
    translation", ACL 2002), in per cent, as ``sacrebleu --tokenize none`` has it.

    With cᵢ the n-grams of length i that are in the reference too, at most as often, of tᵢ in all,
    and with h and r the words of the translations and of the references::

        BLEU = 100 · min(1, exp(1 − r/h)) · (Π cᵢ/tᵢ)^¼

    Where cᵢ = 0, the k-th time that happens, it is 1/2ᵏ ("exp" smoothing, sacrebleu's default).

    >>> bleu = Bleu()
    >>> bleu.add("the cat is on the mat".split(), "the cat sat on the mat".split())
    >>> round(bleu.value, 2)
    37.99
    """

    def __init__(self) -> None:
        self.same, self.total = [0] * LONGEST, [0] * LONGEST
        self.words = self.wanted = 0

    def add(self, found: Sequence[str], reference: Sequence[str]) -> None:
        """Take in a sentence."""
        self.words, self.wanted = self.words + len(found), self.wanted + len(reference)
        for i in range(LONGEST):
            mine, theirs = _ngrams(found, i + 1), _ngrams(reference, i + 1)
            self.same[i] += (mine & theirs).total()
            self.total[i] += mine.total()

    def __add__(self, other: Bleu) -> Bleu:
        both = Bleu()
        both.same = [a + b for a, b in zip(self.same, other.same)]
        both.total = [a + b for a, b in zip(self.total, other.total)]
        both.words, both.wanted = self.words + other.words, self.wanted + other.wanted
        return both

    @property
    def value(self) -> float:
        """BLEU of what was taken in; 0 of no words at all."""
        if not self.words or not self.same[0]:
            return 0.0
        total, halved = 0.0, 1.0
        for same, count in zip(self.same, self.total):
            if not count:
                return 0.0
            if not same:
                halved *= 2
            total += math.log(same / count if same else 1 / (halved * count))
        short = min(0.0, 1 - self.wanted / self.words)
        return 100 * math.exp(total / LONGEST + short)


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
