"""What every test runs under: eight CPU devices, strict dtype promotion, and the real models where a test asks for one."""

import dataclasses
import pathlib

import jax
import jaxtyping
import pytest

# Made to be run by hand, where torch is installed.
collect_ignore = ["golden/record.py"]

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module", autouse=True)
def programs_of_this_file():
    """Lets go of the programs of each file: a process that keeps thousands of them runs out of memory maps."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compilation():
    """Programs that run once are compiled fast rather than well."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def unchecked():
    """Turns the tests' own shape checks off, so that a test meets the errors that a user meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched at first use."""
    from gqa_jax import download

    return download.fetch("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> pathlib.Path:
    """The GGUF file of Gemma 3 270M, fetched at first use."""
    from gqa_jax import download

    return download.fetch("gemma3-270m")


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """SmolLM2-135M-Instruct in float32."""
    from gqa_jax.checkpoint import load

    return load(smollm2_path)


@pytest.fixture(scope="session")
def shallow(smollm2):
    """The first layers of SmolLM2: enough to run, and quicker to compile."""
    config = dataclasses.replace(smollm2.config, num_layers=2)
    return smollm2._replace(config=config, params=smollm2.params | {"layers": smollm2.params["layers"][:2]})


@pytest.fixture(scope="session")
def gemma3(gemma3_path):
    """Gemma 3 270M in float32."""
    from gqa_jax.checkpoint import load

    return load(gemma3_path)
