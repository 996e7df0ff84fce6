"""Pictures of what trained models answer."""

import xml.etree.ElementTree as ET

import pytest

from structmax.draw import answer_svg, heat_svg


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ({"words": ["a", "b"], "spans": [(0, 1)]}, {"a", "b"}),
        ({"words": ["a", "b"], "heads": [2, 0], "labels": ["det", "top"]}, {"a", "b", "det"}),
        (
            {"words": ["a", "b"], "heads": [2, 0], "trees": [{"heads": [2, 0], "probability": 1}]},
            {"p = 1.000"},
        ),
        ({"words": ["a", "b"], "arcs": [(0, 1), (0, 2), (2, 1)]}, {"a", "b"}),
        ({"words": ["a"], "choices": [{"X": 0.9, "Y": 0.1}]}, {"a", "X", "Y"}),
        ({"words": ["a"], "source": ["x"], "attention": [{"0": 1.0}]}, {"a", "x"}),
        ({"premise": ["a"], "hypothesis": ["b"], "weights": [[1.0]]}, {"a", "b"}),
        ({"cells": [[0, 0], [1, 1]]}, set()),
        ({"words": ["a", "b"], "chosen": [1]}, {"a", "b"}),
        ({"words": [3, 4], "tags": [1, 0]}, {"3", "4", "0", "1"}),
        ({"class": "walk", "distances": [2.0, 0.5]}, {"class 0", "2", "class 1", "0.5"}),
    ],
)
def test_answers_of_models(answer, texts):
    drawn = ET.fromstring(answer_svg(answer))
    assert texts <= {w.text for w in drawn.iter("{http://www.w3.org/2000/svg}text")}


def test_cells_are_of_a_grid():
    """The whole map is drawn, whatever is marked."""
    for cells in ([], [[0, 1]]):
        drawn = answer_svg({"cells": cells, "shape": [2, 3]})
        assert drawn.count("<rect") == 6 and drawn.count('fill-opacity="0"') == 6 - len(cells)
    ET.fromstring(answer_svg({"cells": []}))


def test_numbers_in_cells():
    drawn = ET.fromstring(heat_svg([[1.0, 0.999, 0.25]], numbers=True))
    written = [w.text for w in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert written == ["1.00", "1.00", ".25"]
