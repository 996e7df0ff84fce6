"""A run folder: what a run is (options, task, facts), its checkpoints, its numbers.

::

    config.toml         the options
    task.json           the name of the task and the facts about its data
    last.safetensors    everything needed to go on
    best.safetensors    the weights that were best on the validation split
    metrics.jsonl       a line for every report
    result.json         the best weights' measures, at the end
    .lock               held by the process that trains here
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import nn

from structmax.train import checkpoint, tasks
from structmax.train.config import TrainConfig, from_dict, read_toml, to_toml
from structmax.train.distributed import Workers
from structmax.train.errors import UserError, as_user_error
from structmax.train.metrics import to_json
from structmax.train.task import Splits, Task

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None  # type: ignore[assignment]

FILES = (
    *("last.safetensors", "best.safetensors", "metrics.jsonl", "result.json"),
    *("table.md", "support.html", "config.toml", "task.json"),
)
"""In the order in which they go: a folder is a run's as long as there is a ``task.json``."""


def exists(folder: Path) -> bool:
    """Whether the folder holds a run, finished or not."""
    with as_user_error():  # a name may be too long
        return (folder / "task.json").exists()


def refuse_other_files(folder: Path) -> None:
    """In a folder that holds no run, and where none began, files with the names of a run's are
    someone's own."""
    with as_user_error():
        found = [name for name in FILES if (folder / name).exists()]
        began = (folder / ".lock").exists()
    if found and not began:
        raise UserError(
            f"{folder} holds no run, and a run there would replace {', '.join(found)}. Choose "
            "another folder with --out, or lose them with --fresh."
        )


def claim(folder: Path) -> IO[str] | None:
    """Keep other processes from training in a folder, until the file is closed or this process
    ends; None if another one does. What else happens in this process is its own affair: its second
    claim is granted too, and ends the first when it is closed."""
    with as_user_error():
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    if fcntl is not None:
        try:
            # not flock, which a process that was forked would hold on to after this one's death
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            return None
        except OSError:  # a file system without locks
            pass
    return file


@contextmanager
def hold(
    task: Task, config: TrainConfig, folder: Path, resume: bool, state: str, workers: Workers
) -> Iterator[bool]:
    """Lock a folder for a run, and create the run there. While entered, the folder is this run's.

    Yields whether there was a run to resume: its file ``state`` exists, and it began with the same
    data. Otherwise a run that was there is lost.
    """
    lock = claim(folder) if workers.first else None
    try:
        if not workers.gather(lock is not None)[0]:
            raise UserError(
                f"another process is training in {folder}. Wait for its end, or choose another "
                "folder with --out."
            )
        found = workers.gather(resume and (folder / state).exists())
        if any(found) and not all(found):
            raise UserError(
                f"worker {found.index(False)} does not see {folder / state}: the run must be in a "
                "folder that all machines share."
            )
        if found[0]:
            refuse_other_data(folder, config)
            refuse_other_facts(folder, read(folder)[0].facts, task.facts)
        elif workers.first:
            create(folder, task, config)
        if workers.first:
            checkpoint.remove_remains(folder)
        yield found[0]
    finally:
        if lock is not None:
            lock.close()


def create(folder: Path, task: Task, config: TrainConfig) -> None:
    """Make the folder and write what the run is; a run that was there is gone."""
    with as_user_error():
        folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / name for name in FILES):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot remove {path}: {error.strerror}. Remove it, or choose another folder with "
                "--out."
            ) from error
    write_options(folder, config)
    write_facts(folder, task)


def write_facts(folder: Path, task: Task) -> None:
    """Write ``task.json``."""
    facts = json.dumps({"task": task.name, "facts": task.facts}, indent=1, ensure_ascii=False)
    checkpoint.write_atomic(folder / "task.json", facts.encode())


def write_options(folder: Path, config: TrainConfig) -> None:
    """Write ``config.toml``."""
    checkpoint.write_atomic(folder / "config.toml", to_toml(config).encode())


def write_result(folder: Path, result: dict[str, Any], table: str = "") -> None:
    """Write ``result.json``, the last file of a run, and before it a table as ``table.md``."""
    if table:
        checkpoint.write_atomic(folder / "table.md", table.encode())
    checkpoint.write_atomic(folder / "result.json", f"{to_json(result, indent=1)}\n".encode())


def read_result(folder: Path) -> dict[str, Any]:
    """What ``write_result`` wrote."""
    path = folder / "result.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError("it must hold an object")
    except (OSError, ValueError, RecursionError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}. Start again with --fresh.") from error
    return found


def refuse_other_data(folder: Path, config: TrainConfig) -> None:
    """A run is resumed with the data that it began with, and their order."""
    began = read_toml(folder / "config.toml")
    for f in fields(config):
        now = getattr(config, f.name)
        if f.metadata.get("fixed") and began.get(f.name, now) != now:
            raise UserError(
                f"{folder} began with {f.name} = {began[f.name]!r} and cannot go on with {now!r}. "
                f"Leave out --{f.name.replace('_', '-')}, or start again with --fresh."
            )


def refuse_other_facts(folder: Path, began: dict[str, Any], now: dict[str, Any]) -> None:
    """A model knows the words and tags of the data that it was made for, by their numbers."""
    now = json.loads(json.dumps(now))
    differ = [name for name in began if name in now and began[name] != now[name]]
    if differ:
        raise UserError(
            f"{folder}: the data have changed since the run began: {', '.join(differ)} of them "
            "differ from those in its task.json. Bring the data back, or start again with --fresh."
        )


def data(folder: Path, task: Task, config: TrainConfig) -> Splits:
    """The data of a run that was read, if they still are those that its model was made for."""
    began = task.facts
    task.facts = dict(began)
    with as_user_error():
        splits = task.data(config)
    refuse_other_facts(folder, began, task.facts)
    return splits


def read(folder: Path, **changes: Any) -> tuple[Task, TrainConfig]:
    """The task of a run and its options, some of them changed."""
    if not exists(folder):
        raise UserError(f"{folder} is not a run: there is no {folder / 'task.json'}.")
    path = folder / "task.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        name, facts = said["task"], said["facts"]
        if not isinstance(name, str) or not isinstance(facts, dict):
            raise TypeError("the name of the task must be text, and the facts an object")
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}.") from error
    task = tasks.by_name(name)
    task.facts = facts
    options = {**read_toml(folder / "config.toml"), **changes}
    return task, from_dict(task.config, options, source=str(folder / "config.toml"))


class Trained(NamedTuple):
    """A run's task, options and best weights, ready to use."""

    task: Task
    config: TrainConfig
    model: nn.Module
    step: int


def load(folder: Path, device: torch.device, **changes: Any) -> Trained:
    """The best weights of a run, in evaluation mode."""
    task, config = read(folder, **changes)
    path = folder / "best.safetensors"
    if not path.exists():
        if type(task).model is Task.model:
            told = folder / "result.json"
            raise UserError(f"task {task.name} has no weights of its own; its result is {told}.")
        raise UserError(f"{folder} has no weights yet: there is no {path}.")
    tensors, state = checkpoint.load(path)
    try:
        with as_user_error():
            model = task.model(config)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        place = folder / "task.json"
        raise UserError(f"{place} is damaged: its facts make no model ({error!r}).") from error
    checkpoint.load_model(model, checkpoint.within(tensors, "model."), path)
    return Trained(task, config, model.to(device).eval(), state["step"])
