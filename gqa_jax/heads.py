"""The arithmetic of merged heads, in numpy: maps from M old heads to a shared one and back, and the ways to find them.

A pair of maps, `down` and `up`, makes the shared head out of the old ones, s = sum_m z_m down_m, and gives each of them back,
z_m ~ s up_m. A rotary embedding turns each pair of lanes as one complex number, and only maps that are complex numbers
themselves commute with it; so keys that are turned are H/2 lanes of one complex number, each mapped on its own, and values, and
keys that are not turned, are one lane of H real numbers.

Letters beside the house's: M old heads that become one, P lanes, W width of a lane.
"""

from typing import NamedTuple

import numpy as np

from gqa_jax.config import Rope

ROUNDS = 32


class Maps(NamedTuple):
    """From M old heads to a shared one, `down` "K P M W W", and back, `up`: what is read comes first. `rope` cuts the lanes."""

    down: np.ndarray
    up: np.ndarray
    rope: Rope | None


# Ways to find them


def plain(share: np.ndarray, kv_heads: int, head_dim: int, rope: Rope | None) -> Maps:
    """Returns the maps of a shared head that has a share of each old one and stands for all of them as it is."""
    lanes, width = (1, head_dim) if rope is None else (head_dim // 2, 1)
    up = np.broadcast_to(np.eye(width), (kv_heads, lanes, len(share), width, width))
    return Maps(share[:, None, None] * up, up, rope)


def principal(moment: np.ndarray, weight: np.ndarray, rope: Rope | None) -> Maps:
    """Returns the directions that hold most of what the heads of a group say.

    `moment` is E[z^H z] of all heads side by side, and an error e of head m counts e weight_m e^H. What is read
    is an orthonormal part of the old heads, so that the new weights are as large as the old ones were, and learn as fast.
    """
    kv_heads, lanes, merged, width, _ = weight.shape
    sizes, axes = np.linalg.eigh(weight)
    # What nothing reads keeps a little weight, so that the root can be undone.
    roots = np.sqrt(sizes + 1e-6 * sizes.max(axis=(2, 3), keepdims=True) + 1e-30)[..., None, :]
    root, undo = ((axes * by) @ axes.conj().swapaxes(-1, -2) for by in (roots, 1 / roots))
    blocks = moment.reshape(kv_heads, lanes, merged, width, merged, width)
    weighed = np.einsum("kpmab,kpmbnc,kpncd->kpmand", root, blocks, root, optimize=True).reshape(moment.shape)
    found = np.linalg.eigh(weighed)[1][..., -width:].reshape(weight.shape)
    down, up = root @ found, found.conj().swapaxes(-1, -2) @ undo
    # The same product, with the columns of `down` at right angles.
    parts, rest = np.linalg.qr(down.reshape(kv_heads, lanes, merged * width, width))
    return Maps(parts.reshape(down.shape), rest[:, :, None] @ up, rope)


def aligned(moment: np.ndarray, merged: int, rope: Rope | None) -> Maps:
    """Returns turns of the heads towards their mean (generalised orthogonal Procrustes analysis), beginning at the first."""
    kv_heads, lanes, width = *moment.shape[:2], moment.shape[2] // merged
    blocks = moment.reshape(kv_heads, lanes, merged, width, merged, width)
    turns = np.stack([_turn(blocks[:, :, m, :, 0]) for m in range(merged)], axis=2)
    for _ in range(ROUNDS):
        before = turns.copy()
        for m in range(merged):
            turns[:, :, m] = _turn(np.einsum("kpinj,kpnjv->kpiv", blocks[:, :, m], turns))
        if np.abs(turns - before).max() < 1e-4:
            break
    return Maps(turns / merged, turns.conj().swapaxes(-1, -2), rope)


def _turn(x: np.ndarray) -> np.ndarray:
    """Returns the unitary matrix nearest to x."""
    left, _, right = np.linalg.svd(x)
    return left @ right


def moment(z: np.ndarray, merged: int) -> np.ndarray:
    """Sums z^H z over the tokens of z "S K P W": for each shared head and lane a square of M * W."""
    tokens, heads, lanes, width = z.shape
    z = z.reshape(tokens, heads // merged, merged, lanes, width).transpose(1, 3, 0, 2, 4)
    z = z.reshape(heads // merged, lanes, tokens, merged * width)
    return z.conj().swapaxes(-1, -2) @ z


def by_group(moment: np.ndarray, heads: int, merged: int) -> np.ndarray:
    """Returns "K P M W W" from the moments "(K G) P W W" of queries: the sum of those that one old head serves."""
    summed = moment.reshape(heads, -1, *moment.shape[1:]).sum(axis=1)
    return summed.reshape(-1, merged, *summed.shape[1:]).swapaxes(1, 2)


# What they do


def lanes(x: np.ndarray, rope: Rope | None) -> np.ndarray:
    """Returns the last axis, H, as lanes "P W", in double precision."""
    x = np.asarray(x, np.float64)
    if rope is None:
        return x[..., None, :]
    a, b = (x[..., 0::2], x[..., 1::2]) if rope.interleaved else np.split(x, 2, axis=-1)
    return (a + 1j * b)[..., None]


def unlaned(z: np.ndarray, rope: Rope | None) -> np.ndarray:
    """Returns lanes "P W" as the axis H that they were."""
    if rope is None:
        return z[..., 0, :]
    parts = np.real(z[..., 0]), np.imag(z[..., 0])
    if rope.interleaved:
        return np.stack(parts, axis=-1).reshape(*z.shape[:-2], -1)
    return np.concatenate(parts, axis=-1)


def merged(x: np.ndarray, maps: Maps) -> np.ndarray:
    """Returns "D K H", or a bias "K H", of the shared heads."""
    *width, _, H = x.shape
    z = lanes(x.reshape(*width, len(maps.down), -1, H), maps.rope)
    return unlaned(np.einsum("...kmpw,kpmwv->...kpv", z, maps.down), maps.rope)


def regrouped(x: np.ndarray, maps: Maps) -> np.ndarray:
    """Returns "D K G H", or a bias "K G H", of the queries of the shared heads, in their old order."""
    *width, _, G, H = x.shape
    z = lanes(x.reshape(*width, len(maps.up), -1, G, H), maps.rope)
    z = np.einsum("...kmgpw,kpmvw->...kmgpv", z, maps.up.conj())
    return unlaned(z, maps.rope).reshape(*width, len(maps.up), -1, H)
