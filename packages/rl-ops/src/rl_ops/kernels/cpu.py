"""The kernels of ``cpu.cpp``, compiled on first use and kept for later processes.

Without a compiler, or where the compilation fails, the callers fall back to
:mod:`rl_ops.kernels.eager` and one warning says so. ``RL_OPS_CPU_KERNELS=eager`` asks for that;
``RL_OPS_CACHE`` names the folder of the compiled file.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("rl_ops")

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-pthread", "-Wno-psabi")
# in this order, until the compiler takes one
TARGETS = (("-march=native",), ("-mcpu=native",), ())
COMPILE_SECONDS = 120
# the gradient at repeated indices is summed by a double loop over them
MOST_INDICES = 64

_lock = threading.Lock()
_loaded: list[ctypes.CDLL | None] = []


def supports(z: Tensor, indices: int = 0) -> bool:
    """Return whether the compiled kernels take this tensor, compiling them if it is the first."""
    fits = (
        z.device.type == "cpu"
        and z.dtype in (torch.float32, torch.bfloat16)
        and (z.stride(2) == 1 or z.shape[2] == 1)
        and indices <= MOST_INDICES
    )
    return fits and library() is not None


def row_stats(z: Tensor, *, scale: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`rl_ops.kernels.row_stats`."""
    maximum, sum_exp = (torch.empty(z.shape[:2], dtype=torch.float32) for _ in range(2))
    sum_exp_d = torch.empty(z.shape[:2] if entropy else (0,), dtype=torch.float32)
    _library().rl_ops_row_stats(
        z.data_ptr(),
        z.dtype == torch.bfloat16,
        _shape(z),
        scale,
        entropy,
        *(x.data_ptr() for x in (maximum, sum_exp, sum_exp_d)),
        torch.get_num_threads(),
    )
    return maximum, sum_exp, sum_exp_d


def logits_grad(
    z: Tensor,
    index: Tensor,
    stats: tuple[Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    *,
    entropy: Tensor | None,
    scale: float,
    out: Tensor,
) -> None:
    """See :func:`rl_ops.kernels.logits_grad`."""
    index = index.contiguous()
    floats = [None if x is None else x.float().contiguous() for x in (*stats, *grads, entropy)]
    _library().rl_ops_logits_grad(
        z.data_ptr(),
        z.dtype == torch.bfloat16,
        _shape(z),
        index.data_ptr(),
        index.shape[2],
        *(None if x is None else x.data_ptr() for x in floats),
        scale,
        out.data_ptr(),
        torch.get_num_threads(),
    )


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None; the first call compiles or loads them."""
    if not _loaded:
        with _lock:
            if not _loaded:
                _loaded.append(_build())
    return _loaded[0]


def _library() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise RuntimeError("the compiled CPU kernels are not there: ask supports() first")
    return found


def _build() -> ctypes.CDLL | None:
    choice = os.environ.get("RL_OPS_CPU_KERNELS", "compiled")
    if choice not in ("compiled", "eager"):
        raise ValueError(f'RL_OPS_CPU_KERNELS is {choice!r}: set it to "compiled" or "eager"')
    if choice == "eager":
        return None
    compiler = _compiler()
    if compiler is None:
        _say("no C++ compiler (c++, g++ or clang++, or the one that CXX names)")
        return None
    try:
        return _declare(_load(compiler, SOURCE.read_bytes()))
    except (OSError, subprocess.SubprocessError) as error:
        _say(f"{compiler} failed: {_reason(error)}")
        return None


def _load(compiler: str, source: bytes) -> ctypes.CDLL:
    """Load the library from the cache, building it where it is missing or broken."""
    name = f"cpu-{_key(compiler, source)}.so"
    folder = _cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="rl_ops-") as scratch:
            return _compile(compiler, Path(scratch) / name)
    path = folder / name
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink(missing_ok=True)
    return _compile(compiler, path)


def _compile(compiler: str, path: Path) -> ctypes.CDLL:
    """Compile to ``path``; other processes see the whole file or none."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
        built = Path(scratch) / path.name
        for attempt, target in enumerate(TARGETS):
            command = [compiler, *FLAGS, *target, str(SOURCE), "-o", str(built)]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
                break
            except subprocess.CalledProcessError:
                if attempt == len(TARGETS) - 1:
                    raise
        os.replace(built, path)
    return ctypes.CDLL(str(path))


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """State the argument types, so that pointers and floats arrive whole."""
    pointer, number, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    shape, count = ctypes.POINTER(ctypes.c_int64), ctypes.c_int64
    stats, grad = lib.rl_ops_row_stats, lib.rl_ops_logits_grad
    stats.argtypes = [pointer, number, shape, real, number, *[pointer] * 3, number]
    grad.argtypes = [
        *(pointer, number, shape, pointer, count),
        *[pointer] * 5,
        *(real, pointer, number),
    ]
    stats.restype = grad.restype = None
    return lib


def _shape(z: Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 5)(*z.shape, z.stride(0), z.stride(1))


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    candidates: Iterable[str] = (named,) if named else ("c++", "g++", "clang++")
    return next((path for name in candidates if (path := shutil.which(name))), None)


def _key(compiler: str, source: bytes) -> str:
    """Name a build by all it depends on: a home may be shared by unlike processors."""
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, timeout=COMPILE_SECONDS
    ).stdout
    parts = (source, repr((FLAGS, TARGETS)).encode(), version, _processor())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    """Return what the processor says it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n", 1)[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    told = (b"flags", b"Features", b"model name", b"CPU part")
    return b"\n".join(line for line in lines if line.startswith(told))


def _cache_folder() -> Path | None:
    """Return a folder that this user alone can write to, or None."""
    named = os.environ.get("RL_OPS_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    folder = Path(named) if named else Path(base) / "rl_ops"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        # code is loaded from here: nobody else may be able to put it there
        if status.st_mode & 0o022 or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
            return None
        return folder if os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):
        return None


def _reason(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    lines = stderr.decode(errors="replace").strip().splitlines() if stderr else []
    return lines[0] if lines else str(error)


def _say(reason: str) -> None:
    logger.warning(
        "rl_ops: %s; CPU log-probs use plain torch, which is slower and as exact "
        "(RL_OPS_CPU_KERNELS=eager silences this)",
        reason,
    )
