"""Time and memory of scoring completions under a shared prompt, against the usual way.

    python packages/rl-models/benchmarks/shared_prompt.py speed
    python packages/rl-models/benchmarks/shared_prompt.py speed --bf16 --prompts 8 --completion 12
    python packages/rl-models/benchmarks/shared_prompt.py memory

`speed`: forward + backward of 8 completions of 48 tokens on a random Llama of 135M parameters (the
shape of SmolLM2-135M; weights do not change the time), float32, at prompts of 64, 211 and 512
tokens. The usual way is the model's own forward over whole rows, logits of the completion's
positions only, log_softmax and gather. Both ways run in turn in one process, the median is taken,
and the ratio is what counts: it holds on a busy machine too, the seconds do not.

`memory`: the peak above the loaded model of 8 rows of 512 tokens at a vocabulary of 151,936, each
way in a process of its own (a CPU process never gives its peak back).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_models import CompletionBatch, SequenceBatch, score_tokens

SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def usual_logps(model, batch: SequenceBatch, start: int) -> torch.Tensor:
    """Log-probs of the columns from `start` on, the way most trainers compute them."""
    keep = batch.input_ids.shape[1] - start + 1
    out = model(batch.input_ids, attention_mask=batch.attention_mask, logits_to_keep=keep)
    logps = out.logits[:, :-1].float().log_softmax(-1)
    return logps.gather(-1, batch.input_ids[:, start:, None])[..., 0]


def seconds(step, clock) -> float:
    start = clock()
    step()
    return clock() - start


def speed(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M)).to(args.device)
    clock = time.process_time if args.cpu_time else time.perf_counter
    # Forward + backward should be at least this many times faster in float32.
    wanted = {64: 1.7, 211: 2.8, 512: 4.0}
    print(
        f"{args.prompts} prompts, 8 completions of {args.completion} tokens each, "
        f"{torch.get_num_threads()} threads, {'bf16 autocast' if args.bf16 else 'float32'}"
    )
    for length in args.prompt:
        ids = torch.randint(0, 49152, (args.prompts, length)).tolist()
        rows = torch.randint(0, 49152, (8 * args.prompts, args.completion)).tolist()
        index = [row // 8 for row in range(len(rows))]
        batch = CompletionBatch.from_ids(ids, rows, index, device=args.device)
        whole = batch.as_sequences()
        ways = {
            "usual": lambda whole=whole, length=length: usual_logps(model, whole, length),
            "rows": lambda whole=whole: score_tokens(model, whole).logps,
            "shared": lambda batch=batch: score_tokens(model, batch).logps,
        }

        def step(way) -> None:
            with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
                logps = way()
            logps.sum().backward()
            model.zero_grad(set_to_none=True)
            if args.device == "cuda":
                torch.cuda.synchronize()

        for way in ways.values():
            step(way)
        times = {name: [] for name in ways}
        for _ in range(args.repeats):
            for name, way in ways.items():
                times[name].append(seconds(lambda way=way: step(way), clock))
        median = {name: statistics.median(values) for name, values in times.items()}
        ratio = f"ratio {median['usual'] / median['shared']:.2f}"
        ratio += f" (wanted {wanted[length]})" if length in wanted and not args.bf16 else ""
        seen = ", ".join(f"{name} {value:.2f} s" for name, value in median.items())
        print(f"prompt {length:4d}: {seen}, {ratio}")


def peak_of(way: str) -> None:
    """Print the peak in MiB above the loaded model, its gradient not counted."""
    torch.manual_seed(0)
    shape = {**SMOLLM2_135M, "num_hidden_layers": 2, "hidden_size": 288, "vocab_size": 151_936}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(0, 151_936, (8, 512))
    mask = torch.ones(8, 512, dtype=torch.bool)
    mask[:, 0] = False
    batch = SequenceBatch(ids, mask)
    score_tokens(model, batch.rows(torch.tensor([0]))).logps.sum().backward()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from here
    logps = usual_logps(model, batch, 1) if way == "usual" else score_tokens(model, batch).logps
    logps.sum().backward()
    print((status("VmHWM") - before) / 1024)


def status(field: str) -> int:
    """A number of KiB from the kernel's account of this process (Linux)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


def memory(_: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "peak"]
    peaks = {
        way: float(
            subprocess.run([*command, way], check=True, capture_output=True, text=True).stdout
        )
        for way in ("usual", "ours")
    }
    print(
        f"8 x 512 tokens, vocabulary 151,936: usual {peaks['usual']:.0f} MiB, "
        f"ours {peaks['ours']:.0f} MiB, {peaks['ours'] / peaks['usual']:.1%} (wanted below 25%)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("speed")
    one.add_argument("--prompt", type=int, nargs="+", default=[64, 211, 512], help="tokens")
    one.add_argument("--prompts", type=int, default=1)
    one.add_argument("--completion", type=int, default=48, help="tokens")
    one.add_argument("--repeats", type=int, default=5)
    one.add_argument("--bf16", action="store_true")
    one.add_argument("--device", default="cpu")
    one.add_argument(
        "--cpu-time",
        action="store_true",
        help="count this process's CPU seconds, for a busy machine (with OMP_NUM_THREADS=1)",
    )
    one.set_defaults(run=speed)
    commands.add_parser("memory").set_defaults(run=memory)
    peak = commands.add_parser("peak")
    peak.add_argument("way", choices=["usual", "ours"])
    peak.set_defaults(run=lambda args: peak_of(args.way))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
