"""The trainer: exact resume, many workers, early stopping, checkpoints, and what goes wrong."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

from structmax.train import Trainer, UserError, checkpoint, distributed, run, tasks
from structmax.train.batches import move, tensors
from structmax.train.bleu import Bleu
from structmax.train.config import TrainConfig, from_dict, read_toml, to_toml
from structmax.train.distributed import Workers, choose_device
from structmax.train.errors import as_user_error
from structmax.train.measure import together
from structmax.train.metrics import GradientVariance, Log, read_log
from structmax.train.progress import Progress
from structmax.train.signals import Signals, Stopped
from structmax.train.tasks.toy import Toy, ToyConfig

ROOT = Path(__file__).parent.parent
CPU = Workers(torch.device("cpu"))


def config(**changes) -> ToyConfig:
    small = {"steps": 12, "batch_size": 16, "log_every": 1, "eval_every": 5, "save_every": 4}
    return ToyConfig(**{**small, "examples": 64, **changes})


def fit(folder: Path, resume: bool = False, task: Toy | None = None, **changes) -> dict:
    return Trainer(task or Toy(), config(**changes), folder, resume, silent=True).fit()


def curve(folder: Path) -> list[dict]:
    """The lines of metrics without the time they took."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(folder)]


# -- resuming ------------------------------------------------------------------------------------

KILL = """
import os, signal, sys
from pathlib import Path
from structmax.train import Trainer, checkpoint
sys.path.insert(0, "tests")
from test_train import config, Toy
folder, last, while_saving = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "saving"

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

class Doomed(Trainer):
    def _update(self, examples):
        if self.step == last:
            if not while_saving:
                die()
            os.replace = die
        super()._update(examples)

Doomed(Toy(), config(), folder, silent=True).fit()
"""


def killed(folder: Path, step: int, moment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILL, str(folder), str(step), moment], cwd=ROOT, timeout=120
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["training", "saving"])
def test_killed_and_resumed_is_the_same_run(tmp_path: Path, moment: str) -> None:
    """kill -9 at any step, even while a checkpoint is written; then bit for bit the same curve."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = fit(whole)
    killed(broken, random.SystemRandom().randrange(1, 11), moment)
    remains = list(broken.glob(".*.tmp"))
    assert bool(remains) == (moment == "saving")
    again = fit(broken, resume=True)
    assert curve(broken) == curve(whole)
    assert {**again, "minutes": 0} == {**result, "minutes": 0}
    assert not list(broken.glob(".*.tmp"))
    for name in ("last", "best"):
        mine, _ = checkpoint.load(whole / f"{name}.safetensors")
        theirs, _ = checkpoint.load(broken / f"{name}.safetensors")
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(0, 12))
def test_killed_at_every_step(tmp_path: Path, step: int) -> None:
    fit(tmp_path / "whole")
    killed(tmp_path / "broken", step, "training")
    fit(tmp_path / "broken", resume=True)
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")


def test_a_finished_run_resumes_to_its_result_and_beyond(tmp_path: Path) -> None:
    first = fit(tmp_path)
    assert fit(tmp_path, resume=True) == first
    assert fit(tmp_path, resume=True, steps=20)["steps"] == 20
    assert [line["step"] for line in curve(tmp_path) if line["kind"] == "train"] == [*range(1, 21)]


def test_a_run_keeps_its_data(tmp_path: Path) -> None:
    """What is resumed has the seed and the data it began with; its file says what was done."""
    fit(tmp_path, eval_every=4)
    written = (tmp_path / "config.toml").read_text()
    for changes in ({"seed": 7}, {"examples": 65}, {"words": 3}):
        ((name, now),) = changes.items()
        then = getattr(config(), name)
        words = rf"began with {name} = {then} and cannot go on with {now}\. .*--{name},.*--fresh"
        with pytest.raises(UserError, match=words):
            fit(tmp_path, resume=True, steps=20, **changes)
    fit(tmp_path, resume=True, lr=5.0)  # makes no update
    assert (tmp_path / "config.toml").read_text() == written
    allowed = {"lr": 5.0, "batch_size": 8, "eval_every": 3, "patience": 9, "device": "cpu"}
    fit(tmp_path, resume=True, steps=14, **allowed)
    kept = read_toml(tmp_path / "config.toml")
    assert {name: kept[name] for name in allowed} == allowed and kept["steps"] == 14


COPIED = {"sst": {"trees"}, "semdep": {"syntax"}, "explain": {"k"}, "parse": {"trees"}}
"""What tasks copy into the facts of a run, or choose its data by."""


def test_data_options_are_fixed() -> None:
    """Of every recipe with updates; the folder of data sets may move."""
    for name in set(tasks.names()) - {"align", "induce"}:
        options = {f.name: f.metadata["fixed"] for f in fields(tasks.by_name(name).config)}
        of_data = {"seed", "corpus", "examples", "train_file", "vectors", "least_count"}
        of_data = of_data & options.keys() | COPIED.get(name, set())
        assert all(options[key] for key in of_data), name
        assert not any(options.get(key) for key in ("data", "steps", "lr", "batch_size", "device"))


def told(folder: Path, step: int, **changes) -> pytest.ExceptionInfo[Stopped]:
    """A run that gets SIGTERM during this update."""

    class Told(Trainer):
        def _update(self, examples):
            if self.step == step - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            super()._update(examples)

    with pytest.raises(Stopped) as stopped:
        Told(Toy(), config(**changes), folder, silent=True).fit()
    return stopped


def test_sigterm_saves(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stopped = told(tmp_path / "told", 7, save_every=100)
    assert stopped.value.number == signal.SIGTERM and stopped.value.step == 7
    assert signal.getsignal(signal.SIGTERM) == before
    fit(tmp_path / "told", resume=True)
    fit(tmp_path / "whole")
    assert curve(tmp_path / "told") == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (5, {}),  # at a look
        (12, {}),  # at the end
        (12, {"eval_every": 200}),  # at the only look
        (6, {"eval_every": 3, "patience": 1, "lr": 0.0}),  # at the look that ends the run
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_a_look_that_a_signal_put_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, changes: dict, older: bool
) -> None:
    """Stopped where a look is due: the resumed run takes it, and is the whole one, bit for bit.

    So does one from a checkpoint of an older version, or killed after that look.
    """
    result = fit(tmp_path / "whole", **changes)
    folder = tmp_path / "told"
    told(folder, step, **changes)
    if older:
        tensors, state = checkpoint.load(folder / "last.safetensors")
        del state["measured"], state["cuts"]
        checkpoint.save(folder / "last.safetensors", tensors, state)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_save", lambda self: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                fit(folder, resume=True, **changes)
    again = fit(folder, resume=True, **changes)
    assert curve(folder) == curve(tmp_path / "whole")
    assert {**again, "minutes": 0} == {**result, "minutes": 0}
    for name in ("last", "best"):
        mine, state = checkpoint.load(tmp_path / "whole" / f"{name}.safetensors")
        theirs, other = checkpoint.load(folder / f"{name}.safetensors")
        assert all(torch.equal(mine[key], theirs[key]) for key in mine | theirs)
        assert {**state, "seconds": 0} == {**other, "seconds": 0}


def test_fewer_steps_than_were_made(tmp_path: Path) -> None:
    """Stopped before the first look, and resumed to end where it is."""
    told(tmp_path, 4, eval_every=200)
    assert fit(tmp_path, resume=True, eval_every=200, steps=2)["best_step"] == 4


# -- many workers --------------------------------------------------------------------------------

WORKER = """
import os, signal, sys
from structmax.train import Trainer
from structmax.__main__ import main
doomed = int(os.environ["DOOMED"])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def update(self, examples, before=Trainer._update):
    if first and self.step == doomed and self.workers.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    before(self, examples)

Trainer._update = update
main()
"""


def torchrun(tmp_path: Path, *arguments: str, doomed: int = -1) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    where = ["--master-addr=127.0.0.1", f"--master-port={port}", str(script)]
    return subprocess.run(
        [sys.executable, *launch, *where, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DOOMED": str(doomed), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


FLAGS = "train toy --device cpu --dropout 0 --steps 12 --log-every 1 --eval-every 5 --save-every 4"


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in curve(folder) if line["kind"] == "train"]


def test_two_workers_are_one_with_twice_the_batch(tmp_path: Path) -> None:
    flags = [*FLAGS.split(), "--examples", "70", "--out"]
    done = torchrun(tmp_path, *flags, str(tmp_path / "two"), "--batch-size", "8")
    assert done.returncode == 0, done.stderr
    fit(tmp_path / "one", dropout=0.0, examples=70)
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert len(two) == 12 and torch.allclose(torch.tensor(two), torch.tensor(one), rtol=1e-4)
    valid = [
        [line["accuracy"] for line in curve(tmp_path / name) if line["kind"] == "valid"]
        for name in ("one", "two")
    ]
    assert torch.allclose(*map(torch.tensor, valid), atol=1e-2)
    assert json.loads(done.stdout)["steps"] == 12  # only one worker speaks


@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_the_run_completes(tmp_path: Path) -> None:
    flags = [*FLAGS.split(), "--batch-size", "8", "--out"]
    done = torchrun(tmp_path, *flags, str(tmp_path / "killed"), doomed=6)
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr or "exitcode: -9" in done.stderr or "-9" in done.stderr
    whole = torchrun(tmp_path, *flags, str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")


# -- learning ------------------------------------------------------------------------------------


def test_toy_learns_and_logs(tmp_path: Path) -> None:
    result = fit(tmp_path, steps=150, examples=256, eval_every=50, log_every=10, grad_variance=True)
    assert result["test"]["accuracy"] > 0.9
    lines = [line for line in curve(tmp_path) if line["kind"] == "train"]
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    for group in ("parser", "composer"):
        assert lines[0][f"grad_variance/{group}"] > 0 and lines[0][f"grad_norm/{group}"] > 0


def test_early_stopping_keeps_the_best(tmp_path: Path) -> None:
    class Worse(Toy):
        calls = 0

        def evaluate(self, model, batches):
            self.calls += 1
            return {"accuracy": 1.0 / self.calls}

    result = fit(tmp_path, task=Worse(), steps=1000, patience=2, eval_every=3)
    assert result["steps"] == 9 and result["best_step"] == 3
    _, state = checkpoint.load(tmp_path / "best.safetensors")
    assert state["accuracy"] == 1.0

    class WorseAtFirst(Worse):
        def model(self, config):
            model = super().model(config)
            model.pretrain = 12  # updates that do not count
            return model

    result = fit(tmp_path / "later", task=WorseAtFirst(), steps=1000, patience=2, eval_every=3)
    assert result["steps"] == 18


def test_plateaus_cut_the_rate(tmp_path: Path) -> None:
    """To a quarter, three times; stopped in between and resumed, it is the same run."""
    options = {"steps": 1000, "schedule": "plateau", "patience": 2, "lr": 1e-9, "log_every": 1}
    result = fit(tmp_path / "whole", eval_every=3, **options)
    # nothing changes: the first look is the best, and then two for each of four rates
    assert result["steps"] == 27 and result["best_step"] == 3
    rates = [line["lr"] for line in curve(tmp_path / "whole") if line["kind"] == "train"]
    wanted = [1e-9] * 9 + [0.25e-9] * 6 + [0.0625e-9] * 6 + [1e-9 / 64] * 6
    assert rates == pytest.approx(wanted)
    told(tmp_path / "told", 16, eval_every=3, **options)
    fit(tmp_path / "told", resume=True, eval_every=3, **options)
    assert curve(tmp_path / "told") == curve(tmp_path / "whole")


def test_a_plateau_needs_no_other_end_and_may_come_later(tmp_path: Path) -> None:
    """A run that patience ended goes on when it is resumed on the schedule plateau."""
    options = {"patience": 2, "lr": 1e-9, "eval_every": 3}
    assert fit(tmp_path, steps=1000, **options)["steps"] == 9
    result = fit(tmp_path, resume=True, steps=0, schedule="plateau", **options)
    assert result["steps"] == 12 + 3 * 6 and result["best_step"] == 3


def test_data_that_changed(tmp_path: Path) -> None:
    """The numbers of words are those of the data that a run began with."""

    class Changed(Toy):
        def data(self, config):
            found = super().data(config)
            self.facts["words"] += 1
            return found

    fit(tmp_path, steps=2)
    for task, steps in ((Changed(), 4), (Changed(), 2)):
        with pytest.raises(UserError, match=r"have changed .*: words of them.*--fresh"):
            fit(tmp_path, task=task, resume=True, steps=steps)
    trained = run.load(tmp_path, torch.device("cpu"))
    assert len(run.data(tmp_path, trained.task, trained.config).valid)
    changed = Changed()
    changed.facts = trained.task.facts
    with pytest.raises(UserError, match="have changed"):
        run.data(tmp_path, changed, trained.config)


def test_a_trainer_checks_its_options(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="plateau needs --patience"):
        fit(tmp_path, schedule="plateau")
    for device in ("mps", "meta", "what"):
        with pytest.raises(UserError, match="must be cpu, cuda or auto"):
            choose_device(device)


def test_bleu_of_several_workers() -> None:
    """Is that of all sentences, not the mean of theirs."""
    pairs = [("a b c d e", "a b c d f"), ("a b", "a b"), ("x y z w", "x y z w v u")]
    whole, parts = Bleu(), [Bleu(), Bleu()]
    for i, (found, wanted) in enumerate(pairs):
        for bleu in (whole, parts[i % 2]):
            bleu.add(found.split(), wanted.split())

    class Two(Workers):
        def gather(self, value):
            return [value, {"bleu": parts[1]}]

    both = together({"bleu": parts[0]}, 2, Two(torch.device("cpu"), 0, 2))
    assert both == {"bleu": whole.value} and whole.value != parts[0].value


def test_groups_have_their_own_rates(tmp_path: Path) -> None:
    start = Toy().model(config())
    frozen = Trainer(Toy(), config(parser_lr=0.0, weight_decay=0.0), tmp_path, silent=True)
    before = {n: p.clone() for n, p in frozen.model.named_parameters()}
    frozen.fit()
    tensors, _ = checkpoint.load(tmp_path / "last.safetensors")
    for name in dict(start.named_parameters()):
        same = torch.equal(before[name], tensors[f"model.{name}"])
        assert same == name.startswith("chain.")


def test_replays_update_the_parser_alone(tmp_path: Path) -> None:
    class Replayed(Toy):
        seen: list[bool]

        def replays(self, model):
            return 3

        def replay(self, model, batch):
            self.seen.append(True)
            return self.loss(model, batch)

    task = Replayed()
    task.seen = []
    fit(tmp_path, task=task, steps=2)
    assert len(task.seen) == 6
    tensors, _ = checkpoint.load(tmp_path / "last.safetensors")
    updates = {n: int(t) for n, t in tensors.items() if n.startswith("opt") and n.endswith("step")}
    assert {v for n, v in updates.items() if ".parser." in n} == {8}
    assert {v for n, v in updates.items() if ".composer." in n} == {2}


def test_minutes_end_a_run(tmp_path: Path) -> None:
    assert 0 < fit(tmp_path, steps=0, minutes=0.005, schedule="cosine")["steps"] < 10_000


def test_amp_trains(tmp_path: Path) -> None:
    fit(tmp_path, amp=True)
    assert all(math.isfinite(loss) for loss in losses(tmp_path))


def test_nan_stops_and_keeps_the_batch(tmp_path: Path) -> None:
    class Bad(Toy):
        updates = 0

        def loss(self, model, batch):
            self.updates += 1
            return super().loss(model, batch) * (math.nan if self.updates == 7 else 1.0)

    with pytest.raises(UserError, match=r"update 7 is not finite.*bad_batch") as caught:
        fit(tmp_path, task=Bad())
    assert "\n" not in str(caught.value)
    batch, state = checkpoint.load(tmp_path / "bad_batch.0.safetensors")
    task = Toy()
    data = task.data(config()).train
    wanted = task.collate([data[i] for i in state["examples"]])
    assert state["step"] == 7 and torch.equal(batch["batch.words"], wanted["words"])
    assert checkpoint.load(tmp_path / "last.safetensors")[1]["step"] == 4
    fit(tmp_path, resume=True)  # the checkpoint is from before


# -- checkpoints ---------------------------------------------------------------------------------


def test_checkpoint_of_another_model(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(UserError, match=r"another model: embed.0.weight is \(5, 16\) there and"):
        fit(tmp_path, resume=True, dim=8)
    weights, _ = checkpoint.load(tmp_path / "best.safetensors")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="is only in the model"):
        checkpoint.load_model(model, {"weight": torch.zeros(2, 2)}, tmp_path)
    with pytest.raises(UserError, match="is only in the checkpoint"):
        checkpoint.load_model(model, {**model.state_dict(), "a": torch.zeros(1)}, tmp_path)


def test_checkpoint_of_another_task(tmp_path: Path) -> None:
    class Other(Toy):
        name = "other"

    fit(tmp_path)
    with pytest.raises(UserError, match="checkpoint of task 'toy'"):
        fit(tmp_path, resume=True, task=Other())


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a checkpoint"):
        checkpoint.load(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="there is no checkpoint"):
        checkpoint.load(tmp_path / "b.safetensors")
    with pytest.raises(UserError, match="is not a run"):
        run.read(tmp_path)


FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from structmax.train import UserError, checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1]) / "a.safetensors"
checkpoint.save(path, {"x": torch.zeros(10)}, {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    checkpoint.save(path, {"x": torch.zeros(10_000)}, {"step": 2})
except UserError as error:
    print(error)
print(checkpoint.load(path)[1]["step"], *[p.name for p in path.parent.iterdir()])
"""


def test_full_disk(tmp_path: Path) -> None:
    """A write that fails half-way leaves the file that was there, and nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    message, rest = done.stdout.splitlines()
    assert "cannot write" in message and "unharmed" in message
    assert rest == "1 a.safetensors"


def test_random_states_come_back() -> None:
    import numpy as np

    state = json.loads(json.dumps(checkpoint.random_state(CPU.device)))

    def draws():
        return random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(3).tolist()  # noqa: NPY002

    first = draws()
    draws()
    checkpoint.restore_random_state(state, CPU.device)
    assert draws() == first


def test_gradient_variance_is_the_sample_variance() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    gradients = torch.randn(5, 7)
    watch = GradientVariance(parameters)
    for g in gradients:
        parameters[0].grad, parameters[1].grad = g[:3].clone(), g[3:].reshape(2, 2).clone()
        watch.add()
    found = watch.read()
    assert found["grad_variance"] == pytest.approx(gradients.var(0).sum().item(), rel=1e-4)
    assert found["grad_norm"] == pytest.approx(gradients.square().sum(1).mean().sqrt().item())


def test_a_checkpoint_is_three_times_the_weights(tmp_path: Path) -> None:
    """AdamW's two moments; the mean gradient for its variance only where that is asked for."""
    fit(tmp_path, steps=3, save_every=3)
    tensors, _ = checkpoint.load(tmp_path / "last.safetensors")

    def size(prefix: str) -> int:
        return sum(t.numel() for t in checkpoint.within(tensors, prefix).values() if t.dim())

    assert size("optimizer.") == 2 * size("model.") and not size("variance.")
    train = [line for line in curve(tmp_path) if line["kind"] == "train"]
    assert all("grad_norm/parser" in line for line in train)
    assert not any("grad_variance/parser" in line for line in train)
    options = {"log_every": 4, "save_every": 3, "grad_variance": True}
    fit(tmp_path, resume=True, steps=8, **options)  # it starts afresh
    assert "grad_variance/parser" in curve(tmp_path)[-2]
    tensors, _ = checkpoint.load(tmp_path / "last.safetensors")
    assert size("variance.") == size("model.")


def test_unused_parameters_are_looked_for_where_there_are_some(monkeypatch) -> None:
    given: list[bool] = []

    def wrap(module: torch.nn.Module, find_unused_parameters: bool) -> torch.nn.Module:
        given.append(find_unused_parameters)
        return module

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", wrap)
    two = Workers(torch.device("cpu"), 0, 2)
    for name, options in [("tag", {}), ("parse", {}), ("parse", {"trees": "random"}), ("sst", {})]:
        task = tasks.by_name(name)
        chosen = task.config(**options, examples=4)
        task.data(chosen)
        model = task.model(chosen)
        two.wrap(model, task.has_unused(model))
    assert given == [False, False, True, True]


# -- configurations ------------------------------------------------------------------------------


def test_config_goes_through_toml(tmp_path: Path) -> None:
    odd = ToyConfig(lr=1e-5, parser_lr=3.0, schedule="cosine", device='a "quoted" ü\n', amp=True)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(odd))
    assert from_dict(ToyConfig, read_toml(path)) == odd
    path.write_text(to_toml(TrainConfig()))  # None is left out
    assert from_dict(TrainConfig, read_toml(path)) == TrainConfig()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stepps": 3}, ["'stepps'", "Did you mean 'steps'"]),
        ({"steps": "many"}, ["steps must be of type int", "'many'"]),
        ({"steps": True}, ["steps must be of type int"]),
        ({"schedule": "cosin"}, ["schedule cannot be 'cosin'", "Did you mean 'cosine'"]),
        ({"steps": 0}, ["--steps, --minutes or --patience"]),
        ({"schedule": "plateau"}, ["plateau needs --patience"]),
        ({"batch_size": 0}, ["batch_size must be at least 1"]),
        ({"clip": -1.0}, ["clip must not be negative"]),
        ({"words": 1}, ["two words"]),
        ({"device": "\ud800"}, ["device must be UTF-8"]),
    ],
)
def test_bad_options(values: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        from_dict(ToyConfig, values)
    for word in words:
        assert word in str(caught.value)


def test_whole_numbers_are_numbers() -> None:
    assert from_dict(ToyConfig, {"lr": 1}) == ToyConfig(lr=1.0)
    with pytest.raises(UserError, match="word_size must be at least 1, got 0"):
        from_dict(tasks.by_name("tag").config, {"word_size": 0})


def test_bad_toml(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("steps =")
    with pytest.raises(UserError, match="is not TOML"):
        read_toml(tmp_path / "c.toml")
    with pytest.raises(UserError, match="there is no file"):
        read_toml(tmp_path / "d.toml")
    with pytest.raises(UserError, match=r"cannot read .*directory"):
        read_toml(tmp_path)


def test_devices() -> None:
    with pytest.raises(UserError, match="device must be cpu, cuda or auto, got 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"finds no CUDA device. Use --device cpu"):
            choose_device("cuda")


# -- small parts ---------------------------------------------------------------------------------


def test_tasks_have_what_the_command_line_needs() -> None:
    for name in tasks.names():
        task = tasks.by_name(name)
        assert task.name == name and task.__doc__ and task.metric
        from dataclasses import fields

        for field in fields(task.config):
            assert field.metadata["help"].endswith("."), f"{name}: {field.name} has no help"


def test_batches_move_and_flatten() -> None:
    from typing import NamedTuple

    class Pair(NamedTuple):
        x: torch.Tensor
        y: list

    batch = {"a": Pair(torch.zeros(2), [torch.ones(1), "text"]), "b": 3}
    moved = move(batch, torch.device("meta"))
    assert moved["a"].x.device.type == moved["a"].y[0].device.type == "meta"
    assert moved["a"].y[1] == "text" and moved["b"] == 3
    assert sorted(tensors(batch)) == ["batch.a.x", "batch.a.y.0"]

    @dataclass
    class Padded:
        words: torch.Tensor
        name: str

    one = Padded(torch.zeros(2), "a")
    assert move(one, torch.device("meta")).words.device.type == "meta"
    assert move(one, torch.device("meta")).name == "a" and sorted(tensors(one)) == ["batch.words"]


def test_progress_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("toy", seconds_between=0.0)
    progress.update(1, 0.1, "loss 2")
    progress.update(2, 0.2, "loss 1")
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("toy: step 1") and "20% done" in lines[1] and "left" in lines[1]
    assert "/s" not in lines[0] and "left" not in lines[0]  # which is not known yet


def test_a_run_says_what_it_will_do_and_soon_how_long_it_takes(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first line of metrics is far away."""
    now = 1000.0

    class Slow(Trainer):
        def _update(self, examples):
            nonlocal now
            now += 60 if self.step == 0 else 2.0  # the first one compiles
            super()._update(examples)

    monkeypatch.setattr("structmax.train.progress.time.monotonic", lambda: now)
    Slow(Toy(), config(steps=200, log_every=100, eval_every=200), tmp_path).fit()
    start, *lines = capsys.readouterr().err.splitlines()
    assert start == "toy: preparing the data"
    assert lines[0] == "toy: examples: 64 to train on, 100 to validate, 100 to test"
    assert re.fullmatch(r"toy: [\d,]+ parameters on cpu, for 200 updates", lines[1])
    assert lines[2] == "toy: step 1  0% done"
    assert lines[3] == "toy: step 4  2.0 s each  2% done, 6:32 left"
    reports = [line for line in lines if "left" in line]
    assert 20 < len(reports) < 80 and "loss" in reports[-1]


def test_the_time_left_is_whole_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    times = iter([0.0, 100.0])
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("structmax.train.progress.time.monotonic", lambda: next(times))
    for name in ("parse", "seq2seq"):
        times = iter([0.0, 100.0])
        progress = Progress(name)
        text = "loss 12.3456  best sentences_per_second 0.1234"
        progress.update(1, 0.0, text)
        progress.bar.stop()
        progress.update(41, 0.01, text)
        screen = io.StringIO()
        console = Console(width=80, file=screen)
        console.print(progress.bar.get_renderable())
        (line,) = screen.getvalue().splitlines()
        assert len(line) <= 80 and "  1% 2:45:00 left loss 12.3456" in line, line


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    progress = Progress("toy")
    progress.update(1, 0.1, "loss 2 [a]")
    progress.say("a line [that] stays")
    progress.close()
    shown = screen.getvalue()
    assert "toy" in shown and "10%" in shown and "loss 2 [a]" in shown
    assert "a line [that] stays" in shown


def test_a_second_signal_interrupts() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.noted == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with ThreadPoolExecutor(1) as other:  # where no signal can be listened for
        assert other.submit(lambda: Signals().__enter__().noted).result() == 0


def test_what_a_task_gives_is_checked(tmp_path: Path) -> None:
    class Empty(Toy):
        def data(self, config):
            return super().data(config)._replace(valid=[])

    class Mean(Toy):
        def loss(self, model, batch):
            return super().loss(model, batch).mean()

    class Blind(Toy):
        def evaluate(self, model, batches):
            return {"loss": 1.0}

    class Untested(Toy):
        def data(self, config):
            return super().data(config)._replace(test=[])

    for task, kind, words in (
        (Empty(), UserError, "the train or the valid split is empty"),
        (Mean(), TypeError, r"toy.loss must be 1-d, got \(\)"),
        (Blind(), KeyError, "toy.evaluate must give its metric 'accuracy'"),
    ):
        with pytest.raises(kind, match=words):
            fit(tmp_path, task=task, steps=1)
    assert "test" not in fit(tmp_path, task=Untested(), steps=1)


def test_workers_that_cannot_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = Workers(torch.device("cpu"), rank=0, count=100)
    monkeypatch.setattr(Workers, "gather", lambda self, value: [value] * self.count)
    monkeypatch.setattr(Workers, "wrap", lambda self, module, unused: module)
    with pytest.raises(UserError, match=r"fewer training examples .64. than workers"):
        Trainer(Toy(), config(), tmp_path, workers=many, silent=True).fit()
    monkeypatch.setattr(Workers, "gather", lambda self, value: [True, False])
    with pytest.raises(UserError, match=r"worker 1 does not see .*all machines share"):
        Trainer(Toy(), config(), tmp_path, workers=many, silent=True)


def test_more_workers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "choose_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with (
        pytest.raises(UserError, match=r"worker 2 .* has no GPU of its own: there are 2"),
        distributed.workers("cuda"),
    ):
        pass


def test_only_faults_of_the_input_are_reported_as_such() -> None:
    with pytest.raises(UserError, match="more memory than there is"), as_user_error():
        raise MemoryError
    with pytest.raises(RuntimeError, match="a bug"), as_user_error():
        raise RuntimeError("a bug")


def test_a_loss_that_diverges_names_a_checkpoint_only_if_there_is_one(tmp_path: Path) -> None:
    class Wild(Toy):
        def loss(self, model, batch):
            return super().loss(model, batch) * float("nan")

    with pytest.raises(UserError, match=r"update 1 is not finite.*; there is no checkpoint yet\."):
        fit(tmp_path, task=Wild())
    fit(tmp_path, steps=4)
    with pytest.raises(UserError, match=r"update 5 is not finite.*; the last checkpoint is from"):
        fit(tmp_path, resume=True, task=Wild())


def test_notes_on_the_data_come_first(tmp_path: Path, capsys) -> None:
    class Noted(Toy):
        def data(self, config):
            self.notes.append("vectors: 3 of 4 words")
            return super().data(config)

    Trainer(Noted(), config(steps=1), tmp_path).fit()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["toy: preparing the data", "toy: vectors: 3 of 4 words"]


def test_damaged_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path, steps=1)
    assert run.load(tmp_path, CPU.device).step == 1
    said = json.loads((tmp_path / "task.json").read_text())
    for wrong, words in (
        ({"task": 3, "facts": {}}, "the name of the task must be text"),
        ({"task": "toy"}, "is damaged: 'facts'"),
    ):
        (tmp_path / "task.json").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=words):
            run.load(tmp_path, CPU.device)
    (tmp_path / "task.json").write_text(json.dumps(said))
    with monkeypatch.context() as patch:
        patch.setattr(Toy, "model", lambda self, config: self.facts["size"])
        with pytest.raises(UserError, match=r"its facts make no model .KeyError.'size'"):
            run.load(tmp_path, CPU.device)
    (tmp_path / "best.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights yet"):
        run.load(tmp_path, CPU.device)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a").mkdir()  # in the place of the file
    with pytest.raises(UserError, match=r"cannot write .*a: it is a folder. Give the name"):
        checkpoint.write_atomic(tmp_path / "a", b"")
    log = Log(tmp_path, 0, 0)
    log.path = tmp_path
    with pytest.raises(UserError, match=r"cannot write .*directory"):
        log.write(1, "train", {})

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_atomic(tmp_path / "b", b"")
    assert not list(tmp_path.glob(".*"))


# -- listops -------------------------------------------------------------------------------------


def small(**changes):
    from structmax.train.tasks.listops import ListOpsConfig

    sizes = {"examples": 48, "valid_examples": 12, "test_examples": 12, "hidden_size": 8}
    grammar = {"max_depth": 4, "max_args": 3, "min_length": 4, "max_length": 12}
    often = {"batch_size": 16, "log_every": 1, "eval_every": 10, "save_every": 2}
    return ListOpsConfig(**{**sizes, **grammar, **often, **changes})


@pytest.mark.parametrize(
    ("encoder", "estimator"),
    [
        ("spinn", "ppo:updates=2,baseline=ema,normalize=true"),
        ("spinn", "reinforce:baseline=ema"),
        ("cky", "imle:lam=adaptive"),
        ("easy-first", "top-k-expectation:k=2"),
        ("easy-first", "gumbel-straight-through"),
        ("spinn", "supervised"),
        ("cky", "spigot"),
    ],
)
def test_listops_resumes_with_any_estimator(tmp_path: Path, encoder: str, estimator: str) -> None:
    """The running moments of an estimator are in the checkpoint too."""
    chosen = {"encoder": encoder, "estimator": estimator, "dropout": 0.1}

    def fit(name: str, steps: int) -> None:
        task = tasks.by_name("listops")
        Trainer(task, small(steps=steps, **chosen), tmp_path / name, True, silent=True).fit()

    fit("whole", 5)
    fit("parts", 2)
    fit("parts", 5)
    kept = [[x for x in curve(tmp_path / n) if x["kind"] == "train"] for n in ("whole", "parts")]
    assert len(kept[0]) == 5 and kept[0] == kept[1]


@pytest.mark.parametrize("encoder", ["lstm", "gold", "random", "chart"])
def test_listops_without_latent_trees(tmp_path: Path, encoder: str) -> None:
    task = tasks.by_name("listops")
    config = small(steps=3, encoder=encoder, amp=encoder == "gold")
    result = Trainer(task, config, tmp_path, silent=True).fit()
    assert ("f1" in result["test"]) == (encoder != "lstm")
    if encoder == "gold":
        assert result["test"]["f1"] == 1.0
