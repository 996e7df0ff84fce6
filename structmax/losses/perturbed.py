"""The loss of a perturbed argmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from structmax.losses.fenchel_young import best_score, check_reduction, fenchel_young
from structmax.losses.target import Target
from structmax.structures.base import Structure


def perturbed(
    structure: Structure,
    target: Any,
    *,
    sigma: float = 1.0,
    samples: int = 10,
    noise: str = "normal",
    generator: torch.Generator | None = None,
    reduction: str = "mean",
) -> Tensor:
    """L(θ, y) = E max_z ⟨θ + σε, z⟩ − ⟨θ, y⟩, with noise ε on the primary parts.

    (Berthet et al., "Learning with differentiable perturbed optimizers", NeurIPS 2020.) The
    expectation is the conjugate of an Ω that has no closed form; Ω(y) is left out, so this is the
    Fenchel-Young loss up to a constant free of θ. Its gradient is E argmax(θ + σε) − y. Value and
    gradient are averages over ``samples`` draws, without bias; each draw's argmax is locally
    constant, so second derivatives of the average are 0.

    With Gumbel noise and σ = 1, the loss of a ``Choice`` is the log loss + 0.5772, Euler's constant
    and the mean of ε.

    For every structure that has an ``argmax``. In ``GridPath(moves="all")``, whose scores cannot
    exceed 0, the noise is cut off there, and the loss is biased. The structure's smoothing plays no
    part. Targets: see :func:`crf`.

    Args:
        sigma: the scale of the noise
        samples: how many draws
        noise: ``"normal"`` or ``"gumbel"``
        generator: of the noise

    >>> import structmax as sx
    >>> scores = torch.tensor([0.0, 1.0, 3.0], requires_grad=True)
    >>> seed = torch.Generator().manual_seed(0)
    >>> noisy = {"noise": "gumbel", "samples": 10_000, "generator": seed}
    >>> loss = sx.losses.perturbed(sx.Choice(scores), torch.tensor(2), **noisy)
    >>> round(loss.item() - 0.5772, 1), round(sx.losses.crf(sx.Choice(scores), 2).item(), 1)
    (0.2, 0.2)
    >>> loss.backward()
    >>> (scores.grad - (scores.softmax(0) - torch.tensor([0.0, 0.0, 1.0]))).abs().max() < 0.02
    tensor(True)
    """
    check_reduction("perturbed", reduction)
    _check(sigma, samples)
    goal = Target("perturbed", structure, target)
    shape = (samples, *structure.batch_shape, *structure.event_shape)
    epsilon = _draw(noise, shape, goal.structure._parts()[0], generator)
    value = best_score(goal.structure.perturb(sigma * epsilon)).mean(0)
    return fenchel_young(goal, value, 0.0, reduction, constant_known=False)


def _draw(
    noise: str, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    place: Any = {"dtype": like.dtype, "device": like.device}
    if noise == "normal":
        return torch.randn(shape, generator=generator, **place)
    if noise == "gumbel":
        return -torch.empty(shape, **place).exponential_(generator=generator).log()
    raise ValueError(f'perturbed: noise must be "normal" or "gumbel", got {noise!r}.')


def _check(sigma: float, samples: int) -> None:
    if not 0 <= sigma < math.inf:
        raise ValueError(f"perturbed: sigma must be a number of at least 0, got {sigma!r}.")
    if type(samples) is not int or samples < 1:
        raise ValueError(f"perturbed: samples must be at least 1, an integer, got {samples!r}.")
