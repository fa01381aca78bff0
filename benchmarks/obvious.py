"""The three models as one writes them first in JAX, on our parameters: what ours is held against.

Every score and every logit exists, windows are masks, arrays are not donated (if not asked to), and
AdamW is optax's. All that is the models' is their configs and their parameters' names.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxslm.models import Config, GPTConfig, LumenConfig, RippleConfig
from train.config import OptimConfig
from train.optimizer import is_decayed

Arrays = dict[str, jax.Array]


def make_update(
    config: Config, optimizer: optax.GradientTransformation, *, donate: bool = False
) -> Callable[..., Any]:
    """The compiled update: (params, optimizer state, tokens, targets) -> (params, state, loss)."""

    def update(params: Arrays, state: Any, tokens_BT: jax.Array, targets_BT: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(partial(loss, config))(params, tokens_BT, targets_BT)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(update, donate_argnums=(0, 1) if donate else ())


def make_optimizer(optim: OptimConfig, paths: Iterable[str]) -> optax.GradientTransformation:
    """AdamW at a constant rate, behind clipping."""
    (b1, b2), clip = optim.betas, optim.clip or float("inf")
    mask = {path: is_decayed(path, optim) for path in paths}
    adamw = optax.adamw(optim.lr, b1, b2, optim.eps, weight_decay=optim.weight_decay, mask=mask)
    return optax.chain(optax.clip_by_global_norm(clip), adamw)


def loss(config: Config, params: Arrays, tokens_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Mean cross-entropy, nats."""
    logits_BTV = logits(config, params, tokens_BT).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean()


def logits(config: Config, params: Arrays, tokens_BT: jax.Array) -> jax.Array:
    """Next-token logits [B, T, V] in the compute dtype."""
    params = {path: w.astype(config.dtype) for path, w in params.items()}
    blocks = {path[7:]: w for path, w in params.items() if path.startswith("blocks.")}
    layer = {LumenConfig: _lumen, GPTConfig: _gpt, RippleConfig: _ripple}[type(config)]
    x_BTD = params["embedding"][tokens_BT]
    x_BTD, _ = jax.lax.scan(lambda x, block: (layer(config, block, x), None), x_BTD, blocks)
    head_DV = params["head"] if "head" in params else params["embedding"].T
    return _norm(config, params, "final_norm", x_BTD) @ head_DV


def _lumen(config: Any, block: Arrays, x_BTD: jax.Array) -> jax.Array:
    y_BTD = _norm(config, block, "attention_norm", x_BTD)
    x_BTD = x_BTD + _rotary_attention(block, y_BTD, config.rope_theta)
    y_BTD = _norm(config, block, "mlp_norm", x_BTD)
    h_BTF = jax.nn.silu(y_BTD @ block["mlp.w_gate"]) * (y_BTD @ block["mlp.w_up"])
    return x_BTD + h_BTF @ block["mlp.w_down"]


def _gpt(config: Any, block: Arrays, x_BTD: jax.Array) -> jax.Array:
    y_BTD = _norm(config, block, "attention_norm", x_BTD)
    x_BTD = x_BTD + _rotary_attention(block, y_BTD, config.rope_base)
    y_BTD = _norm(config, block, "mlp_norm", x_BTD)
    return x_BTD + jax.nn.gelu(y_BTD @ block["mlp.w_up"]) @ block["mlp.w_down"]


def _ripple(config: Any, block: Arrays, x_BTD: jax.Array) -> jax.Array:
    T, window = x_BTD.shape[1], config.attention_window
    y_BTD = _norm(config, block, "attention_norm", x_BTD)
    q, k, v = _heads(block, y_BTD)
    decay_N = jnp.abs(block["attention.decay"].astype(jnp.float32))
    if window is None or window >= T:
        decay_N = jax.lax.stop_gradient(decay_N)
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    seen_TS = j <= i if window is None else (j <= i) & (j > i // window * window - window)
    o_BTNH = _attention(q, k, v, seen_TS, decay_N[:, None, None] * (i - j))
    x_BTD = x_BTD + o_BTNH.reshape(x_BTD.shape)
    y_BTD = _norm(config, block, "mlp_norm", x_BTD)
    h_BT2F = jnp.einsum("btd,dcf->btcf", y_BTD, block["mlp.w_in"]) + block["mlp.b_in"]
    h_BTF = h_BT2F[:, :, 0] * jax.nn.silu(h_BT2F[:, :, 1])
    return x_BTD + h_BTF @ block["mlp.w_out"] + block["mlp.b_out"]


def _rotary_attention(block: Arrays, x_BTD: jax.Array, base: float) -> jax.Array:
    q, k, v = _heads(block, x_BTD)
    T, N, H = q.shape[1:]
    angles = jnp.arange(T)[:, None] * base ** (-jnp.arange(0, H, 2) / H)
    cos, sin = (f(angles)[:, None].astype(q.dtype) for f in (jnp.cos, jnp.sin))

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    k, v = (jnp.repeat(x, N // k.shape[2], axis=2) for x in (rotate(k), v))
    o_BTNH = _attention(rotate(q), k, v, jnp.tril(jnp.ones((T, T), bool)), 0.0)
    return jnp.einsum("btnh,nhd->btd", o_BTNH, block["attention.wo"])


def _heads(block: Arrays, x_BTD: jax.Array) -> list[jax.Array]:
    return [jnp.einsum("btd,dnh->btnh", x_BTD, block[f"attention.w{name}"]) for name in "qkv"]


def _attention(q: Any, k: Any, v: Any, seen_TS: jax.Array, penalty: jax.Array | float) -> jax.Array:
    scores_BNTS = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    weights_BNTS = jax.nn.softmax(jnp.where(seen_TS, scores_BNTS - penalty, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights_BNTS.astype(v.dtype), v)


def _norm(config: Any, params: Arrays, name: str, x: jax.Array) -> jax.Array:
    y, scale = x.astype(jnp.float32), params[f"{name}.scale"]
    if isinstance(config, LumenConfig):
        y = y / jnp.sqrt((y**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        return y.astype(x.dtype) * scale
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + config.layer_norm_eps)
    return y.astype(x.dtype) * scale + params[f"{name}.bias"]
