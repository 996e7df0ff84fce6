"""A small marginal polytope in the plane, and what happens on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax.draw.svg import BLUE, GREEN, ORANGE, Canvas, Drawing, width
from structmax.estimators import SPIGOT
from structmax.sparse import project
from structmax.structures.base import Structure
from structmax.structures.incremental import Incremental

SIZE, MOST, TILT = 340.0, 60, 0.3  # pixels; structures; of the plane
Points = NDArray[np.float64]
Look = Callable[[Points], Points]


def polytope_svg(
    structure: Structure,
    cost: Callable[[Tensor], Tensor] | Tensor | None = None,
    step: float = 1.0,
) -> Drawing:
    """The convex hull of the structures in the plane, with the answers on it.

    Dots are the structures: the vertices. The argmax is one of them, drawn at the top; marginals
    lie inside, on a curve that leads from the argmax (temperature 0) to the mean of all structures;
    SparseMAP is on a face. The plane goes through that mean, the argmax, and the direction in which
    vertices differ most besides, but for a little tilt that keeps them from hiding each other. So
    what has more dimensions casts a shadow: a point that looks inside may be on the surface.

    With a cost, g = ∂L/∂z at the argmax z, and two arrows: straight-through takes z − ηg for the
    target, which may leave the polytope, SPIGOT the point of the polytope nearest to it. The plane
    then goes through g.

    Args:
        structure: one item, with at most 60 structures
        cost: of a structure: a differentiable function of z, or a tensor of costs of the parts
        step: η

    >>> import structmax as sx
    >>> simplex = sx.Choice(torch.tensor([0.3, 0.0, -0.2]))
    >>> picture = polytope_svg(simplex, cost=torch.tensor([1.0, 0.0, 0.5]))
    >>> "SparseMAP" in picture, "SPIGOT" in picture
    (True, True)
    """
    if structure.batch_shape.numel() != 1 or isinstance(structure, Incremental):
        raise ValueError(
            "polytope_svg: needs one item of a structure that is given by the scores of its parts, "
            f"got {structure!r}. Index one: structure[0]."
        )
    while structure.batch_shape:
        structure = structure[0]
    z, scores = _vertices(structure)
    vertices, best = _flat(z), structure.argmax().detach()
    g = None if cost is None else _slope(best, cost)
    look = _plane(vertices, _flat(best[None])[0], None if g is None else _flat(g[None])[0])
    canvas = Canvas()
    corners = _hull(look(vertices))
    canvas.path([*corners, corners[0]], fill=BLUE, fill_opacity="0.1", stroke="currentColor",
                stroke_opacity="0.5", stroke_linejoin="round")  # fmt: skip
    _draw_vertices(canvas, look(vertices), [str(structure.decode(one)) for one in z], corners)
    marks = [("argmax", ORANGE, best)]
    if structure.supports("marginals"):
        heat = np.concatenate([np.geomspace(0.02, 50, 80), [1e6]])[:, None]
        p = np.exp((scores - scores.max()) / heat / structure.temperature)
        curve = look(p / p.sum(1, keepdims=True) @ vertices)
        canvas.path(map(tuple, curve.tolist()), stroke=BLUE, stroke_width=1.5,
                    stroke_dasharray="2 3", title="Gibbs marginals, all temperatures")  # fmt: skip
        marks.append(("marginals", BLUE, structure.marginals()))
    marks.append(("SparseMAP", GREEN, structure.sparsemap().marginals))
    arrows: list[tuple[str, str, Tensor]] = []
    if g is not None:
        arrows = [("straight-through", "6 4", best - step * g)]
        if SPIGOT().applies_to(structure):
            nearest = project(structure, best - step * g)  # type: ignore[arg-type]
            arrows.append(("SPIGOT", "", nearest))
    for name, dashes, target in arrows:
        ends = [look(_flat(point[None])[0]) for point in (best, target)]
        _arrow(canvas, ends[0].tolist(), ends[1].tolist(), dashes, name)
    for name, colour, point in marks:
        x, y = look(_flat(point.detach()[None])[0]).tolist()
        _mark(canvas, name, x, y, colour)
    x, y = canvas.right + 24, canvas.top + 20
    for name, dashes, _ in arrows:  # what is what
        _arrow(canvas, (x - 9, y), (x + 9, y), dashes, name)
        canvas.text(x + 16, y + 4.5, name, "left")
        y += 24
    for name, colour, _ in marks:
        _mark(canvas, name, x, y, colour)
        canvas.text(x + 16, y + 4.5, name, "left")
        y += 24
    return canvas.drawing()


def _flat(z: Tensor) -> Points:
    return z.detach().reshape(len(z), -1).double().cpu().numpy()


def _vertices(structure: Structure) -> tuple[Tensor, Points]:
    """Every structure that the scores allow, and its score."""
    z = structure.enumerate_support()
    scores = structure.score(z).detach().double().cpu()
    z, scores = z[(scores > -math.inf).to(z.device)], scores[scores > -math.inf]
    if not 1 <= len(z) <= MOST:
        raise ValueError(
            f"polytope_svg: {structure._name} allows {len(z)} structures here, and a picture shows "
            f"1 to {MOST}. Take a shorter item."
        )
    return z, scores.numpy()


def _plane(vertices: Points, top: Points, towards: Points | None) -> Look:
    """To pixels: the direction of the vertex ``top`` upwards, and that of ``towards``, or else the
    main one of the vertices, across."""
    middle = vertices.mean(0)
    _, sizes, basis = np.linalg.svd(vertices - middle, full_matrices=False)
    basis = basis[sizes > 1e-9 * max(sizes.max(), 1.0)]  # of the directions there are
    flat = (vertices - middle) @ basis.T
    # a symmetric polytope has no main direction and hides vertices behind others: tilt it, a little
    tilt = TILT * np.random.default_rng(0).standard_normal((2, len(basis))) * (len(basis) > 2)
    up = _unit(_unit(basis @ (top - middle)) + tilt[0])
    main = np.linalg.svd((flat - np.outer(flat @ up, up)) * (1 + np.abs(tilt[1])))[2][:1].sum(0)
    for across in ([] if towards is None else [basis @ towards]) + [main]:
        across = _unit(across - up * (up @ across))
        if across.any():
            break
    across = _unit(across + tilt[1] - up * (up @ (across + tilt[1])))
    axes = np.stack([across, -up]) @ basis  # pixels count downwards
    x, y = axes @ (top - middle)
    far = max(math.hypot(x, y), 1e-9)
    axes = np.array([[-y, x], [-x, -y]]) / far @ axes  # tilted, the top is upwards again
    places = (vertices - middle) @ axes[0]
    side = places[np.abs(places) > 1e-9]
    axes[0] *= -1.0 if len(side) and side[0] > 0 else 1.0  # the first vertex is on the left
    scale = SIZE / max(np.ptp((vertices - middle) @ axes.T, axis=0).max(), 1.0)
    return lambda points: np.asarray((points - middle) @ axes.T * scale)


def _unit(x: Points) -> Points:
    size = np.linalg.norm(x)
    return x / size if size > 1e-9 else np.zeros_like(x)


def _hull(points: Points) -> list[tuple[float, float]]:
    """The corners of the convex hull, around it (Andrew's monotone chain)."""
    places = sorted({(round(x, 3), round(y, 3)) for x, y in points.tolist()})
    halves = []
    for order in (places, places[::-1]):
        half: list[tuple[float, float]] = []
        for p in order:
            while len(half) > 1 and _left(half[-2], half[-1], p) <= 0:
                half.pop()
            half.append(p)
        halves.append(half[:-1])
    return halves[0] + halves[1] or places


def _left(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _draw_vertices(
    canvas: Canvas, places: Points, texts: list[str], corners: list[tuple[float, float]]
) -> None:
    """Dots, with what they are when pointed at, and beside a corner if there is room."""
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in places.tolist()]
    for (x, y), text in zip(places.tolist(), texts):
        canvas.circle(x, y, 4, fill="currentColor", title=text)
        far = max(math.hypot(x, y), 1e-9)
        side = "left" if x > 0.3 * far else "right" if x < -0.3 * far else "middle"
        at, down = x + 14 * x / far, y + 23 * y / far + 4.5
        wide = width(text)
        left = at - {"left": 0.0, "middle": wide / 2, "right": wide}[side]
        box = (left, down - 12, left + wide, down + 4)
        is_corner = (round(x, 3), round(y, 3)) in corners
        if is_corner and wide < 120 and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            canvas.text(at, down, text, side)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _mark(canvas: Canvas, name: str, x: float, y: float, colour: str) -> None:
    """Each its own shape, so that colour is not all that tells them apart."""
    style = {"fill": colour, "stroke": "currentColor", "title": name}
    if name == "argmax":
        canvas.circle(x, y, 7.5, **style)
    elif name == "marginals":
        canvas.rect(x - 6, y - 6, 12, 12, **style)
    else:
        corners = [(x, y - 8.5), (x + 8.5, y), (x, y + 8.5), (x - 8.5, y), (x, y - 8.5)]
        canvas.path(corners, **style)


def _slope(z: Tensor, cost: Callable[[Tensor], Tensor] | Tensor) -> Tensor:
    """∂L/∂z."""
    if isinstance(cost, Tensor):
        return cost.detach().to(z).expand(z.shape)
    with torch.enable_grad():
        free = z.clone().requires_grad_()
        return torch.autograd.grad(cost(free).sum(), free)[0]


def _arrow(
    canvas: Canvas, start: Sequence[float], end: Sequence[float], dashes: str, title: str
) -> None:
    (x, y), (to_x, to_y) = start, end
    far = math.hypot(to_x - x, to_y - y)
    if far < 1:
        return
    style = {"stroke_dasharray": dashes} if dashes else {}
    canvas.path([(x, y), (to_x, to_y)], stroke=ORANGE, stroke_width=2.5, title=title, **style)
    back = math.atan2(y - to_y, x - to_x)
    tip = [(to_x + 11 * math.cos(back + t), to_y + 11 * math.sin(back + t)) for t in (0.4, -0.4)]
    canvas.path([(to_x, to_y), *tip], fill=ORANGE)
