"""The Matrix-Tree theorem without subtractions, for the CPU: value, derivatives and draws.

``W[i, j]`` is the weight of head j for word i. Removing word k hands its modifiers on to its heads,

    W[i, j] += W[i, k]·P[k, j],    P[k, j] = W[k, j] / S[k],    S[k] = Σ W[k, j] over what remains,

and Z is the product of the S[k] (Grassmann, Taksar and Heyman, 1985: elimination without a
subtraction, so every number keeps its relative accuracy). With all words but m removed, walking
back through P gives x[h], the chance that a walk up the heads from h meets the root before m, and

    P(head of m is h)  ∝  W[m, h]·x[h],

again without a subtraction. Halving the set of words (remove the right half for all m of the left,
and conversely, then recursively) makes this O(n³) for all m together. A draw (Colbourn, Myrvold and
Neufeld, 1996) fixes the head of each m as it goes.

A single root: let arcs of the root carry a factor ε and keep of every number its leading term in ε.
Sums, products and quotients of positive series respect leading terms, so the result is exact: the
coefficient of ε¹. Only entries ``W[i, 0]`` can be of order 1 (``late``); all others have order 0.

Where every arc exists and scores spread over at most ``CALM`` nats, the gradient comes from reverse
differentiation of the removals, which subtracts but takes a third of the time.

Numbers are kept as they are while their range is safe, else as logarithms; their derivatives
likewise (of the number, or of the logarithm).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.jit import array, exp, kernel, log, run_chunks

GRADIENT, HVP, DRAW = 0, 1, 2
CALM = 10.0  # nats of spread up to which subtractions cost less than five digits of sixteen


@kernel(inner=True)
def _plus(x: float, y: float) -> float:
    """log(e^x + e^y)."""
    high, low = max(x, y), min(x, y)
    return high if low == -math.inf else high + log(1.0 + exp(low - high))


@kernel(inner=True)
def _load(theta: Any, n: int, single: bool, gamma: float, W: Any) -> Any:
    """Fills W with scaled weights; (logs, calm, log-scale), NaN or −inf if that is the value.

    Numbers stay within e^±600 without logarithms: if all arcs exist, chances are at least e^−spread
    and waiting times at most e^spread, up to factors n; otherwise (e^spread·n)^n bounds them.
    """
    if n == 0:
        return False, False, 0.0
    scale, best_root, least, dense, common = 0.0, -math.inf, 0.0, True, -math.inf
    if single:  # exactly one of them is used: what they share is taken out before anything is added
        for i in range(1, n + 1):
            common = max(common, theta[0, i] / gamma)
    scale = common = common if abs(common) < math.inf else 0.0
    for i in range(1, n + 1):
        top = -math.inf
        for j in range(n + 1):
            if j == i:
                continue
            x = theta[j, i] / gamma
            if not x < math.inf:
                return False, False, math.nan
            W[i, j] = x - common if j == 0 else x
            dense &= x > -math.inf
            if j > 0 or not single:
                top = max(top, x)
        if top == -math.inf:
            top = W[i, 0]  # nothing but the root
        if top == -math.inf:
            return False, False, -math.inf
        for j in range(n + 1):
            W[i, j] = W[i, j] - top if j != i else -math.inf
        scale += top
        best_root = max(best_root, W[i, 0])
    if best_root == -math.inf:
        return False, False, -math.inf
    for i in range(1, n + 1):
        if single:
            W[i, 0] -= best_root
        for j in range(n + 1):
            if W[i, j] > -math.inf:
                least = min(least, W[i, j])
    logs = -least > 150.0 if dense else n * (math.log(n) - least) > 300.0
    if not logs:
        for i in range(1, n + 1):
            for j in range(n + 1):
                W[i, j] = exp(W[i, j])
    calm = dense and -least <= CALM
    return logs, calm, scale + best_root if single else scale


@kernel(inner=True, fused=True)
def _hand_on(
    W: Any, T: Any, late: Any, begin: int, end: int, k: int, lo: int, hi: int,
    P: Any, dP: Any, waits: Any, logs: bool, twice: bool,
) -> None:  # fmt: skip
    """Rows begin..end−1 take over the heads of k, which is removed; words lo..hi−1 remain."""
    # views count from 0, which lets loops vectorise
    rows, share, through = W[begin:end, lo:hi], P[k, lo:hi], W[begin:end, k]
    slopes, dshare, dthrough = T[begin:end, lo:hi], dP[k, lo:hi], T[begin:end, k]
    root_share, droot_share, arrives = P[k, 0], dP[k, 0], waits[k]
    zero = -math.inf if logs else 0.0
    size, dy, dboth = hi - lo, 0.0, 0.0
    for i in range(end - begin):
        a, root = through[i], W[begin + i, 0]
        if a == zero:
            continue
        if not logs:
            if twice:
                for j in range(size):
                    slopes[i, j] += dthrough[i] * share[j] + a * dshare[j]
                dy = dthrough[i] * root_share + a * droot_share
                dboth = T[begin + i, 0] + dy
            for j in range(size):
                rows[i, j] += a * share[j]
            y = a * root_share
            both = root + y
        else:
            y = a + root_share
            both = _plus(root, y)
            if twice:
                for j in range(size):
                    new = _plus(rows[i, j], a + share[j])
                    if new > -math.inf:
                        old = exp(min(rows[i, j] - new, 0.0))
                        slope = dthrough[i] + dshare[j]
                        slopes[i, j] = old * slopes[i, j] + (1.0 - old) * slope
                dy = dthrough[i] + droot_share
                old = exp(min(root - both, 0.0)) if both > -math.inf else 0.0
                dboth = old * T[begin + i, 0] + (1.0 - old) * dy
            for j in range(size):
                rows[i, j] = _plus(rows[i, j], a + share[j])
        W[begin + i, begin + i] = zero
        if twice:
            T[begin + i, begin + i] = 0.0
        if y == zero:
            continue
        if root == zero or arrives < late[begin + i]:
            W[begin + i, 0], late[begin + i] = y, arrives
            if twice:
                T[begin + i, 0] = dy
        elif arrives == late[begin + i]:
            W[begin + i, 0] = both
            if twice:
                T[begin + i, 0] = dboth


@kernel(inner=True, fast=True)
def _remove(
    W: Any, T: Any, late: Any, k: int, lo: int, hi: int,
    P: Any, dP: Any, waits: Any, logs: bool, twice: bool,
) -> Any:  # fmt: skip
    """Removes word k, while words lo..hi−1 remain; returns log S and its order."""
    zero = -math.inf if logs else 0.0
    total, root, order, size = zero, W[k, 0], 0, hi - lo
    row, share = W[k, lo:hi], P[k, lo:hi]
    if logs:
        for j in range(size):
            total = max(total, row[j])
        if total > -math.inf:
            mass = 0.0
            for j in range(size):
                mass += exp(row[j] - total)
            total += log(mass)
    else:
        for j in range(size):
            total += row[j]
    with_root = late[k] == 0 or total == zero
    if late[k] == 1 and total == zero:
        order = 1
    if with_root:
        total = _plus(total, root) if logs else total + root
    if total == zero:
        return -math.inf, order
    waits[k] = late[k] - order
    P[k, :] = zero
    if twice:
        dP[k, :] = 0.0
    for j in range(size):
        share[j] = row[j] - total if logs else row[j] / total
    P[k, 0] = root - total if logs else root / total
    if twice:
        slope, dshare, dtotal = T[k, lo:hi], dP[k, lo:hi], 0.0
        for j in range(size):
            dtotal += exp(min(share[j], 0.0)) * slope[j] if logs else slope[j]
        if with_root:
            dtotal += exp(min(P[k, 0], 0.0)) * T[k, 0] if logs else T[k, 0]
        for j in range(size):
            dshare[j] = slope[j] - dtotal if logs else (slope[j] - share[j] * dtotal) / total
        dP[k, 0] = T[k, 0] - dtotal if logs else (T[k, 0] - P[k, 0] * dtotal) / total
    _hand_on(W, T, late, lo, hi, k, lo, hi, P, dP, waits, logs, twice)
    return total if logs else math.log(total), order


@kernel(inner=True, fast=True)
def _escape(
    order: int, m: int, removed: Any, count: int, first: Any, last: Any,
    P: Any, dP: Any, waits: Any, x: Any, dx: Any, logs: bool, twice: bool,
) -> None:  # fmt: skip
    """x[k] for every removed word: the terms of this order in ε."""
    zero = -math.inf if logs else 0.0
    x[0], x[m], dx[m] = zero, zero, 0.0
    for step in range(count - 1, -1, -1):
        k = removed[step]
        lo, hi, with_root = first[k], last[k], waits[k] == order
        top = P[k, 0] if with_root else zero
        slope = dP[k, 0] if twice and with_root else 0.0
        if not logs:  # over all words: P is 0 for those that were gone, and the loop is simple
            for j in range(len(x)):
                top += P[k, j] * x[j]
            if twice:
                for j in range(len(x)):
                    slope += dP[k, j] * x[j] + P[k, j] * dx[j]
        else:
            for j in range(lo, hi):
                top = max(top, P[k, j] + x[j])
            if top > -math.inf:
                mass = exp(P[k, 0] - top) if with_root else 0.0
                slope *= mass
                for j in range(lo, hi):
                    part = exp(P[k, j] + x[j] - top)
                    mass += part
                    if twice:
                        slope += part * (dP[k, j] + dx[j])
                slope /= mass
                top += log(mass)
        x[k], dx[k] = top, slope


@kernel(inner=True)
def _heads(
    W: Any, T: Any, order: int, late: int, m: int, n: int,
    x: Any, dx: Any, q: Any, dq: Any, logs: bool, twice: bool,
) -> bool:  # fmt: skip
    """The distribution q of m's head and its derivative, if anything is of this order in ε."""
    top = -math.inf
    for h in range(n + 1):
        q[h] = -math.inf if logs else 0.0
        if h != m and (h > 0 or late == order):
            q[h] = W[m, h]
            if h > 0:
                q[h] = q[h] + x[h] if logs else q[h] * x[h]
        top = max(top, q[h])
    if top == (-math.inf if logs else 0.0):
        return False
    total, slope = 0.0, 0.0
    for h in range(n + 1):
        if twice:
            dq[h] = T[m, h]
            if h > 0:
                dq[h] = dq[h] + dx[h] if logs else dq[h] * x[h] + W[m, h] * dx[h]
        if logs:
            q[h] = exp(q[h] - top)
            dq[h] *= q[h]
        elif h == m or (h == 0 and late != order):
            dq[h] = 0.0
        total += q[h]
        slope += dq[h]
    for h in range(n + 1):
        q[h] /= total
        dq[h] = (dq[h] - q[h] * slope) / total
    return True


@kernel(inner=True)
def _choose(q: Any, n: int, uniform: float) -> int:
    chosen, reached = 0, 0.0
    for h in range(n + 1):
        if q[h] > 0.0:
            chosen = h
            reached += q[h]
            if reached > uniform:
                break
    return chosen


@kernel(inner=True, fast=True)
def _eliminate(W: Any, n: int, single: bool, P: Any, S: Any) -> float:
    """log Z of weights that are all positive; the masses S of the words and their shares P."""
    total = 0.0
    for k in range(n, 0, -1):
        mass = W[k, 0] if k == 1 or not single else 0.0
        for j in range(1, k):
            mass += W[k, j]
        S[k] = mass
        total += math.log(mass)
        for j in range(k):
            P[k, j] = W[k, j] / mass
        for i in range(1, k):
            a = W[i, k]
            for j in range(k):
                W[i, j] += a * P[k, j]
            W[i, i] = 0.0
    return total


@kernel
def _value_items(
    low: int, high: int, theta: Any, lengths: Any, single: bool, gamma: float, value: Any
) -> None:
    s = theta.shape[1]
    W, S = np.empty((s, s)), np.empty(s)
    P, late, waits = np.empty((s, s)), np.empty(s, np.int8), np.empty(s, np.int8)
    for item in range(low, high):
        n = lengths[item]
        logs, calm, total = _load(theta[item], n, single, gamma, W)
        if calm:
            value[item] = (total + _eliminate(W, n, single, P, S)) * gamma
            continue
        roots = 0
        late[:] = 1 if single else 0
        for k in range(n, 0, -1):
            if not abs(total) < math.inf:
                break
            part, order = _remove(W, W, late, k, 1, k, P, P, waits, logs, False)
            total += part
            roots += order
        value[item] = -math.inf if single and n > 0 and roots > 1 else total * gamma


@kernel(inner=True, fast=True)
def _sweep(
    W: Any, base: Any, n: int, single: bool, P: Any, S: Any, g: Any, G: Any, mu: Any
) -> float:
    """log Z and marginals of weights that are all positive; G is the derivative of log Z in W."""
    total = _eliminate(W, n, single, P, S)
    for k in range(1, n + 1):
        for j in range(k):
            g[j] = 0.0
        for i in range(1, k):
            a, slope = W[i, k], 0.0
            for j in range(k):
                slope += G[i, j] * P[k, j]
                g[j] += a * G[i, j]
            G[i, k] = slope
        back = 1.0
        for j in range(k):
            back -= g[j] * P[k, j]
        for j in range(k):
            own = 0.0 if single and j == 0 and k > 1 else back
            G[k, j] = (g[j] + own) / S[k]
        G[k, k] = 0.0
    for i in range(1, n + 1):
        for j in range(n + 1):
            mu[j, i] = max(base[i, j] * G[i, j], 0.0)
    return total


@kernel
def _tree_items(
    low: int, high: int, mode: int, theta: Any, lengths: Any, single: bool, gamma: float,
    direction: Any, uniform: Any, value: Any, out: Any, heads: Any,
) -> None:  # fmt: skip
    """Gradient, its derivative along ``direction``, or draws from ``uniform``, for every word."""
    s = theta.shape[1]
    levels = 2
    while 1 << (levels - 2) < s:
        levels += 1
    twice, fresh = mode == HVP, np.int8(1 if single else 0)
    base, G = np.empty((s, s)), np.empty((s, s))
    W = np.empty((levels, s, s))
    T = np.empty((levels, s, s)) if twice else W
    late = np.empty((levels, s), np.int8)
    P, waits = np.empty((s, s)), np.empty(s, np.int8)
    dP = np.empty((s, s)) if twice else P
    x, dx, q, dq = np.zeros(s), np.zeros(s), np.zeros(s), np.zeros(s)
    removed, first, last = np.empty(s, np.int64), np.empty(s, np.int64), np.empty(s, np.int64)
    # the words of each level, those of the next being half of them, and how many are removed
    begin, end = np.empty(levels, np.int64), np.empty(levels, np.int64)
    mark = np.empty(levels, np.int64)
    for item in range(low, high):
        n = lengths[item]
        logs, calm, scale = _load(theta[item], n, single, gamma, base)
        if calm and mode == GRADIENT:
            W[0] = base
            value[item] = (scale + _sweep(W[0], base, n, single, P, x, q, G, out[item])) * gamma
            continue
        x[:], dx[:] = 0.0, 0.0  # what is not written yet is multiplied by 0
        draws = uniform.shape[0] if mode == DRAW else 1
        for draw in range(draws):
            W[0] = base
            if twice:
                for i in range(1, n + 1):
                    for j in range(n + 1):
                        absent = base[i, j] == (-math.inf if logs else 0.0)
                        v = 0.0 if absent else direction[item, j, i] / gamma
                        T[0, i, j] = v if logs else base[i, j] * v
            late[0, :] = fresh
            begin[0], end[0], mark[0], level = 1, n + 1, 0, 0
            total, roots, good = scale, 0, abs(scale) < math.inf
            for m in range(1, n + 1):
                if not good:
                    break
                while not begin[level] <= m < end[level]:
                    level -= 1
                count = mark[level]
                while end[level] - begin[level] > 1:
                    lo, hi = begin[level], end[level]
                    middle = (lo + hi) // 2
                    up = level + 1
                    for i in range(lo, hi):
                        late[up, i] = late[level, i]
                        W[up, i, 0] = W[level, i, 0]
                        for j in range(lo, hi):
                            W[up, i, j] = W[level, i, j]
                        if twice:
                            T[up, i, 0] = T[level, i, 0]
                            for j in range(lo, hi):
                                T[up, i, j] = T[level, i, j]
                    left = m < middle
                    for step in range(hi - middle if left else middle - lo):
                        k = hi - 1 - step if left else lo + step
                        first[k], last[k] = (lo, k) if left else (k + 1, hi)
                        part, order = _remove(
                            W[up], T[up], late[up], k, first[k], last[k], P, dP, waits, logs, twice
                        )
                        if m == 1:
                            total += part
                            roots += order
                        removed[count] = k
                        count += 1
                    begin[up], end[up] = (lo, middle) if left else (middle, hi)
                    level = up
                    mark[level] = count
                if m == 1:
                    rest = W[level, 1, 0]
                    total += rest if logs else math.log(rest)
                    roots += late[level, 1]
                    good = total > -math.inf and (not single or roots == 1)
                    if not good:
                        total = -math.inf
                        break
                order = fresh
                for step in range(count):  # a root that is already there comes first
                    k = removed[step]
                    if waits[k] == 0 and P[k, 0] > (-math.inf if logs else 0.0):
                        order = np.int8(0)
                _escape(order, m, removed, count, first, last, P, dP, waits, x, dx, logs, twice)
                if not _heads(W[0], T[0], order, fresh, m, n, x, dx, q, dq, logs, twice):
                    order = np.int8(1)
                    _escape(order, m, removed, count, first, last, P, dP, waits, x, dx, logs, twice)
                    _heads(W[0], T[0], order, fresh, m, n, x, dx, q, dq, logs, twice)
                if mode == DRAW:
                    h = _choose(q, n, uniform[draw, item, m - 1])
                    heads[draw, item, m - 1] = h
                    W[0, m, :] = -math.inf if logs else 0.0
                    W[0, m, h] = 0.0 if logs else 1.0
                    for t in range(level):
                        W[t + 1, m, 0], late[t + 1, m] = W[t, m, 0], late[t, m]
                        for j in range(begin[t], end[t]):
                            W[t + 1, m, j] = W[t, m, j]
                        for step in range(mark[t], mark[t + 1]):
                            k = removed[step]
                            _hand_on(
                                W[t + 1], T[0], late[t + 1], m, m + 1, k, first[k], last[k],
                                P, dP, waits, logs, False,
                            )  # fmt: skip
                else:
                    for h in range(n + 1):
                        out[item, h, m] = dq[h] if twice else q[h]
            if mode != DRAW:
                value[item] = total * gamma
                if math.isnan(total) or total == math.inf:
                    for i in range(1, n + 1):
                        for j in range(n + 1):
                            out[item, j, i] = math.nan if i != j else 0.0


def _arrays(theta: Tensor, lengths: Tensor) -> tuple[Any, Any]:
    return array(theta, np.float64), array(lengths, np.int64)


def value(theta: Tensor, lengths: Tensor, single: bool, gamma: float) -> Tensor:
    """A ``(B)`` of scores ``(B, s, s)``."""
    items, s, _ = theta.shape
    out = torch.empty(items, dtype=torch.float64, device="cpu")
    arrays = *_arrays(theta, lengths), single, gamma, out.numpy()
    run_chunks(lambda low, high: _value_items(low, high, *arrays), items, s**3 // 2)
    return out


def _trees(
    mode: int, theta: Tensor, lengths: Tensor, single: bool, gamma: float, extra: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    items, s, _ = theta.shape
    numbers = array(extra, np.float64)
    none = np.empty((0, 0, 0))
    value = torch.empty(items, dtype=torch.float64, device="cpu")
    out = torch.zeros(0 if mode == DRAW else items, s, s, dtype=torch.float64, device="cpu")
    draws = len(extra) if mode == DRAW else 0
    heads = torch.zeros(draws, items, s - 1, dtype=torch.int64, device="cpu")
    arrays = (
        *(mode, *_arrays(theta, lengths), single, gamma),
        *(numbers if mode == HVP else none, numbers if mode == DRAW else none),
        *(value.numpy(), out.numpy(), heads.numpy()),
    )
    work = 4 * s**3 * max(draws, 1)
    run_chunks(lambda low, high: _tree_items(low, high, *arrays), items, work)
    return value, out, heads


def gradient(theta: Tensor, lengths: Tensor, single: bool, gamma: float) -> tuple[Tensor, Tensor]:
    """A ``(B)`` and the probabilities of arcs ``(B, s, s)``."""
    return _trees(GRADIENT, theta, lengths, single, gamma, theta[:0])[:2]


def hvp(theta: Tensor, direction: Tensor, lengths: Tensor, single: bool, gamma: float) -> Tensor:
    """∇²A·direction ``(B, s, s)``."""
    return _trees(HVP, theta, lengths, single, gamma, direction)[1]


def sample(theta: Tensor, lengths: Tensor, uniform: Tensor, single: bool, gamma: float) -> Tensor:
    """Heads ``(N, B, s−1)`` from numbers ``(N, B, s−1)``; 0 in the padding."""
    return _trees(DRAW, theta, lengths, single, gamma, uniform)[2]
