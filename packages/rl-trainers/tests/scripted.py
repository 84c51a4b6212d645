"""An engine that returns chosen completions, with log-probs computed the naive way."""

import torch
from rl_trainers.rollouts import Rollout


def naive_logps(model, prompt, ids, temperature=1.0):
    """Log-probs of ``ids`` after ``prompt``, from one plain row and the whole vocabulary."""
    logits = model(torch.tensor([list(prompt) + list(ids)])).logits[0].double() / temperature
    logps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logps[torch.arange(len(ids)), torch.tensor(ids)]


class ScriptedEngine:
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
                logps = naive_logps(self.model, prompt, ids, self.temperature) + self.shift
                reason = "stop" if ids[-1] == self.stop_id else "length"
                rollouts.append(Rollout(index, list(ids), logps.tolist(), reason))
        return rollouts
