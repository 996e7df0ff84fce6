"""The face of entmax (1.3): ``from structmax.compat.entmax import sparsemax, Entmax15Loss, …``.

Functions, modules and losses have entmax's names, arguments and defaults. structmax's maps are
exact, so ``k`` (how much to sort), ``n_iter`` (how often to bisect) and ``ensure_sum_one`` are
taken and not used. Besides:

- α = 1 is softmax, exactly; α < 1 is an error.
- −inf forbids an entry everywhere, and a row of −inf alone gets zeros.
- α of ``entmax_bisect_loss`` may differ between rows, ``(n, 1)``, and receives a gradient; entmax
  returns an n × n tensor there. Scores may have any number of batch dimensions.
- Targets equal to ``ignore_index`` are left out whatever it is; entmax fails at its default, −100.

>>> x = torch.tensor([[-2.0, 0.0, 0.5]])
>>> sparsemax(x, dim=-1), entmax15(x, dim=-1)
(tensor([[0.0000, 0.2500, 0.7500]]), tensor([[0.0000, 0.3260, 0.6740]]))
>>> entmax_bisect(x, alpha=1.25)
tensor([[0.0053, 0.3521, 0.6426]])
>>> Entmax15Loss()(x, torch.tensor([1]))
tensor(0.6844)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from structmax import losses
from structmax.maps.budgetmax import budgetmax
from structmax.maps.entmax import entmax
from structmax.maps.normmax import normmax
from structmax.maps.sparsemax import sparsemax as _sparsemax

Number = float | Tensor


def sparsemax(X: Tensor, dim: int = -1, k: int | None = None) -> Tensor:
    """``sx.sparsemax``.

    >>> sparsemax(torch.tensor([-2.0, 0.0, 0.5]), k=2)
    tensor([0.0000, 0.2500, 0.7500])
    """
    return _sparsemax(X, dim)


def entmax15(X: Tensor, dim: int = -1, k: int | None = None) -> Tensor:
    """``sx.entmax(x, 1.5)``.

    >>> entmax15(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.3260, 0.6740])
    """
    return entmax(X, 1.5, dim)


def sparsemax_bisect(
    X: Tensor, dim: int = -1, n_iter: int | None = 50, ensure_sum_one: bool = True
) -> Tensor:
    """``sx.sparsemax``.

    >>> sparsemax_bisect(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.2500, 0.7500])
    """
    return _sparsemax(X, dim)


def entmax_bisect(
    X: Tensor, alpha: Number = 1.5, dim: int = -1, n_iter: int = 50, ensure_sum_one: bool = True
) -> Tensor:
    """``sx.entmax(x, alpha)``; a tensor α, one for each row, receives a gradient.

    >>> alpha = torch.tensor([[1.0], [2.0]], requires_grad=True)
    >>> entmax_bisect(torch.tensor([-2.0, 0.0, 0.5]).expand(2, 3), alpha)
    tensor([[0.0486, 0.3592, 0.5922],
            [0.0000, 0.2500, 0.7500]], grad_fn=...)
    """
    return entmax(X, alpha, dim)


def normmax_bisect(X: Tensor, alpha: Number = 2, dim: int = -1, n_iter: int = 50) -> Tensor:
    """``sx.normmax(x, alpha)``; α may be a tensor, one for each row, without a gradient.

    >>> normmax_bisect(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    tensor([0.0000, 0.0239, 0.1746, 0.3254, 0.4761])
    """
    return _row_by_row(normmax, X, alpha, dim)


def budget_bisect(X: Tensor, budget: Number = 2, dim: int = -1, n_iter: int = 50) -> Tensor:
    """``sx.budgetmax(x, budget)``; a budget may be a tensor, one for each row, without a gradient.

    >>> budget_bisect(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    tensor([0.0000, 0.1250, 0.3750, 0.6250, 0.8750])
    """
    most = X.shape[dim]  # of more than that every entry has 1
    budget = budget.clamp(max=most) if isinstance(budget, Tensor) else min(budget, most)
    return _row_by_row(budgetmax, X, budget, dim)


def _row_by_row(
    function: Callable[[Tensor, float, int], Tensor], X: Tensor, number: Number, dim: int
) -> Tensor:
    """A map with one number for all rows, or with a number for each."""
    if not isinstance(number, Tensor) or number.numel() == 1:
        return function(X, float(number), dim)
    shape = list(X.shape)
    shape[dim] = 1
    rows = X.movedim(dim, -1)  # (*B, n)
    each = number.detach().expand(shape).movedim(dim, -1)  # (*B, 1)
    out = torch.zeros_like(rows)
    for value in each.unique().tolist():
        chosen = each == value
        out = out.masked_scatter(chosen, function(rows[chosen[..., 0]], value, -1))
    return out.movedim(-1, dim)


def sparsemax_loss(X: Tensor, target: Tensor, k: int | None = None) -> Tensor:
    """``sx.losses.entmax_loss(x, target, alpha=2, reduction="none")``.

    >>> sparsemax_loss(torch.tensor([[-2.0, 0.0, 0.5]]), torch.tensor([1]))
    tensor([0.5625])
    """
    return losses.entmax_loss(X, target, 2.0, reduction="none")


def entmax15_loss(X: Tensor, target: Tensor, k: int | None = None) -> Tensor:
    """``sx.losses.entmax_loss(x, target, reduction="none")``.

    >>> entmax15_loss(torch.tensor([[-2.0, 0.0, 0.5]]), torch.tensor([1]))
    tensor([0.6844])
    """
    return losses.entmax_loss(X, target, 1.5, reduction="none")


def sparsemax_bisect_loss(X: Tensor, target: Tensor, n_iter: int = 50) -> Tensor:
    """``sx.losses.entmax_loss(x, target, alpha=2, reduction="none")``.

    >>> sparsemax_bisect_loss(torch.tensor([[-2.0, 0.0, 0.5]]), torch.tensor([1]))
    tensor([0.5625])
    """
    return losses.entmax_loss(X, target, 2.0, reduction="none")


def entmax_bisect_loss(X: Tensor, target: Tensor, alpha: Number = 1.5, n_iter: int = 50) -> Tensor:
    """``sx.losses.entmax_loss(x, target, alpha, reduction="none")``.

    >>> entmax_bisect_loss(torch.tensor([[-2.0, 0.0, 0.5]]), torch.tensor([1]), alpha=2.0)
    tensor([0.5625])
    """
    return losses.entmax_loss(X, target, alpha, reduction="none")


def normmax_bisect_loss(X: Tensor, target: Tensor, alpha: Number = 2, n_iter: int = 50) -> Tensor:
    """The Fenchel-Young loss of normmax, ⟨x, p⟩ − x_y + 1 − ‖p‖_α with p = normmax(x).

    >>> normmax_bisect_loss(torch.tensor([[-2.0, 0.0, 0.5]]), torch.tensor([1]))
    tensor([0.5886])
    """
    _check_target("normmax_bisect_loss", X, target)
    p = normmax_bisect(X, alpha)
    exponent = torch.as_tensor(alpha, dtype=p.dtype, device=p.device)
    norm = (p**exponent).sum(-1, keepdim=True) ** (1 / exponent)
    score = torch.where(p > 0, X, 0.0).mul(p).sum(-1)
    return score - X.gather(-1, target[..., None])[..., 0] + 1 - norm[..., 0]


class Sparsemax(nn.Module):
    """:func:`sparsemax` as a module.

    >>> Sparsemax()(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.2500, 0.7500])
    """

    def __init__(self, dim: int = -1, k: int | None = None) -> None:
        super().__init__()
        self.dim, self.k = dim, k

    def forward(self, X: Tensor) -> Tensor:
        return sparsemax(X, self.dim)


class Entmax15(Sparsemax):
    """:func:`entmax15` as a module.

    >>> Entmax15()(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.3260, 0.6740])
    """

    def forward(self, X: Tensor) -> Tensor:
        return entmax15(X, self.dim)


class SparsemaxBisect(nn.Module):
    """:func:`sparsemax_bisect` as a module.

    >>> SparsemaxBisect()(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.2500, 0.7500])
    """

    def __init__(self, dim: int = -1, n_iter: int | None = None) -> None:
        super().__init__()
        self.dim, self.n_iter = dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        return sparsemax_bisect(X, self.dim)


class EntmaxBisect(nn.Module):
    """:func:`entmax_bisect` as a module.

    >>> EntmaxBisect(alpha=2.0)(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.2500, 0.7500])
    """

    def __init__(self, alpha: Number = 1.5, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__()
        self.alpha, self.dim, self.n_iter = alpha, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        return entmax_bisect(X, self.alpha, self.dim)


class NormmaxBisect(nn.Module):
    """:func:`normmax_bisect` as a module.

    >>> NormmaxBisect()(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    tensor([0.0000, 0.0239, 0.1746, 0.3254, 0.4761])
    """

    def __init__(self, alpha: Number = 2, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__()
        self.alpha, self.dim, self.n_iter = alpha, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        return normmax_bisect(X, self.alpha, self.dim)


class BudgetBisect(nn.Module):
    """:func:`budget_bisect` as a module.

    >>> BudgetBisect()(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    tensor([0.0000, 0.1250, 0.3750, 0.6250, 0.8750])
    """

    def __init__(self, budget: Number = 2, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__()
        self.budget, self.dim, self.n_iter = budget, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        return budget_bisect(X, self.budget, self.dim)


def _check_target(owner: str, X: Tensor, target: Tensor) -> None:
    if target.shape != X.shape[:-1]:
        raise ValueError(
            f"{owner}: target must be {tuple(X.shape[:-1])}, a class for each row of X "
            f"{tuple(X.shape)}, got {tuple(target.shape)}."
        )


class _Loss(nn.Module):
    """A loss over rows, reduced; rows whose target is ``ignore_index`` do not count."""

    def __init__(self, ignore_index: int, reduction: str) -> None:
        super().__init__()
        if reduction not in ("elementwise_mean", "sum", "none"):
            raise ValueError(
                f'{type(self).__name__}: reduction must be "elementwise_mean", "sum" or "none", '
                f"got {reduction!r}."
            )
        self.ignore_index, self.reduction = ignore_index, reduction

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, X: Tensor, target: Tensor) -> Tensor:
        _check_target(type(self).__name__, X, target)
        ignored = target == self.ignore_index
        X = torch.where(ignored[..., None], 0.0, X)  # they may hold anything
        loss = torch.where(ignored, 0.0, self.loss(X, torch.where(ignored, 0, target)))
        if self.reduction == "none":
            return loss
        total = loss.sum()
        return total if self.reduction == "sum" else total / (~ignored).sum()


class SparsemaxLoss(_Loss):
    """:func:`sparsemax_loss` as a module.

    >>> SparsemaxLoss(reduction="sum")(torch.tensor([[-2.0, 0.0, 0.5]]), torch.tensor([1]))
    tensor(0.5625)
    """

    def __init__(
        self, k: int | None = None, ignore_index: int = -100, reduction: str = "elementwise_mean"
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.k = k

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        return sparsemax_loss(X, target)


class Entmax15Loss(_Loss):
    """:func:`entmax15_loss` as a module.

    >>> x = torch.tensor([[-2.0, 0.0, 0.5], [9.0, 9.0, 9.0]])
    >>> Entmax15Loss(ignore_index=0)(x, torch.tensor([1, 0]))
    tensor(0.6844)
    """

    def __init__(
        self, k: int | None = 100, ignore_index: int = -100, reduction: str = "elementwise_mean"
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.k = k

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        return entmax15_loss(X, target)


class SparsemaxBisectLoss(_Loss):
    """:func:`sparsemax_bisect_loss` as a module.

    >>> SparsemaxBisectLoss()(torch.tensor([[-2.0, 0.0, 0.5]]), torch.tensor([1]))
    tensor(0.5625)
    """

    def __init__(
        self, n_iter: int = 50, ignore_index: int = -100, reduction: str = "elementwise_mean"
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.n_iter = n_iter

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        return sparsemax_bisect_loss(X, target)


class EntmaxBisectLoss(_Loss):
    """:func:`entmax_bisect_loss` as a module.

    >>> EntmaxBisectLoss(alpha=2.0)(torch.tensor([[-2.0, 0.0, 0.5]]), torch.tensor([1]))
    tensor(0.5625)
    """

    def __init__(
        self,
        alpha: Number = 1.5,
        n_iter: int = 50,
        ignore_index: int = -100,
        reduction: str = "elementwise_mean",
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.alpha, self.n_iter = alpha, n_iter

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        return entmax_bisect_loss(X, target, self.alpha)


class NormmaxBisectLoss(EntmaxBisectLoss):
    """:func:`normmax_bisect_loss` as a module.

    >>> NormmaxBisectLoss()(torch.tensor([[-2.0, 0.0, 0.5]]), torch.tensor([1]))
    tensor(0.5886)
    """

    def __init__(
        self,
        alpha: Number = 2,
        n_iter: int = 50,
        ignore_index: int = -100,
        reduction: str = "elementwise_mean",
    ) -> None:
        super().__init__(alpha, n_iter, ignore_index, reduction)

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        return normmax_bisect_loss(X, target, self.alpha)
