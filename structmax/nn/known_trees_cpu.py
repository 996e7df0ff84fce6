"""Known trees, action by action: which subtrees there are, each once.

Actions that are not legal are not looked for here, but lead nowhere outside the arrays.
"""

from __future__ import annotations

import numpy as np

from structmax.jit import kernel


@kernel(inner=True)
def _subtree(left, right, leaves, owner, slots, children, level, made):
    """The row of the subtree of two rows, made if its sentence has it not yet."""
    mask = len(slots) - 1
    slot = ((left * 0x9E3779B1 + right) * 0x85EBCA6B >> 7) & mask
    while slots[slot, 3] == owner:
        if slots[slot, 0] == left and slots[slot, 1] == right:
            return slots[slot, 2]
        slot = (slot + 1) & mask
    new = made[0]
    a = level[left - leaves] if left >= leaves else 0
    b = level[right - leaves] if right >= leaves else 0
    children[new, 0], children[new, 1] = left, right
    level[new] = max(a, b) + 1
    slots[slot, 0], slots[slot, 1], slots[slot, 2], slots[slot, 3] = (
        left,
        right,
        new + leaves,
        owner,
    )
    made[0] = new + 1
    return new + leaves


@kernel
def merges(
    actions, items, lengths, n, order, slots, children, level, made, candidates, birth, death,
    taken, root,
):  # fmt: skip
    """Fills the plan of merges."""
    leaves = len(lengths) * n
    node = np.empty(n, np.int64)  # what is left of a sentence
    place = np.empty(n, np.int64)  # the candidate of each pair of neighbours
    for row in order:
        item = items[row]
        length, owner = lengths[item], item + 1
        for i in range(length):
            node[i] = item * n + i
        used = 0
        for i in range(length - 1):
            candidates[row, used] = _subtree(
                node[i], node[i + 1], leaves, owner, slots, children, level, made
            )
            death[row, used] = length
            place[i] = used
            used += 1
        for t in range(length - 1):
            left = length - t  # nodes that are left
            j = min(max(actions[row, t], 0), left - 2)
            new = candidates[row, place[j]]
            taken[row, t] = new
            death[row, place[j]] = t + 1
            node[j] = new
            for i in range(j + 1, left - 1):
                node[i] = node[i + 1]
            for i in range(j, left - 2):
                place[i] = place[i + 1]
            for i in range(max(j - 1, 0), min(j + 1, left - 2)):
                death[row, place[i]] = t + 1  # the pair that stood here
                candidates[row, used] = _subtree(
                    node[i], node[i + 1], leaves, owner, slots, children, level, made
                )
                birth[row, used], death[row, used] = t + 1, length
                place[i] = used
                used += 1
        root[row] = node[0]


@kernel
def transitions(actions, items, lengths, n, order, slots, children, level, made, seen, root):
    """Fills the plan of transitions."""
    leaves = len(lengths) * n + 1
    stack = np.zeros(n + 3, np.int64)  # two places for nothing at the bottom
    for row in order:
        item = items[row]
        length, owner = lengths[item], item + 1
        depth, shifted = 0, 0
        for t in range(2 * length - 1):
            seen[row, t, 0] = item * n + shifted + 1 if shifted < length else 0
            seen[row, t, 1], seen[row, t, 2] = stack[depth + 1], stack[depth]
            if shifted < length and (actions[row, t] == 0 or depth < 2):
                depth += 1
                stack[depth + 1] = item * n + shifted + 1
                shifted += 1
            else:
                new = _subtree(
                    stack[depth], stack[depth + 1], leaves, owner, slots, children, level, made
                )
                depth -= 1
                stack[depth + 1] = new
        root[row] = stack[2]
