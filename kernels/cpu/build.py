"""Compiles the C++ kernels into one shared library, once for each version of sources and flags.

    <cache>/kernels/<digest>/kernels.so

Whoever has none and no compiler either can be given one beforehand (an image's build does). Several processes may ask
at once: one builds, the others wait for it; a library appears whole or not at all.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
SOURCE_NAMES = (
    "kernels.h",
    "attention_body.h",
    "attention_body.cpp",
    "attention.cpp",
    "slots.cpp",
    "checksum.cpp",
    "streams.cpp",
)
LIBRARY_NAME = "kernels.so"
COMPILERS = ("g++", "c++", "clang++")
BUILD_TIMEOUT_S = 300.0
ERROR_CHARS_MAX = 2000

COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
VARIANTS: dict[str, tuple[str, ...]] = {"portable": ("-DLANES=4",)}
if platform.machine() in ("x86_64", "AMD64"):
    VARIANTS["avx2"] = ("-DLANES=8", "-mavx2", "-mfma")
    VARIANTS["avx512"] = (
        *("-DLANES=16", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"),
        "-mprefer-vector-width=512",
    )


class KernelUnavailable(Exception):
    """The kernels can't be had on this machine; the message says why."""


def cache_folder() -> Path:
    """Where compiled libraries are kept: under `$MESHIFT_CACHE`, or `~/.cache/meshift`."""
    return Path(os.environ.get("MESHIFT_CACHE") or Path.home() / ".cache" / "meshift") / "kernels"


def ensure_library(cache: Path | None = None) -> Path:
    """The library's path; compiles it (seconds) if there is none yet. Raises KernelUnavailable."""
    path = (cache or cache_folder()) / _digest() / LIBRARY_NAME
    if path.exists():
        return path
    compiler = find_compiler()
    if compiler is None:
        raise KernelUnavailable("no C++ compiler (install g++, or set CXX)")
    try:
        return _build_locked(compiler, path)
    except OSError as error:
        raise KernelUnavailable(f"the kernels can't be kept in {path.parent}: {error}") from error


def find_compiler() -> str | None:
    """`$CXX`, or the first of the usual names that is installed."""
    for name in (os.environ.get("CXX"), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def _digest() -> str:
    digest = hashlib.sha256(repr((platform.machine(), COMMON_FLAGS, VARIANTS)).encode())
    for name in SOURCE_NAMES:
        digest.update((SOURCE_FOLDER / name).read_bytes())
    return digest.hexdigest()[:16]


def _build_locked(compiler: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        # The kernel gives the lock back when its holder dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as work:
                os.replace(_compile(compiler, Path(work)), path)
    return path


def _compile(compiler: str, work: Path) -> Path:
    flags = [*COMMON_FLAGS, f"-I{SOURCE_FOLDER}"]
    jobs = [(f"attention_{name}.o", "attention_body.cpp", (f"-DVARIANT={name}", *VARIANTS[name])) for name in VARIANTS]
    variants = ("-DHAS_X86_VARIANTS",) if len(VARIANTS) > 1 else ()
    jobs += [("attention.o", "attention.cpp", ("-fopenmp", *variants)), ("slots.o", "slots.cpp", ("-fopenmp",))]
    jobs += [("checksum.o", "checksum.cpp", ()), ("streams.o", "streams.cpp", ())]
    for target, source, extra in jobs:
        _run([compiler, *flags, *extra, "-c", str(SOURCE_FOLDER / source), "-o", str(work / target)])
    library = work / LIBRARY_NAME
    _run([compiler, "-shared", "-fopenmp", "-o", str(library), *(str(work / target) for target, _, _ in jobs)])
    return library


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise KernelUnavailable(f"{' '.join(command)} failed:\n{done.stderr[-ERROR_CHARS_MAX:]}")


if __name__ == "__main__":
    # For an image's build, where the compiler doesn't stay.
    print(ensure_library())
