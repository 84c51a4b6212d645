"""Audit of 100,000 conversations, and exact masks against plain rendering.

Run: python packages/rl-data/benchmarks/audit.py [rows]
"""

import sys
import time

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rl_data import audit

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [
    "the",
    "answer",
    "to",
    "this",
    "question",
    "is",
    "found",
    "by",
    "adding",
    "both",
    "numbers",
    "and",
    "then",
    "taking",
    "half",
    "of",
    "them",
]


def tokenizer():
    """A byte-level BPE tokenizer, trained on the benchmark's own words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        [" ".join(WORDS)],
        trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|im_start|>", "<|im_end|>"],
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


def conversation(k):
    """Two turns of some 100 words."""
    said = " ".join(WORDS[(k + j) % len(WORDS)] for j in range(20 + k % 40))
    return {
        "messages": [
            {"role": "user", "content": f"question {k}"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "and then?"},
            {"role": "assistant", "content": said[:50]},
        ]
    }


def main():
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    dataset = Dataset.from_list([conversation(k) for k in range(rows)])
    made = tokenizer()
    begin = time.perf_counter()
    report = audit(dataset, made, assistant_only_loss=True)
    print(report.summary())
    print(f"audit: {rows:,} rows in {time.perf_counter() - begin:.1f} s")
    messages = [row["messages"] for row in dataset.select(range(min(rows, 5000)))]
    begin = time.perf_counter()
    made.apply_chat_template(messages)
    plain = (time.perf_counter() - begin) / len(messages)
    print(f"rendering and tokenising alone: {plain * 1e6:.0f} us a row")


if __name__ == "__main__":
    main()
