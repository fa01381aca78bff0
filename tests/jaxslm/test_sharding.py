"""The table of the mesh: every parameter has a row, and what cannot be split is said in numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxslm.models import GPTConfig, LumenConfig, RippleConfig
from jaxslm.sharding import (
    AXES,
    BATCH,
    REPLICABLE,
    TABLE,
    axes_of,
    constrain,
    make_mesh,
    plan,
)
from jaxslm.weights import abstract_parameters

VARIANTS = {
    "lumen": LumenConfig(num_kv_heads=4),
    "lumen mqa": LumenConfig(),
    "gpt": GPTConfig(),
    "ripple": RippleConfig(),
    "ripple all": RippleConfig(bias=True, use_absolute_pos_emb=True, attention_window=8),
}
EIGHT: list = [object()] * 8  # only counted: no mesh comes of them


def mesh_of(data: int, fsdp: int, tensor: int) -> AbstractMesh:
    """As `make_mesh`, of devices that need not exist."""
    return AbstractMesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def shapes_of(config) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in abstract_parameters(config).items()}


def plan_of(config, *sizes: int):
    return plan(shapes_of(config), mesh_of(*sizes))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_has_one_row_of_its_rank(config):
    for path, shape in shapes_of(config).items():
        rows = [axes for pattern, axes in TABLE if re.fullmatch(pattern, path)]
        assert len(rows) == 1, path
        assert axes_of(path) == rows[0]
        assert len(rows[0]) == len(shape), path
        assert set(rows[0]) <= {None, "fsdp", "tensor"}


def test_every_row_has_a_parameter():
    paths = {path for config in VARIANTS.values() for path in shapes_of(config)}
    for pattern, _ in TABLE:
        assert any(re.fullmatch(pattern, path) for path in paths), pattern
    assert paths >= REPLICABLE.keys()


def test_every_matrix_is_split_over_both_axes_and_vectors_over_fsdp_by_none():
    for config in VARIANTS.values():
        for path in shapes_of(config):
            split = set(axes_of(path)) - {None}
            if ".w" in path or path in ("embedding", "head"):
                assert split == {"fsdp", "tensor"}, path
            elif path != "position_embedding":
                assert "fsdp" not in split, path


def test_parameter_without_a_row_is_refused():
    with pytest.raises(KeyError, match="no row of the sharding table names blocks.mlp.w_new"):
        axes_of("blocks.mlp.w_new")
    with pytest.raises(KeyError, match="names xhead"):
        axes_of("xhead")
    with pytest.raises(KeyError, match="names headx"):
        axes_of("headx")


def test_lumen_is_split_as_the_legend_says():
    found = plan_of(VARIANTS["lumen"], 2, 2, 2)
    assert found.notes == ()
    assert found.specs == {
        "embedding": P("tensor", "fsdp"),
        "blocks.attention.wq": P(None, "fsdp", "tensor", None),
        "blocks.attention.wk": P(None, "fsdp", "tensor", None),
        "blocks.attention.wv": P(None, "fsdp", "tensor", None),
        "blocks.attention.wo": P(None, "tensor", None, "fsdp"),
        "blocks.mlp.w_gate": P(None, "fsdp", "tensor"),
        "blocks.mlp.w_up": P(None, "fsdp", "tensor"),
        "blocks.mlp.w_down": P(None, "tensor", "fsdp"),
        "blocks.attention_norm.scale": P(None, None),
        "blocks.mlp_norm.scale": P(None, None),
        "final_norm.scale": P(None),
    }


def test_ripple_is_split_as_the_legend_says():
    found = plan_of(RippleConfig(vocab_size=66, bias=True, use_absolute_pos_emb=True), 2, 2, 2)
    assert found.notes == ()
    expected = {
        "position_embedding": P(None, "fsdp"),
        "head": P("fsdp", "tensor"),
        "blocks.attention.bq": P(None, "tensor", None),
        "blocks.attention.decay": P(None, "tensor"),
        "blocks.mlp.w_in": P(None, "fsdp", None, "tensor"),
        "blocks.mlp.b_in": P(None, None, "tensor"),
        "blocks.mlp.w_out": P(None, "tensor", "fsdp"),
        "blocks.mlp.b_out": P(None, None),
    }
    assert {path: found.specs[path] for path in expected} == expected


def test_axis_of_one_device_splits_nothing():
    for config in VARIANTS.values():
        found = plan_of(config, 8, 1, 1)
        assert found.notes == ()
        assert {axis for spec in found.specs.values() for axis in spec} == {None}
        fsdp = plan_of(config, 1, 8, 1)
        assert {axis for spec in fsdp.specs.values() for axis in spec} == {None, "fsdp"}


def test_one_key_value_head_is_whole_on_two_tensor_devices_with_a_note():
    found = plan_of(LumenConfig(), 1, 2, 2)
    assert found.specs["blocks.attention.wk"] == P(None, "fsdp", None, None)
    assert found.specs["blocks.attention.wv"] == P(None, "fsdp", None, None)
    assert found.specs["blocks.attention.wq"] == P(None, "fsdp", "tensor", None)
    assert found.notes == (
        "blocks.attention.wk dimension 2 of (4, 256, 1, 64): 1 over tensor 2",
        "blocks.attention.wv dimension 2 of (4, 256, 1, 64): 1 over tensor 2",
    )


def test_odd_vocabulary_is_whole_with_a_note():
    found = plan_of(RippleConfig(), 1, 2, 2)
    assert (found.specs["embedding"], found.specs["head"]) == (P(None, "fsdp"), P("fsdp", None))
    assert found.notes == (
        "embedding dimension 0 of (65, 384): 65 over tensor 2",
        "head dimension 1 of (384, 65): 65 over tensor 2",
    )


def test_what_cannot_be_split_is_refused_all_at_once_with_its_numbers():
    with pytest.raises(ValueError, match="cannot be split over mesh data 1 x fsdp 5 x tensor 4"):
        plan_of(RippleConfig(), 1, 5, 4)
    with pytest.raises(ValueError, match="choose mesh sizes that divide") as caught:
        plan_of(RippleConfig(vocab_size=64), 1, 5, 4)
    lines = str(caught.value).split("\n  ")
    assert "blocks.attention.wq dimension 1 of (6, 384, 6, 64): 384 over fsdp 5" in lines
    assert "blocks.attention.wq dimension 2 of (6, 384, 6, 64): 6 over tensor 4" in lines
    assert "blocks.attention.decay dimension 1 of (6, 6): 6 over tensor 4" in lines
    assert "embedding dimension 1 of (64, 384): 384 over fsdp 5" in lines
    assert not any("mlp.w_in dimension 3" in line for line in lines)  # 512 over 4


def test_mesh_takes_the_devices_left():
    mesh = make_mesh(-1, 1, 1, jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert mesh.axis_types == (AxisType.Auto,) * 3


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 1, 1), "must be 1 or more .* got data 0, fsdp 1, tensor 1"),
        ((-2, 1, 1), "must be 1 or more .* got data -2"),
        ((1, 0, 1), "must be 1 or more .* fsdp 0"),
        ((1, 1, -1), "must be 1 or more .* tensor -1"),
        ((-1, 3, 1), "fsdp 3 x tensor 1 does not divide the 8 devices: choose"),
        ((-1, 4, 4), "fsdp 4 x tensor 4 does not divide the 8 devices"),
        ((2, 2, 1), "data 2 x fsdp 2 x tensor 1 = 4 devices, but there are 8"),
        ((4, 2, 2), "data 4 x fsdp 2 x tensor 2 = 16 devices, but there are 8"),
    ],
)
def test_mesh_of_other_sizes_is_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(*sizes, EIGHT)


def test_constraint_is_left_out_without_a_mesh_or_where_it_does_not_divide():
    def specs_under(mesh, shape):
        def function(x):
            return constrain(x, BATCH, None, "tensor")

        with jax.sharding.use_abstract_mesh(mesh):
            jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32))
        return [eqn.params["sharding"].spec for eqn in jaxpr.eqns]

    assert specs_under(mesh_of(2, 2, 2), (4, 3, 6)) == [P(BATCH, None, "tensor")]
    assert specs_under(mesh_of(2, 2, 2), (4, 3, 5)) == [P(BATCH, None, None)]
    assert specs_under(mesh_of(2, 2, 2), (2, 3, 6)) == [P(None, None, "tensor")]
    x = np.ones((4, 3, 6), np.float32)
    assert constrain(jnp.asarray(x), BATCH, None, "tensor").shape == x.shape
    assert str(jax.make_jaxpr(lambda x: constrain(x, BATCH, None, "tensor"))(x)).count("shard") == 0
    other = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    assert specs_under(other, (4, 3, 6)) == []


def test_mesh_keeps_the_names_that_the_tables_use():
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    assert isinstance(mesh, Mesh)
    assert mesh.axis_names == AXES == ("data", "fsdp", "tensor")
    assert BATCH == ("data", "fsdp")
