"""Text from a model: everything is checked on the host, prompts are read in chunks, then one jitted loop writes.

>>> import gqa_jax
>>> tiny = gqa_jax.Config(vocab_size=11, num_layers=1, model_dim=8, mlp_dim=12, num_heads=4, num_kv_heads=2, head_dim=4,
...                       context_length=32)
>>> model = gqa_jax.Model(tiny, gqa_jax.init_params(tiny, jax.random.key(0)))
>>> generation = generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
>>> [len(ids) for ids in generation.ids], generation.stop_reason
([5, 5], ['length', 'length'])
"""

import dataclasses
import operator
import reprlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from gqa_jax import cache as kv
from gqa_jax import loop
from gqa_jax.cache import KVCache
from gqa_jax.config import Config
from gqa_jax.decoder import Params
from gqa_jax.loop import State, Transcript
from gqa_jax.sampling import PerRow, Sampling, sampling

PROMPT_CHUNK = 512
PROMPT_TAIL = 32
STREAM_STEPS = 4
CAPACITY_STEP = 256

# What each step that has been compiled takes, since XLA needs a tenth of a second to say it again.
_temporary_bytes: dict[Any, int] = {}

Ids = Sequence[int | np.integer] | np.ndarray | Array
Prompt = str | Ids
Reason = Literal["stop", "length"]
Progress = Callable[[str, int, int], None]


class Model(NamedTuple):
    """A decoder with its weights, and the tokenizer that goes with them (None: ids only).

    Any tokenizer will do that has what `gqa_jax.tokenizer.Tokenizer` has: `vocab_size`, `stop_ids`, `encode`, `decode`
    and `stream`.
    """

    config: Config
    params: Params
    tokenizer: Any = None

    def __repr__(self) -> str:
        """Leaves the weights out."""
        leaves = jax.tree.leaves(self.params)
        dtypes = "/".join(sorted({str(leaf.dtype) for leaf in leaves}))
        return (
            f"Model({self.config}, {sum(leaf.size for leaf in leaves)} parameters in {dtypes}, {type(self.tokenizer).__name__})"
        )


class Stats(NamedTuple):
    """What a call to `generate` cost; compilation is apart from the two times of running.

    `temporary_bytes` is the most that a compiled step takes beside the weights, the cache and its results.
    """

    prompt_tokens: int
    new_tokens: int
    compile_seconds: float
    prompt_seconds: float
    decode_seconds: float
    cache_bytes: int
    temporary_bytes: int


class Generation(NamedTuple):
    """What `generate` returns, with one entry for each prompt.

    `ids` are the new tokens with the stop token, where there is one; `text` is what they say without it (empty where the
    model has no tokenizer). `cache` holds prompts and new tokens, all of them, and goes on as the `cache` of the next call;
    it is None where none was used.
    """

    text: list[str]
    ids: list[list[int]]
    stop_reason: list[Reason]
    cache: KVCache | None
    stats: Stats


class Piece(str):
    """Some new text, and the `row` of the prompt that it continues."""

    row: int

    def __new__(cls, text: str, row: int) -> "Piece":
        """Makes a string that knows its row."""
        piece = super().__new__(cls, text)
        piece.row = row
        return piece


class Stream:
    """Yields `Piece`s of text as they come; `generation` is there when they have ended."""

    def __init__(self, run: "_Run"):
        self._run = run
        self._pieces: Generator[Piece] = run.pieces()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def generation(self) -> Generation:
        """What has been generated; it ends the stream, whose cache would otherwise go on without you."""
        self._pieces.close()
        return self._run.generation()


@overload
def generate(model: Model, prompts: Prompt | Sequence[Prompt], *, stream: Literal[False] = False, **how: Any) -> Generation: ...
@overload
def generate(model: Model, prompts: Prompt | Sequence[Prompt], *, stream: Literal[True], **how: Any) -> Stream: ...
def generate(  # pyright: ignore[reportInconsistentOverload]
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: PerRow = 0.0,
    top_k: int | None = None,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    repetition_penalty: PerRow = 1.0,
    seed: int = 0,
    stop: int | Iterable[int | np.integer] | Array | None = None,
    stream: bool = False,
    use_cache: bool = True,
    cache: KVCache | None = None,
    capacity: int | None = None,
    cache_dtype: DTypeLike | None = None,
    progress: Progress | None = None,
) -> Generation | Stream:
    """Continues each prompt by up to `max_new_tokens` tokens; each row stops on its own.

    Args:
        model: what `gqa_jax.load` returns.
        prompts: a string, a list of ids, or a list of such; they may differ in length.
        max_new_tokens: how many tokens each row may gain, a stop token included.
        temperature: divides the logits; 0 takes the likeliest token. Like the three probabilities it may differ by row.
        top_k: keeps so many of the likeliest tokens; None keeps all.
        top_p: keeps the likeliest tokens that together hold so much probability.
        min_p: keeps tokens at least so many times as likely as the likeliest.
        repetition_penalty: makes tokens that have occurred, in this call's prompt too, less likely.
        seed: the same seed gives the same text; what a row draws depends on its place, not on the other rows.
        stop: ids that end a row; None takes the model's own, () none.
        stream: returns a `Stream`, which yields the text in pieces as it comes.
        use_cache: False computes everything anew for every token, for comparison.
        cache: goes on from the cache of an earlier `Generation`, which is consumed; prompts hold only what is new.
        capacity: room for so many tokens in each row; None takes what is needed, rounded up.
        cache_dtype: float32, bfloat16 or float16; None takes the dtype of the weights.
        progress: is told (what, done, total) while compiling.

    Raises:
        ValueError: an empty prompt, ids beyond the vocabulary, more tokens than the model's context or the cache has room
            for, or a number outside its range.
    """
    max_new_tokens = _whole("max_new_tokens", max_new_tokens, 1)
    seed = _whole("seed", seed, 0, 2**32 - 1)
    capacity = None if capacity is None else _whole("capacity", capacity, 1)
    top_k = None if top_k is None else _whole("top_k", top_k, 1)
    ids = _ids_of(model, prompts, cache)
    how = sampling(
        len(ids), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    stops = _stop_ids(model, stop)
    if stream and model.tokenizer is None:
        raise ValueError("The model has no tokenizer, so there is no text to stream.")
    memory = _memory(model, ids, max_new_tokens, use_cache, cache, capacity, cache_dtype)
    run = _Run(model, ids, max_new_tokens, how, stops, seed, progress)
    if stream:
        return Stream(run.read(memory))
    return run.read(memory).write(max_new_tokens).generation()


def _whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} is {value!r}; it must be a whole number.") from error
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} is {number}; it must be at least {least}" + (f" and at most {most}." if most else "."))
    return number


def _ids_of(model: Model, prompts: Prompt | Sequence[Prompt], cache: KVCache | None) -> list[list[int]]:
    """Turns every form of prompts into lists of ids, and refuses what the model cannot read."""
    one = isinstance(prompts, str) or (len(prompts) > 0 and all(np.ndim(id) == 0 and not isinstance(id, str) for id in prompts))
    rows = [prompts] if one else list(prompts)
    if not rows:
        raise ValueError("There are no prompts; at least one is needed.")
    if cache is not None and cache.length.is_deleted():
        raise ValueError("The cache has been consumed by an earlier call; go on from the one that call returned.")
    if cache is not None:
        kv.check_room(cache, 0)
    held = np.zeros(len(rows), int) if cache is None else np.asarray(cache.length)
    if len(held) != len(rows):
        raise ValueError(f"The cache has {len(held)} rows and there are {len(rows)} prompts; there must be one for each row.")
    ids = []
    for row, prompt in enumerate(rows):
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise ValueError("The model has no tokenizer, so prompts must be lists of ids.")
            # In the middle of a text there is no second beginning.
            prompt = model.tokenizer.encode(prompt, add_bos=False if held[row] else None)
        array = np.asarray(prompt)
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise ValueError(
                f"Prompt {row} is {reprlib.repr(prompt)}; it must be a string or a list of ids. Messages of a chat become a "
                "string by model.tokenizer.chat(messages)."
            )
        ids.append(array.tolist())
        _check_ids(ids[-1], row, model.config)
    return ids


def _check_ids(ids: list[int], row: int, config: Config) -> None:
    if not ids:
        raise ValueError(f"Prompt {row} is empty, and the model adds no token of its own; give it at least one token.")
    for id in (min(ids), max(ids)):
        if not 0 <= id < config.vocab_size:
            raise ValueError(f"Prompt {row} holds the id {id}; the vocabulary has {config.vocab_size}, from 0 on.")


def _stop_ids(model: Model, stop: int | Iterable[int | np.integer] | Array | None) -> tuple[int, ...]:
    if stop is None:
        return () if model.tokenizer is None else tuple(model.tokenizer.stop_ids)
    many = list(stop) if isinstance(stop, Iterable) and getattr(stop, "ndim", 1) else [stop]
    ids = tuple(_whole("The stop id", id, 0) for id in many)
    for id in ids:
        if id >= model.config.vocab_size:
            raise ValueError(f"The stop id is {id}; the vocabulary has {model.config.vocab_size}, from 0 on.")
    return ids


def _memory(
    model: Model,
    ids: list[list[int]],
    max_new_tokens: int,
    use_cache: bool,
    cache: KVCache | None,
    capacity: int | None,
    dtype: DTypeLike | None,
) -> KVCache | Transcript:
    """Makes room for what each row holds, its prompt and its new tokens, or says why there is none."""
    batch, context = len(ids), model.config.context_length
    held = [0] * batch if cache is None else np.asarray(cache.length).tolist()
    read = max(row + len(prompt) for row, prompt in zip(held, ids, strict=True))
    needed = read + max_new_tokens
    tokens = f"{read} tokens of prompt and {max_new_tokens} new ones are {needed} tokens"
    if needed > context:
        raise ValueError(f"{tokens}; the model's context is {context}. Shorten the prompt or lower max_new_tokens.")
    if capacity is None:
        capacity = cache.capacity if cache is not None else -(-needed // CAPACITY_STEP) * CAPACITY_STEP
    if needed > capacity:
        raise ValueError(f"{tokens}; the cache has room for {capacity}. Pass capacity={needed}, or lower max_new_tokens.")
    if not use_cache:
        if cache is not None:
            raise ValueError("use_cache=False cannot go on from a cache; leave one of the two out.")
        return Transcript(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32))
    if cache is None:
        return kv.init_cache(model.config, batch, capacity, model.params["embedding"].dtype if dtype is None else dtype)
    _check_cache(cache, model.config, dtype)
    return kv.grow(cache, capacity) if capacity > cache.capacity else cache


def _check_cache(cache: KVCache, config: Config, dtype: DTypeLike | None) -> None:
    have = (len(cache.k), cache.k[0].shape[1], cache.k[0].shape[3])
    want = (config.num_layers, config.num_kv_heads, config.head_dim)
    if have != want:
        raise ValueError(
            f"The cache has {have[0]} layers of {have[1]} KV heads of width {have[2]}, the model {want[0]} of {want[1]} of "
            f"width {want[2]}; make it with gqa_jax.init_cache(model.config, ...)."
        )
    if dtype is not None and cache.k[0].dtype != jnp.dtype(dtype):
        raise ValueError(f"The cache is {cache.k[0].dtype} and cache_dtype is {jnp.dtype(dtype)}; a cache keeps its dtype.")


class _Run:
    """One call to `generate`, from checked arguments to the result."""

    state: State

    def __init__(
        self,
        model: Model,
        ids: list[list[int]],
        max_new_tokens: int,
        how: Sampling,
        stops: tuple[int, ...],
        seed: int,
        progress: Progress | None,
    ):
        self.model, self.prompts, self.max_new_tokens, self.how = model, ids, max_new_tokens, how
        self.stops = jnp.asarray(stops, jnp.int32)
        self.keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(len(ids), dtype=jnp.uint32))
        self.progress = progress or (lambda what, done, total: None)
        self.seconds = {"compile": 0.0, "prompt": 0.0, "decode": 0.0}
        self.temporary_bytes = 0

    def read(self, memory: KVCache | Transcript) -> "_Run":
        """Reads the prompts."""
        batch, vocabulary, capacity = len(self.prompts), self.model.config.vocab_size, memory.capacity
        logits = jnp.zeros((batch, vocabulary), jnp.float32)
        for tokens, count in _chunks(self.prompts, memory):
            memory = _with_room(memory, tokens.shape[1])
            logits, memory = self._call("prompt", loop.extend, tokens, count, logits, memory)
        none = jnp.zeros(batch, jnp.int32)
        self.state = State(
            memory=_cut_to(memory, capacity),
            logits=logits,
            # Few different lengths, so that another max_new_tokens seldom compiles anew.
            tokens=jnp.zeros((batch, 1 << max(6, (self.max_new_tokens - 1).bit_length())), jnp.int32),
            drawn=none,
            stopped=none.astype(bool),
            seen=_seen(self.prompts, vocabulary) if self.how.penalises else None,
            step=jnp.int32(0),
        )
        return self

    def write(self, until: int) -> "_Run":
        """Draws tokens until each row has stopped or gained `until`."""
        arguments = (self.how, self.keys, self.stops, jnp.int32(until), self.state)
        self.state = self._call("decode", loop.decode, *arguments)
        return self

    def _call(self, what: str, step: Any, *arguments: Any) -> Any:
        """Runs a jitted step, with compilation timed apart from it."""
        start = time.perf_counter()
        leaves, tree = jax.tree.flatten((self.model.params, arguments))
        key = (what, self.model.config, tree, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        if key not in _temporary_bytes:
            self.progress(f"compiling {what}", 0, 1)
            memory = step.lower(self.model.params, *arguments, config=self.model.config).compile().memory_analysis()
            _temporary_bytes[key] = 0 if memory is None else memory.temp_size_in_bytes
            self.progress(f"compiling {what}", 1, 1)
        self.temporary_bytes = max(self.temporary_bytes, _temporary_bytes[key])
        ready = time.perf_counter()
        result = jax.block_until_ready(step(self.model.params, *arguments, config=self.model.config))
        self.seconds["compile"] += ready - start
        self.seconds[what] += time.perf_counter() - ready
        return result

    def pieces(self) -> Generator[Piece]:
        """Decodes a few steps at a time and yields what each row has gained."""
        rows = [self._voice(row) for row in range(len(self.prompts))]
        told = [0] * len(rows)
        for until in range(STREAM_STEPS, self.max_new_tokens + STREAM_STEPS, STREAM_STEPS):
            self.write(min(until, self.max_new_tokens))
            ids, reasons = self._drawn()
            for row, voice in enumerate(rows):
                said = self._said(ids[row], reasons[row])
                if new := "".join(voice.push(id) for id in said[told[row] :]):
                    yield Piece(new, row)
                told[row] = len(said)
            if all(reason == "stop" for reason in reasons):
                break
        for row, voice in enumerate(rows):
            if rest := voice.flush():
                yield Piece(rest, row)

    def _drawn(self) -> tuple[list[list[int]], list[Reason]]:
        tokens, drawn, stopped = jax.device_get((self.state.tokens, self.state.drawn, self.state.stopped))
        ids = [row[:count].tolist() for row, count in zip(tokens, drawn, strict=True)]
        return ids, ["stop" if ended else "length" for ended in stopped]

    def _voice(self, row: int) -> Any:
        """Returns what turns the new ids of a row into text: behind its prompt, whose last character they may complete."""
        codec = self.model.tokenizer
        voice = codec.stream()
        tail = [id for id in self.prompts[row][-PROMPT_TAIL:] if id < codec.vocab_size]
        for id in tail:
            voice.push(id)
        if not codec.decode(tail).endswith("\ufffd"):
            voice.flush()  # Held back, but whole: it belongs to the prompt.
        return voice

    def _text(self, row: int, said: list[int]) -> str:
        if self.model.tokenizer is None:
            return ""
        voice = self._voice(row)
        return "".join([*(voice.push(id) for id in said), voice.flush()])

    def _said(self, ids: list[int], reason: Reason) -> list[int]:
        """Leaves out the stop token, and ids that only pad the model's vocabulary and have no text."""
        spoken = ids[:-1] if reason == "stop" else ids
        codec = self.model.tokenizer
        return spoken if codec is None else [id for id in spoken if id < codec.vocab_size]

    def generation(self) -> Generation:
        """Brings the result to the host."""
        ids, reasons = self._drawn()
        memory = self.state.memory
        said = [self._said(row, reason) for row, reason in zip(ids, reasons, strict=True)]
        cache = memory if isinstance(memory, KVCache) else None
        stats = Stats(
            prompt_tokens=sum(len(prompt) for prompt in self.prompts),
            new_tokens=sum(len(row) for row in ids),
            **{f"{what}_seconds": spent for what, spent in self.seconds.items()},
            cache_bytes=0 if cache is None else cache.nbytes,
            temporary_bytes=self.temporary_bytes,
        )
        return Generation([self._text(row, ids) for row, ids in enumerate(said)], ids, reasons, cache, stats)


def _seen(prompts: list[list[int]], vocabulary: int) -> Array:
    seen = np.zeros((len(prompts), vocabulary), bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    return jnp.asarray(seen)


def _chunks(prompts: list[list[int]], memory: KVCache | Transcript) -> Iterator[tuple[Array, Array]]:
    """Yields right-padded pieces of the prompts, in few different lengths, and how many tokens of each row are real."""
    lengths = np.array([len(prompt) for prompt in prompts])
    longest, fullest = int(lengths.max()), int(memory.length.max())
    step = PROMPT_CHUNK if isinstance(memory, KVCache) else longest
    for start in range(0, longest, step):
        size = min(step, longest - start)
        padded = min(1 << max(4, (size - 1).bit_length()), step)
        if fullest + start + padded > memory.capacity:
            padded = size
        tokens = np.zeros((len(prompts), padded), np.int32)
        for row, prompt in enumerate(prompts):
            piece = prompt[start : start + padded]
            tokens[row, : len(piece)] = piece
        yield jnp.asarray(tokens), jnp.asarray(np.clip(lengths - start, 0, padded), jnp.int32)


def _with_room(memory: KVCache | Transcript, new_tokens: int) -> KVCache | Transcript:
    """Enlarges a cache in which a full row with a short prompt stands beside an empty one with a long prompt."""
    needed = int(memory.length.max()) + new_tokens
    return kv.grow(memory, needed) if isinstance(memory, KVCache) and needed > memory.capacity else memory


def _cut_to(memory: KVCache | Transcript, capacity: int) -> KVCache | Transcript:
    if isinstance(memory, Transcript) or memory.capacity == capacity:
        return memory
    k, v = (tuple(x[:, :, :capacity] for x in layers) for layers in (memory.k, memory.v))
    return dataclasses.replace(memory, k=k, v=v)
