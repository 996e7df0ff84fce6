"""The table of estimators: a row here is tested on every structure that it applies to."""

from __future__ import annotations

from collections.abc import Callable

import torch

from structmax import estimators as est


def seeded(make: Callable[..., est.Estimator], **options: object) -> Callable[[], est.Estimator]:
    """A row whose noise comes from a generator with a seed."""
    return lambda: make(**options, generator=torch.Generator().manual_seed(0))


ESTIMATORS: dict[str, Callable[[], est.Estimator]] = {
    "marginals": est.Marginals,
    "sparsemap": est.SparseMAP,
    "perturbed": seeded(est.Perturbed, samples=4),
    "perturbed-gumbel": seeded(est.Perturbed, sigma=0.5, samples=1, noise="gumbel"),
    "perturb-and-parse": seeded(est.PerturbAndParse),
    "perturb-and-parse-hard": seeded(est.PerturbAndParse, hard=True, samples=2),
    "straight-through": est.StraightThrough,
    "straight-through-marginals": lambda: est.StraightThrough("marginals"),
    "straight-through-softmax": lambda: est.StraightThrough("softmax"),
    "straight-through-beam": lambda: est.StraightThrough("beam", k=4),
    "spigot": lambda: est.SPIGOT(step=3.0),
    "spigot-steps": lambda: est.SPIGOT(step=0.5, pullback_steps=3),
    "spigot-cross-entropy": lambda: est.SPIGOT(variant="cross-entropy"),
    "spigot-exponentiated": lambda: est.SPIGOT(variant="exponentiated"),
    "black-box": est.BlackBox,
    "gumbel-straight-through": seeded(est.GumbelStraightThrough, temperature=0.7, samples=2),
    "perturb-and-map": seeded(est.PerturbAndMAP, samples=2),
    "imle": seeded(est.IMLE),
    "imle-adaptive": seeded(est.IMLE, lam="adaptive", samples=2, noise="normal"),
    "imle-marginals": lambda: est.IMLE(lam=0.1, noise=None, oracle="marginals"),
    "reinforce": seeded(est.Reinforce),
    "reinforce-self-critic": seeded(est.Reinforce, samples=2, baseline="self-critic"),
    "reinforce-leave-one-out": seeded(
        est.Reinforce, samples=3, baseline="leave-one-out", normalize=True, entropy_weight=0.1
    ),
    "ppo": seeded(est.PPO, samples=2, baseline="ema"),
    "sparse-expectation": est.SparseExpectation,
    "top-k-expectation": lambda: est.TopKExpectation(k=3),
    "sum-and-sample": seeded(est.SumAndSample, k=2),
    "exact-expectation": est.ExactExpectation,
}

# estimators whose gradient in the scores of additional parts (transitions, moves, …) is none
WITHOUT_ADDITIONAL = {
    "straight-through",
    "straight-through-softmax",
    "perturb-and-map",
    "gumbel-straight-through",
}
