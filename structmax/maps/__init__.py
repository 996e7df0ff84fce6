"""Regularized argmax on the simplex, one map per file.

A map turns scores θ into p = argmaxΩ(θ) = argmax over p of ⟨p, θ⟩ − Ω(p), where p runs over the
simplex or a part of it. ``recipe`` makes maps differentiable; ``cpu`` and ``gpu`` hold kernels.
"""
