"""Every structure of the table on a CUDA device against the CPU, through its public queries."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from table import ROWS
from torch.distributions import kl_divergence

import structmax as sx

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("row", ROWS)
def test_queries_agree_with_the_cpu(row: str) -> None:
    torch.manual_seed(0)
    p, q = ROWS[row](), ROWS[row]()
    if not p.supports("marginals"):
        pytest.skip("argmax only")
    cp, cq = p.to("cuda"), q.to("cuda")

    def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert actual.device.type == "cuda"
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-9, atol=1e-9)

    same(cp.log_partition(), p.log_partition())
    same(cp.marginals(), p.marginals())
    same(cp.score(cp.argmax()), p.score(p.argmax()))
    same(cp.topk(3).scores, p.topk(3).scores)
    same(cp.max_marginals(), p.max_marginals())
    same(cp.entropy(), p.entropy())
    same(kl_divergence(cp, cq), kl_divergence(p, q))
    z = p.sample((5,))
    same(cp.log_prob(z.cuda()), p.log_prob(z))
    generator = torch.Generator("cuda").manual_seed(0)
    draws = cp.sample((4000,), generator=generator)
    again = cp.sample((4000,), generator=torch.Generator("cuda").manual_seed(0))
    assert torch.equal(draws, again)
    assert (draws.mean(0).cpu() - p.marginals()).abs().max() < 5 / math.sqrt(4000)


@pytest.mark.parametrize("row", [r for r in ROWS if not r.endswith("/hard")])
def test_gradients_agree_with_the_cpu(row: str) -> None:
    torch.manual_seed(0)
    s = ROWS[row]()
    names = [name for name, (t, _) in s._tensors().items() if t.is_floating_point()]
    out = []
    for device in ("cpu", "cuda"):
        tensors = {name: t.detach().to(device) for name, (t, _) in s._tensors().items()}
        leaves = [tensors[name].requires_grad_() for name in names]
        t = s._rebuild(**tensors)
        loss = (t.marginals() ** 2).sum() + t.log_partition().sum() + t.entropy().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), leaves)
        out.append([g.detach().cpu() for g in (*first, *second)])
    for a, b in zip(*out):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_default_stream_capture_and_compile() -> None:
    """A training step with our ops inside is captured and replayed, and compiled by inductor."""
    torch.manual_seed(0)
    unary = torch.randn(8, 12, 5, device="cuda")
    transition = torch.randn(5, 5, device="cuda")
    lengths = torch.randint(1, 13, (8,), device="cuda")

    def step(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chain = sx.LinearChain(u, transition, lengths=lengths)
        loss = (chain.marginals() ** 2).sum() - chain.log_partition().sum()
        (g,) = torch.autograd.grad(loss, u)
        return loss.detach(), g

    expected = step(unary.clone().requires_grad_())
    leaf = unary.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(leaf)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(leaf)
    with torch.no_grad():
        leaf.copy_(unary)
    graph.replay()
    for a, b in zip(captured, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    def loss_of(u: torch.Tensor) -> torch.Tensor:
        chain = sx.LinearChain(u, transition, lengths=lengths)
        return (chain.marginals() ** 2).sum() - chain.log_partition().sum()

    torch.compiler.reset()
    leaf = unary.clone().requires_grad_()
    loss = torch.compile(loss_of, fullgraph=True)(leaf)
    (g,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(loss, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(g, expected[1], rtol=1e-4, atol=1e-4)


def test_half_precision_and_crf() -> None:
    torch.manual_seed(0)
    crf = sx.nn.CRF(7, batch_first=True).cuda()
    emissions = torch.randn(4, 9, 7, device="cuda", dtype=torch.bfloat16)
    tags = torch.randint(7, (4, 9), device="cuda")
    mask = torch.ones(4, 9, dtype=torch.bool, device="cuda")
    mask[1, 5:] = False
    value = crf(emissions, tags, mask)
    on_cpu = crf.cpu()(emissions.cpu(), tags.cpu(), mask.cpu())
    torch.testing.assert_close(value.cpu(), on_cpu, rtol=1e-5, atol=1e-4)


def test_validation_on_the_device() -> None:
    scores = torch.randn(3, 4, 2, device="cuda")
    scores[1, 2, 0] = math.nan
    with pytest.raises(ValueError, match=r"unary\[1, 2, 0\] is nan"):
        sx.LinearChain(scores, torch.zeros(2, 2, device="cuda")).marginals()
    with pytest.raises(ValueError, match="transition is on cpu but unary is on cuda"):
        sx.LinearChain(scores, torch.zeros(2, 2))


@pytest.mark.parametrize("encoder", ["easy-first", "spinn"])
def test_recorded_searches_find_what_steps_find(encoder: str) -> None:
    from structmax.data import collate, listops
    from structmax.nn.classifier import TreeClassifier
    from structmax.structures import captured

    torch.manual_seed(0)
    model = TreeClassifier(len(listops.VOCABULARY), 10, encoder, hidden_size=16).cuda()
    batches = [collate(listops.generate(20, seed, max_length=40)) for seed in range(6)]
    for _ in range(2):
        for batch in batches:
            tokens, lengths = batch.tokens.cuda(), batch.lengths.cuda()
            found = []
            for can in (True, False):
                type(model.encoder).can_capture = can
                structure = model.structure(tokens, lengths)
                best, greedy = structure.beam(3), structure.greedy()
                found.append((best.z, best.log_prob, greedy.z, greedy.log_prob))
            type(model.encoder).can_capture = True
            for a, b in zip(*found):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        with torch.no_grad():  # recordings read the weights as they are now
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    recordings = captured._of_policies[model.encoder]
    assert recordings.made
    longest = lengths.argmax(0, keepdim=True)
    structure = model.structure(tokens[longest], lengths[longest])
    draws = torch.cat([structure.sample((200,)) for _ in range(4)])  # recorded at the second
    assert any(key[1] == ("sample", 200) for key in recordings.made)
    assert len({tuple(z.flatten().nonzero().flatten().tolist()) for z in draws[-200:]}) > 50
    first = draws[:, 0, 0].mean(0), structure.sample((3200,))[:, 0, 0].mean(0)
    assert (first[0] - first[1]).abs().max() < 5 / math.sqrt(800)


def test_side_streams_and_threads() -> None:
    """Four threads, each on a stream of its own, at once; the answers are those of one."""
    torch.manual_seed(0)
    made = {row: ROWS[row]().to("cuda") for row in ROWS if row.endswith(("/shannon", "/gini"))}
    made = {row: s for row, s in made.items() if s.supports("marginals")}
    expected = {row: s.marginals() for row, s in made.items()}
    torch.cuda.synchronize()

    def work(seed: int) -> list[str]:
        stream, wrong = torch.cuda.Stream(), []
        with torch.cuda.stream(stream):
            for row in [*made][seed:] + [*made][:seed]:
                found = made[row].marginals()
                stream.synchronize()
                if not torch.equal(found, expected[row]):
                    wrong.append(row)
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(0, 20, 5))) == [[]] * 4


@pytest.mark.parametrize("name", ["sparsemax", "entmax"])
def test_maps_are_captured(name: str) -> None:
    first, second = torch.randn(2, 16, 300, device="cuda")

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = getattr(sx, name)(x)
        (g,) = torch.autograd.grad((p**2).sum(), x)
        return p.detach(), g

    expected = step(second.clone().requires_grad_())
    leaf = first.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(leaf)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(leaf)
    with torch.no_grad():
        leaf.copy_(second)
    graph.replay()
    for a, b in zip(captured, expected):
        torch.testing.assert_close(a, b)
