"""The contract suite, usable on a user's own structure.

>>> import structmax as sx, torch
>>> from structmax.testing import check_structure
>>> def chain():
...     return sx.LinearChain(torch.randn(3, 2).double(), torch.randn(2, 2).double())
>>> check_structure(chain, skip=("compile", "gradients"))

``CHECKS`` has the checks by name, to run one alone; it raises where the structure fails.

>>> from structmax.testing import CHECKS
>>> CHECKS["marginals"](chain)
"""

from structmax.testing.contract import CHECKS, check_structure

__all__ = ["CHECKS", "check_structure"]
