"""A run that is stopped at any moment goes on as if nothing had been; what is damaged or of another run is refused."""

import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gqa_jax
from gqa_jax import data, resume, train
from gqa_jax.config import Attention, Config
from gqa_jax.recipe import Recipe
from gqa_jax.step import State, start, state_axes
from tests import test_distributed

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = Config(
    vocab_size=13,
    num_layers=1,
    model_dim=10,
    mlp_dim=7,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    context_length=64,
    attention=(Attention(sinks=True),),
    out_bias=True,
)
RECIPE = Recipe(steps=7, batch=4, length=8, learning_rate=0.02, warmup=1, save_every=2, keep=2)
TEXTS = data.texts_of([np.random.default_rng(size).integers(0, 13, size) for size in range(2, 15)])


def model(mesh=None) -> gqa_jax.Model:
    return gqa_jax.Model(CONFIG, gqa_jax.init_params(CONFIG, jax.random.key(1), mesh=mesh))


def mesh_of(name: str | None):
    sizes = {"tp 2": (2, 1), "tp 2, data 2": (2, 2), "tp 4, data 2": (4, 2)}
    return name and gqa_jax.make_mesh(CONFIG, tp=sizes[name][0], data=sizes[name][1])


@functools.cache
def whole(mesh: str | None = None) -> train.Trained:
    return train.train(model(mesh_of(mesh)), TEXTS, RECIPE)


class StoppedError(Exception):
    """Raised in the middle of a run."""


def stopped_after(step: int, folder, mesh: str | None = None, recipe: Recipe = RECIPE) -> None:
    def report(now):
        if now.step == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train.train(model(mesh_of(mesh)), TEXTS, recipe, folder, resume=True, report=report)


def go_on(folder, mesh: str | None = None, recipe: Recipe = RECIPE, texts: data.Texts = TEXTS) -> train.Trained:
    return train.train(model(mesh_of(mesh)), texts, recipe, folder, resume=True)


def equal(got: gqa_jax.Model, want: gqa_jax.Model) -> None:
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)


def close(got, want) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1e-4, atol=1e-4)


def saved(folder) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def logged(folder) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines())}


@pytest.mark.parametrize("mesh", [None, "tp 4, data 2"])
def test_a_run_that_is_stopped_again_and_again_has_the_losses_and_weights_of_one_that_is_not(tmp_path, mesh):
    for step in (1, 3, 6):
        stopped_after(step, tmp_path, mesh)
    found = go_on(tmp_path, mesh)
    assert found.begun == 6
    assert list(logged(tmp_path).items()) == list(enumerate(whole(mesh).losses.tolist(), 1))
    equal(found.model, whole(mesh).model)


@pytest.mark.parametrize(("first", "then"), [(None, "tp 2"), ("tp 2", "tp 4, data 2"), ("tp 4, data 2", None)])
def test_a_run_goes_on_on_another_mesh_though_heads_are_padded_otherwise(tmp_path, first, then):
    stopped_after(5, tmp_path, first)
    found = go_on(tmp_path, then)
    assert (found.begun, found.model.placement) == (4, mesh_of(then))
    close(found.losses, whole().losses[4:])
    got, want = (gqa_jax.gather(one.params, CONFIG) for one in (found.model, whole().model))
    jax.tree.map(close, got, want)
    if then is not None:
        query = np.asarray(found.model.params["layers"][0]["attention.q"])
        assert query.shape[1] == 4
        assert not query[:, 3].any()


def test_everything_is_restored_to_where_it_is_wanted(tmp_path):
    stopped_after(4, tmp_path)
    state = start(model(mesh_of("tp 2")).params, RECIPE)
    with resume.Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        found = checkpoints.restore(state, state_axes(state, CONFIG, RECIPE), CONFIG, {}).state
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
    assert int(found.step) == 4
    assert found.key == jax.random.key(0)


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    train.train(model(), TEXTS, RECIPE, tmp_path)
    again = go_on(tmp_path)
    assert (again.begun, again.losses.size) == (7, 0)
    equal(again.model, whole().model)


def test_the_newest_are_kept_and_the_last_step_too(tmp_path):
    train.train(model(), TEXTS, RECIPE, tmp_path)
    assert saved(tmp_path) == [6, 7]


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "commit_success.txt"]


def cut(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: pathlib.Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damage_to_any_file_is_found(tmp_path):
    stopped_after(2, tmp_path)
    folder = tmp_path / "checkpoints" / "2"
    resume.check(folder)
    files = files_of(folder)
    assert len(files) > 10
    for file in files:
        content = file.read_bytes()
        # This one orbax writes last, so that it is not in the list; it must be JSON.
        for damage in (pathlib.Path.unlink, cut, *([] if file.name == "_CHECKPOINT_METADATA" else [flip])):
            damage(file)
            with pytest.raises(train.DamagedError, match=f"{folder} is damaged"):
                resume.check(folder)
            file.write_bytes(content)
    resume.check(folder)


@pytest.mark.parametrize("damage", [cut, flip, pathlib.Path.unlink])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(tmp_path, caplog, damage):
    stopped_after(5, tmp_path)
    assert saved(tmp_path) == [2, 4]
    damage(max(files_of(tmp_path / "checkpoints" / "4" / "optimizer"), key=lambda file: file.stat().st_size))
    found = go_on(tmp_path)
    assert found.begun == 2
    assert "checkpoints/4 is damaged: optimizer/" in caplog.text
    assert "It is taken away, and step 2 is used." in caplog.text
    np.testing.assert_array_equal(found.losses, whole().losses[2:])
    assert saved(tmp_path) == [6, 7]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("manifest.json", "[]"),
        ("manifest.json", "{}"),
        ("manifest.json", '{"run/metadata": 5}'),
        ("_CHECKPOINT_METADATA", "[]"),
        ("run/metadata", "{}"),
    ],
)
def test_a_list_that_is_no_list_of_its_files_is_damage(tmp_path, file, content):
    stopped_after(2, tmp_path)
    (tmp_path / "checkpoints" / "2" / file).write_text(content)
    with pytest.raises(train.DamagedError, match="is damaged"):
        resume.check(tmp_path / "checkpoints" / "2")


def test_a_checkpoint_under_another_name_is_damaged_and_what_is_no_folder_is_none(tmp_path):
    stopped_after(5, tmp_path)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "2", folder / "6")
    (folder / "9").write_text("no checkpoint")
    (folder / "0004").mkdir()
    found = go_on(tmp_path)
    assert found.begun == 4
    np.testing.assert_array_equal(found.losses, whole().losses[4:])


def test_a_folder_in_which_a_run_is_at_work_is_refused(tmp_path):
    with train._Folder(tmp_path, CONFIG, RECIPE, TEXTS), pytest.raises(ValueError, match="Another run is at work in"):
        go_on(tmp_path)


def test_what_cannot_be_written_is_an_error_of_the_file_system_that_says_what_is_whole(tmp_path, monkeypatch):
    stopped_after(2, tmp_path)

    def full(*args, **how):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    monkeypatch.setattr(resume.ocp.CheckpointManager, "save", full)
    with pytest.raises(OSError, match=r"step 4 could not be written to .*; those before it are whole, .*No space left"):
        go_on(tmp_path)
    assert saved(tmp_path) == [2]


def test_what_is_left_of_one_that_was_being_removed_is_in_nobodys_way(tmp_path):
    stopped_after(5, tmp_path)
    for file in files_of(tmp_path / "checkpoints" / "2")[::2]:
        file.unlink()
    (tmp_path / "checkpoints" / "1").mkdir()
    found = go_on(tmp_path)
    assert found.begun == 4
    np.testing.assert_array_equal(found.losses, whole().losses[4:])


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew_or_taken_away(tmp_path):
    stopped_after(5, tmp_path)
    for step in (2, 4):
        (tmp_path / "checkpoints" / str(step) / "manifest.json").unlink()
    with pytest.raises(train.DamagedError, match=r"None of the checkpoints in .* is whole: .*Bring one back"):
        go_on(tmp_path)
    assert saved(tmp_path) == [2, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.03}, "was made with learning_rate = 0.02, and this run has 0.03"),
        ({"steps": 9}, "was made with steps = 7, and this run has 9"),
        ({"betas": (0.9, 0.99)}, r"was made with betas = \[0.9, 0.95\], and this run has \[0.9, 0.99\]"),
    ],
)
def test_another_recipe_is_refused_with_both_numbers(tmp_path, change, message):
    stopped_after(3, tmp_path)
    with pytest.raises(ValueError, match=message):
        go_on(tmp_path, recipe=dataclasses.replace(RECIPE, **change))


def test_other_texts_another_config_and_a_folder_in_use_are_refused(tmp_path):
    stopped_after(3, tmp_path)
    with pytest.raises(ValueError, match="was made with texts = 13, and this run has 1; go on with the same"):
        go_on(tmp_path, texts=data.texts_of([[1, 2, 3]]))
    other = model()._replace(config=dataclasses.replace(CONFIG, norm_eps=1e-3))
    with pytest.raises(ValueError, match=r"was made with norm_eps = 1e-05, and this run has 0\.001"):
        train.train(other, TEXTS, RECIPE, tmp_path, resume=True)
    with pytest.raises(ValueError, match="holds a run up to step 2; resume it, or begin in another folder"):
        train.train(model(), TEXTS, RECIPE, tmp_path)


def test_how_often_and_how_many_are_saved_may_change(tmp_path):
    stopped_after(3, tmp_path)
    go_on(tmp_path, recipe=dataclasses.replace(RECIPE, save_every=1, keep=3))
    assert saved(tmp_path) == [5, 6, 7]


@pytest.mark.parametrize(
    ("stored", "wanted"), [(jnp.int32, jnp.float32), (jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)]
)
def test_another_dtype_is_an_error_and_never_converted(tmp_path, stored, wanted):
    def state(dtype):
        number = jax.device_put(jnp.full(10, 16777217, dtype), jax.devices()[0])
        return State({"norm": number}, {"count": jnp.int32(3)}, jnp.int32(1), jax.random.key(0))

    letters = State({"norm": "D"}, {"count": ""}, "", "")
    with resume.Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(state(stored), {})
    with resume.Checkpoints(tmp_path, 1) as checkpoints:
        same = checkpoints.restore(state(stored), letters, CONFIG, {}).state
        assert same.params["norm"].tolist() == state(stored).params["norm"].tolist()
        names = f"norm is {jnp.dtype(stored)} in the checkpoint and {jnp.dtype(wanted)} in the run"
        with pytest.raises(ValueError, match=names):
            checkpoints.restore(state(wanted), letters, CONFIG, {})
        more = dataclasses.replace(state(stored), params={"norm": state(stored).params["norm"], "head": jnp.zeros((13, 10))})
        with pytest.raises(ValueError, match="do not hold the same arrays: head"):
            checkpoints.restore(more, letters, CONFIG, {})


def test_a_log_loses_what_comes_after_the_step_and_what_is_broken(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\nnot JSON\n{"step": 3}\n{"step": 4, "lo')
    with resume.Log(file, 2) as log:
        log.write({"step": 3, "loss": 0.5})
        assert file.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": 0.5}\n'


CHILD = """
import json, sys
import jax
from gqa_jax.distributed import join
from tests.test_resume import close, go_on, stopped_after

address, process, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
join(address, 2, process, 90)
stopped_after(5, folder, "tp 2, data 2")
found = go_on(folder, "tp 2, data 2")
print(json.dumps([found.begun, found.losses.tolist()]))
"""


@pytest.mark.slow
def test_two_processes_train_as_one_and_go_on_together(tmp_path):
    address = test_distributed.free_address()
    children = [test_distributed.start("-c", CHILD, address, str(process), str(tmp_path)) for process in range(2)]
    for code, out, err in test_distributed.end(children):
        assert code == 0, err
        begun, losses = json.loads(out.splitlines()[-1])
        assert begun == 4
        close(losses, whole().losses[4:])
    assert list(logged(tmp_path)) == list(range(1, 8))
    close(list(logged(tmp_path).values()), whole().losses)


KILLED = """
import os, signal, sys
import jax
jax.config.update("jax_disable_most_optimizations", True)
import numpy as np
import gqa_jax
from gqa_jax import data, resume, train
config = gqa_jax.Config(vocab_size=13, num_layers=1, model_dim=10, mlp_dim=7, num_heads=6, num_kv_heads=3, head_dim=4,
                        context_length=64)
model = gqa_jax.Model(config, gqa_jax.init_params(config, jax.random.key(1)))
texts = data.texts_of([np.random.default_rng(size).integers(0, 13, size) for size in range(2, 15)])
folder, dies_at = sys.argv[1], int(sys.argv[2])
listed = resume.Checkpoints._list
def half_written(self):
    if self._saving == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    listed(self)
resume.Checkpoints._list = half_written
train.train(model, texts, train.Recipe(steps=90, batch=4, length=8, save_every=3), folder, resume=True,
            report=lambda now: print(now.step, flush=True))
"""


def begin(folder, dies_at: int = 0) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", KILLED, str(folder), str(dies_at)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parents[1],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.slow
def test_killed_at_five_moments_one_of_them_inside_a_save_a_run_ends_as_if_it_had_never_been(tmp_path):
    undisturbed = begin(tmp_path / "whole")
    chance = random.Random(time.time_ns())
    moments = sorted(chance.sample(range(1, 85), 4))
    for moment in [*moments, None]:
        run = begin(tmp_path / "killed", dies_at=87 if moment is None else 0)
        for line in run.stdout:
            if moment is not None and int(line) >= moment:
                time.sleep(chance.random() / 50)
                run.kill()
                break
        run.communicate()
        assert run.returncode == -signal.SIGKILL, moments
    assert list((tmp_path / "killed" / "checkpoints").glob("87.orbax-checkpoint-tmp*"))
    last = begin(tmp_path / "killed")
    for run in (last, undisturbed):
        _, err = run.communicate()
        assert (run.returncode, err) == (0, "")
    assert list(logged(tmp_path / "killed").items()) == list(logged(tmp_path / "whole").items()), moments
    assert len(logged(tmp_path / "whole")) == 90
    checkpoints = {name: tmp_path / name / "checkpoints" for name in ("killed", "whole")}
    assert saved(tmp_path / "killed") == saved(tmp_path / "whole") == [84, 87, 90]
    like = start(model_of_the_killed().params, Recipe())
    axes = state_axes(like, model_of_the_killed().config, Recipe())
    states = []
    for folder in checkpoints.values():
        with resume.Checkpoints(folder, 3) as kept:
            states.append(kept.restore(like, axes, model_of_the_killed().config, {}).state)
    jax.tree.map(np.testing.assert_array_equal, *(dataclasses.replace(state, key=state.step) for state in states))


@functools.cache
def model_of_the_killed() -> gqa_jax.Model:
    config = dataclasses.replace(CONFIG, attention=(Attention(),), out_bias=False)
    return gqa_jax.Model(config, gqa_jax.init_params(config, jax.random.key(1)))
