"""The face of pytorch-crf (0.7): ``from structmax.compat.torchcrf import CRF``.

Parameters have the same names, so checkpoints load. A mask may start late, which is an error in
pytorch-crf, and may have holes, where probabilities there do not sum to one; see
:class:`structmax.nn.CRF`.

>>> import torch
>>> crf = CRF(5, batch_first=True)
>>> emissions = torch.zeros(2, 3, 5)
>>> mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.uint8)
>>> crf(emissions, torch.zeros(2, 3, dtype=torch.long), mask=mask).shape  # log-likelihood, summed
torch.Size([])
>>> [len(tags) for tags in crf.decode(emissions, mask)]
[3, 2]
"""

from structmax.nn.crf import CRF

__all__ = ["CRF"]
