"""The one attention function that all three models call."""

import jax

from jaxslm.attention.blockwise import blockwise_attention
from jaxslm.attention.reference import full_attention
from jaxslm.attention.windowed import chunked_attention

BACKENDS = ("auto", "reference", "blockwise")
BLOCKWISE_FROM = 256  # positions from which it was measured to be faster, forward and backward
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
            in T and derivatives in reverse only, and drops other weights by the same key; "auto" is
            blockwise from BLOCKWISE_FROM positions on.

    Returns:
        o_BTNH in q's dtype.

    Raises:
        ValueError: the shapes disagree, the window is unusable or the backend unknown.
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
    if backend == "blockwise" or (backend == "auto" and T >= BLOCKWISE_FROM):
        return blockwise_attention(
            q_BTNH, k_BTKH, v_BTKH, slope_N, dropout_rate, dropout_key, window, exact
        )
    if window is not None:
        return chunked_attention(
            q_BTNH, k_BTKH, v_BTKH, slope_N, window, exact, dropout_rate, dropout_key
        )
    return full_attention(q_BTNH, k_BTKH, v_BTKH, slope_N, dropout_rate, dropout_key)
