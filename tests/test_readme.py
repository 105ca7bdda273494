"""README says what is so: its examples run, its commands parse, and its tree is the tree."""

import pathlib
import re
import shlex

import jax

import gqa_jax
from benchmarks.readme import SECTIONS
from gqa_jax.__main__ import _parser

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def placed(model, mesh):
    """The model as `load` would have put it on a mesh."""
    if mesh is None:
        return model
    where = mesh(model.config) if callable(mesh) else mesh
    return model._replace(params=gqa_jax.place(model.params, model.config, where))


def test_the_python_examples_run(monkeypatch, tmp_path, quick_compilation, shallow):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gqa_jax, "load", lambda name, mesh=None: placed(shallow, mesh), raising=False)
    examples = blocks("python")
    assert len(examples) >= 3
    with jax.numpy_dtype_promotion("standard"):  # As users have it.
        for example in examples:
            exec(compile(example, "README.md", "exec"), {})


def test_the_commands_parse():
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("gqa-jax ")]
    assert len(lines) >= 5
    for line in lines:
        _parser().parse_args(shlex.split(line, comments=True)[1:])


def test_both_set_up_commands_are_marked_and_one_line_each():
    for job in ("run", "test"):
        command = re.search(rf"<!-- newcomer: {job} -->\n\n?```sh\n(.*?)```", README, flags=re.DOTALL)
        assert command is not None
        assert command[1].count("\n") == 1


def test_the_tree_names_every_room():
    named = set(re.findall(r"^  (\w+(?:\.py|/)) ", README, flags=re.MULTILINE))
    package = ROOT / "gqa_jax"
    rooms = {path.name if path.is_file() else f"{path.name}/" for path in package.iterdir() if "__pycache__" not in path.name}
    assert named == rooms - {"__init__.py", "py.typed"}


def test_the_figures_are_those_of_the_committed_results():
    for section in SECTIONS.values():
        assert section() in README
