"""gqa_jax beside Hugging Face transformers, both run here: two real GGUF models, and small random models of each family.

Runs only where torch and transformers are installed.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gqa_jax
import gqa_jax.linen
import gqa_jax.nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

GOLDEN = pathlib.Path(__file__).parent / "golden"

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "tie_word_embeddings": True,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
# With heads of 16 lanes and base 500 the wavelengths fall below, inside and above the ramp of 8 to 32 tokens.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**TINY),
    "llama, linear rope": transformers.LlamaConfig(**TINY, rope_parameters=LINEAR),
    "llama, llama3 rope": transformers.LlamaConfig(**TINY, head_dim=16, rope_parameters=LLAMA3),
    "llama, biases": transformers.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama, untied head": transformers.LlamaConfig(**TINY | {"tie_word_embeddings": False}),
    "llama, wide heads": transformers.LlamaConfig(**TINY, head_dim=12),
    "mistral": transformers.MistralConfig(**TINY, sliding_window=8),
    "qwen2": transformers.Qwen2Config(**TINY),
    "qwen3": transformers.Qwen3Config(**TINY, head_dim=16),
    "gemma3": transformers.Gemma3TextConfig(
        **TINY | {"num_hidden_layers": 8},
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=8,
        rope_parameters=GEMMA3_ROPE,
    ),
}
CHUNKS = (10, 13, 18)


def save(config, folder, *, dtype=torch.float32, **options):
    """Writes a model of random weights, with every norm and bias moved off its initial ones and zeros."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, **options)
    return folder


def tokens_of(config):
    return np.random.default_rng(1).integers(config.vocab_size, size=(2, sum(CHUNKS)), dtype=np.int32)


def oracle_logits(tokens, *args, **options):
    """Returns the logits transformers computes in float32 with a model it loads itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        *args, **options, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()


def uncached_logits(model, tokens):
    return gqa_jax.forward(model.params, jnp.asarray(tokens), None, model.config)[0]


def assert_agree(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * max(1.0, np.abs(theirs).max() / 5))


def layer_of_theirs(name, folder, x, dtype):
    """Returns the output of the first attention layer of transformers, and the gradient of its squares by the input."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().model
    module, x = model.layers[0].self_attn, x.clone().to(dtype).requires_grad_()
    index = torch.arange(x.shape[1])
    kind = {"layer_type": "sliding_attention"} if name == "gemma3" else {}
    turn = model.rotary_emb(x, index[None], **kind)
    behind = index[:, None] - index[None]
    window = getattr(model.config, "sliding_window", None) if name in ("mistral", "gemma3") else None
    hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    mask = torch.zeros(1, 1, *hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    y, _ = module(x, position_embeddings=turn, attention_mask=mask)
    y.float().square().sum().backward()
    return y.detach().float().numpy(), x.grad.float().numpy()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize("name", ["llama, biases", "mistral", "qwen2", "qwen3", "gemma3"])
def test_one_layer_of_flax_agrees_with_that_of_transformers_forward_and_backward(name, kind, dtype, tolerance, tmp_path):
    save(CONFIGS[name], tmp_path)
    config, params, _ = gqa_jax.load(tmp_path)
    x = torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(3))
    want, slope = layer_of_theirs(name, tmp_path, x, getattr(torch, dtype))
    options = {
        "num_heads": config.num_heads,
        "in_features": config.model_dim,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention": config.layer_attention(0),
        "use_bias": config.qkv_bias,
        "use_out_bias": config.out_bias,
        "qk_norm": config.qk_norm,
        "norm_eps": config.norm_eps,
        "dtype": jnp.dtype(dtype),
    }
    parameters = {name.removeprefix("attention."): leaf for name, leaf in params["layers"][0].items() if "attention." in name}
    parameters = {name: leaf for name, leaf in parameters.items() if name not in ("norm", "post_norm")}
    if kind == "linen":
        layer = gqa_jax.linen.GroupedQueryAttention(**options)

        def run(x, **how):
            return layer.apply({"params": parameters}, x, **how)
    else:
        run = layer = gqa_jax.nnx.GroupedQueryAttention(**options, rngs=nnx.Rngs(0))
        for name, leaf in parameters.items():
            getattr(layer, name)[...] = leaf
    x = jnp.asarray(x.numpy(), dtype)
    first, cache = run(x[:, :7], cache=layer.init_cache(2, 19))
    rest, cache = run(x[:, 7:], cache=cache)
    gradient = jax.grad(lambda x: jnp.square(run(x).astype(jnp.float32)).sum())(x)
    for got, exact in ((run(x), want), (jnp.concatenate([first, rest], axis=1), want), (gradient, slope)):
        np.testing.assert_allclose(np.asarray(got, np.float32), exact, rtol=0, atol=tolerance * max(1.0, np.abs(exact).max()))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_one_uncached_pass_agrees_with_transformers(config, tmp_path):
    save(config, tmp_path)
    tokens = tokens_of(config)
    assert_agree(uncached_logits(gqa_jax.load(tmp_path), tokens), oracle_logits(tokens, tmp_path))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_prefill_in_chunks_agrees_with_transformers(config, tmp_path):
    save(config, tmp_path)
    tokens = tokens_of(config)
    model = gqa_jax.load(tmp_path)
    cache = gqa_jax.init_cache(model.config, 2, sum(CHUNKS))
    pieces = []
    for chunk in np.split(tokens, np.cumsum(CHUNKS)[:-1], axis=1):
        logits, cache = gqa_jax.forward(model.params, jnp.asarray(chunk), cache, model.config)
        pieces.append(logits)
    assert_agree(jnp.concatenate(pieces, axis=1), oracle_logits(tokens, tmp_path))


def test_a_folder_without_a_tokenizer_loads_without_one(tmp_path):
    assert gqa_jax.load(save(CONFIGS["llama"], tmp_path)).tokenizer is None


def test_a_sharded_checkpoint_agrees_with_transformers(tmp_path):
    config = CONFIGS["qwen3"]
    save(config, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = tokens_of(config)
    assert_agree(uncached_logits(gqa_jax.load(tmp_path), tokens), oracle_logits(tokens, tmp_path))


def test_a_bfloat16_checkpoint_widened_to_float32_agrees_with_transformers(tmp_path):
    config = CONFIGS["gemma3"]
    save(config, tmp_path, dtype=torch.bfloat16)
    tokens = tokens_of(config)
    model = gqa_jax.load(tmp_path)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.params)
    ours, _ = gqa_jax.forward(wide, jnp.asarray(tokens), None, model.config)
    assert_agree(ours, oracle_logits(tokens, tmp_path))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_transformers_opens_what_is_saved(config, tmp_path):
    save(config, tmp_path / "theirs")
    model = gqa_jax.load(tmp_path / "theirs")
    gqa_jax.save(model, tmp_path / "ours")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "ours").model_type == config.model_type
    tokens = tokens_of(config)
    theirs = oracle_logits(tokens, tmp_path / "ours")
    np.testing.assert_array_equal(theirs, oracle_logits(tokens, tmp_path / "theirs"))
    assert_agree(uncached_logits(gqa_jax.load(tmp_path / "ours"), tokens), theirs)


SLIDING = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
BY_HAND = {
    "qwen2, windows in turn": transformers.Qwen2Config(**TINY | {"num_hidden_layers": 4}, **SLIDING),
    "qwen3, windows in turn": transformers.Qwen3Config(**TINY | {"num_hidden_layers": 4}, **SLIDING, head_dim=16),
    "qwen2, wide heads": transformers.Qwen2Config(**TINY, head_dim=12),
}


@pytest.mark.parametrize("config", BY_HAND.values(), ids=BY_HAND.keys())
def test_transformers_opens_what_lay_on_a_mesh(config, tmp_path):
    save(config, tmp_path / "theirs")
    model = gqa_jax.load(tmp_path / "theirs", dtype="bfloat16", mesh=functools.partial(gqa_jax.make_mesh, tp=4))
    gqa_jax.save(model, tmp_path / "ours")
    tokens = tokens_of(config)
    ours = uncached_logits(gqa_jax.load(tmp_path / "ours", dtype="float32"), tokens)
    assert_agree(ours, oracle_logits(tokens, tmp_path / "ours"))


OLDER_SPELLINGS = {
    "llama, linear rope": {"rope_theta": 10_000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama, llama3 rope": {
        "rope_theta": 500.0,
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
    },
    "gemma3": {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    },
}


@pytest.mark.parametrize("name", OLDER_SPELLINGS)
def test_a_config_that_spells_rope_as_transformers_4_did_agrees(name, tmp_path):
    config = CONFIGS[name]
    save(config, tmp_path)
    tokens = tokens_of(config)
    theirs = oracle_logits(tokens, tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    for newer in ("rope_parameters", "layer_types"):
        fields.pop(newer, None)
    file.write_text(json.dumps(fields | OLDER_SPELLINGS[name]))
    assert_agree(uncached_logits(gqa_jax.load(tmp_path), tokens), theirs)


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def path(name, request):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    return request.getfixturevalue(f"{name}_path")


@pytest.fixture(scope="module")
def oracle(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="module")
def model(name, request):
    return request.getfixturevalue(name)


def test_every_logit_and_the_likelihood_of_a_text_agree_on_a_real_model(golden, oracle, model):
    tokens = np.asarray([golden["ids"]], np.int32)
    with torch.no_grad():
        theirs = oracle(torch.from_numpy(tokens).long(), use_cache=False).logits[0]
    ours = torch.from_numpy(np.array(uncached_logits(model, tokens)[0]))
    assert (ours - theirs).abs().max().item() < 2e-3
    following = torch.from_numpy(tokens[0, 1:]).long()
    ours_nll, theirs_nll = (torch.nn.functional.cross_entropy(x[:-1], following).item() for x in (ours, theirs))
    assert ours_nll == pytest.approx(theirs_nll, abs=1e-3)


def test_a_real_model_continues_prompts_greedily_as_in_transformers(golden, oracle, model):
    for run in golden["greedy"][:2]:
        prompt = torch.tensor([run["prompt_ids"]])
        theirs = oracle.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False)
        ours = gqa_jax.generate(model, [run["prompt_ids"]], max_new_tokens=64, stop=())
        assert ours.ids == [theirs[0, prompt.shape[1] :].tolist()]


def test_transformers_opens_smollm2_that_is_saved_and_writes_the_same_text(smollm2, tmp_path):
    gqa_jax.save(smollm2, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Once upon a time", "  def f(x):\n\treturn 你好 😀<|im_end|>"):
        assert tokenizer(text).input_ids == smollm2.tokenizer.encode(text)
    messages = [{"role": "user", "content": "Hello"}]
    said = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert said == smollm2.tokenizer.chat(messages)
    assert theirs.generation_config.eos_token_id == list(smollm2.tokenizer.stop_ids)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        logits = theirs.eval()(**inputs, use_cache=False).logits.numpy()
        text = tokenizer.decode(theirs.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs.input_ids.shape[1] :])
    np.testing.assert_allclose(uncached_logits(smollm2, inputs.input_ids.numpy().astype(np.int32)), logits, rtol=0, atol=2e-3)
    assert gqa_jax.generate(smollm2, "The capital of France is", max_new_tokens=8).text == [text]


@pytest.mark.parametrize("name", ["llama", "llama, llama3 rope", "llama, biases", "mistral", "qwen2"])
def test_a_converted_checkpoint_agrees_with_transformers(name, tmp_path):
    config = CONFIGS[name]
    save(config, tmp_path / "model")
    tokens = tokens_of(config)
    model = gqa_jax.load(tmp_path / "model")
    new, errors = gqa_jax.convert.convert(model, 1, "pca", calibration=list(tokens))
    gqa_jax.save(new, tmp_path / "new")
    theirs = oracle_logits(tokens, tmp_path / "new")
    assert_agree(uncached_logits(gqa_jax.load(tmp_path / "new"), tokens), theirs)
    assert np.abs(theirs - oracle_logits(tokens, tmp_path / "model")).max() > 1e-2
    assert all(0 < lost < 1 for layer in errors for lost in layer)
