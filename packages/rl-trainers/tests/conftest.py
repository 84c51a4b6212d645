"""A tiny model, its tokenizer, prompts and a scripted engine; float32, so values compare."""

import pytest
import torch
from datasets import Dataset

from rl_models.testing import tiny_model, tiny_tokenizer
from rl_trainers.rollouts import Rollout


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
        "max_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 3,
    }


def _naive_logps(model, prompt, ids, temperature=1.0):
    """Log-probs of ``ids`` after ``prompt``, from one plain row and the whole vocabulary."""
    logits = model(torch.tensor([list(prompt) + list(ids)])).logits[0].double() / temperature
    logps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logps[torch.arange(len(ids)), torch.tensor(ids)]


class _ScriptedEngine:
    """Gives the completions of ``script`` in turn, ``n`` to a prompt."""

    def __init__(self, model, script, *, stop_id=2, temperature=1.0, shift=0.0):
        self.model, self.script, self.stop_id = model, script, stop_id
        self.temperature, self.shift = temperature, shift
        self.calls = 0

    def sync_weights(self, model):
        pass

    @torch.no_grad()
    def generate(self, prompts, n, sampling, *, seed):
        self.calls += 1
        rollouts = []
        for index, prompt in enumerate(prompts):
            for k in range(n):
                ids = self.script[(index * n + k) % len(self.script)]
                logps = _naive_logps(self.model, prompt, ids, self.temperature) + self.shift
                reason = "stop" if ids[-1] == self.stop_id else "length"
                rollouts.append(Rollout(index, list(ids), logps.tolist(), reason))
        return rollouts


@pytest.fixture
def naive_logps():
    return _naive_logps


@pytest.fixture
def scripted_engine():
    return _ScriptedEngine
