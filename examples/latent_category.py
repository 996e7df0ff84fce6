"""Regression with a latent category: one model, every way to train it.

The running example of the tutorial "Latent structure models for natural language processing"
(Martins, Mihaylova, Nangia & Niculae, ACL 2019): an encoder scores the categories z of an input x,
and a decoder predicts y from z. The data come from three categories, which few examples name.

- pre-training: the encoder learns 16 labelled examples first and is then left as it is;
- multi-task: the same labels, learned beside the regression, without a gradient through z;
- L(E[z]): relaxations, z is a mixture of categories;
- L(argmax): one category, and the gradient of something else in its place;
- E[L(z)]: the expected cost over categories, by draws or by a sum.

Run it with ``python examples/latent_category.py``; it takes about a minute. The picture, if
matplotlib is installed, goes to ``latent_category.png``.
"""

import argparse

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import structmax as sx

CATEGORIES, LABELLED = 3, 16

METHODS = {  # name: the estimator and its options
    "marginals": ("marginals", {}),
    "sparsemap": ("sparsemap", {}),
    "perturbed": ("perturbed", {}),
    "perturb and parse": ("perturb-and-parse", {}),
    "straight-through": ("straight-through", {}),
    "straight-through, marginals": ("straight-through", {"backward": "marginals"}),
    "spigot": ("spigot", {"step": 0.1}),
    "black box": ("black-box", {"lam": 0.1}),
    "perturb and map": ("perturb-and-map", {}),
    "gumbel straight-through": ("gumbel-straight-through", {}),
    "imle": ("imle", {"lam": 0.1, "noise": "gumbel"}),
    "reinforce": ("reinforce", {}),
    "reinforce, self-critic": ("reinforce", {"baseline": "self-critic"}),
    "reinforce, leave-one-out": ("reinforce", {"samples": 4, "baseline": "leave-one-out"}),
    "ppo": ("ppo", {"samples": 4, "baseline": "leave-one-out", "updates": 2}),
    "sum and sample": ("sum-and-sample", {"k": 1}),
    "top-k expectation": ("top-k-expectation", {"k": 2}),
    "sparse expectation": ("sparse-expectation", {}),
    "exact expectation": ("exact-expectation", {}),
}


class Model(nn.Module):
    """Scores of the categories of x, and a prediction of y from the category."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, CATEGORIES))
        self.decoder = nn.Linear(CATEGORIES, 1)

    def structure(self, x: Tensor) -> sx.Choice:
        return sx.Choice(self.encoder(x))

    def cost(self, y: Tensor, z: Tensor) -> Tensor:
        """Squared errors of z ``(..., B, 3)``."""
        return (self.decoder(z).squeeze(-1) - y).square()


def draw(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Points x, the category that each is in, its sector, and y, which depends on that alone."""
    x = 2 * torch.rand(size, 2, generator=generator) - 1
    category = ((torch.atan2(x[:, 1], x[:, 0]) / torch.pi + 1) * 1.5).long().clamp(max=2)
    y = torch.tensor([-3.0, 3.0, 0.0])[category]
    return x, y + 0.3 * torch.randn(size, generator=generator), category


def train(name: str, steps: int, seed: int) -> dict[str, object]:
    """The test error of the argmax as it falls, relative to a constant prediction."""
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model, test, labelled = Model(), draw(1000, data), draw(LABELLED, data)
    optimizer = torch.optim.Adam(
        [  # a slow encoder: a category that is given up early does not come back
            {"params": model.encoder.parameters(), "lr": 0.005},
            {"params": model.decoder.parameters(), "lr": 0.05},
        ]
    )
    supervised = name in ("pre-training", "multi-task")
    kind, options = METHODS.get(name, ("straight-through", {}))
    estimator = sx.estimators.by_name(kind, **options)

    def label_loss() -> Tensor:
        x, _, category = labelled
        return -model.structure(x).log_prob(category).mean()

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if name == "pre-training":
        for _ in range(steps // 4):
            step(label_loss())
        model.encoder.requires_grad_(False)
    curve = []
    for i in range(steps):
        x, y, _ = draw(64, data)
        structure = model.structure(x)
        if supervised:  # a pipeline: the decoder sees the argmax, which has no gradient
            loss = model.cost(y, structure.argmax()).mean()
            loss = loss + label_loss() if name == "multi-task" else loss
        else:
            loss = estimator.loss(
                structure, lambda z, y=y: model.cost(y, z)
            ).sum()  # λ and η see one item
        step(loss)
        for _ in range(getattr(estimator, "updates", 1) - 1):
            step(estimator.replay(model.structure(x)).sum())  # the same draws once more
        if i % max(steps // 50, 1) == 0 or i == steps - 1:
            curve.append((i, *evaluate(model, *test)))
    return {"curve": curve, "error": curve[-1][1], "accuracy": curve[-1][2]}


@torch.no_grad()
def evaluate(model: Model, x: Tensor, y: Tensor, category: Tensor) -> tuple[float, float]:
    """Squared error over the variance, and how many categories are right, whatever their names."""
    z = model.structure(x).argmax()
    table = torch.zeros(CATEGORIES, CATEGORIES).index_put(
        (z.argmax(-1), category), torch.ones(()), accumulate=True
    )
    right = table[linear_sum_assignment(-table)].sum() / len(x)
    return float(model.cost(y, z).mean() / y.var()), float(right)


def plot(results: dict[str, dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(9, 5), layout="constrained")
    for i, (name, result) in enumerate(results.items()):
        steps, errors, _ = zip(*result["curve"], strict=True)
        ax.plot(steps, errors, label=name, color=f"C{i % 10}", ls=("-", "--", ":")[i // 10])
    ax.set(yscale="log", xlabel="step", ylabel="test error / variance", title="Latent category")
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    plt.savefig(path, dpi=150)


def main(steps: int = 500, seed: int = 0, out: str = "latent_category.png") -> dict[str, dict]:
    results = {}
    print(f"{'method':30s} {'objective':10s} {'error':>8s} {'accuracy':>9s}")
    for name in ("pre-training", "multi-task", *METHODS):
        results[name] = train(name, steps, seed)
        objective = "labels"
        if name in METHODS:
            kind, options = METHODS[name]
            objective = sx.estimators.by_name(kind, **options).objective
        error, accuracy = results[name]["error"], results[name]["accuracy"]
        print(f"{name:30s} {objective:10s} {error:8.3f} {accuracy:9.2f}")
    try:
        plot(results, out)
    except ImportError:
        print("For the picture: pip install matplotlib")
    else:
        print(f"Picture: {out}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="latent_category.png")
    main(**vars(parser.parse_args()))
