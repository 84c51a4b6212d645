"""Every backend of the row kernels against the same numbers in float64."""

from __future__ import annotations

import importlib.util
import logging
import math
import subprocess
import sys
import threading

import pytest
import torch

from closeness import assert_close
from rl_ops import kernels
from rl_ops.kernels import cpu, eager, memory

BACKENDS = {"eager": eager, "cpu": cpu}
if importlib.util.find_spec("triton"):  # there are systems without
    from rl_ops.kernels import triton as triton_kernels

    BACKENDS["triton"] = triton_kernels
needs = pytest.mark.parametrize("name", BACKENDS)


def made(dtype: torch.dtype, width: int) -> torch.Tensor:
    torch.manual_seed(width)
    z = (5 * torch.randn(2, 4, width)).to(dtype)
    if width > 7:
        z[0, 0, : width // 2] = -math.inf
        z[1, 1, 3:] = -math.inf
    return z[:, :3]  # rows that are not one run of memory


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Many blocks a row, as large vocabularies have."""
    if "triton" in BACKENDS:
        monkeypatch.setattr(triton_kernels, "BLOCK", 64)


@needs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 16, 100, 300])
@pytest.mark.parametrize("grads", ["logps", "entropy", "both"])
def test_backends_agree_with_float64(name, dtype, width, grads):
    if name == "cpu" and cpu.library() is None:
        name = "eager"
    backend, z = BACKENDS[name], made(dtype, width)
    index = torch.randint(0, width, (2, 3, 2))
    index[0, 0], index[0, 1, 0] = width - 1, -5
    g_logps = torch.randn(2, 3, 2) if grads != "entropy" else None
    g_entropy = torch.randn(2, 3) if grads != "logps" else None
    wanted = eager.row_stats(z.double(), scale=0.7, entropy=True)
    h = wanted[1].log() - wanted[2] / wanted[1]
    got = backend.row_stats(z, scale=0.7, entropy=True)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_close(mine, theirs, rtol=2e-6, atol=2e-6)
    without = backend.row_stats(z, scale=0.7, entropy=False)
    assert torch.equal(without[1], got[1])
    assert without[2].numel() == 0
    expected = torch.empty(2, 3, width, dtype=torch.float64)
    wide = tuple(None if g is None else g.double() for g in (g_logps, g_entropy))
    eager.logits_grad(z.double(), index, wanted[:2], wide, entropy=h, scale=0.7, out=expected)
    out = torch.empty(2, 3, width, dtype=dtype)
    given = (g_logps, g_entropy)
    backend.logits_grad(z, index, got[:2], given, entropy=h.float(), scale=0.7, out=out)
    # Triton's interpreter cuts bfloat16 off where hardware rounds
    rounding = {"triton": 2**-7}.get(name, 2**-8) if dtype == torch.bfloat16 else 1e-4
    assert_close(out, expected, rtol=rounding, atol=3e-6)


def test_the_reference_itself_is_the_derivative():
    """The float64 path that the others are held against, against autograd of the definition."""
    z = torch.randn(1, 3, 9, dtype=torch.float64, requires_grad=True)
    index, scale = torch.tensor([[[0, 8], [3, 3], [1, 2]]]), 0.7
    g_logps, g_entropy = torch.randn(1, 3, 2).double(), torch.randn(1, 3).double()
    logps = (z * scale).log_softmax(-1)
    h = -(logps.exp() * logps).sum(-1)
    total = (logps.gather(-1, index) * g_logps).sum() + (h * g_entropy).sum()
    (wanted,) = torch.autograd.grad(total, z)
    maximum, sum_exp, _ = eager.row_stats(z.detach(), scale=scale, entropy=True)
    out = torch.empty_like(z)
    grads = g_logps, g_entropy
    eager.logits_grad(z.detach(), index, (maximum, sum_exp), grads, entropy=h, scale=scale, out=out)
    assert_close(out, wanted, rtol=1e-10, atol=1e-12)


@needs
def test_gradient_may_be_written_over_the_logits(name):
    if name == "cpu" and cpu.library() is None:
        name = "eager"
    z, index = torch.randn(1, 3, 200), torch.tensor([[[0], [150], [199]]])
    stats = BACKENDS[name].row_stats(z, scale=1.0, entropy=False)
    apart, over = torch.empty_like(z), z.clone()
    for source, out in ((z, apart), (over, over)):
        BACKENDS[name].logits_grad(
            source, index, stats[:2], (torch.ones(1, 3, 1), None), entropy=None, scale=1.0, out=out
        )
    assert_close(over, apart)


@needs
def test_rows_without_gradient_are_not_read_and_nan_is_kept(name):
    if name == "cpu" and cpu.library() is None:
        name = "eager"
    z = torch.full((1, 2, 70), math.nan)
    stats = BACKENDS[name].row_stats(z, scale=1.0, entropy=True)
    assert stats[1].isnan().all()
    out = torch.empty_like(z)
    grads = torch.tensor([[[0.0], [1.0]]]), None
    index = torch.zeros(1, 2, 1, dtype=torch.long)
    BACKENDS[name].logits_grad(z, index, stats[:2], grads, entropy=None, scale=1.0, out=out)
    assert torch.equal(out[0, 0], torch.zeros(70))
    assert out[0, 1].isnan().any()


def test_threads_share_the_rows(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    z = torch.randn(7, 3, 40_000)
    got = kernels.row_stats(z, scale=1.0, entropy=True)
    wanted = eager.row_stats(z.double(), scale=1.0, entropy=True)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_close(mine, theirs, rtol=3e-6, atol=1e-5)


def test_a_large_result_is_an_ordinary_tensor():
    result = memory.empty((1100, 1024), torch.float32, torch.device("cpu"))
    result.fill_(1.0)
    assert result.is_contiguous()
    assert float(result.sum()) == 1100 * 1024


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """A process that has not compiled yet, with a cache of its own."""
    monkeypatch.setattr(cpu, "_loaded", [])
    monkeypatch.setenv("RL_OPS_CACHE", str(tmp_path))
    monkeypatch.delenv("RL_OPS_CPU_KERNELS", raising=False)
    return tmp_path


def test_without_a_compiler_plain_torch_is_used_and_one_line_says_so(unbuilt, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    z = torch.randn(1, 2, 30)
    with caplog.at_level(logging.WARNING, logger="rl_ops"):
        for _ in range(3):
            stats = kernels.row_stats(z, scale=1.0, entropy=False)
    assert_close(stats.sum_exp, (z - z.amax(-1, keepdim=True)).exp().sum(-1))
    assert len(caplog.messages) == 1
    assert "no C++ compiler" in caplog.messages[0]


def test_a_compiler_that_fails_is_survived(unbuilt, monkeypatch, caplog):
    broken = unbuilt / "c++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'error: no' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING, logger="rl_ops"):
        assert cpu.library() is None
    assert caplog.messages[0].count("error: no") == 1


def test_plain_torch_can_be_asked_for(unbuilt, monkeypatch, caplog):
    monkeypatch.setenv("RL_OPS_CPU_KERNELS", "eager")
    assert cpu.library() is None
    assert not caplog.messages
    monkeypatch.setattr(cpu, "_loaded", [])
    monkeypatch.setenv("RL_OPS_CPU_KERNELS", "fast")
    with pytest.raises(ValueError, match='set it to "compiled" or "eager"'):
        cpu.library()


def test_a_build_is_kept_reused_and_replaced_when_broken(unbuilt, monkeypatch):
    compiler = cpu._compiler()
    if compiler is None:  # then there is nothing to keep
        assert cpu.library() is None
        return
    broken = unbuilt / f"cpu-{cpu._key(compiler, cpu.SOURCE.read_bytes())}.so"
    broken.write_bytes(b"cut short")
    assert cpu.library() is not None
    (built,) = unbuilt.glob("*.so")
    assert built == broken
    assert built.stat().st_size > 1000
    monkeypatch.setattr(cpu, "_loaded", [])
    monkeypatch.setattr(cpu, "_compile", lambda *_: pytest.fail("compiled again"))
    assert cpu.library() is not None


def test_a_folder_that_others_can_write_to_is_not_trusted(unbuilt, monkeypatch):
    unbuilt.chmod(0o777)
    assert cpu._cache_folder() is None


def test_threads_that_come_together_build_once(unbuilt, monkeypatch):
    builds = []
    monkeypatch.setattr(cpu, "_build", lambda: builds.append(1))
    threads = [threading.Thread(target=cpu.library) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds == [1]


IMPORTS = """
import sys, torch
had = set(sys.modules)
import rl_ops
new = {name.split(".")[0] for name in set(sys.modules) - had} - set(sys.stdlib_module_names)
print(sorted(new - {"rl_ops", "torch"}))
"""


def test_import_needs_torch_and_nothing_else():
    """I1."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
