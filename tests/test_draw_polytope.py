"""The picture of a marginal polytope."""

import xml.etree.ElementTree as ET

import pytest
import torch

import structmax as sx
from structmax.draw import polytope_svg

SVG = "{http://www.w3.org/2000/svg}"


def dots(drawing: str) -> list[ET.Element]:
    """The vertices."""
    return [c for c in ET.fromstring(drawing).iter(f"{SVG}circle") if c.attrib["r"] == "4.0"]


def test_polytope():
    simplex = sx.Choice(torch.tensor([0.7, 0.3, -0.1]))
    drawn = polytope_svg(simplex, cost=lambda z: (z * torch.tensor([2.0, 0.0, 1.0])).sum())
    said = [w.text for w in ET.fromstring(drawn).iter(f"{SVG}text")]
    assert {"argmax", "marginals", "SparseMAP", "straight-through", "SPIGOT", "0", "1"} <= {*said}
    assert "SPIGOT" not in polytope_svg(simplex)
    with pytest.raises(ValueError, match="allows 120 structures here, and a picture shows 1 to 60"):
        polytope_svg(sx.Assignment(torch.zeros(5, 5)))
    with pytest.raises(ValueError, match="one item"):
        polytope_svg(sx.Choice(torch.zeros(2, 3)))


@pytest.mark.parametrize(
    "structure",
    [
        sx.Choice(torch.zeros(1)),
        sx.Choice(torch.zeros(2)),
        sx.Choice(torch.tensor([0.0, 1.0, float("-inf"), 0.0])),
        sx.Assignment(torch.zeros(3, 3)),
        sx.DependencyTree(torch.zeros(4, 4)),
        sx.KSubset(torch.zeros(4), 2, smoothing=sx.Gini()),
        sx.GridPath(-torch.ones(2, 3), moves="all", smoothing=sx.Hard()),
    ],
)
def test_polytopes_of_all_dimensions(structure):
    drawn = polytope_svg(structure, cost=torch.ones(structure.event_shape))
    assert "nan" not in drawn
    scores = structure.score(structure.enumerate_support())
    assert len(dots(drawn)) == int((scores > float("-inf")).sum())


def test_a_batch_of_one_is_its_item():
    choice = sx.Choice(torch.tensor([[[0.3, 0.0, -0.2]]]))
    assert polytope_svg(choice) == polytope_svg(choice[0, 0])


def test_a_simplex_is_drawn_to_scale():
    drawn = polytope_svg(sx.Choice(torch.tensor([1.0, 0.0, 0.0])))
    points = torch.tensor([[float(c.attrib["cx"]), float(c.attrib["cy"])] for c in dots(drawn)])
    sides = torch.pdist(points)
    torch.testing.assert_close(sides, sides.mean().expand(3), atol=0.2, rtol=0)
    assert points[0, 1] < points[1:, 1].min()  # the argmax is at the top
