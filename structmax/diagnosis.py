"""Which estimator to use: the bias and variance of each gradient, against enumeration."""

from __future__ import annotations

import copy
import functools
import io
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from structmax.estimators import NAMES, by_name
from structmax.estimators.base import Estimator
from structmax.estimators.objectives import (
    COST_OF_MEAN,
    EXPECTED_COST,
    NONE,
    Objectives,
    Reference,
    distribution_of,
    gradient,
)
from structmax.structures.base import IntractableError, Structure

if TYPE_CHECKING:
    from structmax.draw.svg import Drawing

# the queries that count as calls of an oracle; a projection is one of sparsemap
ORACLES = (
    "argmax",
    "marginals",
    "log_partition",
    "sample",
    "topk",
    "sparsemap",
    "enumerate_support",
    "greedy",
    "straight_through",
)
COLUMNS = {
    "estimator": "estimator",
    "objective": "objective",
    "against": "against",
    "distribution": "under",
    "reference": "reference",
    "bias": "bias",
    "error": "±",
    "variance": "variance",
    "cosine": "cosine",
    "calls": "calls",
    "oracles": "oracles",
    "milliseconds": "ms",
}


@dataclass
class Diagnosis:
    """What :func:`diagnose` found: ``records``, one dictionary for each estimator and target.

    ``pandas.DataFrame(diagnosis.records)`` is a data frame; ``print`` shows a table, ``draw`` and
    ``plot`` draw it. ``skipped`` says which estimators do not apply, and what they lack.

    >>> import structmax as sx
    >>> choice = sx.Choice(torch.tensor([0.0, 1.0]))
    >>> found = sx.diagnose(choice, lambda z: z[..., 0], ["marginals"], samples=2)
    >>> isinstance(found, sx.Diagnosis), found.records[0]["bias"] < 1e-5, found.skipped
    (True, True, {})
    >>> found.draw()
    Drawing(... pixels)
    """

    records: list[dict[str, Any]]
    skipped: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        """The cells of the table as text."""
        return [[_show(record[key]) for key in COLUMNS] for record in self.records]

    def notes(self) -> list[str]:
        """What a reader of the table should know."""
        notes = ["bias ± its standard error, and variance: relative to the reference."]
        if any(record["objective"] == NONE for record in self.records):
            notes.append(
                "L(argmax) is piecewise constant and has no gradient of its own: it is compared "
                "with those of E[L(z)] and of L(E[z]) under the structure's own distribution."
            )
        notes += [f"not applicable: {name} ({why})" for name, why in self.skipped.items()]
        return notes

    def __rich__(self) -> Any:
        from rich import box
        from rich.console import Group
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD)
        for key, title in COLUMNS.items():
            text = isinstance(self.records[0][key], str) if self.records else True
            table.add_column(title, justify="left" if text else "right", no_wrap=True)
        for row in self.rows():
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        return Group(table, *(note.replace("[", r"\[") for note in self.notes()))

    def __str__(self) -> str:
        try:
            from rich.console import Console
        except ImportError:
            rows = [list(COLUMNS.values()), *self.rows()]
            widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
            lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
            return "\n".join([*lines, *self.notes()])
        out = io.StringIO()
        Console(file=out, width=200).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def draw(self) -> Drawing:
        """Bias and standard deviation, a row for each estimator: SVG, shown by notebooks."""
        from structmax.draw.diagnosis_svg import diagnosis_svg

        return diagnosis_svg(self.records)

    def plot(self, ax: Any = None) -> Any:
        """Bias against standard deviation, both relative, on logarithmic axes; needs matplotlib."""
        import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots(figsize=(7, 5))
        least = 1e-3
        markers = {EXPECTED_COST: "o", COST_OF_MEAN: "s"}
        for record in self.records:
            x, y = max(record["variance"] ** 0.5, least), max(record["bias"], least)
            hollow = {"facecolors": "none"} if record["objective"] == NONE else {}
            ax.scatter(x, y, marker=markers[record["against"]], edgecolors="C0", **hollow)
            ax.annotate(record["estimator"], (x, y), xytext=(4, 4), textcoords="offset points")
        ax.set(xscale="log", yscale="log", xlabel="standard deviation", ylabel="bias")
        ax.set_title("○ against E[L(z)], □ against L(E[z]); hollow: L(argmax)", fontsize="small")
        return ax


def diagnose(
    structure: Structure,
    cost: Callable[..., Tensor],
    estimators: str
    | Estimator
    | Sequence[str | Estimator]
    | Mapping[str, str | Estimator]
    | None = None,
    samples: int = 200,
    generator: torch.Generator | None = None,
) -> Diagnosis:
    """The gradient of each estimator against the exact gradient of its own objective.

    That is ∇E[L(z)] or ∇L(E[z]), by enumeration, with E ``under`` the distribution that the
    estimator is about: the structure's own, SparseMAP's, that of the k best, or that of noisy
    scores. ``reference`` says how well it is known: exact, or by Monte Carlo with a standard error
    (``structmax.estimators.objectives`` has the equations). L(argmax) has no gradient almost
    everywhere: its estimators have no reference of their own, and are compared with both under the
    structure's distribution. To see what another distribution costs, compare with
    ``ExactExpectation`` or ``Marginals`` in the same table.

    Gradients are those of the loss, summed over the batch, in every score of the structure. With g*
    the reference and g the estimate, over ``samples`` repetitions,

        bias = ‖E g − g*‖/‖g*‖,   variance = E‖g − E g‖²/‖g*‖²,   cosine of E g and g*.

    E g is a mean too: a bias within a few times ``error``, which is that of g* too, is none.
    ``calls`` counts the calls of
    oracles for one loss and its gradient, those for several structures as so many; ``milliseconds``
    is their median time.

    Args:
        structure: small enough for ``enumerate_support``
        cost: as for ``Estimator.loss``; it must be defined between structures where an estimator
            relaxes them, or needs ∂L/∂z
        estimators: names, estimators, or either by a name of yours; unless given, all that apply
            and that there is something to compare with. Copies of them run, so that their state
            (λ, baselines, draws, generators) stays as it is
        samples: repetitions
        generator: seeds the draws of estimators that have no generator of their own

    >>> import structmax as sx
    >>> generator = torch.Generator().manual_seed(0)
    >>> price = torch.tensor([1.0, 2.0, 4.0])
    >>> result = diagnose(
    ...     sx.Choice(torch.tensor([0.0, 0.0, 0.5])), lambda z: (z @ price) ** 2,
    ...     ["sparsemap", "marginals", "reinforce"], generator=generator)
    >>> [(r["estimator"], r["objective"], r["distribution"], r["reference"], r["oracles"])
    ...     for r in result.records]
    [('sparsemap', 'L(E[z])', 'sparsemap', 'exact', '1 sparsemap'),
     ('marginals', 'L(E[z])', 'own', 'exact', '1 marginals'),
     ('reinforce', 'E[L(z)]', 'own', 'exact', '1 sample, 1 log_partition')]
    >>> [r["bias"] < 4 * r["error"] + 1e-5 for r in result.records]
    [True, True, True]
    """
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"diagnose: samples must be an integer of at least 1, got {samples!r}.")
    chosen, skipped = _choose(structure, estimators)
    live, leaves = _with_leaves(structure)
    objectives = Objectives(live, leaves, cost)
    records = []
    with torch.random.fork_rng(devices=_devices(structure)):
        least = objectives.rounding()
        if generator is not None:
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        for name, estimator in chosen.items():
            try:
                found = _references(objectives, estimator)
            except IntractableError:
                if estimators is not None:
                    raise
                skipped[name] = "nothing to compare with"
                continue
            # what they learn, keep and draw here is not that of the caller's training
            estimator, seen, times = copy.deepcopy(estimator), [], []
            for _ in range(samples):
                start = time.perf_counter()
                seen.append(gradient(estimator.loss(live, cost), leaves))
                times.append(time.perf_counter() - start)
            calls = _count(structure, estimator, cost)
            for (against, under), reference in found.items():
                records.append(
                    {
                        "estimator": name,
                        "objective": estimator.objective,
                        "against": against,
                        "distribution": under,
                        "reference": _quality(reference, estimator),
                        **_compare(torch.stack(seen), reference, least),
                        "calls": sum(calls.values()),
                        "oracles": ", ".join(f"{n:g} {oracle}" for oracle, n in calls.items()),
                        "milliseconds": 1000 * sorted(times)[len(times) // 2],
                    }
                )
    return Diagnosis(records, skipped)


def _choose(structure: Structure, given: Any) -> tuple[dict[str, Estimator], dict[str, str]]:
    """Estimators by name, and why some of all do not apply."""
    if given is None:
        every = {name: by_name(name) for name in NAMES}
        lacks = {
            name: ", ".join(sorted(q for q in e.needs if not structure.supports(q)))
            for name, e in every.items()
            if not e.applies_to(structure)
        }
        return (
            {name: e for name, e in every.items() if name not in lacks},
            {name: f"no {q}" if q else "not this structure" for name, q in lacks.items()},
        )
    if isinstance(given, str | Estimator):
        given = [given]
    if not isinstance(given, Mapping):
        names = [e if isinstance(e, str) else repr(e) for e in given]
        again = [names[:i].count(name) for i, name in enumerate(names)]
        names = [f"{name} #{k + 1}" if k else name for name, k in zip(names, again)]
        given = dict(zip(names, given))
    return {k: by_name(e) if isinstance(e, str) else e for k, e in given.items()}, {}


def _with_leaves(structure: Structure) -> tuple[Structure, list[Tensor]]:
    """The structure at the same scores, as leaves; with the parameters of a policy, if any."""
    tensors = {name: t.detach().clone() for name, (t, _) in structure._tensors().items()}
    leaves = [t.requires_grad_() for t in tensors.values() if t.is_floating_point()]
    policy = getattr(structure, "policy", None)
    if isinstance(policy, torch.nn.Module):
        leaves += [p for p in policy.parameters() if p.requires_grad]
    return structure._rebuild(**tensors), leaves


def _references(objectives: Objectives, estimator: Estimator) -> dict[tuple[str, str], Reference]:
    """By objective and distribution: its own, or both of the structure's where it has none."""
    if estimator.objective != NONE:
        under = distribution_of(estimator, objectives.structure)
        return {(estimator.objective, under): objectives.of(estimator)}
    both = EXPECTED_COST, COST_OF_MEAN
    return {(against, "own"): objectives.of(estimator, against) for against in both}


def _quality(reference: Reference, estimator: Estimator) -> str:
    """How well what a gradient is compared with is known, and whether it is its own."""
    if estimator.objective == NONE:
        return "none of its own"
    if reference.error is None:
        return "exact"
    return f"Monte Carlo ± {_ratio(reference.error, float(reference.gradient.norm())):.1g}"


def _compare(seen: Tensor, reference: Reference, least: float) -> dict[str, Any]:
    """Bias, its standard error, variance and cosine of gradients ``(samples, d)``; one that is no
    larger than ``least`` is zero."""
    exact, uncertain = reference.gradient, reference.error or 0.0
    exact, seen = (torch.where(g.norm(dim=-1, keepdim=True) > least, g, 0.0) for g in (exact, seen))
    mean, size = seen.mean(0), float(exact.norm())
    variance = float((seen - mean).square().sum(-1).sum()) / max(len(seen) - 1, 1)
    norms = size * float(mean.norm())
    return {
        "bias": _ratio(float((mean - exact).norm()), size),
        "error": _ratio(math.hypot(math.sqrt(variance / len(seen)), uncertain), size),
        "variance": _ratio(variance, size**2),
        "cosine": float(mean @ exact) / norms if norms > 0 else math.nan,
    }


def _ratio(x: float, size: float) -> float:
    return x / size if size > 0 else math.inf if x > 0 else 0.0


def _count(structure: Structure, estimator: Estimator, cost: Callable[..., Tensor]) -> Counter[str]:
    """Calls of oracles for one loss and its gradient, per item of the batch."""
    calls: Counter[str] = Counter()
    inside: list[str] = []  # a query that another one makes is part of that one

    def counted(query: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: Structure, *args: Any, **options: Any) -> Any:
            if not inside:
                shape = args[0] if args else options.get("sample_shape", ())
                each = torch.Size(shape).numel() if query == "sample" else 1
                items = self.batch_shape.numel() / max(structure.batch_shape.numel(), 1)
                calls[query] += each * items  # type: ignore[assignment]
            inside.append(query)
            try:
                return method(self, *args, **options)
            finally:
                inside.pop()

        return run

    def watch(one: Structure) -> Structure:
        """The structure, watched, as are those that it is turned into."""
        own = type(one)
        if not hasattr(own, "_watched"):
            new: dict[str, Any] = {
                q: counted(q, getattr(own, q)) for q in ORACLES if hasattr(own, q)
            }
            new["_vouch_for"] = functools.partialmethod(watched, own._vouch_for)
            one.__class__ = type(own.__name__, (own,), {**new, "_watched": True})
        return one

    def watched(self: Structure, method: Callable[..., Structure], *args: Any, **kw: Any) -> Any:
        return watch(method(self, *args, **kw))

    live, leaves = _with_leaves(structure)
    gradient(estimator.loss(watch(live), cost), leaves)
    return calls


def _devices(structure: Structure) -> list[torch.device]:
    tensors = [t for t, _ in structure._tensors().values()]
    return list({t.device for t in tensors if t.device.type == "cuda"})


def _show(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"
