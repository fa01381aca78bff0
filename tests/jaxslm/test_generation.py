"""Generation: the tokens of the full forward pass, whatever the batch, the bucket, the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslm import Generator, Sampling, generate
from jaxslm.decoding import SEGMENT, prepared
from jaxslm.generation import LEAST_SLOTS
from jaxslm.models import GPTConfig, LumenConfig, RippleConfig
from jaxslm.tokenizer import ByteTokenizer, CharTokenizer
from jaxslm.weights import from_arrays, to_arrays
from tests.jaxslm.support import forward, random_arrays, random_model

GREEDY = Sampling(temperature=0.0)
V = 40
LUMEN = LumenConfig(
    vocab_size=V, hidden_dim=24, num_layers=2, num_heads=4, num_kv_heads=1, intermediate_dim=32,
    max_seq_len=320,
)  # fmt: skip
GPT = GPTConfig(vocab_size=V, n_embd=24, n_layer=2, n_head=4, n_kv_head=2, block_size=320)
RIPPLE = RippleConfig(vocab_size=V, n_embd=24, n_layer=2, n_head=3, block_size=16)
WINDOW = RippleConfig(
    vocab_size=V, n_embd=24, n_layer=2, n_head=3, block_size=16, attention_window=16
)
CONFIGS = pytest.mark.parametrize(
    "config", [LUMEN, GPT, RIPPLE, WINDOW], ids=["lumen", "gpt", "ripple", "window"]
)


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V, length) for length in lengths]


def assert_greedy(model, prompt, row, new):
    """Each new token is the likeliest by the full pass over those before, to its rounding."""
    assert len(row) == len(prompt) + new
    np.testing.assert_array_equal(row[: len(prompt)], prompt)
    logits = np.asarray(forward(model, row[None, :-1]))[0, len(prompt) - 1 :]
    chosen = logits[np.arange(new), row[len(prompt) :]]
    assert (logits.max(-1) - chosen).max() < 1e-4
    assert (logits.argmax(-1) == row[len(prompt) :]).mean() > 0.98


@CONFIGS
def test_greedy_tokens_are_those_of_the_full_pass_across_growing_caches(config):
    model = random_model(config)
    prompts = prompts_of([1, 31, 33, 130])
    new = 185  # the cache of 256 slots grows on the way
    assert 130 + new > LEAST_SLOTS
    rows, stats = generate(model, prompts, max_new_tokens=new, sampling=GREEDY)
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.dtype == np.int32
        assert_greedy(model, prompt, row, new)
    assert [row.finish for row in stats.rows] == ["length"] * 4
    assert stats.new_tokens == 4 * new
    assert 0 < stats.first_seconds < stats.seconds
    assert stats.tokens_per_second > 0


def test_more_tokens_than_a_segment_are_made_in_segments():
    rows, _ = generate(
        random_model(WINDOW), prompts_of([3]), max_new_tokens=2 * SEGMENT + 5, sampling=GREEDY
    )
    assert_greedy(random_model(WINDOW), prompts_of([3])[0], rows[0], 2 * SEGMENT + 5)


@CONFIGS
def test_a_row_is_what_its_prompt_gives_alone(config):
    generator = Generator(random_model(config))
    prompts = prompts_of(np.random.default_rng(3).integers(1, 301, 32))
    options = {"max_new_tokens": 20, "sampling": GREEDY}
    together, _ = generator(prompts, **options)
    for prompt, row in zip(prompts, together, strict=True):
        alone, _ = generator([prompt], **options)
        np.testing.assert_array_equal(alone[0], row)


def test_seeds_reproduce_across_batch_sizes():
    generator = Generator(random_model(GPT))
    prompts, key = prompts_of([4, 60, 9, 1, 33]), jax.random.key(11)
    options = {"max_new_tokens": 40, "sampling": Sampling(temperature=0.9, top_k=20)}
    together, _ = generator(prompts, key=key, **options)
    again, _ = generator(prompts, key=key, **options)
    for row, same in zip(together, again, strict=True):
        np.testing.assert_array_equal(row, same)
    for number, prompt in enumerate(prompts):
        alone, _ = generator([prompt], key=jax.random.fold_in(key, number)[None], **options)
        np.testing.assert_array_equal(alone[0], together[number])
    other, _ = generator(prompts, key=jax.random.key(12), **options)
    assert any(not np.array_equal(a, b) for a, b in zip(together, other, strict=True))
    old_style, _ = generator(prompts, key=jax.random.PRNGKey(11), **options)
    np.testing.assert_array_equal(old_style[0], together[0])


def test_draws_follow_the_model():
    """First tokens of many rows have the frequencies of the full pass's distribution."""
    model, sampling = random_model(GPT), Sampling(temperature=1.3, top_k=4)
    prompt, rows = prompts_of([7])[0], 600
    made, _ = generate(
        model, [prompt] * rows, max_new_tokens=1, sampling=sampling, key=jax.random.key(0)
    )
    counts = np.bincount([row[-1] for row in made], minlength=V)
    logits = np.asarray(forward(model, prompt[None]))[0, -1] / 1.3
    p = np.where(logits < np.sort(logits)[-4], 0.0, np.exp(logits - logits.max()))
    p /= p.sum()
    assert not counts[p == 0].any()
    assert (abs(counts - rows * p) <= 5 * np.sqrt(rows * p * (1 - p)) + 1).all()


def test_few_programs_serve_many_lengths():
    """20 prompt lengths and 200 tokens: 3 prefills, 2 caches, 1 growth; then none at all."""
    config = RippleConfig(vocab_size=V, n_embd=12, n_layer=1, n_head=2, block_size=64)
    generator = Generator(random_model(config))
    lengths = [1, 300, *np.random.default_rng(0).integers(1, 301, 18).tolist()]
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def all_lengths(sampling):
        for length in lengths:
            generator(
                prompts_of([length]), max_new_tokens=200, sampling=sampling, key=jax.random.key(0)
            )

    all_lengths(Sampling(temperature=0.7, top_k=9))  # the keys' little programs too
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        all_lengths(Sampling(temperature=0.9, top_k=5))
        assert not compiled  # other numbers are not other programs
        all_lengths(GREEDY)
        assert 3 <= len(compiled) <= 6
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_output_does_not_depend_on_the_bucket(monkeypatch):
    model, prompts = random_model(LUMEN), prompts_of([5, 20])
    options = {"max_new_tokens": 30, "sampling": GREEDY}
    usual, _ = generate(model, prompts, **options)
    for lengths, slots in (((64,), 128), ((24,), 64), ((100, 320), 320)):
        monkeypatch.setattr("jaxslm.generation.PROMPT_LENGTHS", lengths)
        monkeypatch.setattr("jaxslm.generation.LEAST_SLOTS", slots)
        other, _ = generate(model, prompts, **options)
        for row, same in zip(usual, other, strict=True):
            np.testing.assert_array_equal(row, same)


@pytest.mark.parametrize("config", [LUMEN, GPT], ids=["lumen", "gpt"])
def test_a_model_with_a_context_stops_there_and_says_so(config):
    model = random_model(config)
    prompts = prompts_of([320, 318, 5])
    rows, stats = generate(model, prompts, max_new_tokens=10, sampling=GREEDY)
    assert [len(row) for row in rows] == [321, 321, 15]
    assert [row.finish for row in stats.rows] == ["context", "context", "length"]
    for prompt, row in zip(prompts, rows, strict=True):
        assert_greedy(model, prompt, row, len(row) - len(prompt))
    with pytest.raises(ValueError, match=r"prompt 1 has 321 tokens, the model's context is 320"):
        generate(model, prompts_of([5, 321]), max_new_tokens=1, sampling=GREEDY)


def test_ripple_goes_on_past_the_length_that_it_was_trained_at():
    rows, stats = generate(
        random_model(RIPPLE), prompts_of([4]), max_new_tokens=60, sampling=GREEDY
    )
    assert len(rows[0]) == 64 > RIPPLE.block_size
    assert stats.rows[0].finish == "length"


def test_absolute_positions_are_a_context():
    config = RippleConfig(
        vocab_size=V, n_embd=24, n_layer=1, n_head=3, block_size=16, use_absolute_pos_emb=True
    )
    rows, stats = generate(
        random_model(config), prompts_of([4]), max_new_tokens=60, sampling=GREEDY
    )
    assert len(rows[0]) == 17
    assert stats.rows[0].finish == "context"


def text_model():
    config = GPTConfig(vocab_size=257, n_embd=24, n_layer=1, n_head=2, n_kv_head=1, block_size=400)
    return random_model(config)


def test_rows_end_at_their_own_end_of_text_which_appears_once():
    model, prompts = random_model(GPT), prompts_of([5, 9, 14], seed=4)
    free, _ = generate(model, prompts, max_new_tokens=60, sampling=GREEDY)
    end = int(free[0][5 + 20])  # what the first row comes to
    rows, stats = generate(model, prompts, max_new_tokens=60, sampling=GREEDY, end_of_text=end)
    for prompt, row, whole, told in zip(prompts, rows, free, stats.rows, strict=True):
        new = whole[len(prompt) :].tolist()
        expected = new[: new.index(end) + 1] if end in new else new
        assert row[len(prompt) :].tolist() == expected
        assert told.new_tokens == len(expected)
        assert told.finish == ("end_of_text" if end in new else "length")
    assert stats.rows[0].finish == "end_of_text"


def test_end_of_text_in_a_prompt_ends_nothing():
    model, prompt = random_model(GPT), [3, 5, 3]
    free, _ = generate(model, [prompt], max_new_tokens=4, sampling=GREEDY)
    assert 3 not in free[0][3:]
    rows, _ = generate(model, [prompt], max_new_tokens=4, sampling=GREEDY, end_of_text=3)
    np.testing.assert_array_equal(rows[0], free[0])


def test_stop_strings_end_a_row_and_appear_once():
    model, tokenizer = text_model(), ByteTokenizer()
    options = {
        "max_new_tokens": 90, "key": jax.random.key(1), "tokenizer": tokenizer, "end_of_text": None,
    }  # fmt: skip
    free, told = generate(model, ["abc", "Well, Prince"], **options)
    text = told.rows[0].text
    assert text == tokenizer.decode(free[0][3:])
    stop = text[40:42]
    rows, stats = generate(model, ["abc", "Well, Prince"], stop=[stop, "never \0"], **options)
    cut = stats.rows[0].text
    assert stats.rows[0].finish == "stop"
    assert cut == text[: text.index(stop) + len(stop)]
    assert cut.count(stop) == 1
    assert np.array_equal(rows[0], free[0][: len(rows[0])])
    assert stop not in tokenizer.decode(rows[0][3:-1])
    other = told.rows[1].text
    assert stats.rows[1].text == (
        other if stop not in other else other[: other.index(stop) + len(stop)]
    )


class Words:
    """A tokenizer whose texts are not the sums of their parts, as WordPiece's; 7 is half a word."""

    kind, vocab_size, end_of_text = "words", V - 2, None

    def encode(self, text, *, special=False):
        return np.array([int(word[1:]) for word in text.split()], np.int32)

    def decode(self, ids):
        words = ["\N{REPLACEMENT CHARACTER}" if id_ == 7 else f"w{id_}" for id_ in ids]
        return " ".join(words).replace("\N{REPLACEMENT CHARACTER} w", "é")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Words()], ids=["byte", "words"])
@pytest.mark.parametrize("stopped", [False, True])
def test_streamed_text_is_the_text(tokenizer, stopped):
    model = text_model() if tokenizer.kind == "byte" else random_model(GPT)
    prompt, seed = ("Prince" if tokenizer.kind == "byte" else "w1 w2"), 0
    options = {"max_new_tokens": 80, "tokenizer": tokenizer, "end_of_text": None}
    sampling = Sampling(temperature=1.4)
    options |= {"key": jax.random.key(seed), "sampling": sampling}
    _, free = generate(model, [prompt], **options)
    text = free.rows[0].text
    stop = [text[50:54]] if stopped else []
    parts = []
    _, stats = generate(
        model, [prompt], stop=stop, on_tokens=lambda row, new, text: parts.append(text), **options
    )
    _, plain = generate(model, [prompt], stop=stop, **options)
    assert "".join(parts) == stats.rows[0].text == plain.rows[0].text
    assert len(parts) > 5
    if stopped:
        assert stats.rows[0].finish == "stop"


def test_what_the_device_made_after_a_stop_string_is_no_fault():
    """Segments are longer than rows: NaN in what is thrown away must not end the others."""
    config = RippleConfig(vocab_size=257, n_embd=24, n_layer=2, n_head=3, block_size=16)
    arrays = {name: jnp.asarray(value) for name, value in random_arrays(config).items()}
    options = {"max_new_tokens": 14, "sampling": GREEDY, "tokenizer": ByteTokenizer()}
    free, told = generate(from_arrays(config, arrays), ["ab"], **options)
    new = free[0][2:].tolist()
    bad = next(t for t in new[6:12] if t not in new[:6] and t not in b"ab")
    stop = told.rows[0].text[2:4]
    arrays["embedding"] = arrays["embedding"].at[bad].set(jnp.nan)
    model = from_arrays(config, arrays)
    with pytest.raises(ValueError, match="not finite"):
        generate(model, ["ab"], **options)
    _, stats = generate(model, ["ab"], stop=[stop], **options)
    assert stats.rows[0].finish == "stop"


def test_tokens_are_handed_over_as_they_are_made():
    model, seen = random_model(RIPPLE), {0: [], 1: []}
    prompts, calls = prompts_of([3, 40]), []

    def on_tokens(row, new, text):
        assert text is None
        seen[row] += new
        calls.append(len(new))

    rows, _ = generate(model, prompts, max_new_tokens=12, sampling=GREEDY, on_tokens=on_tokens)
    assert set(calls) == {1}
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        assert seen[number] == row[len(prompt) :].tolist()


def test_the_repetition_penalty_counts_prompt_and_new_tokens():
    model, prompts = random_model(GPT), prompts_of([6, 30])
    sampling = Sampling(temperature=0.0, repetition_penalty=1e5)
    rows, _ = generate(model, prompts, max_new_tokens=8, sampling=sampling)
    for prompt, row in zip(prompts, rows, strict=True):
        new = row[len(prompt) :].tolist()
        for step, token in enumerate(new):
            logits = np.asarray(forward(model, row[None, : len(prompt) + step]))[0, -1]
            seen = np.isin(np.arange(V), row[: len(prompt) + step])
            penalised = np.where(seen, np.where(logits > 0, logits / 1e5, logits * 1e5), logits)
            assert token == penalised.argmax()


def test_no_new_tokens_give_the_prompts():
    prompts = prompts_of([3, 5])
    rows, stats = generate(random_model(GPT), prompts, max_new_tokens=0)
    for prompt, row in zip(prompts, rows, strict=True):
        np.testing.assert_array_equal(row, prompt)
    assert stats.new_tokens == 0
    assert np.isnan(stats.tokens_per_second)
    assert [row.finish for row in stats.rows] == ["length", "length"]
    assert generate(random_model(GPT), [], max_new_tokens=5)[0] == []


def test_an_empty_text_begins_a_document():
    rows, stats = generate(
        text_model(), [""], max_new_tokens=2, sampling=GREEDY, tokenizer=ByteTokenizer()
    )
    assert rows[0][0] == 256
    assert stats.rows[0].prompt_tokens == 1


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([""], {"tokenizer": CharTokenizer("ab")}, "prompt 0 is empty"),
        ([[1, V]], {}, f"prompt 0 has token {V} at 1: the model's vocabulary is 0 to {V - 1}"),
        ([[-1]], {}, "prompt 0 has token -1 at 0"),
        ([[0.5]], {}, "prompt 0 is float64"),
        ([[[1]]], {}, "expected integers along one axis"),
        (["text"], {}, "prompt 0 is text: pass tokenizer="),
        (["text"], {"tokenizer": ByteTokenizer()}, "this is not its tokenizer"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be a whole number"),
        ([[1]], {"max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ([[1]], {"max_new_tokens": None}, "max_new_tokens must be a whole number"),
        ([[1]], {"max_new_tokens": 2**31}, "max_new_tokens must be a whole number"),
        ("text", {"tokenizer": ByteTokenizer()}, r"pass a list of them, \[prompt\]"),
        ([1, 2], {}, r"pass a list of them, \[prompt\]"),
        ([[[1], [1, 2]]], {}, "prompt 0: expected integers along one axis"),
        ([[1]], {"key": 0}, "key must be a PRNG key"),
        ([[1]], {"end_of_text": "</s>"}, "end_of_text must be a token id"),
        ([[1]], {"end_of_text": 5.7}, "end_of_text must be a token id"),
        ([[1]], {"end_of_text": V}, f"end_of_text {V} is no token"),
        ([[1]], {"stop": ["x", ""], "tokenizer": ByteTokenizer()}, "strings that are not empty"),
        ([[1]], {"stop": [5], "tokenizer": ByteTokenizer()}, "strings that are not empty"),
        ([[1]], {"sampling": Sampling()}, "sampling needs a key"),
        ([[1]], {"key": jax.random.split(jax.random.key(0), 2)}, "one for each of 1 prompts"),
        ([[1]], {"stop": ["x"]}, "stop strings need the tokenizer"),
        ([[1]], {"stop": [""], "tokenizer": ByteTokenizer()}, "strings that are not empty"),
        ([[1]], {"stop": "x", "tokenizer": ByteTokenizer()}, "strings that are not empty"),
    ],
)
def test_what_cannot_be_is_refused_by_name(prompts, options, words):
    with pytest.raises(ValueError, match=words):
        generate(random_model(GPT), prompts, **{"max_new_tokens": 2, "sampling": GREEDY} | options)


def test_logits_that_are_not_finite_name_row_and_step():
    arrays = {name: jnp.asarray(value) for name, value in random_arrays(RIPPLE).items()}
    rows, _ = generate(
        from_arrays(RIPPLE, arrays), prompts_of([4, 6]), max_new_tokens=30, sampling=GREEDY
    )
    row = rows[1].tolist()
    bad = next(t for t in row[10:] if t not in row[:10] and t not in rows[0].tolist())
    step = row.index(bad) - 6 + 2  # the token after it cannot be told
    arrays["embedding"] = arrays["embedding"].at[bad].set(jnp.nan)
    with pytest.raises(
        ValueError, match=rf"prompt 1: .* at new token {step} \(position {step + 5}"
    ):
        generate(
            from_arrays(RIPPLE, arrays), prompts_of([4, 6]), max_new_tokens=30, sampling=GREEDY
        )


def test_a_bfloat16_model_is_read_once_and_computed_in_float32_on_a_cpu():
    config = GPTConfig(
        vocab_size=V, n_embd=24, n_layer=1, n_head=2, n_kv_head=1, block_size=64, dtype="bfloat16"
    )
    ready = prepared(random_model(config))
    arrays = to_arrays(ready)
    assert ready.config.dtype == "float32"
    assert {array.dtype.name for array in arrays.values()} == {"float32"}
    w = random_arrays(config)["blocks.attention.wq"][0]
    found = arrays["blocks.0.attention.wq"]
    np.testing.assert_array_equal(found, w.astype(jnp.bfloat16).astype(np.float32))
    rows, _ = generate(random_model(config), prompts_of([4]), max_new_tokens=8, sampling=GREEDY)
    assert_greedy(ready, prompts_of([4])[0], rows[0], 8)
