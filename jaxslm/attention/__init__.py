"""The one attention function that all three models call."""

import jax
import jax.numpy as jnp

from jaxslm.attention.blockwise import blockwise_attention
from jaxslm.attention.cudnn import cudnn_attention
from jaxslm.attention.kernels import DECAY_LIMIT, decay_width
from jaxslm.attention.reference import full_attention
from jaxslm.attention.windowed import chunked_attention
from jaxslm.sharding import AXES

BACKENDS = ("auto", "reference", "blockwise", "splash", "cudnn")
BLOCKWISE_FROM = 256  # positions from which it was measured to be faster, forward and backward
# An accelerator's kernel: where it runs, and in which dtypes.
KERNELS = {"splash": ("a TPU", ("bfloat16", "float32")), "cudnn": ("an NVIDIA GPU", ("bfloat16",))}
WINDOW_MODES = ("chunked", "exact")


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    slope_N: jax.Array | None = None,
    window: int | None = None,
    window_mode: str = "chunked",
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Causal softmax attention with grouped key-value heads, distance decay and window.

    Query head n reads key-value head n // (N/K). Scores are q.k / sqrt(H) - slope * (i - j),
    in float32 at least.

    Args:
        q_BTNH: queries.
        k_BTKH: keys; K divides N.
        v_BTKH: values.
        slope_N: decay per position of distance for each head, float32 or wider, not negative;
            None for no decay.
        window: None for every earlier key. With "exact", query i sees keys i-window+1 .. i. With
            "chunked" (Ripple's original) it sees floor(i/window)*window - window + 1 .. i, that is
            between window and 2*window-1 keys.
        window_mode: "chunked" or "exact"; only read when there is a window.
        dropout_rate: probability of dropping an attention weight.
        dropout_key: no key, no dropout.
        backend: "reference" makes every score (of a window's chunks); "blockwise" has memory linear
            in T and derivatives in reverse only, and drops other weights by the same key; "splash"
            (TPU) and "cudnn" (NVIDIA GPU) are the accelerators' kernels, without dropout, the
            latter without chunked windows too. "auto" is, from BLOCKWISE_FROM positions on, the
            kernel in bfloat16 where it can serve, else blockwise; for what platform the mesh in
            force (`jax.set_mesh`) says, or without one the default device. A host of several TPUs
            has splash from "auto" only under a mesh (it may have one device): the compiler cannot
            split the kernel, and whether arrays lie on several devices is not to be seen here.

    Returns:
        o_BTNH in q's dtype.

    Raises:
        ValueError: the shapes disagree, the window is unusable, or the backend unknown or unable
            to serve.
    """
    if q_BTNH.ndim != 4 or k_BTKH.shape != v_BTKH.shape or q_BTNH.shape[:2] != k_BTKH.shape[:2]:
        raise ValueError(f"q {q_BTNH.shape}, k {k_BTKH.shape}, v {v_BTKH.shape} do not fit")
    if q_BTNH.shape[3] != k_BTKH.shape[3] or q_BTNH.shape[2] % k_BTKH.shape[2]:
        raise ValueError(
            f"q has {q_BTNH.shape[2]} heads of width {q_BTNH.shape[3]}, k has {k_BTKH.shape[2]} of "
            f"{k_BTKH.shape[3]}: widths must be equal and the key-value heads divide the heads"
        )
    if window is not None and (window < 1 or window_mode not in WINDOW_MODES):
        raise ValueError(f"window {window} with window_mode {window_mode!r}: use a window of 1 or "
                         f"more and one of {WINDOW_MODES}")  # fmt: skip
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    T, exact = q_BTNH.shape[1], window_mode == "exact"
    window = None if window is None or window >= T else window
    dropping = dropout_rate > 0.0 and dropout_key is not None
    chunked = window is not None and not exact
    backend = _serving(
        backend, q_BTNH, decays=slope_N is not None, chunked=chunked, dropping=dropping
    )
    if backend == "splash":
        from jaxslm.attention.splash import splash_attention  # Pallas, where it is needed only

        return splash_attention(q_BTNH, k_BTKH, v_BTKH, slope_N, window, exact)
    if backend == "cudnn":
        return cudnn_attention(q_BTNH, k_BTKH, v_BTKH, slope_N, window)
    if backend == "blockwise":
        return blockwise_attention(
            q_BTNH, k_BTKH, v_BTKH, slope_N, dropout_rate, dropout_key, window, exact
        )
    if window is not None:
        return chunked_attention(
            q_BTNH, k_BTKH, v_BTKH, slope_N, window, exact, dropout_rate, dropout_key
        )
    return full_attention(q_BTNH, k_BTKH, v_BTKH, slope_N, dropout_rate, dropout_key)


def _serving(backend: str, q_BTNH: jax.Array, **call: bool) -> str:
    """The backend of a call: the one asked for, if it can serve, or auto's choice."""
    if backend in KERNELS and (obstacle := _obstacle(backend, q_BTNH, **call)):
        raise ValueError(f"attention {backend!r} cannot serve here: {obstacle}; use 'auto'")
    if backend != "auto":
        return backend
    if q_BTNH.shape[1] < BLOCKWISE_FROM:
        return "reference"
    able = [kernel for kernel in KERNELS if _obstacle(kernel, q_BTNH, **call) is None]
    if "splash" in able and jax.sharding.get_abstract_mesh().empty and jax.local_device_count() > 1:
        able.remove("splash")
    return able[0] if able and q_BTNH.dtype == jnp.bfloat16 else "blockwise"


def _obstacle(
    kernel: str, q_BTNH: jax.Array, *, decays: bool, chunked: bool, dropping: bool
) -> str | None:
    """Why a kernel cannot serve a call, in words; None if it can."""
    (hardware, dtypes), mesh = KERNELS[kernel], jax.sharding.get_abstract_mesh()
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = mesh.abstract_device or default or jax.local_devices()[0]
    if isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    nvidia = device.platform == "gpu" and "NVIDIA" in device.device_kind  # AMD's are "gpu" too
    if not (nvidia if kernel == "cudnn" else device.platform == "tpu"):
        return f"it needs {hardware}, and the program is for {device.device_kind}"
    if not mesh.empty and not set(AXES) <= set(mesh.axis_names):
        return f"the mesh in force has axes {mesh.axis_names}, it knows {AXES}"
    if q_BTNH.dtype.name not in dtypes:
        return f"it takes {' and '.join(dtypes)}, not {q_BTNH.dtype}"
    if dropping:
        return "it has no dropout"
    _, T, _, H = q_BTNH.shape
    if decays and T > DECAY_LIMIT:
        return f"it takes at most {DECAY_LIMIT:,} positions with a decay, not {T:,}"
    if kernel == "cudnn" and chunked:
        return "it has no chunked window (exact ones it has)"
    if kernel == "cudnn" and (width := H + decays * decay_width(T)) > 128:
        return f"it takes heads up to a width of 128, not {width} (with the features of a decay)"
    return None
