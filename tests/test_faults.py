"""Faults: kills in the middle of a write, full disks, no memory, dead caches."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")

import structmax as sx
from structmax import jit
from structmax.cli import main
from structmax.jit import kernel
from structmax.train import Trainer, UserError, checkpoint, tasks
from structmax.train.metrics import read_log
from structmax.train.tasks.toy import Toy, ToyConfig

ROOT = Path(__file__).parent.parent
TOY = ["train", "toy", "--steps", "6", "--examples", "32", "--batch-size", "8", "--device", "cpu"]
OFTEN = ["--log-every", "1", "--eval-every", "2", "--save-every", "2"]


def in_child(work: Callable[[], int | None], errors: Path = Path(os.devnull)) -> int:
    """The exit code of a forked process that does some work on one thread, negative if killed."""
    child = os.fork()
    if child == 0:  # no pytest, and no exceptions past this line
        code = 99
        try:
            torch.set_num_threads(1)  # OpenMP's threads are gone in a forked process
            with errors.open("w") as sys.stderr:
                code = work() or 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


# -- kill -9 in the middle of a save --------------------------------------------------------------


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Half:
    """A file in which a part of the content is written when the process dies."""

    def __init__(self, file, part: float) -> None:
        self.file, self.part = file, part

    def __enter__(self) -> Half:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        self.file.write(content[: int(len(content) * self.part)])
        self.file.flush()
        die()


def dying(place: str, after: bool) -> None:
    """Let this process die when it comes to a system call, or right after it."""
    if place == "write":
        opened = Path.open
        Path.open = lambda self, *mode: Half(opened(self, *mode), 0.5 * after)  # type: ignore
        return
    real = getattr(os, place)
    setattr(os, place, (lambda *given: die(real(*given))) if after else die)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", ["write", "fsync", "replace", "open", "close"])
def test_killed_at_every_call_of_a_save(tmp_path: Path, place: str, after: bool) -> None:
    """The name holds the old checkpoint until the new one is whole, and then the new one."""
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"x": torch.zeros(3)}, {"step": 1})

    def save() -> None:
        dying(place, after)
        checkpoint.save(path, {"x": torch.ones(100_000)}, {"step": 2})

    assert in_child(save) == -signal.SIGKILL
    tensors, state = checkpoint.load(path)
    # the folder's own open and close come after the new name was given
    new = place in ("open", "close") or (place == "replace" and after)
    assert state["step"] == (2 if new else 1)
    assert torch.equal(tensors["x"], torch.ones(100_000) if new else torch.zeros(3))
    checkpoint.remove_remains(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


# -- full disks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 600, 4000, 12000])
def test_full_disk_is_told_in_one_line(tmp_path: Path, limit: int) -> None:
    """Wherever the disk is full, options, metrics or checkpoints: exit code 2, nothing broken."""
    out = tmp_path / "run"

    def train() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails then, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return main([*TOY, *OFTEN, "--out", str(out)])

    read, write = os.pipe()  # which is no file, and has no limit
    with os.fdopen(read) as pipe:
        code = in_child(train, Path(f"/dev/fd/{write}"))
        os.close(write)
        said = pipe.read().splitlines()
    assert code == 2 and said[-1].startswith("structmax: cannot write"), said
    assert not any("Traceback" in line for line in said)
    assert not list(out.glob(".*.tmp"))
    if (out / "last.safetensors").exists():
        checkpoint.load(out / "last.safetensors")
    assert all(line["step"] >= 1 for line in read_log(out))
    assert main([*TOY, "--out", str(out), "--fresh"]) == 0  # there is room again


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", Path("/proc/none"), Path("/dev/null")):
        assert main([*TOY, "--out", str(place)]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("structmax: ")


# -- memory ---------------------------------------------------------------------------------------


class Hungry(Toy):
    """Runs out of memory at its third update."""

    error: BaseException = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    updates = 0

    def loss(self, model, batch):
        self.updates += 1
        if self.updates == 3:
            raise self.error
        return super().loss(model, batch)


SMALL = {"steps": 6, "batch_size": 8, "examples": 32, "log_every": 1, "save_every": 2}


@pytest.mark.parametrize(
    "error",
    [
        Hungry.error,
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["device", "python", "host"],
)
def test_out_of_memory_says_what_to_do(tmp_path: Path, error: BaseException) -> None:
    task = Hungry()
    task.error = error
    with pytest.raises(UserError, match=r"out of memory at update 3\..*--batch-size.*--resume"):
        Trainer(task, ToyConfig(**SMALL), tmp_path, silent=True).fit()
    assert checkpoint.load(tmp_path / "last.safetensors")[1]["step"] == 2
    again = {**SMALL, "batch_size": 4}
    assert Trainer(Toy(), ToyConfig(**again), tmp_path, True, silent=True).fit()["steps"] == 6


def test_other_errors_are_not_taken_for_it(tmp_path: Path) -> None:
    task = Hungry()
    task.error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="shapes"):
        Trainer(task, ToyConfig(**SMALL), tmp_path, silent=True).fit()


def test_out_of_memory_on_the_command_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tasks, "by_name", lambda name: Hungry())
    assert main([*TOY, *OFTEN, "--out", str(tmp_path / "run")]) == 2
    assert "out of memory" in capsys.readouterr().err.splitlines()[-1]


def test_a_model_too_large_is_told(tmp_path: Path, capsys) -> None:
    assert main([*TOY, "--out", str(tmp_path / "run"), "--dim", str(2**31 - 1)]) == 2
    assert "more memory than there is" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["predict", "show", "evaluate"])
@pytest.mark.parametrize("error", [MemoryError(), Hungry.error], ids=["host", "device"])
def test_out_of_memory_in_an_answer_is_one_line(
    tmp_path: Path, monkeypatch, capsys, command: str, error: BaseException
) -> None:
    out = str(tmp_path / "run")
    assert main([*TOY, "--out", out]) == 0
    capsys.readouterr()

    def fail(self, words):
        raise error

    monkeypatch.setattr("structmax.train.tasks.toy.Tagger.forward", fail)
    (tmp_path / "in.txt").write_text("1 2\n")
    given = [] if command == "evaluate" else [str(tmp_path / "in.txt")]
    assert main([command, out, *given, "--device", "cpu"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("structmax: ") and "more memory than there is" in said
    assert ("in.txt, line 1" in said) == bool(given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_out_of_memory_in_a_step(tmp_path: Path) -> None:
    """A batch that does not fit: the line, the checkpoint, and the next call works."""

    class Large(Toy):
        updates = 0

        def loss(self, model, batch):
            self.updates += 1
            if self.updates == 3:
                free, _ = torch.cuda.mem_get_info()
                chain = sx.LinearChain(torch.zeros(1, 2, free // 4, device="cuda"))
                return chain.log_partition()
            return super().loss(model, batch)

    from structmax.train.distributed import Workers

    crew = Workers(torch.device("cuda"))
    with pytest.raises(UserError, match=r"out of memory at update 3"):
        Trainer(Large(), ToyConfig(**SMALL), tmp_path, workers=crew, silent=True).fit()
    torch.cuda.empty_cache()
    assert sx.Choice(torch.zeros(4, device="cuda")).log_partition().item() > 0
    assert Trainer(Toy(), ToyConfig(**SMALL), tmp_path, True, crew, silent=True).fit()["steps"] == 6


# -- Ctrl-C ---------------------------------------------------------------------------------------


def test_interrupted_in_a_kernel(tmp_path: Path) -> None:
    """A signal in the middle of a solve is an exception after it, not a crash."""
    tree = sx.DependencyTree(torch.randn(61, 61, generator=torch.Generator().manual_seed(0)))
    tree.sparsemap()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def work() -> int:
        signal.signal(signal.SIGALRM, interrupt)
        caught = 0
        for i in range(30):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 * (1 + i))
                tree.sparsemap()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                caught += 1
        return 0 if caught else 1

    assert in_child(work) == 0


# -- numba's cache --------------------------------------------------------------------------------


def _twice(x):
    return x + x


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """A cache of its own; kernels are made anew by ``kernel(_twice)``."""
    if numba.config.DISABLE_JIT:
        pytest.skip("the JIT is off")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    return tmp_path / "numba"


def files(folder: Path, end: str) -> list[Path]:
    return sorted(folder.rglob(f"*.{end}"))


def hits(made) -> int:
    return sum(made.stats.cache_hits.values())


@pytest.mark.parametrize("end", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "gone", "other pickle"])
def test_damaged_cache_is_compiled_again(cache: Path, end: str, damage: str) -> None:
    assert kernel(_twice)(3.0) == 6.0
    (path,) = files(cache, end)
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        other = pickle.dumps(numba.__version__) + pickle.dumps((1, 2, 3))
        path.write_bytes(
            {
                "cut": content[: len(content) // 2],
                "empty": b"",
                "garbage": bytes(255 - b for b in content),
                "other pickle": other,
            }[damage]
        )
    made = kernel(_twice)
    assert made(3.0) == 6.0 and hits(made) == 0
    again = kernel(_twice)
    assert again(3.0) == 6.0 and hits(again) == 1  # and the cache is whole again


def test_a_kernel_for_other_types_is_not_called(cache: Path) -> None:
    """What processes that start together may leave: a name that holds the other's kernel."""
    first, second = kernel(_twice), kernel(_twice)
    assert first(3.0) == 6.0 and second(3) == 6
    one, two = files(cache, "nbc")
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    made = kernel(_twice)
    assert made(3.0) == 6.0 and made(3) == 6 and isinstance(made(3), int) and hits(made) == 0


def test_a_change_of_what_a_kernel_calls_is_noticed(tmp_path: Path, cache: Path) -> None:
    """Numba itself looks at the file of the kernel alone."""
    package = tmp_path / "structmax"
    (package / "deep").mkdir(parents=True)
    for name, text in {
        "kernels": "from structmax.deep.inner import twice\nfrom structmax.deep import other",
        "deep/inner": "from structmax.constants import (\n    TWO,\n)",
        "deep/other": "",
        "constants": "TWO = 2",
        "unrelated": "",
    }.items():
        (package / f"{name}.py").write_text(text)

    def stamp() -> str:
        jit.source_stamp.cache_clear()
        jit._source.cache_clear()
        return jit.source_stamp(package / "kernels.py", package)

    first = stamp()
    (package / "unrelated.py").write_text("TWO = 3")
    assert stamp() == first
    for name in ("constants", "deep/other", "kernels"):
        before = stamp()
        (package / f"{name}.py").write_text("TWO = 3")
        assert stamp() != before, name

    assert kernel(_twice)(3.0) == 6.0
    again = kernel(_twice)
    again._cache._cache_file._source_stamp = first  # as if it had been compiled from other files
    assert again(3.0) == 6.0 and hits(again) == 0


def test_a_full_disk_under_the_cache(cache: Path, monkeypatch) -> None:
    made = kernel(_twice)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made._cache._cache_file, "_save_data", full)
    assert made(3.0) == 6.0


@pytest.mark.parametrize("place", ["/proc/none", "file/below", "home"])
def test_no_folder_to_cache_in(cache: Path, tmp_path: Path, monkeypatch, place: str) -> None:
    """A folder that cannot be made, or no home: kernels are compiled in each process."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", "" if place == "home" else str(tmp_path / place))
    if place == "home":  # and what lies beside the code is not to be written
        monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "UserWideCacheLocator")
        monkeypatch.setenv("HOME", "/proc/none")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    made = kernel(_twice)
    assert made(3.0) == 6.0 and not files(cache, "nbi")


TOGETHER = """
import sys, time
import torch, structmax as sx
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
x = torch.linspace(-1, 1, 12, dtype=getattr(torch, sys.argv[2])).view(3, 4).requires_grad_()
p = sx.sparsemax(x)
(p**2).sum().backward()
print(p.tolist(), x.grad.tolist())
"""


@pytest.mark.slow
def test_processes_that_start_together_from_an_empty_cache(tmp_path: Path) -> None:
    """Four at once, of two types, compile the same kernels into one folder; then a fifth."""
    start = time.time() + 15
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def begin(dtype: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TOGETHER, str(start), dtype]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True
        )

    together = [(dtype, begin(dtype)) for dtype in ("float32", "float64") * 2]
    found: dict[str, set[str]] = {"float32": set(), "float64": set()}
    for dtype, process in together:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        found[dtype].add(out)
    for dtype in found:  # what they left is good
        out, err = begin(dtype).communicate(timeout=600)
        found[dtype].add(out)
        assert len(found[dtype]) == 1, found
