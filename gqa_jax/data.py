"""From files of text to rows of tokens: texts are shuffled, laid one behind the other and cut into rows, without padding.

A row holds several texts, or pieces of them, and says by `segments` which token is of which: 1, 2, ... and 0 for padding.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np


class Batch(NamedTuple):
    """Rows of tokens, B T, and which text each token is of; 0 is padding. Of NumPy's arrays, or of JAX's where placed."""

    tokens: Any
    segments: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
    """The tokens of all texts, one behind the other, and where each text ends."""

    tokens: np.ndarray
    ends: np.ndarray

    @property
    def identity(self) -> dict[str, int]:
        """What tells these texts from others: how many, of how many tokens, and a checksum."""
        checksum = zlib.crc32(self.ends.tobytes(), zlib.crc32(self.tokens.tobytes()))
        return {"texts": len(self.ends), "tokens": len(self.tokens), "crc32": checksum}


def read(files: str | Path | Iterable[str | Path], tokenizer: Any) -> Texts:
    """Returns the texts of files, tokenised; they stay in memory, at 4 bytes a token.

    A file is one text in UTF-8. Of a file that ends in .jsonl each line is an object, and its "text" is one.

    Args:
        files: which to read, in this order; or one.
        tokenizer: that of the model. Each text ends with its end of text, where it has one.

    Raises:
        ValueError: no tokenizer, a file that cannot be read, no text at all, bytes that are no UTF-8, or a line that is no
            object with a "text".
    """
    if tokenizer is None:
        raise ValueError("There is no tokenizer to read texts with; give one, or ids to gqa_jax.data.texts_of.")
    files = [files] if isinstance(files, str | Path) else files
    end = getattr(tokenizer, "eos_id", None)

    def ids(text: str) -> list[int]:
        found = tokenizer.encode(text)
        return found if end is None or found[-1:] == [end] else [*found, end]

    return texts_of(ids(text) for file in files for text in _texts_in(Path(file).expanduser()) if text)


def texts_of(rows: Iterable[Sequence[int] | np.ndarray]) -> Texts:
    """Returns texts that are ids already.

    >>> texts_of([[5, 7, 11], [2, 3]]).identity["tokens"]
    5

    Raises:
        ValueError: there is none, or one that is no list of int32 numbers.
    """
    texts = [text for text in map(np.asarray, rows) if text.size]
    for text in texts:
        if text.ndim != 1 or text.dtype.kind not in "iu" or not -(2**31) <= text.min() <= text.max() < 2**31:
            raise ValueError(f"A text is {text!r:.80}; it must be a list of ids.")
    if not texts:
        raise ValueError("There are no texts in the data; give files that are not empty.")
    return Texts(np.concatenate([text.astype(np.int32) for text in texts]), np.cumsum([text.size for text in texts]))


def _texts_in(file: Path) -> Iterator[str]:
    try:
        whole = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} holds bytes that are no UTF-8, at {error.start}; convert it first.") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from error
    if file.suffix.lower() != ".jsonl":
        yield whole
        return
    for number, line in enumerate(whole.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f'{file}, line {number}, is no JSON object with a "text": {line[:60]!r}.') from error
        if not isinstance(text, str):
            raise ValueError(f'{file}, line {number}, has a "text" that is no string: {text!r:.60}.')
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError(f'{file}, line {number}, has a "text" with half a surrogate pair, which is no letter.')
        yield text


class _Packed(grain.MapDataset):
    """Rows by their number: all texts one behind the other, cut into rows; each epoch has the texts in an order of its own.

    grain's own packers are not used: to find their place again they read anew what they have read, up to whole epochs where
    most pieces fill a row, and theirs are cut more often or padded more. Here a place is one number.
    """

    def __init__(self, texts: Texts, length: int, seed: int | None):
        super().__init__()
        self._texts, self._row, self._seed = texts, length, seed
        self._laid: tuple[int, np.ndarray, np.ndarray] = (-1, texts.ends, texts.ends)

    def __len__(self) -> int:
        whole, left = divmod(len(self._texts.tokens), self._row)
        # In training what is left goes; it is another part in each epoch.
        return max(1, whole) if self._seed is not None else whole + bool(left)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        epoch, row = divmod(index, len(self))
        order, ends = self._lay(epoch)
        start, stop = row * self._row, min((row + 1) * self._row, ends[-1])
        batch = {name: np.zeros(self._row, np.int32) for name in Batch._fields}
        first, at = int(np.searchsorted(ends, start, side="right")), start
        for segment, (text, end) in enumerate(zip(order[first:], ends[first:], strict=True), 1):
            until, shift = min(end, stop), self._texts.ends[text] - end
            batch["tokens"][at - start : until - start] = self._texts.tokens[at + shift : until + shift]
            batch["segments"][at - start : until - start] = segment
            if until == stop:
                break
            at = until
        return batch

    def _lay(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the order of the texts in an epoch, and where each ends then."""
        if self._laid[0] != epoch:
            sizes = np.diff(self._texts.ends, prepend=0)
            order = np.arange(sizes.size)
            if self._seed is not None:
                order = np.random.default_rng((self._seed, epoch)).permutation(sizes.size)
            self._laid = (epoch, order, np.cumsum(sizes[order]))
        return self._laid[1:]


class Rows:
    """Batches without an end: each epoch in its own order, packed; `position` says where it is, and may be set.

    Every process draws the same rows, and places its own part of them.
    """

    def __init__(self, texts: Texts, length: int, batch: int, seed: int = 0):
        self._iterator = iter(_one_by_one(_Packed(texts, length, seed).shuffle(seed=seed).repeat()).batch(batch))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return Batch(**next(self._iterator))

    @property
    def position(self) -> dict[str, Any]:
        """Where the next batch begins, of what JSON can hold."""
        return self._iterator.get_state()

    @position.setter
    def position(self, position: dict[str, Any]) -> None:
        self._iterator.set_state(position)


def once(texts: Texts, length: int, batch: int) -> Iterator[Batch]:
    """Yields all texts once, in their order, packed; what is lacking at the end is padding."""
    for found in _one_by_one(_Packed(texts, length, None)).batch(batch, drop_remainder=False):
        lacking = [(0, batch - len(found["tokens"])), (0, 0)]
        yield Batch(**{name: np.pad(array, lacking) for name, array in found.items()})


def _one_by_one(rows: grain.MapDataset) -> grain.IterDataset:
    # All is in memory: threads and reading ahead would only cost.
    return rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1))
