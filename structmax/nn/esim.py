"""Two sentences compared word by word, along any kind of alignment."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from structmax.maps.sparsemax import sparsemax
from structmax.nn.leaf_lstm import LeafLSTM, zero_padding
from structmax.structures.assignment import Assignment
from structmax.structures.linear_chain import LinearChain

ALIGNMENTS = ("softmax", "sparsemax", "assignment", "sequence", "uniform", "random")
FAR = 3  # moves of a sequence further than this count alike


class ESIM(nn.Module):
    """Classifies pairs of sentences by comparing each word with those aligned to it.

    Chen, Zhu, Ling, Wei, Jiang & Inkpen, "Enhanced LSTM for natural language inference", ACL 2017:
    with a, b the words of both sentences in context and e = a bᵀ, each word is compared with
    ã = W b and b̃ = Wʹ a, by [a, ã, a − ã, a ⊙ ã], and the comparisons are read by a second LSTM.
    The weights W ``(n, m)`` and Wʹ ``(m, n)`` are

    - ``"softmax"``, ``"sparsemax"`` of each row of e, and of eᵀ;
    - ``"assignment"``: SparseMAP of a matching of the words of both; Wʹ = Wᵀ;
    - ``"sequence"``: SparseMAP of a chain, whose tags are the words of the other sentence and whose
      transitions score how far an alignment moves from a word to the next; of each sentence
      (both from Niculae, Martins, Blondel & Cardie, "SparseMAP", ICML 2018, section 5.2);
    - ``"uniform"``: the mean of all words; ``"random"``: one word, drawn anew each time. Neither
      looks at e.

    Args:
        vocabulary, classes: how many there are; word 0 is padding
        alignment: one of the above
        input_size: of the word vectors
        hidden_size: d, an even number
        dropout: before each layer
        max_iter: of SparseMAP; fewer are faster and use fewer structures

    >>> _ = torch.manual_seed(0)
    >>> model = ESIM(9, 3, "assignment", 6, 8)
    >>> premise, hypothesis = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([[4, 3], [8, 0]])
    >>> lengths = torch.tensor([3, 2]), torch.tensor([2, 1])
    >>> logits, weights = model(premise, lengths[0], hypothesis, lengths[1])
    >>> logits.shape, weights[0].shape, weights[1].shape
    (torch.Size([2, 3]), torch.Size([2, 3, 2]), torch.Size([2, 2, 3]))
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        alignment: str = "softmax",
        input_size: int = 100,
        hidden_size: int = 200,
        dropout: float = 0.0,
        max_iter: int = 20,
    ) -> None:
        super().__init__()
        if alignment not in ALIGNMENTS:
            raise ValueError(
                f"ESIM: alignment must be one of {', '.join(ALIGNMENTS)}, got {alignment!r}."
            )
        self.alignment, self.max_iter = alignment, max_iter
        self.embedding = nn.Embedding(vocabulary, input_size, padding_idx=0)
        nn.init.normal_(self.embedding.weight.data[1:], std=0.3)  # as GloVe has
        self.context = LeafLSTM(input_size, hidden_size)
        if alignment == "sequence":
            self.moves = nn.Parameter(torch.zeros(2, 2 * FAR + 1))
        self.compare = nn.Sequential(nn.Linear(4 * hidden_size, hidden_size), nn.ReLU())
        self.second = LeafLSTM(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Sequential(
            nn.Linear(4 * hidden_size, hidden_size),
            nn.Tanh(),
            self.dropout,
            nn.Linear(hidden_size, classes),
        )

    def forward(
        self,
        premise: Tensor,
        premise_lengths: Tensor,
        hypothesis: Tensor,
        hypothesis_lengths: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Logits ``(B, classes)`` of words ``(B, n)`` and ``(B, m)``, and the weights of the
        alignment, ``(B, n, m)`` and ``(B, m, n)``."""
        sides = (premise, premise_lengths), (hypothesis, hypothesis_lengths)
        a, b = (self.context(self.dropout(self.embedding(w)), size) for w, size in sides)
        weights = self._align(a @ b.mT, premise_lengths, hypothesis_lengths)
        pairs = (a, weights[0] @ b, premise_lengths), (b, weights[1] @ a, hypothesis_lengths)
        pools = [pool for pair in pairs for pool in self._compare(*pair)]
        return self.head(self.dropout(torch.cat(pools, -1))), weights

    def _compare(self, x: Tensor, other: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the maximum of a sentence's comparisons, ``(B, d)``."""
        compared = self.compare(self.dropout(torch.cat([x, other, x - other, x * other], -1)))
        states = self.second(self.dropout(compared), lengths)
        inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        highest = torch.where(inside[..., None], states, -torch.inf).amax(1)
        return zero_padding(states, lengths).sum(1) / lengths[:, None], highest

    def _align(self, e: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        if self.alignment == "assignment":  # its solver is compiled for the CPU
            sizes = n.cpu(), m.cpu()
            matching = Assignment(e.cpu(), sizes, validate_args=False)
            w = matching.sparsemap(max_iter=self.max_iter).marginals.to(e.device)
            return w, w.mT
        if self.alignment == "uniform":
            e = torch.zeros_like(e)
        if self.alignment == "random":
            e = torch.rand_like(e)
        return self._side(e, n, m, 0), self._side(e.mT, m, n, 1)

    def _side(self, e: Tensor, n: Tensor, m: Tensor, side: int) -> Tensor:
        """The weights ``(B, n, m)`` of the words of one side."""
        rows = torch.arange(e.shape[1], device=e.device) < n[:, None]
        columns = torch.arange(e.shape[2], device=e.device) < m[:, None]
        inside = rows[:, :, None] & columns[:, None]
        if self.alignment == "sparsemax":
            return sparsemax(e, mask=inside)
        if self.alignment == "sequence":
            at = torch.arange(e.shape[2], device=e.device)
            moves = self.moves[side][(at - at[:, None]).clamp(-FAR, FAR) + FAR]  # (m, m)
            unary = torch.where(columns[:, None], e, -torch.inf).cpu()
            chain = LinearChain(unary, moves.cpu(), lengths=n.cpu(), validate_args=False)
            return chain.sparsemap(max_iter=self.max_iter).marginals.to(e.device)
        e = torch.where(inside, e, torch.finfo(e.dtype).min)
        if self.alignment == "random":
            chosen = nn.functional.one_hot(e.argmax(-1), e.shape[-1]).to(e.dtype)
            return torch.where(inside, chosen, 0.0)
        return torch.where(inside, e.softmax(-1), 0.0)
