"""Grouped-query attention and the whole decoder as modules of Flax NNX. They own the parameters and call the pure core.

>>> from flax import nnx
>>> attn = GroupedQueryAttention(num_heads=6, in_features=24, num_kv_heads=2, rngs=nnx.Rngs(0))
>>> x = jnp.ones((1, 5, 24))
>>> y = attn(x)
>>> cache = attn.init_cache(batch=1, capacity=8)
>>> y, cache = attn(x, cache=cache)
>>> y.shape, cache.length
((1, 5, 24), Array([5], dtype=int32))
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from gqa_jax import cache as kv
from gqa_jax import decoder, modules
from gqa_jax.cache import KVCache
from gqa_jax.config import Attention, Config
from gqa_jax.request import Model
from gqa_jax.sharding import Placement, placement_of


class GroupedQueryAttention(nnx.Module):
    """Causal self-attention of `num_heads` query heads that share `num_kv_heads` KV heads (arXiv:2305.13245).

    Its parameters are `q` "D K G H", `k` and `v` "D K H", `o` "K G H D", and those that options bring: `q_bias`, `k_bias`,
    `v_bias`, `o_bias`, `q_norm`, `k_norm`, `sinks`. Their metadata name the axes by these letters, for which
    `placement.rules(attn.config)` gives the axes of a mesh.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        attention: Attention = Attention(),  # noqa: B008
        use_bias: bool = False,
        use_out_bias: bool | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        dropout_rate: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: modules.Initializer = modules.lecun_normal,
        mesh: Mesh | Placement | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes new parameters.

        Args:
            num_heads: query heads.
            in_features: width of what comes in and goes out.
            num_kv_heads: KV heads, of which `num_heads` is a multiple; as many as query heads where None.
            head_dim: width of a head; in_features / num_heads where None.
            attention: rotary embedding, window, scale, softcap and sinks.
            use_bias: biases on queries, keys and values.
            use_out_bias: a bias on the output; as `use_bias` where None.
            qk_norm: a root-mean-square norm of each query and key head, before the rotary turn.
            norm_eps: what is added inside that norm.
            dropout_rate: the part of the attention's weights that is left out where a call gives a `dropout_key`.
            dtype: of the computation and the cache; that of input and parameters where None.
            param_dtype: of the parameters. Norms are float32.
            kernel_init: makes matrices, given a key, (inputs, outputs) and a dtype.
            mesh: where the heads are computed, however many there are; parameters stay whole arrays of the shapes above.
            rngs: its stream `params` makes the parameters.

        Raises:
            ValueError: head counts that do not divide, or a size or rate out of range.
        """
        self.num_heads, self.in_features, self.num_kv_heads, self.head_dim = num_heads, in_features, num_kv_heads, head_dim
        self.attention, self.use_bias, self.use_out_bias = attention, use_bias, use_out_bias
        self.qk_norm, self.norm_eps, self.dropout_rate = qk_norm, norm_eps, dropout_rate
        self.dtype, self.param_dtype, self.mesh = dtype, param_dtype, placement_of(mesh)
        for name, axes in modules.parameter_axes(self.config).items():
            weight = modules.new_parameter(rngs.params(), name, self, kernel_init)
            setattr(self, name, _param(weight, axes, self.mesh, self.config))

    @property
    def config(self) -> Config:
        """The config of a decoder that is this one layer and nothing else."""
        return modules.config_of(self)

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike | None = None) -> KVCache:
        """Returns an empty cache with room for `capacity` tokens in each of `batch` rows; see `gqa_jax.init_cache`."""
        return kv.init_cache(self.config, batch, capacity, dtype or modules.cache_dtype(self), mesh=self.mesh)

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

        Args:
            x: the tokens; with a cache they continue what it holds, any number at a time.
            cache: what the rows hold already, made by `init_cache`. It is not changed.
            count: of rows that are padded on the right, how many tokens the cache keeps.
            segments: where several texts stand in one row, a number that changes from text to text.
            dropout_key: draws what `dropout_rate` leaves out, on another mesh otherwise; None leaves nothing out.

        Raises:
            ValueError: shapes that are not the layer's, tokens that do not fit into the cache, or what does not go with one.
        """
        parameters = {name: getattr(self, name)[...] for name in modules.parameter_axes(self.config)}
        return modules.run(self, parameters, x, cache, count, segments, dropout_key)

    @classmethod
    def from_flax(cls, module: nnx.MultiHeadAttention, *, mesh: Mesh | Placement | None = None) -> "GroupedQueryAttention":
        """Returns the layer that computes what Flax's own does under a causal mask.

        Raises:
            ValueError: a layer with `normalize_qk`, or with other widths for keys or the output.
        """
        sizes = (module.num_heads, module.in_features, module.num_kv_heads, module.head_dim)
        same = {name: getattr(module, name) for name in ("use_bias", "dropout_rate", "dtype", "param_dtype")}
        made = cls(*sizes, attention=Attention(rope=None), mesh=mesh, rngs=nnx.Rngs(0), **same)
        state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
        theirs = {f"{part}/{name}": leaf for part, leaves in state.items() for name, leaf in leaves.items()}
        for name, value in modules.from_theirs(theirs, made.config).items():
            getattr(made, name)[...] = value
        return made

    def to_flax(self) -> nnx.MultiHeadAttention:
        """Returns Flax's own layer with these parameters; give it a causal mask.

        Raises:
            ValueError: what Flax's layer does not have: a rotary embedding, window, scale, softcap, sinks or norm of queries.
        """
        parameters = {name: getattr(self, name)[...] for name in modules.parameter_axes(self.config)}
        config, theirs = self.config, modules.to_theirs(parameters, self.config)
        made = nnx.MultiHeadAttention(
            config.num_heads,
            config.model_dim,
            config.num_heads * config.head_dim,
            num_kv_heads=config.num_kv_heads,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            dropout_rate=self.dropout_rate,
            use_bias=config.qkv_bias or config.out_bias,
            decode=False,
            rngs=nnx.Rngs(0),
        )
        for path, value in theirs.items():
            part, name = path.split("/")
            getattr(getattr(made, part), name)[...] = value
        return made


def _param(value: Any, axes: str, placement: Placement | None, config: Config | None) -> nnx.Param:
    about: dict[str, Any] = {"out_sharding": tuple(axes.split()), "eager_sharding": False}
    if placement is not None:
        about["sharding_rules"] = placement.rules(config)
    return nnx.Param(value, **about)


class Decoder(nnx.Module):
    """The whole decoder: `forward` with the weights in a module, for those who train with a loop of their own.

    `Decoder.from_model(gqa_jax.load(name))` fills it from a checkpoint, and `gqa_jax.generate(decoder.model, prompts)` runs it.
    Weights have the names of `param_axes`: `decoder.embedding`, `decoder.layers[0]["attention.q"]`.
    """

    def __init__(
        self,
        config: Config,
        *,
        param_dtype: DTypeLike = jnp.float32,
        mesh: Mesh | Placement | None = None,
        remat: bool = False,
        params: decoder.Params | None = None,
        tokenizer: Any = None,
        rngs: nnx.Rngs | None = None,
    ):
        """Makes new weights, or takes those of a model.

        Args:
            config: the model.
            param_dtype: of new weights. Norms are float32.
            mesh: where new weights lie, padded where they do not divide.
            remat: gradients compute each layer anew instead of keeping what is inside it.
            params: weights there are already, on the mesh where they lie; with them the two above are not looked at.
            tokenizer: what `model` gives to `gqa_jax.generate`.
            rngs: its stream `params` makes new weights.

        Raises:
            ValueError: neither `params` nor `rngs`.
        """
        if params is None:
            if rngs is None:
                raise ValueError("Give rngs, to make new weights, or params.")
            params = decoder.init_params(config, rngs.params(), param_dtype, mesh=mesh)
        self.config, self.remat, self.tokenizer = config, remat, tokenizer
        self.placement: Placement | None = params.get("placement")

        def held(axes: str, leaf: Array) -> nnx.Param:
            return _param(leaf, axes, self.placement, None)

        axes = decoder.param_axes(config)
        layers = zip(axes.pop("layers"), params["layers"], strict=True)
        self.layers = nnx.List([nnx.Dict({name: held(a[name], weights[name]) for name in a}) for a, weights in layers])
        for name, letters in axes.items():
            setattr(self, name, held(letters, params[name]))

    @classmethod
    def from_model(cls, model: Model, *, remat: bool = False) -> "Decoder":
        """Returns the module that holds the weights of a model, not copied, on the mesh where they lie."""
        return cls(model.config, params=model.params, tokenizer=model.tokenizer, remat=remat)

    @property
    def params(self) -> decoder.Params:
        """The weights as `gqa_jax.forward` takes them."""
        top = {name: getattr(self, name)[...] for name in decoder.param_axes(self.config) if name != "layers"}
        layers = tuple({name: weight[...] for name, weight in layer.items()} for layer in self.layers)
        return decoder.with_placement({**top, "layers": layers}, self.placement)

    @property
    def model(self) -> Model:
        """What `gqa_jax.generate` and `gqa_jax.save` take, with the weights as they are now."""
        return Model(self.config, self.params, self.tokenizer)

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike | None = None) -> KVCache:
        """Returns an empty cache with room for `capacity` tokens in each of `batch` rows; see `gqa_jax.init_cache`."""
        return kv.init_cache(self.config, batch, capacity, dtype or self.params["embedding"].dtype, mesh=self.placement)

    def __call__(
        self,
        tokens: Integer[Array, "B T"],
        *,
        cache: KVCache | None = None,
        count: Integer[Array, " B"] | None = None,
        segments: Integer[Array, "B T"] | None = None,
    ) -> Any:
        """Returns the float32 logits "B T V" that follow each token; with a cache also the cache. See `gqa_jax.forward`."""
        params = self.params
        x, cache = decoder.hidden_states(params, tokens, cache, self.config, count, segments=segments, remat=self.remat)
        logits = decoder.logits(params, x, self.config)
        return logits if cache is None else (logits, cache)
