import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslm.tokenizer import ByteTokenizer, tokenizer_sha256
from train.tokens import MAX_MAPS, TokenFile, TokenWriter, open_tokens

IDS = np.arange(1, 21)


def raw(path: Path, ids=IDS, dtype="<u2") -> Path:
    np.asarray(ids).astype(dtype).tofile(path)
    return path


def llmc(path: Path, ids=IDS, magic=20240520, version=1, dtype="<u2", count=None) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids).astype(dtype).tobytes())
    return path


def npy(path: Path, array) -> Path:
    np.save(path, array, allow_pickle=True)
    return path


def ours(folder: Path, ids=IDS, vocab_size=100, **options) -> Path:
    writer = TokenWriter(folder, vocab_size=vocab_size, **options)
    writer.write(ids)
    writer.finish()
    return folder


def everything(tokens) -> list[list[int]]:
    return [tokens.tokens(index).tolist() for index in range(len(tokens.files))]


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda path: raw(path / "a.bin"), "uint16"),
        (lambda path: llmc(path / "a.bin"), "uint16"),
        (lambda path: llmc(path / "a.bin", magic=20240801, version=7, dtype="<u4"), "uint32"),
        *(
            (lambda path, dtype=dtype: npy(path / "a.npy", IDS.astype(dtype)), dtype)
            for dtype in ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64", ">u2")
        ),
    ],
)
def test_a_file_gives_its_ids_and_nothing_of_its_header(tmp_path, make, dtype):
    path = make(tmp_path)
    for source in (path, str(path), [path], tmp_path):
        tokens = open_tokens(source)
        assert everything(tokens) == [IDS.tolist()]
        assert tokens.count == tokens.files[0].count == 20
        assert tokens.files[0].dtype == np.dtype(dtype)
        assert tokens.vocab_size is None
    assert tokens.files[0].read(3, 6).tolist() == [4, 5, 6]
    assert not tokens.tokens(0).flags.writeable


def test_reads_outside_a_file_are_errors(tmp_path):
    file = open_tokens(raw(tmp_path / "a.bin")).files[0]
    assert file.read(20, 20).size == 0
    for start, stop in ((-1, 3), (0, 21), (5, 4)):
        with pytest.raises(ValueError, match=r"a\.bin holds 20 tokens"):
            file.read(start, stop)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: raw(path / "a.bin", []), "is empty"),
        (lambda path: raw(path / "a.bin", [1, 2, 3], "u1"), "3 bytes, an odd number"),
        (lambda path: llmc(path / "a.bin", count=21), "21 uint16 tokens, which are 1,066 bytes"),
        (lambda path: llmc(path / "a.bin", count=19), "19 uint16 tokens, which are 1,062 bytes"),
        (lambda path: llmc(path / "a.bin", count=-1), "cut short or damaged"),
        (lambda path: llmc(path / "a.bin", version=2), r"version 2 \(expected 1\)"),
        (
            lambda path: llmc(path / "a.bin", magic=20240801, version=1, dtype="<u4"),
            r"version 1 \(expected 7\)",
        ),
        (lambda path: llmc(path / "a.bin", magic=20240522), "multiple-choice"),
        (lambda path: npy(path / "a.npy", IDS.astype(float)), "holds float64"),
        (lambda path: npy(path / "a.npy", IDS > 3), "holds bool"),
        (lambda path: npy(path / "a.npy", IDS.reshape(4, 5)), r"\(4, 5\): tokens are integers"),
        (lambda path: npy(path / "a.npy", np.array([1, "a"], object)), "no whole .npy file"),
        (lambda path: raw(path / "a.npy"), "no whole .npy file"),
        (lambda path: raw(path / "a.txt"), "is no token file"),
    ],
)
def test_a_damaged_or_other_file_is_refused_by_name(tmp_path, make, words):
    path = make(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        open_tokens(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [1, 4, 500, 1023, 1025, 1062])
def test_a_truncated_llmc_file_is_never_read_as_raw(tmp_path, size):
    path = llmc(tmp_path / "a.bin")
    os.truncate(path, size)
    words = {1: "odd number", 4: "version 0"}.get(size, "its llm.c header says")
    with pytest.raises(ValueError, match=words):
        open_tokens(path)


@pytest.mark.parametrize("change", [-1, 1])
def test_an_npy_of_another_length_than_its_header_says_is_refused(tmp_path, change):
    path = npy(tmp_path / "a.npy", IDS)
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(ValueError, match=r"a\.npy"):
        open_tokens(path)


def test_files_of_no_tokens_open(tmp_path):
    files = [llmc(tmp_path / "a.bin", []), npy(tmp_path / "b.npy", IDS[:0])]
    assert everything(open_tokens(files)) == [[], []]


def test_offsets_have_64_bits(tmp_path):
    count = 2**31 + 10**6  # over 2**32 bytes
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        file.truncate(2 * count)  # sparse
        file.seek(2 * (count - 3))
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    tokens = open_tokens(path)
    assert tokens.count == count
    assert tokens.files[0].read(count - 4, count).tolist() == [0, 7, 8, 9]
    assert tokens.tokens(0)[count - 1] == 9


def test_more_files_than_stay_mapped_are_read(tmp_path):
    path = raw(tmp_path / "a.bin")
    tokens = open_tokens([path] * (MAX_MAPS + 5))
    before = psutil.Process().num_fds()
    assert everything(tokens) == [IDS.tolist()] * (MAX_MAPS + 5)
    assert before < psutil.Process().num_fds() <= before + MAX_MAPS


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    npy(tmp_path / "b_000001.npy", [3])
    raw(tmp_path / "c.bin", [4])
    npy(tmp_path / "b_000000.npy", [2])
    raw(tmp_path / "a.bin", [1])
    (tmp_path / "notes.txt").write_text("no tokens")
    tokens = open_tokens(tmp_path)
    assert everything(tokens) == [[1], [2], [3], [4]]
    assert tokens.tokenizer is None
    assert everything(open_tokens(tmp_path, split="val")) == everything(tokens)  # none says what


def test_a_folder_with_both_splits_must_be_said_which(tmp_path):
    raw(tmp_path / "train.bin", [1])
    raw(tmp_path / "val.bin", [2])
    with pytest.raises(ValueError, match="training and validation files"):
        open_tokens(tmp_path)
    assert everything(open_tokens(tmp_path, split="val")) == [[2]]
    raw(tmp_path / "more.bin", [3])
    assert everything(open_tokens(tmp_path, split="train")) == [[1]]
    (tmp_path / "val.bin").unlink()
    with pytest.raises(ValueError, match=r"no \.bin or \.npy file for val"):
        open_tokens(tmp_path, split="val")
    (tmp_path / "meta.pkl").write_bytes(b"")
    assert open_tokens(tmp_path / "train.bin").tokenizer is None  # nothing says that it is theirs


def test_a_folder_without_tokens_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no \.bin or \.npy file"):
        open_tokens(tmp_path)
    with pytest.raises(ValueError, match="no token files are named"):
        open_tokens([])
    with pytest.raises(ValueError, match="is a folder"):
        open_tokens([tmp_path])
    ours(tmp_path / "train")
    with pytest.raises(ValueError, match=rf"name {tmp_path / 'train'}"):
        open_tokens(tmp_path)
    for name in ("absent.bin", "absent"):
        with pytest.raises(FileNotFoundError, match=f"{name} does not exist: write it with"):
            open_tokens(tmp_path / name)


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=12), max_size=6).filter(any),
    st.integers(1, 15),
    st.sampled_from([100, 2**16, 2**16 + 1]),
)
def test_what_is_written_is_read_in_shards_of_one_size(tmp_path_factory, parts, size, vocab_size):
    folder = tmp_path_factory.mktemp("ours") / "train"
    writer = TokenWriter(folder, vocab_size=vocab_size, shard_tokens=size)
    for part in parts:
        writer.write(part)
    writer.finish()
    ids = [id_ for part in parts for id_ in part]
    assert writer.count == len(ids)
    tokens = open_tokens(folder)
    assert everything(tokens) == [ids[start : start + size] for start in range(0, len(ids), size)]
    assert tokens.vocab_size == vocab_size
    assert tokens.files[0].dtype == ("uint16" if vocab_size <= 2**16 else "uint32")
    for source in (folder, folder.parent):
        assert everything(open_tokens(source, split="train")) == everything(tokens)


@pytest.mark.parametrize(
    ("ids", "vocab_size", "words"),
    [
        ([1, 2, 100], 100, "token 22 is 100, which is no id of a vocabulary of 100"),
        ([1, -1], 100, "token 21 is -1"),
        ([65536], 65536, "token 20 is 65536"),
        ([2**32], 2**20, "token 20 is 4294967296"),
        ([1.0], 100, "ids are float64"),
        ([[1]], 100, r"ids are int64 \(1, 1\)"),
    ],
)
def test_ids_that_do_not_fit_are_not_written(tmp_path, ids, vocab_size, words):
    writer = TokenWriter(tmp_path / "train", vocab_size=vocab_size)
    writer.write(IDS)
    with pytest.raises(ValueError, match=words):
        writer.write(ids)
    writer.finish()
    assert everything(open_tokens(tmp_path / "train")) == [IDS.tolist()]


def test_the_largest_ids_of_each_dtype_survive(tmp_path):
    for vocab_size in (2**16, 2**31):
        folder = ours(tmp_path / str(vocab_size), [vocab_size - 1, 0], vocab_size)
        assert everything(open_tokens(folder)) == [[vocab_size - 1, 0]]


def test_a_writer_that_is_not_finished_leaves_no_set(tmp_path):
    writer = TokenWriter(tmp_path / "train", vocab_size=100)
    writer.write(IDS)
    writer.close()
    assert not (tmp_path / "train" / "meta.json").exists()
    with pytest.raises(ValueError, match="no tokens to write"):
        TokenWriter(tmp_path / "val", vocab_size=100).finish()
    for options in ({"vocab_size": 0}, {"vocab_size": 2**31 + 1}, {"shard_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            TokenWriter(tmp_path / "other", **{"vocab_size": 100, **options})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "format is not"),
        ({"format_version": 2}, "format_version is 2"),
        ({"format_version": True}, "format_version is True"),
        ({"dtype": "int16"}, "dtype is 'int16'"),
        ({"dtype": ["uint16"]}, "dtype is"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 65537}, "vocab_size is 65537"),
        ({"vocab_size": 10.0}, "vocab_size is 10.0"),
        ({"tokenizer": {"kind": "byte"}}, "tokenizer is"),
        ({"shards": []}, "shards lists no file"),
        ({"shards": [{"file": "../tokens-00000.bin", "count": 20}]}, "a shard is"),
        ({"shards": [{"file": "other.bin", "count": 20}]}, "a shard is"),
        ({"shards": [{"file": "tokens-00000.bin", "count": -1}]}, "a shard is"),
        ({"shards": [{"file": "tokens-00000.bin", "count": 20, "more": 1}]}, "a shard is"),
        ({"shards": [{"file": "tokens-00000.bin", "count": 19}]}, "40 bytes"),
        ({"shards": [{"file": "tokens-00001.bin", "count": 20}]}, "is missing"),
        ({"more": 1}, "fields more amiss"),
    ],
)
def test_a_meta_that_is_not_ours_to_the_letter_is_refused(tmp_path, change, words):
    folder = ours(tmp_path / "train")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **change}))
    with pytest.raises(ValueError, match=words):
        open_tokens(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_meta_that_is_no_object_is_refused(tmp_path, content):
    folder = ours(tmp_path / "train")
    (folder / "meta.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"meta\.json.*prepare the data again"):
        open_tokens(folder)


def test_a_shard_of_a_set_is_not_read_without_its_meta(tmp_path):
    folder = ours(tmp_path / "train", vocab_size=2**17)  # as raw uint16 it would be nonsense
    with pytest.raises(ValueError, match="name the folder"):
        open_tokens(folder / "tokens-00000.bin")


def test_the_tokenizer_beside_or_above_a_set_must_be_its_own(tmp_path):
    path = ByteTokenizer().save(tmp_path)
    identity = {"kind": "byte", "sha256": tokenizer_sha256(path)}
    folder = ours(tmp_path / "train", tokenizer=identity)
    assert open_tokens(folder).tokenizer == path
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not the tokenizer of"):
        open_tokens(folder)
    path.unlink()
    assert open_tokens(folder).tokenizer is None


@pytest.mark.parametrize(
    ("name", "count", "largest"),
    [
        ("char_train.bin", 2_882_072, 81),
        ("char_val.bin", 320_231, 77),
        ("bpe_train.bin", 909_052, 2047),
        ("bpe_val.bin", 99_507, 2047),
    ],
)
def test_the_real_files_open(shared, name, count, largest):
    tokens = open_tokens(shared("data", name))
    assert (tokens.count, tokens.tokens(0).max()) == (count, largest)
    assert tokens.files == (
        TokenFile(path=shared("data", name), dtype=np.dtype("<u2"), count=count, offset=0),
    )
