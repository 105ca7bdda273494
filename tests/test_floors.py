"""Imports go down from floor to floor and never sideways between wings, and `import gqa_jax` brings little along."""

import ast
import json
import pathlib
import subprocess
import sys

import pytest

import gqa_jax

HOUSE = pathlib.Path(gqa_jax.__file__).parent
ROOF = {"__init__", "__main__", "checkpoint", "commands", "export"}
DECODER = {"config", "attention", "rope", "sharding", "cache", "layer"}
REQUEST = DECODER | {"decoder", "sampling", "loop"}
STEP = DECODER | {"decoder", "data", "loss", "recipe"}
MAY_IMPORT = {
    "config": set(),
    "attention": set(),
    "rope": {"config"},
    "sampling": set(),
    "sharding": {"config"},
    "heads": {"config"},
    "cache": {"config", "attention", "sharding"},
    "layer": DECODER - {"layer"},
    "decoder": DECODER,
    "loop": DECODER | {"decoder", "sampling"},
    "request": REQUEST,
    "generate": REQUEST | {"request"},
    "modules": DECODER | {"decoder"},
    "linen": DECODER | {"decoder", "modules"},
    "nnx": REQUEST | {"request", "modules"},
    "calibrate": REQUEST | {"request"},
    "convert": REQUEST | {"request", "calibrate", "heads"},
    "devices": set(),
    "planner": DECODER | {"decoder", "devices"},
    "distributed": set(),
    "recipe": set(),
    "data": set(),
    "loss": DECODER | {"decoder"},
    "step": STEP,
    "resume": STEP | {"step"},
    "train": STEP | REQUEST | {"step", "resume", "request"},
    "formats": set(),
    "families": {"config", "formats", "rope"},
    "tokenizer": set(),
    "download": set(),
}
HEAVY = {"einops", "flax", "gguf", "grain", "huggingface_hub", "jinja2", "optax", "orbax", "rich", "safetensors"}
HEAVY |= {"tokenizers", "torch"}


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(HOUSE).with_suffix("").parts[0]


def imported_rooms(source: str, package: str = "gqa_jax") -> set[str]:
    """The rooms that a file of `package` imports, wherever in the file; `__init__` for names that are no room's own."""
    rooms = {path.stem for path in HOUSE.iterdir() if not path.stem.startswith(".")}
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            modules = [f"{module}.{name.name}" for name in node.names]
        else:
            continue
        for module in modules:
            first, *rest = module.split(".")
            if first == "gqa_jax":
                found.add(rest[0] if rest and rest[0] in rooms else "__init__")
    return found


def trespasses(room: str, source: str, package: str = "gqa_jax") -> set[str]:
    """What a room imports although it may not."""
    return set() if room in ROOF else imported_rooms(source, package) - MAY_IMPORT[room] - {room}


FILES = sorted(HOUSE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(HOUSE)) for path in FILES])
def test_imports_go_down(path):
    package = ".".join(("gqa_jax", *path.relative_to(HOUSE).parent.parts))
    assert room_of(path) in ROOF | MAY_IMPORT.keys(), "The room stands in no table; give it its floor."
    assert trespasses(room_of(path), path.read_text("utf-8"), package) == set()


def test_no_room_of_the_table_is_below_itself():
    for room, below in MAY_IMPORT.items():
        assert below <= MAY_IMPORT.keys()
        for lower in below:
            assert room not in MAY_IMPORT[lower]
            assert MAY_IMPORT[lower] <= below


@pytest.mark.parametrize(
    ("room", "source", "found"),
    [
        ("cache", "from gqa_jax.decoder import forward", {"decoder"}),
        ("cache", "from gqa_jax import rope, config", {"rope"}),
        ("cache", "import gqa_jax.generate as g", {"generate"}),
        ("cache", "def late():\n    from gqa_jax.loop import decode", {"loop"}),
        ("cache", "from .decoder import forward", {"decoder"}),
        ("cache", "from . import decoder, config", {"decoder"}),
        ("config", "import gqa_jax", {"__init__"}),
        ("tokenizer", "from gqa_jax import Config", {"__init__"}),
        ("tokenizer", "from gqa_jax.families import family_of", {"families"}),
        ("sampling", "if True:\n    import gqa_jax.config", {"config"}),
        ("cache", "import numpy, jax\nfrom gqa_jax.config import Config", set()),
        ("families", "from gqa_jax.families.llama import BLOCK\nfrom gqa_jax.formats import Archive", set()),
        ("checkpoint", "from gqa_jax import decoder, download", set()),
    ],
)
def test_an_import_that_goes_up_or_sideways_is_found(room, source, found):
    assert trespasses(room, source) == found


def test_a_relative_import_inside_a_wing_is_found():
    assert trespasses("families", "from ..decoder import forward", "gqa_jax.families") == {"decoder"}
    assert trespasses("families", "from .llama import BLOCK", "gqa_jax.families") == set()


LOOK = """
import json, sys
import gqa_jax
gqa_jax.Config, gqa_jax.forward, gqa_jax.__all__
loaded = sorted({name.split(".")[0] for name in sys.modules})
import jax
try:
    jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend is there
    untouched = jax.device_count() == 3
except RuntimeError:
    untouched = False
print(json.dumps([loaded, untouched]))
"""


def test_importing_the_package_brings_jax_alone_and_touches_no_device():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOOK],
        cwd=HOUSE.parent,
        env={"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert len(lines) == 1, "Importing prints something."
    loaded, untouched = json.loads(lines[0])
    assert "jax" in loaded
    assert set(loaded) & HEAVY == set()
    assert untouched


def test_importing_works_in_an_empty_environment():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import gqa_jax"],
        cwd=HOUSE.parent,
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
