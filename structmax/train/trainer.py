"""The training loop: plain PyTorch, one batch after another, resumed exactly where it was left."""

from __future__ import annotations

import math
import operator
import random
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from structmax.train import batches, checkpoint, run
from structmax.train.config import TrainConfig
from structmax.train.distributed import Workers
from structmax.train.errors import UserError, as_user_error, is_out_of_memory
from structmax.train.measure import measure
from structmax.train.metrics import GradientVariance, Log, last_look
from structmax.train.progress import Progress
from structmax.train.signals import Signals, Stopped
from structmax.train.task import Splits, Task

NUMBERS = (
    *("step", "epoch", "position", "seconds"),
    *("measured", "best", "worse", "cuts", "total", "count"),
)
"""What a checkpoint keeps of a trainer besides tensors and random states."""


class Diverged(UserError):
    """The loss is not finite; the batch that caused it is saved."""


class Update(NamedTuple):
    """One update whose numbers were perhaps not looked at yet."""

    step: int
    sums: Tensor  # sum of losses, their count, seconds, signals; over all workers
    batch: Any
    examples: Any


CUTS = 3
"""How often the learning rate falls to a quarter on the schedule ``plateau``."""


def learning_rate(config: TrainConfig, step: int, fraction: float, cuts: int = 0) -> float:
    """The factor of the learning rate at an update, a fraction of the run and some cuts done.

    >>> cosine = TrainConfig(schedule="cosine", warmup=10)
    >>> [round(learning_rate(cosine, step, step / 100), 2) for step in (0, 9, 50, 100)]
    [0.1, 0.98, 0.5, 0.0]
    """
    falls = {
        "constant": 1.0,
        "cosine": 0.5 * (1 + math.cos(math.pi * min(fraction, 1.0))),
        "linear": 1 - min(fraction, 1.0),
        "late": min(1.0, (1 - min(fraction, 1.0)) / 0.4),
        "plateau": 0.25**cuts,
    }
    rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    return rise * falls[config.schedule]


class LossOf(nn.Module):
    """The task's losses as the forward of a module: what distributed training wraps."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Any, replay: bool = False) -> Tensor:
        return (self.task.replay if replay else self.task.loss)(self.model, batch)


class Trainer:
    """One run: made, resumed if asked to, and then ``fit``.

    Args:
        task, config: what to train, and how
        folder: where the run is kept; without ``resume``, a run that is there is lost
        resume: go on from the folder's last checkpoint, if it has one
        workers: this process among all

    >>> import tempfile
    >>> from structmax.train import tasks
    >>> toy, folder = tasks.by_name("toy"), Path(tempfile.mkdtemp())
    >>> trainer = Trainer(toy, toy.config(steps=2), folder, silent=True)
    >>> sorted(trainer.fit()["test"]), trainer.step
    (['accuracy'], 2)
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        folder: Path,
        resume: bool = False,
        workers: Workers | None = None,
        silent: bool = False,
    ) -> None:
        self.task, self.config, self.folder = task, config, folder
        config.check()
        self.workers = workers = workers or Workers(torch.device("cpu"))
        self.progress = Progress(task.name, silent or not workers.first)
        self.progress.say(f"{task.name}: preparing the data")
        self._seed(0)
        with as_user_error():
            self.data: Splits = task.data(config)
            if not len(self.data.train) or not len(self.data.valid):
                raise ValueError(f"task {task.name}: the train or the valid split is empty.")
            self.model = task.model(config).to(workers.device)
        self.losses = workers.wrap(LossOf(task, self.model), task.has_unused(self.model))
        self.groups = task.groups(self.model)
        self.optimizers = {name: self._optimizer(name) for name in self.groups}
        self.variance = {
            name: GradientVariance(group, norm_only=not config.grad_variance)
            for name, group in self.groups.items()
        }
        self.step = self.epoch = self.position = 0
        self.measured = 0  # the step of the last look at the validation split
        self.seconds, self.best, self.worse, self.cuts = 0.0, -math.inf, 0, 0
        self.total, self.count = 0.0, 0.0  # of the losses since the last line of metrics
        self.signals, self.stopping = Signals(), False
        self.held = ExitStack()  # the folder
        self.pending: deque[Update] = deque()
        if workers.rank:
            self._seed(workers.rank)
        try:
            self._start(resume)
        except BaseException:
            self.held.close()
            raise

    def _seed(self, worker: int) -> None:
        seed = self.config.seed + 1_000_003 * worker
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.groups[name],
            lr=self._rate(name),
            betas=(0.9, self.config.beta2),
            weight_decay=self.config.weight_decay,
            fused=self.workers.device.type == "cuda",
        )

    def _rate(self, name: str) -> float:
        other = self.config.parser_lr if name == "parser" else None
        return self.config.lr if other is None else other

    def _saved(self) -> Path:
        return self.folder / "last.safetensors"

    def _start(self, resume: bool) -> None:
        last = self._saved()
        found = self.held.enter_context(
            run.hold(self.task, self.config, self.folder, resume, last.name, self.workers)
        )
        if found:
            self._resume(last)
        if self.workers.first:
            if found and not self._done():  # else no update follows
                run.write_options(self.folder, self.config)
            self.log = Log(self.folder, self.step, self.measured)
        for note in [*self.task.notes, *self._plan()]:
            self.progress.say(f"{self.task.name}: {note}")

    def _plan(self) -> list[str]:
        """What the run will do, in lines of a terminal."""
        config, workers = self.config, self.workers
        train, valid, test = map(len, self.data)
        parameters = sum(p.numel() for p in self.model.parameters())
        many = f" of {workers.count} workers" if workers.count > 1 else ""
        ends = [
            f"{config.steps} updates" * bool(config.steps),
            f"{config.minutes:g} minutes" * bool(config.minutes),
            f"{config.patience} evaluations without a better result" * bool(config.patience),
        ]
        extent = " or ".join(filter(None, ends))
        return [
            f"examples: {train} to train on, {valid} to validate, {test} to test",
            f"{parameters:,} parameters on {workers.device}{many}, for {extent}",
        ]

    # -- the loop ---------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Train to the end, then measure the best weights; the result is also in the folder."""
        with self.held:
            self._train()
            return self._result()

    def _train(self) -> None:
        self.began = time.monotonic() - self.seconds
        try:
            with self.signals:
                self._loop()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.pending.clear()
            kept = "; --resume continues from the last checkpoint" if self._saved().exists() else ""
            raise UserError(
                f"out of memory at update {self.step + 1}. Try a smaller --batch-size, or "
                f"--batch-tokens{kept}."
            ) from error
        finally:
            self.progress.close()
            if self.workers.first:
                self.log.close()

    def _loop(self) -> None:
        due = self.step % self.config.eval_every == 0 or self._done()
        if due and self.step > self.measured:  # a signal came before this look
            self._measure()
            self._save()
        done = self._done()
        rank, count = self.workers.rank, self.workers.count
        sizes = [self.task.size(example) for example in self.data.train]
        epoch = batches.batches_of(sizes, self.config, count)
        if not epoch(0):
            raise UserError(f"there are fewer training examples ({len(sizes)}) than workers.")
        while not done:
            for examples in epoch(self.epoch)[self.position :]:
                self._update(examples[rank::count])
                self.position += 1
                done = self._report()
                if done:
                    break
            else:
                self.epoch, self.position = self.epoch + 1, 0

    def _update(self, examples: Any) -> None:
        batch = self._batch([self.data.train[i] for i in examples])
        self.losses.train()
        loss, count = self._backward(batch, replay=False)
        for name, variance in self.variance.items():
            variance.add()
            self._descend(name)
        for _ in range(self.task.replays(self.model)):
            self._backward(batch, replay=True)
            self._descend("parser")
        self.step += 1
        seconds = time.monotonic() - self.began
        sums = torch.stack(
            [loss, count, *loss.new_tensor([seconds, float(bool(self.signals.noted))])]
        )
        self.pending.append(Update(self.step, self.workers.sum(sums), batch, examples))

    def _batch(self, examples: Sequence[Any]) -> Any:
        return batches.move(self.task.collate(examples), self.workers.device)

    def _backward(self, batch: Any, replay: bool) -> tuple[Tensor, Tensor]:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.workers.device.type, torch.bfloat16, enabled=self.config.amp):
            losses = self.losses(batch, replay=replay)
        if losses.dim() != 1:
            raise TypeError(f"{self.task.name}.loss must be 1-d, got {tuple(losses.shape)}.")
        losses = losses.float()
        count = losses.new_tensor(float(len(losses)))
        # gradients are averaged over the workers, whose batches may differ in size
        everyone = self.workers.sum(count.clone())
        (losses.sum() * (self.workers.count / everyone)).backward()
        return losses.detach().double().sum(), count.double()

    def _descend(self, name: str) -> None:
        optimizer = self.optimizers[name]
        factor = learning_rate(self.config, self.step, self.fraction, self.cuts)
        for group in optimizer.param_groups:
            group["lr"] = self._rate(name) * factor
        if self.config.clip:
            nn.utils.clip_grad_norm_(self.groups[name], self.config.clip)
        optimizer.step()

    @property
    def fraction(self) -> float:
        """How much of the run is done, by updates or by time."""
        by_steps = self.step / self.config.steps if self.config.steps else 0.0
        by_time = self.seconds / (60 * self.config.minutes) if self.config.minutes else 0.0
        return max(by_steps, by_time)

    def _done(self) -> bool:
        tired = 0 < self.config.patience <= self.worse
        if self.config.schedule == "plateau":
            tired = tired and self.cuts == CUTS
        return self.fraction >= 1 or tired or self.stopping

    # -- after an update --------------------------------------------------------------------------

    def _report(self) -> bool:
        """Look at the numbers, log, measure, save; whether the run is done."""
        config, step = self.config, self.step
        due = [
            step % every == 0 for every in (config.log_every, config.eval_every, config.save_every)
        ]
        # a GPU is let run one update ahead of the host
        ahead = 0 if any(due) or self.workers.device.type == "cpu" else 1
        while len(self.pending) > ahead:
            self._look(self.pending.popleft())
        done = self._done()
        if done:
            while self.pending:
                self._look(self.pending.popleft())
        if due[0]:
            self._log()
        else:
            self.progress.update(step, self.fraction)
        if (due[1] or done) and not self.stopping:
            self._measure()
            done = done or self._done()
        if due[2] or done:
            self._save()
        if self.stopping:
            raise Stopped(self.signals.noted or signal.SIGTERM, step)
        return done

    def _look(self, update: Update) -> None:
        total, count, seconds, stopping = update.sums.tolist()
        if not math.isfinite(total):
            self._diverged(update)
        self.total, self.count = self.total + total, self.count + count
        # all workers see the same time and the same signals, so they end together
        self.seconds, self.stopping = seconds / self.workers.count, stopping > 0

    def _diverged(self, update: Update) -> None:
        path = self.folder / f"bad_batch.{self.workers.rank}.safetensors"
        state = {"step": update.step, "examples": [int(i) for i in update.examples]}
        checkpoint.save(path, batches.tensors(update.batch), state)
        saved = self._saved().exists()
        kept = "the last checkpoint is from before" if saved else "there is no checkpoint yet"
        raise Diverged(
            f"the loss of update {update.step} is not finite. The batch is in {path}; {kept}. Try "
            "a smaller --lr or --clip."
        )

    def _log(self) -> None:
        values = {"loss": self.total / self.count if self.count else math.nan}
        self.total = self.count = 0.0
        for name, variance in self.variance.items():
            values.update({f"{key}/{name}": value for key, value in variance.read().items()})
        factor = learning_rate(self.config, self.step - 1, self.fraction, self.cuts)
        values["lr"] = self.config.lr * factor
        values["epoch"] = self.epoch
        if self.workers.first:
            self.log.write(self.step, "train", {**values, "seconds": round(self.seconds, 3)})
        best = f"  best {self.task.metric} {self.best:.4f}" if self.best > -math.inf else ""
        self.progress.update(self.step, self.fraction, f"loss {values['loss']:.4f}{best}")

    # -- measuring --------------------------------------------------------------------------------

    def _measured(self, examples: Sequence[Any]) -> dict[str, float]:
        return measure(self.task, self.model, examples, self.config, self.workers)

    def _measure(self) -> None:
        values = self._measured(self.data.valid)
        if self.task.metric not in values:
            raise KeyError(f"{self.task.name}.evaluate must give its metric {self.task.metric!r}.")
        better = values[self.task.metric] > self.best
        # a model that is trained on something else first has no reason to get better at this
        first = self.step <= getattr(self.model, "pretrain", 0)
        self.worse = 0 if better or first else self.worse + 1
        tired = self.config.schedule == "plateau" and self.worse >= self.config.patience
        if tired and self.cuts < CUTS:  # else the run is done
            self.cuts, self.worse = self.cuts + 1, 0
        self.measured = self.step
        if better:
            self.best = values[self.task.metric]
        if self.workers.first:
            self.log.write(self.step, "valid", values)
            if better or not (self.folder / "best.safetensors").exists():
                weights = {f"model.{n}": t for n, t in self.model.state_dict().items()}
                checkpoint.save(
                    self.folder / "best.safetensors", weights, {"step": self.step, **values}
                )
        text = "  ".join(f"{name} {value:.4f}" for name, value in [*values.items()][:2])
        self.progress.say(f"{self.task.name}: step {self.step}  valid  {text}")

    def _result(self) -> dict[str, Any]:
        self.workers.gather(None)  # the best weights are written
        path = self.folder / "best.safetensors"
        tensors, state = checkpoint.load(path)
        checkpoint.load_model(self.model, checkpoint.within(tensors, "model."), path)
        result = {
            "task": self.task.name,
            "best_step": state["step"],
            "steps": self.step,
            "minutes": round(self.seconds / 60, 3),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "valid": {name: value for name, value in state.items() if name != "step"},
        }
        if len(self.data.test):
            result["test"] = self._measured(self.data.test)
        if self.workers.first:
            run.write_result(self.folder, result)
        return result

    # -- checkpoints ------------------------------------------------------------------------------

    def _save(self) -> None:
        randoms = self.workers.gather(checkpoint.random_state(self.workers.device))
        if not self.workers.first:
            return
        tensors = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        seen = {}
        for name, optimizer in self.optimizers.items():
            saved = checkpoint.optimizer_tensors(optimizer)
            sums, seen[name] = self.variance[name].state()
            tensors.update({f"optimizer.{name}.{n}": t for n, t in saved.items()})
            tensors.update({f"variance.{name}.{n}": t for n, t in sums.items()})
        state = {name: getattr(self, name) for name in NUMBERS}
        state |= {"task": self.task.name, "seen": seen, "random": randoms}
        checkpoint.save(self._saved(), tensors, state)

    def _resume(self, path: Path) -> None:
        tensors, state = checkpoint.load(path)
        if state.get("task") != self.task.name:
            raise UserError(f"{path} is a checkpoint of task {state.get('task')!r}.")
        checkpoint.load_model(self.model, checkpoint.within(tensors, "model."), path)
        for name, optimizer in self.optimizers.items():
            saved = checkpoint.within(tensors, f"optimizer.{name}.")
            checkpoint.load_optimizer(optimizer, saved, path)
        try:
            for name, variance in self.variance.items():
                sums = checkpoint.within(tensors, f"variance.{name}.")
                variance.restore(sums, operator.index(state["seen"][name]))
            if "measured" not in state:  # a checkpoint of an older version
                state["measured"] = last_look(self.folder, state["step"])
            state.setdefault("cuts", 0)
            for name in NUMBERS:
                wanted = type(getattr(self, name))
                if type(state[name]) not in (wanted, int) or (wanted is int and state[name] < 0):
                    raise ValueError(f"{name} is {state[name]!r}")
                setattr(self, name, wanted(state[name]))
            if self.workers.rank < len(state["random"]):
                mine = state["random"][self.workers.rank]
                checkpoint.restore_random_state(mine, self.workers.device)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise UserError(f"{path} is damaged: {error}. Start again with --fresh.") from error
