"""`jaxslm generate`, and `jaxslm eval` from the command line."""

import json

import numpy as np
import pytest

import jaxslm
from jaxslm.models import GPTConfig
from jaxslm.tokenizer import ByteTokenizer, CharTokenizer
from tests.jaxslm.support import random_model
from tests.train.runs import quietly, small_config, write_tokens

CONFIG = GPTConfig(vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_kv_head=1, block_size=64)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Compiled programs are kept for these tests, not in the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a byte tokenizer."""
    path = tmp_path_factory.mktemp("models") / "model"
    jaxslm.save(random_model(CONFIG), path)
    ByteTokenizer().save(path)
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The same model without a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "bare"
    jaxslm.save(random_model(CONFIG), path)
    return path


def test_it_prints_prompt_and_text_and_says_what_it_took(folder, run):
    code, out, err = run("generate", folder, "--prompt", "Well, ", "--tokens", 20)
    assert code == 0
    assert out.startswith("Well, ")
    assert out.endswith("\n")
    assert "20 tokens in " in err
    assert "ended as many as asked for" in err


def test_the_same_seed_gives_the_same_text_and_another_another(folder, run):
    words = ["generate", folder, "--prompt", "a", "--tokens", 20, "--seed"]
    first, again, other = run(*words, 3)[1], run(*words, 3)[1], run(*words, 4)[1]
    assert first == again != other


def test_a_stream_prints_the_same_text(folder, run):
    words = ["generate", folder, "--prompt", "Prince", "--tokens", 25]
    plain = run(*words)[1]
    assert run(*words, "--stream")[1] == plain
    stop = plain[12:14]
    assert run(*words, "--stream", "--stop", stop)[1] == run(*words, "--stop", stop)[1]


def test_prompts_of_a_file_become_lines_of_json_whatever_the_batch(folder, run, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo words\né\n", "utf-8")
    lines = [json.dumps({"prompt": p}) for p in ("one", "two words", "é")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), "utf-8")
    texts = []
    for name, size in (("prompts.txt", 8), ("prompts.jsonl", 2), ("prompts.txt", 1)):
        out = tmp_path / f"{name}-{size}.jsonl"
        code, printed, err = run(
            "generate", folder, "--prompts", tmp_path / name, "--tokens", 9, "--samples", 2,
            "--batch-size", size, "--jsonl", out, "--temperature", 1.3,
        )  # fmt: skip
        assert (code, printed) == (0, ""), err
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["prompt"] for row in rows] == ["one"] * 2 + ["two words"] * 2 + ["é"] * 2
        for row in rows:
            assert row.keys() == {"prompt", "text", "prompt_ids", "new_ids", "finish"}
            assert bytes(row["prompt_ids"]).decode() == row["prompt"]
        texts.append([row["new_ids"] for row in rows])
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] != texts[0][1]


def test_several_samples_are_set_apart(folder, run):
    _, out, _ = run("generate", folder, "--prompt", "a", "--tokens", 4, "--samples", 3)
    assert out.count("---------------\n") == 3


def test_greedy_text_does_not_depend_on_the_seed(folder, run):
    words = ["generate", folder, "--prompt", "b", "--tokens", 9, "--temperature", 0]
    assert run(*words, "--seed", 1)[1] == run(*words, "--seed", 2)[1]


def test_without_a_prompt_a_document_begins(folder, run):
    assert run("generate", folder, "--tokens", 5)[0] == 0


def test_without_a_tokenizer_ids_go_in_and_out(bare, run, refused):
    code, out, _ = run("generate", bare, "--prompt-ids", "1,2", "3", "--tokens", 4)
    assert code == 0
    assert out.split()[:3] == ["1", "2", "3"]
    assert len(out.split()) == 7
    streamed = run("generate", bare, "--prompt-ids", "1,2,3", "--tokens", 4, "--stream")[1]
    assert streamed.split() == out.split()
    refused(bare, "has no tokenizer.json", "generate", bare, "--prompt", "text")
    refused(bare, "--stop needs a tokenizer", "generate", bare, "--prompt-ids", 1, "--stop", "x")


def test_a_tokenizer_may_be_named(bare, run, tmp_path):
    path = ByteTokenizer().save(tmp_path)
    code, out, _ = run("generate", bare, "--tokenizer", path, "--prompt", "abc", "--tokens", 3)
    assert code == 0
    assert out.startswith("abc")


def test_a_stop_string_may_hold_a_line_end(folder, run, tmp_path):
    words = ["generate", folder, "--prompt", "x", "--tokens", 63, "--temperature", 3.0]
    words += ["--top-k", "None", "--jsonl"]
    for seed in range(20):
        run(*words, tmp_path / f"{seed}.jsonl", "--seed", seed)
        free = json.loads((tmp_path / f"{seed}.jsonl").read_text())["text"]
        if "\n" in free[:-1]:
            break
    run(*words, tmp_path / "stopped.jsonl", "--seed", seed, "--stop", r"\n")
    row = json.loads((tmp_path / "stopped.jsonl").read_text())
    assert row["finish"] == "stop"
    assert row["text"] == free[: free.index("\n") + 1]


def test_a_prompt_file_is_cut_at_line_ends_only(folder, run, tmp_path):
    texts = ["A\x0cB", "C\u2028D", "E\x85F"]
    (tmp_path / "p.txt").write_bytes(("\ufeff" + "\r\n".join(texts) + "\r\n").encode())
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "p.JSONL").write_text("\ufeff" + "\n".join(lines), "utf-8")
    for name in ("p.txt", "p.JSONL"):
        out = tmp_path / f"{name}.out"
        assert run("generate", folder, "--prompts", tmp_path / name, "--tokens", 1, "--jsonl", out)
        found = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
        assert found == texts


def test_what_was_made_before_a_failure_is_kept_and_said(folder, run, tmp_path, monkeypatch):
    from jaxslm.generation import Generator

    (tmp_path / "p.txt").write_text("one\ntwo\nthree")
    usual, calls = Generator.__call__, []

    def fail(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: 3 GB")
        return usual(self, *arguments, **options)

    words = ["generate", folder, "--prompts", tmp_path / "p.txt", "--tokens", 2, "--batch-size", 1]
    words += ["--jsonl", tmp_path / "out.jsonl"]
    with monkeypatch.context() as patch:
        patch.setattr(Generator, "__call__", fail)
        code, _, err = run(*words)
    assert code == 2
    assert "2 finished samples are in" in err
    assert "the devices' memory is not enough: take smaller batches" in err
    assert not (tmp_path / "out.jsonl").exists()
    kept = (tmp_path / "out.jsonl.partial").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in kept] == ["one", "two"]
    code, _, err = run(*words)
    assert code == 2
    assert "holds samples of a run that failed" in err
    assert run(*words, "--overwrite")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "p.txt"]


def test_ids_and_text_of_a_prompt_in_ids(folder, run):
    code, out, _ = run("generate", folder, "--prompt-ids", "97,98", "--tokens", 2)
    assert code == 0
    assert out.startswith("ab")


def test_special_tokens_are_text_unless_asked_for(folder, run, tmp_path):
    counts = []
    for option in ([], ["--special"]):
        out = tmp_path / f"{len(option)}.jsonl"
        run("generate", folder, "--prompt", "<|endoftext|>", "--tokens", 1, "--jsonl", out, *option)
        counts.append(len(json.loads(out.read_text())["prompt_ids"]))
    assert counts == [13, 1]


def test_the_context_is_said(folder, run):
    _, _, err = run("generate", folder, "--prompt", "abc", "--tokens", 500, "--ignore-end")
    assert "62 tokens in" in err
    assert "ended at the model's context of 64 tokens" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "a", "--temperature", "-1"], "temperature must be 0"),
        (["--prompt", "a", "--top-k", "0"], "top_k must be a whole number"),
        (["--prompt", "a", "--tokens", "-1"], "max_new_tokens must be a whole number"),
        (["--prompt", "a", "--tokens", "3000000000"], "max_new_tokens must be a whole number"),
        (["--prompt", "a", "--seed", str(2**32)], "--seed 4294967296: give 0 to"),
        (["--prompt", "a", "--stop", "x", ""], "strings that are not empty"),
        (["--prompts", "{room}/late.txt", "--batch-size", "1"], "late.txt line 3 has 70 tokens"),
        (["--prompts", "{room}/p.ndjson"], "name it .jsonl"),
        (["--prompt", "a", "--samples", "0"], "give 1 or more"),
        (["--prompt", "a", "--seed", "-1"], "--seed -1"),
        (["--prompt", "a", "--prompt-ids", "1"], "--prompt and --prompt-ids: give one of them"),
        (["--prompt-ids", "1,x"], "--prompt-ids 1,x: give whole numbers"),
        (["--prompt-ids", "999"], "token 999 at 0: the model's vocabulary is 0 to 256"),
        (["--prompt", "a", "--samples", "2", "--stream"], "--stream shows one sample"),
        (["--prompt", "a" * 70], "70 tokens, the model's context is 64"),
        (["--prompts", "{room}/none.txt"], "none.txt: No such file"),
        (["--prompts", "{room}/empty.txt"], "holds no prompt"),
        (["--prompts", "{room}/bad.jsonl"], "line 1: expected"),
        (["--prompts", "{room}/broken.jsonl"], "line 2 is not JSON"),
        (["--prompt", "a", "--jsonl", "{room}/empty.txt"], "exists: pass --overwrite"),
        (["--prompt", "a", "--jsonl", "{room}/none/x.jsonl"], "does not exist: create it first"),
        (["--prompt", "a", "--mesh", "3", "1", "1"], "but there are"),
        (["--prompt", "a", "--tokenizer", "{room}/empty.txt"], "is no tokenizer"),
    ],
)
def test_what_cannot_be_is_refused(options, words, folder, refused, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "late.txt").write_text("a\n\n" + "b" * 70)
    (tmp_path / "p.ndjson").write_text("{}")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt\n')
    refused(tmp_path, words, "generate", folder, *(o.format(room=tmp_path) for o in options))


def test_what_is_no_model_folder_is_refused(refused, tmp_path):
    (tmp_path / "ckpt.pt").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "ckpt.pt", tmp_path / "none"):
        refused(tmp_path, "is not a model folder", "generate", path, "--prompt-ids", 1)


def test_a_character_that_the_tokenizer_lacks_is_named(bare, refused, tmp_path):
    path = CharTokenizer("ab").save(tmp_path)
    refused(tmp_path, "'c'", "generate", bare, "--tokenizer", path, "--prompt", "abc")
    refused(tmp_path, "has no end-of-text", "generate", bare, "--tokenizer", path)


def test_logits_that_are_not_finite_leave_no_file(refused, tmp_path):
    model = random_model(CONFIG, seed=7)
    broken = jaxslm.weights.from_arrays(
        CONFIG,
        {n: np.asarray(w) * np.nan for n, w in jaxslm.weights.to_arrays(model).items()},
    )
    jaxslm.save(broken, tmp_path / "broken")
    refused(
        tmp_path, "not finite at new token 1", "generate", tmp_path / "broken", "--prompt-ids", 1,
        "--jsonl", tmp_path / "out.jsonl",
    )  # fmt: skip


def test_evaluation_of_an_exported_run(run, refused, tmp_path):
    config = small_config(tmp_path)
    assert quietly(config)[0] == 0
    assert run("export", config.out, tmp_path / "out")[0] == 0
    data = write_tokens(tmp_path / "held.bin", 400, seed=5)
    report = tmp_path / "report.json"
    code, out, err = run("eval", tmp_path / "out", "--data", data, "--lengths", "8,16", "32",
                         "--json", report, "--plot", tmp_path / "loss.png")  # fmt: skip
    assert code == 0, err
    assert [row["length"] for row in json.loads(report.read_text())["lengths"]] == [8, 16, 32]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "perplexity" in out
    refused(tmp_path, "is a training run", "eval", config.out, "--data", data)
    refused(tmp_path, "--lengths 8x: give whole numbers", "eval", tmp_path / "out", "--data", data,
            "--lengths", "8x")  # fmt: skip
