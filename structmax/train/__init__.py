"""Training: a recipe says what, the trainer does it, on one machine or many.

>>> import tempfile, pathlib
>>> from structmax.train import Trainer, tasks
>>> toy = tasks.by_name("toy")
>>> folder = pathlib.Path(tempfile.mkdtemp())
>>> trainer = Trainer(toy, toy.config(steps=100, batch_size=32), folder, silent=True)
>>> trainer.fit()["test"]["accuracy"] > 0.8
True
"""

from structmax.train.config import TrainConfig, option
from structmax.train.errors import UserError
from structmax.train.metrics import Ratio, tree_f1
from structmax.train.task import Splits, Task
from structmax.train.trainer import Trainer

__all__ = ["Ratio", "Splits", "Task", "TrainConfig", "Trainer", "UserError", "option", "tree_f1"]
