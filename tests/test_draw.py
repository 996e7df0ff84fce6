"""Drawings: every structure has one, it is well-formed, and text cannot break it."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import torch
from table import ROWS, projective

import structmax as sx
from structmax.draw import (
    Drawing,
    beside,
    diagnosis_svg,
    heat_svg,
    lines_svg,
    page,
    simplex_svg,
    tree_svg,
    tree_text,
)
from structmax.draw.structure import WHAT
from structmax.draw.svg import BLUE, GREEN, ORANGE, Canvas, width

SVG = "{http://www.w3.org/2000/svg}"
HEBREW, CHINESE = ["הילד", "אכל", "תפוח"], ["我", "喜欢", "语言"]


def parsed(drawing: Drawing) -> ET.Element:
    root = ET.fromstring(drawing)
    assert root.tag == f"{SVG}svg"
    assert "nan" not in drawing and "inf" not in drawing.replace("infinite", "")
    return root


def words(drawing: Drawing) -> list[ET.Element]:
    return parsed(drawing).findall(f".//{SVG}text")


def place(drawing: Drawing, text: str) -> float:
    (found,) = [w for w in words(drawing) if w.text == text]
    return float(found.attrib["x"])


def dependency(n: int) -> sx.DependencyTree:
    torch.manual_seed(0)
    return sx.DependencyTree(torch.randn(n + 1, n + 1))


class Even(torch.nn.Module):
    """Shifts and reduces alike."""

    def start(self, inputs, lengths):
        return torch.zeros(len(inputs), 2)

    def scores(self, state):
        return state

    def advance(self, state, action):
        return state


@pytest.mark.parametrize("name", [name for name in ROWS if name.split("/")[1] != "shannon-0.5"])
def test_every_structure_draws(name):
    torch.manual_seed(0)
    structure = ROWS[name]()
    item = structure[0] if structure.batch_shape else structure
    drawn = 0
    for what in (None, *WHAT):
        query = {"top": "ranked_support", None: "argmax"}.get(what, what)
        if item.supports(query):
            parsed(item.draw(what=what))
            drawn += 1
        else:
            with pytest.raises(sx.IntractableError):
                item.draw(what=what)
    assert drawn >= 3


def test_opacity_is_the_marginal():
    tree = dependency(3)
    mean = tree.marginals()
    drawn = tree.draw(["a", "b", "c"])
    found = {
        path.find(f"{SVG}title").text: path.attrib["stroke-opacity"]
        for path in parsed(drawn).iter(f"{SVG}path")
        if path.find(f"{SVG}title") is not None
    }
    assert len(found) == 9
    for head, word in ((2, 1), (0, 3)):
        p = float(mean[head, word])
        title = f"{'root' if head == 0 else 'abc'[head - 1]} → {'abc'[word - 1]}: {p:.3f}"
        assert float(found[title]) == pytest.approx(max(p, 0.06), abs=0.006)


def test_sparsemap_and_top_say_their_probabilities():
    tree = dependency(4)
    result = tree.sparsemap()
    captions = [w.text for w in words(tree.draw(what="sparsemap", k=9)) if "p = " in w.text]
    chances = sorted((p for p in result.probs.tolist() if p > 0), reverse=True)
    assert captions == [f"p = {p:.3f}" for p in chances[:9]]
    best = tree.log_prob(tree.topk(2).structures).exp().tolist()
    captions = [w.text for w in words(tree.draw(what="top", k=2)) if "p = " in w.text]
    assert captions == [f"p = {p:.3f}" for p in best]


def test_text_is_escaped():
    bad = ["<script>alert(1)</script>", "a&b\"'", "\x00\x1b\ud800]]>"]
    pair = (bad, bad)
    pictures = [
        dependency(3).draw(bad),
        sx.BinaryTree(torch.zeros(3, 3)).draw(bad, "argmax"),
        sx.BinaryTree(torch.zeros(3, 3)).draw(bad),
        sx.LinearChain(torch.zeros(3, 3), torch.zeros(3, 3)).draw(bad, labels=bad),
        sx.SemiMarkov(torch.zeros(3, 2, 3)).draw(bad, labels=bad),
        sx.Alignment(torch.zeros(3, 3)).draw(pair),
        sx.Assignment(torch.zeros(3, 3)).draw(pair, "top"),
        sx.SpanningTree(torch.zeros(3, 3)).draw(bad),
        sx.Choice(torch.zeros(3)).draw(bad),
        sx.KSubset(torch.zeros(3), 2).draw(bad, "top"),
        beside([(bad[0], tree_svg(bad, [(0, 1), (0, 2)]))]),
    ]
    for picture in pictures:
        assert "<script" not in picture
        assert any("<script>" in (w.text or "") for w in words(picture))
        picture.encode("utf-8")  # no half of a character is left
    html = page("<script>", [("<script>", pictures[0])])
    assert "<script" not in html


def test_right_to_left():
    drawn = dependency(3).draw(HEBREW)
    places = [place(drawn, word) for word in HEBREW]
    assert places == sorted(places, reverse=True)
    assert all(w.attrib["direction"] == "rtl" for w in words(drawn))
    chain = sx.LinearChain(torch.zeros(3, 2), torch.zeros(2, 2)).draw(HEBREW, labels=["X", "Y"])
    assert place(chain, "X") > place(chain, HEBREW[0]) > place(chain, HEBREW[2])
    # a name on the left of a heat map ends there, whatever its direction
    (name,) = [w for w in words(heat_svg([[1.0]], HEBREW[:1])) if w.text == HEBREW[0]]
    assert name.attrib["text-anchor"] == "start" and float(name.attrib["x"]) < 0


def test_wide_characters_take_more_room():
    wide = tree_svg(["語" * 10, "語" * 10], [(0, 1)])
    narrow = tree_svg(["x" * 10, "x" * 10], [(0, 1)])
    assert wide.size[0] > 1.4 * narrow.size[0]
    drawn = sx.BinaryTree(torch.zeros(3, 3)).draw(CHINESE, "argmax")
    assert [w.text for w in words(drawn)] == CHINESE
    assert all("direction" not in w.attrib for w in words(drawn))


def test_long_sentences_stay_legible():
    sentence = [f"word{i}" for i in range(60)]
    torch.manual_seed(0)
    scores = 6 * torch.randn(61, 61)
    for drawn in (
        sx.DependencyTree(scores).draw(sentence),
        sx.DependencyTree(scores, projective=True).draw(sentence, "sparsemap"),
        sx.BinaryTree(scores[:60, :60]).draw(sentence),
    ):
        width, height = drawn.size
        assert width > 60 * 6 * 8 and height < 5000
        assert 'style="max-width:none"' in drawn  # a page scrolls, it does not shrink it
        sizes = [float(x) for x in re.findall(r'font-size="([\d.]+)"', drawn)]
        assert min(sizes) >= 10
        box = [float(x) for x in re.search(r'viewBox="([^"]*)"', drawn)[1].split()]
        assert box[2:] == pytest.approx([width, height], abs=0.6)  # a pixel is a pixel


def test_no_two_words_overlap():
    sentence = ["a", "extraordinarily", "語語語語", "i", "é" * 12]
    drawn = dependency(5).draw(sentence, "argmax")
    ends = [(place(drawn, w) - width(w) / 2, place(drawn, w) + width(w) / 2) for w in sentence]
    assert all(a[1] < b[0] for a, b in pairwise(ends))
    left, _, wide, _ = map(float, re.search(r'viewBox="([^"]*)"', drawn)[1].split())
    assert left < ends[0][0] and ends[-1][1] < left + wide


def test_a_batch_asks_for_an_item():
    ragged = projective(2, 5, 5, length=None)(sx.Shannon())
    ragged = sx.DependencyTree(ragged.scores, torch.tensor([4, 2]), projective=True)
    with pytest.raises(ValueError, match=r"batch_shape is \(2,\).*structure\[0\]"):
        ragged.draw()
    assert [w.text for w in words(ragged[1].draw(["x", "y"]))] == ["x", "y"]
    assert ragged[:1].draw() == ragged[0].draw()  # one item may keep its dimension
    with pytest.raises(ValueError, match="tokens must be a sequence of 2 names, got 4"):
        ragged[1].draw(list("abcd"))


def test_bad_arguments():
    choice = sx.Choice(torch.zeros(3))
    with pytest.raises(ValueError, match=r"what must be one of marginals, .*got 'mode'"):
        choice.draw(what="mode")
    with pytest.raises(ValueError, match="k must be an integer, at least 1, got 0"):
        choice.draw(k=0)
    with pytest.raises(ValueError, match="tokens must be a sequence of 3 names, got 'abc'"):
        choice.draw("abc")
    with pytest.raises(ValueError, match="tokens must be a sequence of 3 names, got 2"):
        choice.draw(["a", "b"], "top")
    with pytest.raises(ValueError, match="tokens must be a pair"):
        sx.Alignment(torch.zeros(3, 3)).draw(["a", "b", "c"])
    with pytest.raises(ValueError, match=r"labels must be a sequence of 2 names, got 1"):
        sx.LinearChain(torch.zeros(3, 2), torch.zeros(2, 2)).draw(labels=["X"])


def test_spans_that_are_no_binary_tree():
    words = ["a", "b", "c"]
    assert tree_text(words, [(0, 1), (0, 2)]) == "┬┬─ a\n│└─ b\n└─ c"
    for spans, wrong in (
        ([(0, 1), (0, 3)], r"span \(0, 3\) is outside a sentence of 3 words"),
        ([(0, 2)], r"span \(0, 2\) is not made of two others"),
        ([(0, 1)], "3 words need 2 inner spans, got 1"),
    ):
        with pytest.raises(ValueError, match=wrong):
            tree_text(words, spans)


def test_where_marginals_are_intractable():
    torch.manual_seed(0)
    large = sx.Assignment(torch.randn(20, 20))
    assert parsed(large.draw()) is not None  # the best one
    assert large.draw() == large.draw(what="argmax")
    assert "score" in large.draw(what="top", k=2)  # no probabilities, but scores
    with pytest.raises(sx.IntractableError):
        large.draw(what="marginals")


def test_policies_draw_the_greedy_tree():
    trees = sx.ShiftReduce(Even(), torch.zeros(2, 3, 1), lengths=torch.tensor([3, 2]))
    assert [w.text for w in words(trees[0].draw(list("abc")))] == ["a", "b", "c"]
    assert len(words(trees[1].draw(["a", "b"]))) == 2
    assert "p = 0.500" in trees[0].draw(what="top")
    with pytest.raises(sx.IntractableError):
        trees[0].draw(what="marginals")


def test_graph_is_left_alone():
    scores = torch.randn(4, 4, requires_grad=True)
    sx.DependencyTree(scores).draw(what="sparsemap")
    assert scores.grad is None


def test_colours_are_readable_in_light_and_dark():
    def light(colour: str) -> float:  # relative luminance, WCAG 2
        x = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        x = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in x]
        return 0.2126 * x[0] + 0.7152 * x[1] + 0.0722 * x[2]

    for colour in (BLUE, ORANGE, GREEN):
        for ground in ("#ffffff", "#131416"):
            low, high = sorted((light(colour), light(ground)))
            assert (high + 0.05) / (low + 0.05) > 4, (colour, ground)


def test_notebooks_and_files(tmp_path):
    drawn = Canvas().text(0, 0, "é").drawing()
    assert drawn._repr_svg_() == drawn and "overflow-x:auto" in drawn._repr_html_()
    drawn.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == drawn
    assert repr(drawn).startswith("Drawing(") and "<svg" not in repr(drawn)


def test_import_stays_light():
    code = "import structmax, sys; assert not [m for m in sys.modules if 'structmax.draw' in m]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_maps_on_the_simplex():
    x = torch.tensor([1.0, 0.7, 0.0]) / torch.linspace(3, 0.1, 20)[:, None]
    paths = {"<soft>": sx.softmax(x), "sparse": sx.sparsemax(x), "here": torch.eye(3)[1]}
    drawn = simplex_svg(paths, ["a", "b", "c"])
    root = parsed(drawn)
    assert [w.text for w in words(drawn)] == ["a", "b", "c", *paths]
    moving = root.findall(f".//{SVG}animateMotion")
    assert len(moving) == 2 and all(m.attrib["path"].endswith("L0.0,0.0") for m in moving)
    assert all(m.attrib["fill"] == "freeze" for m in moving)  # goes once, and stays
    discs = [c for c in root.iter(f"{SVG}circle") if c.attrib["r"] == "6.5"]
    spots = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in discs]
    assert spots[2] == (340.0, 0.0)  # the corner of b
    assert spots[1] == (0.0, 0.0) and spots[0][0] < 20  # cold: the best of the three
    assert "<animateMotion" not in simplex_svg(paths, move=False)
    with pytest.raises(ValueError, match=r"sparse must have distributions .* got shape \(2, 2\)"):
        simplex_svg({"sparse": torch.eye(2)})
    with pytest.raises(ValueError, match=r"got others\. Take the softmax"):
        simplex_svg({"scores": torch.tensor([1.0, 2.0, 3.0])})
    with pytest.raises(ValueError, match="names must be three, got 2"):
        simplex_svg({}, ["a", "b"])


def test_bias_and_variance():
    rows = [
        ("unbiased", "E[L(z)]", "E[L(z)]", 0.3, 0.2, 4.0),
        ("exact <&>", "E[L(z)]", "E[L(z)]", 0.0, 0.0, 0.0),
        ("surrogate", "L(argmax)", "E[L(z)]", math.inf, 0.0, 0.0),
    ]
    keys = ("estimator", "objective", "against", "bias", "error", "variance")
    drawn = diagnosis_svg([dict(zip(keys, row)) for row in rows])
    shown = [w.text for w in words(drawn)]
    assert {"unbiased", "exact <&>", "surrogate", "≤ 0.001", "10"} <= set(shown)
    assert shown.index("of L(argmax), compared with E[L(z)]") < shown.index("surrogate")
    fills = {p.find(f"{SVG}title").text: p.attrib["fill"] for p in parsed(drawn).iter(f"{SVG}path")
             if p.find(f"{SVG}title") is not None}  # fmt: skip
    assert fills["bias 0.3 ± 0.2"] == "none"  # twice its error is more
    assert fills["bias ∞ ± 0"] == ORANGE
    at = [float(square.attrib["x"]) for square in parsed(drawn).iter(f"{SVG}rect")]
    assert at[0] - at[1] == pytest.approx(75 * math.log10(2 / 1e-3), abs=0.2)  # 75 pixels a decade
    assert diagnosis_svg([]).size[0] > 0
    found = sx.diagnose(sx.Choice(torch.zeros(2)), lambda z: z[..., 0], ["marginals"], samples=2)
    assert "marginals" in found.draw()


def test_a_drawing_is_an_svg_file(tmp_path):
    drawn = dependency(2).draw()
    for name in ("tree.png", "tree"):
        with pytest.raises(ValueError, match=r"Name it tree\.svg"):
            drawn.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_curves():
    curves = {"<up>": [0.0, 1.0, 2.0], "hole": [2.0, math.nan, 0.0], "flat": [1.0, 1.0, 1.0]}
    drawn = lines_svg([0, 1, 2], curves, "x", "y")
    titled = [p for p in parsed(drawn).iter(f"{SVG}path") if p.find(f"{SVG}title") is not None]
    assert [p.find(f"{SVG}title").text for p in titled] == ["<up>", "hole", "hole", "flat"]
    assert titled[0].attrib["d"] == "M0.0,200.0 L180.0,100.0 L360.0,0.0"
    assert {"<up>", "hole", "flat", "x", "y", "0", "1", "2"} <= {w.text for w in words(drawn)}
    styles = {(p.attrib["stroke"], p.attrib["stroke-dasharray"]) for p in titled}
    assert len(styles) == len(curves)
    decades = words(lines_svg([0, 1], {"a": [1e-3, 1.0], "b": [0.0, 10.0]}, log=True))
    assert {"0.001", "0.1", "10"} <= {w.text for w in decades}
    assert parsed(lines_svg([0, 1], {"same": [3.0, 3.0]})) is not None
    with pytest.raises(ValueError, match="one value for each of the 2 of x, got 1"):
        lines_svg([0, 1], {"a": [1.0]})
    with pytest.raises(ValueError, match="draws 1 to 12 curves, got 0"):
        lines_svg([0, 1], {})
    for x, y in (([1, 1], [0.0, 1.0]), ([0, 1], [math.nan, math.inf])):
        with pytest.raises(ValueError, match="needs two places and a finite value"):
            lines_svg(x, {"a": y})
