"""The best tree of a directed graph, on the GPU: one program per item, one launch.

Chu and Liu's and Edmonds' algorithm, for all cycles of an item at a time. In each round every node
takes its best arc; the nodes of a cycle become one node, and what the arcs into it lose is taken
off their scores; until no cycle is left. Each step is an operation on a square of words that stays
in registers, where words carry the number of the node that they belong to. Rounds are few for most
scores, and at most n, so the worst case is O(n³) work, in O(n log n) steps.

Arcs of a ``single`` root are taken only where there is no other, as in ``arborescence_cpu``.

``M[u, i]`` is what head u gains for word i, −inf where there is no arc. ``node[i]`` is the least
word of the node of i; the root is node 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.launch import quick


@triton.jit
def _largest_of_node(node, x):
    """For each word, the largest x among the words of its node, and the first word with it."""
    same = node[:, None] == node[None, :]
    return tl.max(tl.where(same, x[:, None], -float("inf")), 0, return_indices=True)


@triton.jit
def find_tree(scores, sh, sm, n, trail, SINGLE: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr):
    """The value of the best tree over words 1..n, and the heads of the words, −1 for all others and
    where there is no tree. ``trail`` has room for ``2N²`` numbers."""
    word = tl.arange(0, N)
    u, i = word[:, None], word[None, :]
    used = (i > 0) & (i <= n) & (u <= n) & (i != u)
    M = tl.load(scores + u * sh + i * sm, mask=used, other=-float("inf")).to(tl.float64)
    good = tl.min((float("inf") > M).to(tl.int32))  # 1, or 0 if a score is NaN or +inf
    if SINGLE:  # one root arc is used: what they share is taken out before anything is added
        common = tl.max(tl.where((u == 0) & used, M, -float("inf")))
        common = tl.where(common == -float("inf"), 0.0, common)
        M = tl.where((u == 0) & used, M - common, M)

    node = tl.where(word > n, 0, word)  # the padding belongs to the root
    rounds = 0
    feasible = good
    searching = good
    while searching > 0:
        outside = tl.where(node[:, None] == node[None, :], -float("inf"), M)
        if SINGLE:
            outside = tl.where(u == 0, -float("inf"), outside)
        gain, head = tl.max(outside, 0, return_indices=True)
        best, at = _largest_of_node(node, gain)
        if SINGLE:
            lost = (best == -float("inf")) & (node > 0)
            if tl.max(lost.to(tl.int32)) > 0:  # the root's arcs, only where there is no other
                root = tl.max(tl.where(u == 0, M, -float("inf")), 0)
                gain = tl.where(lost, root, gain)
                head = tl.where(lost, 0, head)
                best, at = _largest_of_node(node, gain)
        chosen = (at == word) & (node > 0)
        feasible = tl.min(((best > -float("inf")) | (node == 0)).to(tl.int32))
        tl.store(trail + rounds * 2 * N + word, node)
        tl.store(trail + rounds * 2 * N + N + word, tl.where(chosen, head, -1))
        above = tl.gather(node, tl.gather(head, at, 0), 0)
        above = tl.where(node == 0, 0, above)
        least = node
        for _ in tl.static_range(STEPS):  # the node 2^k steps up, and the least on the way
            least = tl.minimum(least, tl.gather(least, above, 0))
            above = tl.gather(above, above, 0)
        # what is met after N steps is the root or lies on a cycle, and all of a cycle is met
        met = tl.max((above[:, None] == node[None, :]).to(tl.int32), 0)
        cyclic = (met > 0) & (node > 0)
        M -= tl.where(best > -float("inf"), best, 0.0)[None, :]
        node = tl.where(cyclic, least, node)
        rounds += 1
        searching = feasible * tl.max(cyclic.to(tl.int32))

    # An arc into a node replaces the one, chosen earlier, into the smaller node that it enters.
    tl.debug_barrier()
    head = tl.full((N,), -1, tl.int32)
    for back in range(0, rounds):
        at = trail + (rounds - 1 - back) * 2 * N + word
        node, chosen = tl.load(at), tl.load(at + N)
        held = (node[:, None] == node[None, :]) & (head >= 0)[:, None]
        entered = tl.max(held.to(tl.int32), 0) > 0
        head = tl.where(entered, head, chosen)
    inside = (word > 0) & (word <= n)
    if SINGLE:
        roots = tl.sum((inside & (head == 0)).to(tl.int32))
        feasible = tl.where((roots == 1) | (n <= 0), feasible, 0)
    found = inside & (feasible > 0)
    own = tl.load(scores + head * sh + word * sm, mask=found, other=0.0).to(tl.float64)
    total = tl.where(feasible > 0, tl.sum(own, 0), -float("inf"))
    total = tl.where(good > 0, total, float("nan"))
    return total, tl.where(found, head, -1)


@quick
@triton.jit(do_not_specialize=["sb", "sh", "sm", "sl", "s"])
def best_tree(
    scores, sb, sh, sm, lengths, sl, value, heads, trail, s,
    SINGLE: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The value of the best tree of an item and the heads of its words, 0 in the padding."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(lengths + b * sl), s - 1).to(tl.int32)
    scores += b * sb
    total, head = find_tree(scores, sh, sm, n, trail + b * 2 * N * N, SINGLE, N, STEPS)
    tl.store(value + b, total.to(value.dtype.element_ty))
    word = tl.arange(0, N)
    out = heads + b * (s - 1) + word - 1
    tl.store(out, tl.maximum(head, 0).to(tl.int64), mask=(word > 0) & (word < s))


def argmax(theta: Tensor, lengths: Tensor, single: bool) -> tuple[Tensor, Tensor]:
    """Scores ``(B)`` and heads ``(B, s−1)``; −inf where there is no tree."""
    items, s, _ = theta.shape
    N = max(triton.next_power_of_2(s), 16)
    value = theta.new_empty(items)
    heads = torch.empty(items, s - 1, dtype=torch.int64, device=theta.device)
    trail = torch.empty(items, N, 2, N, dtype=torch.int32, device=theta.device)
    if items:
        best_tree[(items,)](
            theta, *theta.stride(), lengths, lengths.stride(0), value, heads, trail, s,
            SINGLE=single, N=N, STEPS=N.bit_length() - 1, num_warps=warps(N),
        )  # fmt: skip
    return value, heads


def warps(N: int) -> int:
    """For a square of N words in registers."""
    return min(max(N * N // 512, 1), 16)
