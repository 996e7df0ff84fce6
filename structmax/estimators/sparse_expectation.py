"""The expected cost under SparseMAP's distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from structmax.estimators.base import Estimator, call_cost
from structmax.estimators.exact_expectation import weighted_sum
from structmax.structures.base import Structure


class SparseExpectation(Estimator):
    """E[L(z)] = Σ pᵢ L(zᵢ) over the few structures that SparseMAP selects, without sampling.

    Correia, Niculae, Aziz & Martins, "Efficient marginalization of discrete and structured latent
    variables via sparsity", NeurIPS 2020. The distribution is SparseMAP's and not the structure's
    own, so this is no estimate of the Gibbs expectation. Where the active structures are linearly
    independent and stay the same, p and the gradient of the sum are exact. SparseMAP's mean is
    unique, but p need not be: where many distributions have that mean, as with trees, the one that
    is found can change from one point to the next, and the expectation of a cost that is not
    linear then jumps. Needs argmax, many times. The cost of a structure is evaluated once; in items
    with fewer structures than others, slots without probability are not given to a cost with two
    arguments.

    Args:
        options: of ``structure.sparsemap``

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.5, -2.0], requires_grad=True)
    >>> cost = lambda z: z @ torch.tensor([1.0, 5.0, 100.0])
    >>> loss = SparseExpectation().loss(sx.Choice(scores), cost)  # sparsemax: [¼, ¾, 0]
    >>> loss.backward()
    >>> loss.detach(), scores.grad
    (tensor(4.), tensor([-2.,  2.,  0.]))
    """

    objective = "E[L(z)]"
    distribution = "sparsemap"
    needs = frozenset(["sparsemap"])

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __repr__(self) -> str:
        return f"SparseExpectation({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    def loss(self, structure: Structure, cost: Callable[..., Tensor]) -> Tensor:
        sparse = structure.sparsemap(**self.options)
        p = sparse.probs.movedim(-1, 0)  # (k, *batch)
        z = sparse.structures.detach().movedim(len(structure.batch_shape), 0)
        return weighted_sum(p, call_cost(cost, z, structure, where=p > 0))
