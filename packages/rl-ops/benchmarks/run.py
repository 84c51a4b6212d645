"""Measure the ops beside the alternatives, in one process, as ratios to a bare read.

    python packages/rl-ops/benchmarks/run.py --json OUT [--quick] [--threads N] [--only WORD]

Peak memory is that above the inputs and the gradient: told by the allocator on a GPU, by Linux's
account of the process on a CPU. TRL's function and Liger's are measured where they are installed.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

VOCABULARIES = (49_152, 151_936)
ROWS = 512
HEADS = {"135M head": (768, 576, 49_152), "wide head": (4096, 576, 151_936)}

Call = Callable[[Tensor, Tensor], Tensor]


def naive(logits: Tensor, index: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def formula(logits: Tensor, index: Tensor) -> Tensor:
    picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).float()
    return picked - logits.float().logsumexp(-1)


@functools.cache
def compiled() -> Call:
    return torch.compile(formula, dynamic=False)


def ours(logits: Tensor, index: Tensor) -> Tensor:
    from rl_ops import selective_log_softmax

    return selective_log_softmax(logits, index)


def ours_eager(logits: Tensor, index: Tensor) -> Tensor:
    from rl_ops.kernels import cpu

    keep, cpu.supports = cpu.supports, lambda z, indices=0: False
    try:
        return ours(logits, index)
    finally:
        cpu.supports = keep


def alternatives(device: str) -> dict[str, Call]:
    """Return the functions to compare, by name; what is not installed is left out and said."""
    found: dict[str, Call] = {"rl_ops": ours, "naive": naive}
    if device == "cpu":
        found["rl_ops (no compiler)"] = ours_eager
    try:
        from trl.trainer.utils import selective_log_softmax as trl

        found["trl"] = trl
    except ImportError:
        print("trl is not installed: its column is left out")
    try:
        compiled()(
            torch.zeros(1, 2, 8, device=device), torch.zeros(1, 2, dtype=torch.long, device=device)
        )
        found["torch.compile"] = lambda z, i: compiled()(z, i)
    except Exception as error:
        print(f"torch.compile does not work here ({type(error).__name__}): its column is left out")
    if device != "cpu":
        try:
            from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

            found["liger (loss only)"] = lambda z, i: (
                -LigerCrossEntropyFunction.apply(
                    z.flatten(0, 1), i.flatten(), None, -100, 0.0, 0.0, "none"
                )[0].view(i.shape)
            )
        except ImportError:
            print("liger-kernel is not installed: its column is left out")
    return found


def seconds(call: Callable[[], object], device: str, *, budget: float) -> float:
    """Return the fastest of several runs, after one to warm up."""
    best, spent, runs = float("inf"), 0.0, 0
    call()
    while runs < 3 or (spent < budget and runs < 50):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        taken = time.perf_counter() - start
        best, spent, runs = min(best, taken), spent + taken, runs + 1
    return best


def synchronize(device: str) -> None:
    if device != "cpu":
        getattr(torch, device).synchronize()


def logits_case(device: str, dtype: torch.dtype, width: int, rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = torch.empty(4, rows // 4, width, dtype=dtype, device=device).normal_(0, 3)
    return logits, torch.randint(0, width, (4, rows // 4), device=device)


def forward_backward(call: Call, logits: Tensor, index: Tensor) -> None:
    leaf = logits.detach().requires_grad_()
    call(leaf, index).sum().backward()


def measure_logits(device: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """One row of results a function, type and vocabulary."""
    results = []
    rows = options.rows or (ROWS if device == "cpu" else 4096)
    for width in VOCABULARIES:
        for dtype in (torch.float32, torch.bfloat16):
            logits, index = logits_case(device, dtype, width, rows)
            torch.compiler.reset()  # each case is compiled for itself
            wanted = naive(logits[:, :4].double(), index[:, :4])
            read = seconds(lambda: logits.amax(-1), device, budget=options.budget)  # noqa: B023
            out = torch.empty_like(logits)
            copy = seconds(lambda: out.copy_(logits), device, budget=options.budget)  # noqa: B023
            for name, call in alternatives_cached(device).items():
                forward = seconds(lambda: call(logits, index), device, budget=options.budget)  # noqa: B023
                both = seconds(
                    lambda: forward_backward(call, logits, index),  # noqa: B023
                    device,
                    budget=options.budget,
                )
                error = float((call(logits[:, :4], index[:, :4]).double() - wanted).abs().max())
                shares = [peak_share(call, logits, index, both=x) for x in (False, True)]
                results.append(
                    {
                        "op": "selective_log_softmax", "function": name, "dtype": str(dtype)[6:],
                        "rows": rows, "width": width, "read_ms": read * 1e3, "copy_ms": copy * 1e3,
                        "forward_ms": forward * 1e3, "forward_backward_ms": both * 1e3,
                        "forward_per_read": forward / read, "both_per_read": both / read,
                        "error": error, "forward_peak_share": shares[0],
                        "both_peak_share": shares[1],
                    }
                )  # fmt: skip
                show(results[-1])
    return results


alternatives_cached = functools.cache(alternatives)


def peak_share(call: Call, logits: Tensor, index: Tensor, *, both: bool) -> float | None:
    """Return the peak above inputs and gradient, as a share of the logits' bytes."""
    run = forward_backward if both else (lambda call, *args: call(*args))
    added = peak_bytes(lambda: run(call, logits, index), logits.device.type)
    owed = logits.nbytes if both else 0
    return None if added is None else max(0.0, (added - owed) / logits.nbytes)


def peak_bytes(call: Callable[[], object], device: str) -> int | None:
    """Return the most memory that a call holds above what was held before; None if unknown."""
    if device != "cpu":
        allocator = getattr(torch, device)
        allocator.reset_peak_memory_stats()
        before = allocator.memory_allocated()
        call()
        synchronize(device)
        return allocator.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(
            0
        )  # what was freed is given back, so that nothing hides in it
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is held now
    except (OSError, AttributeError):
        return None
    call()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_heads(device: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """The fused head beside the head and the naive log-softmax, per matrix product."""
    from rl_ops import linear_selective_log_softmax

    results = []
    for name, (rows, size, width) in HEADS.items():
        if options.quick and rows > 1000:
            continue
        for amp in (False, True):
            torch.manual_seed(0)
            hidden = torch.randn(rows, size, device=device, requires_grad=True)
            weight = (0.05 * torch.randn(width, size, device=device)).requires_grad_()
            index = torch.randint(0, width, (rows,), device=device)
            kind = torch.bfloat16 if amp else torch.float32
            h, w = (x.detach().to(kind) for x in (hidden, weight))
            product = seconds(lambda: h @ w.t(), device, budget=options.budget)  # noqa: B023

            def run(fused: bool, frozen: bool) -> None:
                head = weight.detach() if frozen else weight  # noqa: B023
                with torch.autocast(device, torch.bfloat16, enabled=amp):  # noqa: B023
                    if fused:
                        logps = linear_selective_log_softmax(hidden, head, index)  # noqa: B023
                    else:
                        logps = naive(torch.nn.functional.linear(hidden, head), index)  # noqa: B023
                logps.sum().backward()
                hidden.grad = weight.grad = None  # noqa: B023

            for label, fused, frozen in (
                ("rl_ops", True, False), ("rl_ops, frozen", True, True),
                ("linear + naive", False, False), ("linear + naive, frozen", False, True),
            ):  # fmt: skip
                if not fused and rows * width > 2**29 and device == "cpu":
                    continue  # three copies of 2.5 GB
                taken = seconds(lambda: run(fused, frozen), device, budget=options.budget)  # noqa: B023
                added = peak_bytes(lambda: run(fused, frozen), device)  # noqa: B023
                owed = hidden.nbytes + (0 if frozen else weight.nbytes)
                peak = None if added is None else (added - owed) / 2**20
                results.append(
                    {
                        "op": "linear_selective_log_softmax", "function": label, "case": name,
                        "rows": rows, "hidden": size, "width": width, "autocast": amp,
                        "product_ms": product * 1e3, "forward_backward_ms": taken * 1e3,
                        "both_per_product": taken / product, "peak_mib": peak,
                    }
                )  # fmt: skip
                show_head(results[-1])
    return results


def header() -> None:
    print(
        f"{'function':24}{'dtype':>9}{'width':>8}{'fwd/read':>10}{'f+b/read':>10}"
        f"{'fwd ms':>9}{'f+b ms':>9}{'error':>10}{'mem fwd':>9}{'mem f+b':>9}"
    )


def show(r: dict[str, object]) -> None:
    shares = [
        "-" if x is None else f"{x:.1%}" for x in (r["forward_peak_share"], r["both_peak_share"])
    ]
    print(
        f"{r['function']:24}{r['dtype']:>9}{r['width']:>8}{r['forward_per_read']:>10.2f}"
        f"{r['both_per_read']:>10.2f}{r['forward_ms']:>9.1f}{r['forward_backward_ms']:>9.1f}"
        f"{r['error']:>10.1e}{shares[0]:>9}{shares[1]:>9}",
        flush=True,
    )


def show_head(r: dict[str, object]) -> None:
    peak = "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f} MiB"
    amp = "bf16 autocast" if r["autocast"] else "float32"
    print(
        f"{r['case']:12}{r['function']:24}{amp:>14}{r['forward_backward_ms']:>10.0f} ms"
        f"{r['both_per_product']:>8.2f} x one product, peak {peak}",
        flush=True,
    )


def machine(device: str) -> dict[str, object]:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    except OSError:
        pass
    from rl_ops.kernels import cpu

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else name,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiled_cpu_kernels": cpu.library() is not None,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="small budget, small head")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--rows", type=int, help="rows of logits (default: 512, 4096 on a GPU)")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a measurement")
    parser.add_argument("--only", choices=["logits", "heads"])
    options = parser.parse_args()
    if options.quick:
        options.budget = 0.1
    if options.threads:
        torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict[str, object] = {"machine": machine(device)}
    print(json.dumps(report["machine"]))
    if options.only != "heads":
        header()
        report["logits"] = measure_logits(device, options)
    if options.only != "logits":
        report["heads"] = measure_heads(device, options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
