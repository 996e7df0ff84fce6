"""Fuzzing, the short way: a few hundred inputs of each target, and what longer runs found.

``python -m tests.fuzz --count 1000000`` is the long way.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("conllu")

import fuzz

from structmax.cli import main
from structmax.data import Trees, listops
from structmax.train import UserError
from structmax.train.config import TrainConfig, from_dict, read_toml, to_toml, types_of
from structmax.train.tasks import by_name, names
from structmax.train.tasks.toy import ToyConfig

COUNTS = {"command_line": 10, "npz_file": 60, "toml_file": 60}
COUNTS |= {"run_best_safetensors": 40, "run_last_safetensors": 20, "run_config_toml": 20}


@pytest.fixture(scope="module", autouse=True)
def _clean():
    yield
    import shutil

    shutil.rmtree(fuzz.folder(), ignore_errors=True)
    for kept in (fuzz.folder, fuzz.made_run, fuzz.loaded):
        kept.cache_clear()


def broken(name: str, count: int, seed: int) -> str:
    found = fuzz.fuzz(name, count, seed)
    return "\n\n".join(f"{content[:300]!r}\n{trace}" for content, trace in found)


CHEAP = [name for name in fuzz.TARGETS if not name.startswith("predict_")]


@pytest.mark.parametrize("name", CHEAP)
def test_mutated_examples(name: str) -> None:
    """The result, or the error that says where."""
    said = broken(name, COUNTS.get(name, 200), seed=2)
    assert not said, said


@pytest.mark.parametrize("name", ["toy", "listops"])
def test_mutated_lines_at_stdin(name: str) -> None:
    said = broken(f"predict_{name}", 50, seed=2)
    assert not said, said


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(fuzz.TARGETS))
def test_more_mutated_examples(name: str) -> None:
    cheap = fuzz.TARGETS[name].share >= 30
    said = broken(name, 3000 if cheap else 100, seed=3)
    assert not said, said


# -- inputs made by rules, not from examples ------------------------------------------------------

QUICK = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CHARACTERS = st.characters(codec="utf-8") | st.sampled_from("\t\n\r \x0b\x0c\x1c\x85\u2028()[]{}:|")


def check(name: str, text: str) -> None:
    error = fuzz.attempt(name, text.encode())
    if error is not None:
        raise error


@QUICK
@given(st.text(CHARACTERS))
def test_any_text(text: str) -> None:
    for name in ("conllu_file", "columns_file", "sst_file", "snli_tsv", "listops_file", "ts_file"):
        check(name, text)


CELLS = st.one_of(
    st.sampled_from(["_", "0", "1", "2", "1.1", "0.1", "1-2", "2:a", "0:a|1.1:b", "1.1:a", "-1"]),
    st.text(string.printable, max_size=4).map(lambda s: "".join(s.split())),
)


@QUICK
@given(st.lists(st.lists(CELLS, min_size=10, max_size=10), max_size=6))
def test_rows_of_conllu(rows: list[list[str]]) -> None:
    check("conllu_file", "\n".join("\t".join(row) for row in rows))


TREES = st.recursive(
    st.builds("({} {})".format, st.integers(0, 5), st.text(string.ascii_letters, max_size=3)),
    lambda below: st.lists(below, min_size=1, max_size=3).map(lambda t: f"(2 {' '.join(t)})"),
)


@QUICK
@given(st.lists(TREES, max_size=4))
def test_trees(trees: list[str]) -> None:
    check("sst_file", "\n".join(trees))


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below),
    max_leaves=6,
)
NAMES = ["gold_label", "sentence1", "sentence2", "document", "summary", "words", "heads"]


@QUICK
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES) | VALUES, max_size=3))
def test_objects(rows: list[object]) -> None:
    for name in ("snli_jsonl", "summaries_file", "heads_file", "metrics_file"):
        check(name, "\n".join(map(json.dumps, rows)))


@QUICK
@given(st.dictionaries(st.sampled_from(list(vars(ToyConfig()))), VALUES))
def test_options_of_any_type(values: dict[str, object]) -> None:
    try:
        config = from_dict(ToyConfig, values)
    except UserError:
        return
    for name, value in vars(config).items():
        if isinstance(value, float):
            assert np.isfinite(value), name


@QUICK
@given(device=st.text(CHARACTERS), lr=st.floats(0, 1e9), seed=st.integers(0, 2**63 - 1))
def test_options_go_through_a_file(tmp_path: Path, device: str, lr: float, seed: int) -> None:
    config = from_dict(TrainConfig, {"device": device, "lr": lr, "seed": seed})
    path = tmp_path / "c.toml"
    path.write_bytes(to_toml(config).encode())
    assert from_dict(TrainConfig, read_toml(path)) == config


# -- options of the command line, with training ---------------------------------------------------

SMALL = {
    name: [
        word
        for key, value in {"steps": 1, "batch_size": 4, **options}.items()
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    for name, options in fuzz.SMALL.items()
}
EXTREMES = ["-1", "0", "1e999", "nan", "2147483648", "99999999999999999999", "", "x", "1.5"]


def options(name: str) -> list[str]:
    """Those that are numbers."""
    kinds = types_of(by_name(name).config)
    return [option for option, kind in kinds.items() if kind in (int, float, float | None)]


def refuses_or_trains(name: str, option: str, tmp_path: Path, capsys) -> None:
    for value in EXTREMES if name == "toy" else ["-1", "0", "nan", "2147483648"]:
        if option == "steps" and value in ("0", "2147483648"):
            continue  # a run without an end, as was asked for
        out = tmp_path / f"{option}{EXTREMES.index(value)}"
        flags = ["train", name, *SMALL[name], "--device", "cpu", "--out", str(out)]
        code = main([*flags, f"--{option.replace('_', '-')}", value])
        err = capsys.readouterr().err
        assert code in (0, 2), f"{option}={value}: {err}"
        said = [line for line in err.splitlines() if line.startswith("structmax: ")]
        assert len(said) == (code == 2), f"{option}={value}: {err}"


@pytest.mark.parametrize("option", options("toy"))
def test_extreme_options_of_toy(option: str, tmp_path: Path, capsys) -> None:
    refuses_or_trains("toy", option, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if name in SMALL and name != "toy"])
def test_extreme_options(name: str, tmp_path: Path, capsys) -> None:
    common = set(vars(TrainConfig()))
    for option in options(name):
        if option not in common:
            refuses_or_trains(name, option, tmp_path, capsys)


# -- what was found -------------------------------------------------------------------------------


def test_no_trees_at_all() -> None:
    """A batch of single leaves compares no trees; that of none has no items."""
    assert len(Trees.left([])) == 0 and Trees.left([]).f1(Trees.right([])).shape == (0,)
    assert len(Trees.from_transitions([])) == 0
    with pytest.raises(ValueError, match="lengths must be between 1 and 1, got 0"):
        Trees.from_transitions([[]])
    with pytest.raises(ValueError, match="step 0"):
        Trees.from_transitions([[]], [1])


def test_lines_are_counted_as_elsewhere(tmp_path: Path) -> None:
    """U+2028 and others are within a line, not between two."""
    path = tmp_path / "a.tsv"
    path.write_text("7\t7\n8\t8\u2028\n9\tx\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.tsv:3: "):
        listops.read(path)


@pytest.mark.parametrize("pixel", ["[0, 0, 256]", "[0, -1, 0]", "[0, 0.5, 0]", '["a", 0, 0]'])
def test_pixels_are_bytes(pixel: str) -> None:
    from structmax.train.tasks.path import read_picture

    row = f"[{', '.join([pixel] * 16)}]"
    with pytest.raises(ValueError, match="whole numbers from 0 to 255"):
        read_picture(f"[{', '.join([row] * 16)}]")
    with pytest.raises(ValueError, match="as JSON"):
        read_picture("[" * 100_000)
