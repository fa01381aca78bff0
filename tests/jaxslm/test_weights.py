import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import jaxslm
from jaxslm import GPTConfig, LumenConfig, RippleConfig
from jaxslm.models import MODELS
from jaxslm.safetensors_io import TensorSpec, write_tensors
from jaxslm.sharding import make_mesh
from jaxslm.tokenizer import CharTokenizer
from jaxslm.weights import (
    abstract_parameters,
    from_arrays,
    is_model_folder,
    map_folder,
    to_arrays,
    write_folder,
)
from tests.jaxslm.support import forward, random_arrays, random_model

CONFIGS = {
    "lumen": LumenConfig(
        vocab_size=29, hidden_dim=24, num_layers=2, num_heads=4, intermediate_dim=20, max_seq_len=16
    ),
    "gpt": GPTConfig(vocab_size=29, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=24),
    "ripple": RippleConfig(
        vocab_size=29, n_layer=2, n_head=3, n_embd=24, bias=True, attention_window=4, unroll=2
    ),
}
LUMEN = CONFIGS["lumen"]
DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def folder(tmp_path):
    """A saved Lumen, to be damaged."""
    jaxslm.save(random_model(LUMEN), tmp_path / "out")
    return tmp_path / "out"


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def edit_config(folder, **changes) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


def edit_weights(folder, change) -> None:
    arrays = {name: array.copy() for name, array in map_folder(folder)[1].items()}
    change(arrays)
    (folder / "model.safetensors").unlink()
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}
    write_tensors(folder / "model.safetensors", specs, arrays.__getitem__, {})


def test_save_and_load_keep_config_and_every_bit_in_mixed_dtypes(config, tmp_path, nnx_mode):
    arrays = {
        name: array.astype(DTYPES[i % 3])
        for i, (name, array) in enumerate(random_arrays(config).items())
    }
    arrays["final_norm.scale"].reshape(-1).view(np.uint8)[:] = 0xFF  # NaNs keep their bits too
    jaxslm.save(from_arrays(config, arrays), str(tmp_path / "out"))
    loaded = jaxslm.load(str(tmp_path / "out"))
    assert type(loaded) is MODELS[next(k for k, v in CONFIGS.items() if v is config)][1]
    assert loaded.config == config
    found = to_arrays(loaded)
    assert found.keys() == arrays.keys()
    for name, array in found.items():
        assert array.dtype == arrays[name].dtype, name
        assert np.asarray(array).tobytes() == arrays[name].tobytes(), name


def test_loaded_model_computes_what_the_saved_one_did(config, tmp_path):
    tokens_BT = np.random.default_rng(0).integers(0, 29, (2, 11))
    jaxslm.save(random_model(config), tmp_path / "out")
    found = forward(jaxslm.load(tmp_path / "out"), tokens_BT)
    np.testing.assert_array_equal(found, forward(random_model(config), tokens_BT))


def test_folder_holds_what_the_format_says(folder):
    assert names(folder) == ["config.json", "model.safetensors"]
    content = json.loads((folder / "config.json").read_text())
    assert (content["format"], content["format_version"]) == ("jaxslm", 3)
    assert content["model"] == "lumen"
    assert LumenConfig(**content["config"]) == LUMEN
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    assert tensors.keys() == abstract_parameters(LUMEN).keys()
    assert tensors["blocks.attention.wq"].shape == (2, 24, 4, 6)


def test_map_folder_maps_and_does_not_read(folder):
    config, arrays = map_folder(folder)
    assert config == LUMEN
    for name, array in arrays.items():
        assert not array.flags.writeable, name
        base = array
        while base is not None and not isinstance(base, np.memmap):
            base = base.obj if isinstance(base, memoryview) else base.base
        assert isinstance(base, np.memmap), name


def test_loaded_model_outlives_its_files(folder):
    model = jaxslm.load(folder)
    with (folder / "model.safetensors").open("r+b") as file:  # in place, where it was mapped
        file.write(b"\0" * (folder / "model.safetensors").stat().st_size)
    expected = random_arrays(LUMEN)
    for name, array in to_arrays(model).items():
        np.testing.assert_array_equal(array, expected[name])


def test_float64_needs_x64_mode(tmp_path):
    arrays = {name: array.astype(np.float64) for name, array in random_arrays(LUMEN).items()}
    with jax.enable_x64(True):
        jaxslm.save(from_arrays(LUMEN, arrays), tmp_path / "out")
        loaded = to_arrays(jaxslm.load(tmp_path / "out"))
        assert {array.dtype for array in loaded.values()} == {jnp.dtype("float64")}
    with pytest.raises(ValueError, match=r"is float64.*x64 mode.*jax_enable_x64.*float32"):
        jaxslm.load(tmp_path / "out")


def test_from_arrays_refuses_other_names_and_shapes():
    arrays = random_arrays(LUMEN)
    without = {name: array for name, array in arrays.items() if name != "embedding"}
    with pytest.raises(ValueError, match=r"'embedding'.*missing or unexpected"):
        from_arrays(LUMEN, without)
    with pytest.raises(ValueError, match=r"'extra'.*missing or unexpected"):
        from_arrays(LUMEN, arrays | {"extra": arrays["embedding"]})
    with pytest.raises(ValueError, match=r"embedding has shape \(24, 29\), expected \(29, 24\)"):
        from_arrays(LUMEN, arrays | {"embedding": arrays["embedding"].T})


def test_every_fault_of_the_weights_is_listed_at_once(folder):
    def damage(arrays):
        del arrays["final_norm.scale"]
        arrays["blocks.attention.bq"] = np.zeros((2, 4, 6), np.float32)
        arrays["embedding"] = np.ascontiguousarray(arrays["embedding"].T)
        arrays["blocks.mlp.w_up"] = arrays["blocks.mlp.w_up"].astype(np.int8)

    edit_weights(folder, damage)
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as error:
        jaxslm.load(folder)
    for fault in (
        "missing final_norm.scale (24,)",
        "unexpected blocks.attention.bq (2, 4, 6)",
        "embedding has shape (24, 29), expected (29, 24)",
        "blocks.mlp.w_up is int8, expected a float dtype",
    ):
        assert fault in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("\ufeff{}", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is no model's: `jaxslm convert` makes"),
        ("null", "is no model's"),
        ('{"model_type": "gpt2"}', "is no model's"),
        ('{"format": "jaxslm-run"}', "is no model's.* `jaxslm export` of a training run"),
        ('{"format": "jaxslm"}', "format_version None; this jaxslm reads 1 to 3"),
        ('{"format": "jaxslm", "format_version": 4}', "format_version 4; this jaxslm reads 1 to 3"),
        ('{"format": "jaxslm", "format_version": 3}', "must name a model of lumen, gpt, ripple"),
        ('{"format": "jaxslm", "format_version": 3, "model": "bert"}', "must name a model of"),
        ('{"format": "jaxslm", "format_version": 3, "model": ["gpt"]}', "must name a model of"),
        ('{"format": "jaxslm", "format_version": 3, "model": "gpt"}', "and its config"),
    ],
)
def test_damaged_config_is_refused_by_name(folder, text, words):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json.*{words}"):
        jaxslm.load(folder)


def test_config_that_is_no_text_is_refused(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        jaxslm.load(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_head": 4}, "unexpected keyword argument 'n_head'"),
        ({"num_heads": 5}, "hidden_dim 24 is not divisible by num_heads 5"),
        ({"num_heads": "4"}, "num_heads must be int, got '4'"),
        ({"vocab_size": 29.5}, "vocab_size must be int, got 29.5"),
    ],
)
def test_config_field_is_refused_by_name(folder, changes, words):
    config = json.loads((folder / "config.json").read_text())["config"]
    edit_config(folder, config=config | changes)
    with pytest.raises(ValueError, match=rf"config\.json: .*{words}"):
        jaxslm.load(folder)


@pytest.mark.parametrize("version", [1, 2])
def test_folder_of_before_there_was_a_choice_of_attention_has_auto(folder, version):
    config = json.loads((folder / "config.json").read_text())["config"]
    del config["attention"]
    edit_config(folder, config=config)
    with pytest.raises(ValueError, match=r"config\.json lacks the config fields attention"):
        jaxslm.load(folder)
    edit_config(folder, format_version=version)
    assert jaxslm.load(folder).config == LUMEN


def test_missing_config_field_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())["config"]
    del config["rope_theta"]
    edit_config(folder, config=config)
    with pytest.raises(ValueError, match=r"config\.json lacks the config fields rope_theta"):
        jaxslm.load(folder)


def test_config_that_contradicts_the_weights_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())["config"]
    edit_config(folder, config=config | {"num_layers": 3})
    with pytest.raises(ValueError, match=r"wq has shape \(2, 24, 4, 6\), expected \(3, 24, 4, 6\)"):
        jaxslm.load(folder)


def test_truncated_weights_are_refused_by_name(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        jaxslm.load(folder)


def test_missing_files_are_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        jaxslm.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"is not a model folder: it has no config\.json"):
        jaxslm.load(folder)
    with pytest.raises(FileNotFoundError, match="nowhere is not a model folder"):
        jaxslm.load(folder.parent / "nowhere")


def test_is_model_folder_says_whether_it_is_ours(folder):
    assert is_model_folder(folder)
    assert not is_model_folder(folder / "config.json")
    assert not is_model_folder(folder.parent)
    for text in ("{", "[]", '{"format": "other"}'):
        (folder / "config.json").write_text(text)
        assert not is_model_folder(folder)


def test_save_refuses_an_existing_folder_and_replaces_it_when_told(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match="exists"):
        jaxslm.save(random_model(LUMEN, seed=1), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "parity.json").write_text("{}")
    jaxslm.save(random_model(CONFIGS["gpt"]), folder, overwrite=True)
    assert jaxslm.load(folder).config == CONFIGS["gpt"]
    assert names(folder) == ["config.json", "model.safetensors"]


def test_save_keeps_the_tokenizer_of_the_folder_that_it_replaces(folder):
    saved = CharTokenizer("abc").save(folder).read_bytes()
    jaxslm.save(random_model(LUMEN, seed=1), folder, overwrite=True)
    assert names(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "tokenizer.json").read_bytes() == saved
    np.testing.assert_array_equal(
        to_arrays(jaxslm.load(folder))["embedding"], random_arrays(LUMEN, seed=1)["embedding"]
    )


def test_save_refuses_to_replace_a_folder_that_holds_other_files(folder):
    (folder / "notes.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"holds notes\.txt"):
        jaxslm.save(random_model(LUMEN, seed=1), folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "precious"


def test_save_needs_the_parent_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        jaxslm.save(random_model(LUMEN), tmp_path / "nowhere" / "out")


@pytest.mark.parametrize("overwrite", [False, True])
def test_full_disk_leaves_nothing_and_the_earlier_folder_whole(tmp_path, monkeypatch, overwrite):
    out = tmp_path / "out"
    if overwrite:
        jaxslm.save(random_model(LUMEN), out)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    path_type, opens = type(tmp_path), type(tmp_path).open

    class FullDisk:
        """A file that takes a kilobyte."""

        def __init__(self, file):
            self.file, self.room = file, 1000

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.room -= len(data)
            if self.room < 0:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

    def open_on_full_disk(self, mode="r", *args, **kwargs):
        file = opens(self, mode, *args, **kwargs)
        return FullDisk(file) if "x" in mode else file

    monkeypatch.setattr(path_type, "open", open_on_full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        jaxslm.save(random_model(LUMEN, seed=1), out, overwrite=overwrite)
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert names(tmp_path) == (["out"] if overwrite else [])


def test_a_mesh_does_not_narrow_what_one_device_refuses(tmp_path):
    arrays = {name: array.astype(np.float64) for name, array in random_arrays(LUMEN).items()}
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}
    write_folder(tmp_path / "out", LUMEN, specs, arrays.__getitem__)
    for mesh in (None, make_mesh(1, 1, 1, jax.devices()[:1])):
        with pytest.raises(ValueError, match="which JAX holds only in its x64 mode"):
            jaxslm.load(tmp_path / "out", mesh=mesh)
