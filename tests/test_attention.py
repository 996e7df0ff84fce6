"""``sx.nn.attend`` and ``sx.nn.Attention`` against torch's own; the maps in transformers."""

from __future__ import annotations

import copy
import doctest
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import structmax as sx
from structmax.nn.dot_product import MAPS

F = torch.nn.functional
OPTIONS: dict[str, dict[str, float]] = {
    "softmax": {},
    "sparsemax": {},
    "entmax": {"alpha": 1.3},
    "normmax": {"alpha": 2.0},
    "budgetmax": {"k": 2},
    "fusedmax": {"strength": 0.1},
    "oscarmax": {"strength": 0.05},
    "csoftmax": {"upper": 0.6},
    "csparsemax": {"upper": 0.6, "lower": 0.01},
    "argmax": {},
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def module(map: str = "softmax", seed: int = 0, **settings):
    torch.manual_seed(seed)
    attention = sx.nn.Attention(8, 2, map, **{**OPTIONS[map], **settings}).double()
    for parameter in attention.parameters():
        if parameter.dim() == 1 and parameter is not attention.alpha_logit:
            torch.nn.init.normal_(parameter)
    return attention


def test_every_map_has_a_row_here() -> None:
    assert list(OPTIONS) == list(MAPS)


# -- attend --------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_softmax_is_torch_attention(causal: bool, with_mask: bool, scale: float | None) -> None:
    q, k, v = randn(2, 3, 4, 5), randn(2, 3, 6, 5, seed=1), randn(2, 3, 6, 7, seed=2)
    mask = torch.rand(2, 1, 4, 6, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[..., 0] = True
    both = mask if with_mask else torch.ones(4, 6, dtype=torch.bool)
    both = both & torch.ones(4, 6, dtype=torch.bool).tril() if causal else both
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=both, scale=scale)
    output, weights = sx.nn.attend(
        q, k, v, mask=mask if with_mask else None, causal=causal, scale=scale
    )
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 4, dtype=torch.float64))
    bias = torch.where(both, randn(4, 6), -math.inf)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(sx.nn.attend(q, k, v, bias=bias)[0], expected)


@pytest.mark.parametrize("map", MAPS)
def test_every_map_by_name(map: str) -> None:
    q, k, v = randn(2, 3, 4, 5), randn(2, 3, 6, 5, seed=1), randn(2, 3, 6, 7, seed=2)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., 4:] = False
    output, weights = sx.nn.attend(q, k, v, map, mask=mask, **OPTIONS[map])
    scores = q @ k.transpose(-1, -2) / math.sqrt(5)
    expected = MAPS[map][0](scores, mask=mask, **OPTIONS[map])
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(output, expected @ v)


def test_batch_dimensions_broadcast() -> None:
    q, k, v = randn(2, 3, 4, 5), randn(6, 5, seed=1), randn(3, 6, 2, seed=2)
    output, weights = sx.nn.attend(q, k, v, "sparsemax")
    assert output.shape == (2, 3, 4, 2) and weights.shape == (2, 3, 4, 6)
    one = sx.nn.attend(q[1, 2], k, v[2], "sparsemax")
    torch.testing.assert_close((output[1, 2], weights[1, 2]), one)


def test_dropout_is_on_the_way_to_the_output() -> None:
    q, v = randn(50, 4), torch.eye(50, dtype=torch.float64)
    torch.manual_seed(0)
    output, weights = sx.nn.attend(q, q, v, dropout=0.5)
    dropped = output == 0
    assert 0.4 < dropped.double().mean() < 0.6
    torch.testing.assert_close(output[~dropped], 2 * weights[~dropped])


# -- the module ----------------------------------------------------------------------------------


def torch_twin(attention, kdim: int | None = None, vdim: int | None = None, **settings):
    """``torch.nn.MultiheadAttention`` with the same parameters."""
    twin = torch.nn.MultiheadAttention(8, 2, kdim=kdim, vdim=vdim, **settings).double()
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    with torch.no_grad():
        if kdim is None:
            twin.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        else:
            for name, p in zip("qkv", projections, strict=True):
                getattr(twin, f"{name}_proj_weight").copy_(p.weight)
        twin.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        twin.out_proj.load_state_dict(attention.out_proj.state_dict())
    return twin


@pytest.mark.parametrize("batch_first", [True, False])
def test_softmax_is_torch_multihead_attention(batch_first: bool) -> None:
    attention = module(batch_first=batch_first)
    twin = torch_twin(attention, batch_first=batch_first)
    x, y = randn(3, 4, 8), randn(3, 6, 8, seed=1)
    mask = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    output, weights = attention(x, y, mask=mask, need_weights=True)
    expected = twin(x, y, y, key_padding_mask=~mask, average_attn_weights=False)
    torch.testing.assert_close((output, weights), expected)
    forbidden = ~torch.ones(4, 4, dtype=torch.bool).tril()
    expected = twin(x, x, x, attn_mask=forbidden, is_causal=True)[0]
    torch.testing.assert_close(attention(x, causal=True), expected)
    g = torch.autograd.grad(attention(x).square().sum(), attention.q_proj.weight)[0]
    expected = torch.autograd.grad(twin(x, x, x)[0].square().sum(), twin.in_proj_weight)[0][:8]
    torch.testing.assert_close(g, expected)


def test_other_features_of_keys_and_values() -> None:
    attention = module(kdim=5, vdim=3)
    twin = torch_twin(attention, kdim=5, vdim=3, batch_first=True)
    x, k, v = randn(3, 4, 8), randn(3, 6, 5, seed=1), randn(3, 6, 3, seed=2)
    torch.testing.assert_close(attention(x, k, v), twin(x, k, v)[0])


@pytest.mark.parametrize("map", MAPS)
def test_gradients(map: str) -> None:
    attention = module(map)
    x = randn(2, 3, 8).requires_grad_()
    mask = torch.tensor([[True, True, True], [True, False, True]])
    assert torch.autograd.gradcheck(lambda x: attention(x, x.sin(), mask=mask), x)


@pytest.mark.parametrize("map", MAPS)
def test_a_query_without_keys_attends_to_nothing(map: str) -> None:
    attention = module(map)
    x = randn(2, 3, 8).requires_grad_()
    mask = torch.tensor([[True, True, True], [False, False, False]])
    output, weights = attention(x, mask=mask, need_weights=True)
    assert not weights[1].any()
    torch.testing.assert_close(output[1], attention.out_proj.bias.expand(3, 8))
    output.square().sum().backward()
    assert not x.grad[1].any() and x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize("map", ["softmax", "entmax", "fusedmax"])
def test_keys_that_are_masked_may_hold_anything(map: str) -> None:
    attention = module(map)
    mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
    clean = randn(2, 4, 8)
    dirty = clean.clone()
    dirty[1, 3] = math.nan
    for other in (None, randn(2, 4, 8, seed=1)):
        results = []
        for x in (clean, dirty):
            x = x.clone().requires_grad_()
            attention.zero_grad()
            y = attention(x, mask=mask) if other is None else attention(other, x, mask=mask)
            (y[mask] if other is None else y).square().sum().backward()
            grads = [p.grad.clone() for p in attention.parameters()]
            results.append([y[mask] if other is None else y, x.grad, *grads])
        torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
        assert not results[1][1][1, 3].any()


def test_masks_and_biases_of_all_shapes_agree() -> None:
    attention = module("entmax")
    x, y = randn(2, 3, 8), randn(2, 4, 8, seed=1)
    keys = torch.tensor([[True, True, False, True], [True, False, True, True]])
    full = keys[:, None, None, :].expand(2, 2, 3, 4)
    expected = attention(x, y, mask=keys)
    for mask in (keys[:, None, None, :], full):
        torch.testing.assert_close(attention(x, y, mask=mask), expected)
    forbid = torch.where(keys, 0.0, -math.inf)
    for bias in (forbid, forbid[:, None, None, :].double()):
        torch.testing.assert_close(attention(x, y, bias=bias), expected)
    causal = torch.ones(3, 4, dtype=torch.bool).tril()
    torch.testing.assert_close(
        attention(x, y, mask=keys, causal=True), attention(x, y, mask=full & causal)
    )


def test_bounds_in_forward() -> None:
    attention = module("csparsemax", upper=1.0, lower=0.0)
    x = randn(2, 4, 8)
    upper = torch.tensor([[0.3, 0.4, 0.5, 0.1], [1.0, 0.0, 0.2, 0.7]], dtype=torch.float64)
    upper.requires_grad_()
    output, weights = attention(x, upper=upper, lower=0.01 * upper, need_weights=True)
    assert (weights <= upper[:, None, None] + 1e-9).all()
    assert (weights >= 0.01 * upper[:, None, None] - 1e-9).all()
    output.square().sum().backward()
    assert upper.grad.any()
    late = sx.nn.Attention(8, 2, "csoftmax").double()
    assert late(x, upper=0.5).shape == (2, 4, 8)
    with pytest.raises(ValueError, match=r'csoftmax" needs upper='):
        late(x)


def test_dropout_only_while_training() -> None:
    attention = module(dropout=0.5)
    x = randn(2, 4, 8)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    torch.testing.assert_close(attention(x), module()(x))


# -- a learned α ---------------------------------------------------------------------------------


def test_learned_alpha() -> None:
    attention = module("entmax", learn_alpha=True)
    torch.testing.assert_close(attention.alpha, torch.full((2,), 1.3, dtype=torch.float64))
    x = randn(2, 3, 8)
    torch.testing.assert_close(attention(x), module("entmax")(x))
    assert set(attention.state_dict()) - set(module("entmax").state_dict()) == {"alpha_logit"}
    with torch.no_grad():
        attention.alpha_logit.copy_(torch.tensor([-50.0, 50.0]))  # softmax, sparsemax
    _, weights = attention(x, need_weights=True)
    torch.testing.assert_close(weights[:, 0], module("softmax")(x, need_weights=True)[1][:, 0])
    torch.testing.assert_close(weights[:, 1], module("sparsemax")(x, need_weights=True)[1][:, 1])


def test_gradient_of_a_learned_alpha() -> None:
    attention = module("entmax", learn_alpha=True)
    x = randn(2, 3, 8)
    logit = torch.tensor([-1.0, 0.7], dtype=torch.float64, requires_grad=True)
    rest = {k: v for k, v in attention.named_parameters() if k != "alpha_logit"}

    def run(logit: Tensor) -> Tensor:
        return torch.func.functional_call(attention, {**rest, "alpha_logit": logit}, (x,))

    assert torch.autograd.gradcheck(run, logit)
    attention.zero_grad()
    run(logit).square().sum().backward()
    assert (logit.grad != 0).all()


def test_one_step_of_training_moves_alpha() -> None:
    attention = sx.nn.Attention(8, 2, "entmax", learn_alpha=True)
    optimizer = torch.optim.SGD(attention.parameters(), lr=1.0)
    attention(randn(2, 3, 8).float()).square().sum().backward()
    optimizer.step()
    assert (attention.alpha != 1.5).all() and (attention.alpha > 1).all()


# -- the contract of a module --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("map", ["softmax", "sparsemax", "entmax", "oscarmax"])
def test_half_precision(map: str, dtype: torch.dtype) -> None:
    learned = map == "entmax"
    attention = module(map, learn_alpha=learned)
    x = randn(2, 5, 8).to(dtype).requires_grad_()
    expected = attention(x.detach().double())
    half = copy.deepcopy(attention).to(dtype)
    output, weights = half(x, need_weights=True)
    assert output.dtype == weights.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=0.1)
    output.float().square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.any()
    single = copy.deepcopy(attention).float()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = single(x.detach().float())
    torch.testing.assert_close(mixed.double(), expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("map", MAPS)
def test_compile(map: str) -> None:
    attention = module(map, **({"learn_alpha": True} if map == "entmax" else {}))
    torch._dynamo.reset()  # every map is a new graph of the same function
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    x = randn(2, 4, 8)
    mask = torch.tensor([[True] * 4, [True, True, True, False]])
    outputs, gradients = [], []
    for run in (attention, compiled):
        attention.zero_grad()
        output = run(x, mask=mask, causal=map != "budgetmax" and "upper" not in OPTIONS[map])
        output.square().sum().backward()
        outputs.append(output)
        gradients.append([p.grad for p in attention.parameters()])
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_vmap_over_the_batch() -> None:
    attention = module("sparsemax")
    x = randn(3, 2, 4, 8)
    torch.testing.assert_close(
        torch.func.vmap(attention)(x), torch.stack([attention(t) for t in x])
    )


def test_pickle_and_repr() -> None:
    attention = module("entmax", learn_alpha=True)
    x = randn(2, 4, 8)
    torch.testing.assert_close(pickle.loads(pickle.dumps(attention))(x), attention(x))
    assert "8, num_heads=2, map='entmax', alpha=1.3, learn_alpha=True" in repr(attention)
    plain = sx.nn.Attention(8, 2, bias=False)
    assert not [name for name, _ in plain.named_parameters() if name.endswith("bias")]


# -- errors --------------------------------------------------------------------------------------

ERRORS = {
    "a name nearly right": (lambda: sx.nn.Attention(8, 2, "sparsmax"), 'mean "sparsemax"'),
    "no such name": (lambda: sx.nn.Attention(8, 2, "?"), "Maps: softmax, sparsemax, entmax"),
    "an option of another map": (
        lambda: sx.nn.Attention(8, 2, "sparsemax", alpha=1.5),
        "takes no options, got alpha",
    ),
    "an option too few": (lambda: sx.nn.Attention(8, 2, "budgetmax"), "needs k="),
    "heads": (lambda: sx.nn.Attention(8, 3), "3 heads and 8 features"),
    "dropout": (lambda: sx.nn.Attention(8, 2, dropout=1.5), "got 1.5"),
    "α of another map": (
        lambda: sx.nn.Attention(8, 2, "normmax", alpha=2, learn_alpha=True),
        'map="normmax"',
    ),
    "α out of range": (
        lambda: sx.nn.Attention(8, 2, "entmax", alpha=3, learn_alpha=True),
        "alpha = 3",
    ),
    "features": (lambda: module()(randn(2, 4, 7)), r"query must be \(B, length, 8\), got"),
    "no batch": (lambda: module()(randn(4, 8)), r"got \(4, 8\)"),
    "features, batch second": (
        lambda: module(batch_first=False)(randn(2, 4, 7)),
        r"\(length, B, 8\), got \(2, 4, 7\)",
    ),
    "lengths": (
        lambda: module()(randn(2, 4, 8), randn(2, 5, 8), randn(2, 6, 8)),
        "key has B = 2, length = 5, value has B = 2, length = 6",
    ),
    "a mask of floats": (lambda: module()(randn(2, 4, 8), mask=randn(2, 4)), "boolean.*bias="),
    "a bias of booleans": (
        lambda: module()(randn(2, 4, 8), bias=torch.ones(2, 4).bool()),
        "floating point.*mask=",
    ),
    "a mask of two lengths": (
        lambda: module()(randn(2, 4, 8), mask=torch.ones(4, 4).bool()),
        r"\(B, m\) = \(2, 4\).*got \(4, 4\).*mask\[None, None\]",
    ),
    "a mask of three dimensions": (
        lambda: module()(randn(2, 4, 8), mask=torch.ones(2, 4, 4).bool()),
        r"mask\[:, None\]",
    ),
    "a mask that does not fit": (
        lambda: module()(randn(2, 4, 8), mask=torch.ones(2, 3, 4, 4).bool()),
        r"\(2, 2, 4, 4\), got \(2, 3, 4, 4\)",
    ),
    "shapes of attend": (
        lambda: sx.nn.attend(randn(4, 3), randn(5, 3), randn(6, 3)),
        r"got \(4, 3\), \(5, 3\) and \(6, 3\)",
    ),
    "an unknown name in attend": (
        lambda: sx.nn.attend(randn(4, 3), randn(5, 3), randn(5, 3), "entmx"),
        'attend.*"entmax"',
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    call, words = ERRORS[case]
    with pytest.raises(ValueError, match=words):
        call()


# -- transformers --------------------------------------------------------------------------------


def test_transformers_is_imported_lazily() -> None:
    code = "import sys, structmax, structmax.nn.hf; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.fixture
def transformers():
    module = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    return module


def tiny(transformers, kind: str):
    """A small model with random weights, attention by the definition, and inputs with padding."""
    if kind == "llama":  # causal, four heads over two groups of keys
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        create = transformers.AutoModelForCausalLM
    elif kind == "mistral":  # each position sees three
        config = transformers.MistralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, sliding_window=3,
        )  # fmt: skip
        create = transformers.AutoModelForCausalLM
    elif kind == "bert":
        config = transformers.BertConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4,
        )  # fmt: skip
        create = transformers.AutoModelForMaskedLM
    else:  # relative positions, an encoder and a decoder
        config = transformers.T5Config(
            vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4
        )
        create = transformers.AutoModelForSeq2SeqLM
    inputs = {
        "input_ids": torch.randint(32, (2, 6)),
        "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]),
    }
    keep = inputs["attention_mask"].bool()
    if kind == "t5":
        inputs["decoder_input_ids"] = torch.randint(32, (2, 5))
        keep = torch.ones(2, 5, dtype=torch.bool)
    return create, config, inputs, keep


BAD_NUMBERS = {
    "entmax": ({"alpha": 0.5}, "alpha must be a finite number of at least 1, got 0.5"),
    "normmax": ({"alpha": 1.0}, "alpha must be a number above 1, got 1.0"),
    "budgetmax": ({"k": -1}, "k must be a number of at least 0, got -1.0"),
    "fusedmax": ({"strength": -1.0}, "strength must be a finite number"),
    "oscarmax": ({"strength": math.inf}, "strength must be a finite number"),
}


@pytest.mark.parametrize("map", BAD_NUMBERS)
def test_numbers_of_a_map_are_validated_where_they_are_given(map: str) -> None:
    """Not by the first call of the model, in the middle of training."""
    from structmax.nn import hf

    options, said = BAD_NUMBERS[map]
    for owner, make in (
        ("register", lambda: hf.register(map, **options)),
        ("Attention", lambda: sx.nn.Attention(8, 2, map=map, **options)),
    ):
        with pytest.raises(ValueError, match=re.escape(f'{owner}: map="{map}": {said}')):
            make()


def test_grouped_heads_are_named() -> None:
    query, key = torch.zeros(2, 8, 5, 4), torch.zeros(2, 2, 7, 4)
    said = r"heads, must broadcast.*\(2, 8, 5, 4\), \(2, 2, 7, 4\).*repeat_interleave\(4, -3\)"
    with pytest.raises(ValueError, match=said):
        sx.nn.attend(query, key, key)
    wide = key.repeat_interleave(4, -3)
    assert sx.nn.attend(query, wide, wide)[0].shape == (2, 8, 5, 4)
    with pytest.raises(ValueError, match=r"must broadcast, got [^.]*\.$"):
        sx.nn.attend(query, key, key[:, :1].expand(2, 3, 7, 4))
    from structmax.nn.hf import _attend

    odd = torch.zeros(2, 3, 7, 4)
    with pytest.raises(ValueError, match=r"structmax_softmax: 8 heads .* 3 groups"):
        _attend(torch.nn.Identity(), query, odd, odd, None, map="softmax", options={})


@pytest.mark.parametrize("kind", ["llama", "mistral", "bert", "t5"])
def test_softmax_in_transformers_is_theirs(transformers, kind: str) -> None:
    from structmax.nn import hf

    create, config, inputs, keep = tiny(transformers, kind)
    model = create.from_config(config, attn_implementation="eager").eval()
    expected = model(**inputs).logits[keep]
    model.set_attn_implementation(hf.register("softmax"))
    torch.testing.assert_close(model(**inputs).logits[keep], expected)
    del inputs["attention_mask"]
    mine = model(**inputs).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(mine, model(**inputs).logits)


@pytest.mark.parametrize("kind", ["llama", "bert", "t5"])
@pytest.mark.parametrize(
    ("map", "options"),
    [("sparsemax", {}), ("entmax", {"alpha": 1.3}), ("fusedmax", {"strength": 0.1})],
)
def test_maps_in_transformers(transformers, kind: str, map: str, options: dict) -> None:
    from structmax.nn import hf

    create, config, inputs, keep = tiny(transformers, kind)
    name = hf.register(map, **options)
    assert name == "_".join(["structmax", map, *(f"{k}_{v}" for k, v in options.items())])
    model = create.from_config(config, attn_implementation=name)
    output = model(**inputs, output_attentions=True)
    weights = output.encoder_attentions[0] if kind == "t5" else output.attentions[0]
    visible = inputs["attention_mask"].bool()
    assert (
        weights.shape == (2, 4, 6, 6)
        and not weights[~visible[:, None, None].expand_as(weights)].any()
    )
    torch.testing.assert_close(weights.sum(-1)[visible[:, None].expand(2, 4, 6)], torch.ones(40))
    if kind == "llama":
        assert not weights.triu(1).any()
    output.logits.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_generation_in_transformers(transformers) -> None:
    from structmax.nn import hf

    create, config, inputs, _ = tiny(transformers, "llama")
    model = create.from_config(config, attn_implementation="eager").eval()
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **settings)
    model.set_attn_implementation(hf.register("softmax"))
    assert torch.equal(model.generate(**inputs, **settings), expected)
    model.set_attn_implementation(hf.register("sparsemax"))
    cached = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, **settings, use_cache=False), cached)


def test_transformers_refusals(transformers) -> None:
    from structmax.nn import hf

    with pytest.raises(ValueError, match=r'register.*mean "entmax"'):
        hf.register("entmx")
    function = transformers.AttentionInterface()[hf.register("softmax")]
    x = torch.zeros(1, 1, 2, 2)
    for name, words in (("softcap", "soft cap"), ("s_aux", "sinks"), ("cache", "batching")):
        with pytest.raises(NotImplementedError, match=words):
            function(torch.nn.Identity(), x, x, x, None, **{name: 1.0})


# -- the page about maps -------------------------------------------------------------------------


def test_examples_of_the_page() -> None:
    text = (Path(__file__).parent.parent / "docs" / "maps.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "maps.md", "maps.md", 0)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.DocTestRunner(optionflags=flags).run(test)
    assert result.attempted > 15 and not result.failed
