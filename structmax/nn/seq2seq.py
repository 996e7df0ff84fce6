"""An encoder and a decoder, with any map of scores to weights between them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from structmax.nn.dot_product import attend, check_map
from structmax.nn.leaf_lstm import LeafLSTM

BLIND = ("uniform", "random")  # attention that does not look


class Translated(NamedTuple):
    """Words ``(B, m)``, 0 after the end; attention ``(B, m, n)`` to the words of the source."""

    words: Tensor
    weights: Tensor


class Seq2Seq(nn.Module):
    """A bidirectional LSTM reads, an LSTM writes and attends to what was read.

    The attention follows the decoder's state (Luong, Pham & Manning, "Effective approaches to
    attention-based neural machine translation", EMNLP 2015, "global" with the bilinear score) and
    does not feed it, so a whole sentence is trained at once. Its map may be any of
    :func:`structmax.nn.attend` (Niculae & Blondel, "A regularized framework for sparse and
    structured neural attention", NeurIPS 2017), or for comparison one that does not look at the
    scores: ``"uniform"``, the mean of the source, or ``"random"``, a word of it drawn anew each
    time.

    With ``map="csparsemax"`` each word of the source has a fertility: the attention that it gets
    from all words of the target together is at most that (Malaviya, Ferreira & Martins, "Sparse and
    constrained attention for neural machine translation", ACL 2018). The last word of each source,
    its end symbol, has no such bound, so that there is always something to attend to.

    Args:
        source, target: sizes of the vocabularies; word 0 is padding, word 1 any unknown one
        hidden_size: d, an even number
        map: of the scores of attention
        fertility: for csparsemax
        start, end: numbers of the target's first and last symbol; ``translate`` writes neither
            words 0 and 1 nor the start, so the end must be another one
        dropout: of words and of what is written
        map_options: as in :func:`structmax.nn.attend`

    >>> _ = torch.manual_seed(0)
    >>> model = Seq2Seq(9, 9, 8, map="sparsemax")
    >>> source, lengths = torch.tensor([[4, 5, 6, 3], [7, 3, 0, 0]]), torch.tensor([4, 2])
    >>> scores, weights = model(source, lengths, torch.tensor([[2, 5, 6], [2, 8, 0]]))
    >>> scores.shape, weights.shape  # of each next word; of each word of the source
    (torch.Size([2, 3, 9]), torch.Size([2, 3, 4]))
    >>> model.translate(source, lengths, most=5).words.shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        source: int,
        target: int,
        hidden_size: int,
        map: str = "softmax",
        fertility: float = 2.0,
        start: int = 2,
        end: int = 3,
        dropout: float = 0.0,
        **map_options: float,
    ) -> None:
        super().__init__()
        if map not in BLIND:
            check_map("Seq2Seq", map, map_options, later=("upper",))
        elif map_options:
            raise ValueError(
                f'Seq2Seq: map="{map}" takes no options, got {", ".join(map_options)}.'
            )
        if not 0 <= start < target or not 2 <= end < target or start == end:
            raise ValueError(
                f"Seq2Seq: start must be one of the {target} target words, and end another one "
                f"after 0, padding, and 1, unknown words; got start={start}, end={end}."
            )
        self.map, self.fertility, self.map_options = map, fertility, map_options
        self.start, self.end = start, end
        self.source = nn.Embedding(source, hidden_size, padding_idx=0)
        self.target = nn.Embedding(target, hidden_size, padding_idx=0)
        for embedding in (self.source, self.target):
            nn.init.normal_(embedding.weight.data[1:], std=hidden_size**-0.5)
        self.encoder = LeafLSTM(hidden_size, hidden_size)
        self.first = nn.Linear(hidden_size, 2 * hidden_size)
        self.decoder = nn.LSTM(hidden_size, hidden_size, batch_first=True)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.combine = nn.Linear(2 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, target)
        self.output.weight = self.target.weight  # tied (Press & Wolf 2017)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Scores ``(B, m, target)`` of the word after each one of ``target`` ``(B, m)``, and the
        weights ``(B, m, n)`` of attention to ``source`` ``(B, n)``."""
        memory = self._read(source, lengths)
        states, _ = self.decoder(self.dropout(self.target(target)), memory.state)
        if self.map != "csparsemax":
            context, weights, _ = self._attend(states, memory, None)
            return self._scores(states, context), weights
        left: Tensor | None = self._fertility(lengths, memory)
        steps = []
        for state in states.split(1, 1):  # what is left of a fertility depends on earlier words
            *step, left = self._attend(state, memory, left)
            steps.append(step)
        context, weights = (torch.cat(parts, 1) for parts in zip(*steps))
        return self._scores(states, context), weights

    @torch.no_grad()
    def translate(self, source: Tensor, lengths: Tensor, most: int) -> Translated:
        """The likeliest next word, one after the other, at most so many: greedy search."""
        if most < 1:
            raise ValueError(f"Seq2Seq.translate: most must be at least 1, got {most}.")
        memory = self._read(source, lengths)
        state = memory.state
        left = self._fertility(lengths, memory) if self.map == "csparsemax" else None
        word = torch.full((len(source), 1), self.start, device=source.device)
        over = torch.zeros_like(word, dtype=torch.bool)
        words, weights = [], []
        for step in range(1, most + 1):
            hidden, state = self.decoder(self.target(word), state)
            context, weight, left = self._attend(hidden, memory, left)
            scores = self._scores(hidden, context)
            for never in (0, 1, self.start):  # padding, unknown words, the start
                scores[..., never] = -torch.inf
            word = scores.argmax(-1)
            over = over | (word == self.end)
            word = word.where(~over, 0)
            words.append(word)
            weights.append(weight)
            if step % 8 == 0 and bool(over.all()):  # a look makes a device wait
                break
        return Translated(torch.cat(words, 1), torch.cat(weights, 1))

    # -- how --------------------------------------------------------------------------------------

    def _read(self, source: Tensor, lengths: Tensor) -> _Memory:
        values = self.encoder(self.dropout(self.source(source)), lengths)
        inside = torch.arange(source.shape[1], device=source.device) < lengths[:, None]
        first = torch.tanh(self.first(values.sum(1) / lengths[:, None]))
        state = tuple(part.contiguous()[None] for part in first.chunk(2, -1))
        return _Memory(self.key(values), values, inside[:, None], state)

    def _fertility(self, lengths: Tensor, memory: _Memory) -> Tensor:
        """What each word of the source may give, ``(B, 1, n)``; the last one without a bound."""
        at = torch.arange(memory.keys.shape[1], device=lengths.device)
        last = at == lengths[:, None, None] - 1
        return torch.where(last, torch.inf, memory.keys.new_tensor(self.fertility))

    def _attend(
        self, states: Tensor, memory: _Memory, left: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The context ``(B, m, d)``, its weights ``(B, m, n)``, and what is left of fertilities."""
        if self.map in BLIND:
            draw = torch.rand if self.map == "random" else torch.ones
            size = *states.shape[:2], memory.keys.shape[1]
            drawn = torch.where(memory.inside, draw(size, device=states.device), -1.0)
            highest = (drawn == drawn.amax(-1, keepdim=True)).to(states)
            weights = highest / highest.sum(-1, keepdim=True)
            return weights @ memory.values, weights, None
        options: dict[str, Any] = dict(self.map_options)
        if left is not None:
            options["upper"] = left.clamp(max=1.0)
        context, weights = attend(
            states, memory.keys, memory.values, self.map, mask=memory.inside, **options
        )
        return context, weights, None if left is None else (left - weights).clamp(min=0.0)

    def _scores(self, states: Tensor, context: Tensor) -> Tensor:
        joined = torch.tanh(self.combine(torch.cat([states, context], -1)))
        return self.output(self.dropout(joined))


class _Memory(NamedTuple):
    """Of what was read: keys and values ``(B, n, d)``, which are words ``(B, 1, n)``, and the state
    to start writing from."""

    keys: Tensor
    values: Tensor
    inside: Tensor
    state: Any
