"""Files from strangers: nothing in them is run, believed unseen, or shown as markup."""

from __future__ import annotations

import ast
import io
import json
import lzma
import os
import pickle
import re
import shutil
import struct
import time
import tomllib
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")

import structmax.draw as draw
from structmax.data import conllu, folder, sst, ucr
from structmax.train import Trainer, UserError, checkpoint, run
from structmax.train.tasks.toy import Toy, ToyConfig

ROOT = Path(__file__).parent.parent


# -- the source: nothing that runs what a file says -----------------------------------------------

FORBIDDEN_MODULES = {
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "tarfile",
}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "os.system", "os.popen", "yaml.load", "extractall"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [node.module or ""]
        for name in named:
            if name.split(".")[0] in FORBIDDEN_MODULES:
                yield f"{node.lineno}: imports {name}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            options = {key.arg: getattr(key.value, "value", None) for key in node.keywords}
            if called in FORBIDDEN_CALLS or called.endswith(".extractall"):
                yield f"{node.lineno}: calls {called}"
            if called.endswith("np.load") and options.get("allow_pickle") is not False:
                yield f"{node.lineno}: np.load may unpickle"
            if options.get("shell") is True:
                yield f"{node.lineno}: runs a shell"


def test_the_source_unpickles_and_evaluates_nothing() -> None:
    allowed = {"structmax/testing/contract.py: 14: imports pickle"}  # which checks that they travel
    found = set()
    for part in ("structmax", "examples", "benchmarks"):
        for path in sorted((ROOT / part).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            found |= {f"{place}: {one}" for one in offences(ast.parse(path.read_text()))}
    found = {re.sub(r"contract\.py: \d+:", "contract.py: 14:", one) for one in found}
    assert found <= allowed


# -- checkpoints ----------------------------------------------------------------------------------


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("run")
    config = ToyConfig(
        steps=4, batch_size=8, examples=16, save_every=2, eval_every=2, grad_variance=True
    )
    Trainer(Toy(), config, place, silent=True).fit()
    return place


def resumed(place: Path) -> None:
    task, config = run.read(place)
    Trainer(task, config, place, resume=True, silent=True)


@pytest.mark.parametrize("kind", ["pickle", "torch", "legacy", "numpy"])
def test_a_pickle_is_no_checkpoint(tmp_path: Path, trained: Path, kind: str) -> None:
    place, marker, out = tmp_path / "run", tmp_path / "ran", io.BytesIO()
    shutil.copytree(trained, place)
    if kind == "pickle":
        pickle.dump(Evil(marker), out)
    elif kind == "numpy":
        np.save(out, np.array([Evil(marker)], dtype=object), allow_pickle=True)
    else:
        torch.save({"state": Evil(marker)}, out, _use_new_zipfile_serialization=kind == "torch")
    for name in ("best", "last"):
        (place / f"{name}.safetensors").write_bytes(out.getvalue())
    with pytest.raises(UserError, match="not a checkpoint"):
        run.load(place, torch.device("cpu"))
    with pytest.raises(UserError, match="not a checkpoint"):
        resumed(place)
    assert not marker.exists()


def test_a_pickle_in_an_archive_of_arrays(tmp_path: Path) -> None:
    marker, x = tmp_path / "ran", np.array([Evil(tmp_path / "ran")], dtype=object)
    np.savez(tmp_path / "Two.npz", X_train=x, y_train=x, X_test=x, y_test=x)
    with pytest.raises(ValueError, match=r"Two\.npz: .*allow_pickle"):
        ucr.read(tmp_path)
    assert not marker.exists()


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    state = {"state": json.dumps({"step": 1})}
    return {"__metadata__": state, "x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HEADERS = {
    "a length beyond the file": raw(one(), bytes(8), 10**6),
    "a length beyond memory": raw(one(), bytes(8), 2**63 - 1),
    "no bytes": b"",
    "a length alone": struct.pack("<Q", 8),
    "data missing": raw(one(), bytes(4)),
    "data left over": raw(one(), bytes(12)),
    "offsets beyond the file": raw(one(offsets=(0, 2**40)), bytes(8)),
    "offsets backwards": raw(one(offsets=(8, 0)), bytes(8)),
    "negative offsets": raw(one(offsets=(-8, 0)), bytes(8)),
    "a shape larger than its data": raw(one(shape=(2**31, 2**31)), bytes(8)),
    "a shape whose size overflows": raw(one(shape=(2**33, 2**33)), bytes(8)),
    "a negative shape": raw(one(shape=(-2,)), bytes(8)),
    "an unknown type": raw(one(dtype="PICKLE"), bytes(8)),
    "no object": raw([1, 2], bytes(8)),
    "not JSON": raw(b"{" * 100, bytes(8)),
    "nested": raw(b"[" * 100_000, bytes(8)),
    "tensors that share bytes": raw({**one(), "y": one()["x"]}, bytes(8)),
    "no state": raw({"x": one()["x"]}, bytes(8)),
    "a state that is no object": raw({**one(), "__metadata__": {"state": "[1]"}}, bytes(8)),
    "a state without a step": raw({**one(), "__metadata__": {"state": "{}"}}, bytes(8)),
    "a nested state": raw({**one(), "__metadata__": {"state": "[" * 100_000}}, bytes(8)),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw(one(), bytes(8)))
    assert checkpoint.load(path)[0]["x"].tolist() == [0, 0]
    path.write_bytes(HEADERS[name])
    with pytest.raises(UserError, match="not a checkpoint") as caught:
        checkpoint.load(path)
    assert len(str(caught.value)) < 1000


def change(place: Path, file: str, edit) -> None:
    tensors, state = checkpoint.load(place / file)
    edit(tensors, state)
    checkpoint.save(place / file, tensors, state)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t, s: t.update({"model.pair.0.bias": t["model.pair.0.bias"].double()}), "float64"),
        (lambda t, s: t.update({"model.pair.0.bias": torch.zeros(3)}), r"\(3,\) there"),
        (lambda t, s: t.pop("model.pair.0.bias"), "only in the model"),
        (lambda t, s: t.update({"model.more": torch.zeros(1)}), "only in the checkpoint"),
        (
            lambda t, s: t.update({"optimizer.parser.0.exp_avg": torch.zeros(7)}),
            r"exp_avg is \(7,\)",
        ),
        (lambda t, s: t.update({"optimizer.parser.99.step": torch.zeros(())}), "it has 99.step"),
        (lambda t, s: t.update({"optimizer.parser.x": torch.zeros(())}), "it has x"),
        (lambda t, s: t.pop("optimizer.parser.0.exp_avg"), "not complete"),
        (lambda t, s: t.update({"variance.parser.0": torch.zeros(1, 2, 3)}), "damaged"),
        (lambda t, s: t.pop("variance.parser.0"), "damaged"),
        (lambda t, s: s.pop("random"), "damaged"),
        (lambda t, s: s.update(epoch=-1), "epoch is -1"),
        (lambda t, s: s.update(seconds="1"), "seconds is '1'"),
        (lambda t, s: s.update(seen={}), "damaged"),
        (lambda t, s: s["random"][0].update(torch="zz"), "damaged"),
        (lambda t, s: s["random"][0].update(torch="00"), "damaged"),
        (lambda t, s: s["random"][0].update(python=[3, [1], None]), "damaged"),
        (lambda t, s: s["random"][0]["numpy"].update(state={"key": [1], "pos": 0}), "damaged"),
    ],
)
def test_checkpoints_are_compared_before_use(tmp_path: Path, trained: Path, edit, words) -> None:
    place = tmp_path / "run"
    shutil.copytree(trained, place)
    change(place, "last.safetensors", edit)
    with pytest.raises(UserError, match=words):
        resumed(place)


def test_a_model_is_not_changed_by_a_checkpoint_that_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    wrong = {"bias": torch.ones(2), "weight": torch.ones(2, 3)}
    with pytest.raises(UserError, match="another model"):
        checkpoint.load_model(model, wrong, Path("a.safetensors"))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


# -- archives and bombs ---------------------------------------------------------------------------


def test_compressed_lines_are_bounded(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "v.txt.xz"
    path.write_bytes(lzma.compress(b"a 1\n" * 20))
    assert len(list(folder.read_lines(path))) == 20
    monkeypatch.setattr(folder, "SMALL", 1 << 20)
    path.write_bytes(lzma.compress(b"a 1\n" * 1_000_000))  # 4 MB in 800 bytes
    with pytest.raises(ValueError, match=r"v\.txt\.xz:\d+: decompressed, there are more than"):
        list(folder.read_lines(path))
    monkeypatch.setattr(folder, "LONGEST_LINE", 1 << 16)
    path.write_bytes(lzma.compress(bytes(1 << 20)))
    with pytest.raises(ValueError, match=r"v\.txt\.xz:1: a line of more than 65536 characters"):
        list(folder.read_lines(path))
    with pytest.raises(ValueError, match=r"/dev/zero:1: a line of more than"):
        list(folder.read_lines("/dev/zero"))


def test_archives_are_bounded_and_never_unpacked(tmp_path: Path, monkeypatch) -> None:
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    x, y = np.zeros((2, 50_000, 1)), np.array([0, 1])
    np.savez_compressed(place / "Two.npz", X_train=x, y_train=y, X_test=x, y_test=y)
    with zipfile.ZipFile(place / "Two.npz", "a") as archive:  # names that lead elsewhere
        for name in ("../../out.npy", "/out.npy", "C:\\out.npy", "X_train.npy/../out"):
            archive.writestr(name, b"x")
    before = sorted(tmp_path.rglob("*"))
    assert len(ucr.read(place)[0].series) == 2
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(ucr, "SMALL", 1000)
    monkeypatch.setattr(ucr, "MOST_TIMES", 10)
    with pytest.raises(ValueError, match=r"Two\.npz: decompressed, there are"):
        ucr.read(place)


def test_an_array_larger_than_its_file(tmp_path: Path) -> None:
    """A header that promises 2⁵⁰ numbers."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": "<f8", "fortran_order": False, "shape": (2**25, 2**25, 1)}
    )
    with zipfile.ZipFile(tmp_path / "Two.npz", "w") as archive:
        for name in ("X_train", "y_train", "X_test", "y_test"):
            archive.writestr(f"{name}.npy", out.getvalue())
    with pytest.raises(ValueError, match=r"Two\.npz: "):
        ucr.read(tmp_path)


def test_graphs_with_too_many_ways_are_refused() -> None:
    """Each empty node hangs from both before it: 2ⁿ ways lead to the word."""
    rows = ["1\ta\t_\t_\t_\t_\t0\troot\t1.60:x|1.59:x\t_"]
    for i in range(1, 61):
        above = [f"{f'1.{j}' if j > 0 else 0}:x" for j in (i - 1, i - 2)]
        rows.append(f"1.{i}\tb\t_\t_\t_\t_\t_\t_\t{'|'.join(dict.fromkeys(above))}\t_")
    start = time.process_time()
    with pytest.raises(ValueError, match=r"line:1: .*too many ways"):
        conllu.parse(enumerate(rows, 1))
    chain = ["1\ta\t_\t_\t_\t_\t0\troot\t1.5000:x\t_"] + [
        f"1.{i}\tb\t_\t_\t_\t_\t_\t_\t{f'1.{i - 1}' if i > 1 else 0}:x\t_" for i in range(1, 5001)
    ]
    with pytest.raises(ValueError, match="too long"):
        conllu.parse(enumerate(chain, 1))
    assert time.process_time() - start < 5


def test_deep_trees_are_refused() -> None:
    n = 20_000
    start = time.process_time()
    with pytest.raises(ValueError, match="more than 2000 words"):
        sst.parse("(2 " * (n - 1) + "(2 a)" + " (2 a))" * (n - 1))
    assert time.process_time() - start < 5


# -- markup ---------------------------------------------------------------------------------------

BAD = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "</text></svg><script>alert(1)</script>",
    "</title></style><script>",
    "<![CDATA[<script>]]>",
    "&lt;script&gt;&#60;script&#62;",
    "javascript:alert(1)",
    "<!--",
    "]]>\x00\x1b[31m\ud800",
]
SHAPES = {"svg", "style", "g", "path", "rect", "circle", "text", "tspan", "title", "line"}


def pictures(bad: str) -> dict[str, draw.Drawing]:
    two, three = [bad, bad], [bad] * 3
    weights = [[0.5, 0.5], [1.0, 0.0]]
    kept = {"heads": [2, 0], "probability": 1.0}
    made = {
        "arcs": draw.arcs_svg(two, [(2, 1, 1.0), (0, 2, 1.0)], {(2, 1): bad}),
        "bars": draw.bars_svg(two, [0.5, 0.5], two),
        "beside": draw.beside([(bad, draw.bars_svg(two, [0.5, 0.5]))]),
        "chart": draw.chart_svg(two, {(0, 1): 1.0}),
        "graph": draw.graph_svg(three, [(0, 1, 1.0), (1, 2, 0.5)]),
        "graph in order": draw.graph_svg(three, [(0, 1, 1.0)], order=[2, 0, 1]),
        "heat": draw.heat_svg(weights, two, two, numbers=True),
        "lattice": draw.lattice_svg(two, two, weights, [(0, 0, 1, 0.5)]),
        "segments": draw.segments_svg(two, two, [(0, 1, 0, 1.0)]),
        "threads": draw.threads_svg(two, two, [(0, 1, 1.0)]),
        "tree": draw.tree_svg(two, [(0, 1)], [(0, 1)], {(0, 1): bad, (0, 0): bad}),
        "answer: spans": draw.answer_svg({"words": two, "spans": [(0, 1)]}),
        "answer: trees": draw.answer_svg({"words": two, "trees": [kept]}),
        "answer: heads": draw.answer_svg({"words": two, "heads": [2, 0], "labels": two}),
        "answer: arcs": draw.answer_svg({"words": two, "arcs": [(2, 1)]}),
        "answer: choices": draw.answer_svg({"words": two, "choices": [{bad: 1.0}] * 2}),
        "answer: attention": draw.answer_svg(
            {"words": two, "source": two, "attention": [{"0": 1.0}] * 2}
        ),
        "answer: weights": draw.answer_svg({"premise": two, "hypothesis": two, "weights": weights}),
        "answer: chosen": draw.answer_svg({"words": two, "chosen": [0]}),
    }
    if hasattr(draw, "lines_svg"):
        made["lines"] = draw.lines_svg([0, 1], {bad: [0, 1]}, bad, bad)
    return made


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attributes) -> None:
        self.tags.add(tag)
        self.attributes += attributes


@pytest.mark.parametrize("number", range(len(BAD)))
def test_no_text_becomes_markup(number: int) -> None:
    bad = BAD[number]
    for name, picture in pictures(bad).items():
        root = ET.fromstring(picture)
        for element in root.iter():
            assert element.tag.partition("}")[2] in SHAPES, name
            assert not any(key.startswith("on") or "href" in key for key in element.attrib), name
        shown = "".join(root.itertext())
        assert draw.svg.clean(bad) in shown, name
        read = Tags()
        read.feed(draw.page(bad, [(bad, picture)]))
        assert read.tags <= SHAPES | {"html", "head", "meta", "body", "h1", "figure", "figcaption"}
        assert not any(key.startswith("on") for key, _ in read.attributes), name
        picture.encode()


# -- dependencies ---------------------------------------------------------------------------------


def test_licences_of_dependencies() -> None:
    from list_dependencies import closure, licence, permitted

    for name in closure("base", "cli", "tasks", "test", "docs", "explore"):
        assert permitted(name), f"{name}: {licence(name)}"


def test_direct_dependencies_are_pinned() -> None:
    from list_dependencies import direct

    pinned = {
        re.split("==", line)[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for name in listed["optional-dependencies"] if name not in ("bench", "hf")]
    missing = {name for extra in ("base", *extras) for name in direct(extra)} - pinned
    assert not missing
