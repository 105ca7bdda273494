"""Grouped-query attention for JAX and Flax."""

from gqa_jax.attention import causal_mask, grouped_query_attention
from gqa_jax.cache import KVCache, grow, init_cache, rewind, write
from gqa_jax.config import Attention, Config, Rope
from gqa_jax.decoder import forward, init_params, param_axes
from gqa_jax.generate import Generation, Model, generate

__all__ = [
    "Attention",
    "Config",
    "Generation",
    "KVCache",
    "Model",
    "Rope",
    "causal_mask",
    "forward",
    "generate",
    "grouped_query_attention",
    "grow",
    "init_cache",
    "init_params",
    "param_axes",
    "rewind",
    "write",
]
