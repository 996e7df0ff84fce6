"""The explorer in chromium: what is moved changes pictures and numbers, which the library gives.

``SCREENSHOTS=docs/_static/explore pytest -m browser tests/test_explore_browser.py`` keeps the
pictures of the pages.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from explorer import explorer, train

import structmax as sx
from structmax.explore import dtw, estimators, html, model, structures
from structmax.explore.catalogue import KINDS, problem

pytest.importorskip("marimo")
playwright = pytest.importorskip("playwright.sync_api")
for command_line in ("typer", "safetensors"):
    pytest.importorskip(command_line)

pytestmark = pytest.mark.browser
WIDTHS = (1280, 400)
SECONDS = 60  # a busy machine is slow
LINE = "[MIN 8 [MAX 3 5 ] 6 ]"
Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run") / "listops")


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with explorer("--run", run) as printed:
        yield printed


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as player:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = player.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any, address: str) -> Iterator[Visit]:
    """Opens a page; at the end there was no error, nothing from elsewhere, and no overflow."""
    troubles: list[str] = []
    opened: list[Any] = []

    def open_page(name: str, width: int = 1280, scheme: str = "light") -> Any:
        size = {"width": width, "height": 900}
        context = chromium.new_context(viewport=size, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(SECONDS * 1000)
        page.on("console", lambda m: troubles.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda r: troubles.append(r.url) if _elsewhere(r.url) else None)
        opened.append(page)
        page.goto(f"{address}&page={name}")
        page.wait_for_selector(".sx-page")
        return page

    yield open_page
    for page in opened:
        overflow = page.evaluate(
            "['html', '#App'].map(s => document.querySelector(s))"
            ".map(e => e.scrollWidth - e.clientWidth)"
        )
        page.context.close()
        assert overflow == [0, 0]
    assert troubles == []


def _elsewhere(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))


def expect(page: Any, selector: str, value: float | str) -> None:
    """Waits until a cell of a table has this number."""
    text = html.show(value)
    playwright.expect(page.locator(selector)).to_have_text(text, timeout=SECONDS * 1000)


def number(name: str) -> str:
    return f'.sx-numbers td[data-name="{name}"]'


def cell(row: str, column: str) -> str:
    return f'tr[data-row="{row}"] td[data-column="{column}"]'


def press(page: Any, slider: int, key: str, times: int = 1) -> None:
    """Moves a slider, the first of the page being 0."""
    thumb = page.locator("marimo-slider [role=slider]").nth(slider)
    thumb.focus()
    for _ in range(times):
        thumb.press(key)


def drawings(page: Any) -> list[str]:
    return page.locator(".sx-page svg").evaluate_all("all => all.map(one => one.outerHTML)")


def keep(page: Any, name: str) -> None:
    """A picture of the whole page, if pictures are wanted."""
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        high = page.evaluate("document.querySelector('#App').scrollHeight")
        size = page.viewport_size
        page.set_viewport_size({**size, "height": min(high, 2400)})
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(800)  # until what was pressed has faded
        page.screenshot(path=Path(folder) / f"{name}.png")
        page.set_viewport_size(size)


@pytest.mark.parametrize("width", WIDTHS)
def test_structures(visit: Visit, width: int) -> None:
    kind = "dependency tree, projective"
    start = problem(kind, KINDS[kind].text)
    page = visit("structures", width)
    tree = sx.DependencyTree(start.scores, projective=True)
    expect(page, number("log-partition A"), float(tree.log_partition()))
    expect(page, cell("saw – telescope", "marginals"), float(tree.marginals()[2, 7]))
    keep(page, f"structures-{width}")
    before = drawings(page)

    press(page, 0, "ArrowRight")  # γ
    gamma = structures.GAMMAS[structures.GAMMAS.index(1.0) + 1]
    warmer = sx.DependencyTree(start.scores, projective=True, smoothing=sx.Shannon(gamma))
    expect(page, number("log-partition A"), float(warmer.log_partition()))
    expect(page, number("entropy"), float(warmer.entropy()))
    assert drawings(page) != before

    score = page.get_by_test_id("matrix-cell-4-7")  # man → telescope
    old = float(score.get_attribute("aria-valuenow"))
    score.scroll_into_view_if_needed()
    box = score.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 45, box["y"] + 10, steps=5)
    page.mouse.up()
    new = float(score.get_attribute("aria-valuenow"))
    assert new > old == pytest.approx(float(start.scores[4, 7]))
    scores = start.scores.clone()
    scores[4, 7] = new
    moved = sx.DependencyTree(scores, projective=True, smoothing=sx.Shannon(gamma))
    expect(page, number("log-partition A"), float(moved.log_partition()))
    expect(page, cell("man – telescope", "marginals"), float(moved.marginals()[4, 7]))
    expect(page, cell("man – telescope", "SparseMAP"), float(moved.sparsemap().marginals[4, 7]))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_structure(visit: Visit, width: int) -> None:
    page = visit("structures", width)
    for kind, chosen in KINDS.items():
        page.locator("marimo-dropdown select").first.select_option(label=kind)
        start = problem(kind, chosen.text, chosen.other or "")
        structure = start.make(start.scores, None)
        expect(page, number("entropy"), float(structure.entropy()))
        expect(page, number("best score"), float(structure.score(structure.argmax())))
        assert len(drawings(page)) >= 6
        overflow = page.evaluate("document.querySelector('#App').scrollWidth")
        assert overflow == width, kind


@pytest.mark.parametrize("width", WIDTHS)
def test_simplex(visit: Visit, width: int) -> None:
    page = visit("simplex", width)
    keep(page, f"simplex-{width}")
    for times in (0, 4):
        before = drawings(page)
        press(page, 0, "ArrowRight", times)
        x = torch.tensor([0.4 + 0.05 * times, 0.0, 0.9], dtype=torch.float64)
        for name, p in (
            ("softmax", sx.softmax(x)),
            ("sparsemax", sx.sparsemax(x)),
            ("fusedmax", sx.fusedmax(x, 0.2)),
            ("csparsemax", sx.csparsemax(x, upper=0.6)),
        ):
            for corner, value in zip("abc", p.tolist()):
                expect(page, cell(name, corner), value)
        expect(page, number("maxΩ, Gini"), float(sx.smoothed_max(x, sx.Gini())))
        assert (drawings(page) != before) == bool(times)


@pytest.mark.parametrize("width", WIDTHS)
def test_time_warping(visit: Visit, width: int) -> None:
    page = visit("dtw", width)
    keep(page, f"dtw-{width}")
    x, y = ((20 * curve).round() / 20 for curve in dtw.SHAPES["a wave and a later one"])
    for moved in (False, True):
        before = drawings(page)
        if moved:
            press(page, 4, "ArrowUp", 6)  # the fourth point, after γ
            x[3] += 0.3
        pair = x[:, None], y[:, None]
        expect(page, number("DTW"), float(sx.losses.SoftDTW(omega=sx.Hard())(*pair)))
        expect(page, number("smoothed DTW"), float(sx.losses.SoftDTW(0.2)(*pair)))
        assert (drawings(page) != before) == moved


@pytest.mark.parametrize("width", WIDTHS)
def test_estimators(visit: Visit, width: int) -> None:
    page = visit("estimators", width)
    keep(page, f"estimators-{width}")
    for sharpness in (1.0, 0.7):
        before = drawings(page)
        press(page, 0, "ArrowLeft", round(10 * (1 - sharpness)))
        found = estimators.compare(
            "choice of 4", "quadratic", sharpness, ["spigot", "straight-through"], 2
        )
        for record in found.records:
            row = page.locator(f'tr[data-row="{record["estimator"]}"]').filter(
                has_text=record["against"]
            )
            playwright.expect(row.locator('td[data-column="bias"]')).to_have_text(
                html.show(record["bias"]), timeout=SECONDS * 1000
            )
        assert (drawings(page) != before) == (sharpness != 1.0)


@pytest.mark.parametrize("width", WIDTHS)
def test_model(visit: Visit, run: Path, width: int) -> None:
    page = visit("model", width)
    shown = page.locator(".sx-title")
    playwright.expect(shown).to_have_text(model.answer(str(run), model.EXAMPLES["listops"])["text"])
    keep(page, f"model-{width}")
    field = page.locator("marimo-text input")
    field.fill(LINE)
    field.press("Enter")
    found = model.answer(str(run), LINE)
    playwright.expect(shown).to_have_text(found["text"], timeout=SECONDS * 1000)
    words = page.locator(".sx-page svg text").all_text_contents()
    assert words == LINE.split()
    field.fill("[MAX <b>")
    field.press("Enter")
    playwright.expect(page.locator(".sx-message")).to_contain_text("<b>", timeout=SECONDS * 1000)


def test_pages_are_reached_by_their_buttons(visit: Visit) -> None:
    page = visit("structures", 400)
    page.get_by_role("button", name="Time warping").click()
    playwright.expect(page.locator(number("DTW"))).to_be_visible(timeout=SECONDS * 1000)
    assert "page=dtw" in page.url and "token" not in page.url
    page.get_by_role("button", name="Simplex").click()
    expect(page, cell("argmax", "c"), 1.0)
    playwright.expect(page.locator(number("DTW"))).to_have_count(0)


@pytest.mark.parametrize("name", ["structures", "simplex", "estimators"])
def test_dark(visit: Visit, name: str) -> None:
    """Text is light on dark, in pictures as well."""
    page = visit(name, 1280, "dark")
    keep(page, f"{name}-dark")
    colours = page.evaluate(
        "['.sx-page svg text', 'td', '#App'].map(s => getComputedStyle(document.querySelector(s)))"
        ".map((style, i) => i < 2 ? style[i ? 'color' : 'fill'] : style.backgroundColor)"
    )
    sums = [_lightness(page, colour) for colour in colours]
    assert sums[0] > 150 and sums[1] > 150 and sums[2] < 60, colours


def _lightness(page: Any, colour: str) -> float:
    """The mean of red, green and blue, 0 to 255, of any colour that CSS can write."""
    return page.evaluate(
        "colour => { const c = document.createElement('canvas').getContext('2d');"
        "c.fillStyle = colour; c.fillRect(0, 0, 1, 1);"
        "return c.getImageData(0, 0, 1, 1).data.slice(0, 3).reduce((a, b) => a + b) / 3 }",
        colour,
    )


def test_what_is_written_is_only_text(visit: Visit) -> None:
    attack = "<script>window.hit=1</script> <img/src=x/onerror=window.hit=1> <b>bold</b>"
    page = visit("structures", 400)
    for kind in ("binary tree", "chain of tags", "assignment", "choice"):
        page.locator("marimo-dropdown select").first.select_option(label=kind)
        first = problem(kind, KINDS[kind].text, KINDS[kind].other or "")
        expect(page, number("entropy"), float(first.make(first.scores, None).entropy()))
        fields = page.locator("marimo-text input")
        for i in range(fields.count()):
            fields.nth(i).fill(attack)
            fields.nth(i).press("Enter")
        start = problem(kind, attack, attack)
        value = float(start.make(start.scores, None).log_partition())
        expect(page, number("log-partition A"), value)
        for picture in page.locator(".sx-page svg").all():
            playwright.expect(picture).to_contain_text("<b>bold</b>", timeout=SECONDS * 1000)
    assert page.evaluate("window.hit") is None
    assert page.locator(".sx-page script, .sx-page img, .sx-page b").count() == 0
