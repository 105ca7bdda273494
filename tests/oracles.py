"""Independent references in numpy float64: attention, rotary embedding and a whole decoder, by loops, without JAX.

Nothing here calls the library. `forward` reads the fields of a `Config` and the weights by their names, nothing more.
"""

import math

import ml_dtypes
import numpy as np


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """What `dtype` can hold of `x`, as float64."""
    return np.asarray(x).astype(getattr(ml_dtypes, dtype, dtype)).astype(np.float64)


def seen(q_positions, kv_positions, window: int | None = None) -> np.ndarray:
    """(B, T, S): which keys each query may read; a negative key position is an empty slot."""
    q_positions, kv_positions = np.asarray(q_positions), np.asarray(kv_positions)
    mask = np.zeros((*q_positions.shape, kv_positions.shape[1]), bool)
    for b, t, s in np.ndindex(mask.shape):
        behind = q_positions[b, t] - kv_positions[b, s]
        mask[b, t, s] = kv_positions[b, s] >= 0 and behind >= 0 and (window is None or behind < window)
    return mask


def attention(q, k, v, mask=None, *, scale=None, softcap=None, sinks=None, bias=None) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out, lse) of q (B, T, N, H) over k (B, S, K, H), v (B, S, K, HV); hidden keys are left out, not weighted by 0.

    `mask` and `bias` broadcast to (B, N, T, S). A query with nothing to read gives (0, -inf).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (B, T, N, H), (S, K), HV = q.shape, k.shape[1:3], v.shape[3]
    scale = 1 / math.sqrt(H) if scale is None else scale
    mask = np.broadcast_to(True if mask is None else mask, (B, N, T, S))
    bias = np.broadcast_to(0.0 if bias is None else np.asarray(bias, np.float64), (B, N, T, S))
    out, lse = np.zeros((B, T, N, HV)), np.full((B, T, N), -np.inf)
    for b, t, n in np.ndindex(B, T, N):
        head = n // (N // K)
        read = np.flatnonzero(mask[b, n, t])
        logits = scale * k[b, read, head] @ q[b, t, n]
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        logits = logits + bias[b, n, t, read]
        values = v[b, read, head]
        if sinks is not None:
            logits, values = np.append(logits, sinks[n]), np.vstack([values, np.zeros(HV)])
        if logits.size and logits.max() > -np.inf:
            weights = np.exp(logits - logits.max())
            out[b, t, n] = weights @ values / weights.sum()
            lse[b, t, n] = logits.max() + math.log(weights.sum())
    return out, lse


def rope(x, positions, base: float = 10_000.0, *, interleaved: bool = False, divide: float = 1.0) -> np.ndarray:
    """Turns the pairs of lanes of x (B, T, heads, H) at positions (B, T), each pair as one complex number."""
    x, positions = np.asarray(x, np.float64), np.asarray(positions, np.float64)
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = positions / divide * base ** (-2 * i / x.shape[-1])
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle)[..., None]
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


def forward(params, tokens, config, round_kv=lambda x: x) -> np.ndarray:
    """Returns the logits (B, T, V) of a decoder over whole texts; `round_kv` is what its cache does to keys and values."""
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    scale = 1.0 if config.embedding_scale is None else config.embedding_scale
    x = _wide(params["embedding"])[tokens] * scale
    for layer, stored in enumerate(params["layers"]):
        weights = {name: _wide(weight) for name, weight in stored.items()}
        mixed = attend(_norm(x, weights["attention.norm"], config), weights, positions, config, layer, round_kv)
        x = x + (_norm(mixed, weights["attention.post_norm"], config) if config.post_norms else mixed)
        made = _mlp(_norm(x, weights["mlp.norm"], config), weights, config)
        x = x + (_norm(made, weights["mlp.post_norm"], config) if config.post_norms else made)
    head = params["embedding"] if config.tied_head else params["head"]
    logits = _norm(x, _wide(params["norm"]), config) @ _wide(head).T
    cap = config.logit_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)


def _wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _norm(x, weight, config):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weight


def attend(x, weights, positions, config, layer=0, round_kv=lambda x: x) -> np.ndarray:
    """Returns what one attention layer makes of x (B, T, D) at these positions."""
    how = config.attention[layer % len(config.attention)]

    def project(name, heads):
        made = x @ weights[f"attention.{name}"].reshape(x.shape[-1], -1)
        if config.qkv_bias:
            made = made + weights[f"attention.{name}_bias"].reshape(-1)
        return made.reshape(*positions.shape, heads, config.head_dim)

    q, k, v = project("q", config.num_heads), project("k", config.num_kv_heads), project("v", config.num_kv_heads)
    if config.qk_norm:
        q, k = _norm(q, weights["attention.q_norm"], config), _norm(k, weights["attention.k_norm"], config)
    if how.rope is not None:
        divide = how.rope.scaling.factor if how.rope.scaling else 1.0
        q, k = (rope(z, positions, how.rope.base, interleaved=how.rope.interleaved, divide=divide) for z in (q, k))
    mask = seen(positions, positions, how.window)[:, None]
    sinks = weights["attention.sinks"].reshape(-1) if how.sinks else None
    out, _ = attention(q, round_kv(k), round_kv(v), mask, scale=how.scale, softcap=how.softcap, sinks=sinks)
    out = out.reshape(*positions.shape, -1) @ weights["attention.o"].reshape(-1, x.shape[-1])
    return out + weights["attention.o_bias"] if config.out_bias else out


def _mlp(x, weights, config):
    gate, up = x @ weights["mlp.gate"], x @ weights["mlp.up"]
    if config.mlp_bias:
        gate, up = gate + weights["mlp.gate_bias"], up + weights["mlp.up_bias"]
    if config.activation == "silu":
        opened = gate / (1 + np.exp(-gate))
    else:
        opened = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    down = (opened * up) @ weights["mlp.down"]
    return down + weights["mlp.down_bias"] if config.mlp_bias else down
