"""The command line: what it prints, its exit codes, and errors of one line."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")

from structmax.cli import main
from structmax.data import listops
from structmax.train import distributed, tasks
from structmax.train import run as runs
from structmax.train.distributed import Workers
from structmax.train.errors import UserError
from structmax.train.metrics import read_log
from structmax.train.tasks.listops import ListOps
from structmax.train.tasks.parse import Parse

ROOT = Path(__file__).parent.parent
TRAIN = """
train listops --steps 4 --batch-size 8 --eval-every 2 --device cpu --hidden-size 8 --examples 40
--valid-examples 10 --test-examples 10 --max-depth 4 --max-args 3 --min-length 4 --max-length 12
""".split()  # noqa: SIM905
TOY = ["train", "toy", "--steps", "1", "--examples", "16", "--device", "cpu"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    """Run a command: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def refused(call):
    """Run a command that is to end with exit code 2 and one line with these words."""

    def run(*arguments: object, words: list[str]) -> None:
        code, _, err = call(*arguments)
        assert code == 2, err
        said = [line for line in err.splitlines() if line.startswith("structmax: ")]
        assert len(said) == 1 and err.rstrip().endswith(said[0]), err
        for word in words:
            assert word in said[0], said[0]

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "listops"
    assert main([*TRAIN, "--out", str(folder), "--encoder", "cky", "--estimator", "marginals"]) == 0
    return folder


# -- a run from beginning to end ------------------------------------------------------------------


def test_train_writes_a_run(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text())
    assert result["steps"] == 4 and 0 <= result["test"]["accuracy"] <= 1
    for name in ("f1", "f1_left", "gold_right", "gold_balanced", "f1_random"):
        assert 0 <= result["test"][name] <= 1
    assert {line["kind"] for line in read_log(trained)} == {"valid"}  # four steps log no loss
    assert sorted(p.name for p in trained.iterdir() if p.suffix != "") == [
        "best.safetensors",
        "config.toml",
        "last.safetensors",
        "metrics.jsonl",
        "result.json",
        "task.json",
    ]


def test_evaluate(call, trained: Path) -> None:
    code, out, _ = call("evaluate", trained)
    measured, result = json.loads(out), json.loads((trained / "result.json").read_text())
    assert code == 0 and measured["accuracy"] == result["test"]["accuracy"]
    code, out, _ = call("evaluate", trained, "--split", "valid")
    assert json.loads(out)["f1"] == pytest.approx(result["valid"]["f1"])


def test_evaluate_a_file_without_the_data(
    call, refused, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    config = (folder / "config.toml").read_text().replace('train_file = ""', 'train_file = "gone"')
    (folder / "config.toml").write_text(config)
    refused("evaluate", folder, words=["there is no gone"])
    path = tmp_path / "other.tsv"
    listops.write(path, listops.generate(10, seed=1_000_003, max_depth=3))
    code, out, _ = call("evaluate", folder, "--file", path)
    found = json.loads(out)
    assert code == 0 and found["file"] == str(path) and "split" not in found
    assert 0 <= found["accuracy"] <= 1 and 0 <= found["f1"] <= 1
    monkeypatch.setenv("STRUCTMAX_DATA", str(tmp_path))
    assert json.loads(call("evaluate", folder, "--file", "other.tsv")[1])["f1"] == found["f1"]
    refused("evaluate", folder, "--file", path, "--split", "test", words=["exclude each other"])
    refused("evaluate", folder, "--file", "none.tsv", words=["there is no none.tsv"])
    path.write_text("x\n")
    refused("evaluate", folder, "--file", path, words=["other.tsv:1"])
    path.write_text("")
    refused("evaluate", folder, "--file", path, words=["other.tsv has no examples"])
    assert call(*TOY, "--out", tmp_path / "toy")[0] == 0
    refused("evaluate", tmp_path / "toy", "--file", path, words=["task toy reads no files"])


def standard_input(*chunks: bytes, before: Callable[[int], None] = lambda i: None):
    """A stand-in for ``sys.stdin`` in another encoding, whose bytes come in chunks."""

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.at = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            before(self.at)
            chunk = chunks[self.at] if self.at < len(chunks) else b""
            self.at += 1
            buffer[: len(chunk)] = chunk
            return len(chunk)

    return io.TextIOWrapper(io.BufferedReader(Pipe()), "latin-1")


def test_answers_come_as_lines_do(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Line by line, before there are more; an empty line for an empty one, so that both go on."""
    printed = ""

    def check(chunk: int) -> None:
        nonlocal printed
        printed += capsys.readouterr().out
        assert printed.count("\n") == [0, 1, 1, 4, 5][chunk]

    chunks = b"[MAX 2 9 ]\n[M", b"IN 2 9 ]", b"\n\n \t\r\n7", b"\n"
    monkeypatch.setattr(sys, "stdin", standard_input(*chunks, before=check))
    assert main(["predict", str(trained), "--device=cpu"]) == 0
    printed += capsys.readouterr().out
    answers = [line.partition(" = ")[2] for line in printed.splitlines()]
    first, second, *others = answers
    assert first.count("(") == second.count("(") == 3 and others == ["", "", "7"]


def test_input_and_output_are_utf8(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Whatever the locale; a byte order mark is no text, and what is not UTF-8 is named."""
    seen: list[str] = []

    def predict(self, model, lines):
        for line in lines:
            seen.append(line)
            yield {"text": f"{line}→"}

    monkeypatch.setattr(ListOps, "predict", predict)
    text = "é\r\n" + "x" * 70_000 + "ü\n"
    output = io.TextIOWrapper(io.BytesIO(), "latin-1")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", standard_input(b"\xef\xbb\xbf", text.encode()[:4], b"", b""))
        patch.setattr(sys, "stdout", output)
        assert main(["predict", str(trained), "--device=cpu"]) == 0
    assert output.buffer.getvalue().decode() == "é→\n"  # type: ignore[attr-defined]
    (tmp_path / "in.txt").write_text(text, encoding="utf-8-sig", newline="")
    assert main(["predict", str(trained), str(tmp_path / "in.txt")]) == 0
    assert seen == ["é", "é", "x" * 70_000 + "ü"]
    (tmp_path / "in.txt").write_bytes(b"one\n\xfftwo\n")
    capsys.readouterr()
    assert main(["predict", str(trained), str(tmp_path / "in.txt")]) == 2
    out, err = capsys.readouterr()
    assert out == "one→\n" and "in.txt, line 2: this is not text in UTF-8" in err


def test_predict(call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["[MAX 2 9 ]", "7", "[SM 1 [MIN 2 3 ] 4 ]"]
    (tmp_path / "in.txt").write_text("\n".join(lines))
    code, out, _ = call("predict", trained, tmp_path / "in.txt", "--format", "json")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [" ".join(one["words"]) for one in found] == lines
    assert [len(one["spans"]) for one in found] == [3, 0, 7]
    assert found[0]["gold"] == [[0, 1], [0, 2], [0, 3]]
    monkeypatch.setattr(sys, "stdin", standard_input("\n".join(lines).encode()))
    code, out, _ = call("predict", trained)
    assert code == 0 and [line.split(" = ")[0] for line in out.splitlines()] == [
        str(one["value"]) for one in found
    ]


def test_predictions_are_json(
    call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"text": "é", "far": [math.inf, math.nan, 1.0]}
    monkeypatch.setattr(ListOps, "predict", lambda *given: iter([found]))
    (tmp_path / "in.txt").write_text("7")
    code, out, _ = call("predict", trained, tmp_path / "in.txt", "--format", "json")
    assert code == 0 and out == '{"text": "é", "far": [null, null, 1.0]}\n'


def test_show(call, trained: Path, tmp_path: Path) -> None:
    code, out, _ = call(
        "show", trained, "--count", 2, "--html", tmp_path / "a" / "p.html", "--svg", tmp_path / "s"
    )
    assert code == 0 and out.count("┬") >= 2 and "└─ ]" in out
    assert (tmp_path / "a" / "p.html").read_text().count("<svg") == 2
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["0.svg", "1.svg"]


def test_resume_and_fresh(call, refused, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert call("train", "toy", "--steps", 3, "--out", out)[0] == 0
    refused("train", "toy", "--out", out, words=["--resume", "--fresh"])
    refused("train", "toy", "--out", out, "--resume", "--fresh", words=["exclude"])
    code, text, _ = call("train", "toy", "--out", out, "--resume", "--steps", 5)
    assert code == 0 and json.loads(text)["steps"] == 5
    assert "steps = 5" in (out / "config.toml").read_text()
    flags = ["train", "toy", "--out", out, "--resume"]
    refused(*flags, "--seed", 7, words=["seed = 0", "7", "Leave out --seed", "--fresh"])
    refused(*flags, "--examples", 5000, words=["examples = 512", "5000", "--examples"])
    assert call(*flags, "--lr", 5)[0] == 0
    assert "lr = 0.01" in (out / "config.toml").read_text()  # no update was made with another
    code, text, _ = call("train", "toy", "--out", out, "--fresh", "--steps", 2)
    assert code == 0 and json.loads(text)["steps"] == 2
    refused("train", "toy", "--out", trained, "--resume", words=["listops", "not of 'toy'"])


def test_defaults_fit_the_device(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU only, in a new run only, and below what a file and flags say."""
    given: list[Any] = []
    monkeypatch.setattr(Parse, "fit", lambda self, config, *others: given.append(config) or {})
    train = ["train", "parse", "--device", "cpu", "--out", tmp_path / "run"]
    (tmp_path / "c.toml").write_text("layers = 3\n")
    assert call(*train, "--config", tmp_path / "c.toml", "--hidden-size", 50)[0] == 0
    found = given.pop()
    assert (found.steps, found.batch_tokens, found.layers, found.hidden_size) == (1000, 1000, 3, 50)
    runs.create(tmp_path / "run", Parse(), Parse.config(steps=7))
    assert call(*train, "--resume")[0] == 0 and given.pop() == Parse.config(steps=7, device="cpu")
    words = re.findall(r"[\w:]+", call("train", "parse", "--help")[1])
    assert "On a CPU: 1000" in " ".join(words)
    monkeypatch.setattr(distributed, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(
        distributed, "workers", lambda device: contextlib.nullcontext(Workers(torch.device("cpu")))
    )
    assert call("train", "parse", "--out", tmp_path / "new")[0] == 0
    assert given.pop() == Parse.config()


def test_config_file(call, refused, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("steps = 2\nwords = 3\n")
    code, out, _ = call("train", "toy", "--config", path, "--out", tmp_path / "r", "--words", 5)
    assert code == 0 and json.loads(out)["steps"] == 2
    assert "words = 5" in (tmp_path / "r" / "config.toml").read_text()
    path.write_text("steps = 1\n", encoding="utf-8-sig")
    code, out, _ = call("train", "toy", "--config", path, "--out", tmp_path / "mark")
    assert code == 0 and json.loads(out)["steps"] == 1
    path.write_text("step = 2\n")
    flags = ["train", "toy", "--config", path, "--out", tmp_path / "q"]
    refused(*flags, words=["c.toml", "'step'", "Did you mean 'steps'"])
    assert not (tmp_path / "q").exists()


# -- files of others, and files that cannot be written -------------------------------------------


def test_files_that_are_no_run(call, refused, tmp_path: Path) -> None:
    own = {"config.toml": "# notes\nsteps = 1\n", "result.json": "{}", "metrics.jsonl": ""}
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    new = [*TOY, "--out", tmp_path]
    for flags in ([], ["--config", tmp_path / "config.toml"], ["--resume"]):
        refused(*new, *flags, words=[*own, "holds no run", "--out", "--fresh"])
        assert {p.name: p.read_text() for p in tmp_path.iterdir()} == own
    assert call(*new, "--fresh")[0] == 0  # as after a run that ended while it made its folder
    assert (tmp_path / "task.json").exists()
    refused("train", "toy", "--out", "", words=["--out is empty"])


def test_files_that_cannot_be_replaced(call, refused, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert call(*TOY, "--out", out)[0] == 0
    for name in ("best.safetensors", "metrics.jsonl"):
        (out / name).unlink()
        (out / name).mkdir()
        refused(*TOY, "--out", out, "--fresh", words=[f"cannot remove {out / name}", "--out"])
        refused(*TOY, "--out", out, "--resume", words=[str(out / name)])
        (out / name).rmdir()
    assert call(*TOY, "--out", out, "--resume")[0] == 0  # it is a run all the time


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["evaluate RUN", "predict RUN IN", "tasks", "--help"])
def test_output_to_a_full_disk(
    capsys, monkeypatch: pytest.MonkeyPatch, trained: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "in.txt").write_text("7")
    places = {"RUN": str(trained), "IN": str(tmp_path / "in.txt")}
    with open("/dev/full", "w") as full:  # and nothing is left to write when it is closed
        monkeypatch.setattr(sys, "stdout", full)
        assert main([places.get(word, word) for word in command.split()]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("structmax: ") and os.strerror(28) in said[-1], said


# -- bad input: one line, exit code 2, nothing written --------------------------------------------


def test_near_names(refused, tmp_path: Path) -> None:
    refused("train", "nope", words=["no command 'nope'", "There are: align, explain"])
    refused("foo", words=["no command 'foo'", "There are: doctor"])
    refused("train", "lisops", words=["lisops", "Did you mean 'listops'"])
    refused("trian", "listops", words=["trian", "train"])
    refused("train", "listops", "--stepps", 3, words=["--stepps", "--steps"])
    refused("structures", "LinearChian", words=["LinearChian", "Did you mean 'LinearChain'"])
    refused("estimators", "spigt", words=["spigt", "Did you mean 'spigot'"])
    new = [*TRAIN, "--out", tmp_path / "new"]
    refused(*new, "--estimator", "spigt", words=["spigt", "Did you mean 'spigot'"])
    refused(*new, "--estimator", "spigot:stp=1", words=["'stp'", "Did you mean 'step'"])
    refused(*new, "--estimator", "spigot", words=["EasyFirst", "These do:", "reinforce"])
    refused(*new, "--encoder", "esay-first", words=["esay-first", "easy-first"])
    refused(*new, "--steps", "many", words=["--steps", "integer"])
    assert not (tmp_path / "new").exists()


def test_broken_data(refused, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    listops.write(path, listops.generate(20, max_depth=3))
    path.write_text(path.read_text() + "x\t( [MAX 1 )\n")
    new = [*TRAIN, "--out", tmp_path / "new", "--train-file", path]
    refused(*new, words=["train.tsv:21", "label must be a digit"])
    refused(*TRAIN, "--out", tmp_path / "new", "--test-file", "no.tsv", words=["no.tsv", "--data"])
    absent = tmp_path / "none"
    refused("train", "tag", "--corpus", absent, "--out", tmp_path / "new", words=[f"no {absent}."])
    assert not (tmp_path / "new").exists()
    (tmp_path / "in.txt").write_text("[MAX 2 9 ]\n[MAX 2 9\n")
    refused("predict", trained, tmp_path / "in.txt", words=["in.txt, line 2", "never closed"])
    refused("predict", trained, tmp_path / "none.txt", words=["none.txt"])


def test_bad_runs(refused, trained: Path, tmp_path: Path) -> None:
    for command in ("evaluate", "predict", "show"):
        refused(command, tmp_path / "none", "--device", "cpu", words=["none is not a run"])
    flags = ["train", "listops", "--out", trained, "--resume", "--hidden-size", 16]
    before = (trained / "config.toml").read_text()
    refused(*flags, words=["another model", "there and", "here"])
    assert (trained / "config.toml").read_text() == before


def test_options_without_effect(
    call, refused, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ["--data", tmp_path]
    new = [*data, "--out", tmp_path / "new"]
    refused(*TRAIN, *new, words=["no effect without --train-file or --test-file"])
    refused("train", "nli", *new, "--steps", 1, words=["without --corpus or --vectors"])
    refused("train", "align", *new, words=["no effect without --set"])
    assert not (tmp_path / "new").exists()
    refused("evaluate", trained, *data, words=["no effect without --train-file"])
    monkeypatch.setenv("STRUCTMAX_DATA", str(tmp_path))
    assert call("evaluate", trained)[0] == 0


def test_long_lines_are_cut(call, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x" * 20_000)
    code, _, err = call("predict", trained, tmp_path / "in.txt")
    assert code == 2 and "xxx…'" in err and len(err) < 300
    toy = tasks.by_name("toy")
    toy.facts = {"words": 4}
    with pytest.raises(ValueError, match=r"from 0 to 3, got '(1 ){19}1…'\.$"):
        next(toy.predict(toy.model(toy.config()), ["1 " * 9999 + "x"]))


def test_a_page_needs_a_name(refused, trained: Path, tmp_path: Path) -> None:
    for place in (".", tmp_path):
        refused("show", trained, "--html", place, words=[f"{place}: it is a folder", "the name"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_asked_but_absent(refused, trained: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    refused("train", "toy", "--device", "cuda", "--out", new, words=["cuda", "--device cpu"])
    refused("evaluate", trained, "--device", "cuda", words=["cuda", "--device cpu"])
    assert not new.exists()


# -- the rest -------------------------------------------------------------------------------------


def test_lists(call) -> None:
    for command, word in [("tasks", "listops"), ("structures", "KSubset"), ("estimators", "imle")]:
        code, out, _ = call(command)
        assert code == 0 and word in out
    assert "A head for each word" in call("structures", "DependencyTree")[1]
    assert call("estimators", "spigot")[1].startswith("spigot\n")


def test_lists_are_plain_and_whole(call) -> None:
    for command in ("tasks", "structures", "estimators"):
        lines = call(command)[1].splitlines()
        assert len(lines) > 10 and all(line.endswith(".") for line in lines), command
        assert not any(mark in line for line in lines for mark in ("``", ":class:"))
    assert "drawn with ForestBuilder." in call("structures", "Hyperpath")[1]


def test_help(call) -> None:
    code, out, _ = call("--help")
    assert code == 0 and all(name in out for name in ("train", "predict", "doctor"))
    code, out, _ = call("train", "listops", "--help")
    assert code == 0 and "--hidden-size" in out and "--save-every" in out and "--no-amp" in out
    assert "[default: runs/listops]" in out and "[default: 0]" in out
    assert "[default: (" not in out and "[default: ]" not in out
    assert call()[0] == 2


def test_doctor(call) -> None:
    code, out, _ = call("doctor")
    assert code == 0 and "compile and agree" in out and torch.__version__ in out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_exit(tmp_path: Path, number: int, code: int) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "structmax", "train", "toy", "--steps", "1000000"]
    process = subprocess.Popen(
        [*command, "--log-every", "1", "--device", "cpu", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while not read_log(out) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err and "--resume" in err.splitlines()[-1]
    assert (out / "last.safetensors").exists() and not list(out.glob(".*.tmp"))


def test_interrupted_before_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from structmax.__main__ import main as start

    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("structmax.cli.main", interrupt)
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 130


def test_without_the_extra() -> None:
    """``import structmax`` needs nothing optional; the command says what to install."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['typer', 'rich', 'safetensors']));"
        "import structmax; from structmax.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'structmax[cli]'" in done.stderr


def test_data_that_an_old_run_did_not_need(call, trained: Path, tmp_path: Path) -> None:
    """What a run was told once is no reason to refuse its model."""
    folder = shutil.copytree(trained, tmp_path / "old")
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(re.sub('(?m)^data = ""$', 'data = "x"', config))
    assert 'data = "x"' in (folder / "config.toml").read_text()
    lines = tmp_path / "lines.txt"
    lines.write_text("[MAX 2 3 ]\n")
    code, _, err = call("predict", folder, lines, "--device", "cpu")
    assert code == 0, err


def test_an_output_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["tasks"]) == 0


def test_a_run_that_died_as_it_began(tmp_path: Path) -> None:
    runs.create(tmp_path, tasks.by_name("toy"), tasks.by_name("toy").config())
    (tmp_path / "task.json").unlink()
    with pytest.raises(UserError, match=r"would replace config\.toml"):
        runs.refuse_other_files(tmp_path)
    lock = runs.claim(tmp_path)
    assert lock is not None
    lock.close()
    runs.refuse_other_files(tmp_path)
