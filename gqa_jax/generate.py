"""Text from a model: prompts are read in chunks, then one jitted loop feeds back a token at a time.

Reading a prompt and decoding are the same step, `extend`: some new tokens for each row go in, the logits of what follows the
last one come out. What the rows remember is a `KVCache`, or a `Transcript`, which keeps only the ids and computes everything
anew, to show what a cache is worth.
"""

import dataclasses
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gqa_jax import cache as kv
from gqa_jax import decoder
from gqa_jax.cache import KVCache
from gqa_jax.config import Config
from gqa_jax.sampling import PerRow, Sampling, penalise, sample, sampling

PROMPT_CHUNK = 512
STREAM_STEPS = 4
CAPACITY_STEP = 256

Prompt = str | Sequence[int] | np.ndarray | Array
Progress = Callable[[str, int, int], None]


class Codec(Protocol):
    """What `generate` asks of a tokenizer; `gqa_jax.tokenizer.Tokenizer` is one."""

    stop_ids: tuple[int, ...]

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def stream(self) -> Any: ...


class Model(NamedTuple):
    """A decoder with its weights, and the tokenizer that goes with them (None: ids only)."""

    config: Config
    params: decoder.Params
    tokenizer: Codec | None = None


class Stats(NamedTuple):
    """What a call to `generate` cost. Compilation is apart from the two times of running."""

    prompt_tokens: int
    new_tokens: int
    compile_seconds: float
    prompt_seconds: float
    decode_seconds: float
    cache_bytes: int
    temporary_bytes: int


class Generation(NamedTuple):
    """What `generate` returns, with one entry for each prompt.

    `ids` are the new tokens with the stop token, where there is one; `text` is what they say without it (empty strings
    without a tokenizer). `stop_reason` is "stop" or "length". `cache` holds prompts and new tokens, all of them, and goes on
    as the `cache` of the next call; it is None where none was used.
    """

    text: list[str]
    ids: list[list[int]]
    stop_reason: list[Literal["stop", "length"]]
    cache: KVCache | None
    stats: Stats


class Piece(str):
    """Some new text, and the `row` of the prompt that it continues."""

    row: int

    def __new__(cls, text: str, row: int) -> "Piece":
        piece = super().__new__(cls, text)
        piece.row = row
        return piece


class Stream:
    """Yields `Piece`s of text as they come; `generation` is there when it has ended."""

    def __init__(self, run: "_Run"):
        self._pieces = run.pieces(self)
        self.generation: Generation | None = None

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transcript:
    """The memory of rows without a cache: their ids, and how many there are."""

    ids: Int[Array, "B S"]
    length: Int[Array, " B"]

    @property
    def capacity(self) -> int:
        """How many tokens each row has room for."""
        return self.ids.shape[1]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the decode loop carries: the rows' memory, the logits of what comes next, and the tokens drawn so far."""

    memory: KVCache | Transcript
    logits: Float[Array, "B V"]
    tokens: Int[Array, "B new"]
    drawn: Int[Array, " B"]
    stopped: Bool[Array, " B"]
    seen: Bool[Array, "B V"] | None
    step: Int[Array, ""]


@overload
def generate(model: Model, prompts: Prompt | Sequence[Prompt], *, stream: Literal[False] = False, **how: Any) -> Generation: ...
@overload
def generate(model: Model, prompts: Prompt | Sequence[Prompt], *, stream: Literal[True], **how: Any) -> Stream: ...
def generate(
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
    stop: int | Iterable[int] | None = None,
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
        temperature: 0 takes the likeliest token. It and the four below are explained at `gqa_jax.sampling.sampling`.
        top_k: keeps so many of the likeliest tokens.
        top_p: keeps the likeliest tokens that hold so much probability.
        min_p: keeps tokens at least so many times as likely as the likeliest.
        repetition_penalty: makes tokens that have occurred less likely.
        seed: the same seed gives the same text; each row draws for itself, whatever stands in the others.
        stop: ids that end a row; None takes the model's own, () none.
        stream: yields the text in pieces as it comes.
        use_cache: False computes everything anew for every token, for comparison.
        cache: goes on from the cache of an earlier `Generation`, which is consumed; prompts hold only what is new.
        capacity: room for so many tokens in each row; None takes what is needed, rounded up.
        cache_dtype: float32, bfloat16 or float16; None takes the dtype of the weights.
        progress: is told (what, done, total) while compiling and reading.

    Raises:
        ValueError: an empty prompt, ids beyond the vocabulary, more tokens than the model's context or the cache has room
            for, or a number outside its range.
    """
    run = _Run(model, _ids_of(model, prompts, cache), max_new_tokens, _stop_ids(model, stop), seed, progress)
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    run.how = sampling(len(run.prompts), repetition_penalty=repetition_penalty, **how)
    run.memory = _memory(run, use_cache, cache, capacity, cache_dtype)
    if stream:
        return Stream(run)
    run.start()
    run.decode(max_new_tokens)
    return run.generation()


def _ids_of(model: Model, prompts: Prompt | Sequence[Prompt], cache: KVCache | None) -> list[list[int]]:
    """Turns every form of prompts into lists of ids, and refuses what the model cannot read."""
    one = isinstance(prompts, str) or getattr(prompts, "ndim", 0) == 1
    if not one and len(prompts) and all(isinstance(id, int | np.integer) for id in prompts):
        one = True
    rows = [prompts] if one else list(prompts)
    if not rows:
        raise ValueError("There are no prompts; at least one is needed.")
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
        ids.append([int(id) for id in np.asarray(prompt).reshape(-1)])
        _check_ids(ids[-1], row, model.config)
    return ids


def _check_ids(ids: list[int], row: int, config: Config) -> None:
    if not ids:
        raise ValueError(f"Prompt {row} is empty, and the model adds no beginning-of-text token; give it at least one token.")
    for id in (min(ids), max(ids)):
        if not 0 <= id < config.vocab_size:
            raise ValueError(f"Prompt {row} holds the id {id}; the vocabulary has {config.vocab_size}, from 0 on.")


def _stop_ids(model: Model, stop: int | Iterable[int] | None) -> tuple[int, ...]:
    if stop is None:
        return () if model.tokenizer is None else tuple(model.tokenizer.stop_ids)
    ids = tuple(int(id) for id in np.asarray([stop] if np.ndim(stop) == 0 else list(stop), int).reshape(-1))
    for id in ids:
        if not 0 <= id < model.config.vocab_size:
            raise ValueError(f"The stop id is {id}; the vocabulary has {model.config.vocab_size}, from 0 on.")
    return ids


def _memory(run: "_Run", use_cache: bool, cache: KVCache | None, capacity: int | None, dtype: DTypeLike | None):
    """Makes room for what each row holds, its prompt and its new tokens, or says why there is none."""
    config, batch = run.model.config, len(run.prompts)
    held = np.zeros(batch, int) if cache is None else np.asarray(cache.length)
    needed = int(max(held[row] + len(prompt) for row, prompt in enumerate(run.prompts))) + run.max_new_tokens
    if needed > config.context_length:
        raise ValueError(
            f"{needed - run.max_new_tokens} tokens of prompt and {run.max_new_tokens} new ones are {needed} tokens; the "
            f"model's context is {config.context_length}. Shorten the prompt or lower max_new_tokens."
        )
    room = capacity if capacity is not None else (-(-needed // CAPACITY_STEP) * CAPACITY_STEP if cache is None else cache.capacity)
    if room < needed:
        raise ValueError(
            f"{needed - run.max_new_tokens} tokens of prompt and {run.max_new_tokens} new ones do not fit into a capacity of "
            f"{room}; pass capacity={needed} or more, or lower max_new_tokens."
        )
    if not use_cache:
        if cache is not None:
            raise ValueError("use_cache=False goes on from no cache; leave one of the two out.")
        return Transcript(jnp.zeros((batch, room), jnp.int32), jnp.zeros(batch, jnp.int32))
    if cache is None:
        return kv.init_cache(config, batch, room, run.model.params["embedding"].dtype if dtype is None else dtype)
    _check_cache(cache, config)
    return kv.grow(cache, max(room, cache.capacity)) if room != cache.capacity else cache


def _check_cache(cache: KVCache, config: Config) -> None:
    have = (len(cache.k), cache.k[0].shape[1], cache.k[0].shape[3])
    want = (config.num_layers, config.num_kv_heads, config.head_dim)
    if have != want:
        names = "layers, KV heads and head width"
        raise ValueError(f"The cache has {have} {names}, the model {want}; make it with gqa_jax.init_cache(model.config, ...).")


class _Run:
    """One call to `generate`, from checked arguments to the result."""

    how: Sampling
    memory: KVCache | Transcript
    state: State

    def __init__(self, model, prompts, max_new_tokens, stop, seed, progress):
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        self.model, self.prompts, self.max_new_tokens = model, prompts, max_new_tokens
        self.stop = jnp.asarray(stop, jnp.int32)
        self.keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(len(prompts), dtype=jnp.uint32))
        self.progress = progress or (lambda what, done, total: None)
        self.compile_seconds = self.prompt_seconds = self.decode_seconds = 0.0
        self.temporary_bytes = 0

    def start(self) -> None:
        """Reads the prompts."""
        batch, vocabulary = len(self.prompts), self.model.config.vocab_size
        logits = jnp.zeros((batch, vocabulary), jnp.float32)
        capacity = self.memory.capacity
        for tokens, count in _chunks(self.prompts, self.memory):
            self.memory = _with_room(self.memory, tokens.shape[1])
            logits, self.memory = self._call("prompt", _extend, tokens, count, logits, self.memory)
        self.memory = _cut_to(self.memory, capacity)
        seen = None
        if self.how.penalises:
            seen = np.zeros((batch, vocabulary), bool)
            for row, prompt in enumerate(self.prompts):
                seen[row, prompt] = True
            seen = jnp.asarray(seen)
        room = 1 << max(6, (self.max_new_tokens - 1).bit_length())
        none = jnp.zeros(batch, jnp.int32)
        tokens = jnp.zeros((batch, room), jnp.int32)
        self.state = State(self.memory, logits, tokens, none, none.astype(bool), seen, jnp.int32(0))

    def decode(self, until: int) -> None:
        """Draws tokens until each row has stopped or gained `until`."""
        self.state = self._call("decode", _decode, self.how, self.keys, self.stop, jnp.int32(until), self.state)

    def _call(self, what: str, step: Any, *arguments: Any) -> Any:
        """Runs a jitted step, with compilation timed apart from it."""
        start = time.perf_counter()
        self.progress(f"compiling {what}", 0, 1)
        compiled = step.lower(self.model.params, *arguments, config=self.model.config).compile()
        self.progress(f"compiling {what}", 1, 1)
        ready = time.perf_counter()
        result = jax.block_until_ready(compiled(self.model.params, *arguments))
        self.compile_seconds += ready - start
        spent = f"{what}_seconds"
        setattr(self, spent, getattr(self, spent) + time.perf_counter() - ready)
        memory = compiled.memory_analysis()
        self.temporary_bytes = max(self.temporary_bytes, 0 if memory is None else memory.temp_size_in_bytes)
        return result

    def pieces(self, stream: Stream) -> Iterator[Piece]:
        """Decodes a few steps at a time and yields what each row has gained."""
        self.start()
        codec = self.model.tokenizer
        if codec is None:
            raise ValueError("The model has no tokenizer, so there is no text to stream.")
        rows = [codec.stream() for _ in self.prompts]
        told = [0] * len(rows)
        for until in range(STREAM_STEPS, self.max_new_tokens + STREAM_STEPS, STREAM_STEPS):
            self.decode(min(until, self.max_new_tokens))
            ids, reasons = self._new()
            for row, text in enumerate(rows):
                spoken = ids[row][: len(ids[row]) - (reasons[row] == "stop")]
                new = "".join(text.step(id) for id in spoken[told[row] :])
                told[row] = len(spoken)
                if new:
                    yield Piece(new, row)
            if all(reason == "stop" for reason in reasons):
                break
        for row, text in enumerate(rows):
            if rest := text.finish():
                yield Piece(rest, row)
        stream.generation = self.generation()

    def _new(self) -> tuple[list[list[int]], list[Literal["stop", "length"]]]:
        tokens, drawn, stopped = jax.device_get((self.state.tokens, self.state.drawn, self.state.stopped))
        ids = [[int(id) for id in row[:count]] for row, count in zip(tokens, drawn, strict=True)]
        return ids, ["stop" if flag else "length" for flag in stopped]

    def generation(self) -> Generation:
        """Brings the result to the host."""
        ids, reasons = self._new()
        codec, memory = self.model.tokenizer, self.state.memory
        spoken = [row[: len(row) - (reason == "stop")] for row, reason in zip(ids, reasons, strict=True)]
        cache = memory if isinstance(memory, KVCache) else None
        stats = Stats(
            prompt_tokens=sum(len(prompt) for prompt in self.prompts),
            new_tokens=sum(len(row) for row in ids),
            compile_seconds=self.compile_seconds,
            prompt_seconds=self.prompt_seconds,
            decode_seconds=self.decode_seconds,
            cache_bytes=0 if cache is None else cache.nbytes,
            temporary_bytes=self.temporary_bytes,
        )
        return Generation(["" if codec is None else codec.decode(row) for row in spoken], ids, reasons, cache, stats)


def _chunks(prompts: list[list[int]], memory: KVCache | Transcript) -> Iterator[tuple[Array, Array]]:
    """Yields right-padded pieces of the prompts, in few different lengths, and how many tokens of each row are real."""
    lengths = np.array([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    step = PROMPT_CHUNK if isinstance(memory, KVCache) else longest
    fullest = int(memory.length.max())
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
    if memory.capacity == capacity or isinstance(memory, Transcript):
        return memory
    k, v = (tuple(x[:, :, :capacity] for x in layers) for layers in (memory.k, memory.v))
    return dataclasses.replace(memory, k=k, v=v)


def extend(
    params: decoder.Params,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    logits: Float[Array, "B V"],
    memory: KVCache | Transcript,
    config: Config,
) -> tuple[Float[Array, "B V"], KVCache | Transcript]:
    """Adds the first `count` of T tokens to each row; returns the logits of what follows, and the memory.

    A row that gains nothing keeps its `logits`. Tokens behind `count` leave junk behind a row's end, which nobody reads and
    later tokens overwrite.
    """
    if isinstance(memory, Transcript):
        put = jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=0))
        longer = Transcript(put(memory.ids, tokens, memory.length), memory.length + count)
        x, _ = decoder.hidden_states(params, longer.ids, None, config)
        last = longer.length - 1
    else:
        x, longer = decoder.hidden_states(params, tokens, memory, config)
        longer = kv.rewind(longer, memory.length + count)
        last = count - 1
    x = jnp.take_along_axis(x, jnp.maximum(last, 0)[:, None, None], axis=1)
    following = decoder.logits(params, x, config)[:, 0]
    return jnp.where((count > 0)[:, None], following, logits), longer


_extend = jax.jit(extend, static_argnames="config", donate_argnames=("logits", "memory"))


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def _decode(
    params: decoder.Params,
    how: Sampling,
    keys: Array,
    stop: Int[Array, " stops"],
    until: Int[Array, ""],
    state: State,
    config: Config,
) -> State:
    """Draws and feeds back one token a row and step, until step `until` or every row has stopped."""

    def step(state: State) -> State:
        logits = state.logits if state.seen is None else penalise(state.logits, state.seen, how)
        tokens = sample(logits, jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(state.step, keys.shape)), how)
        going = ~state.stopped
        count = going.astype(jnp.int32)
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        following, memory = extend(params, tokens[:, None], count, state.logits, state.memory, config)
        return State(
            memory=memory,
            logits=following,
            tokens=state.tokens.at[:, state.step].set(tokens),
            drawn=state.drawn + count,
            stopped=state.stopped | (going & (tokens[:, None] == stop).any(axis=1)),
            seen=None if state.seen is None else state.seen.at[rows, tokens].set(True),
            step=state.step + 1,
        )

    return lax.while_loop(lambda state: (state.step < until) & ~state.stopped.all(), step, state)
