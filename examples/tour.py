"""A guided tour: the tag sequences of one ambiguous sentence, seen through every query.

"The dog saw her duck" has two good readings: she owns a duck (her/DET duck/NOUN), or she ducks
(her/PRON duck/VERB). Hand-written scores leave both open; the rest is asked of the library.

Run it with ``make tour``, or ``python examples/tour.py``.
"""

from collections.abc import Sequence

import torch

import structmax as sx

WORDS = ["the", "dog", "saw", "her", "duck"]
TAGS = ["DET", "NOUN", "VERB", "PRON"]
DET, NOUN, VERB, PRON = range(4)

UNARY = torch.tensor(  # (n, c): how well a tag suits a word
    [
        [3.0, 0.0, 0.0, 0.5],  # the
        [0.0, 3.0, 0.5, 0.0],  # dog
        [0.0, 1.5, 2.0, 0.0],  # saw
        [1.5, 0.0, 0.0, 1.5],  # her
        [0.0, 1.5, 1.5, 0.0],  # duck
    ]
)
TRANSITION = torch.tensor(  # (c, c): how well a tag (column) follows another (row)
    [
        [-2.0, 2.0, -1.0, -2.0],  # after DET
        [-1.0, 0.0, 1.0, -0.5],  # after NOUN
        [1.0, 0.0, -1.0, 1.0],  # after VERB
        [-1.0, -0.5, 1.5, -1.0],  # after PRON
    ]
)


def say(text: str) -> None:
    """Print a paragraph."""
    try:
        from rich.console import Console
    except ImportError:
        print(text)
    else:
        Console(highlight=False).print(text, markup=False)


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with rich where it is installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        print(f"\n{title}")
        for row in [header, ["-" * w for w in widths], *rows]:
            print("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip())
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(header[0], style="cyan")
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(f"\n[bold]{escape(title)}[/bold]", highlight=False)
    console.print(table)


def grid(values: torch.Tensor, names: Sequence[str], form: str = "{:.3f}") -> list[list[str]]:
    """Rows of a table, one per name; a probability that is exactly zero is a dot."""
    return [
        [name, *(form.format(v) if v else "·" for v in row)]
        for name, row in zip(names, values.tolist())
    ]


def numbers(values: torch.Tensor, names: Sequence[str]) -> list[list[str]]:
    """Rows of a table of scores."""
    return [[name, *(f"{v:.1f}" for v in row)] for name, row in zip(names, values.tolist())]


def reading(z: torch.Tensor) -> str:
    """A vertex z (n, c) as text: the/DET dog/NOUN …"""
    return " ".join(f"{word}/{TAGS[t]}" for word, t in zip(WORDS, z.argmax(-1).tolist()))


def ask(chain: sx.LinearChain) -> None:
    """The queries: argmax, marginals, samples, k-best, entropy."""
    best = chain.argmax()
    say(f"\nargmax(): the best of {len(TAGS) ** len(WORDS)} tag sequences")
    say(f"  {reading(best)}")
    probability = chain.log_prob(best).exp().item()
    say(f"  score {chain.score(best).item():.2f}, probability {probability:.3f}")
    say(f"  decode(z) = {chain.decode(best)}")

    show(
        "marginals(): the probability of each tag at each word",
        ["word", *TAGS],
        grid(chain.marginals(), WORDS),
    )

    draws = chain.sample((3,), generator=torch.Generator().manual_seed(0))
    probs = chain.log_prob(draws).exp()
    show(
        "sample((3,)): exact draws",
        ["reading", "probability"],
        [[reading(z), f"{p:.3f}"] for z, p in zip(draws, probs.tolist())],
    )

    top = chain.topk(3)
    probs = chain.log_prob(top.structures).exp()
    show(
        "topk(3): the three best",
        ["reading", "score", "probability"],
        [
            [reading(z), f"{s:.2f}", f"{p:.3f}"]
            for z, s, p in zip(top.structures, top.scores.tolist(), probs.tolist())
        ],
    )

    entropy = chain.entropy()
    say(f"entropy(): {entropy:.3f} nats, as uncertain as a fair choice among {entropy.exp():.1f}")


def smooth() -> None:
    """One argument moves between argmax, Gibbs and sparse distributions."""
    rows = []
    for omega in [sx.Hard(), sx.Shannon(0.5), sx.Shannon(1.0), sx.Shannon(2.0), sx.Gini(1.0)]:
        chain = sx.LinearChain(UNARY, TRANSITION, smoothing=omega)
        log_probs = chain.log_prob(chain.enumerate_support())
        rows.append(
            [
                repr(omega),
                f"{chain.log_partition().item():.3f}",
                f"{chain.entropy().item():.3f}",
                f"{log_probs.max().exp().item():.3f}",
                str(int((log_probs > -torch.inf).sum())),
            ]
        )
    show(
        "smoothing=: temperature and sparsity",
        ["smoothing", "value", "entropy", "P(most likely)", "readings with P > 0"],
        rows,
    )
    chain = sx.LinearChain(UNARY, TRANSITION, smoothing=sx.Gini(1.0))
    show(
        "marginals() under Gini(1.0): most tags are ruled out exactly",
        ["word", *TAGS],
        grid(chain.marginals(), WORDS),
    )


def forbid(chain: sx.LinearChain) -> None:
    """Condition on what is known."""
    exclude = torch.zeros(len(WORDS), len(TAGS), dtype=torch.bool)
    exclude[WORDS.index("her"), DET] = True
    known = chain.condition(exclude=exclude)
    show(
        "condition(exclude=…): 'her' is no DET",
        ["word", *TAGS],
        grid(known.marginals(), WORDS),
    )
    say(f"  argmax() is now {reading(known.argmax())}")
    probability = (known.log_partition() - chain.log_partition()).exp().item()
    say(f"  P(her is no DET) = exp(A_cond - A) = {probability:.3f}")


def learn() -> None:
    """Gradients: minus the log-likelihood of a labelled sentence."""
    gold = torch.tensor([DET, NOUN, VERB, PRON, VERB])
    unary = UNARY.clone().requires_grad_()
    chain = sx.LinearChain(unary, TRANSITION)
    loss = -chain.log_prob(gold)
    (grad,) = torch.autograd.grad(loss, unary)
    show(
        "gradient of -log_prob(gold) in the scores, gold = DET NOUN VERB PRON VERB",
        ["word", *TAGS],
        grid(grad, WORDS, form="{:+.3f}"),
    )
    say(f"  loss {loss.item():.3f}; the gradient is the marginals minus the gold tags")
    stepped = sx.LinearChain(UNARY - grad, TRANSITION)
    say(f"  after one step of size 1 the loss is {-stepped.log_prob(gold).item():.3f}")
    say(f"  and argmax() is {reading(stepped.argmax())}")


def main() -> None:
    """Walk through the tour."""
    say("structmax: a guided tour. Sentence: " + " ".join(WORDS))
    show("unary scores: word by tag", ["word", *TAGS], numbers(UNARY, WORDS))
    show("transition scores: from by to", ["from", *TAGS], numbers(TRANSITION, TAGS))
    chain = sx.LinearChain(UNARY, TRANSITION, smoothing=sx.Shannon(1.0))
    ask(chain)
    smooth()
    forbid(chain)
    learn()


if __name__ == "__main__":
    main()
