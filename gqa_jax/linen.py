"""Grouped-query attention as a module of Flax Linen. It owns the parameters and calls the pure core.

>>> import jax
>>> attn = GroupedQueryAttention(num_heads=6, in_features=24, num_kv_heads=2)
>>> x = jnp.ones((1, 5, 24))
>>> variables = attn.init(jax.random.key(0), x)
>>> y = attn.apply(variables, x)
>>> y, cache = attn.apply(variables, x, cache=attn.init_cache(batch=1, capacity=8))
>>> y.shape, cache.length
((1, 5, 24), Array([5], dtype=int32))
"""

from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from gqa_jax import cache as kv
from gqa_jax import modules
from gqa_jax.cache import KVCache
from gqa_jax.config import Attention, Config
from gqa_jax.sharding import Placement

Variables = Mapping[str, Any]


class GroupedQueryAttention(nn.Module):
    """Causal self-attention of `num_heads` query heads that share `num_kv_heads` KV heads (arXiv:2305.13245).

    Its fields and its parameters are those of `gqa_jax.nnx.GroupedQueryAttention`, and so are its errors. The parameters name
    their axes by letters, for which `placement.rules(attn.config)` gives the axes of a mesh.
    """

    num_heads: int
    in_features: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    attention: Attention = Attention()
    use_bias: bool = False
    use_out_bias: bool | None = None
    qk_norm: bool = False
    norm_eps: float = 1e-6
    dropout_rate: float = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: modules.Initializer = modules.lecun_normal
    mesh: Mesh | Placement | None = None

    @property
    def config(self) -> Config:
        """The config of a decoder that is this one layer and nothing else."""
        return modules.config_of(self)

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike | None = None) -> KVCache:
        """Returns an empty cache with room for `capacity` tokens in each of `batch` rows; see `gqa_jax.init_cache`."""
        return kv.init_cache(self.config, batch, capacity, dtype or modules.cache_dtype(self), mesh=self.mesh)

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        cache: KVCache | None = None,
        count: Integer[Array, " B"] | None = None,
        segments: Integer[Array, "B T"] | None = None,
        dropout_key: Array | None = None,
    ) -> Any:
        """Returns what each token learns from itself and those before it; with a cache also the cache that holds them.

        The arguments are those of `gqa_jax.nnx.GroupedQueryAttention`.
        """

        def parameter(name: str, axes: str) -> Any:
            def make(key: Array) -> Array:
                return modules.new_parameter(key, name, self, self.kernel_init)

            return self.param(name, nn.with_logical_partitioning(make, tuple(axes.split())))

        parameters = {name: parameter(name, axes) for name, axes in modules.parameter_axes(self.config).items()}
        return modules.run(self, parameters, x, cache, count, segments, dropout_key)


def from_flax(variables: Variables, layer: GroupedQueryAttention) -> Variables:
    """Returns variables for `layer` from those of `flax.linen.MultiHeadDotProductAttention`, under a causal mask the same.

    Raises:
        ValueError: a layer that does what Flax's does not, such as a rotary embedding, or parameters that are missing, left
            over or misshapen.
    """
    if "params" not in variables:
        raise ValueError(f"The variables are {', '.join(sorted(variables))}; there must be 'params' among them, as init makes.")
    theirs: Any = flax.traverse_util.flatten_dict(nn.unbox(variables)["params"], sep="/")
    return {"params": modules.from_theirs(theirs, layer.config)}


def to_flax(variables: Variables, layer: GroupedQueryAttention) -> Variables:
    """Returns variables for `flax.linen.MultiHeadDotProductAttention` from those of `layer`; give it a causal mask.

    Raises:
        ValueError: fewer KV heads than query heads, a rotary embedding, window, scale, softcap, sinks or norm of queries.
    """
    if layer.config.kind != "MHA":
        raise ValueError(
            f"The layer has {layer.config.num_kv_heads} KV heads for {layer.config.num_heads} query heads; "
            "flax.linen.MultiHeadDotProductAttention has as many of both. flax.nnx.MultiHeadAttention knows fewer."
        )
    theirs = modules.to_theirs(nn.unbox(variables)["params"], layer.config)
    return {"params": flax.traverse_util.unflatten_dict(theirs, sep="/")}
