"""Generation from real checkpoints: 200 greedy tokens, from the cache, as the originals'.

A row is the original's greedy continuation if and only if each of its new tokens is the original's
likeliest one after those before it, so one forward pass of the original over the row shows it.
"""

import jax
import numpy as np
import pytest
import torch

import convert
from jaxslm import Generator, Sampling
from jaxslm.models import model_name
from jaxslm.tokenizer import load_tokenizer
from tests.golden.make_golden import build_original, load_originals

NEW = 200
FILES = {
    "lumen_3m.pt": "lumen-3m", "lumen_3m_bf16.pt": "lumen-3m", "gpt_small.pt": None,
    "gpt_small_safetensors": None, "ripple_char.pt": None, "ripple_window.pt": None,
}  # fmt: skip
OURS = {"dtype", "unroll", "remat", "attention"}  # fields that no original has


def original(shared, model, dtype):
    """The original with the weights of a model of ours."""
    originals = load_originals(shared("originals"))
    fields = {name: v for name, v in vars(model.config).items() if name not in OURS}
    module = build_original(originals, model_name(model.config), fields)
    state = {key: torch.as_tensor(w) for key, w in convert.to_torch(model).items()}
    module.load_state_dict(state, strict=True)
    return module.to(dtype)


def real_prompts(shared, name):
    """Prompts of 1, 64 and 130 tokens from the book's held-out part."""
    kind = "char" if name.startswith("ripple") else "bpe"
    tokens = np.fromfile(shared("data", f"{kind}_val.bin"), np.uint16).astype(np.int32)
    return [tokens[0:1], tokens[5_000:5_064], tokens[20_000:20_130]]


def likeliest(module, row, start):
    """The original's likeliest next tokens from `start` on, and by how much each leads."""
    with torch.no_grad():
        logits = module(torch.as_tensor(row[None, :-1].astype(np.int64)))[0][0, start - 1 :]
    best = logits.topk(2).values
    return logits.argmax(-1).numpy(), (best[:, 0] - best[:, 1]).numpy(), logits.numpy()


@pytest.mark.parametrize("name", FILES)
def test_greedy_tokens_are_the_original_s(name, shared):
    model = convert.to_jax(shared("checkpoints", name), preset=FILES[name], dtype="float32")
    prompts = real_prompts(shared, name)
    rows, stats = Generator(model)(prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0.0))
    module = original(shared, model, torch.float32)
    exact = original(shared, model, torch.float64)
    full_pass = jax.jit(lambda model, tokens: model(tokens))
    for prompt, row, told in zip(prompts, rows, stats.rows, strict=True):
        assert told.new_tokens == NEW
        new = row[len(prompt) :]
        ours = np.asarray(full_pass(model, row[None, :-1]))[0, len(prompt) - 1 :].argmax(-1)
        theirs, leads, _ = likeliest(module, row, len(prompt))
        for step in np.flatnonzero((new != theirs) | (new != ours)):
            # Two candidates closer than float32's noise: float64 has the last word.
            truth, _, logits = likeliest(exact, row[: len(prompt) + step + 1], len(prompt) + step)
            gap = logits[0, truth[0]] - logits[0, new[step]]
            print(f"{name}: step {step} float32 lead {leads[step]:.1e}, float64 gap {gap:.1e}")
            assert gap < 1e-5 * np.abs(logits).max()


@pytest.mark.parametrize("name", ["ripple_char.pt", "ripple_window.pt"])
def test_the_original_s_generate_makes_the_same_tokens(name, shared):
    """Ripple's own loop; top_k=1 leaves it only the likeliest token."""
    model = convert.to_jax(shared("checkpoints", name))
    prompt = real_prompts(shared, name)[1]
    module = original(shared, model, torch.float32)
    theirs = module.generate(torch.as_tensor(prompt[None].astype(np.int64)), 40, top_k=1)
    rows, _ = Generator(model)([prompt], max_new_tokens=40, sampling=Sampling(temperature=0.0))
    assert rows[0].tolist() == theirs[0].tolist()


def test_the_distribution_is_that_of_the_original_s_generate(shared):
    """Real logits, its own arithmetic, to 1e-6."""
    from jaxslm.sampling import Filters, filter_logits

    model = convert.to_jax(shared("checkpoints", "ripple_char.pt"))
    row = real_prompts(shared, "ripple_char.pt")[2]
    with torch.no_grad():
        logits = original(shared, model, torch.float32)(torch.as_tensor(row[None].astype(int)))[0]
    for temperature, top_k in ((0.8, 10), (1.0, None), (0.5, 1), (1.3, 82), (0.8, 200)):
        scaled = logits[0] / temperature
        if top_k is not None:
            least, _ = torch.topk(scaled, min(top_k, scaled.size(-1)))
            scaled[scaled < least[:, [-1]]] = -float("Inf")
        theirs = torch.softmax(scaled, dim=-1).numpy()
        filters = Filters.of(Sampling(temperature=temperature, top_k=top_k), 82)
        ours = jax.nn.softmax(filter_logits(jax.numpy.asarray(logits[0].numpy()), filters), axis=-1)
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_text_of_a_real_model_reads_like_the_book(shared):
    """Its tokenizer gives text, and stop strings act on it."""
    model = convert.to_jax(shared("checkpoints", "ripple_char.pt"))
    tokenizer = load_tokenizer(shared("data", "char_meta.pkl"))
    rows, stats = Generator(model)(
        ["Well, Prince,"], max_new_tokens=NEW, sampling=Sampling(temperature=0.8, top_k=20),
        key=jax.random.key(0), tokenizer=tokenizer, stop=["e "],
    )  # fmt: skip
    text = stats.rows[0].text
    assert stats.rows[0].finish == "stop"
    assert text.endswith("e ")
    assert text.count("e ") == 1
    assert tokenizer.decode(rows[0]) == "Well, Prince," + text
