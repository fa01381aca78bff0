"""The programs of generation: reading prompts, making tokens, and growing the cache between them.

They are compiled for sizes alone; temperature, filters, limits and keys are arguments.
"""

import contextlib
import functools
import re
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxslm.cache import Cache, fill, grow, ring_slots
from jaxslm.layers import compute_dtype
from jaxslm.models import Config, Model, RippleConfig
from jaxslm.sampling import Filters, Sampling, choose
from jaxslm.sharding import AXES, BATCH, plan
from jaxslm.weights import abstract_parameters, from_arrays, to_arrays

SEGMENT = 256  # tokens of a row that a program makes before the host looks at them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a decoding program takes and returns, [B] each.

    Attributes:
        cache: of the tokens before `last_B`.
        last_B: int32, the latest token of each row.
        made_B: int32, new tokens of each row.
        done_B: bool, rows that have ended.
        fault_B: bool, rows whose logits were not finite.
        seen_BV: bool, tokens that occurred; None without a repetition penalty.
    """

    cache: Cache
    last_B: jax.Array
    made_B: jax.Array
    done_B: jax.Array
    fault_B: jax.Array
    seen_BV: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """What programs take besides the state: numbers that may differ from call to call.

    Attributes:
        filters: of the sampling.
        keys_B: a PRNG key a row.
        limit_B: int32, new tokens of each row at most.
        end: int32, the end-of-text id, or -1.
    """

    filters: Filters
    keys_B: jax.Array
    limit_B: Any
    end: Any


def prepared(model: Model) -> Model:
    """The model with its parameters as decoding reads them.

    Each layer's are arrays of their own, and factors of matrix products stand in the compute dtype,
    so that no step casts them again. On CPUs a bfloat16 model is computed in float32 from weights
    rounded to bfloat16: XLA's bfloat16 matrix-vector product is about ten times slower there.
    """
    arrays = to_arrays(model)
    with mesh_of(arrays):
        return _prepared(model.config, arrays, _devices(arrays)[0].platform)


def _prepared(config: Config, arrays: dict[str, jax.Array], platform: str) -> Model:
    """`prepared`, for a platform that may be another than the arrays' own."""
    dtype = compute_dtype(config.dtype)
    stored = dtype
    if dtype == jnp.bfloat16 and platform == "cpu":
        config, stored = replace(config, dtype="float32"), jnp.dtype(jnp.float32)

    def is_factor(path: str) -> bool:
        return "norm." not in path and not path.endswith(".decay")

    def block(number: int) -> Any:
        """One layer's, its parameters copied out of the stacked ones."""
        picked = [
            (path, leaf.replace(_pick(leaf.get_value(), number, *dtypes(".".join(map(str, path))))))
            for path, leaf in stacked
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(picked))

    def dtypes(path: str) -> tuple[jnp.dtype, jnp.dtype] | tuple[None, None]:
        return (dtype, stored) if is_factor(path) else (None, None)

    others = {
        path: w.astype(dtype).astype(stored) if is_factor(path) else w
        for path, w in arrays.items()
        if not path.startswith("blocks.")
    }
    ready: Any = from_arrays(config, arrays | others)
    graphdef, blocks = nnx.split(ready.blocks)
    stacked = nnx.to_flat_state(blocks)
    ready.blocks = nnx.List([block(n) for n in range(len(arrays["blocks.attention.wq"]))])
    return ready


@functools.partial(jax.jit, static_argnums=(2, 3))
def _pick(w: jax.Array, number: int, dtype: Any, stored: Any) -> jax.Array:
    """A layer of a stacked array, rounded to `dtype`; one small program for all layers."""
    one = jax.lax.dynamic_index_in_dim(w, number, keepdims=False)
    return one if dtype is None else one.astype(dtype).astype(stored)


@functools.partial(jax.jit, static_argnums=0, static_argnames="slots")
def prefill(
    structure: Any,
    leaves: list[jax.Array],
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    rules: Rules,
    *,
    slots: int,
) -> State:
    """Reads the prompts and chooses the first new token of each row."""
    model: Model = jax.tree.unflatten(structure, leaves)
    found = model.activations(tokens_BT, keys_values=True, logits=False)
    dtype = found["keys"].dtype
    cache = fill(found["keys"], found["values"], lengths_B, slots, dtype)
    last_B11 = (lengths_B - 1)[:, None, None]
    logits_B1V = model.unembed(jnp.take_along_axis(found["final_norm"], last_B11, axis=1))
    seen_BV = None
    if rules.filters.repetition_penalty is not None:
        B, T = tokens_BT.shape
        counts_BT = jnp.arange(T)[None, :] < lengths_B[:, None]
        seen_BV = jnp.zeros((B, model.config.vocab_size), bool)
        seen_BV = seen_BV.at[jnp.arange(B)[:, None], tokens_BT].max(counts_BT)
    zeros_B = jnp.zeros_like(lengths_B)
    state = State(cache, zeros_B, zeros_B, rules.limit_B <= 0, zeros_B.astype(bool), seen_BV)
    return _advance(state, cache, logits_B1V[:, 0], rules)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode(
    structure: Any, leaves: list[jax.Array], state: State, rules: Rules, count: jax.Array
) -> tuple[State, jax.Array, jax.Array]:
    """Makes up to `count` tokens a row, at most SEGMENT; stops when every row has ended.

    Returns:
        The state, the tokens [B, SEGMENT], and how many of them were made.
    """
    model: Model = jax.tree.unflatten(structure, leaves)

    def unfinished(carry: tuple[jax.Array, State, jax.Array]) -> jax.Array:
        number, state, _ = carry
        return (number < count) & ~state.done_B.all() & ~state.fault_B.any()

    def step(
        carry: tuple[jax.Array, State, jax.Array],
    ) -> tuple[jax.Array, State, jax.Array]:
        number, state, tokens_BM = carry
        logits_BV, cache = model.decode(state.last_B, state.cache)
        position_B = jnp.where(state.done_B, state.cache.position_B, cache.position_B)
        state = _advance(state, Cache(cache.layers, position_B), logits_BV, rules)
        tokens_BM = jax.lax.dynamic_update_slice(
            tokens_BM, state.last_B[:, None], (jnp.zeros_like(number), number)
        )
        return number + 1, state, tokens_BM

    tokens_BM = jnp.zeros((state.last_B.shape[0], SEGMENT), jnp.int32)
    made, state, tokens_BM = jax.lax.while_loop(
        unfinished, step, (jnp.zeros((), jnp.int32), state, tokens_BM)
    )
    return state, tokens_BM, made


def _advance(state: State, cache: Cache, logits_BV: jax.Array, rules: Rules) -> State:
    """The state with the token that the logits give each row that has not ended."""
    fault_B = ~jnp.isfinite(logits_BV.max(-1)) & ~state.done_B
    logits_BV = jnp.where((fault_B | state.done_B)[:, None], 0.0, logits_BV)
    keys_B = jax.vmap(jax.random.fold_in)(rules.keys_B, state.made_B)
    chosen_B = choose(logits_BV, rules.filters, keys_B, state.seen_BV)
    going_B = ~state.done_B & ~fault_B
    seen_BV = state.seen_BV
    if seen_BV is not None:
        rows_B = jnp.arange(chosen_B.shape[0])
        seen_BV = seen_BV.at[rows_B, chosen_B].max(going_B)
    made_B = state.made_B + going_B
    ended_B = (chosen_B == rules.end) | (made_B >= rules.limit_B)
    return State(
        cache,
        jnp.where(going_B, chosen_B, state.last_B),
        made_B,
        state.done_B | fault_B | ended_B,
        state.fault_B | fault_B,
        seen_BV,
    )


@functools.partial(jax.jit, static_argnames="slots")
def grow_state(state: State, *, slots: int) -> State:
    """The state with more slots in its cache."""
    return replace(state, cache=grow(state.cache, slots))


def most_slots(config: Config, slots: int) -> int:
    """Slots of a cache for so many positions: no more than the context or a window's ring has."""
    limits = [slots, config.context]
    if isinstance(config, RippleConfig):
        limits.append(ring_slots(config.attention_window, config.window_mode))
    return min(limit for limit in limits if limit is not None)


def lower_decoding(
    config: Config, mesh: Mesh, *, batch_size: int, slots: int
) -> jax.stages.Lowered:
    """`decode`, greedy, ready to compile for devices that need not be attached.

    Args:
        config: the model's.
        mesh: of axes data, fsdp and tensor.
        batch_size: rows.
        slots: of the cache; see `most_slots`.

    Raises:
        ValueError: the mesh does not fit the model or the rows.
    """
    shapes = abstract_parameters(config)
    specs = plan({path: leaf.shape for path, leaf in shapes.items()}, mesh).specs
    pieces = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % pieces:
        raise ValueError(
            f"{batch_size} row(s) cannot be split over the {pieces} devices of data x fsdp: take a "
            f"multiple of {pieces} rows"
        )

    def rules() -> Rules:
        keys_B = jax.vmap(jax.random.key)(jnp.zeros(batch_size, jnp.uint32))
        limit_B = jnp.full(batch_size, SEGMENT, jnp.int32)
        greedy = Filters.of(Sampling(temperature=0.0), config.vocab_size)
        return Rules(greedy, keys_B, limit_B, jnp.int32(-1))

    def first(arrays: dict[str, jax.Array]) -> tuple[Model, State, Rules]:
        """What decoding takes after prompts of one token."""
        ready = _prepared(config, arrays, mesh.devices.flat[0].platform)
        leaves, structure = jax.tree.flatten(ready)
        ones_B = jnp.ones(batch_size, jnp.int32)
        state = prefill(structure, leaves, ones_B[:, None], ones_B, rules(), slots=slots)
        return ready, state, rules()

    def laid(leaf: Any, *spec: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def parameter(path: Any, leaf: Any) -> Any:
        """As its stacked array lies, less the axis of layers."""
        keys = jax.tree_util.keystr(path)
        spec = specs[re.sub(r"\[\d+\]|\.value$", "", keys).removeprefix(".")]
        return laid(leaf, *(spec[1:] if "[" in keys else spec))

    def of_state(leaf: Any) -> Any:
        divides = leaf.ndim == 4 and leaf.shape[1] % mesh.shape["tensor"] == 0
        return laid(leaf, BATCH, "tensor") if divides else laid(leaf, BATCH)

    exact = "float32" if config.dtype == "float32" else None
    with jax.set_mesh(mesh), jax.default_matmul_precision(exact):
        ready, state, rest = jax.eval_shape(first, shapes)
        leaves, structure = jax.tree.flatten(jax.tree.map_with_path(parameter, ready))
        state, rest = jax.tree.map(of_state, state), jax.tree.map(laid, rest)
        count = laid(jax.ShapeDtypeStruct((), jnp.int32))
        return decode.lower(structure, leaves, state, rest, count)


def _devices(arrays: Any) -> list[Any]:
    return list(jax.tree.leaves(arrays)[0].devices())


def mesh_of(arrays: Any) -> Any:
    """Enters the mesh that arrays lie on, if it is one of ours."""
    sharding = jax.tree.leaves(arrays)[0].sharding
    if isinstance(sharding, NamedSharding) and set(AXES) <= set(sharding.mesh.axis_names):
        return jax.set_mesh(cast(Mesh, sharding.mesh))
    return contextlib.nullcontext()
