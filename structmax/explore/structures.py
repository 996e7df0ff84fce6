"""The page of structures: drag the scores, and watch what each query answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import structmax as sx
from structmax.draw.structure import paint
from structmax.explore import html
from structmax.explore.catalogue import KINDS, RANGE, STEP, Problem, problem

TITLE = "Structures"
ABOUT = "Drag a score sideways, or double-click it to type. Every picture follows."
SMOOTHINGS = ("Shannon", "Gini", "Tsallis 1.5", "Hard")
GAMMAS = [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0]
KEPT, DRAWS, LISTED = 4, 3, 12  # pictures of SparseMAP, of samples; parts in the table


class Answers(NamedTuple):
    """What the queries say: of the structure, of the scores that are dragged, and in numbers."""

    argmax: Tensor
    marginals: Tensor | None
    samples: Tensor | None
    probs: Tensor
    """Of the structures that SparseMAP keeps, the largest first."""
    kept: Tensor
    shares: dict[str, Tensor]
    """By query, how much of each score is used: the gradient of its value."""
    numbers: dict[str, float | int]


def smoothing(name: str, gamma: float) -> sx.Smoothing:
    """Ω by its name.

    >>> smoothing("Gini", 2.0)
    Gini(gamma=2.0)
    """
    if name == "Hard":
        return sx.Hard()
    if name == "Tsallis 1.5":
        return sx.Tsallis(1.5, gamma)
    return sx.Gini(gamma) if name == "Gini" else sx.Shannon(gamma)


def answers(problem: Problem, scores: Tensor, omega: sx.Smoothing, seed: int = 0) -> Answers:
    """All that the page shows.

    >>> from structmax.explore.catalogue import problem
    >>> two = problem("choice", "yes no")
    >>> found = answers(two, torch.tensor([[1.0, 1.0]]), sx.Shannon())
    >>> found.shares["marginals"], round(found.numbers["entropy"], 4)
    (tensor([[0.5000, 0.5000]]), 0.6931)
    """
    leaf = scores.detach().clone().requires_grad_()
    structure = problem.make(leaf, omega)
    result = structure.sparsemap()
    best = structure.argmax().detach()
    top = structure.score(best)
    probs, order = result.probs.detach().sort(descending=True)
    probs = probs[probs > 0]
    kept = result.structures.detach()[order[: len(probs)]]
    mean = (probs * structure.score(kept)).sum()
    shares = {"argmax": _gradient(top, leaf), "SparseMAP": _gradient(mean, leaf)}
    numbers: dict[str, float | int] = {"best score": top.item()}
    marginals = samples = None
    try:
        value = structure.log_partition()
        shares = {"marginals": _gradient(value, leaf), **shares}
        marginals = structure.marginals().detach()
        numbers["log-partition A"] = value.item()
        with torch.no_grad():  # which is quicker
            numbers["probability of the best"] = structure.log_prob(best).exp().item()
            numbers["entropy"] = structure.entropy().item()
        samples = structure.sample((DRAWS,), generator=torch.Generator().manual_seed(seed))
    except sx.IntractableError:  # of a large assignment
        pass
    numbers["structures SparseMAP keeps"] = len(kept)
    numbers["expected score, SparseMAP"] = mean.item()
    return Answers(best, marginals, samples, probs, kept, shares, numbers)


def _gradient(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value, leaf, retain_graph=True)[0].detach()


# -- the page -------------------------------------------------------------------------------------


def choose(ui: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {"kind": ui.dropdown(list(KINDS), value=next(iter(KINDS)), label="structure")}


def write(ui: Any, values: dict[str, Any]) -> dict[str, Any]:
    kind = KINDS[values["kind"]]
    given = {"text": ui.text(kind.text, label="sentence", full_width=True)}
    if kind.other is not None:
        given["other"] = ui.text(kind.other, label="and", full_width=True)
    return given


def score(ui: Any, values: dict[str, Any]) -> dict[str, Any]:
    kind = KINDS[values["kind"]]
    knobs = {
        "gamma": ui.slider(steps=GAMMAS, value=1.0, label="γ", show_value=True, debounce=False),
        "seed": ui.button(value=0, on_click=lambda count: count + 1, label="draw again"),
    }
    if kind.smoothed:
        knobs["omega"] = ui.dropdown(SMOOTHINGS, value="Shannon", label="smoothing Ω")
    try:
        found = _problem(values)
    except ValueError:  # the view says it
        return knobs
    off = torch.zeros_like(found.scores).bool() if found.used is None else ~found.used
    knobs["scores"] = ui.matrix(
        found.scores.tolist(),
        min_value=-RANGE,
        max_value=RANGE,
        step=STEP,
        precision=1,
        disabled=off.tolist(),
        row_labels=list(found.rows),
        column_labels=list(found.columns),
    )
    return knobs


STAGES = (choose, write, score)


def view(values: dict[str, Any]) -> str:
    """The answers as pictures and numbers."""
    found = _problem(values)
    scores = torch.tensor(values["scores"], dtype=torch.float64)
    omega = smoothing(values.get("omega", "Shannon"), values["gamma"])
    said = answers(found, scores, omega, values["seed"])
    structure = found.make(scores, omega)

    def draw(weights: Tensor, soft: bool = False) -> Any:
        return paint(structure, weights, found.tokens, found.labels, soft)

    soft = draws = [html.message("Intractable here: a sum over all matchings is #P-hard.")]
    if said.marginals is not None and said.samples is not None:
        soft = [html.figure("", draw(said.marginals, soft=True))]
        draws = [html.figure(f"draw {i}", draw(z)) for i, z in enumerate(said.samples, 1)]
    few = zip(said.probs[:KEPT].tolist(), said.kept)
    kept = [html.figure(f"p = {p:.3f}", draw(z)) for p, z in few]
    more = len(said.kept) - KEPT
    return html.page(
        '<div class="sx-row">',
        html.section("argmax", "argmax", [html.figure("", draw(said.argmax))]),
        html.section("marginals", "marginals", soft),
        "</div>",
        html.section("sparsemap", "SparseMAP", kept, f"and {more} less likely" if more > 0 else ""),
        html.section("samples", "samples", draws),
        '<div class="sx-row">',
        html.numbers(said.numbers),
        html.table(["part", "score", *said.shares], _listed(found, scores, said), "parts"),
        "</div>",
    )


def _listed(found: Problem, scores: Tensor, said: Answers) -> list[tuple[str, list[float]]]:
    """The parts that are used most."""
    order = torch.stack(list(said.shares.values())).sum(0).flatten().argsort(descending=True)
    width = scores.shape[1]
    rows = []
    for place in order[:LISTED].tolist():
        i, j = divmod(place, width)
        if found.used is None or found.used[i, j]:
            name = (
                found.columns[j]
                if len(found.rows) == 1
                else f"{found.rows[i]} – {found.columns[j]}"
            )
            shares = [float(share[i, j]) for share in said.shares.values()]
            rows.append((name, [float(scores[i, j]), *shares]))
    return rows


def _problem(values: dict[str, Any]) -> Problem:
    return problem(values["kind"], values["text"], values.get("other", ""))
