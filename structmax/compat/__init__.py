"""The faces of other libraries: change the import, keep the calls.

``structmax.compat.torchcrf`` (pytorch-crf), ``structmax.compat.entmax`` (entmax) and
``structmax.compat.torch_struct`` (torch-struct) have the names, signatures, shapes and conventions
of those libraries and are answered by structmax. No algorithm lives here. What differs on purpose
stands in each docstring; ``docs/migration.md`` says how to go on to structmax's own names.

>>> import torch
>>> from structmax.compat.entmax import entmax15
>>> entmax15(torch.tensor([-2.0, 0.0, 0.5]))
tensor([0.0000, 0.3260, 0.6740])
"""
