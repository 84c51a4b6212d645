"""A tiny model, its tokenizer and prompts, all built here; float32 so that values can be compared."""

import pytest
from datasets import Dataset
from rl_models.testing import tiny_model, tiny_tokenizer


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer):
    return tiny_model("llama", vocab_size=len(tokenizer))


@pytest.fixture
def prompts():
    texts = ["1 + 1 =", "say a word", "2", "count down from three", "b", "what now?"]
    return Dataset.from_list([{"prompt": text, "place": i} for i, text in enumerate(texts)])


@pytest.fixture
def settings(tmp_path):
    """Config values of a small, exact, quiet run."""
    return {
        "output_dir": str(tmp_path / "run"),
        "bf16": False,
        "use_cpu": True,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
