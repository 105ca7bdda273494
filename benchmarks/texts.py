"""Plain English text for studies: the sources of Python's documentation, from Debian, or files of your own."""

import os
import re
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import platformdirs

PACKAGE = "python3-doc"
HELD_OUT = 0.05


class Text(NamedTuple):
    """Whole documents to learn from, others that are held out, and where they come from."""

    source: str
    train: list[str]
    held: list[str]


def read(files: Sequence[str] = ()) -> Text:
    """Returns the text of files, each a document, or of the Debian package where there are none.

    The documents are ordered by a checksum of their names, so that chapters of one kind do not stand together; the last
    5 % of the characters, in whole documents, are held out.
    """
    if files:
        named, source = {str(file): Path(file) for file in files}, f"{len(files)} files of --text"
    else:
        folder = _fetch()
        named = {str(file.relative_to(folder)): file for file in folder.rglob("*.rst.txt")}
        source = f"{folder.name}, {len(named)} files .rst.txt"
    order = sorted(named, key=lambda name: (zlib.crc32(name.encode()), name))
    documents = [text for text in (named[name].read_text(encoding="utf-8") for name in order) if text]
    if len(documents) < 2:
        raise SystemExit("The text needs two documents at least, so that one can be held out; give more files to --text.")
    left, first = HELD_OUT * sum(map(len, documents)), len(documents)
    while left > 0 and first > 1:
        first -= 1
        left -= len(documents[first])
    return Text(source, documents[:first], documents[first:])


def _fetch() -> Path:
    """Returns the folder of the unpacked package, which is named after its version."""
    chosen = os.environ.get("GQA_JAX_CACHE")
    folder = (Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("gqa_jax", appauthor=False)) / "texts"
    if found := sorted(folder.glob("python3*-doc_*")):
        return found[-1]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        package = re.search(r"python3\.\d+-doc", _run("apt-cache", "depends", PACKAGE))
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            _run("apt-get", "download", package[0] if package else PACKAGE, cwd=temporary)
            archive = next(Path(temporary).glob("*.deb"))
            _run("dpkg-deb", "-x", str(archive), f"{temporary}/unpacked")
            return Path(temporary, "unpacked").rename(folder / archive.stem.removesuffix("_all"))
    except (OSError, StopIteration, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"Debian's {PACKAGE} could not be fetched ({error}). It takes apt-get, dpkg-deb and their package lists; anywhere "
            "else give texts of your own: --text FILE..."
        ) from error


def _run(*command: str, cwd: str | None = None) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout
