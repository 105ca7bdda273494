"""What a training run leaves behind so that it can go on: checkpoints that are whole or refused, and a log.

orbax writes a checkpoint beside its place, in the background, and renames it when all of it is there. What is cut short or
changed later is found by a list of sizes and checksums that goes along.
"""

import contextlib
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from gqa_jax.config import Config
from gqa_jax.decoder import axis_sizes
from gqa_jax.sharding import Placement
from gqa_jax.step import State, everywhere

MANIFEST = "manifest.json"
# orbax writes in these two again when all else is there and listed.
_LATE = {"_CHECKPOINT_METADATA", "commit_success.txt"}

_log = logging.getLogger("gqa_jax")


class DamagedError(RuntimeError):
    """A checkpoint is not as it was written."""


class Restored(NamedTuple):
    """A state, and the rest of the run as it was saved."""

    state: State
    run: dict[str, Any]


class Checkpoints:
    """The newest `keep` checkpoints of one run, in a folder of their own, each named after its step."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self._keep, self._saving = folder, keep, 0
        self._opened: ocp.CheckpointManager | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, damaged ones too, the newest first."""
        found = [path.name for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []
        return sorted((int(name) for name in found if name.isdecimal() and name == str(int(name))), reverse=True)

    def save(self, state: State, run: Mapping[str, Any]) -> None:
        """Begins to write a state, and goes on when it is off the devices; waits for the save before.

        Args:
            state: what to save.
            run: what else shall be known, of what JSON can hold.
        """
        key = np.asarray(jax.random.key_data(state.key)).tolist()
        arrays = {name: ocp.args.StandardSave(_named(tree)) for name, tree in _trees(state).items()}
        note = ocp.args.JsonSave({**run, "step": int(state.step), "key": key})
        with self._writing():
            manager = self._manager()
            manager.wait_until_finished()
            self._saving = int(state.step)
            manager.save(self._saving, args=ocp.args.Composite(**arrays, run=note), force=True)

    def restore(self, state: State, axes: State, config: Config, run: Mapping[str, Any]) -> Restored | None:
        """Returns the newest whole checkpoint, lying as `state` does; None where there is none at all.

        Damaged ones that are newer are taken away, and a warning says so.

        Args:
            state: the shapes, dtypes and places that are wanted.
            axes: the letters of their axes.
            config: the model.
            run: what must be as it was when the checkpoint was made.

        Raises:
            DamagedError: there are checkpoints, and none is whole.
            ValueError: a checkpoint of another run; what differs is named.
        """
        step = self._newest_whole()
        if step is None:
            return None
        kept = self._manager().restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        _check_same(f"The checkpoint {self.folder / str(step)}", kept, run)
        whole = self._arrays(step, state, axes, config)
        key = jax.random.wrap_key_data(jnp.array(kept["key"], jnp.uint32))
        numbers = everywhere(np.int32(kept["step"]), state.step.sharding), everywhere(key, state.step.sharding)
        return Restored(State(whole["weights"], whole["optimizer"], *numbers), kept)

    def close(self) -> None:
        """Waits until what is being written is there."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            with self._writing():
                opened.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says what an error in writing, which comes up only later, means for the run."""
        try:
            yield
        except (ValueError, OSError) as error:  # What the file system refuses is a ValueError of tensorstore.
            raise OSError(
                f"The checkpoint of step {self._saving} could not be written to {self.folder}; those before it are whole, and "
                f"the run can be resumed. {error}"
            ) from error

    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._list),
            )
            handlers = {name: ocp.StandardCheckpointHandler() for name in ("weights", "optimizer")}
            self._opened = ocp.CheckpointManager(
                self.folder.resolve(), options=options, item_handlers={**handlers, "run": ocp.JsonCheckpointHandler()}
            )
        return self._opened

    def _list(self) -> None:
        """Lists what has been written; orbax calls it before the folder takes its name."""
        if jax.process_index() == 0:
            (written,) = self.folder.glob(f"{self._saving}.orbax-checkpoint-tmp*")
            files = {str(file.relative_to(written)): _print(file) for file in _files(written)}
            (written / MANIFEST).write_text(json.dumps(files), encoding="utf-8")

    def _newest_whole(self) -> int | None:
        damaged = {}
        for step in self.steps():
            try:
                check(self.folder / str(step))
            except DamagedError as error:
                damaged[step] = str(error)
                continue
            self._take_away(damaged, step)
            return step
        if damaged:
            raise DamagedError(
                f"None of the checkpoints in {self.folder} is whole: {' '.join(damaged.values())} "
                "Bring one back, or begin in another folder."
            )
        return None

    def _take_away(self, damaged: Mapping[int, str], step: int) -> None:
        for number, why in damaged.items():
            _log.warning("%s It is taken away, and step %d is used.", why, step)
            if jax.process_index() == 0:
                shutil.rmtree(self.folder / str(number))
        if damaged and jax.process_count() > 1:
            multihost_utils.sync_global_devices("damaged checkpoints are gone")

    def _arrays(self, step: int, state: State, axes: State, config: Config) -> dict[str, Any]:
        manager, trees, letters = self._manager(), _trees(state), _trees(axes)
        stored = manager.item_metadata(step)
        asked = {name: _asked(_named(tree), dict(stored[name].tree)) for name, tree in trees.items()}
        composite = ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in asked.items()})
        found, placement = manager.restore(step, args=composite), state.params.get("placement")

        def placed(path, leaf, axes, got):
            return got if isinstance(got, jax.Array) else _anew(got, axes, config, placement, leaf)

        return {
            name: jax.tree_util.tree_map_with_path(
                lambda path, leaf, axes, name=name: placed(path, leaf, axes, found[name][_name(path)]), tree, letters[name]
            )
            for name, tree in trees.items()
        }


def check(folder: Path) -> None:
    """Compares a checkpoint with its list.

    Raises:
        DamagedError: a file is missing, cut short or changed; it names the first.
    """
    try:
        listed = {name: (int(size), int(checksum)) for name, (size, checksum) in _object(folder / MANIFEST).items()}
        step = _object(folder / "run" / "metadata")["step"]
        _object(folder / "_CHECKPOINT_METADATA")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"The checkpoint {folder} is damaged: {error}.") from error
    if str(step) != folder.name:
        raise DamagedError(f"The checkpoint {folder} is damaged: it is of step {step}.")
    found = {str(file.relative_to(folder)) for file in _files(folder)} - {MANIFEST}
    if others := sorted(found ^ listed.keys()):
        raise DamagedError(f"The checkpoint {folder} is damaged: {others[0]} is missing, or was not written with it.")
    for name, (size, checksum) in listed.items():
        file = folder / name
        if file.stat().st_size != size:
            raise DamagedError(f"The checkpoint {folder} is damaged: {name} has {file.stat().st_size} of {size} bytes.")
        if _print(file)[1] != checksum:
            raise DamagedError(f"The checkpoint {folder} is damaged: {name} is not what was written.")


def _object(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} holds no object")
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and str(file.relative_to(folder)) not in _LATE)


def _print(file: Path) -> list[int]:
    """Returns size and checksum."""
    size = checksum = 0
    with file.open("rb") as opened:
        while piece := opened.read(2**22):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return [size, checksum]


def _trees(state: State) -> dict[str, Any]:
    return {"weights": state.params, "optimizer": state.optimizer}


def _named(tree: Any) -> dict[str, Any]:
    """Returns the leaves by name; what says how they lie is no leaf."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _asked(wanted: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """Says how each array is to be read: onto its devices where it has their shape, else whole and to the host."""
    if differing := sorted(wanted.keys() ^ stored.keys()):
        raise ValueError(f"The checkpoint and the run do not hold the same arrays: {', '.join(differing[:5])}.")
    asked = {}
    for name, leaf in wanted.items():
        have = stored[name]
        if np.dtype(have.dtype) != leaf.dtype:
            raise ValueError(f"{name} is {have.dtype} in the checkpoint and {leaf.dtype} in the run; it is not converted.")
        if tuple(have.shape) == leaf.shape:
            asked[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        else:
            asked[name] = np.broadcast_to(np.zeros((), leaf.dtype), have.shape)
    return asked


def _anew(whole: np.ndarray, axes: str, config: Config, placement: Placement | None, like: Any) -> Any:
    """Places an array that was padded for another mesh."""
    sizes = axis_sizes(config)
    own = whole[tuple(slice(sizes[axis]) for axis in axes.split())]
    placed = jax.device_put(own, like.sharding) if placement is None else placement.put(own, axes)
    if placed.shape != like.shape:
        raise ValueError(f"An array of the checkpoint has the shape {whole.shape}, from which {like.shape} was to come.")
    return placed


def _check_same(who: str, kept: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    for name, value in json.loads(json.dumps(run)).items():
        have = kept.get(name)
        if isinstance(value, dict) and isinstance(have, dict):
            _check_same(who, have, value)
        elif have != value:
            raise ValueError(
                f"{who} was made with {name} = {have!r}, and this run has {value!r}; go on with the same, or begin in "
                "another folder."
            )


class Log:
    """A line of JSON for each step."""

    def __init__(self, file: Path, step: int):
        """Opens a log for what comes after a step; lines of later steps and broken ones go."""
        lines = [line for line in _lines(file) if _step_of(line) <= step]
        temporary = file.with_name(f".{file.name}")
        temporary.write_text("".join(lines), encoding="utf-8")
        os.replace(temporary, file)
        self._opened = file.open("a", encoding="utf-8")

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the file."""
        self._opened.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line, at once."""
        self._opened.write(json.dumps(line) + "\n")
        self._opened.flush()


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if file.is_file() else []


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
