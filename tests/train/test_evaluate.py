"""The evaluation's figures against sums taken by hand, on any number of devices."""

import io
import json
import math
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from jaxslm import GPTConfig, LumenConfig, RippleConfig
from jaxslm.safetensors_io import TensorSpec
from jaxslm.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, load_tokenizer
from jaxslm.weights import save, write_folder
from tests.children import EIGHT, run_child
from tests.jaxslm.support import forward, random_arrays, random_model
from tests.train.runs import VOCABULARY, write_tokens
from train import evaluate as module
from train.batches import EvaluationBatches
from train.evaluate import evaluate
from train.evaluation_plot import plot
from train.evaluation_report import check_outputs, print_evaluation, write_json
from train.export import export
from train.metrics import read_metrics
from train.tokens import TokenWriter, open_tokens

RIPPLE = RippleConfig(
    vocab_size=VOCABULARY, block_size=8, n_layer=1, n_head=2, n_embd=8, dropout=0.3
)


@pytest.fixture
def model(tmp_path):
    """A small Ripple's folder."""
    save(random_model(RIPPLE), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def measured(model, tmp_path):
    """An evaluation of it at its context and beyond."""
    data = write_tokens(tmp_path / "val.bin", 301)
    return evaluate(model, data, lengths=(8, 20), batch_size=4)


def model_for(folder, tokenizer, config=RIPPLE):
    """A model of a tokenizer's vocabulary, with it in its folder."""
    save(random_model(replace(config, vocab_size=tokenizer.vocab_size)), folder)
    tokenizer.save(folder)
    return folder


def folder_of(folder, arrays):
    """A model folder of RIPPLE with these parameters, in their dtypes."""
    specs = {name: TensorSpec(value.shape, value.dtype) for name, value in arrays.items()}
    write_folder(folder, RIPPLE, specs, arrays.__getitem__)
    return folder


def windows_by_hand(ids: np.ndarray, T: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and targets as docs/data.md says; a target that was one before is -1."""
    starts = [s for s in range(0, len(ids), T) if s + T < len(ids)]
    windows = [(ids[s : s + T], ids[s + 1 : s + T + 1].astype(np.int64)) for s in starts]
    if left := (len(ids) - 1) % T:
        s = len(ids) - 1 - T
        targets = ids[s + 1 :].astype(np.int64)
        targets[: T - left] = -1
        windows.append((ids[s : s + T], targets))
    return windows


def sums_by_hand(config, files: list[np.ndarray], T: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the losses and count of the targets at each position, float64 [T]."""
    sums_T, counts_T = np.zeros(T), np.zeros(T)
    for inputs_T, targets_T in (w for ids in files for w in windows_by_hand(ids, T)):
        logits = np.float64(forward(random_model(config), inputs_T[None].astype(np.int32)))[0]
        losses_T = np.log(np.exp(logits).sum(-1)) - logits[np.arange(T), targets_T]
        sums_T += np.where(targets_T == -1, 0.0, losses_T)
        counts_T += targets_T != -1
    return sums_T, counts_T


@pytest.mark.parametrize("T", [5, 8, 20])
def test_means_are_those_of_float64_sums_by_hand(model, tmp_path, T):
    """Two shards, both with an uneven tail, a batch that they do not fill."""
    (tmp_path / "data").mkdir()
    paths = [write_tokens(tmp_path / "data" / f"{n}.bin", count, n) for n, count in
             enumerate((73, 33))]  # fmt: skip
    sums_T, counts_T = sums_by_hand(RIPPLE, [np.fromfile(path, "<u2") for path in paths], T)
    found = evaluate(model, tmp_path / "data", lengths=(T,), batch_size=4).lengths[0]
    assert found.position_tokens == tuple(counts_T)
    assert found.tokens == counts_T.sum() == 73 + 33 - 2
    np.testing.assert_allclose(found.position_loss, sums_T / counts_T, rtol=2e-6)
    loss = sums_T.sum() / counts_T.sum()
    np.testing.assert_allclose(found.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(found.bits_per_token, loss / math.log(2), rtol=1e-6)
    np.testing.assert_allclose(found.perplexity, math.exp(loss), rtol=1e-5)
    assert found.beyond_tokens == counts_T[8:].sum()
    if T > 8:
        np.testing.assert_allclose(found.beyond_loss, sums_T[8:].sum() / counts_T[8:].sum(), 2e-6)
    else:
        assert found.beyond_loss is None


def test_losses_are_the_same_whatever_the_chunk_and_the_batch(model, tmp_path, monkeypatch):
    data = write_tokens(tmp_path / "val.bin", 120)
    whole = evaluate(model, data, lengths=(20,)).lengths[0]
    monkeypatch.setattr(module, "LOGITS", 3 * 3 * VOCABULARY)  # 3 positions of 3 windows
    parts = evaluate(model, data, lengths=(20,), batch_size=3).lengths[0]
    assert (whole.batch_size, parts.batch_size) == (8192 // 20, 3)
    np.testing.assert_allclose(parts.position_loss, whole.position_loss, rtol=1e-6)
    assert parts.position_tokens == whole.position_tokens


def test_loss_is_the_one_that_training_recorded(finished, tmp_path):
    config, _ = finished
    export(config.out, tmp_path / "model")
    batches = {"batch_size": config.data.batch_size, "batches": config.eval.batches}
    found = evaluate(tmp_path / "model", config.data.val, **batches).lengths[0]
    recorded = [row for row in read_metrics(config.out) if row.get("val_loss")][-1]
    assert found.length == config.data.sequence_length
    assert (recorded["step"], found.tokens) == (8, recorded["val_tokens"])
    np.testing.assert_allclose(found.loss, recorded["val_loss"], rtol=1e-6)


ON_MESHES = """
import json, sys
from pathlib import Path
import jax
from train.evaluate import evaluate
assert jax.device_count() == 8
room = Path(sys.argv[1])
for name, mesh in json.loads(sys.argv[2]):
    found = evaluate(room / name, room / "val.bin", lengths=(12, 16), mesh=mesh, batch_size=8)
    print(json.dumps(found.to_json()))
"""


def test_eight_devices_measure_what_one_does(tmp_path):
    """To 1e-7 where whole windows go to each device, to 1e-6 where their products are cut."""
    shape = {"vocab_size": 64, "block_size": 16, "n_layer": 1, "n_head": 4}
    for name, config in {
        "ripple": RippleConfig(**shape, n_embd=24, dropout=0.1),
        "gpt": GPTConfig(**shape, n_kv_head=4, n_embd=16),
        "lumen": LumenConfig(
            vocab_size=64, max_seq_len=16, num_layers=1, num_heads=4, num_kv_heads=1,
            hidden_dim=16, intermediate_dim=32,
        ),
    }.items():  # fmt: skip
        save(random_model(config), tmp_path / name)
    write_tokens(tmp_path / "val.bin", 299, high=64)
    asked = [
        ("ripple", (-1, 1, 1)),
        ("gpt", (8, 1, 1)),
        ("lumen", (8, 1, 1)),
        ("ripple", (2, 2, 2)),
    ]
    shown = run_child(
        "-c", ON_MESHES, str(tmp_path), json.dumps(asked),
        flags=f"{EIGHT} --xla_backend_optimization_level=0",
    )  # fmt: skip
    for (name, mesh), line in zip(asked, shown.splitlines(), strict=True):
        one = evaluate(tmp_path / name, tmp_path / "val.bin", lengths=(12, 16), batch_size=8)
        for wanted, found in zip(
            one.to_json()["lengths"], json.loads(line)["lengths"], strict=True
        ):
            assert found["tokens"] == wanted["tokens"] == 298
            assert found["position_tokens"] == wanted["position_tokens"]
            limit = 1e-6 if mesh[2] > 1 else 1e-7
            np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=limit)
            np.testing.assert_allclose(found["position_loss"], wanted["position_loss"], rtol=5e-6)


def test_a_length_takes_one_program(model, tmp_path, monkeypatch):
    traced = []
    losses = module.token_losses
    monkeypatch.setattr(
        module, "token_losses",
        lambda unembed, x, targets, **options: traced.append(targets.shape)
        or losses(unembed, x, targets, **options),
    )  # fmt: skip
    evaluate(model, write_tokens(tmp_path / "val.bin", 301), lengths=(20, 8, 8), batch_size=4)
    assert traced == [(4, 8), (4, 20)]


def test_float32_products_are_exact_ones(model, tmp_path, monkeypatch):
    """As in training; bfloat16 is left to the platform."""
    seen = []
    losses = module.token_losses
    monkeypatch.setattr(
        module, "token_losses",
        lambda *args, **options: seen.append(jax.config.jax_default_matmul_precision)
        or losses(*args, **options),
    )  # fmt: skip
    data = write_tokens(tmp_path / "val.bin", 101)
    exact = evaluate(model, data).lengths[0].loss
    save(random_model(replace(RIPPLE, dtype="bfloat16")), tmp_path / "low")
    rough = evaluate(tmp_path / "low", data).lengths[0].loss
    assert seen == ["float32", None]
    assert exact != rough == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.float64], ids=["bfloat16 is taken", "float64 is refused"]
)
def test_parameters_keep_the_dtype_of_the_file(tmp_path, dtype):
    arrays = {name: value.astype(dtype) for name, value in random_arrays(RIPPLE).items()}
    folder = folder_of(tmp_path / "model", arrays)
    data = write_tokens(tmp_path / "val.bin", 101)
    if dtype == np.float64:
        with pytest.raises(ValueError, match="is float64, which JAX holds only in its x64 mode"):
            evaluate(folder, data)
    else:
        rounded = {name: value.astype(np.float32) for name, value in arrays.items()}
        same = evaluate(folder_of(tmp_path / "same", rounded), data)
        assert evaluate(folder, data).lengths[0].loss == pytest.approx(
            same.lengths[0].loss, rel=1e-7
        )


TEXT = "a naïve café — ¥5, 東京 and 🙂; " * 8


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "bpe, beside the data", "char, named"])
def test_bytes_are_those_of_the_text(tmp_path, kind):
    """All but the first token, which is no target; special tokens stand for none."""
    tokenizer = {
        "byte": ByteTokenizer, "char": lambda: CharTokenizer.of([TEXT]),
        "bpe": lambda: BPETokenizer.train([TEXT], 300),
    }[kind.split(",")[0]]()  # fmt: skip
    ids = tokenizer.encode(TEXT).tolist()
    first = len(tokenizer.decode(ids[:1]).encode())
    assert first == 1
    assert kind != "bpe" or len(ids) < len(TEXT) < len(TEXT.encode())
    if tokenizer.end_of_text is not None:
        ids = [*ids[:9], tokenizer.end_of_text, *ids[9:], tokenizer.end_of_text]
    save(random_model(replace(RIPPLE, vocab_size=tokenizer.vocab_size)), tmp_path / "model")
    (tmp_path / "data").mkdir()
    writer = TokenWriter(tmp_path / "data" / "val", vocab_size=tokenizer.vocab_size)
    writer.write(ids)
    writer.finish()
    if kind == "char, named":
        (tmp_path / "elsewhere").mkdir()
        named = tokenizer.save(tmp_path / "elsewhere")
    else:
        named = None
        tokenizer.save(tmp_path / ("data" if "data" in kind else "model"))
    found = evaluate(tmp_path / "model", tmp_path / "data", tokenizer=named)
    assert found.notes == ()
    assert found.tokenizer is not None
    result = found.lengths[0]
    assert result.tokens == len(ids) - 1
    assert result.text_bytes == len(TEXT.encode()) - first
    bits = result.loss * result.tokens / math.log(2)
    assert result.bits_per_byte == pytest.approx(bits / result.text_bytes, rel=1e-12)


def test_added_tokens_are_their_text_unless_they_are_special(tmp_path):
    content = json.loads((BPETokenizer.train([TEXT], 260).save(tmp_path)).read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [
        {"id": 260, "content": "  é  ", "special": False, **plain},
        {"id": 261, "content": "<pad>", "special": True, **plain},
    ]
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"]]}
    tokenizer = BPETokenizer(json.dumps(content))
    assert tokenizer.encode("é  é  é").size < 8
    np.array([4, 260, 261, 0, 5, 260, 1, 4, 4], "<u2").tofile(tmp_path / "val.bin")
    folder = model_for(tmp_path / "model", tokenizer)
    assert evaluate(folder, tmp_path / "val.bin").lengths[0].text_bytes == 6 + 1 + 6 + 1 + 1


def test_bytes_are_not_guessed(tmp_path):
    """Without a tokenizer, or with one of words, there is no figure but a note."""
    data = write_tokens(tmp_path / "val.bin", 101, high=3)
    save(random_model(RIPPLE), tmp_path / "model")
    found = evaluate(tmp_path / "model", data)
    assert found.notes == (
        "no bits per byte: no tokenizer lies in the model folder or beside the data (name one by "
        "--tokenizer)",
    )
    assert found.tokenizer is None
    assert (found.lengths[0].text_bytes, found.lengths[0].bits_per_byte) == (None, None)
    from tokenizers import Tokenizer, models

    words = BPETokenizer(Tokenizer(models.WordLevel({"a": 0, "bc": 1, "d": 2}, "a")).to_str())
    words.save(tmp_path / "model")
    found = evaluate(tmp_path / "model", data)
    assert len(found.notes) == 1
    assert "tokenizer.json is not byte-level" in found.notes[0]
    assert (found.lengths[0].text_bytes, found.lengths[0].bits_per_byte) == (None, None)


def test_only_byte_level_bpe_has_a_byte_for_each_character(tmp_path):
    """Unigram's vocabulary is a list, other models' tokens are not written in bytes."""
    from tokenizers import Tokenizer, decoders, models

    data = write_tokens(tmp_path / "val.bin", 101, high=2)
    save(random_model(RIPPLE), tmp_path / "model")
    for other in (models.Unigram([("a", -1.0), ("bé", -2.0)], 0), models.WordLevel({"a": 0}, "a")):
        raw = Tokenizer(other)
        raw.decoder = decoders.ByteLevel()
        (tmp_path / "model" / "tokenizer.json").write_text(raw.to_str())
        found = evaluate(tmp_path / "model", data)
        assert found.lengths[0].bits_per_byte is None
        assert "tokenizer.json is not byte-level" in found.notes[0]


def test_byte_level_bpe_need_not_say_that_it_is_bpe(tmp_path):
    """As GPT-2's file does not."""
    content = json.loads(BPETokenizer.train([TEXT], 300).save(tmp_path).read_text())
    assert content["model"].pop("type") == "BPE"
    tokenizer = BPETokenizer(json.dumps(content))
    folder = model_for(tmp_path / "model", tokenizer)
    ids = tokenizer.encode(TEXT)
    ids.astype("<u2").tofile(tmp_path / "val.bin")
    first = len(tokenizer.decode(ids[:1]).encode())
    found = evaluate(folder, tmp_path / "val.bin").lengths[0]
    assert found.text_bytes == len(TEXT.encode()) - first


def test_tokenizers_must_be_one_and_the_datas(tmp_path):
    folder = model_for(tmp_path / "model", CharTokenizer("abcd"))
    data = write_tokens(tmp_path / "val.bin", 101, high=4)
    same = tmp_path / "same.json"
    same.write_text(json.dumps(json.loads((folder / "tokenizer.json").read_text())))
    assert load_tokenizer(same).vocab_size == 4
    assert evaluate(folder, data, tokenizer=same).lengths[0].text_bytes == 100
    other = CharTokenizer("abdc").save(tmp_path)
    with pytest.raises(ValueError, match="is another tokenizer than .*prepare the data with"):
        evaluate(folder, data, tokenizer=other)
    (folder / "tokenizer.json").unlink()
    (tmp_path / "large").mkdir()
    large = CharTokenizer("abcde").save(tmp_path / "large")
    with pytest.raises(ValueError, match="has 5 ids, the model's vocab_size is 4"):
        evaluate(folder, data, tokenizer=large)
    (tmp_path / "small").mkdir()
    small = CharTokenizer("abc").save(tmp_path / "small")
    with pytest.raises(ValueError, match="the data holds id 3, which .* does not have"):
        evaluate(folder, data, tokenizer=small)


def test_limit_of_batches_reads_the_first_and_says_so(model, tmp_path):
    data = write_tokens(tmp_path / "val.bin", 289)
    one = evaluate(model, data, batch_size=4, batches=2)
    assert (one.lengths[0].tokens, one.notes[1:]) == (64, ())
    two = evaluate(model, data, lengths=(8, 9), batch_size=4, batches=2)
    assert two.notes[1:] == ("under a limit of batches each length is measured on another text",)


def test_positions_without_a_target_have_no_mean(model, tmp_path):
    """One batch of one window, the tail that repeats all but its last targets."""
    data = write_tokens(tmp_path / "val.bin", 11)
    found = evaluate(model, data, batch_size=1, batches=1).lengths[0]
    assert found.position_tokens == (0, 0, 0, 0, 0, 0, 1, 1)
    assert found.position_loss[:6] == (None,) * 6
    assert found.loss == pytest.approx(sum(found.position_loss[6:]) / 2)
    assert [loss is None for _, _, loss in found.bins()] == [True, True, True, False]


def batch_of(data, T, rows) -> EvaluationBatches:
    return EvaluationBatches(
        open_tokens(data), batch_size=rows, sequence_length=T, vocab_size=VOCABULARY, limit=None
    )


def test_files_too_short_for_a_length_are_noted(model, tmp_path):
    (tmp_path / "data").mkdir()
    write_tokens(tmp_path / "data" / "a.bin", 50)
    write_tokens(tmp_path / "data" / "b.bin", 12)
    found = evaluate(model, tmp_path / "data", lengths=(8, 12))
    assert [(r.tokens, r.unused) for r in found.lengths] == [(60, 0), (49, 12)]
    assert found.notes[1:] == ("length 12: 12 tokens of files too short for it are not read",)


def test_loss_that_is_not_finite_is_refused_by_its_place(tmp_path):
    ids = np.random.default_rng(0).integers(0, 60, 101).astype("<u2")
    ids[77] = 66
    ids.tofile(tmp_path / "val.bin")
    arrays = dict(random_arrays(RIPPLE))
    arrays["embedding"] = arrays["embedding"].copy()
    arrays["embedding"][66] = np.nan
    folder = folder_of(tmp_path / "model", arrays)
    batches = batch_of(tmp_path / "val.bin", 8, 2)
    places = [
        (batch, int(place[0]))
        for batch in range(len(batches))
        for place in np.argwhere(batches.rows(batch, np.arange(2))[0] == 66)
    ]
    [(batch, row)] = places
    assert batch > 0
    words = (
        rf"the loss is nan at position \d of row {row} of batch {batch} at length 8: the weights"
    )
    with pytest.raises(ValueError, match=words):
        evaluate(folder, tmp_path / "val.bin", batch_size=2)


@pytest.mark.parametrize("fault", ["memory", "a loss"])
def test_lengths_before_one_that_fails_are_kept(model, tmp_path, monkeypatch, fault):
    """And written, with the words; the lengths after it are not tried."""
    data = write_tokens(tmp_path / "val.bin", 301)
    whole = evaluate(model, data, lengths=(5, 8), batch_size=4)
    assert whole.failure is whole.to_json()["failure"] is None
    compiled, tried = module._compile, []

    def at_twenty(config, params, devices, rows, T):
        tried.append(T)
        if T < 20:
            return compiled(config, params, devices, rows, T)
        if fault == "memory":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return lambda *_: np.full((rows, T), np.inf)

    monkeypatch.setattr(module, "_compile", at_twenty)
    found = evaluate(model, data, lengths=(30, 20, 8, 5), batch_size=4)
    assert tried == [5, 8, 20]
    assert found == replace(whole, failure=found.failure)
    assert found.failure.startswith(
        "not measured at length 20, 30: the devices' memory is not enough for 4 windows of 20 "
        "tokens: lower the batch size"
        if fault == "memory"
        else "not measured at length 20, 30: the loss is inf at position 1 of row 0 of batch 0 at "
        "length 20: the weights"
    )
    write_json(found, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert [each["length"] for each in written["lengths"]] == [5, 8]
    assert written["failure"] == found.failure
    console = Console(file=io.StringIO(), width=100)
    print_evaluation(found, console)
    printed = console.file.getvalue()
    assert f"{found.lengths[1].loss:.4f}" in printed
    assert "not measured" not in printed  # but once, by the caller


def test_too_little_memory_is_said_in_words(model, tmp_path, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    monkeypatch.setattr(module, "_compile", full)
    with pytest.raises(ValueError, match="memory is not enough for 4 windows of 20 tokens: lower"):
        evaluate(model, write_tokens(tmp_path / "val.bin", 99), lengths=(20,), batch_size=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": (0,)}, "length 0: expected 1 or more"),
        ({"lengths": (8, 400)}, "T = 400: it takes 401 tokens, the longest of 1 has 301"),
        ({"batch_size": 0}, "a batch of 0 windows"),
        ({"batches": 0}, "limit is 0"),
        ({"mesh": (2, 1, 1)}, "mesh data 2 x fsdp 1 x tensor 1 = 2 devices, but there are 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(model, tmp_path, monkeypatch, options, words):
    monkeypatch.setattr(module, "place", None)
    with pytest.raises(ValueError, match=words):
        evaluate(model, write_tokens(tmp_path / "val.bin", 301), **options)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (replace(RIPPLE, use_absolute_pos_emb=True), "block_size"),
        (GPTConfig(vocab_size=8, block_size=8, n_layer=1, n_head=2, n_kv_head=1, n_embd=8),
         "block_size"),
        (LumenConfig(vocab_size=8, max_seq_len=8, num_layers=1, num_heads=2, num_kv_heads=1,
                     hidden_dim=8, intermediate_dim=8), "max_seq_len"),
    ],
    ids=["ripple with positions", "gpt", "lumen"],
)  # fmt: skip
def test_length_beyond_the_context_is_refused_by_name(tmp_path, config, name):
    save(random_model(config), tmp_path / "model")
    with pytest.raises(ValueError, match=f"length 9 is more than the model's {name} of 8"):
        evaluate(tmp_path / "model", write_tokens(tmp_path / "val.bin", 99, high=8), lengths=(9,))


def test_data_of_a_larger_vocabulary_is_refused(model, tmp_path):
    writer = TokenWriter(tmp_path / "val", vocab_size=VOCABULARY + 1)
    writer.write(np.arange(20))
    writer.finish()
    with pytest.raises(ValueError, match="a vocabulary of 68, the model's vocab_size is 67"):
        evaluate(model, tmp_path / "val")
    with pytest.raises(ValueError, match="which is no id of the model's vocabulary of 67"):
        evaluate(model, write_tokens(tmp_path / "val.bin", 99, high=90))


def test_only_a_model_folder_is_taken(finished, tmp_path):
    data = finished[0].data.val
    (tmp_path / "model.pt").write_bytes(b"PK")
    for path, words in (
        (finished[0].out, "is a training run: .*`jaxslm export .* out/`"),
        (tmp_path / "model.pt", "is no model folder: .*`jaxslm convert .* out/`"),
        (tmp_path, "is no model folder: "),
    ):
        with pytest.raises(ValueError, match=words):
            evaluate(path, data)
    with pytest.raises(FileNotFoundError, match="does not exist: name a model folder"):
        evaluate(tmp_path / "none", data)


def test_bins_hold_the_mean_of_all_their_targets(measured):
    for result in measured.lengths:
        bins = result.bins()
        assert bins[:4] == [(1, 1, result.position_loss[0]), (2, 2, result.position_loss[1]),
                            (3, 4, bins[2][2]), (5, 8, bins[3][2])]  # fmt: skip
        losses, counts = np.array(result.position_loss), np.array(result.position_tokens)
        for first, last, loss in (*bins, *result.bins(3)):
            within = slice(first - 1, last)
            np.testing.assert_allclose(
                loss, (losses * counts)[within].sum() / counts[within].sum(), rtol=1e-12
            )
    assert [(first, last) for first, last, _ in bins[4:]] == [(9, 16), (17, 20)]
    fine = measured.lengths[1].bins(3)
    assert [first for first, _, _ in fine] == [1, *(last + 1 for _, last, _ in fine[:-1])]
    assert fine[-1][1] == 20


def test_everything_is_said_on_the_terminal_and_as_json(measured, tmp_path):
    console = Console(file=io.StringIO(), width=100)
    print_evaluation(measured, console)
    lines = console.file.getvalue().splitlines()
    short, long = measured.lengths
    found = [line.split() for line in lines]
    number = f"{long.loss:.4f}"
    assert ["20", "300", number, f"{long.perplexity:.2f}", f"{long.bits_per_token:.4f}",
            f"{long.beyond_loss:.4f}"] in found  # fmt: skip
    assert ["1", f"{short.position_loss[0]:.4f}", f"{long.position_loss[0]:.4f}"] in found
    assert found[-1][:4] == ["no", "bits", "per", "byte:"]
    write_json(replace(measured, lengths=(replace(short, perplexity=math.inf), long)),
               tmp_path / "out.json")  # fmt: skip
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["format"], written["kind"], written["training_length"]) == (
        "jaxslm-evaluation", "ripple", 8
    )  # fmt: skip
    assert written["lengths"][0]["perplexity"] is None
    assert written["lengths"][1]["position_loss"] == list(long.position_loss)
    assert written["lengths"][1]["beyond_tokens"] == long.beyond_tokens


@pytest.mark.parametrize("lengths", [1, 2])
def test_plot_is_a_png_of_1200_by_500(measured, tmp_path, lengths):
    path = tmp_path / "loss.png"
    plot(replace(measured, lengths=measured.lengths[:lengths]), path)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert [int.from_bytes(head[at : at + 4], "big") for at in (16, 20)] == [1200, 500]


def test_outputs_appear_whole_or_not_at_all(measured, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def cut_short(self, path, **_):
        path.write_bytes(b"\x89PNG")
        raise OSError("disk full")

    room = tmp_path / "room"
    room.mkdir()
    plot(measured, room / "loss.png")
    before = (room / "loss.png").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", cut_short)
        with pytest.raises(OSError, match="disk full"):
            plot(measured, room / "loss.png")
    with pytest.raises(TypeError):
        write_json(replace(measured, model=object()), room / "out.json")
    assert [path.name for path in room.iterdir()] == ["loss.png"]
    assert (room / "loss.png").read_bytes() == before


def test_only_an_earlier_output_is_replaced(measured, tmp_path):
    png, out = tmp_path / "loss.png", tmp_path / "out.json"
    check_outputs(out, png)
    plot(measured, png)
    write_json(measured, out)
    check_outputs(out, png)
    check_outputs(None, None)
    with pytest.raises(FileExistsError, match=r"loss\.png exists and is no earlier output"):
        check_outputs(png, None)
    with pytest.raises(FileExistsError, match=r"out\.json exists and is no earlier output"):
        check_outputs(None, out)
    with pytest.raises(ValueError, match="--json and --plot both name"):
        check_outputs(tmp_path / "x", tmp_path / "model" / ".." / "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
        check_outputs(tmp_path / "empty", None)
    with pytest.raises(FileNotFoundError, match="does not exist: create it first"):
        check_outputs(None, tmp_path / "none" / "loss.png")
