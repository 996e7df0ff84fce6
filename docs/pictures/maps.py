"""The pictures of maps.md, drawn whenever the documentation is built.

``python docs/pictures/maps.py FOLDER`` draws them too. Every picture is written twice, for the
light and for the dark theme.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor

import structmax as sx
from structmax.maps.argmax import argmax

THEMES = {
    "light": {"ink": "#3c3c3c", "faint": "#b4b4b4", "colours": "#0068a8 #c8500a #00805c #a83c88"},
    "dark": {"ink": "#c8c8c8", "faint": "#767676", "colours": "#6cbcf4 #f0a050 #46c8a0 #e890c8"},
}

SIMPLE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": sx.softmax,
    "entmax, α = 1.5": lambda x: sx.entmax(x, 1.5),
    "sparsemax": sx.sparsemax,
    "normmax, α = 2": lambda x: sx.normmax(x, 2.0),
    "argmax": argmax,
}
SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "fusedmax, 0.3": lambda x: sx.fusedmax(x, 0.3),
    "oscarmax, 0.3": lambda x: sx.oscarmax(x, 0.3),
    "csoftmax, p ≤ 0.7": lambda x: sx.csoftmax(x, upper=0.7),
    "csparsemax, p ≤ 0.7": lambda x: sx.csparsemax(x, upper=0.7),
    "budgetmax, k = 1.5": lambda x: sx.budgetmax(x, 1.5),
}
CORNERS = np.array([[-1.0, 0.0], [1.0, 0.0], [0.0, np.sqrt(3)]])
STYLES = ["-", "--", "-", "--", ":"]


def tensor(x: np.ndarray) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def style(theme: str) -> list[str]:
    """Sets matplotlib's colours, on no background; returns those of lines."""
    ink, colours = THEMES[theme]["ink"], [*THEMES[theme]["colours"].split(), THEMES[theme]["ink"]]
    names = ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"]
    matplotlib.rcParams.update(dict.fromkeys(names, ink))
    matplotlib.rcParams.update({
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "svg.hashsalt": "structmax",  # the same picture is the same file
    })  # fmt: skip
    return colours


def triangle(ax: Axes, theme: str, names: Sequence[str] = "123") -> None:
    """An empty simplex with its corners named."""
    ax.plot(*np.vstack([CORNERS, CORNERS[:1]]).T, color=THEMES[theme]["faint"], lw=1, zorder=0)
    offsets = CORNERS - CORNERS.mean(0)
    for name, (x, y) in zip(names, CORNERS + 0.14 * offsets, strict=True):
        ax.text(x, y, name, ha="center", va="center", fontsize=8)
    ax.set(aspect="equal", xlim=(-1.25, 1.25), ylim=(-0.2, 2.0))
    ax.axis("off")


def along_a_line(theme: str) -> Figure:
    """p₁ of the scores [t, 0]."""
    colours = style(theme)
    t = np.linspace(-3, 3, 601)
    figure = Figure(figsize=(8.4, 3.3), layout="constrained")
    for ax, maps in zip(figure.subplots(1, 2), (SIMPLE, SHAPED), strict=True):
        for colour, dash, (name, f) in zip(colours, STYLES, maps.items(), strict=True):
            p = f(tensor(np.stack([t, 0 * t], -1)))[:, 0]
            ax.plot(t, p, dash, color=colour, label=name)
        ax.set(xlabel="t", ylabel="p₁", xlim=(-3, 3), ylim=(-0.04, 1.04))
        ax.legend(loc="upper left", fontsize=8, handlelength=1.8)
    return figure


def on_the_simplex(theme: str) -> Figure:
    """Where each map sends a net of scores with sum zero."""
    colours = style(theme)
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    axes = figure.subplots(2, 5).flat
    fine, coarse = np.linspace(-2, 2, 201), np.linspace(-2, 2, 17)
    u, v = np.array([1, -1, 0]) / np.sqrt(2), np.array([-1, -1, 2]) / np.sqrt(6)
    nets = [
        coarse[:, None, None] * a + fine[None, :, None] * b for a, b in ((u, v), (v, u))
    ]  # (17, 201, 3)
    for ax, (name, f) in zip(axes, (SIMPLE | SHAPED).items(), strict=True):
        triangle(ax, theme)
        for colour, net in zip(colours, nets if f is not argmax else (), strict=False):
            p = f(tensor(net)).numpy()
            lines = (p / p.sum(-1, keepdims=True)) @ CORNERS
            ax.add_collection(LineCollection(lines, colors=colour, linewidths=0.7, alpha=0.75))
        knots = f(tensor(nets[0][:, ::25])).numpy().reshape(-1, 3)
        knots = knots / knots.sum(-1, keepdims=True) @ CORNERS
        ax.plot(*knots.T, "o", ms=2.2 if f is not argmax else 5, color=THEMES[theme]["ink"], mew=0)
        ax.set_title(name)
    return figure


def regularizers(theme: str) -> Figure:
    """Ω of (p, 1−p), Ω at the answer to [t, 0], and maxΩ of [t, 0]."""
    colours = style(theme)
    omegas = {
        "Shannon": (sx.Shannon(), lambda x: sx.softmax(x), 1.0),
        "Tsallis, α = 1.5": (sx.Tsallis(1.5), lambda x: sx.entmax(x, 1.5), 1.5),
        "Gini": (sx.Gini(), lambda x: sx.sparsemax(x), 2.0),
        "Hard": (sx.Hard(), argmax, None),
    }

    def value(p: Tensor, alpha: float | None) -> Tensor:
        if alpha is None:
            return 0 * p[..., 0]
        if alpha == 1:
            return torch.special.xlogy(p, p).sum(-1)
        return (p**alpha - p).sum(-1) / (alpha * (alpha - 1))

    figure = Figure(figsize=(8.4, 2.9), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    p1, t = np.linspace(0, 1, 301), np.linspace(-3, 3, 301)
    p, x = tensor(np.stack([p1, 1 - p1], -1)), tensor(np.stack([t, 0 * t], -1))
    dashes = ["-", "--", "-", ":"]
    shown = [*colours[:3], colours[-1]]
    for colour, dash, (name, (omega, f, alpha)) in zip(shown, dashes, omegas.items(), strict=True):
        left.plot(p1, value(p, alpha), dash, color=colour, label=name)
        middle.plot(t, value(f(x), alpha), dash, color=colour)
        right.plot(t, sx.smoothed_max(x, omega), dash, color=colour)
    left.set(xlabel="p₁", title="Ω(p₁, 1 − p₁)")
    middle.set(xlabel="t", title="Ω at the answer to [t, 0]")
    right.set(xlabel="t", title="maxΩ [t, 0]")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def argmax_is_flat(theme: str) -> Figure:
    """p₁ over a triangle of scores: flat regions, or level sets."""
    style(theme)
    figure = Figure(figsize=(8.4, 2.7), layout="constrained")
    axes = figure.subplots(1, 4)
    steps = 90
    i, j = np.meshgrid(np.arange(steps + 1), np.arange(steps + 1), indexing="ij")
    inside = i + j <= steps
    shares = np.stack([i, j, steps - i - j], -1)[inside] / steps
    x, y = (shares @ CORNERS).T
    scores = tensor(4 * shares)
    levels = np.linspace(0, 1, 11)
    for ax, name in zip(axes, ("argmax", "sparsemax", "entmax, α = 1.5", "softmax"), strict=True):
        p = SIMPLE[name](scores)[:, 0].numpy()
        filled = ax.tricontourf(x, y, p.clip(1e-6, 1 - 1e-6), levels, cmap="cividis")
        if name != "argmax":
            ax.tricontour(x, y, p, levels[1:-1], colors="white", linewidths=0.5, alpha=0.7)
        triangle(ax, theme, names=["θ₁", "θ₂", "θ₃"])
        ax.set_title(name)
    bar = figure.colorbar(filled, ax=axes, shrink=0.8, ticks=[0, 0.5, 1], label="p₁")
    bar.outline.set_visible(False)
    return figure


def denoise(x: np.ndarray, strength: float) -> np.ndarray:
    """argmin over y of ½‖y − x‖² + strength Σ|yᵢ₊₁ − yᵢ|, by fusedmax.

    Fusedmax is sparsemax of it. Scores that differ by little all stay in sparsemax's support, where
    it only shifts them; denoising keeps the mean, which tells the shift.
    """
    small = 0.5 / (len(x) * np.ptp(x))
    p = sx.fusedmax(tensor(small * x), small * strength).numpy()
    return (p - p.mean()) / small + x.mean()


def total_variation(theme: str) -> Figure:
    """Denoising of a step function, and the weights of fusedmax."""
    colours = style(theme)
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    random = np.random.default_rng(1)
    truth = np.repeat([0.0, 1.0, 0.3, 0.3, -0.6], 24)
    noisy = truth + 0.25 * random.standard_normal(len(truth))
    left.plot(noisy, ".", ms=3.5, color=THEMES[theme]["faint"], label="scores")
    for colour, dash, strength in zip(colours, ("-", "-", "--"), (0.2, 1.0, 8.0)):
        y = denoise(noisy, strength)
        left.step(range(len(y)), y, dash, where="mid", color=colour, label=f"strength {strength:g}")
    left.set(xlabel="place", title="denoised scores")
    left.legend(fontsize=8, ncols=2, loc="lower left", columnspacing=1, handlelength=1.6)
    left.set_ylim(-1.9, 1.7)

    scores = np.array([0.1, 0.2, 0.75, 0.9, 0.7, 0.15, 0.1, 0.55, 0.6, 0.1])
    place = np.arange(len(scores))
    for shift, colour, (name, p) in zip(
        (-0.2, 0.2),
        colours,
        {
            "sparsemax": sx.sparsemax(tensor(scores)),
            "fusedmax, 0.1": sx.fusedmax(tensor(scores), 0.1),
        }.items(),
        strict=False,
    ):
        right.bar(place + shift, p, 0.38, color=colour, label=name)
    right.set(xlabel="place", title="weights", xticks=place)
    right.legend(fontsize=8)
    return figure


PICTURES = {
    "maps-line": along_a_line,
    "maps-simplex": on_the_simplex,
    "maps-omega": regularizers,
    "maps-argmax": argmax_is_flat,
    "maps-denoising": total_variation,
}


def draw(folder: Path, suffix: str = "svg") -> None:
    """Writes every picture, ``NAME-light.svg`` and ``NAME-dark.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        for theme in THEMES:
            metadata = {"Date": None} if suffix == "svg" else None
            figure = picture(theme)
            figure.savefig(folder / f"{name}-{theme}.{suffix}", metadata=metadata, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), *sys.argv[2:])
