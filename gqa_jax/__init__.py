"""Grouped-query attention for JAX and Flax: from a pure function to real checkpoints that decode.

>>> import jax, gqa_jax
>>> config = gqa_jax.Config(vocab_size=101, num_layers=2, model_dim=24, mlp_dim=40, num_heads=6, num_kv_heads=2, head_dim=8,
...                         context_length=64)
>>> params = gqa_jax.init_params(config, jax.random.key(0))
>>> cache = gqa_jax.init_cache(config, batch=1, capacity=16)
>>> logits, cache = gqa_jax.forward(params, jax.numpy.array([[5, 7, 11]]), cache, config)
>>> logits.shape, cache.length
((1, 3, 101), Array([3], dtype=int32))
"""

import importlib
from typing import TYPE_CHECKING, Any

from gqa_jax.attention import causal_mask, grouped_query_attention
from gqa_jax.cache import KVCache, advance, grow, init_cache, rewind, write
from gqa_jax.config import Attention, Config, DivisorScaling, LinearScaling, Llama3Scaling, Rope
from gqa_jax.decoder import forward, gather, init_params, param_axes, place
from gqa_jax.generate import Generation, generate
from gqa_jax.request import Model
from gqa_jax.sharding import HeadPlan, Placement, make_mesh, plan_heads

if TYPE_CHECKING:
    from gqa_jax.checkpoint import load
    from gqa_jax.export import save

__all__ = [
    "Attention",
    "Config",
    "DivisorScaling",
    "Generation",
    "HeadPlan",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "Model",
    "Placement",
    "Rope",
    "advance",
    "causal_mask",
    "forward",
    "gather",
    "generate",
    "grouped_query_attention",
    "grow",
    "init_cache",
    "init_params",
    "load",
    "make_mesh",
    "param_axes",
    "place",
    "plan_heads",
    "rewind",
    "save",
    "write",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Brings `load` and `save`, and with them the file formats, and rooms beside the way only when they are asked for."""
    if name == "load":
        from gqa_jax.checkpoint import load

        return load
    if name == "save":
        from gqa_jax.export import save

        return save
    if name in ("convert", "data", "distributed", "linen", "nnx", "planner", "train"):
        return importlib.import_module(f"gqa_jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
