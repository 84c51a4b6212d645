"""Time of rl_decode as a multiple of the tokenizer's own batch_decode, in one process.

    python packages/rl-decode/benchmarks/decode_speed.py [--rows 10000] [--length 512] [--rounds 3]
    python packages/rl-decode/benchmarks/decode_speed.py --tokenizer PATH_OR_NAME

Without ``--tokenizer`` a byte-level tokenizer is trained on the spot, so that nothing is fetched.
Counted is processor time, so other work on the machine adds nothing; the rounds alternate, and the
fastest round counts on either side.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

from rl_decode import decode_and_strip_padding, decode_completions

WANTED = 1.2
SPECIAL = ["<eos>", "<pad>", "<|tool|>"]


def trained_tokenizer() -> Any:
    """A byte-level tokenizer with think tags, trained on made-up words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = random.Random(0)
    letters = "etaoinshrdlucmfw"
    corpus = [
        " ".join("".join(words.choices(letters, k=words.randint(2, 8))) for _ in range(400))
        for _ in range(200)
    ]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(corpus, trainer)
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    inner.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


def completions(
    tokenizer: Any, rows: int, length: int, *, special: bool = False
) -> list[list[int]]:
    """Rows of one length: a block of reasoning, an answer, the end token."""
    draw = random.Random(1)
    opener, closer = (
        tokenizer.encode(t, add_special_tokens=False) for t in ("<think>", "</think>")
    )
    words = tokenizer.vocab_size // 10, tokenizer.vocab_size
    made = []
    for _ in range(rows):
        body = draw.choices(range(*words), k=length - len(opener) - len(closer) - 1)
        middle = draw.randrange(len(body))
        row = [*opener, *body[:middle], *closer, *body[middle:], tokenizer.eos_token_id]
        if special:
            row[-2] = tokenizer.convert_tokens_to_ids("<|tool|>")
        made.append(row)
    return made


def fastest(rounds: int, *functions: Callable[[], Any]) -> list[float]:
    """The fastest time of each function over rounds that take turns."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for place, function in enumerate(functions):
            start = time.process_time()
            function()
            best[place] = min(best[place], time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer")
    options = parser.parse_args()
    tokenizer = trained_tokenizer()
    if options.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    ids = completions(tokenizer, options.rows, options.length)
    kinds: dict[str, Any] = {"lists": ids}
    try:
        import torch

        kinds["tensor"] = torch.tensor(ids)
    except ImportError:
        pass
    if "<|tool|>" in tokenizer.get_added_vocab():
        inner = completions(tokenizer, options.rows, options.length, special=True)
        kinds["lists, a special token inside"] = inner
    print(f"{options.rows} completions of {options.length} tokens; batch_decode = 1.00")
    for kind, inputs in kinds.items():
        own, whole, answers, stopped = fastest(
            options.rounds,
            lambda inputs=inputs: tokenizer.batch_decode(inputs, skip_special_tokens=True),
            lambda inputs=inputs: decode_completions(inputs, tokenizer),
            lambda inputs=inputs: decode_and_strip_padding(inputs, tokenizer),
            lambda inputs=inputs: decode_completions(inputs, tokenizer, stop_strings="\n\nUser:"),
        )
        print(f"{kind}: batch_decode {own:.2f} s")
        names = (
            "decode_completions",
            "decode_and_strip_padding",
            "decode_completions, stop string",
        )
        for name, seconds in zip(names, (whole, answers, stopped), strict=True):
            ratio = seconds / own
            print(f"  {name}: {ratio:.2f} ({'met' if ratio <= WANTED else 'NOT met'}: {WANTED})")


if __name__ == "__main__":
    main()
