"""Searches captured as CUDA graphs: one launch in the place of thousands.

What a search without gradients launches depends on the size of the batch alone. On a GPU it is
therefore recorded the second time that a size comes, and replayed from then on. Sizes are rounded
up, so that there are few; the items that fill a batch up have one leaf, and are cut off again.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from structmax.structures.rollout import Built

if TYPE_CHECKING:
    from structmax.structures.incremental import Incremental

LONGEST = 256  # a longer search is launched step by step: recording it takes too long
MOST = 64  # recordings of a policy, of which the oldest are dropped

_of_policies: weakref.WeakKeyDictionary[nn.Module, Recordings] = weakref.WeakKeyDictionary()


class Recording(NamedTuple):
    """A graph, where it reads and where it writes."""

    graph: Any
    inputs: Tensor
    lengths: Tensor
    actions: Tensor
    log_prob: Tensor


class Recordings:
    """Those of a policy, by the kind of the search and its size."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self.made: OrderedDict[Any, Recording] = OrderedDict()
        self.pool = torch.cuda.graph_pool_handle()
        self.places: Any = None


def replayed(s: Incremental, name: Any, search: Callable[[Any], Built], lead: int) -> Built | None:
    """What a recorded search finds, without its state; None if it is not recorded.

    Args:
        name: the kind of the search, all that it depends on besides the structure
        lead: how many results an item has; negative if those of all items come one after another
            (as samples do), positive if those of an item do (as beams do)
    """
    policy, (b, n) = s.policy, s.inputs.shape[:2]
    if not (s.inputs.is_cuda and isinstance(policy, nn.Module) and b and n <= LONGEST):
        return None
    if not getattr(policy, "can_capture", False) or torch.is_autocast_enabled("cuda"):
        return None
    known = _of_policies.setdefault(policy, Recordings())
    places = [(p.data_ptr(), p.dtype) for p in policy.parameters()]
    if known.places != places:  # the parameters are elsewhere than when searches were recorded
        known.made.clear()
        known.places = places
    size = _rounded(b, 32), _rounded(n, 8 if n <= 64 else 32)
    kind = s.inputs.shape[2:], s.inputs.dtype, s.inputs.device
    key = type(s), name, size, kind, policy.training
    if key not in known.made:
        if key not in known.seen:
            known.seen.add(key)
            return None
        known.made[key] = _record(s, search, size, known.pool)
        if len(known.made) > MOST:
            known.made.popitem(last=False)
    known.made.move_to_end(key)
    found = known.made[key]
    found.inputs[:b, :n] = s.inputs
    found.lengths.fill_(1)
    found.lengths[:b] = s._lengths()
    found.graph.replay()
    at = torch.arange(abs(lead) * size[0], device=s.inputs.device)
    at = at.view(size[0], lead)[:b] if lead > 0 else at.view(-lead, size[0])[:, :b]
    at = at.reshape(-1)
    return Built(found.actions[at, : s.event_shape[0]], found.log_prob[at], None)


def _record(s: Incremental, search: Callable[[Any], Built], size: Any, pool: Any) -> Recording:
    inputs = s.inputs.new_zeros(*size, *s.inputs.shape[2:], requires_grad=False)
    lengths = torch.ones(size[0], dtype=torch.int64, device=inputs.device)
    twin: Any = type(s)(s.policy, inputs, lengths, validate_args=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        built = search(twin)
    return Recording(graph, inputs, lengths, built.actions, built.log_prob)


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step
