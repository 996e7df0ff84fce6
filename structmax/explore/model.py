"""The page of a trained model: write a line, and see what a run finds in it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from structmax.draw import answer_svg
from structmax.explore import html

TITLE = "Model"
ABOUT = "Write a line as the task of the run has it: a ListOps expression, a sentence."
LISTOPS = "[MAX 2 9 [MIN 4 7 ] 0 ]"
LONGEST = 2000  # letters


@lru_cache(maxsize=2)
def trained(run: str) -> Any:
    """The best weights of a run, on the CPU, read once."""
    import torch

    from structmax.train import run as runs

    return runs.load(Path(run), torch.device("cpu"))


def answer(run: str, line: str) -> dict[str, Any]:
    """What ``structmax predict`` says of one line."""
    import torch

    if not line.strip():
        raise ValueError("write something.")
    if len(line) > LONGEST:
        raise ValueError(f"a line may have {LONGEST} letters, got {len(line)}.")
    model = trained(run)
    with torch.no_grad():
        (found,) = model.task.predict(model.model, [line])
        return {**found, **model.task.details(model.model, found)}


def example(run: str) -> str:
    """A line to begin with."""
    return LISTOPS if trained(run).task.name == "listops" else "she saw the man"


# -- the page -------------------------------------------------------------------------------------


def write(ui: Any, values: dict[str, Any]) -> dict[str, Any]:
    if not values["run"]:
        return {}
    return {"line": ui.text(example(values["run"]), label="line", full_width=True)}


STAGES = (write,)


def view(values: dict[str, Any]) -> str:
    """The picture of the answer, and the answer itself."""
    if not values["run"]:
        return html.page(
            html.message("No run was given. Train one and come back with it:"),
            '<pre class="sx-wide">structmax train listops --out runs/listops\n'
            "structmax explore --run runs/listops --page model</pre>",
        )
    found = answer(values["run"], values["line"])
    drawn = answer_svg(found)
    picture = [html.message("There is nothing to draw in what this task predicts.")]
    if drawn is not None:
        picture = [html.figure("", drawn)]
    run = trained(values["run"])
    return html.page(
        html.section("model", found["text"], picture),
        html.numbers({"task": run.task.name, "trained for": f"{run.step} updates"}),
    )
