"""The chain's recursion in JAX, compiled: the yardstick for what a compiler makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compiled(unary: Tensor, transition: Tensor, backward: bool) -> Callable[[], Any]:
    """A ``(B)``, and its gradient if asked, for scores that are JAX's own arrays before the clock
    starts. αₜ(j) = u(t, j) + log Σᵢ exp(αₜ₋₁(i) + T(t, i, j)) in a scan over positions."""
    import jax
    import jax.numpy as jnp

    def value(u: Any, t: Any) -> Any:
        def step(alpha: Any, given: Any) -> Any:
            own, across = given
            return own + jax.nn.logsumexp(alpha[:, :, None] + across, axis=1), None

        last, _ = jax.lax.scan(step, u[:, 0], (u[:, 1:].swapaxes(0, 1), t.swapaxes(0, 1)))
        return jax.nn.logsumexp(last, axis=-1)

    def both(u: Any, t: Any) -> Any:
        def total(u: Any, t: Any) -> Any:
            a = value(u, t)
            return a.sum(), a

        (_, a), slopes = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(u, t)
        return a, *slopes

    run = jax.jit(both if backward else value)
    given = [jnp.asarray(t.cpu().numpy()) for t in (unary, transition)]
    return lambda: jax.block_until_ready(run(*given))


def answer(run: Callable[[], Any]) -> list[Tensor]:
    """What it gives, as tensors."""
    import numpy as np

    out = run()
    return [torch.from_numpy(np.array(x)) for x in (out if isinstance(out, tuple) else (out,))]
