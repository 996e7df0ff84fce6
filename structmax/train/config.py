"""A run's configuration: a dataclass, a TOML file and a set of command-line flags, all the same.

>>> import tempfile, pathlib
>>> path = pathlib.Path(tempfile.mkdtemp()) / "config.toml"
>>> _ = path.write_text(to_toml(TrainConfig(lr=0.01)))
>>> from_dict(TrainConfig, read_toml(path)).lr
0.01
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from structmax.train.errors import UserError, near


def option(
    default: Any,
    help: str,
    fixed: bool = False,
    least: float | None = None,
    data: bool = False,
    cpu: Any = None,
) -> Any:
    """A field of a configuration, with the help text of its flag.

    ``fixed``: what the data are, and the facts about them, which a run keeps when it is resumed.
    ``least``: of a number; by default 1 of what ends in _size or _every, and else 0.
    ``data``: the name of something in the folder that the option ``data`` says.
    ``cpu``: the default of the command line for a run on a CPU, where another one takes hours.

    >>> @dataclass
    ... class Config(TrainConfig):
    ...     depth: int = option(3, "How deep.")
    >>> Config().depth, dataclasses.fields(Config)[-1].metadata["help"]
    (3, 'How deep.')
    """
    if cpu is not None:
        help = f"{help} On a CPU: {cpu}."
    said = {"help": help, "fixed": fixed, "least": least, "data": data, "cpu": cpu}
    return field(default=default, metadata=said)


Schedule = Literal["constant", "cosine", "linear", "late", "plateau"]
SCHEDULE = (
    "How the learning rate falls over the run; late: linearly in the last 40%; plateau: to a "
    "quarter after each --patience evaluations without a better result, three times."
)


@dataclass
class TrainConfig:
    """What every run has; a task's own configuration inherits it and adds what is its own.

    >>> TrainConfig(steps=10).steps
    10
    """

    seed: int = option(
        0, "Seed of the data order, the initial weights and the samples.", fixed=True
    )
    device: str = option("auto", "cpu, cuda, or auto: cuda where there is one.")
    amp: bool = option(False, "Compute in bfloat16 where autocast allows it.")
    steps: int = option(1000, "Train for this many updates; 0: no limit.")
    minutes: float = option(0.0, "Train for this many minutes, resumed time included; 0: no limit.")
    batch_size: int = option(64, "Examples per update and worker.")
    batch_tokens: int = option(0, "At most this many tokens, padding included; 0: no limit.")
    lr: float = option(1e-3, "Learning rate of the composer, or of everything without a parser.")
    parser_lr: float | None = option(None, "Learning rate of the parser; the same if not given.")
    schedule: Schedule = option("constant", SCHEDULE)
    warmup: int = option(0, "Updates over which the learning rate rises from 0.")
    weight_decay: float = option(0.01, "AdamW's weight decay.")
    beta2: float = option(0.98, "AdamW's memory of squared gradients.")
    clip: float = option(1.0, "Largest norm of the gradient of parser and of composer; 0: any.")
    log_every: int = option(10, "Updates between lines of metrics.")
    grad_variance: bool = option(
        False,
        "Also report the variance of the gradients; it takes the memory of the weights again.",
    )
    eval_every: int = option(200, "Updates between evaluations on the validation split.")
    save_every: int = option(200, "Updates between checkpoints.")
    patience: int = option(
        0,
        "Stop after this many evaluations without a better result; 0: never. On the schedule "
        "plateau, at the lowest rate.",
    )

    def check_data(self) -> None:
        """Refuse a ``data`` in which nothing is looked for."""
        found = [f.name for f in dataclasses.fields(self) if f.metadata.get("data")]
        if getattr(self, "data", None) and found and not any(getattr(self, n) for n in found):
            flags = " or ".join(f"--{name.replace('_', '-')}" for name in found)
            raise UserError(f"--data has no effect without {flags}. Add one, or leave it out.")

    def check(self) -> None:
        """Raise a UserError for values that make no sense; a task adds its own."""
        if not (self.steps or self.minutes or self.patience):
            raise UserError("a run must end: give --steps, --minutes or --patience.")
        if self.schedule == "plateau" and not self.patience:
            raise UserError(
                "the schedule plateau needs --patience: how many evaluations are a plateau."
            )
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            most = 2**63 if f.name == "seed" else 2**31
            below_one = f.name == "beta2" or f.name.endswith("dropout")
            least = f.metadata.get("least")
            if least is None:
                least = 1 if f.name.endswith(("_size", "_every")) else 0
            if value < least:
                wanted = f"be at least {least}" if least else "not be negative"
                raise UserError(f"{f.name} must {wanted}, got {value}.")
            if not value < (1 if below_one else most):  # NaN too
                bound = 1 if below_one else f"2^{most.bit_length() - 1}"
                raise UserError(f"{f.name} must be a number below {bound}, got {value}.")


C = TypeVar("C", bound=TrainConfig)


def cpu_defaults(cls: type[TrainConfig]) -> dict[str, Any]:
    """The options of a configuration that have another default on a CPU."""
    said = {f.name: f.metadata.get("cpu") for f in dataclasses.fields(cls)}
    return {name: value for name, value in said.items() if value is not None}


def types_of(cls: type[TrainConfig]) -> dict[str, Any]:
    """The type of every field by name, resolved."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def from_dict(cls: type[C], values: dict[str, Any], source: str = "the configuration") -> C:
    """A configuration from names and values; unknown names and wrong types are errors.

    >>> from_dict(TrainConfig, {"step": 5})
    Traceback (most recent call last):
    structmax.train.errors.UserError: the configuration has no option 'step'. Did you mean 'steps'?
    """
    known = types_of(cls)
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{source} has no option {name!r}. {near(name, known)}")
        values = {**values, name: _converted(name, value, known[name], source)}
    config = cls(**values)
    config.check()
    return config


def _converted(name: str, value: Any, wanted: Any, source: str) -> Any:
    choices = typing.get_args(wanted)
    if typing.get_origin(wanted) is Literal:
        if value not in choices:
            found = near(str(value), map(str, choices))
            raise UserError(f"{source}: {name} cannot be {value!r}. {found}")
        return value
    if isinstance(wanted, types.UnionType):
        if value is None:
            return None
        wanted = next(t for t in choices if t is not type(None))
    if wanted is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not wanted:
        raise UserError(
            f"{source}: {name} must be of type {wanted.__name__}, got {value!r} "
            f"of type {type(value).__name__}."
        )
    if isinstance(value, str) and any("\ud800" <= char < "\ue000" for char in value):
        raise UserError(f"{source}: {name} must be UTF-8, got {value!r}.")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The names and values of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}.") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {error}.") from None


def to_toml(config: TrainConfig) -> str:
    """The configuration as TOML, each option under its help text; what is None is left out.

    >>> print(to_toml(TrainConfig()).splitlines()[:2])
    ['# Seed of the data order, the initial weights and the samples.', 'seed = 0']
    """
    lines = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value is not None:
            # TOML writes numbers, true and false, and strings as JSON does, but for one character
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            lines += [f"# {f.metadata.get('help', '')}", f"{f.name} = {text}"]
    return "\n".join(lines) + "\n"
