import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# The Triton kernels run on CPU tensors this way; it must be said before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.fixture
def peak_bytes():
    """How much more memory a call holds at its peak than was held before it, as Linux counts it."""

    def measure(call: Callable[[], object]) -> int:
        ctypes.CDLL(None).malloc_trim(
            0
        )  # what was freed is given back, so that nothing hides in it
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is held now
        call()
        return resident("VmHWM") - before

    return measure
