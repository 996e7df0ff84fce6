"""What a recipe says: its data, its model, its loss, its measure. The trainer does the rest."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from structmax.data.folder import DataWarning
from structmax.train.bleu import Bleu
from structmax.train.config import TrainConfig
from structmax.train.distributed import Workers
from structmax.train.errors import UserError
from structmax.train.metrics import Ratio

Measures = Mapping[str, Ratio | Bleu | float]
"""What ``Task.evaluate`` finds, by name."""


class Splits(NamedTuple):
    """Sequences of examples, of any kind. Training looks at ``train`` and ``valid``, never at
    ``test``, which is measured once at the end with the weights that were best on ``valid``.

    >>> Splits(train=["a", "b"], valid=["c"]).test
    ()
    """

    train: Sequence[Any]
    valid: Sequence[Any]
    test: Sequence[Any] = ()


def warn_of_one_class(labels: Iterable[Any]) -> None:
    """Warn if the training examples have one class only, which leaves nothing to learn."""
    found = set(labels)
    if len(found) == 1:
        told = f"all training examples have one class, {found.pop()!r}: there is nothing to learn."
        warnings.warn(told, DataWarning, stacklevel=2)


class Task:
    """A recipe: one subclass in one file of ``structmax/train/tasks``.

    An *example* is whatever ``data`` holds, a *batch* whatever ``collate`` makes of some of them:
    tensors in any nesting of dicts, tuples and lists, which the trainer moves to the device.
    Everything random comes from torch, numpy or ``random`` as the trainer seeded them.

    >>> from structmax.train import tasks
    >>> toy = tasks.by_name("toy")
    >>> isinstance(toy, Task), toy.name, toy.metric
    (True, 'toy', 'accuracy')
    >>> splits = toy.data(toy.config())
    >>> toy.loss(toy.model(toy.config()), toy.collate(splits.train[:8])).shape
    torch.Size([8])
    """

    name: ClassVar[str]
    """As in ``structmax train NAME``."""

    config: ClassVar[type[TrainConfig]] = TrainConfig
    """The dataclass of its options: ``TrainConfig``, or one that inherits it."""

    metric: str
    """The entry of ``evaluate`` that chooses the best weights, the larger the better."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        """What ``model`` and ``predict`` need of the data, such as a vocabulary: JSON. ``data``
        fills it; the run folder keeps it, so that a model is used without the data."""
        self.notes: list[str] = []
        """What ``data`` found that a user should know, a line each; training prints them first."""

    # -- what a recipe says -----------------------------------------------------------------------

    def data(self, config: Any) -> Splits:
        """The examples. A ValueError or an OSError here is reported as a fault of the input."""
        raise NotImplementedError

    def model(self, config: Any) -> nn.Module:
        """The model, on the CPU, freshly initialised; called after ``data``."""
        raise NotImplementedError

    def collate(self, examples: Sequence[Any]) -> Any:
        """A batch of some examples."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """One loss per example (or per token), 1-d; the trainer takes the mean over all workers."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> Measures:
        """Measures over some batches, in evaluation mode and without gradients.

        A ``Ratio`` or ``Bleu`` is summed over the workers; a plain number is averaged, weighted by
        examples.
        The first two are shown as training goes on.
        """
        raise NotImplementedError

    def predict(self, model: nn.Module, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        """For every line of input one JSON object in order, with ``text``, its form for people.

        Where there is a tree, ``structmax show`` draws ``words`` and ``spans``, the first and last
        word of each inner node, and marks what is not in ``gold``, if that is there.
        A ValueError here is reported as a fault of the line that is due.
        """
        raise NotImplementedError

    # -- what has a default -----------------------------------------------------------------------

    def fit(self, config: Any, folder: Path, resume: bool, workers: Workers) -> dict[str, Any]:
        """The whole run, and its result. A recipe without updates does here what it does."""
        from structmax.train.trainer import Trainer

        return Trainer(self, config, folder, resume, workers).fit()

    def size(self, example: Any) -> int:
        """The length of an example: those of similar length are put into one batch."""
        return 1

    def read(self, path: Path, config: Any) -> Sequence[Any]:
        """The examples of a file in the format of the corpus, for ``structmax evaluate --file``.

        Vocabularies and names of classes are those of ``facts``; the training data are not needed.
        """
        raise UserError(f"task {self.name} reads no files. Leave out --file.")

    def line(self, example: Any) -> str:
        """An example as a line of input, for ``structmax show``."""
        raise NotImplementedError

    def details(self, model: nn.Module, answer: dict[str, Any]) -> dict[str, Any]:
        """Further entries of an answer of ``predict``, for JSON and pictures; they may take long.

        By default there are none.
        """
        return {}

    def groups(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        """The parameters by optimiser: ``parser`` chooses structures, ``composer`` is the rest.

        By default the parser is what the model's ``parser_parameters()`` lists, if it has that.
        """
        listed = getattr(model, "parser_parameters", list)
        parser = list(listed())
        known = {id(p) for p in parser}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
        groups = {"parser": parser, "composer": rest}
        return {name: group for name, group in groups.items() if group}

    def has_unused(self, model: nn.Module) -> bool:
        """Whether some parameters get no gradient from some batches, such as those of a parser from
        sentences of one word. Many workers look for them then, which takes time in each update."""
        return True

    def replays(self, model: nn.Module) -> int:
        """How many further updates of the parser each batch serves, as with PPO."""
        return 0

    def replay(self, model: nn.Module, batch: Any) -> Tensor:
        """The parser's loss of a further update, on the structures that the last ``loss`` drew."""
        raise NotImplementedError
