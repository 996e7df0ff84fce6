"""Derivations of a user's own forest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax import checks
from structmax.forest import ops
from structmax.forest.topology import Forest
from structmax.smoothing import Smoothing
from structmax.structures.base import Structure, dot
from structmax.structures.dynamic import (
    DynamicStructure,
    counts_of_edges,
    derivations,
    forest_of_edges,
)
from structmax.structures.lengths import full


class Hyperpath(DynamicStructure):
    """A derivation of a goal node of a forest drawn with :class:`ForestBuilder`.

    z counts how often each part is used. Queries are over derivations: if two derivations use the
    same parts (the forest is ambiguous), ``log_prob``, ``topk`` and ``enumerate_support`` speak of
    single derivations, and the probability of z is the sum over its derivations. ``variance``
    and ``mbr`` are right for parts that no derivation uses twice.

    Args:
        forest: the topology
        scores: ``(*B, P)``, one for each part of the forest
        goal: ``(*B)``, the goal node of each item; by default the last node of the forest
        smoothing: Ω, by default ``sx.Shannon(1.0)``

    >>> import structmax as sx
    >>> draw = sx.ForestBuilder()
    >>> a, b = draw.node(), draw.node()
    >>> draw.edge(b, a, part=0)
    >>> draw.edge(b, a, part=1)
    >>> sx.Hyperpath(draw.build(), torch.tensor([0.0, 0.0])).marginals()
    tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        forest: Forest,
        scores: Tensor,
        goal: Tensor | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(forest, Forest):
            raise ValueError(
                f"Hyperpath: forest must be a sx.Forest, got {type(forest).__name__}. A "
                "ForestBuilder makes one with build()."
            )
        checks.scores("Hyperpath", "scores", scores, 1, "(..., P)")
        if scores.shape[-1] != forest.num_parts:
            raise ValueError(
                f"Hyperpath: scores must be (..., {forest.num_parts}), one for each part of the "
                f"forest, got {tuple(scores.shape)}."
            )
        if goal is not None and (not isinstance(goal, Tensor) or goal.is_floating_point()):
            got = goal.dtype if isinstance(goal, Tensor) else type(goal).__name__
            raise ValueError(f"Hyperpath: goal must be a tensor of integers, got {got}.")
        self.forest, self.scores, self.goal = forest, scores, goal
        checks.same_device("Hyperpath", scores=scores, goal=goal)
        batch = checks.batch_shape("Hyperpath", scores=(scores, 1), goal=(goal, 0))
        super().__init__(batch, scores.shape[-1:], smoothing, validate_args)

    def _given_integers(self) -> dict[str, checks.Integers]:
        if self.goal is None:
            return {}
        goal = self.goal.expand(self.batch_shape)
        return {"goal": checks.between(goal, 0, self.forest.num_nodes - 1)}

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        return {"scores": (self.scores, self._usable_parts)}

    def _usable_parts(self) -> Tensor:
        """Which parts some node or edge carries, ``(P)``."""
        nodes, _, edges, _ = self.forest.by_part
        used = (np.diff(nodes) > 0) | (np.diff(edges) > 0)
        return torch.from_numpy(used).to(self.scores.device)

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        given = {"scores": (self.scores, 1)}
        if self.goal is not None:
            given["goal"] = (self.goal, 0)
        return given

    def _options(self) -> dict[str, Any]:
        return {"forest": self.forest}

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        scores = self.scores.float() if self.scores.dtype.itemsize < 4 else self.scores
        return (self._nan_where_wrong(scores.expand(*self.batch_shape, scores.shape[-1])),)

    def _forest_key(self) -> str:
        return self.forest.key

    def _goal(self) -> Tensor:
        if self.goal is not None:
            self._validate_integers()
            goal = self.goal.clamp(-1, self.forest.num_nodes)  # int32 could wrap into the forest
            return goal.int().expand(self.batch_shape)
        last, device = self.forest.num_nodes - 1, self.scores.device
        return full(self.batch_shape, last, device, torch.int32)

    def _derivation_size(self) -> int:
        return self.forest.longest

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> Hyperpath:
        return self._rebuild(scores=scores, goal=self.goal)

    def _score(self, z: Tensor) -> Tensor:
        return dot(self._parts()[0], z.to(self._parts()[0].dtype), 1)

    def _checked(self, z: Tensor) -> Tensor:
        _, found, complete = self._search(z)
        self._refuse(~found & complete, z)  # among very many derivations one cannot tell
        return z

    def _edge_use(self, z: Tensor) -> Tensor:
        use, found, complete = self._search(z)
        self._refuse(~found & complete, z)
        self._refuse(
            ~found,
            z,
            "was not found among 512 derivations within its parts. Use Shannon smoothing, or give "
            "parts that are used in many places numbers of their own",
        )
        return use

    def _refuse(self, wrong: Tensor, z: Tensor, what: str = "is not a derivation") -> None:
        """An error where a derivation is wanted and there is none."""
        if bool(wrong.any()):
            flat = int(wrong.nonzero()[0])
            item = tuple(int(i) for i in np.unravel_index(flat, z.shape[:-1] or (1,)))
            where = list(item) if z.dim() > 1 else ""
            got = z.reshape(-1, z.shape[-1])[flat].tolist()
            raise ValueError(f"Hyperpath: z{where} {what}: its counts are {got}.")

    def _search(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The edges of a derivation with these counts, searched among those within its parts; of
        which items one was found, and of which every derivation was looked at."""
        batch = z.shape[:-1]
        counts = z.reshape(batch.numel(), z.shape[-1]).double()
        within = torch.where(counts > 0, 1.0, -math.inf)
        pad = torch.nn.functional.pad(within, (0, 1))
        lists = self.forest.on(z.device)
        theta = pad[:, lists.edge_part.long()] + pad[:, lists.node_part[lists.head.long()].long()]
        goal = self._goal().expand(batch).reshape(-1)
        edges = forest_of_edges(self.forest)
        for k in (1, 8, 64, 512):
            best, use = ops.kbest(theta, goal, edges.key, k, self.forest.num_edges)
            exists = best > -math.inf  # (items, k)
            same = exists & (counts_of_edges(self.forest, use) == counts[:, None]).all(-1)
            found, complete = same.any(-1), ~exists.all(-1)
            if bool((found | complete).all()):
                break
        chosen = same.to(torch.uint8).argmax(-1)
        return use[torch.arange(len(use), device=use.device), chosen], found, complete

    def _aligned(self, q: Structure) -> tuple[DynamicStructure, DynamicStructure]:
        p, q = super()._aligned(q)
        if getattr(p, "goal", None) is not None or getattr(q, "goal", None) is not None:
            p._same_goals(q, "goals")
        return p, q

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """The part counts of every derivation, of a million at most."""
        goals = self._goal().unique().tolist()
        if len(goals) > 1:
            raise ValueError(
                "Hyperpath.enumerate_support: items with different goals have different supports. "
                "Index one item: structure[i].enumerate_support()."
            )
        goal = goals[0] if goals else self.forest.num_nodes - 1  # of no items: as by default
        every = derivations("Hyperpath", self.forest, goal).to(self.scores)
        every = every.reshape(-1, *[1] * len(self.batch_shape), every.shape[-1])
        return every.expand(-1, *self.batch_shape, -1) if expand else every

    def decode(self, z: Tensor) -> Any:
        """The part counts as nested lists."""
        return z.long().tolist()

    def encode(self, obj: Any) -> Tensor:
        return checks.as_tensor("Hyperpath", "z", obj, self.scores.device).to(self.scores.dtype)
