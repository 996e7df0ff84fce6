"""Shortest paths from pictures: a network sees a map and is told the best path, never the costs.

The maps are like the Warcraft maps of Vlastelica et al., "Differentiation of blackbox combinatorial
solvers", ICLR 2020, but generated: terrain in smooth patches, a noisy picture of eight pixels a
tile. The network's costs go into a solver, through which it is trained. Comparable in kind, not in
number, to what is published on those maps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from structmax import losses
from structmax.structures.grid_path import GridPath
from structmax.train.config import SCHEDULE, Schedule, TrainConfig, option
from structmax.train.estimator import estimator_of
from structmax.train.metrics import Ratio
from structmax.train.task import Splits, Task

COSTS = np.array([0.8, 1.2, 5.3, 7.7, 9.2])
"""Of a step on sand, grass, stones, forest, water."""

COLOURS = np.array([[194, 160, 100], [100, 160, 80], [140, 140, 130], [40, 100, 50], [60, 90, 170]])
PIXELS = 8  # of a tile's side


@dataclass
class PathConfig(TrainConfig):
    """The options of ``path``."""

    steps: int = option(5000, "Train for this many updates; 0: no limit.")
    batch_size: int = option(70, "Examples per update and worker.")
    lr: float = option(3e-3, "Learning rate.")
    schedule: Schedule = option("late", SCHEDULE)
    eval_every: int = option(500, "Updates between evaluations on the validation split.")
    method: Literal["solver", "perturbed-loss", "no-solver", "random"] = option(
        "solver",
        "solver: costs through an estimator; perturbed-loss: the Fenchel-Young loss of noisy "
        "paths; no-solver: cells marked one by one; random: costs at random.",
    )
    estimator: str = option(
        "imle:lam=20,noise=sum-of-gamma", "Of the solver: NAME or NAME:OPTION=VALUE,OPTION=VALUE."
    )
    sigma: float = option(1.0, "Scale of the noise of the perturbed loss.")
    samples: int = option(1, "Draws of the perturbed loss.", least=1)
    side: int = option(12, "Tiles along a side of the map.", fixed=True, least=2)
    noise: float = option(25.0, "Standard deviation of a pixel's noise, of 255.", fixed=True)
    examples: int = option(10000, "Training maps to generate.", fixed=True)
    valid_examples: int = option(
        1000, "Maps for validation, and as many for the test.", fixed=True, least=1
    )
    hidden_size: int = option(64, "Channels of the network.", least=4)
    blocks: int = option(2, "Residual blocks on the tiles; with no solver, more of them.")


class Batch(NamedTuple):
    """Maps: pictures ``(B, 3, 8·side, 8·side)`` in bytes, costs and the best path ``(B, side,
    side)``. The costs are for measuring only."""

    pictures: Tensor
    costs: Tensor
    paths: Tensor


class Network(nn.Module):
    """A small residual network from a picture to a number for each tile."""

    def __init__(self, config: PathConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        # every stage halves the picture: after three, a position is a tile
        stages = [(3, size // 4), (size // 4, size // 2), (size // 2, size)]
        self.tiles = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), Block(b)
                )
                for a, b in stages
            )
        )
        direct = config.method == "no-solver"
        # to mark a path directly, a tile must see the whole map
        wide = [Block(size, 2 ** (i % 4)) for i in range(8)] if direct else []
        self.blocks = nn.Sequential(*(Block(size, 1, 1) for _ in range(config.blocks)), *wide)
        self.score = nn.Conv2d(size, 1, 1)
        self.estimator: Any = None
        if config.method == "solver":
            structure = GridPath(-torch.ones(2, 2), moves="all")
            self.estimator = estimator_of(config.estimator, structure)

    def forward(self, pictures: Tensor) -> Tensor:
        """``(B, side, side)``"""
        tiles = self.tiles(pictures.float() / 127.5 - 1)
        return self.score(self.blocks(tiles)).squeeze(1).float()

    def structure(self, batch: Batch) -> GridPath:
        """The paths under the costs that the network sees."""
        if self.config.method == "random":
            costs = torch.rand(batch.costs.shape, device=batch.costs.device)
        else:
            costs = softplus(self(batch.pictures))
        return GridPath(-costs, moves="all", validate_args=False)

    def found(self, batch: Batch) -> Tensor:
        """The cells of the path that is found ``(B, side, side)``."""
        if self.config.method == "no-solver":
            return (self(batch.pictures) > 0).float()
        return self.structure(batch).argmax()


class Block(nn.Module):
    """x + what two convolutions, a kernel of 3 or 1 wide, make of it."""

    def __init__(self, size: int, dilation: int = 1, kernel: int = 3) -> None:
        super().__init__()

        def layer() -> list[nn.Module]:
            far = dilation * (kernel // 2)
            return [
                nn.Conv2d(size, size, kernel, 1, far, dilation, bias=False),
                nn.BatchNorm2d(size),
            ]

        self.layers = nn.Sequential(*layer(), nn.ReLU(), *layer())

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


class Path(Task):
    """The shortest path on a map that is given as a picture."""

    name = "path"
    config = PathConfig
    metric = "optimal"

    def data(self, config: PathConfig) -> Splits:
        self.facts = {"side": config.side}
        # the test set is the same for every seed of a run
        sizes = (config.examples + config.valid_examples, config.valid_examples)
        mine, test = (
            generate(n, config.side, config.noise, seed)
            for n, seed in zip(sizes, (config.seed, 1_000_003))
        )
        held = config.valid_examples
        return Splits(mine[held:], mine[:held], test)

    def model(self, config: PathConfig) -> nn.Module:
        return Network(config)

    def collate(self, examples: Sequence[Any]) -> Batch:
        return Batch(*(torch.from_numpy(np.stack(arrays)) for arrays in zip(*examples)))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        config, paths = model.config, batch.paths
        if config.method == "no-solver":
            logits = model(batch.pictures)
            each = binary_cross_entropy_with_logits(logits, paths, reduction="none")
            return each.flatten(1).sum(1)
        structure = model.structure(batch)
        if config.method == "random":  # nothing is learned
            return (structure.scores * 0).flatten(1).sum(1) + 0 * model.score.bias
        if config.method == "perturbed-loss":
            noisy = {"sigma": config.sigma, "samples": config.samples}
            return losses.perturbed(structure, paths, reduction="none", **noisy)
        return model.estimator.loss(structure, lambda z: hamming(z, paths))

    def has_unused(self, model: Any) -> bool:
        return bool(model.config.method == "random")

    def evaluate(self, model: Any, batches: Iterable[Batch]) -> dict[str, Ratio | float]:
        sums = np.zeros(4)
        for batch in batches:
            z = model.found(batch)
            best = (batch.paths * batch.costs).sum((1, 2))
            optimal = is_path(z) & ((z * batch.costs).sum((1, 2)) < best + 1e-3)
            same = (z == batch.paths).flatten(1).all(1)
            wrong = hamming(z, batch.paths)
            sums += [float(x) for x in (optimal.sum(), same.sum(), wrong.sum(), len(z))]
        optimal_maps, same_maps, cells, maps = sums.tolist()
        return {
            "optimal": Ratio(optimal_maps, maps),
            "same": Ratio(same_maps, maps),
            "hamming": Ratio(cells, maps),
        }

    def line(self, example: Any) -> str:
        return json.dumps(example.pictures.transpose(1, 2, 0).tolist())

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        device = next(model.parameters()).device
        for line in lines:
            picture = read_picture(line)
            one = torch.from_numpy(picture)[None].to(device)
            side = [n // PIXELS for n in picture.shape[1:]]
            nothing = torch.zeros(1, *side, device=device)
            (z,) = model.found(Batch(one, nothing, nothing)).cpu()
            cells = z.nonzero().tolist()
            rows = ["".join("#" if cell else "." for cell in row) for row in z.tolist()]
            yield {"cells": cells, "shape": side, "text": "\n".join(rows)}


def read_picture(line: str) -> NDArray[np.uint8]:
    """A picture ``(3, h, w)`` from JSON: rows of pixels of red, green and blue."""
    try:
        picture = np.array(json.loads(line))
    except (ValueError, RecursionError) as error:  # of JSON, or of rows that differ
        raise ValueError(f"expected rows of pixels [red, green, blue] as JSON: {error}") from None
    good = picture.ndim == 3 and picture.shape[2] == 3 and picture.size > 0
    if not good or any(n % PIXELS for n in picture.shape[:2]):
        raise ValueError(
            f"expected rows of pixels [red, green, blue], height and width multiples of {PIXELS}, "
            f"got the shape {picture.shape}."
        )
    if picture.dtype != np.int64 or picture.min() < 0 or picture.max() > 255:
        raise ValueError("expected red, green and blue as whole numbers from 0 to 255.")
    return picture.astype(np.uint8).transpose(2, 0, 1)


def hamming(z: Tensor, paths: Tensor) -> Tensor:
    """How many cells differ, linear in z, ``(..., B)``."""
    return (z * (1 - paths) + (1 - z) * paths).sum((-2, -1))


def is_path(z: Tensor) -> Tensor:
    """Whether the cells ``(B, h, w)`` join the first to the last, ``(B)``."""
    walls = torch.where(z > 0, -1.0, -torch.inf)
    reached = GridPath(walls, moves="all", validate_args=False).argmax()
    return ~reached.isnan().flatten(1).any(1)


# -- data -----------------------------------------------------------------------------------------


class Map(NamedTuple):
    """A picture ``(3, 8·side, 8·side)``, the costs and the best path ``(side, side)``."""

    pictures: NDArray[np.uint8]
    costs: NDArray[np.float32]
    paths: NDArray[np.float32]


def generate(count: int, side: int, noise: float = 25.0, seed: int = 0) -> list[Map]:
    """Maps of smooth random terrain, and what they look like.

    A smoothed field of noise is cut at its quantiles into kinds of terrain, in another order on
    each map. Tiles have the colour and the grain of their kind; maps differ in light, and every
    pixel has noise.

    >>> map = generate(1, side=4)[0]
    >>> map.pictures.shape, map.paths[0, 0], map.paths[-1, -1]
    ((3, 32, 32), np.float32(1.0), np.float32(1.0))
    """
    rng = np.random.default_rng(seed)
    kinds = len(COSTS)
    field = smooth(rng.standard_normal((count, side, side)), side)
    rank = field.reshape(count, -1).argsort(1).argsort(1).reshape(field.shape)
    order = rng.permuted(np.tile(np.arange(kinds), (count, 1)), axis=1)  # by height, in each map
    level = rank * kinds // (side * side)
    terrain = order[np.arange(count)[:, None, None], level]
    costs = COSTS[terrain].astype(np.float32)
    paths = GridPath(-torch.from_numpy(costs).double(), moves="all").argmax().float().numpy()
    grain = np.random.default_rng(0).normal(0, 18, (kinds, 3, PIXELS, PIXELS))  # of all maps
    looks = (grain + COLOURS[:, :, None, None]).astype(np.float32)
    found = []
    for i in range(count):
        tiles = looks[terrain[i]]  # (side, side, 3, 8, 8)
        picture = tiles.transpose(2, 0, 3, 1, 4).reshape(3, side * PIXELS, side * PIXELS)
        picture = picture * np.float32(rng.uniform(0.8, 1.2))
        picture += np.float32(noise) * rng.standard_normal(picture.shape, np.float32)
        found.append(Map(picture.clip(0, 255).astype(np.uint8), costs[i], paths[i]))
    return found


def smooth(field: NDArray[Any], side: int) -> NDArray[Any]:
    """Each field ``(..., side, side)`` blurred by a Gaussian of a tenth of its side."""
    frequency = np.fft.fftfreq(side)
    square = frequency[:, None] ** 2 + frequency**2
    keep = np.exp(-2 * (np.pi * side / 10) ** 2 * square)
    return np.fft.ifft2(np.fft.fft2(field) * keep).real
