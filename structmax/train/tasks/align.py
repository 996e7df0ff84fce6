"""Time series classified by alignment: nearest neighbours, and nearest averages.

The averages are barycenters under smoothed dynamic time warping, as in Cuturi & Blondel, "Soft-DTW:
a differentiable loss function for time-series", ICML 2017, §4, with Shannon's and Gini's Ω, and the
divergence of Blondel, Mensch & Vert, AISTATS 2021. No smoothing gives DTW and its average, DBA
(Petitjean, Ketterlin & Gançarski, Pattern Recognition 2011).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from structmax.barycenter import barycenter
from structmax.data import find_data, ucr
from structmax.data.folder import quoted
from structmax.losses.soft_dtw import SoftDTW
from structmax.smoothing import Gini, Hard, Shannon
from structmax.structures.alignment import Alignment
from structmax.train import checkpoint, run
from structmax.train.batches import move
from structmax.train.config import TrainConfig, option
from structmax.train.distributed import Workers
from structmax.train.errors import UserError, as_user_error
from structmax.train.metrics import Ratio
from structmax.train.progress import Progress
from structmax.train.task import Splits, Task, warn_of_one_class

METHODS = ("euclidean", "random path", "dtw", "soft-dtw", "divergence", "gini-dtw")
SMOOTHED = METHODS[3:]
CELLS = 2**24  # of alignments computed at once
Known = tuple[Tensor, Tensor]  # series (k, n, d) and their classes (k)


@dataclass
class AlignConfig(TrainConfig):
    """The options of ``align``. It has no updates: of the common options, those of updates are
    refused."""

    set: str = option(
        "", "UCR data set, such as GunPoint; none: a tiny generated set.", fixed=True, data=True
    )
    data: str = option("", "Folder of data sets; else $STRUCTMAX_DATA, or beside the checkout.")
    gammas: str = option(
        "0.001,0.01,0.1,1,10", "The γ to choose from, by cross-validation.", fixed=True
    )
    folds: int = option(
        3, "Parts of the training series for cross-validation of averages.", fixed=True
    )
    iterations: int = option(
        30, "The most iterations of L-BFGS, or of DBA, for an average.", fixed=True
    )

    def check(self) -> None:
        super().check()
        for f in fields(TrainConfig):
            used = f.name in ("seed", "device", "batch_size", "batch_tokens")
            if not used and getattr(self, f.name) != f.default:
                raise UserError(f"align has no updates: {f.name} has no effect.")
        if self.folds < 2 or self.iterations < 1 or not self.choices():
            raise UserError("align: folds ≥ 2, iterations ≥ 1 and finite gammas > 0 are needed.")

    def choices(self) -> list[float]:
        """The γ to choose from; none where one of them is not positive and finite."""
        try:
            found = [float(gamma) for gamma in self.gammas.split(",")]
        except ValueError:
            return []
        return found if all(0 < gamma < math.inf for gamma in found) else []


class Measure:
    """How far two series are from each other, and what the average of several is.

    Args:
        method: one of ``METHODS``
        gamma: γ of the smoothing, where there is one
        size: n, of series that have no other length; the random path needs it
        iterations: the most iterations for an average
    """

    def __init__(self, method: str, gamma: float, size: int, iterations: int) -> None:
        self.method, self.iterations = method, iterations
        omega = Gini(gamma) if method == "gini-dtw" else Shannon(gamma)
        self.loss = SoftDTW(
            omega=omega if method in SMOOTHED else Hard(), divergence=method == "divergence"
        )
        generator = torch.Generator().manual_seed(size)
        self.path = Alignment(torch.zeros(size, size)).sample(generator=generator)

    def distances(self, x: Tensor, y: Tensor) -> Tensor:
        """Those of x ``(k, n, d)`` to y ``(l, n, d)``: ``(k, l)``."""
        if self.method == "euclidean":
            return torch.cdist(x.flatten(1), y.flatten(1)).square()
        if self.method == "random path":
            at, other = self.path.to(x.device).nonzero(as_tuple=True)
            return torch.cdist(x[:, at].flatten(1), y[:, other].flatten(1)).square()
        between = _in_chunks(self._plain, *_pairs(x, y)).reshape(len(x), len(y))
        if self.method != "divergence":
            return between
        own_x, own_y = (_in_chunks(self._plain, each, each) for each in (x, y))
        return between - own_x[:, None] / 2 - own_y / 2

    def _plain(self, x: Tensor, y: Tensor) -> Tensor:
        return SoftDTW(omega=self.loss.omega)(x, y)

    def average(self, series: Tensor) -> Tensor:
        """The average ``(n, d)`` of series ``(k, n, d)``."""
        mean = series.mean(0)
        if self.method == "euclidean":
            return mean
        if self.method == "random path":
            return _realigned(self.path.to(series).expand(len(series), -1, -1), series)
        if self.method != "dtw":
            return barycenter(series, init=mean, loss=self.loss, max_iter=self.iterations)
        for _ in range(self.iterations):
            exact = "donot_use_mm_for_euclid_dist"
            costs = torch.cdist(mean.expand_as(series), series, compute_mode=exact).square()
            before, mean = mean, _realigned(Alignment(-costs, smoothing=Hard()).argmax(), series)
            if torch.equal(before, mean):
                break
        return mean

    def averages(self, train: Known, classes: int) -> Tensor:
        """The average of each class, ``(c, n, d)``."""
        series, labels = train
        return torch.stack([self.average(series[labels == c]) for c in range(classes)])


def _realigned(paths: Tensor, series: Tensor) -> Tensor:
    """The mean of what paths ``(k, n, m)`` align with each element: the best average for them."""
    return (paths @ series).sum(0) / paths.sum((0, 2))[:, None]


def _pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Every series of x with every one of y, as views: ``(k, l, n, d)``."""
    return x[:, None].expand(-1, len(y), -1, -1), y.expand(len(x), -1, -1, -1)


def _in_chunks(loss: Any, x: Tensor, y: Tensor) -> Tensor:
    """The losses of x and y ``(k, …, n, d)``, a few rows at a time."""
    step = max(1, CELLS // (x[0].numel() // x.shape[-1] * y.shape[-2]))
    return torch.cat([loss(x[i : i + step], y[i : i + step]) for i in range(0, len(x), step)])


class Nearest(nn.Module):
    """The distances ``(B, c)`` of series ``(B, n, d)`` to an average of each class."""

    averages: Tensor

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__()
        self.measure = Measure(facts["method"], facts["gamma"], facts["shape"][0], 1)
        self.register_buffer("averages", torch.zeros(len(facts["classes"]), *facts["shape"]))

    def forward(self, series: Tensor) -> Tensor:
        return self.measure.distances(series, self.averages)


class Align(Task):
    """Time series classified by alignment: Euclidean, DTW, soft-DTW, divergence, Gini-DTW."""

    name = "align"
    config = AlignConfig
    metric = "accuracy"

    def data(self, config: AlignConfig) -> Splits:
        if config.set:
            name = config.set if "/" in config.set else f"ucr/{config.set}"
            train, test = ucr.read(find_data(name, config.data))
        else:
            train, test = generate(config.seed, 12), generate(config.seed + 1, 20)
        shapes = {series.shape for series in [*train.series, *test.series]}
        if len(shapes) > 1:
            raise ValueError(f"align: series must have one length, got {sorted(shapes)[:3]} …")
        if np.bincount(train.labels, minlength=len(train.classes)).min() < 2:
            raise ValueError("align: every class must have two series to train with at least.")
        warn_of_one_class(train.classes[label] for label in train.labels)
        (shape,) = shapes
        self.facts |= {"classes": train.classes, "shape": list(shape)}
        return Splits([*zip(train.series, train.labels)], (), [*zip(test.series, test.labels)])

    def model(self, config: AlignConfig) -> nn.Module:
        return Nearest(self.facts)

    def size(self, example: Any) -> int:
        return len(example[0])

    def collate(self, examples: Sequence[Any]) -> Known:
        series = np.stack([series for series, _ in examples])
        return torch.from_numpy(series).float(), torch.tensor([int(y) for _, y in examples])

    # -- all methods, then the best by cross-validation --------------------------------------------

    def fit(
        self, config: AlignConfig, folder: Path, resume: bool, workers: Workers
    ) -> dict[str, Any]:
        """Compare the methods; keep the averages of the one that was best in cross-validation."""
        if not workers.first:
            return {}
        with as_user_error():
            data = self.data(config)
        alone = Workers(workers.device)
        with run.hold(self, config, folder, resume, "result.json", alone) as finished:
            if finished:
                return run.read_result(folder)
            train, test = (
                move(self.collate(split), workers.device) for split in (data.train, data.test)
            )
            return self._compare(config, folder, train, test)

    def _compare(
        self, config: AlignConfig, folder: Path, train: Known, test: Known
    ) -> dict[str, Any]:
        began = time.monotonic()
        progress = Progress(self.name)
        rows = []
        for method in METHODS:
            rows.append(self._row(method, config, train, test))
            progress.say("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
        best = max(rows, key=lambda row: row["average_cv"])
        self.facts |= {"method": best["method"], "gamma": best["average_gamma"] or 1.0}
        run.write_facts(folder, self)
        model = self.model(config)
        measure = self._measure(best["method"], self.facts["gamma"], config)
        model.averages = measure.averages(train, len(self.facts["classes"]))
        weights = {f"model.{n}": t for n, t in model.state_dict().items()}
        checkpoint.save(folder / "best.safetensors", weights, {"step": 0})
        result = {
            "task": self.name,
            "set": config.set,
            "minutes": round((time.monotonic() - began) / 60, 3),
            "rows": rows,
            "test": {"method": best["method"], "accuracy": best["average_test"]},
        }
        run.write_result(folder, result, table(rows))
        progress.say(table(rows))
        return result

    def _measure(self, method: str, gamma: float, config: AlignConfig) -> Measure:
        return Measure(method, gamma, self.facts["shape"][0], config.iterations)

    def _row(self, method: str, config: AlignConfig, train: Known, test: Known) -> dict[str, Any]:
        """One method: γ by cross-validation on the training series, then the test series."""
        began = time.monotonic()
        choices = config.choices() if method in SMOOTHED else [1.0]
        measures = [self._measure(method, gamma, config) for gamma in choices]
        row: dict[str, Any] = {"method": method}
        for kind, classify, check in (
            ("neighbour", by_neighbour, leave_one_out),
            ("average", by_average, cross_validation),
        ):
            scores = [check(measure, train, config) for measure in measures]
            best = int(np.argmax(scores))  # the least γ of those that are equally good
            right = classify(measures[best], train, test[0]) == test[1]
            row[f"{kind}_gamma"] = choices[best] if method in SMOOTHED else None
            row[f"{kind}_cv"] = round(scores[best], 4)
            row[f"{kind}_test"] = round(float(right.double().mean()), 4)
        row["seconds"] = round(time.monotonic() - began, 1)
        return row

    # -- the best of them --------------------------------------------------------------------------

    def evaluate(self, model: Any, batches: Iterable[Any]) -> dict[str, Ratio | float]:
        right = count = 0
        for series, labels in batches:
            right += int((model(series).argmin(1) == labels).sum())
            count += len(labels)
        return {"accuracy": Ratio(right, count)}

    def read(self, path: Path, config: AlignConfig) -> list[tuple[np.ndarray, int]]:
        found, known = ucr.read_ts(path), self.facts["classes"]
        shapes = {series.shape for series in found.series} | {tuple(self.facts["shape"])}
        if len(shapes) > 1 or not set(found.classes) <= set(known):
            raise ValueError(
                f"{path}: expected series of the shape {tuple(self.facts['shape'])} and classes of "
                f"{known}, got the shapes {sorted(shapes)} and {found.classes}."
            )
        names = [found.classes[label] for label in found.labels]
        return [(x, known.index(name)) for x, name in zip(found.series, names)]

    def line(self, example: Any) -> str:
        return ":".join(",".join(map(str, feature)) for feature in example[0].T)

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        n, d = self.facts["shape"]
        wanted = f"{d} features between colons, each of {n} numbers between commas"
        for line in lines:
            try:
                series = np.array([feature.split(",") for feature in line.split(":")], np.float64).T
            except ValueError:  # words, or features of different lengths
                raise ValueError(f"expected {wanted}, got {quoted(line)}.") from None
            if series.shape != (n, d):
                raise ValueError(f"expected {wanted}, got {series.shape[1]} of {series.shape[0]}.")
            far = model(torch.from_numpy(series)[None].to(model.averages))[0]
            if not far.isfinite().all():
                raise ValueError(f"the numbers must be finite and not so large: {quoted(line)}.")
            name = self.facts["classes"][int(far.argmin())]
            yield {"class": name, "distances": far.tolist(), "text": name}


def by_neighbour(measure: Measure, train: Known, series: Tensor) -> Tensor:
    """The classes of the nearest training series."""
    return train[1][measure.distances(series, train[0]).argmin(1)]


def by_average(measure: Measure, train: Known, series: Tensor) -> Tensor:
    """The classes whose averages are nearest."""
    averages = measure.averages(train, int(train[1].max()) + 1)
    return measure.distances(series, averages).argmin(1)


def leave_one_out(measure: Measure, train: Known, config: AlignConfig) -> float:
    """How many training series have the class of their nearest neighbour among the others."""
    series, labels = train
    far = measure.distances(series, series).fill_diagonal_(torch.inf)
    return float((labels[far.argmin(1)] == labels).double().mean())


def cross_validation(measure: Measure, train: Known, config: AlignConfig) -> float:
    """How many training series are nearest to their class, averaged without their fold."""
    series, labels = train
    rng = np.random.default_rng(config.seed)
    fold = torch.zeros_like(labels)
    for c in labels.unique():  # every class is spread over the folds
        (members,) = (labels == c).nonzero(as_tuple=True)
        order = torch.from_numpy(rng.permutation(len(members))).to(labels)
        fold[members] = order % config.folds
    right = 0
    for i in fold.unique():
        inside = fold == i
        known = series[~inside], labels[~inside]
        right += int((by_average(measure, known, series[inside]) == labels[inside]).sum())
    return right / len(labels)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown, accuracies in per cent."""
    lines = [
        "| method | 1-NN γ | train, one left out | test | average γ | train, folds | test | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["method"]]
        for kind in ("neighbour", "average"):
            gamma = row[f"{kind}_gamma"]
            cells.append("–" if gamma is None else f"{gamma:g}")
            cells += [f"{100 * row[f'{kind}_{part}']:.1f}" for part in ("cv", "test")]
        lines.append(f"| {' | '.join([*cells, str(row['seconds'])])} |")
    return "\n".join(lines) + "\n"


def generate(seed: int, count: int) -> ucr.Series:
    """Series with one bump, two, or a step, at some place and of some width: ``count`` of each."""
    rng = np.random.default_rng(seed)
    t = np.arange(24)
    found: list[np.ndarray] = []
    for label in np.repeat(range(3), count):
        at, width = rng.uniform(6, 12), rng.uniform(1, 2)
        bump = np.exp(-(((t - at) / width) ** 2))
        later = np.exp(-(((t - at - rng.uniform(6, 10)) / width) ** 2))
        step = 1 / (1 + np.exp(-(t - at) / width))
        series = [bump, bump + later, step][label] + 0.1 * rng.standard_normal(len(t))
        found.append(series[:, None])
    return ucr.Series(found, np.repeat(range(3), count), ["one", "two", "step"])
