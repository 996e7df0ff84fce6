"""ListOps: classify nested expressions by their value, along trees that are learned.

Nangia & Bowman, "ListOps: A diagnostic dataset for latent tree learning", NAACL 2018.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from structmax.data import collate, find_data, listops
from structmax.data.words import in_batches
from structmax.nn.classifier import LATENT, TreeClassifier
from structmax.train.config import TrainConfig, option
from structmax.train.errors import UserError
from structmax.train.estimator import estimator_of
from structmax.train.metrics import Ratio, tree_f1
from structmax.train.task import Splits, Task


@dataclass
class ListOpsConfig(TrainConfig):
    """The options of ``listops``."""

    steps: int = option(5000, "Train for this many updates; 0: no limit.")
    encoder: Literal[
        "lstm", "gold", "balanced", "left", "right", "random", "spinn", "easy-first", "cky", "chart"
    ] = option("easy-first", "Where trees come from; lstm has none.")
    estimator: str = option(
        "top-k-expectation:k=5",
        "How latent trees are trained: NAME or NAME:OPTION=VALUE,…; likelihood: of the label, "
        "summed over the --beam best trees; supervised: by gold trees.",
    )
    hidden_size: int = option(128, "Size of the vectors.")
    cell: Literal["gated", "tree-lstm"] = option("gated", "What composes two subtrees.")
    leaf_lstm: bool = option(False, "Let leaves see their context.")
    tracking: bool = option(False, "Let SPINN's parser remember what it has seen.")
    dropout: float = option(0.0, "Probability of dropout in the cell and the classifier.")
    beam: int = option(1, "Average predictions over this many trees at evaluation.", least=1)
    examples: int = option(20000, "Training expressions to generate.", fixed=True)
    valid_examples: int = option(
        1000, "Expressions for validation, apart from training's.", fixed=True
    )
    test_examples: int = option(1000, "Test expressions to generate.", fixed=True)
    max_depth: int = option(20, "Depth of the generated expressions.", fixed=True)
    max_args: int = option(5, "Most arguments of a generated operator.", fixed=True)
    min_length: int = option(1, "Fewest tokens of a generated expression.", fixed=True)
    max_length: int = option(0, "Most tokens of a generated expression; 0: any.", fixed=True)
    train_length: int = option(
        0, "Leave longer expressions out of training alone; 0: none.", fixed=True
    )
    data: str = option("", "Folder of data sets; else $STRUCTMAX_DATA, or beside the checkout.")
    train_file: str = option(
        "", "Training expressions in the official format, not generated.", fixed=True, data=True
    )
    test_file: str = option(
        "", "Test expressions in the official format, not generated.", fixed=True, data=True
    )


class ListOps(Task):
    """The value of a nested expression such as [MAX 2 [SM 9 4 ] ], along a latent tree."""

    name = "listops"
    config = ListOpsConfig
    metric = "accuracy"

    def data(self, config: ListOpsConfig) -> Splits:
        def generate(count: int, seed: int, exclude: Sequence[Any]) -> list[Any]:
            return listops.generate(
                count,
                seed,
                max_depth=config.max_depth,
                max_args=config.max_args,
                min_length=config.min_length,
                max_length=config.max_length or None,
                exclude=[str(expression) for expression in exclude],
            )

        # the test set is the same for every seed of a run
        if config.test_file:
            test = listops.read(find_data(config.test_file, config.data))
        else:
            test = generate(config.test_examples, 1_000_003, ())
        held = config.valid_examples
        if config.train_file:
            train = listops.read(find_data(config.train_file, config.data))
            if len(train) <= held:
                raise UserError(f"{config.train_file} must have more than {held} lines.")
        else:
            train = generate(config.examples + held, config.seed, test)
        longest = config.train_length or max(len(e.tokens) for e in train)
        used = [e for e in train[held:] if len(e.tokens) <= longest]
        return Splits(used, train[:held], test)

    def model(self, config: ListOpsConfig) -> nn.Module:
        model: Any = TreeClassifier(
            len(listops.VOCABULARY),
            listops.CLASSES,
            config.encoder,
            hidden_size=config.hidden_size,
            cell=config.cell,
            leaf_lstm=config.leaf_lstm,
            tracking=config.tracking,
            dropout=config.dropout,
        )
        model.beam, model.supervised, model.estimator = config.beam, False, None
        if config.encoder in LATENT:
            model.supervised = config.estimator == "supervised"
            if config.estimator not in ("supervised", "likelihood"):
                example = self.collate([listops.parse("[MAX 1 2 ]")])
                structure = model.structure(example.tokens, example.lengths)
                model.estimator = estimator_of(config.estimator, structure)
        return model

    def size(self, example: Any) -> int:
        return len(example.tokens)

    def collate(self, examples: Sequence[Any]) -> Any:
        return collate(examples)

    def loss(self, model: Any, batch: Any) -> Tensor:
        given = batch.trees if model.supervised or model.kind == "gold" else None
        beam = model.beam if model.estimator is None else 1
        losses = model(*batch[:3], trees=given, estimator=model.estimator, beam=beam)
        if model.supervised:
            losses = losses + model.supervise(batch.tokens, batch.lengths, batch.trees)
        return losses

    def replays(self, model: Any) -> int:
        return getattr(model.estimator, "updates", 1) - 1

    def replay(self, model: Any, batch: Any) -> Tensor:
        return model.estimator.replay(model.structure(batch.tokens, batch.lengths))

    def evaluate(self, model: Any, batches: Iterable[Any]) -> dict[str, Ratio | float]:
        sums: dict[str, Ratio] = {}
        for batch in batches:
            logits, trees = self._read(model, batch)
            right = logits.argmax(-1) == batch.labels
            found = {"accuracy": Ratio(float(right.sum()), len(right))}
            if trees is not None:
                found |= tree_f1(trees, batch.trees)
                found["brackets"] = Ratio(*listops.brackets_found(batch.tokens, trees))
            for name, part in found.items():
                total, number = sums.get(name, Ratio(0.0, 0.0))
                sums[name] = Ratio(total + part.total, number + part.number)
        return dict(sums)

    def _read(self, model: Any, batch: Any) -> tuple[Tensor, Any]:
        """Logits, and the trees if there are any."""
        given = batch.trees if model.kind == "gold" else None
        inputs = batch.tokens, batch.lengths
        trees = None if model.kind == "lstm" else model.parse(*inputs, trees=given)
        if model.beam > 1 and model.is_latent:
            return model(*inputs, beam=model.beam), trees
        return model(*inputs, trees=trees), trees

    def read(self, path: Path, config: ListOpsConfig) -> list[Any]:
        return listops.read(path)

    def line(self, example: Any) -> str:
        return str(example)

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        device = next(model.parameters()).device
        for expressions in in_batches(map(listops.parse, lines), lambda e: len(e.tokens)):
            yield from self._answers(model, expressions, device)

    def _answers(
        self, model: Any, expressions: Sequence[Any], device: torch.device
    ) -> Iterator[dict[str, Any]]:
        batch = collate(expressions).to(device)
        logits, trees = self._read(model, batch)
        for item, (expression, value) in enumerate(zip(expressions, logits.argmax(-1).tolist())):
            words = expression.words
            answer = {"words": words, "value": value, "right": value == expression.label}
            if trees is None:
                yield {**answer, "text": str(value)}
                continue
            size = len(words) - 1
            yield {
                **answer,
                "spans": trees.bounds[item, :size].tolist(),
                "gold": batch.trees.bounds[item, :size].tolist(),
                "text": f"{value} = {trees.brackets(item, words)}",
            }
