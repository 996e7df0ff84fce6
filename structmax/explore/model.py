"""The page of a trained model: write a line, and see what a run finds in it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from structmax.draw import answer_svg
from structmax.explore import html

TITLE = "Model"
ABOUT = "Write a line as the task of the run has it: a ListOps expression, a sentence, a picture."
LONGEST = 2000  # letters
LONGEST_PICTURE = 20_000  # in JSON
EXAMPLES = {
    "explain": "a warm and funny film , if a little long",
    "listops": "[MAX 2 9 [MIN 4 7 ] 0 ]",
    "nli": "a man plays a guitar on the street .\ta man makes music .",
    "parse": "she saw the man with the telescope",
    "semdep": "she wants to buy and read the book",
    "seq2seq": "ein mann fährt auf einem fahrrad .",
    "sst": "a warm and funny film",
    "tag": "Ada Lovelace lives in London .",
}
LEGENDS = {
    "gold": "Solid: nodes that the brackets of the line have too; dashed: nodes that they do not.",
    "trees": "The most probable trees that SparseMAP selects, with their probabilities.",
    "arcs": "Arcs from heads to words.",
    "heads": "Arcs from heads to words.",
    "choices": "Darker: a more probable tag of the word.",
    "attention": "Rows: words that are written; columns: words of the source. Darker: more weight.",
    "weights": "Rows: words of the second sentence; columns: of the first. Darker: more weight.",
    "cells": "Dark: the tiles of the path, from the first corner to the last.",
    "chosen": "Full: words that are chosen, which are all that the reader sees.",
    "distances": "How far the series is from the average of each class.",
    "tags": "The tag of each word.",
}
"""What a picture shows, by the first of these entries that the answer has."""


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
    model = trained(run)
    most = LONGEST_PICTURE if model.task.name == "path" else LONGEST
    if len(line) > most:
        raise ValueError(f"a line may have {most} letters, got {len(line)}.")
    with torch.no_grad():
        (found,) = model.task.predict(model.model, [line])
        return {**found, **model.task.details(model.model, found)}


def example(run: str) -> str:
    """A line to begin with, as the task of the run has it."""
    task = trained(run).task
    if task.name == "toy":
        return " ".join(str(i % task.facts["words"]) for i in (0, 1, 1, 2, 3, 0))
    if task.name == "align":  # a step
        n, d = task.facts["shape"]
        return ":".join([",".join(str(int(i > n // 2)) for i in range(n))] * d)
    if task.name == "path":
        from structmax.train.tasks.path import generate

        return str(task.line(generate(1, side=4)[0]))
    return EXAMPLES[task.name]


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
    legend = ""
    if drawn is not None:
        picture = [html.figure("", drawn)]
        legend = next((text for name, text in LEGENDS.items() if name in found), "")
    run = trained(values["run"])
    said = {"task": run.task.name, "trained for": f"{run.step} updates"}
    if "right" in found:  # known of an expression
        said = {"the answer is": "right" if found["right"] else "wrong", **said}
    return html.page(html.section("model", found["text"], picture, legend), html.numbers(said))
