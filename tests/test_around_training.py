"""Around networks and runs: failed backward passes, transformations, empty items, odd options."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import structmax as sx
from structmax import cli
from structmax.compat import torch_struct
from structmax.data import Trees, collate, listops
from structmax.data.words import Vocabulary, facts
from structmax.nn import (
    ChildSumTreeLSTM,
    GatedRecursiveCell,
    SemanticGraph,
    StructuredAttention,
    TreeClassifier,
    WordEncoder,
)
from structmax.nn.pool import Pool
from structmax.train import Trainer, UserError, tree_f1
from structmax.train.metrics import Ratio, read_log
from structmax.train.tasks.toy import Toy, ToyConfig

HEADS, LENGTHS = torch.tensor([[2, 0, 2], [0, 1, 0]]), torch.tensor([3, 2])

# -- networks --------------------------------------------------------------------------------------


def test_backward_passes_through_one_pool_at_the_same_time() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    pool = Pool(x)
    for _ in range(30):
        pool.write(pool.read(torch.tensor([0])) * 1.0)
    out = pool.read(torch.arange(32)).sum()
    found: list[Tensor] = []

    def run() -> None:
        found.append(torch.autograd.grad(out, x, retain_graph=True)[0])

    for _ in range(10):
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 20 and all(torch.equal(g, found[0]) for g in found)
    assert found[0].tolist() == [[31.0] * 3, [1.0] * 3]


def test_a_backward_pass_that_failed_leaves_nothing_in_a_pool() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    pool = Pool(x)
    middle = pool.read(torch.tensor([0])) * 1.0
    read = pool.read(pool.write(middle))

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    hook = middle.register_hook(fail)
    with pytest.raises(ArithmeticError):
        read.sum().backward(retain_graph=True)
    hook.remove()
    for _ in range(2):
        (found,) = torch.autograd.grad(read.sum(), x, retain_graph=True)
        torch.testing.assert_close(found, torch.tensor([[1.0] * 3, [0.0] * 3]))


def test_gated_cells_go_backward_inside_autocast() -> None:
    torch.manual_seed(0)
    cell, leaves = GatedRecursiveCell(4), torch.randn(4, 4, requires_grad=True)
    pairs = [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5]])]
    inputs = [leaves, *cell.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = cell.compose_levels(leaves, pairs).pow(3).sum()
        found = torch.autograd.grad(loss, inputs, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(loss, inputs), rtol=0, atol=0)


def test_networks_along_dependency_trees_under_transformations() -> None:
    torch.manual_seed(0)
    encoder, words = ChildSumTreeLSTM(4, 5), torch.randn(2, 3, 4)

    def loss(words: Tensor, heads: Tensor = HEADS) -> Tensor:
        return encoder(words, heads, LENGTHS).pow(2).sum()

    leaf = words.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(words), expected)
    each = torch.func.vmap(torch.func.grad(loss))(torch.stack([words, 2 * words]))
    torch.testing.assert_close(each[0], expected)
    with pytest.raises(ValueError, match=r"ChildSumTreeLSTM: heads cannot be mapped .* as a batch"):
        torch.func.vmap(loss, (None, 0))(words, torch.stack([HEADS, HEADS]))


@pytest.mark.parametrize("encoder", ["spinn", "easy-first", "balanced", "chart"])
def test_gradients_of_a_function_that_follows_trees(encoder: str) -> None:
    torch.manual_seed(0)
    batch = collate([listops.parse("[MAX 2 9 ]"), listops.parse("[SM [MIN 3 4 ] 8 ]")])
    model = TreeClassifier(len(listops.VOCABULARY), 10, encoder, hidden_size=8).eval()
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        given = batch.tokens, batch.lengths
        return torch.func.functional_call(model, weights, given).logsumexp(-1).sum()

    found = torch.func.grad(loss)({name: w.detach() for name, w in weights.items()})
    loss(weights).backward()
    for name, weight in weights.items():
        expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize("kind", ["chain", "projective", "nonprojective"])
def test_structured_attention_is_made_without_memory(kind: str) -> None:
    with torch.device("meta"):
        attention = StructuredAttention(kind, 4)
        with pytest.raises(ValueError, match=r"x is on the meta device.* to_empty"):
            attention(torch.zeros(2, 3, 4))
    given = StructuredAttention(kind, 4)
    attention.to_empty(device="cpu").load_state_dict(given.state_dict())
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(attention(x), given(x))


@pytest.mark.parametrize("divergence", [False, True])
def test_averages_of_series_in_inference_mode(divergence: bool) -> None:
    series = torch.randn(3, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss, lengths = sx.losses.SoftDTW(divergence=divergence), torch.tensor([5, 4, 3])
    expected = sx.barycenter(series, loss=loss, lengths=lengths, max_iter=3)
    with torch.inference_mode():
        given = series.clone(), torch.ones(3, dtype=torch.float64) / 3  # now inference tensors
        found = sx.barycenter(*given, loss=loss, lengths=lengths.clone(), max_iter=3)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("sentences", "said"),
    [
        ([["a", "cat"], []], "item 1 has no words"),
        ([[]], "item 0 has no words"),
        ([["cat"], ["a", ""]], "word 1 of item 1 has no letters"),
    ],
    ids=str,
)
def test_words_that_are_not_there(sentences: list[list[str]], said: str) -> None:
    names = facts([["a", "cat"]], least_count=1)
    encoder = WordEncoder(names, word_size=4, char_size=3, hidden_size=5)
    with pytest.raises(ValueError, match=f"WordEncoder: {said}"):
        encoder(Vocabulary(names).collate(sentences))


def test_heads_that_are_not_there() -> None:
    model, words = SemanticGraph(9, "given", 4, 4), torch.tensor([[3, 4, 5], [6, 7, 0]])
    heads = HEADS.clone()
    heads[1, 2] = -7  # padding
    assert model(words, LENGTHS, heads=heads).scores.shape == (2, 4, 4)
    heads[1, 1] = 3
    with pytest.raises(ValueError, match=r"between 0 and 2, got 3 for word 2 of item 1"):
        model(words, LENGTHS, heads=heads)
    with pytest.raises(ValueError, match=r"heads must be \(2, 3\), got \(2, 2\)"):
        model(words, LENGTHS, heads=heads[:, :2])


def test_names_of_torch_struct_that_are_not_here() -> None:
    with pytest.raises(ImportError, match=r"LinearChain is not in .* Use LinearChainCRF"):
        from structmax.compat.torch_struct import LinearChain  # noqa: F401
    with pytest.raises(ImportError, match=r"MaxSemiring is not in .* smoothing"):
        torch_struct.MaxSemiring  # noqa: B018
    assert not hasattr(torch_struct, "Unheard")


# -- runs ------------------------------------------------------------------------------------------


def small(**changes: Any) -> ToyConfig:
    return ToyConfig(**{"steps": 4, "batch_size": 8, "examples": 16, "eval_every": 1, **changes})


class Undefined(Toy):
    """Without a measure at its second and third look; the fourth is the best."""

    def __init__(self) -> None:
        super().__init__()
        self.found = iter([0.1, math.nan, math.nan, 0.2, math.nan])

    def evaluate(self, model: Any, batches: Any) -> Any:
        found = next(self.found)
        return {"accuracy": Ratio(found, 1.0) if found == found else Ratio(0.0, 0.0)}


def test_measures_of_nothing_are_null_and_never_the_best(tmp_path: Path) -> None:
    result = Trainer(Undefined(), small(), tmp_path, silent=True).fit()
    assert result["best_step"] == 4 and math.isnan(result["test"]["accuracy"])
    looks = [line["accuracy"] for line in read_log(tmp_path) if line["kind"] == "valid"]
    assert looks == [0.1, None, None, 0.2]
    assert json.loads((tmp_path / "result.json").read_text())["test"] == {"accuracy": None}


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["align", "induce"])
def test_a_comparison_is_a_run_like_the_others(tmp_path: Path, capsys, name: str) -> None:
    """It is locked; --resume of a finished one is its result; only --fresh loses that."""
    pytest.importorskip("fcntl")
    out = tmp_path / "run"
    quick = {"align": ["--gammas=1", "--iterations=1"], "induce": ["--pictures=1"]}[name]
    train = ["train", name, "--device=cpu", f"--out={out}"]
    assert cli.main([*train, *quick]) == 0
    first = json.loads(capsys.readouterr().out)
    written = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert {"result.json", "table.md", ".lock"} <= written.keys()
    for again in (train, [*train, *quick]):
        assert cli.main([*again, "--resume"]) == 0
        assert json.loads(capsys.readouterr().out) == first
    other = {"align": "--folds=2", "induce": "--most-words=9"}[name]
    assert cli.main([*train, "--resume", other]) == 2
    assert "cannot go on with" in capsys.readouterr().err
    command = [sys.executable, "-c", HOLD, str(out / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        for flag in ("--resume", "--fresh"):
            assert cli.main([*train, flag]) == 2
            assert "another process is training in" in capsys.readouterr().err
        holder.communicate(b"")
    assert written == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    (out / "result.json").write_text("[]")
    assert cli.main([*train, "--resume"]) == 2 and "is damaged" in capsys.readouterr().err
    (out / "result.json").unlink()  # as where it was killed: begun again
    assert cli.main([*train, "--resume"]) == 0


def test_one_process_trains_in_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    Trainer(Toy(), small(steps=2), tmp_path, silent=True).fit()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        for resume in (True, False):
            with pytest.raises(UserError, match=r"another process is training in .* --out"):
                Trainer(Toy(), small(), tmp_path, resume, silent=True)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        other.kill()
    assert Trainer(Toy(), small(), tmp_path, True, silent=True).fit()["steps"] == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("listops --beam 0", "beam must be at least 1, got 0"),
        ("parse --max-iter 0", "max_iter must be at least 1, got 0"),
        ("parse --layers 0", "layers must be at least 1, got 0"),
        ("nli --max-iter 0", "max_iter must be at least 1, got 0"),
        ("path --samples 0", "samples must be at least 1, got 0"),
        ("path --valid-examples 0", "valid_examples must be at least 1, got 0"),
        ("seq2seq --alpha 0.5", "alpha must be at least 1, got 0.5"),
        (
            "listops --examples 9 --encoder cky --estimator sparse-expectation:max_iter=0",
            "max_iter must be at least 1",
        ),
    ],
    ids=str,
)
def test_options_out_of_range_are_told_before_training(
    options: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--steps", "1", "--out", str(tmp_path / "run")]
    assert cli.main(["train", *options.split(), *run]) == 2
    *before, error = capsys.readouterr().err.splitlines()
    assert said in error
    # options of estimators are those of a model, which is made after its data
    late = [f"{options.split()[0]}: preparing the data"] if "--estimator" in options else []
    assert before == late
    assert not (tmp_path / "run").exists()


def test_random_trees_are_the_same_in_any_batch() -> None:
    gold = Trees.random([5, 2, 9, 7, 3], seed=1)
    parts: list[Callable[[], list[Trees]]] = [
        lambda: [gold],
        lambda: [gold[:2], gold[2:]],
        lambda: [gold[i : i + 1] for i in (4, 2, 0, 1, 3)],
    ]
    found = [
        sum((tree_f1(part, part)["f1_random"] for part in cut()), Ratio(0.0, 0.0)) for cut in parts
    ]
    assert found[0] == pytest.approx(found[1]) and found[0] == pytest.approx(found[2])
    other = tree_f1(gold, gold, seed=1)["f1_random"]
    assert other.value != found[0].value
