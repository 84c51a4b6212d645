"""The in-process engine against the scorer and against `generate`."""

import pytest
import torch

from closeness import assert_close
from rl_models import CompletionBatch, score_tokens
from rl_models.testing import tiny_model
from rl_trainers.rollouts import InProcessEngine, SamplingParams

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]


def engine_of(model, **changes):
    return InProcessEngine(model, **{"stop_ids": [2, 50], **changes})


def sampling(**changes):
    return SamplingParams(**{"max_new_tokens": 9, **changes})


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_its_log_probs_are_those_of_the_scorer(architecture, temperature):
    """A2: at temperature 0.6 too, or the first ratio would be off."""
    model = tiny_model(architecture)
    rollouts = engine_of(model).generate(PROMPTS, 4, sampling(temperature=temperature), seed=1)
    assert [r.prompt_index for r in rollouts] == [0] * 4 + [1] * 4 + [2] * 4
    batch = CompletionBatch.from_ids(
        PROMPTS, [r.ids for r in rollouts], [r.prompt_index for r in rollouts]
    )
    logps = score_tokens(model, batch, temperature=temperature).logps
    for row, rollout in zip(logps, rollouts, strict=True):
        assert_close(rollout.logps, row[: len(rollout.ids)], rtol=1e-4, atol=1e-5)


def test_truncated_sampling_reports_the_policys_log_probs(model):
    """A1: top-p 0.8 cuts what is drawn, not what is reported: the first ratio is 1."""
    truncated = sampling(top_p=0.8, top_k=20, min_p=0.01)
    rollouts = engine_of(model).generate(PROMPTS, 4, truncated, seed=1)
    batch = CompletionBatch.from_ids(
        PROMPTS, [r.ids for r in rollouts], [r.prompt_index for r in rollouts]
    )
    logps = score_tokens(model, batch).logps[batch.real()]
    assert_close([x for r in rollouts for x in r.logps], logps, rtol=1e-4, atol=1e-5)


def test_greedy_rows_are_those_of_generate(model):
    rollouts = engine_of(model).generate(PROMPTS, 1, sampling(temperature=0), seed=0)
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        wanted = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=[2, 50],
            pad_token_id=0,
        )[0, len(prompt) :]
        assert rollout.ids == wanted.tolist()


def test_a_sample_does_not_depend_on_its_neighbours(model):
    """Rows that end leave the batch, prompts are padded: neither may change what is drawn."""
    engine = engine_of(model, stop_ids=list(range(0, 101, 4)))
    together = engine.generate(PROMPTS, 3, sampling(), seed=4)
    alone = engine.generate(PROMPTS[:1], 3, sampling(), seed=4)
    assert len({len(r.ids) for r in together}) > 1
    assert [r.ids for r in alone] == [r.ids for r in together[:3]]


def test_a_completion_ends_with_its_first_stop_id_or_at_the_limit(model):
    """C2: whichever of several stop ids comes first."""
    stops = set(range(0, 101, 7))
    engine = engine_of(model, stop_ids=sorted(stops))
    rollouts = engine.generate(PROMPTS, 8, sampling(), seed=0)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for r in rollouts:
        assert not stops & set(r.ids[:-1])
        assert (r.finish_reason == "stop") == (r.ids[-1] in stops)
        assert r.finish_reason == "stop" or len(r.ids) == 9
        assert len(r.ids) == len(r.logps)


def test_half_precision_generation_leaves_the_weights_as_they_are(model):
    """E11: neither their type nor their bits change, and a sync reaches the engine."""
    before = {name: p.clone() for name, p in model.named_parameters()}
    engine = engine_of(model, autocast_dtype=torch.bfloat16)
    first = engine.generate(PROMPTS, 2, sampling(), seed=0)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    assert engine.generate(PROMPTS, 2, sampling(), seed=0) == first
    engine.sync_weights(model)
    assert engine.generate(PROMPTS, 2, sampling(), seed=0) != first


def test_half_precision_log_probs_are_those_of_the_autocast_scorer(model):
    engine = engine_of(model, autocast_dtype=torch.bfloat16)
    rollouts = engine.generate(PROMPTS, 4, sampling(), seed=1)
    batch = CompletionBatch.from_ids(
        PROMPTS, [r.ids for r in rollouts], [r.prompt_index for r in rollouts]
    )
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logps = score_tokens(model, batch).logps
    # Logits near 8 are rounded to steps of 1/32 in bf16, in the engine's head alone: single tokens
    # may differ by that much, their mean may not.
    engine_logps = torch.tensor([x for r in rollouts for x in r.logps])
    assert_close((logps[batch.real()] - engine_logps).mean(), 0.0, atol=1e-2)
    assert (logps[batch.real()] - engine_logps).abs().max() < 1 / 8


def test_it_refuses_what_cannot_be_generated_from(model):
    with pytest.raises(ValueError, match="no stop ids"):
        InProcessEngine(model, stop_ids=[])
    for prompts, n in [([], 1), ([[]], 1), ([[1]], 0)]:
        with pytest.raises(ValueError, match="at least one prompt"):
            engine_of(model).generate(prompts, n, sampling(), seed=0)
