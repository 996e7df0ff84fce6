"""What REINFORCE knows of its draws, and baselines."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from structmax.estimators.running import RunningMoments
from structmax.primitive import recordable, untransformed, unwrapped
from structmax.structures.base import Structure

KINDS = (None, "ema", "self-critic", "leave-one-out")


class Draws(NamedTuple):
    """Structures ``(samples, *batch, *parts)``; the rest is ``(samples, *batch)``."""

    z: Tensor
    log_prob: Tensor
    costs: Tensor
    advantage: Tensor

    def kept(self) -> Draws | None:
        """For later, without gradients; None in ``vmap``, whose tensors do not outlive it."""
        with untransformed():
            plain = Draws(*map(unwrapped, self))
        same = all(a.shape == b.shape for a, b in zip(plain, self, strict=True))
        return plain if same else None

    def again(self) -> Draws:
        """What autograd takes, also of draws that were made in inference mode."""
        return Draws(*map(recordable, self))


def regularized(loss: Tensor, structure: Structure, weight: float) -> Tensor:
    """loss − weight · H(p), where the structure has an entropy."""
    return loss - weight * structure.entropy() if weight and structure.supports("entropy") else loss


class Scale(RunningMoments):
    """Values over their running standard deviation in earlier calls, where that is above 1; as
    they are if ``on`` is False."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on = on

    def extra_repr(self) -> str:
        return f"on={self.on}"

    def forward(self, values: Tensor) -> Tensor:
        if not self.on:
            return values
        deviation = self.variance().sqrt().clamp(min=1.0).to(values)
        if self.training:  # what these draws teach serves the next
            self.update(values)
        return values / deviation


class Baseline(nn.Module):
    """b of E[(L(z) − b) ∇log p(z)]: a number that does not depend on the draw it stands beside.

    Args:
        owner: the name for errors
        kind: one of ``KINDS``, or a module from the inputs to ``(*batch)``
        samples: how many draws there are of each item
    """

    def __init__(self, owner: str, kind: str | nn.Module | None, samples: int) -> None:
        super().__init__()
        if not isinstance(kind, nn.Module) and kind not in KINDS:
            raise ValueError(
                f'{owner}: baseline must be None, "ema", "self-critic", "leave-one-out" or a '
                f"module, got {kind!r}."
            )
        least = 2 if kind == "leave-one-out" else 1
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < least:
            raise ValueError(
                f"{owner}: samples must be an integer, at least {least} with baseline={kind!r}, "
                f"got {samples!r}."
            )
        self.owner, self.kind, self.costs = owner, kind, RunningMoments()

    def extra_repr(self) -> str:
        return "" if isinstance(self.kind, nn.Module) else repr(self.kind)

    def applies_to(self, structure: Structure) -> bool:
        """Whether the structure has what is needed besides samples."""
        greedy = hasattr(structure, "greedy") or structure.supports("argmax")
        return self.kind != "self-critic" or greedy

    @torch.no_grad()
    def structures(self, structure: Structure) -> list[Tensor]:
        """Structures ``(1, *batch, *parts)`` whose costs are wanted besides those of the draws."""
        if self.kind != "self-critic":
            return []
        greedy = structure.greedy().z if hasattr(structure, "greedy") else structure.argmax()
        return [greedy[None]]

    def forward(self, costs: Tensor, others: Tensor, inputs: Any) -> Tensor:
        """b, broadcasting to the costs ``(samples, *batch)`` of draws; ``others`` as asked for.

        Only that of a module has a gradient.
        """
        if isinstance(self.kind, nn.Module):
            return self._predict(self.kind, costs, inputs)
        if self.kind == "leave-one-out":
            return (costs.sum(0) - costs) / (len(costs) - 1)
        if self.kind == "self-critic":
            return others[0]
        if self.kind == "ema":
            mean = self.costs.mean().to(costs)
            if self.training:  # what these draws teach serves the next
                self.costs.update(costs)
            return mean
        return costs.new_zeros(())

    def _predict(self, module: nn.Module, costs: Tensor, inputs: Any) -> Tensor:
        if inputs is None:
            raise ValueError(
                f"{self.owner}.loss: a module as the baseline needs its inputs. "
                "Use loss(structure, cost, inputs=x)."
            )
        b = module(inputs.detach() if isinstance(inputs, Tensor) else inputs)
        if b.shape != costs.shape[1:]:
            raise ValueError(
                f"{self.owner}.loss: the baseline must give one number for each item, "
                f"{tuple(costs.shape[1:])}, got {tuple(b.shape)}."
            )
        return b
