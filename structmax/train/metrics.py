"""Numbers of a run: lines of JSON, TensorBoard where it is installed, and how they are made."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from structmax.data.trees import Trees
from structmax.train.errors import UserError


class Ratio(NamedTuple):
    """A measure as sum and count, so that the parts of several workers add up.

    >>> Ratio(3, 4).value
    0.75
    """

    total: float
    number: float

    def __add__(self, other: Any) -> Ratio:
        return Ratio(self.total + other.total, self.number + other.number)

    @property
    def value(self) -> float:
        """The quotient, NaN of nothing."""
        return float(self.total) / float(self.number) if self.number else math.nan


def tree_f1(trees: Trees, gold: Trees, seed: int = 0) -> dict[str, Ratio]:
    """How much trees resemble the gold ones, and how much trivial ones: mean F1 per sentence.

    Spans of two or more leaves count, the whole sentence included; single leaves are left out.
    ``f1`` is that of the trees against gold, ``f1_left`` … of the trees against left-branching …
    trees, and ``gold_left`` … of those against gold: what a parser gets for nothing.

    >>> gold = Trees.from_transitions([[0, 0, 1, 0, 0, 1, 1]])
    >>> measures = tree_f1(Trees.left([4]), gold)
    >>> round(measures["f1"].value, 3), measures["f1_left"].value
    (0.667, 1.0)
    """
    keep = gold.lengths > 1
    trees, gold = trees[keep], gold[keep]
    n = gold.lengths
    others = {
        "left": Trees.left(n),
        "right": Trees.right(n),
        "balanced": Trees.balanced(n),
        "random": _random(gold, seed),
    }
    found = {"f1": trees.f1(gold)}
    found |= {f"f1_{name}": trees.f1(other) for name, other in others.items()}
    found |= {f"gold_{name}": other.f1(gold) for name, other in others.items()}
    return {name: Ratio(float(each.sum()), len(each)) for name, each in found.items()}


def _random(gold: Trees, seed: int) -> Trees:
    """A random tree of each item. The gold tree is its seed too, so that it is the same in any
    batch."""
    merges = []
    for bounds, n in zip(gold.bounds, gold.lengths):
        rng = np.random.default_rng([seed, zlib.crc32(bounds[: n - 1].tobytes())])
        merges.append((rng.random(n - 1) * np.arange(n - 1, 0, -1)).astype(np.int64))
    return Trees.from_merges(merges, gold.lengths)


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """JSON, which knows no NaN and no infinity: they are null there.

    >>> to_json({"f1": math.nan, "loss": 0.5})
    '{"f1": null, "loss": 0.5}'
    """

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [finite(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


class GradientVariance:
    """The variance of a gradient over the updates since the last ``read``.

    tr Cov(g) = k/(k−1) · (mean ‖g‖² − ‖mean g‖²) over k updates: the noise of the examples and of
    the samples, and the little that the parameters moved in between. Its mean g takes as much
    memory as the parameters; with ``norm_only``, there is the norm of g alone.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> variance = GradientVariance([weight])
    >>> for g in ([1.0, 0.0], [3.0, 0.0]):
    ...     weight.grad = torch.tensor(g)
    ...     variance.add()
    >>> variance.read()
    {'grad_norm': 2.236..., 'grad_variance': 2.0}
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], norm_only: bool = False) -> None:
        self.parameters = list(parameters)
        summed = [] if norm_only else self.parameters
        self.sums = [torch.zeros_like(p, dtype=torch.float32) for p in summed]
        self.squares = torch.zeros((), device=self.parameters[0].device)
        self.count = 0

    @torch.no_grad()
    def add(self) -> None:
        """Take in the gradients that the parameters hold now."""
        self.count += 1
        grads = [p.grad.float() for p in self.parameters if p.grad is not None]
        if grads:
            self.squares += torch.stack(torch._foreach_norm(grads)).square().sum()
        if grads and self.sums:
            there = [s for s, p in zip(self.sums, self.parameters) if p.grad is not None]
            torch._foreach_add_(there, grads)

    def read(self) -> dict[str, float]:
        """The root of the mean square norm and the variance; starts afresh."""
        k = max(self.count, 1)
        square = self.squares / k
        result = {"grad_norm": float(square.sqrt())}
        if k > 1 and self.sums:
            mean = torch.stack(torch._foreach_norm(self.sums)).square().sum() / k**2
            result["grad_variance"] = float((square - mean).clamp(min=0)) * k / (k - 1)
        if self.sums:
            torch._foreach_zero_(self.sums)
        self.squares.zero_()
        self.count = 0
        return result

    def state(self) -> tuple[dict[str, Tensor], int]:
        """What a checkpoint keeps: tensors by name, and the count."""
        return {"squares": self.squares, **{str(i): s for i, s in enumerate(self.sums)}}, self.count

    def restore(self, tensors: dict[str, Tensor], count: int) -> None:
        """Back to what ``state`` gave; from one with the norm only, the variance starts afresh."""
        if self.sums and tensors.keys() == {"squares"}:
            return
        for name, mine in self.state()[0].items():
            mine.copy_(tensors[name])
        self.count = count


class Log:
    """The lines of ``metrics.jsonl`` and, where TensorBoard is installed, its event files.

    A resumed run drops what was written after its checkpoint, so that every step is there once:
    lines after its last step, and looks at the validation split after its last look.
    """

    def __init__(self, folder: Path, last_step: int, last_look: int) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [
            line
            for line in read_log(folder)
            if line["step"] <= (last_look if line.get("kind") == "valid" else last_step)
        ]
        from structmax.train.checkpoint import write_atomic

        write_atomic(self.path, "".join(to_json(line) + "\n" for line in kept).encode())
        self.board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Add a line; ``kind`` is train, valid or test."""
        line = to_json({"step": step, "kind": kind, **values}) + "\n"
        try:
            with self.path.open("a") as file:
                file.write(line)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}.") from error
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; a last line that was cut off is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = []
    for line in lines:
        try:
            one = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(one, dict) or type(one.get("step")) is not int:
            break
        found.append(one)
    return found


def last_look(folder: Path, last_step: int) -> int:
    """The last step up to this one at which the validation split was looked at; 0: none."""
    steps = [line["step"] for line in read_log(folder) if line.get("kind") == "valid"]
    return max((step for step in steps if step <= last_step), default=0)
