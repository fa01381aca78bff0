import builtins
import json
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslm.tokenizer import (
    SPECIAL_TOKENS,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    load_tokenizer,
    tokenizer_sha256,
)

TEXTS = ["the cat sat on the mat, the cat sat", "a rose is a rose is a rose\n\n  étude 日本 🙂"]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SPECIAL_TEXT = st.lists(st.sampled_from([*SPECIAL_TOKENS, "<|", "a", "\n", "日"])).map("".join)


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train(TEXTS, 300)


@pytest.fixture(scope="module")
def tokenizers(bpe) -> list:
    return [ByteTokenizer(), CharTokenizer.of(TEXTS), bpe]


@given(UNICODE | SPECIAL_TEXT, st.booleans())
def test_bytes_and_bpe_give_back_any_text(bpe, text, special):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text, special=special)
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids.tolist()) == text


@given(st.text(st.sampled_from(sorted(set("".join(TEXTS))))))
def test_characters_give_back_any_text_of_theirs(text):
    tokenizer = CharTokenizer.of(TEXTS)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)


def test_a_batch_is_each_text(tokenizers):
    for tokenizer in tokenizers:
        encoded = tokenizer.encode_batch(TEXTS)
        assert [ids.tolist() for ids in encoded] == [tokenizer.encode(t).tolist() for t in TEXTS]
        assert tokenizer.encode_batch([]) == []


def test_byte_ids_are_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.decode([256, 97, 256, 256, 0xC3, 256]) == (
        "<|endoftext|>a<|endoftext|><|endoftext|>\ufffd<|endoftext|>"
    )


def test_the_name_of_a_special_token_is_text_unless_asked(tokenizers):
    text = "a<|endoftext|><|endoftext|>b"
    for tokenizer in (tokenizers[0], tokenizers[2]):
        plain, special = tokenizer.encode(text), tokenizer.encode(text, special=True)
        assert tokenizer.end_of_text not in plain
        assert (special == tokenizer.end_of_text).tolist() == [False, True, True, False]
        assert tokenizer.decode(plain) == tokenizer.decode(special) == text
    assert tokenizers[2].encode("<|fim_middle|>", special=True).tolist() == [2]
    assert len(tokenizers[2].encode("<|fim_middle|>")) > 1


def test_ids_run_to_the_vocabulary_and_no_further(tokenizers):
    for tokenizer in tokenizers:
        tokenizer.decode([0, tokenizer.vocab_size - 1])
        assert tokenizer.decode([]) == ""
        for ids, words in (
            ([0, tokenizer.vocab_size], rf"id {tokenizer.vocab_size} at 1 is not in the voc"),
            ([-1], "id -1 at 0"),
            ([1.0], "ids are float64"),
            ([[1]], r"\(1, 1\)"),
        ):
            with pytest.raises(ValueError, match=words):
                tokenizer.decode(ids)


def test_half_a_surrogate_pair_is_refused(tokenizers):
    for tokenizer in tokenizers:
        with pytest.raises(ValueError, match=r"U\+D800"):
            tokenizer.encode("at\ud800")
    with pytest.raises(ValueError, match=r"U\+D800"):
        CharTokenizer("a\ud800")


def test_an_unknown_character_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"'ß' \(U\+00DF\) at line 2, column 3 .* 5 of the"):
        CharTokenizer("\nabcd").encode("ab\ncdß")
    for text in ("é", "\x00", "\U0010ffff"):
        with pytest.raises(ValueError, match="line 1, column 1"):
            CharTokenizer("abc").encode(text)


def test_character_ids_are_places_in_the_vocabulary():
    assert CharTokenizer("zaß").encode("aßz").tolist() == [1, 2, 0]
    assert CharTokenizer.of(["ba", "cß"]).decode([0, 1, 2, 3]) == "abcß"
    for characters in ("", "aba"):
        with pytest.raises(ValueError, match="empty or holds one twice"):
            CharTokenizer(characters)


def test_a_saved_tokenizer_is_the_same(tmp_path, tokenizers):
    for tokenizer in tokenizers:
        folder = tmp_path / tokenizer.kind
        folder.mkdir()
        path = tokenizer.save(folder)
        assert path == folder / "tokenizer.json"
        with pytest.raises(FileExistsError):
            tokenizer.save(folder)
        for source in (path, folder, str(path)):
            loaded = load_tokenizer(source)
            assert type(loaded) is type(tokenizer)
            assert (loaded.vocab_size, loaded.end_of_text) == (
                tokenizer.vocab_size,
                tokenizer.end_of_text,
            )
            assert loaded.encode(TEXTS[1]).tolist() == tokenizer.encode(TEXTS[1]).tolist()
        again = tmp_path / f"{tokenizer.kind}-again"
        again.mkdir()
        assert tokenizer_sha256(loaded.save(again)) == tokenizer_sha256(path)
    assert len({tokenizer_sha256(path) for path in tmp_path.glob("*/tokenizer.json")}) == 3


def test_bpe_training_gives_the_same_file_every_time(tmp_path, bpe):
    again = BPETokenizer.train(iter(TEXTS), 300)
    for name, tokenizer in (("a", bpe), ("b", again)):
        (tmp_path / name).mkdir()
        tokenizer.save(tmp_path / name)
    assert tokenizer_sha256(tmp_path / "a/tokenizer.json") == tokenizer_sha256(
        tmp_path / "b/tokenizer.json"
    )
    assert [bpe.decode([id_]) for id_ in range(4)] == list(SPECIAL_TOKENS)
    assert bpe.end_of_text == 0
    assert bpe.vocab_size <= 300
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0])


def test_bpe_needs_room_for_every_byte():
    assert BPETokenizer.train(["ab"], 260).vocab_size == 260
    with pytest.raises(ValueError, match="a BPE vocabulary of 259 is too small"):
        BPETokenizer.train(["ab"], 259)


def test_padding_and_truncation_of_the_file_lose_nothing(tmp_path, bpe):
    value = json.loads(bpe.save(tmp_path).read_text())
    value["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    value["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    path = tmp_path / "padded.json"
    path.write_text(json.dumps(value))
    assert load_tokenizer(path).encode(TEXTS[1]).tolist() == bpe.encode(TEXTS[1]).tolist()


def test_what_the_library_cannot_encode_is_said_in_words():
    from tokenizers import Tokenizer, models

    for model, words in (
        (models.WordLevel({"a": 0}, "[UNK]"), r"Missing \[UNK\] token"),
        (models.Unigram([("a", -1.0)], None), "unknown token"),
    ):
        tokenizer = BPETokenizer(Tokenizer(model).to_str())
        assert tokenizer.encode("a").tolist() == [0]
        words = rf"cannot encode the text \(.*{words}.*\): .*add an unknown token"
        with pytest.raises(ValueError, match=words):
            tokenizer.encode_batch(["a", "zz"])


def test_what_the_library_cannot_decode_is_said_in_words(monkeypatch):
    class Broken:
        def decode(self, *_, **__):
            raise Exception("no decoder")

    tokenizer = BPETokenizer.train(["ab"], 260)
    monkeypatch.setattr(tokenizer, "_plain", Broken())
    with pytest.raises(
        ValueError, match=r"cannot decode the ids \(no decoder\): use the tokenizer"
    ):
        tokenizer.decode([0])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value"),
        (b"\xff", "utf-8"),
        (b"[]", "expected a JSON object"),
        (b"{}", "expected format 'jaxslm-tokenizer'"),
        (b"[" * 100_000, "recursion"),
        (b'{"model": {"type": "other"}}', "`tokenizers` cannot read it"),
        (b'{"format": "jaxslm-tokenizer", "format_version": 1}', "kind is None"),
        (b'{"format": "jaxslm-tokenizer", "format_version": 2, "kind": "byte"}', "version 2"),
        (
            b'{"format": "jaxslm-tokenizer", "format_version": 1, "kind": "byte", "more": 1}',
            "fields more amiss",
        ),
        (b'{"format": "jaxslm-tokenizer", "format_version": 1, "kind": "char"}', "characters"),
        (
            b'{"format": "jaxslm-tokenizer", "format_version": 1, "kind": "char", "characters": 1}',
            "characters is no string",
        ),
        (
            b'{"format": "jaxslm-tokenizer", "format_version": 1, "kind": "char", '
            b'"characters": "aa"}',
            "holds one twice",
        ),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json and no meta\.pkl"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_tokenizer(tmp_path / "absent.json")


def meta(characters="ab\n", **change) -> dict:
    return {
        "vocab_size": len(characters),
        "stoi": {character: id_ for id_, character in enumerate(characters)},
        "itos": dict(enumerate(characters)),
        **change,
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_vocabulary_is_read(tmp_path, protocol):
    characters = "".join(map(chr, [*range(256), 0x65E5, 0x1F642]))
    path = tmp_path / "meta.pkl"
    path.write_bytes(pickle.dumps(meta(characters, note="more"), protocol))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(np.arange(258)) == characters


class Sentinel:
    """Unpickling one calls print."""

    def __reduce__(self):
        return builtins.print, ("was run",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(meta(more=Sentinel())), "which a vocabulary does not need"),
        (pickle.dumps(meta(more=Sentinel()), 0), "which a vocabulary does not need"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "a STACK_GLOBAL"),
        (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".", "damaged|BYTEARRAY8"),
        (b"\x80\x04}r" + struct.pack("<I", 2**31) + b".", "more room"),
        (b"}p2000000000\n.", "more room"),
        (b"", "damaged"),
        (pickle.dumps(meta())[:-5], "damaged"),
        (b"\x80\x04}" + b"s.", "damaged"),
        (pickle.dumps([]), "EMPTY_LIST"),
        (pickle.dumps("text"), "expected a dict"),
        (pickle.dumps({"vocab_size": 1, "stoi": {"a": 0}}), "expected a dict of"),
        (pickle.dumps(meta(vocab_size=4)), "one character for each id"),
        (pickle.dumps(meta(vocab_size="3")), "one character for each id"),
        (pickle.dumps(meta(stoi={"a": 0, "b": 1})), "one character for each id"),
        (pickle.dumps(meta(stoi={"a": 1, "b": 0, "\n": 2})), "one character for each id"),
        (pickle.dumps(meta(itos={0: "a", 1: "b", 3: "\n"})), "one character for each id"),
        (
            pickle.dumps(meta(itos={0: "ab", 1: "c"}, stoi={"ab": 0, "c": 1}, vocab_size=2)),
            "one character for each id",
        ),
        (pickle.dumps(meta(itos={0: "a", "b": "b", 2: "\n"})), "one character for each id"),
        (pickle.dumps("x" * (4 * 2**20)), r"over 4,194,304 bytes"),
    ],
)
def test_a_hostile_or_damaged_pickle_is_refused_unrun(tmp_path, capsys, content, words):
    path = tmp_path / "meta.pkl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_the_real_files(shared):
    characters = load_tokenizer(shared("data", "char_meta.pkl"))
    assert (characters.vocab_size, characters.end_of_text) == (82, None)
    text = shared("data", "war_and_peace.txt").read_bytes().decode()
    expected = np.fromfile(shared("data", "char_train.bin"), "<u2")
    np.testing.assert_array_equal(characters.encode(text)[: expected.size], expected)

    bpe = load_tokenizer(shared("data", "tokenizer.json"))
    assert (bpe.vocab_size, bpe.end_of_text) == (2048, 0)
    validation = np.fromfile(shared("data", "bpe_val.bin"), "<u2")
    np.testing.assert_array_equal(bpe.encode(bpe.decode(validation)), validation)
