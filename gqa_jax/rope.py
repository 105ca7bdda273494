"""Rotary position embedding (RoFormer, arXiv:2104.09864): queries and keys turned by an angle for each position."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gqa_jax.config import DivisorScaling, LinearScaling, Llama3Scaling, Rope


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns the radians per position of each pair of lanes: `head_dim // 2` float32 numbers, the fastest first."""
    pairs = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = rope.base**-pairs
    match rope.scaling:
        case None:
            scaled = plain
        case LinearScaling(factor):
            scaled = plain / factor
        case Llama3Scaling():
            scaled = _llama3(plain, rope.scaling)
        case DivisorScaling(divisors):
            if len(divisors) != len(plain):
                raise ValueError(f"{len(divisors)} rotary divisors for {len(plain)} pairs of lanes; there must be one each.")
            scaled = plain / np.asarray(divisors)
        case other:
            raise TypeError(f"{other!r} is no known scaling of rotary frequencies; see gqa_jax.config.")
    return scaled.astype(np.float32)


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns = scaling.original_context * plain / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(ramp, 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor


def angles(rope: Rope, head_dim: int, positions: Int[Array, "*B T"]) -> Float[Array, "*B T half"]:
    """Returns the float32 angle of each pair of lanes at each position, in radians."""
    return positions.astype(jnp.float32)[..., None] * frequencies(rope, head_dim)


def rotate(
    x: Float[Array, "*any T H"], angles: Float[Array, "*#any T half"], *, interleaved: bool = False
) -> Float[Array, "*any T H"]:
    """Turns each pair of lanes by its angle; float32 or wider inside, the dtype of `x` outside.

    Pairs are lanes (i, i + H/2), as Hugging Face checkpoints have them, or (2i, 2i + 1) where `interleaved`.
    """
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    cos, sin = jnp.cos(angles).astype(wide.dtype), jnp.sin(angles).astype(wide.dtype)
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)
