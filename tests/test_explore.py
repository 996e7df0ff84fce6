"""The explorer without a browser: what pages compute, and who may look at them."""

from __future__ import annotations

import http.cookiejar
import importlib.util
import re
import socket
import statistics
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from explorer import explorer, train

import structmax as sx
from structmax.data import listops
from structmax.explore import dtw, estimators, html, pages, simplex, structures
from structmax.explore.catalogue import KINDS, RANGE, problem, words_of

pytest.importorskip("typer")
pytest.importorskip("safetensors")

from structmax.cli import main
from structmax.explore import model, serve
from structmax.train import UserError, tasks
from structmax.train import run as runs

LONG = "a b c d e f g h i j k l m n o"


def given(kind: str, long: bool = False, **changes: Any) -> dict[str, Any]:
    """The values of the controls of the first page, as they stand at the beginning."""
    chosen = KINDS[kind]
    text, other = chosen.text, chosen.other or ""
    if long:
        text = "abcdefghijk" if kind == "CTC" else LONG  # so many frames
        other = LONG
    values = {"kind": kind, "text": text, "other": other, "gamma": 1.0, "seed": 0}
    return {**values, "scores": problem(kind, text, other).scores.tolist(), **changes}


def pictures(page: str) -> list[ElementTree.Element]:
    """The drawings of a page, which are well-formed."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]


# -- structures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_used_of_scores_agrees_with_enumeration(kind: str) -> None:
    """A share is the mean of how often all structures use a score."""
    text = {"CTC": "ab", "path on a grid": "a b c", "grammar (PCFG)": "a b"}.get(kind, "a b c d")
    start = problem(kind, text, "x y z")
    omega = sx.Shannon(0.7)
    found = structures.answers(start, start.scores, omega)
    structure = start.make(start.scores, omega)
    every = structure.enumerate_support()

    def score(x: torch.Tensor) -> torch.Tensor:
        return start.make(x, omega).score(every)

    counts = torch.autograd.functional.jacobian(score, start.scores)  # (N, rows, columns)
    scores = score(start.scores)
    chances = (scores / 0.7).softmax(0)
    expected = (chances[:, None, None] * counts).sum(0)
    torch.testing.assert_close(found.shares["marginals"], expected, atol=1e-6, rtol=1e-6)
    assert found.numbers["best score"] == pytest.approx(float(scores.max()))
    value = 0.7 * float((scores / 0.7).logsumexp(0))
    assert found.numbers["log-partition A"] == pytest.approx(value)
    assert found.numbers["probability of the best"] == pytest.approx(float(chances.max()))
    entropy = -float((chances * chances.log()).sum())
    assert found.numbers["entropy"] == pytest.approx(entropy, abs=1e-6)
    assert float(found.probs.sum()) == pytest.approx(1.0)
    assert found.numbers["structures SparseMAP keeps"] == len(found.kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("long", [False, True], ids=["first", "long"])
def test_every_structure_has_its_pictures(kind: str, long: bool) -> None:
    values = given(kind, long)
    page = pages.view("structures", values)
    assert "sx-message" not in page or (kind == "assignment" and long)
    assert len(pictures(page)) >= 3
    for omega in structures.SMOOTHINGS if KINDS[kind].smoothed and not long else ():
        other = pages.view("structures", {**values, "omega": omega, "gamma": 0.5})
        assert "sx-message" not in other and (other != page or omega == "Hard")


def test_pictures_follow_scores() -> None:
    values = given("dependency tree, projective")
    before = pages.view("structures", values)
    values["scores"][0][7] = RANGE  # the telescope is the root
    after = pages.view("structures", values)
    scores = torch.tensor(values["scores"], dtype=torch.float64)
    tree = sx.DependencyTree(scores, projective=True)
    share = html.show(float(tree.marginals()[0, 7]))
    row = re.search(r'data-row="root – telescope".*?</tr>', after)
    assert row and f'data-column="marginals">{share}<' in row.group()
    assert before != after
    assert pages.view("structures", {**values, "seed": 1}) != after


def test_what_is_written_is_checked_and_escaped() -> None:
    assert words_of("word") == list("word")
    for text, words in [("", "got 0"), (LONG + " p", "got 16")]:
        values = {"kind": "binary tree", "text": text}
        assert words in pages.view("structures", values)
    attack = '<script>alert(1)</script> <img/src=x/onerror=alert(1)> &amp; "quoted" \'</svg>'
    for kind in KINDS:
        values = {"kind": kind, "text": attack, "other": attack, "gamma": 1.0, "seed": 0}
        values["scores"] = problem(kind, attack, attack).scores.tolist()
        page = pages.view("structures", values)
        assert "<script" not in page and "<img" not in page
        assert len(pictures(page)) >= 3, kind
    assert "<b>" not in html.figure("<b>", sx.Choice(torch.zeros(2)).draw())
    assert "<b>" not in html.table(["<b>", "<b>"], [("<b>", ["<b>"])], "<b>")
    assert "<b>" not in html.numbers({"<b>": "<b>"}) + html.message("<b>")


# -- the other pages ------------------------------------------------------------------------------


SIMPLEX = {"x_a": 0.4, "x_b": 0.0, "x_c": 0.9, "gamma": 0.8, "strength": 0.2, "upper": 0.6}


def test_simplex_shows_every_map() -> None:
    page = pages.view("simplex", SIMPLEX)
    maps = {name for some in simplex.MAPS.values() for name in some} | {"budgetmax"}
    public = {"softmax", "sparsemax", "entmax", "normmax", "budgetmax", "fusedmax", "oscarmax"}
    assert public | {"csoftmax", "csparsemax"} <= {name.partition(",")[0] for name in maps}
    x = torch.tensor([0.4, 0.0, 0.9], dtype=torch.float64) / 0.8
    row = re.search(r'data-row="sparsemax".*?</tr>', page)
    assert row and re.findall(r">([\d.]+)</td>", row.group()) == [
        html.show(p) for p in sx.sparsemax(x).tolist()
    ]
    assert f">{html.show(float(sx.smoothed_max(0.8 * x, sx.Gini(0.8))))}</td>" in page
    assert len(pictures(page)) == 3
    assert page != pages.view("simplex", {**SIMPLEX, "x_a": 0.5})


def test_warping_agrees_with_the_loss() -> None:
    x, y = dtw.SHAPES["a wave and a later one"]
    found = dtw.warp(x, y, sx.Shannon(0.3))
    leaf = x[:, None].clone().requires_grad_()
    cost = sx.losses.SoftDTW(0.3)(leaf, y[:, None])
    slope = torch.autograd.grad(cost, leaf)[0][:, 0]
    expected = (found.marginals * 2 * (x[:, None] - y)).sum(1)
    torch.testing.assert_close(slope, expected)
    assert found.numbers["smoothed DTW"] == pytest.approx(cost.item())
    values = {"first curve": x.tolist(), "second curve": y.tolist(), "gamma": 0.3}
    pages_drawn = [pages.view("dtw", {**values, "omega": o}) for o in structures.SMOOTHINGS]
    assert len({*pages_drawn}) == 4 and all(len(pictures(p)) == 2 for p in pages_drawn)


ESTIMATORS = {"cost": "quadratic", "sharpness": 0.5, "samples": 10, "step": 1.0}


@pytest.mark.parametrize("name", estimators.PROBLEMS)
def test_estimators_of_every_problem(name: str) -> None:
    chosen = [e for e in estimators.FIRST if e in estimators.applicable(name)]
    assert len(chosen) >= 5
    page = pages.view("estimators", {**ESTIMATORS, "problem": name, "names": chosen})
    assert len(pictures(page)) == 2 and "sx-table" in page
    for exact in ("marginals", "exact-expectation"):
        assert re.search(rf'data-row="{exact}".*?"bias">0\.0000<', page)


def test_a_page_without_a_run_says_how_to_get_one() -> None:
    assert "structmax train listops" in pages.view("model", {"run": None})
    assert pages.controls("model", 0, None, {"run": None}) == {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run") / "listops")


def test_a_model_draws_what_it_predicts(run: Path) -> None:
    line = "[MAX 2 [MIN 4 7 ] 0 ]"
    page = pages.view("model", {"run": str(run), "line": line})
    (picture,) = pictures(page)
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert words == line.split()
    assert html.message("write something.") in pages.view("model", {"run": str(run), "line": " "})
    broken = pages.view("model", {"run": str(run), "line": "<script>"})
    assert "sx-message" in broken and "<script" not in broken
    long = pages.view("model", {"run": str(run), "line": "[MAX 2 ]" * 1000})
    assert "letters, got 8000" in long and not pictures(long)
    known = listops.parse(line).label
    for value, said in [(known, "right"), ((known + 1) % 10, "wrong")]:
        found = model.answer(str(run), line)
        told = {**found, "value": value, "right": value == known}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "answer", lambda run, line, told=told: told)
            page = pages.view("model", {"run": str(run), "line": line})
        assert f'data-name="the answer is">{said}<' in page
        assert "dashed: nodes that they do not" in page


@pytest.mark.parametrize("name", [n for n in tasks.names() if n != "induce"])
def test_a_model_of_every_task_has_an_example_and_a_legend(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tasks.by_name(name)
    small = {"examples": 8, "valid_examples": 2, "test_examples": 2, "hidden_size": 8, "k": 2}
    known = {f.name for f in fields(task.config)}
    config = task.config(**{key: value for key, value in small.items() if key in known})
    task.data(config)
    if name == "align":
        task.facts |= {"method": "dtw", "gamma": 1.0}
    trained = runs.Trained(task, config, task.model(config).eval(), 1)
    monkeypatch.setattr(model, "trained", lambda run: trained)
    line = model.example("run")
    assert line.strip()
    page = pages.view("model", {"run": "run", "line": line})
    assert ("<svg" in page) == any(html.escape(text) in page for text in model.LEGENDS.values())


def test_samples_are_drawn_again_by_a_button() -> None:
    ui = pytest.importorskip("marimo").ui
    kind = next(iter(KINDS))
    values = {"kind": kind, "text": KINDS[kind].text}
    button = pages.controls("structures", 2, ui, values)["seed"]
    assert isinstance(button, ui.button) and button.value == 0
    button._update(1)
    button._update(2)
    assert button.value == 2


@pytest.mark.parametrize("port", [0, None])
def test_prints_where_it_listens(monkeypatch: pytest.MonkeyPatch, capsys, port: int | None) -> None:
    """Of port 0 too, which means any that is free."""
    monkeypatch.setattr(serve, "find_spec", lambda name: True)
    commands: list[list[str]] = []

    def listen(*given: Any, **named: Any) -> None:
        commands.append([*sys.argv])
        at = int(sys.argv[sys.argv.index("--port") + 1])
        with socket.socket() as server:
            server.bind(("127.0.0.1", at))
            server.listen()
            printed = ""
            until = time.monotonic() + 30
            while not printed and time.monotonic() < until:
                time.sleep(0.05)
                printed = capsys.readouterr().out
            assert printed.startswith(f"http://127.0.0.1:{at}/?access_token=") and at > 0

    monkeypatch.setattr(serve.runpy, "run_module", listen)
    monkeypatch.setattr(sys, "argv", sys.argv)
    serve.serve(port, "structures", None, False)
    assert len(commands) == 1


@pytest.mark.parametrize("name", pages.NAMES)
def test_the_app_shows_every_page(name: str) -> None:
    pytest.importorskip("marimo")
    from structmax.explore.app import app

    first = name == pages.NAMES[0]  # which is shown where none is asked for
    outputs, found = app.run() if first else app.run(defs={"name": name, "asked": name})
    assert found["name"] == name
    stages = [found[stage].value for stage in ("first", "second", "third")]
    assert [len(values) > 0 for values in stages] == [
        len(pages.page(name).STAGES) > stage and name != "model" for stage in range(3)
    ]
    shown = outputs[-1].text
    assert "sx-page" in shown and bool(pictures(shown)) == (name != "model")


def test_controls_of_what_cannot_be_read(run: Path) -> None:
    """A mistake is told where the answer would be; the controls before it stay."""
    ui = pytest.importorskip("marimo").ui
    kind = next(iter(KINDS))
    knobs = pages.controls("structures", 2, ui, {"kind": kind, "text": ""})
    assert {"gamma", "seed"} <= set(knobs) and "scores" not in knobs
    assert pages.controls("structures", 3, ui, {}) == {}
    assert list(pages.controls("model", 0, ui, {"run": str(run)})) == ["line"]
    for kind, chosen in KINDS.items():
        values = {"kind": kind, "text": chosen.text, "other": chosen.other or ""}
        texts = pages.controls("structures", 1, ui, values)
        assert ("other" in texts) == (chosen.other is not None)
        knobs = pages.controls("structures", 2, ui, values)
        assert "scores" in knobs and ("omega" in knobs) == chosen.smoothed


def test_answers_without_a_picture(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "answer", lambda run, line: {"text": "good 0.9"})
    page = pages.view("model", {"run": str(run), "line": "a line"})
    assert "good 0.9" in page and "nothing to draw" in page and not pictures(page)


# -- quick enough ---------------------------------------------------------------------------------


@pytest.mark.bench
@pytest.mark.parametrize(
    ("kind", "omega"),
    [(k, o) for k in KINDS for o in structures.SMOOTHINGS if KINDS[k].smoothed or o == "Shannon"],
)
def test_answers_in_a_fifth_of_a_second(kind: str, omega: str) -> None:
    values = given(kind, long=True, omega=omega)
    pages.view("structures", values)
    times = []
    for seed in range(7):
        start = time.process_time()  # a busy machine is not the page's fault
        pages.view("structures", {**values, "seed": seed})
        times.append(time.process_time() - start)
    assert statistics.median(times) < 0.2


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--page", "simplx"], ["simplx", "simplex"]),
        (["--run", "nowhere"], ["nowhere", "not a run"]),
        (["--port", "70000"], ["70000"]),
        (["--port", "x"], ["--port"]),
    ],
)
def test_refuses_in_one_line(capsys: pytest.CaptureFixture[str], options, words) -> None:
    pytest.importorskip("marimo")
    assert main(["explore", "--no-browser", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("structmax: ") and all(word in line for word in words)


def test_a_taken_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("marimo")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["explore", "--no-browser", "--port", str(port)]) == 2
    assert str(port) in capsys.readouterr().err


def test_the_next_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < serve.free_port(port) < port + 200

    def refuse(port: int) -> None:
        raise UserError("taken")

    monkeypatch.setattr(serve, "check_port", refuse)
    with pytest.raises(UserError, match="no port from 7000 to 7199 is free"):
        serve.free_port(7000)


def test_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "structmax.explore.serve.find_spec", lambda name: None if name == "marimo" else real(name)
    )
    assert main(["explore"]) == 2
    assert capsys.readouterr().err == (
        "structmax: explore needs marimo: pip install 'structmax[explore]'\n"
    )


# -- the server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    pytest.importorskip("marimo")
    with explorer() as printed:
        yield printed


def status(opener: urllib.request.OpenerDirector, url: str, body: bytes | None = None) -> int:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=60) as answer:
            text = answer.read().decode(errors="replace")
            assert "root:x:" not in text and "hatchling" not in text
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


def test_listens_on_this_machine_alone(address: str) -> None:
    port = urllib.parse.urlsplit(address).port
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    if not tables[0].exists():
        pytest.skip("no /proc/net/tcp")
    rows = [line.split() for t in tables if t.exists() for line in t.read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]
    assert listening == [f"0100007F:{port:04X}"]  # 127.0.0.1


def test_refuses_without_the_token(address: str) -> None:
    root = address.partition("?")[0]
    stranger = urllib.request.build_opener(Stay)
    assert status(stranger, root) == 303  # to the form that asks for it
    assert status(stranger, f"{root}?access_token=wrong") == 303
    for path in ("api/version", "api/status", "public/app.py", "@file/1-x.txt"):
        assert status(stranger, root + path) == 401
    for path in ("api/kernel/run", "api/kernel/instantiate", "api/kernel/set_ui_element_value"):
        assert status(stranger, root + path, b"{}") == 401
    assert len(urllib.parse.parse_qs(urllib.parse.urlsplit(address).query)["access_token"][0]) >= 22


def test_serves_nothing_else(address: str) -> None:
    """With the token, too: no file of the machine, no code, and nothing is run."""
    root = address.partition("?")[0]
    cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
    visitor = urllib.request.build_opener(cookies)
    assert status(visitor, address) == 200
    assert status(visitor, root) == 200  # by its cookie
    for path in (
        "?file=/etc/passwd",
        f"?file={Path(sx.__file__).parent.parent / 'pyproject.toml'}",
        "app.py",
        "public/..%2fserve.py",
        "public/%2e%2e/%2e%2e/cli.py",
        "@file/..%2f..%2fetc%2fpasswd",
        "assets/..%2f..%2f..%2f..%2fetc%2fpasswd",
        "..%2f..%2fetc%2fpasswd",
    ):
        assert status(visitor, root + path) == 404, path
    for path in ("kernel/run", "files/list_files", "files/file_details", "kernel/read_code"):
        assert status(visitor, f"{root}api/{path}", b'{"path": "/etc"}') in (401, 403), path
