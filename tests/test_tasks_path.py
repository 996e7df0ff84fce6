"""The recipe ``path`` on small generated maps."""

from __future__ import annotations

import json
from pathlib import Path as Folder

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")

import structmax as sx
from structmax.cli import main
from structmax.train import Trainer, UserError
from structmax.train.metrics import read_log
from structmax.train.tasks.path import COSTS, Path, PathConfig, generate, hamming, is_path

SMALL = {
    "steps": 120,
    "log_every": 20,
    "eval_every": 60,
    "save_every": 120,
    "batch_size": 32,
    "lr": 5e-3,
    "hidden_size": 16,
    "blocks": 1,
    "side": 4,
    "examples": 300,
    "valid_examples": 100,
}
METHODS = {
    "imle": {"estimator": "imle:lam=20,noise=sum-of-gamma"},
    "black-box": {"estimator": "black-box:lam=20"},
    "straight-through": {"estimator": "straight-through"},
    "perturbed-loss": {"method": "perturbed-loss", "samples": 2},
    "no-solver": {"method": "no-solver"},
}
SLOW = ("black-box", "straight-through", "perturbed-loss")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in METHODS],
)
def test_path_learns_by_every_method(tmp_path: Folder, name: str) -> None:
    config = PathConfig(**{**SMALL, **METHODS[name]})
    result = Trainer(Path(), config, tmp_path, silent=True).fit()
    curve = [line["loss"] for line in read_log(tmp_path) if line["kind"] == "train"]
    assert curve[-1] < 0.8 * curve[0]
    found = result["test"]
    assert found["same"] <= found["optimal"]
    assert found["optimal"] > 0.4, found  # at random it is 0.15


def test_random_costs_are_what_chance_gives(tmp_path: Folder) -> None:
    config = PathConfig(**{**SMALL, "method": "random", "steps": 2})
    assert Trainer(Path(), config, tmp_path, silent=True).fit()["test"]["optimal"] < 0.25


def test_maps_are_what_they_say() -> None:
    maps = generate(20, side=6, seed=3)
    again = generate(20, side=6, seed=3)
    for one, same in zip(maps, again):
        assert all(np.array_equal(x, y) for x, y in zip(one, same))
        assert one.pictures.shape == (3, 48, 48) and one.pictures.dtype == np.uint8
        assert set(one.costs.flatten().tolist()) <= set(COSTS.astype(np.float32).tolist())
    costs = torch.from_numpy(np.stack([one.costs for one in maps])).double()
    paths = torch.from_numpy(np.stack([one.paths for one in maps]))
    assert torch.equal(sx.GridPath(-costs, moves="all").argmax().float(), paths)
    # a tile shows its terrain: the nearest mean colour is of its kind
    seen = np.stack([one.pictures for one in maps]).reshape(20, 3, 6, 8, 6, 8).mean((3, 5))
    seen = seen.transpose(0, 2, 3, 1)
    means = np.stack([seen[costs.numpy().round(1) == cost].mean(0) for cost in COSTS.round(1)])
    nearest = ((seen[..., None, :] - means) ** 2).sum(-1).argmin(-1)
    assert (COSTS[nearest].round(1) == costs.numpy().round(1)).mean() > 0.8


def test_what_is_measured() -> None:
    path = torch.tensor([[[1.0, 0, 0], [0, 1, 1], [0, 0, 1]], [[1.0, 0, 0], [0, 0, 0], [0, 0, 1]]])
    assert is_path(path).tolist() == [True, False]
    assert hamming(path, path.flip(0)).tolist() == [2, 2]
    assert hamming(torch.stack([path, path.flip(0)]), path).tolist() == [[0, 0], [2, 2]]

    class Fixed(torch.nn.Module):
        """Finds paths given in advance."""

        def found(self, batch):
            return answers

    task = Path()
    batch = task.collate(generate(3, side=5))
    answers = batch.paths
    assert task.evaluate(Fixed(), [batch])["optimal"].value == 1
    answers = batch.paths.clone()
    answers[0, 2, 0] = 1 - answers[0, 2, 0]  # too many or too few
    answers[1] = 0
    found = task.evaluate(Fixed(), [batch])
    assert found["optimal"].value == found["same"].value == pytest.approx(1 / 3)


def test_path_on_the_command_line(tmp_path: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    options = {**SMALL, "steps": 4, "eval_every": 4, "estimator": "black-box"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["train", "path", *flags, "--device=cpu", f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(out), "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["optimal"] == told["test"]["optimal"]
    line = Path().line(generate(1, side=6)[0])  # of another size
    (tmp_path / "in.txt").write_text(f"{line}\n[[[1, 2, 3]]]\n")
    flags = ["predict", str(out), str(tmp_path / "in.txt"), "--format=json", "--device=cpu"]
    assert main(flags) == 2
    printed = capsys.readouterr()
    assert "line 2" in printed.err and "multiples of 8" in printed.err
    found = json.loads(printed.out)
    assert found["cells"][0] == [0, 0] and found["cells"][-1] == [5, 5]
    assert found["text"].count("#") == len(found["cells"]) and found["shape"] == [6, 6]


def test_path_refuses() -> None:
    with pytest.raises(UserError, match="side"):
        PathConfig(side=1).check()
    with pytest.raises(UserError, match="hidden_size must be at least 4, got 2"):
        PathConfig(hidden_size=2).check()
    Path().model(PathConfig(hidden_size=4))
    with pytest.raises(UserError, match="marginals does not work on GridPath, which"):
        Path().model(PathConfig(estimator="marginals"))
    for line in ("nothing", "[[1, 2]]", "[[[1, 2, 3]], [[1, 2]]]"):
        with pytest.raises(ValueError, match="expected rows"):
            next(Path().predict(torch.nn.Linear(1, 1), [line]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("options", [*METHODS.values(), {"method": "random"}])
def test_path_on_cuda(tmp_path: Folder, options: dict) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, **options}.items()]
    flags += ["--steps=6", "--eval-every=3", "--device=cuda", f"--out={tmp_path / 'run'}"]
    assert main(["train", "path", *flags]) == 0
