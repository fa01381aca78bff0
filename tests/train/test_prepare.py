import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import train.prepare
from jaxslm.tokenizer import ByteTokenizer, CharTokenizer, load_tokenizer, tokenizer_sha256
from train.prepare import prepare
from train.tokens import open_tokens

END = 256


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def ids(out: Path, split: str) -> np.ndarray:
    tokens = open_tokens(out / split)
    return np.concatenate([tokens.tokens(index) for index in range(len(tokens.files))])


def documents(out: Path, split: str) -> list[str]:
    """The documents of a split of byte tokens that ends with one."""
    found = ids(out, split)
    assert found[-1] == END
    return ByteTokenizer().decode(found[:-1]).split("<|endoftext|>")


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return str(path)


def json_lines(path: Path, texts, field="text") -> str:
    return write(path, "".join(json.dumps({field: text, "n": 1}) + "\n" for text in texts))


def test_one_document_is_cut_and_only_its_end_is_marked(tmp_path):
    name = write(tmp_path / "a.txt", "0123456789" * 10)
    prepared = prepare([name], tokenizer="byte", out=tmp_path / "out", val_fraction=0.25)
    assert ByteTokenizer().decode(ids(tmp_path / "out", "train")) == ("0123456789" * 8)[:75]
    assert documents(tmp_path / "out", "val") == [("0123456789" * 10)[75:]]
    assert prepared.tokens == {"train": 75, "val": 26}
    assert prepared.documents == {"train": 1, "val": 1}
    assert prepared.characters == 100


def test_output_is_what_the_trainer_opens(tmp_path):
    name = write(tmp_path / "a.txt", "abc" * 100)
    prepare([name], tokenizer="char", out=tmp_path / "out", shard_tokens=50)
    for split, count in (("train", 270), ("val", 30)):
        tokens = open_tokens(tmp_path / "out", split=split)
        assert (tokens.count, tokens.vocab_size) == (count, 3)
        assert tokens.tokenizer == tmp_path / "out" / "tokenizer.json"
        meta = json.loads((tmp_path / "out" / split / "meta.json").read_text())
        identity = {"kind": "char", "sha256": tokenizer_sha256(tokens.tokenizer)}
        assert meta["tokenizer"] == identity
        assert [shard["count"] for shard in meta["shards"]] == [50] * (count // 50) + [
            count % 50
        ] * (count % 50 > 0)


@given(
    st.lists(st.text("abé🙂\n", min_size=1, max_size=30), min_size=2, max_size=20).filter(
        lambda texts: len(set(texts)) > 1
    ),
    st.sampled_from([0.05, 0.1, 0.5, 0.9]),
)
def test_documents_stay_whole_in_order_and_equal_ones_together(tmp_path_factory, texts, fraction):
    folder = tmp_path_factory.mktemp("documents")
    name = json_lines(folder / "a.jsonl", texts)
    prepare([name], tokenizer="byte", out=folder / "out", val_fraction=fraction)
    train, val = (documents(folder / "out", split) for split in ("train", "val"))
    assert not set(train) & set(val)
    assert train == [text for text in texts if text in set(train)]
    assert val == [text for text in texts if text in set(val)]
    assert len(train) + len(val) == len(texts)
    total = len("".join(texts))
    if len(set(val)) > 1:  # a single one may be the smallest, and larger than its share
        assert len("".join(val)) <= fraction * total


def test_validation_gets_about_its_share_of_many_documents(tmp_path):
    rng = np.random.default_rng(0)
    texts = [f"{n}" + "x" * int(rng.integers(1, 200)) for n in range(500)]
    name = json_lines(tmp_path / "a.jsonl", texts)
    prepared = prepare([name], tokenizer="byte", out=tmp_path / "out", val_fraction=0.1)
    share = len("".join(documents(tmp_path / "out", "val"))) / len("".join(texts))
    assert 0.095 < share <= 0.1
    assert sum(prepared.documents.values()) == 500


def test_no_validation_makes_no_val(tmp_path):
    name = json_lines(tmp_path / "a.jsonl", ["a", "b"])
    prepared = prepare([name], tokenizer="byte", out=tmp_path / "out", val_fraction=0)
    assert documents(tmp_path / "out", "train") == ["a", "b"]
    assert not (tmp_path / "out" / "val").exists()
    assert prepared.tokens == {"train": 4}


def test_line_ends_and_marks_are_kept(tmp_path):
    text = "\ufeffa\r\nb\rc\n\n\u2028d"
    prepare(
        [write(tmp_path / "a.txt", text)], tokenizer="byte", out=tmp_path / "out", val_fraction=0
    )
    assert documents(tmp_path / "out", "train") == [text]


def test_the_name_of_a_special_token_ends_no_document_unless_asked(tmp_path):
    name = write(tmp_path / "a.txt", "a<|endoftext|>b")
    prepare([name], tokenizer="byte", out=tmp_path / "a", val_fraction=0)
    assert (ids(tmp_path / "a", "train") == END).sum() == 1
    prepare([name], tokenizer="byte", out=tmp_path / "b", val_fraction=0, special_tokens=True)
    assert ids(tmp_path / "b", "train").tolist() == [97, END, 98, END]


def test_a_folder_is_its_text_files_in_order(tmp_path):
    root = tmp_path / "src"
    write(root / "b.py", "b")
    write(root / "a" / "z.py", "z")
    write(root / "a.txt", "a")
    write(root / ".hidden" / "x.py", "hidden")
    write(root / ".env", "hidden")
    write(root / "empty.py", "")
    write(root / "a" / "binary.bin", "\0")
    (root / "latin.txt").write_bytes(b"caf\xe9")
    (root / "cut.txt").write_bytes("é".encode()[:1])
    write(tmp_path / "outside.py", "outside")
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe")
    out = root / "data"
    prepared = prepare([str(root)], tokenizer="byte", out=out, val_fraction=0)
    assert documents(out, "train") == ["z", "a", "b"]
    assert prepared.skipped == {
        "hidden": 2, "binary": 1, "not UTF-8": 2, "links": 2, "empty documents": 1
    }  # fmt: skip
    assert "skipped: " in str(prepared)
    assert "not UTF-8 2" in str(prepared)
    before = tree(out)
    prepare([str(root)], tokenizer="byte", out=out, val_fraction=0, overwrite=True)
    assert tree(out) == before  # its own output is no input


def test_inputs_follow_in_the_order_given(tmp_path):
    one, two = (
        write(tmp_path / "1.txt", "one"),
        json_lines(tmp_path / "2.jsonl", ["a", "b"], "code"),
    )
    prepare([two, one], tokenizer="byte", out=tmp_path / "out", val_fraction=0, field="code")
    assert documents(tmp_path / "out", "train") == ["a", "b", "one"]


def test_the_standard_library_is_the_built_in_corpus(tmp_path):
    prepared = prepare(["python-stdlib"], tokenizer="byte", out=tmp_path / "out")
    assert prepared.documents["train"] > 100
    assert 2 * 10**6 < prepared.characters < 10**7
    train, val = (documents(tmp_path / "out", split) for split in ("train", "val"))
    stdlib = Path(sysconfig.get_path("stdlib"))
    for module in ("argparse.py", "ast.py"):
        assert (stdlib / module).read_bytes().decode() in train + val


def test_bpe_is_trained_on_the_inputs(tmp_path):
    name = write(tmp_path / "a.txt", "the cat sat on the mat\n" * 50)
    prepared = prepare([name], tokenizer="bpe:270", out=tmp_path / "out")
    assert (prepared.tokenizer, prepared.vocab_size) == ("bpe", 270)
    tokenizer = load_tokenizer(tmp_path / "out")
    val = ids(tmp_path / "out", "val")
    assert val[-1] == tokenizer.end_of_text == 0
    text = tokenizer.decode(np.concatenate([ids(tmp_path / "out", "train"), val[:-1]]))
    assert text == "the cat sat on the mat\n" * 50


def test_a_long_text_in_parts_gets_the_same_ids(tmp_path, monkeypatch):
    text = "".join(f"line {n} of a text\n" + "\n" * (n % 3) + "  indented.\n" for n in range(400))
    name = write(tmp_path / "a.txt", text)
    prepare([name], tokenizer="bpe:300", out=tmp_path / "whole")
    monkeypatch.setattr(train.prepare, "PART", 500)
    monkeypatch.setattr(train.prepare, "BATCH", 2000)
    assert len(list(train.prepare._parts(Path(name)))) > 10
    prepare([name], tokenizer="bpe:300", out=tmp_path / "parts")
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


@example("." * 200)
@given(st.text(st.sampled_from("a \n.é"), max_size=200))
def test_parts_lose_nothing_even_without_a_place_to_cut(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("parts") / "a.txt"
    write(path, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.prepare, "PART", 8)
        parts = list(train.prepare._parts(path))
    assert "".join(parts) == text
    assert all(parts)
    assert all(len(part) <= 4 * 8 + 8 for part in parts)


def test_a_tokenizer_that_loses_characters_is_said(tmp_path):
    name = json_lines(tmp_path / "a.jsonl", ["kept", "löst", "lost ß"])
    prepare([json_lines(tmp_path / "b.jsonl", ["abc"])], tokenizer="bpe:260", out=tmp_path / "made",
            val_fraction=0)  # fmt: skip
    value = json.loads((tmp_path / "made" / "tokenizer.json").read_text())
    del value["model"]["vocab"]["Ã"]  # the first byte of both
    lossy = write(tmp_path / "lossy.json", json.dumps(value))
    prepared = prepare([name], tokenizer=lossy, out=tmp_path / "out", val_fraction=0)
    assert prepared.changed == 2
    assert "2 documents do not decode" in str(prepared)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"text": "a"}\n{"text": 1}\n',
            r"line 2 has no text in the field 'text' \(it holds: text",
        ),
        ('{"text": "a"}\n\n{"other": "a", "b": 1}\n', r"line 3 has no text .*: other, b\)"),
        ('{"text": "a"}\n["text"]\n', r"line 2 has no text .*: list\)"),
        ('{"text": "a"}\n{"text": "a"\n', "line 2 is no JSON in UTF-8"),
        ("[" * 100_000, "line 1 is no JSON"),
        ('{"text": "a\\ud800"}\n', "line 1: character 1 is half of a surrogate pair"),
        ('{"text": ""}\n\n', "there is no text for train"),
        ("", "there is no text for train"),
    ],
)
def test_malformed_json_lines_name_the_line_and_write_nothing(tmp_path, content, words):
    name = write(tmp_path / "a.jsonl", content)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        prepare([name], tokenizer="char", out=tmp_path / "out")
    assert name in str(caught.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"caf\xe9", r"a\.txt is no text in UTF-8 \(not UTF-8\)"),
        ("a.txt", b"a\0b", r"a\.txt is no text in UTF-8 \(binary\)"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "line 1 is no JSON in UTF-8"),
        ("a.txt", b"", "there is no text for train"),
        ("a.txt", b"a", "there is no text for train"),  # its one character is for val
        ("a.jsonl", b'{"text": "same"}\n' * 5, "there is no text for val"),
    ],
)
def test_inputs_that_are_no_text_or_too_little_write_nothing(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        prepare([str(path)], tokenizer="byte", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_character_names_its_document_and_place(tmp_path):
    CharTokenizer("abc\n").save(tmp_path)
    options = {"tokenizer": str(tmp_path / "tokenizer.json"), "out": tmp_path / "out"}
    name = json_lines(tmp_path / "a.jsonl", ["abc", "cab", "ab\nd", "a"])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: character 'd' .* line 2, column 1"):
        prepare([name], **options)
    name = write(tmp_path / "a.txt", "abc" * 3 + "\nd")
    words = r"a\.txt, in what follows its first 9 characters: character 'd' .* line 2, column 1"
    with pytest.raises(ValueError, match=words):
        prepare([name], **options, val_fraction=0.15)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tokenizer": "other"}, ValueError, "tokenizer is 'other', expected byte, char, bpe:2048"),
        ({"tokenizer": "bpe:many"}, ValueError, "tokenizer is 'bpe:many'"),
        ({"tokenizer": "bpe:"}, ValueError, "tokenizer is 'bpe:'"),
        ({"tokenizer": "bpe:100"}, ValueError, "a BPE vocabulary of 100 is too small"),
        ({"val_fraction": 1}, ValueError, "val_fraction is 1"),
        ({"val_fraction": float("nan")}, ValueError, "val_fraction is nan"),
        ({"shard_tokens": 0}, ValueError, "shard_tokens is 0"),
        ({"inputs": []}, ValueError, "no input: there is no text"),
        ({"inputs": ["absent.txt"]}, FileNotFoundError, "absent"),
        ({"inputs": ["absent.jsonl"]}, FileNotFoundError, "absent"),
        ({"out": Path("absent/out")}, FileNotFoundError, "create it first"),
    ],
)
def test_bad_arguments_are_refused_and_write_nothing(tmp_path, monkeypatch, options, error, words):
    monkeypatch.chdir(tmp_path)
    name = write(tmp_path / "a.txt", "some text")
    before = tree(tmp_path)
    arguments = {"inputs": [name], "tokenizer": "byte", "out": tmp_path / "out", **options}
    with pytest.raises(error, match=words):
        prepare(arguments.pop("inputs"), **arguments)
    assert tree(tmp_path) == before


def test_an_earlier_output_is_replaced_whole_and_only_if_asked(tmp_path):
    out = tmp_path / "out"
    big, small = write(tmp_path / "a.txt", "ab" * 100), write(tmp_path / "b.txt", "cd" * 20)
    prepare([big], tokenizer="byte", out=out, shard_tokens=20)
    before = tree(out)
    with pytest.raises(FileExistsError, match="--overwrite"):
        prepare([small], tokenizer="byte", out=out)
    with pytest.raises(ValueError, match="no text"):
        prepare([write(tmp_path / "e.txt", "")], tokenizer="byte", out=out, overwrite=True)
    assert tree(out) == before
    prepare([small], tokenizer="byte", out=out, overwrite=True)
    assert ids(out, "train").size == 36
    assert len(list((out / "train").iterdir())) == 2
    write(out / "train" / "mine.txt", "mine")
    before = tree(out)
    with pytest.raises(FileExistsError, match=r"holds train/mine\.txt, which is not output"):
        prepare([small], tokenizer="byte", out=out, overwrite=True)
    assert tree(out) == before


def test_a_failure_in_the_middle_leaves_the_earlier_output(tmp_path, monkeypatch):
    out = tmp_path / "out"
    name = write(tmp_path / "a.txt", "ab" * 100)
    prepare([name], tokenizer="byte", out=out)
    before = tree(tmp_path)

    def fail(words: str) -> None:
        if words.startswith("writing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([name], tokenizer="char", out=out, overwrite=True, progress=fail)
    assert tree(tmp_path) == before


def test_an_input_that_changes_meanwhile_is_an_error(tmp_path):
    name = write(tmp_path / "a.txt", "ab" * 100)

    def change(words: str) -> None:
        if words.startswith("making"):
            write(tmp_path / "a.txt", "ab" * 99)

    with pytest.raises(ValueError, match="changed while it was being read"):
        prepare([name], tokenizer="byte", out=tmp_path / "out", progress=change)
    assert not (tmp_path / "out").exists()


def test_progress_is_told(tmp_path):
    said = []
    name = write(tmp_path / "a.txt", "ab" * 100)
    prepare([name], tokenizer="byte", out=tmp_path / "out", progress=said.append)
    assert said == ["reading", "making the tokenizer", "writing: 100%"]


def test_the_real_text_gives_the_real_tokens(tmp_path, shared):
    """The files that the originals were trained on, and the tokenizer, byte for byte."""
    text = str(shared("data", "war_and_peace.txt"))
    for tokenizer, name in ((str(shared("data", "char_meta.pkl")), "char"), ("bpe:2048", "bpe")):
        prepare([text], tokenizer=tokenizer, out=tmp_path / name)
        for split in ("train", "val"):
            expected = open_tokens(shared("data", f"{name}_{split}.bin")).tokens(0)
            found = ids(tmp_path / name, split)
            np.testing.assert_array_equal(found[: expected.size], expected)
            ends = name == "bpe" and split == "val"
            assert found[expected.size :].tolist() == [0] * ends
    made, real = tmp_path / "bpe" / "tokenizer.json", shared("data", "tokenizer.json")
    assert made.read_bytes() == real.read_bytes()
