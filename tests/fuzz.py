"""Random bytes at every reader and every input of the command line.

Each *target* takes bytes, made by mutating good examples, and either gives a result or raises the
error that is documented: one that says where. Anything else is a finding, and so is an input that
takes longer than ``LIMIT`` seconds or more memory than the process is allowed.

::

    python -m tests.fuzz --count 1000000            # all targets, by their shares
    python -m tests.fuzz --count 50000 conllu sst   # some of them
    python -m tests.fuzz --replay FILE conllu       # one input again

Findings are written to a folder, one file each; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from structmax.data import columns, conllu, glove, listops, parallel, snli, sst, summaries, ucr
from structmax.data.treebank import is_tree
from structmax.train import Trainer, UserError, run
from structmax.train.config import from_dict, read_toml
from structmax.train.estimator import estimator_of
from structmax.train.metrics import read_log
from structmax.train.tasks import by_name, heads, names

LIMIT = 10.0  # seconds for one input: no input here should take one
MEMORY = 3 << 30  # bytes beyond what the process has at its start


class Broken(AssertionError):
    """A target did neither of the two things that it may do."""


@dataclass
class Target:
    """What takes bytes, the examples they are made from, and its share of all inputs."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    share: int = 100


TARGETS: dict[str, Target] = {}


def target(*seeds: str | bytes, share: int = 100) -> Callable[[Any], Any]:
    """Add a function to the targets, by its name."""

    def add(function: Callable[[bytes], None]) -> Callable[[bytes], None]:
        given = [s.encode() if isinstance(s, str) else s for s in seeds]
        TARGETS[function.__name__] = Target(function, lambda: given, share)
        return function

    return add


@cache
def folder() -> Path:
    """Where inputs are written to be read; in memory where that is possible."""
    memory = Path("/dev/shm")
    made = tempfile.mkdtemp(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None)
    return Path(made)


def written(name: str, content: bytes) -> Path:
    path = folder() / name
    path.write_bytes(content)
    return path


@contextmanager
def says_where(*paths: Path):
    """A ValueError inside must begin with one of the files and, but for whole files, a line."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if not any(re.match(rf"{re.escape(str(path))}(:\d+)?: ", text) for path in paths):
            raise Broken(f"the error does not say where: {text[:200]!r}") from error


# -- readers --------------------------------------------------------------------------------------

CONLLU = """# text = they buy
1\tThey\tthey\tPRON\t_\t_\t2\tnsubj\t2:nsubj|4.1:nsubj\t_
2\tbuy\tbuy\tVERB\t_\t_\t0\troot\t0:root\t_
3-4\tdunno\t_\t_\t_\t_\t_\t_\t_\t_
3\tbooks\tbook\tNOUN\t_\t_\t2\tobj\t2:obj\t_
4\tand\tand\tCCONJ\t_\t_\t5\tcc\t4.1:cc\t_
4.1\tsell\tsell\tVERB\t_\t_\t_\t_\t2:conj|4.2:dep\t_
4.2\tit\tit\tPRON\t_\t_\t_\t_\t4.1:dep\t_
5\tpapers\t_\tNOUN\t_\t_\t2\tconj\t4.1:obj\t_

1\tGo\tgo\tVERB\t_\t_\t0\troot\t_\tSpaceAfter=No
"""


@target(CONLLU, share=120)
def conllu_file(content: bytes) -> None:
    path = written("a.conllu", content)
    with says_where(path):
        for sentence in conllu.read(path):
            n = len(sentence.words)
            assert n == len(sentence.heads) == len(sentence.upos) == len(sentence.deprels) > 0
            assert all(0 <= h <= n and 1 <= m <= n for h, m, _ in sentence.enhanced)
            if None not in sentence.heads:
                is_tree(sentence.heads)


@target("EU NNP I-NP B-ORG\nrejects VBZ I-VP O\n\n-DOCSTART- -X- O O\n\nPeter NNP I-NP S-PER\n")
def columns_file(content: bytes) -> None:
    path = written("eng.train", content)
    for encoding in ("utf-8", "latin-1"):
        with says_where(path):
            for sentence in columns.read(path, encoding):
                assert len(sentence.words) == len(sentence.tags) > 0
                spans = columns.spans(sentence.tags)
                assert columns.spans(columns.convert(sentence.tags, "iobes")) == spans


@target("(3 (2 It) (4 (2 's) (4 lovely)))\n(2 -LRB-)\n(0 (1 24\\/7) (2 \xa0.))\n")
def sst_file(content: bytes) -> None:
    path = written("train.txt", content)
    with says_where(path):
        for phrase in sst.read(path, subtrees=True):
            assert len(phrase.transitions) == 2 * len(phrase.words) - 1
            assert 0 <= phrase.label <= 4


@target(
    '{"gold_label": "neutral", "sentence1": "A man.", "sentence2": "He eats."}\n'
    '{"gold_label": "-", "sentence1": "x", "sentence2": "y", "more": [1, {"a": null}]}\n'
)
def snli_jsonl(content: bytes) -> None:
    _snli(written("a.jsonl", content))


@target(
    "premise\thypothesis\tlabel\nA man\tHe\t0\nA.\tB.\t2\n",
    "gold_label\tother\tsentence1\tsentence2\nneutral\t\tA man.\tHe eats.\n-\t\tx\ty\n",
    "3\t3\tA man.\tHe.\n1\t1\tB.\tC.\n",
)
def snli_tsv(content: bytes) -> None:
    _snli(written("a.tsv", content))


def _snli(path: Path) -> None:
    with says_where(path):
        for premise, hypothesis, label in snli.read(path):
            premise.split(), hypothesis.split()
            assert label in (0, 1, 2)


@target("two men .\na dog\n\x00zwei männer .\nein hund\n", share=60)
def parallel_text(content: bytes) -> None:
    """The two files are parted by the first zero byte."""
    left, _, right = content.partition(b"\0")
    paths = written("a.en", left), written("a.de", right)
    with says_where(*paths):
        for pair in parallel.read(*paths):
            assert pair.source and pair.target


@target("9\t( ( ( [MAX 2 ) 9 ) ] )\n3\t( ( ( [MAX 2 ) ( ( ( [SM 9 ) 4 ) ] ) ) ] )\n7\t7\n")
def listops_file(content: bytes) -> None:
    path = written("test.tsv", content)
    with says_where(path):
        for e in listops.read(path):
            assert len(e.transitions) == 2 * len(e.tokens) - 1 and 0 <= e.label <= 9


@target(
    "# about\n@problemName Two\n@classLabel true a b\n@data\n1,2,3:4,5,6:b\n1.5,2,-3e1:4,5,6:a\n"
)
def ts_file(content: bytes) -> None:
    path = written("Two_TRAIN.ts", content)
    with says_where(path):
        found = ucr.read_ts(path)
        assert len(found.series) == len(found.labels) > 0
        assert all(np.isfinite(series).all() for series in found.series)


@target("the 1 2\ncafé -1e-1 0.5\n, 3 4\n", share=60)
def glove_file(content: bytes) -> None:
    path = written("v.txt", content)
    with says_where(path):
        found, vectors = glove.read(path)
        assert len(found) == len(vectors) and np.isfinite(vectors).all()


@target('{"document": "a b c", "summary": "b"}\n{"summary": "x y", "document": "z"}\n', share=60)
def summaries_file(content: bytes) -> None:
    path = written("s.jsonl", content)
    with says_where(path):
        for pair in summaries.read(path, 2):
            assert len(pair.source) <= 2 and pair.target


@target(
    '{"words": ["a", "b"], "heads": [2, 0]}\n{"words": ["c"], "heads": [0], "x": {}}\n', share=60
)
def heads_file(content: bytes) -> None:
    path = written("h.jsonl", content)
    with says_where(path):
        for words, given in heads.read(path):
            assert len(words) == len(given) and all(isinstance(word, str) for word in words)
            assert all(head is None or 0 <= head <= len(words) for head in given)


@target(
    lzma.compress(b"the 1 2\nof 3 4\n" * 9),
    lzma.compress(b"the 1 2\n", lzma.FORMAT_ALONE),
    share=40,
)
def compressed_file(content: bytes) -> None:
    path = written("v.txt.xz", content)
    with says_where(path):
        glove.read(path)


def _npz() -> list[bytes]:
    x, y = np.arange(20.0).reshape(2, 5, 2), np.array([7, 3])
    seeds = []
    for save in (np.savez, np.savez_compressed):
        out = io.BytesIO()
        save(out, X_train=x, y_train=y, X_test=x, y_test=y)
        seeds.append(out.getvalue())
    return seeds


def npz_file(content: bytes) -> None:
    path = written("npz/Two.npz", content)
    with says_where(path):
        for split in ucr.read(path.parent):
            assert len(split.series) == len(split.labels)
            assert all(series.ndim == 2 and np.isfinite(series).all() for series in split.series)


# -- options --------------------------------------------------------------------------------------


@target(
    'steps = 12\nlr = 1e-3\nschedule = "cosine"\namp = false\n# text\nparser_lr = 0.1\n',
    "steps = 0\nminutes = 1.5\nseed = 7\n[words]\na = [1, 2, {b = 3}]\n",
    'estimator = "top-k-expectation:k=5"\nencoder = "cky"\nhidden_size = 32\ndropout = 0.5\n',
    share=30,
)
def toml_file(content: bytes) -> None:
    path = written("c.toml", content)
    for name in ("toy", "listops", "align", "seq2seq"):
        try:
            values = read_toml(path)
        except UserError:
            return
        with suppress(UserError):
            from_dict(by_name(name).config, values, source=str(path))


@target(
    "top-k-expectation:k=5",
    "sparse-expectation:max_iter=10,method=active_set",
    "imle:lam=adaptive,k=1",
    "ppo:updates=2,baseline=ema,normalize=true",
    "reinforce:baseline=[1, null]",
    "gumbel-straight-through:tau=0.5",
    share=60,
)
def estimator_text(content: bytes) -> None:
    with suppress(UserError):
        estimator_of(content.decode(errors="surrogateescape"))


@target(
    "train\ntoy\n--steps\n3\n--lr\n0.1\n--schedule\ncosine",
    "train\nlistops\n--encoder\ncky\n--estimator\nspigot\n--hidden-size=8\n--amp",
    "train\ntoy\n--resume\n--fresh",
    "structures\nLinearChain",
    "estimators\nimle",
    "predict\nnone\nnone.txt\n--format\njson",
    "show\nnone\n--count\n2\n--html\na.html",
    "evaluate\nnone\n--split\ntest",
    "train\nalign\n--gammas\n0.1,1\n--folds\n3",
    "tasks",
    "--help",
    share=2,
)
def command_line(content: bytes) -> None:
    """Options up to where training would start; the exit code and one line of error."""
    from structmax import cli

    arguments = content.decode(errors="surrogateescape").replace("\0", "").split("\n")[:30]
    if {"doctor", "explore"} & set(arguments):  # one looks at the machine, one serves pages
        return
    code, err = called(arguments)
    if code not in (0, 2):
        raise Broken(f"exit code {code}: {err[-300:]}")
    assert cli is not None
    said = [line for line in err.splitlines() if line.startswith("structmax: ")]
    if code == 2 and len(said) > 1:
        raise Broken(f"more than one line of error: {err[-300:]}")


def called(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a command in this process, without training; its exit code and standard error."""
    from structmax import cli
    from structmax.train.task import Task

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2))
    stdin = io.TextIOWrapper(io.BytesIO(), "utf-8")
    before = sys.stdout, sys.stderr, sys.stdin, os.getcwd()
    fit = {cls: cls.__dict__.get("fit") for cls in (Task, *map(type, map(by_name, names())))}
    for cls in fit:
        cls.fit = lambda *_: {}  # type: ignore[assignment]
    sys.stdout, sys.stderr, sys.stdin = out, err, stdin
    os.chdir(folder())
    try:
        code = cli.main(list(arguments))
    finally:
        sys.stdout, sys.stderr, sys.stdin = before[:3]
        os.chdir(before[3])
        for cls, function in fit.items():
            if function is None:
                del cls.fit
            else:
                cls.fit = function  # type: ignore[method-assign]
    err.flush()
    return code, err.buffer.getvalue().decode()  # type: ignore[attr-defined]


# -- runs -----------------------------------------------------------------------------------------

TINY = {"steps": 2, "batch_size": 8, "log_every": 1, "eval_every": 2, "save_every": 1, "seed": 0}
SMALL = {
    "toy": {"examples": 16, "dim": 2, "words": 2},
    "listops": {"examples": 16, "valid_examples": 4, "test_examples": 4, "hidden_size": 4,
                "max_depth": 4, "encoder": "cky", "estimator": "marginals"},
    "tag": {"examples": 16, "word_size": 4, "char_size": 4, "hidden_size": 4},
    "parse": {"examples": 16, "word_size": 4, "char_size": 4, "hidden_size": 4, "layers": 1,
              "arc_size": 4, "label_size": 4},
    "sst": {"examples": 16, "word_size": 4, "hidden_size": 4},
    "nli": {"examples": 16, "word_size": 4, "hidden_size": 4},
    "explain": {"examples": 16, "word_size": 4, "hidden_size": 4},
    "semdep": {"examples": 16, "word_size": 4, "hidden_size": 4},
    "seq2seq": {"examples": 16, "hidden_size": 4},
    "path": {"examples": 8, "valid_examples": 2, "hidden_size": 4, "side": 2},
}  # fmt: skip


@cache
def made_run(name: str) -> Path:
    """A run of a few updates of a tiny model."""
    place = folder() / f"run-{name}"
    task = by_name(name)
    Trainer(task, task.config(**{**TINY, **SMALL[name]}), place, silent=True).fit()
    return place


def _files(name: str, file: str) -> Callable[[], list[bytes]]:
    return lambda: [(made_run(name) / file).read_bytes()]


def _damaged(file: str) -> Callable[[bytes], None]:
    """Reads a run of which one file is damaged; then resumes it."""

    def read(content: bytes) -> None:
        import shutil

        place = folder() / f"damaged-{file}"
        if not place.exists():
            shutil.copytree(made_run("toy"), place)
        (place / file).write_bytes(content)
        try:
            trained = run.load(place, torch.device("cpu"))
            assert isinstance(trained.step, int)
        except UserError as error:
            _one_line(error)
        if file in ("best.safetensors", "task.json"):
            return
        for name in ("config.toml", "metrics.jsonl"):  # which resuming writes again
            if name != file:
                shutil.copy(made_run("toy") / name, place / name)
        try:
            task, config = run.read(place)
            config.device, config.examples = "cpu", min(config.examples, 16)  # type: ignore[attr-defined]
            Trainer(task, config, place, resume=True, silent=True).log.close()
        except UserError as error:
            _one_line(error)

    return read


def _one_line(error: UserError) -> None:
    if "Traceback" in str(error) or not str(error):
        raise Broken(f"not one line: {str(error)[:200]!r}")


def metrics_file(content: bytes) -> None:
    """What was not written to the end is left out; nothing else may happen."""
    path = written("metrics.jsonl", content)
    assert all(isinstance(line["step"], int) for line in read_log(path.parent))


LINES = {
    "toy": "0 1 1 0\n1\n",
    "listops": "[MAX 2 9 ]\n7\n[SM 1 [MIN 2 3 ] 4 ]\n",
    "tag": "two men walk .\na\n",
    "parse": "two men walk .\na\n",
    "sst": "good movie !\n",
    "nli": "a red dog\ta dog\n",
    "explain": "good movie !\n",
    "semdep": "two men walk\n",
    "seq2seq": "zwei hunde\n",
    "path": json.dumps([[[0, 9, 255]] * 16] * 16) + "\n",
}


@cache
def loaded(name: str) -> run.Trained:
    return run.load(made_run(name), torch.device("cpu"))


def _predicts(name: str) -> Callable[[bytes], None]:
    """Lines at standard input: an answer for each, or an error that names one."""

    def predict(content: bytes) -> None:
        from structmax import cli

        if name != "path":  # long sentences take long, rightly
            content = content[: 2000 if name in ("toy", "listops", "tag") else 300]
        before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(content), "utf-8")
        try:
            lines = cli._lines(None)
            for found in cli._predictions(loaded(name), lines, "stdin", name == "parse"):
                json.dumps(found)
        except UserError as error:
            if not re.match(r"stdin, line \d+: ", str(error)):
                raise Broken(f"the error does not say where: {str(error)[:200]!r}") from error
        finally:
            sys.stdin = before

    return predict


def _add_made() -> None:
    made = folder() / "npz"
    made.mkdir(exist_ok=True)
    TARGETS["npz_file"] = Target(npz_file, _npz, 10)
    for file, share in [("best.safetensors", 8), ("last.safetensors", 3), ("config.toml", 3),
                        ("task.json", 8)]:  # fmt: skip
        TARGETS[f"run_{file.replace('.', '_')}"] = Target(
            _damaged(file), _files("toy", file), share
        )
    TARGETS["metrics_file"] = Target(metrics_file, _files("toy", "metrics.jsonl"), 40)
    for name, text in LINES.items():
        share = 2 if name == "toy" else 1
        TARGETS[f"predict_{name}"] = Target(
            _predicts(name), lambda text=text: [text.encode()], share
        )


_add_made()

# -- mutation -------------------------------------------------------------------------------------

TOKENS = [
    b"", b"\n", b"\r", b"\r\n", b"\t", b" ", b"\0", b"\x0b", b"\x1c", b"\x85", b"\xff", b"\xc3",
    b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"-1", b"0", b"1",
    b"00", b"1e999", b"-1e-999", b"nan", b"inf", b"-inf", b"1_0", b"0x10", b"2147483648",
    b"9223372036854775808", b"1" * 5000, b"\xd9\xa3", b"\xc2\xb2", b"_", b":", b"|", b"-", b".",
    b"1.1", b"0:root", b"1-2", b"(", b")", b"(2 ", b"[", b"]", b"{", b"}", b"[MAX ", b" ]", b'"',
    b"'", b"\\", b"\\u0000", b"\\ud800", b"null", b"true", b"[" * 2000, b"{\"a\":" * 2000,
    b"(2 " * 2000, b"( " * 2000, b"[MAX " * 500, b",", b"=", b"@data", b"@classLabel", b"true",
    b"%s", b"%n", b"{}", b"../", b"../../etc/passwd", b"/dev/zero", b"~", b"$HOME", b"-", b"--",
    b"--config", b"--out", b"--help", b"B-", b"I-X", b"#", b"-DOCSTART-", b"A" * 70000,
    b"gold_label",
]  # fmt: skip


def mutate(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A few random changes of a good example."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5, 8, 20))):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 30, 200)))
        kind = rng.randrange(11)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 2:
            del data[at:to]
        elif kind == 3:
            data[at:at] = data[at:to] * rng.choice((1, 1, 2, 10))
        elif kind in (4, 5):
            data[at : (to if kind == 5 else at)] = rng.choice(TOKENS)
        elif kind == 6:
            lines = data.split(b"\n")
            rng.shuffle(lines)
            data = bytearray(b"\n".join(lines))
        elif kind == 7:
            data = data[:at] + bytearray(rng.choice(seeds))[at:]
        elif kind == 8:
            data = data[:at] if rng.random() < 0.3 else data
        elif kind == 9:
            numbers = [*re.finditer(rb"\d+", data)]
            if numbers:
                one = rng.choice(numbers)
                data[one.start() : one.end()] = rng.choice(TOKENS[16:33])
        else:
            lines = data.split(b"\n")
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
            data = bytearray(b"\n".join(lines))
        if len(data) > 200_000:
            del data[200_000:]
    return bytes(data)


# -- running --------------------------------------------------------------------------------------


class Slow(Broken):
    """An input took too long."""


def _alarm(number: int, frame: Any) -> None:
    raise Slow(f"more than {LIMIT} seconds")


def attempt(name: str, content: bytes) -> BaseException | None:
    """What an input raises that it should not, or nothing."""
    before = signal.signal(signal.SIGPROF, _alarm)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)  # of processor time: the machine may be busy
    try:
        TARGETS[name].run(content)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return None


def fuzz(name: str, count: int, seed: int = 0, enough: int = 20) -> list[tuple[bytes, str]]:
    """Inputs of a target that broke it, each with its traceback, one of every kind."""
    rng = random.Random(f"{name} {seed}")
    found: dict[str, tuple[bytes, str]] = {}
    seeds = TARGETS[name].seeds()
    for content in seeds:  # without a limit: kernels are compiled here
        TARGETS[name].run(content)
    for _ in range(count):
        content = mutate(rng, seeds)
        error = attempt(name, content)
        if error is not None:
            trace = "".join(traceback.format_exception(error))
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} {last.filename}:{last.lineno}"
            if kind not in found or len(content) < len(found[kind][0]):
                found[kind] = content, trace
            if len(found) >= enough:
                break
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; none: all")
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs of all targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=Path, help="give this file to the targets instead")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = args.targets or list(TARGETS)
    if args.replay:
        for name in chosen:
            error = attempt(name, args.replay.read_bytes())
            print(name, "ok" if error is None else "".join(traceback.format_exception(error)))
        return 0
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    shares = sum(TARGETS[name].share for name in chosen)
    broken = total = 0
    for name in chosen:
        count = -(-args.count * TARGETS[name].share // shares)
        start = time.monotonic()
        found = fuzz(name, count, args.seed)
        seconds = time.monotonic() - start
        total, broken = total + count, broken + len(found)
        print(f"{name:24} {count:8} inputs {seconds:7.1f} s  {len(found)} findings", flush=True)
        for i, (content, trace) in enumerate(found):
            args.out.mkdir(exist_ok=True)
            (args.out / f"{name}.{i}").write_bytes(content)
            (args.out / f"{name}.{i}.txt").write_text(trace, errors="backslashreplace")
    print(f"{total} inputs, {broken} findings{f', in {args.out}' if broken else ''}")
    return int(broken > 0)


if __name__ == "__main__":
    import shutil

    try:
        sys.exit(main())
    finally:
        shutil.rmtree(folder(), ignore_errors=True)
