"""The loss of next-token prediction over packed rows, and what a step of it costs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from gqa_jax.config import Config
from gqa_jax.decoder import Params, axis_sizes, hidden_states, logits, param_axes

MOST_SCORES = 2**25  # of float32 at a time, 128 MiB


def loss(
    params: Params,
    tokens: Integer[Array, "B T"],
    segments: Integer[Array, "B T"] | None,
    config: Config,
    *,
    remat: bool = False,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Returns the summed negative log-likelihood of the tokens that are predicted, in float32, and how many they are.

    Each token predicts the next one of its text. The last token of a text predicts nothing, and padding neither.

    Args:
        params: the weights; on a mesh they are used where they lie.
        tokens: ids.
        segments: a number for each token that changes from text to text, and 0 for padding; None where each row is one text.
        config: the model.
        remat: gradients compute each layer anew instead of keeping what is inside it.
    """
    x, _ = hidden_states(params, tokens, None, config, segments=segments, remat=remat)
    targets = jnp.roll(jnp.asarray(tokens, jnp.int32), -1, axis=1)
    counted = jnp.broadcast_to(jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1, tokens.shape)
    if segments is not None:
        counted = counted & (segments != 0) & (segments == jnp.roll(segments, -1, axis=1))
    return _in_parts(params, x, targets, counted, config), counted.sum(dtype=jnp.int32)


def _in_parts(
    params: Params, x: Float[Array, "B T D"], targets: Int[Array, "B T"], counted: Bool[Array, "B T"], config: Config
) -> Float[Array, ""]:
    """Scores some tokens of each row at a time, and once more for the gradient: all scores at once may not fit."""

    def part(total, piece):
        x, targets, counted = piece
        scores = logits(params, x, config)
        # Read by a mask and not by an index, so that a mesh need not bring the vocabulary together.
        found = jnp.where(jnp.arange(config.vocab_size) == targets[..., None], scores, 0).sum(axis=-1)
        missed = jax.nn.logsumexp(scores, axis=-1) - found
        return total + jnp.where(counted, missed, 0).sum(), None

    (rows, length), zero = targets.shape, jnp.zeros((), np.promote_types(x.dtype, np.float32))
    parts = min(length, -(-rows * length * config.vocab_size // MOST_SCORES))
    if parts == 1:
        return part(zero, (x, targets, counted))[0]
    lacking = -length % parts

    def cut(array):
        whole = jnp.pad(array, [(0, 0), (0, lacking)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(whole.reshape(rows, parts, -1, *array.shape[2:]), 1, 0)

    return jax.lax.scan(jax.checkpoint(part), zero, (cut(x), cut(targets), cut(counted)))[0]


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Returns the weights in another dtype, save the norms, which are float32 always."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path[-1].key.endswith("norm") else leaf.astype(dtype), params
    )


def flops_per_token(config: Config, length: int) -> int:
    """Returns the operations that a model needs to learn from one token of a text this long, whatever it computes anew.

    Six for each weight of a matrix that the token passes, as in arXiv:2001.08361, and those of attention over what the token
    sees.

    >>> tiny = Config(vocab_size=7, num_layers=1, model_dim=6, mlp_dim=5, num_heads=4, num_kv_heads=2, head_dim=2,
    ...               context_length=8)
    >>> flops_per_token(tiny, length=3)  # 6 * (7 * 6 + 6 * 8 + 2 * 6 * 4 + 8 * 6 + 3 * 6 * 5) + 12 * 8 * (1 + 2 + 3) / 3
    1848
    """
    sizes = axis_sizes(config)

    def passed(path, axes):
        read = path[-1].key != "embedding" or config.tied_head
        is_matrix = read and not path[-1].key.endswith(("norm", "bias", "sinks"))
        return int(np.prod([sizes[axis] for axis in axes.split()])) if is_matrix else 0

    weights = sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(passed, param_axes(config))))
    windows = (config.layer_attention(layer).window or length for layer in range(config.num_layers))
    seen = sum(int(np.minimum(np.arange(1, length + 1), window).sum()) for window in windows)
    return 6 * weights + 12 * config.num_heads * config.head_dim * seen // length
