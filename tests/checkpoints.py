"""Tiny checkpoints in both formats, written from one set of weights in the names of Hugging Face, and what they must give.

Every matrix holds multiples of 1/256 that fit seven bits, and every norm multiples of 1/128: float32, float16 and bfloat16
hold them exactly. The rules of renaming, permuting and folding are llama.cpp's, written out by loops.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

LLAMA = {
    "model_type": "llama",
    "vocab_size": 53,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 97,
    "rms_norm_eps": 2.0**-17,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
BIASED = LLAMA | {"attention_bias": True}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 5}
QWEN2 = LLAMA | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3"}
GEMMA3 = LLAMA | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "rope_theta": 1_000_000.0,
    "query_pre_attn_scalar": 16,
    "sliding_window": 5,
}

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def make_weights(said: dict[str, Any], *, head: bool | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random weights as a Hugging Face model of the config `said` names and shapes them."""
    rng = np.random.default_rng(seed)
    kind, width, hidden = said["model_type"], said["hidden_size"], said["intermediate_size"]
    q, kv = (said[name] * said["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes = {"model.embed_tokens.weight": (said["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(said["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{norm}.weight": (width,) for norm in norms}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (rows, width) for name, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{at}self_attn.o_proj.weight": (width, q)}
        shapes |= {f"{at}mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (width, hidden)}
        if kind in ("qwen3", "gemma3_text"):
            shapes |= {f"{at}self_attn.{name}_norm.weight": (said["head_dim"],) for name in "qk"}
        if said.get("attention_bias") or kind == "qwen2":
            shapes |= {f"{at}self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", q), ("k", kv), ("v", kv))}
        if said.get("attention_bias"):
            shapes |= {f"{at}self_attn.o_proj.bias": (width,)}
        if said.get("mlp_bias"):
            shapes |= {
                f"{at}mlp.{name}_proj.bias": (rows,) for name, rows in (("gate", hidden), ("up", hidden), ("down", width))
            }
    if head if head is not None else not said["tie_word_embeddings"]:
        shapes |= {"lm_head.weight": (said["vocab_size"], width)}
    one = 0.0 if kind == "gemma3_text" else 1.0
    return {
        name: (one + rng.integers(-60, 61, shape) / 128 if is_norm(name) else rng.integers(-127, 128, shape) / 256).astype("f4")
        for name, shape in shapes.items()
    }


def is_norm(name: str) -> bool:
    return name.endswith(("norm.weight", "layernorm.weight"))


def write_folder(folder: Path, said: Any, weights: dict[str, np.ndarray], dtype: Any = np.float32, shards: int = 1) -> Path:
    """Writes config.json and safetensors; more than one shard gets an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said))
    stored = {name: np.ascontiguousarray(weight.astype(dtype)) for name, weight in weights.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(stored))}
    for file in sorted(set(weight_map.values())):
        save_file({name: stored[name] for name in stored if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def gguf_metadata(said: dict[str, Any]) -> dict[str, Any]:
    """Returns what llama.cpp's converter writes of a config, without the tokenizer."""
    arch = gguf_arch(said)
    metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": said["num_hidden_layers"],
        f"{arch}.context_length": said["max_position_embeddings"],
        f"{arch}.embedding_length": said["hidden_size"],
        f"{arch}.feed_forward_length": said["intermediate_size"],
        f"{arch}.attention.head_count": said["num_attention_heads"],
        f"{arch}.attention.head_count_kv": said["num_key_value_heads"],
        f"{arch}.attention.key_length": said["head_dim"],
        f"{arch}.attention.value_length": said["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": said["rms_norm_eps"],
        f"{arch}.rope.freq_base": said["rope_theta"],
    }
    if arch == "llama":
        metadata["llama.rope.dimension_count"] = said["head_dim"]
    if "sliding_window" in said:
        metadata[f"{arch}.attention.sliding_window"] = said["sliding_window"]
    return metadata


def gguf_arch(said: dict[str, Any]) -> str:
    return {"mistral": "llama", "gemma3_text": "gemma3"}.get(said["model_type"], said["model_type"])


def gguf_tensors(said: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors under GGUF's names: rows of Q and K permuted for llama, one folded into the norms of Gemma."""
    arch, tensors = gguf_arch(said), {}
    for name, weight in weights.items():
        for projection, heads in (("q_proj", said["num_attention_heads"]), ("k_proj", said["num_key_value_heads"])):
            if arch == "llama" and projection in name:
                weight = interleave(weight, heads)
        if arch == "gemma3" and is_norm(name):
            weight = weight + np.float32(1)
        tensors[gguf_name(name, arch)] = weight
    return tensors


def gguf_name(name: str, arch: str) -> str:
    stem, _, suffix = name.rpartition(".")
    names = GEMMA3_NAMES if arch == "gemma3" else NAMES
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{suffix}"
    layer, _, own = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{names[own]}.{suffix}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Puts the rows that turn together side by side within each head: 0, H/2, 1, H/2 + 1 and so on."""
    width = len(weight) // heads
    rows = [head * width + half * width // 2 + lane for head in range(heads) for lane in range(width // 2) for half in (0, 1)]
    return weight[rows]


def write_gguf(
    file: Path,
    said: dict[str, Any],
    weights: dict[str, np.ndarray],
    kind: str = "F32",
    *,
    kinds: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes a GGUF file with matrices of one kind, or of their own in `kinds`, and vectors as float32.

    `metadata` and `tensors` are added, or replace what would be written.
    """
    writer = gguf.GGUFWriter(file, gguf_arch(said))
    add_metadata(writer, gguf_metadata(said) | (metadata or {}))
    for name, weight in (gguf_tensors(said, weights) | (tensors or {})).items():
        own = gguf.GGMLQuantizationType["F32" if weight.ndim == 1 else (kinds or {}).get(name, kind)]
        stored = weight.astype(np.float64) if own.name == "F64" else gguf.quants.quantize(weight, own)
        writer.add_tensor(name, stored, raw_dtype=own)
    save(writer)
    return file


def add_metadata(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if value is not None and key != "general.architecture":
            add[type(value)](key, value)


def save(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def through(kind: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the weights as a GGUF file of this kind gives them back."""
    own = gguf.GGMLQuantizationType[kind]
    return {
        name: weight if weight.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(weight, own), own)
        for name, weight in weights.items()
    }


def expected_params(said: dict[str, Any], weights: dict[str, np.ndarray], dtype: Any = np.float32) -> dict[str, Any]:
    """Returns the decoder's parameters, cut out of the weights head by head."""
    queries, keys, H, D = (said[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"))
    group = queries // keys

    def norm(name):
        return weights[name] + np.float32(1) if said["model_type"] == "gemma3_text" else weights[name]

    def heads(weight, count):
        """Rows by head, with the model's width, if there is one, in front."""
        return np.stack([weight[n * H : (n + 1) * H].T for n in range(count)], axis=-2)

    def grouped(weight):
        by_head = heads(weight, queries)
        return np.stack([by_head[..., k * group : (k + 1) * group, :] for k in range(keys)], axis=-3)

    def layer(at):
        own = {
            "attention.norm": norm(f"{at}input_layernorm.weight"),
            "attention.q": grouped(weights[f"{at}self_attn.q_proj.weight"]),
            "attention.k": heads(weights[f"{at}self_attn.k_proj.weight"], keys),
            "attention.v": heads(weights[f"{at}self_attn.v_proj.weight"], keys),
            "attention.o": np.empty((keys, group, H, D), np.float32),
            "mlp.gate": weights[f"{at}mlp.gate_proj.weight"].T,
            "mlp.up": weights[f"{at}mlp.up_proj.weight"].T,
            "mlp.down": weights[f"{at}mlp.down_proj.weight"].T,
        }
        for n in range(queries):
            own["attention.o"][n // group, n % group] = weights[f"{at}self_attn.o_proj.weight"][:, n * H : (n + 1) * H].T
        if said["model_type"] == "gemma3_text":
            own["attention.post_norm"] = norm(f"{at}post_attention_layernorm.weight")
            own["mlp.norm"] = norm(f"{at}pre_feedforward_layernorm.weight")
            own["mlp.post_norm"] = norm(f"{at}post_feedforward_layernorm.weight")
        else:
            own["mlp.norm"] = norm(f"{at}post_attention_layernorm.weight")
        if f"{at}self_attn.q_norm.weight" in weights:
            own |= {f"attention.{name}_norm": norm(f"{at}self_attn.{name}_norm.weight") for name in "qk"}
        if f"{at}self_attn.q_proj.bias" in weights:
            own["attention.q_bias"] = grouped(weights[f"{at}self_attn.q_proj.bias"])
            own |= {f"attention.{name}_bias": heads(weights[f"{at}self_attn.{name}_proj.bias"], keys) for name in "kv"}
        if f"{at}self_attn.o_proj.bias" in weights:
            own["attention.o_bias"] = weights[f"{at}self_attn.o_proj.bias"]
        if f"{at}mlp.up_proj.bias" in weights:
            own |= {f"mlp.{name}_bias": weights[f"{at}mlp.{name}_proj.bias"] for name in ("gate", "up", "down")}
        return own

    top = {"embedding": weights["model.embed_tokens.weight"], "norm": norm("model.norm.weight")}
    if not said["tie_word_embeddings"]:
        top["head"] = weights["lm_head.weight"]
    layers = tuple(layer(f"model.layers.{layer_}.") for layer_ in range(said["num_hidden_layers"]))
    wide = {**top, "layers": layers}
    return _map(lambda name, leaf: leaf if name.endswith("norm") else leaf.astype(dtype), wide)


def _map(change, tree):
    return {
        name: tuple(_map(change, layer) for layer in leaf) if name == "layers" else change(name, leaf)
        for name, leaf in tree.items()
    }


def assert_same_bits(params: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that both trees have the same names, dtypes, shapes and bytes."""
    assert params.keys() == expected.keys()
    for name, leaf in expected.items():
        if name == "layers":
            assert len(params[name]) == len(leaf)
            for layer, own in zip(params[name], leaf, strict=True):
                assert_same_bits(layer, own)
        else:
            found = np.asarray(params[name])
            assert (found.dtype, found.shape) == (leaf.dtype, leaf.shape), name
            assert found.tobytes() == leaf.tobytes(), name


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
