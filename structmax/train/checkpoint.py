"""Checkpoints: one safetensors file with JSON in its header. No pickle, never half-written."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from structmax.train.errors import UserError


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that its name holds the old content or the new, never a part of either.

    The new content is on the disk before it takes the name; a failure leaves the old alone.
    """
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder. Give the name of a file.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        kept = "; what was there before is unharmed" if path.exists() else ""
        raise UserError(f"cannot write {path}: {error.strerror}{kept}.") from error
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # some file systems do not allow it for folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_remains(folder: Path) -> None:
    """Remove what a killed process was about to write."""
    for path in folder.glob(".*.[0-9]*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def save(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and a JSON state to one file."""
    from safetensors.torch import save as serialize

    # a copy each: safetensors refuses tensors that share memory, such as tied weights
    copies = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    write_atomic(path, serialize(copies, metadata={"state": json.dumps(state)}))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the state of a file that ``save`` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {})["state"])
            if not isinstance(state, dict) or type(state.get("step")) is not int:
                raise ValueError("its state does not say the step")
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}.") from None
    except (SafetensorError, KeyError, ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path} is not a checkpoint of structmax: {error}.") from None


def within(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name starts with a prefix, without it.

    >>> within({"model.a": torch.zeros(1), "other.a": torch.zeros(1)}, "model.")
    {'a': tensor([0.])}
    """
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def load_model(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Give a model its weights; a checkpoint of another model is an error that says where."""
    here = model.state_dict()
    for name in sorted(here.keys() | tensors.keys()):
        if name not in here or name not in tensors:
            where = "the checkpoint" if name in tensors else "the model"
            raise UserError(
                f"{path} is the checkpoint of another model: {name} is only in {where}. "
                "Use the options it was trained with."
            )
        _compare(name, here[name], tensors[name], path)
    model.load_state_dict(tensors)


def _compare(name: str, here: Tensor, there: Tensor, path: Path) -> None:
    """An error if a tensor is not what is expected here."""

    def told(tensor: Tensor) -> str:
        kind = (
            "" if here.dtype == there.dtype else f" of {str(tensor.dtype).removeprefix('torch.')}"
        )
        return f"{tuple(tensor.shape)}{kind}"

    if here.shape != there.shape or here.dtype != there.dtype:
        raise UserError(
            f"{path} is the checkpoint of another model: {name} is {told(there)} there and "
            f"{told(here)} here. Use the options it was trained with."
        )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by number of the parameter and name of the tensor."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{key}": torch.as_tensor(value)
        for number, values in state.items()
        for key, value in values.items()
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], path: Path
) -> None:
    """Back to what ``optimizer_tensors`` gave."""
    state: dict[int, dict[str, Tensor]] = {}
    groups = optimizer.state_dict()["param_groups"]
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    by_number = {str(number): p.detach() for number, p in enumerate(parameters)}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        if number not in by_number:
            raise UserError(f"{path} is the checkpoint of another model: it has {name}.")
        # of AdamW's state, all but the count of steps is as the parameter
        wanted = torch.zeros(()) if key == "step" else by_number[number]
        _compare(f"the optimiser's {name}", wanted, tensor, path)
        state.setdefault(int(number), {})[key] = tensor
    if any(values.keys() != {"step", "exp_avg", "exp_avg_sq"} for values in state.values()):
        raise UserError(f"{path} is damaged: the optimiser's state is not complete.")
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of every random generator that training uses, as JSON."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    state = {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Back to what ``random_state`` gave."""

    def unhex(text: str) -> Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = state["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})  # noqa: NPY002
    torch.set_rng_state(unhex(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(unhex(state["cuda"]), device)
