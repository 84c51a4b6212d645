from __future__ import annotations

import warnings

import pytest
import torch
from scored import (
    COMPLETIONS,
    PROMPT_INDEX,
    PROMPTS,
    gradients,
    naive_scores,
    relative_difference,
    whole_rows,
)
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

from closeness import assert_close
from rl_models import (
    CompletionBatch,
    SequenceBatch,
    disable_dropout,
    final_states,
    score_tokens,
)
from rl_models.testing import tiny_model


def completions(**changes) -> CompletionBatch:
    return CompletionBatch.from_ids(PROMPTS, COMPLETIONS, PROMPT_INDEX, **changes)


def caught(run):
    """What it returns the second time, and what it warned of in both."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run()
        result = run()
    return result, [str(w.message) for w in said if w.category is UserWarning]


def naive_distributions(model):
    """Logits each completion token is predicted from, `[n, V]` a completion, and the states."""
    found = []
    for ids, start in whole_rows():
        out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        found.append((out.logits[0, start - 1 : -1], out.hidden_states[-1][0, start - 1 : -1]))
    return found


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "cohere", "granite", "phi3"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_temperature_entropy_and_hidden_states_are_those_of_the_model(architecture, temperature):
    model = tiny_model(architecture)
    batch = completions()
    scores = score_tokens(
        model, batch, temperature=temperature, return_entropy=True, return_hidden=True
    )
    for row, (logits, hidden) in enumerate(naive_distributions(model)):
        logps = (logits.double() / temperature).log_softmax(-1)
        n = len(logps)
        wanted = logps.gather(1, torch.tensor(COMPLETIONS[row])[:, None])[:, 0]
        assert_close(scores.logps[row, :n], wanted, atol=1e-5)
        assert_close(scores.entropy[row, :n], -(logps.exp() * logps).sum(-1), atol=1e-5)
        assert_close(scores.hidden[row, :n], hidden, atol=1e-5)
    outside = ~batch.real()
    assert not bool(scores.entropy[outside].any())
    assert not bool(scores.hidden[outside].any())


def test_a_log_prob_of_four_tokens_computed_by_hand():
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    scores = score_tokens(
        model, CompletionBatch.from_ids([[5]], [[6, 7]], [0]), return_entropy=True
    )
    assert_close(scores.logps, [[-4.852030, -4.852030]])  # log(1/128) each
    assert_close(scores.entropy, [[4.852030, 4.852030]])


def test_only_the_tokens_of_the_score_mask_are_scored():
    model = tiny_model("llama")
    mask = [[0, 1, 0], [1], [0, 0], [1, 0, 0, 0, 1], [1, 1], [0, 0, 0]]
    every = score_tokens(model, completions()).logps
    some = completions(score_mask=mask)
    assert_close(score_tokens(model, some).logps, every * some.scored())


def test_a_batch_in_which_nothing_is_scored_gives_zeros_and_a_zero_gradient():
    model = tiny_model("llama")
    batch = completions(score_mask=[[0] * len(c) for c in COMPLETIONS])
    logps = score_tokens(model, batch).logps
    found = gradients(model, logps.sum())
    assert not bool(logps.any())
    assert not any(bool(g.any()) for g in found.values())


@pytest.mark.parametrize("lengths", [[0, 2, 1], [1, 1, 1], [0, 0, 0]])
def test_b9_empty_and_one_token_completions_score_what_they_hold(lengths):
    model = tiny_model("gpt2")
    rows = [list(range(40, 40 + n)) for n in lengths]
    batch = CompletionBatch.from_ids([[5, 6], [7]], rows, [0, 1, 0])
    scores = score_tokens(model, batch)
    plain = score_tokens(model, batch.as_sequences()).logps
    assert scores.logps.shape == batch.completion_ids.shape
    assert_close(scores.logps.sum(), plain.sum(), atol=1e-5)


def test_b1_a_real_eos_is_scored_and_attended_to_where_pad_is_eos():
    model = tiny_model("llama")
    real, padded = [[5, 6, 2, 9]], [[5, 6, 2, 9, 2, 2]]
    mask = torch.tensor([[0, 1, 1, 1, 0, 0]]).bool()
    attended = torch.tensor([[1, 1, 1, 1, 0, 0]])
    short = score_tokens(model, SequenceBatch(torch.tensor(real), mask[:, :4]))
    long = score_tokens(model, SequenceBatch(torch.tensor(padded), mask, attended))
    assert_close(long.logps[:, :4], short.logps)
    assert bool(long.logps[0, 2] < 0)


@pytest.mark.parametrize("garbage", [-100, 10_000])
def test_ids_at_padding_are_never_read(garbage):
    model = tiny_model("llama")
    assert_close(
        score_tokens(model, completions(pad_token_id=garbage)).logps,
        score_tokens(model, completions()).logps,
    )
    ids = torch.tensor([[garbage, 5, 6], [7, 8, garbage]])
    attended = torch.tensor([[0, 1, 1], [1, 1, 0]])
    mask = torch.tensor([[0, 0, 1], [0, 1, 0]])
    clean = ids.masked_fill(attended == 0, 0)
    assert_close(
        score_tokens(model, SequenceBatch(ids, mask, attended)).logps,
        score_tokens(model, SequenceBatch(clean, mask, attended)).logps,
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "opt", "mamba", "lfm2"])
def test_b7_changing_one_packed_sample_leaves_its_neighbours(architecture, attention):
    model = tiny_model(architecture)
    if architecture != "mamba":
        model.set_attn_implementation(attention)
    ids = torch.randint(3, 100, (1, 9))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    mask = positions > 0
    changed = ids.clone()
    changed[0, 4:6] = torch.tensor([101, 102])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        before, after = (
            score_tokens(model, SequenceBatch(x, mask, None, positions)).logps
            for x in (ids, changed)
        )
    assert torch.equal(before[0, :4], after[0, :4])
    assert torch.equal(before[0, 6:], after[0, 6:])
    assert not torch.equal(before[0, 4:6], after[0, 4:6])


class IgnoresLogitsToKeep(LlamaForCausalLM):
    """Returns the logits of all positions whatever it is asked for, and scales them its own way."""

    def forward(self, input_ids=None, num_logits_to_keep=0, logits_to_keep=0, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits = out.logits * 1.5 + torch.arange(out.logits.shape[-1])
        return out


def test_a3_a_model_that_ignores_logits_to_keep_and_hides_its_head_is_scored_from_its_logits():
    model = IgnoresLogitsToKeep(tiny_model("llama").config).eval()
    scores, said = caught(lambda: score_tokens(model, completions(), return_entropy=True))
    assert "full logits" in said[0]
    assert len(said) == 1
    mine = torch.cat([r[: len(c)] for r, c in zip(scores.logps, COMPLETIONS, strict=True)])
    assert_close(mine, torch.cat(naive_scores(model)), atol=1e-5)
    naive = gradients(model, torch.cat(naive_scores(model)).sum())
    assert (
        relative_difference(gradients(model, score_tokens(model, completions()).logps.sum()), naive)
        < 1e-5
    )


def checkpointing(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its new name is not in 5.16
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "phi3", "gpt_neox", "cohere"])
def test_gradient_checkpointing_shares_the_prompt_in_one_row_with_the_same_gradient(architecture):
    model = tiny_model(architecture)
    disable_dropout(model)
    wanted = gradients(model, score_tokens(model, completions()).logps.sum())
    tokens = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: tokens.append(args[0]))
    checkpointing(model)
    score_tokens(model, completions())
    tokens.clear()
    mine, said = caught(lambda: gradients(model, score_tokens(model, completions()).logps.sum()))
    assert said == []
    assert relative_difference(mine, wanted) < 1e-5
    assert len(tokens[0]) == 3  # one row for each prompt that has completions
    ends = final_states(model, completions())
    assert_close(ends, final_states(model.eval(), completions()), atol=1e-5)
    model.train()
    assert_close(
        score_tokens(model, completions()).logps,
        score_tokens(model.eval(), completions()).logps,
        atol=1e-5,
    )


@pytest.mark.parametrize("architecture", ["mistral", "gpt_oss", "bloom", "lfm2", "qwen3_next"])
def test_gradient_checkpointing_falls_back_to_plain_rows_where_a_mask_cannot_say_it(architecture):
    model = tiny_model(architecture)
    disable_dropout(model)
    wanted = gradients(model, score_tokens(model, completions()).logps.sum())
    checkpointing(model)
    mine, said = caught(lambda: gradients(model, score_tokens(model, completions()).logps.sum()))
    assert relative_difference(mine, wanted) < 1e-5
    assert "gradient checkpointing forbids a cache" in said[0]
    assert len(said) == 1


def widths_seen(model, batch):
    """The shape of each forward of the decoder, after the model was tried."""
    score_tokens(model, batch)
    shapes = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, args, __: shapes.append(tuple(args[0].shape)))
    score_tokens(model, batch)
    hook.remove()
    return shapes


def test_completions_of_unequal_length_run_in_one_row_and_equal_ones_on_a_cache():
    """What is padded decides: 8 completions of 2 to 40 tokens, or of 20 each."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=96)
    uneven = [[7] * n for n in (2, 2, 2, 2, 2, 2, 2, 40)]
    batch = CompletionBatch.from_ids([[5] * 20], uneven, [0] * 8)
    assert widths_seen(model, batch) == [(1, 20 + 7 * 1 + 39)]
    even = CompletionBatch.from_ids([[5] * 20], [[7] * 20] * 8, [0] * 8)
    assert widths_seen(model, even) == [(1, 20), (8, 19)]
    mine = gradients(model, score_tokens(model, batch).logps.sum())
    plain = gradients(model, score_tokens(model, batch.as_sequences()).logps.sum())
    assert relative_difference(mine, plain) < 1e-5


def test_one_row_for_all_completions_is_left_where_it_would_cost_more():
    """Its attention grows with the square of all completions together."""
    model = checkpointing(tiny_model("llama", max_position_embeddings=1024))
    long = CompletionBatch.from_ids([[5, 6]], [[7] * 200] * 3, [0, 0, 0])
    _, said = caught(lambda: score_tokens(model, long))
    assert "gradient checkpointing forbids a cache" in said[0]


def test_scoring_without_gradients_does_not_cut_those_of_a_later_forward_under_autocast():
    model = tiny_model("llama")
    batch = completions()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gradients(model, score_tokens(model, batch).logps.sum())
    fresh = tiny_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            score_tokens(fresh, batch)
        mine = gradients(fresh, score_tokens(fresh, batch).logps.sum())
    assert relative_difference(mine, wanted) < 1e-6


@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_a_model_first_scored_in_inference_mode_scores_and_trains_afterwards(architecture):
    model = tiny_model(architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with torch.inference_mode():
            first = score_tokens(model, completions()).logps.tolist()
        logps = score_tokens(model, completions()).logps
    assert_close(logps, first)
    assert gradients(model, logps.sum())


def test_probing_a_model_leaves_its_modes_weights_and_gradients_alone():
    model = tiny_model("llama", attention_dropout=0.5).train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        score_tokens(model, completions())
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_get_the_gradient_of_the_plain_way(tied):
    model = tiny_model("llama", tie_word_embeddings=tied)
    mine = gradients(model, score_tokens(model, completions()).logps.sum())
    naive = gradients(model, sum(x.sum() for x in naive_scores(model)))
    assert relative_difference(mine, naive) < 1e-5


def test_a_head_with_a_bias_is_scored_with_it():
    model = tiny_model("llama", tie_word_embeddings=False)
    model.set_output_embeddings(nn.Linear(32, 128))
    mine = gradients(model, score_tokens(model, completions()).logps.sum())
    naive = gradients(model, sum(x.sum() for x in naive_scores(model)))
    assert "lm_head.bias" in mine
    assert relative_difference(mine, naive) < 1e-5


@pytest.mark.parametrize("entropy", [False, True])
def test_the_head_runs_on_scored_positions_alone(entropy):
    """No tensor of rows x length x vocabulary is built."""
    model = tiny_model("llama")
    batch = completions()
    score_tokens(model, batch)
    sizes = [0]

    def see(tensor):
        if tensor.shape[-1:] == (128,) and tensor.shape[0] != 32:  # not the head itself
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        score_tokens(model, batch, return_entropy=entropy)
    assert max(sizes) <= sum(map(len, COMPLETIONS)) * 128


@pytest.mark.parametrize("size", [None, 2])
def test_a12_a_batch_of_no_rows_scores_to_nothing_in_the_right_shapes(size):
    completions_of_none = CompletionBatch.from_ids([[5, 6]], [], [])
    none = torch.zeros(0, 4, dtype=torch.long)
    with torch.set_grad_enabled(size is None):
        for batch, shape in ((completions_of_none, (0, 0)), (SequenceBatch(none, none), (0, 4))):
            scores = score_tokens(
                tiny_model("llama"),
                batch,
                return_entropy=True,
                return_hidden=True,
                micro_batch_size=size,
            )
            assert scores.logps.shape == scores.entropy.shape == shape
            assert scores.hidden.shape == (*shape, 32)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text", "mamba"])
def test_final_states_are_those_after_each_rows_last_token(architecture):
    model = tiny_model(architecture)
    batch = CompletionBatch.from_ids(PROMPTS, [*COMPLETIONS, []], [*PROMPT_INDEX, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mine = final_states(model, batch)
    for row, (ids, _) in enumerate([*whole_rows(), (PROMPTS[3], 0)]):
        out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        assert_close(mine[row], out.hidden_states[-1][0, -1], atol=1e-5)


def test_a_reward_models_score_comes_from_the_final_states_of_a_pair():
    config = tiny_model("llama").config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).eval()
    pair = CompletionBatch.from_ids([[5, 6, 7]], [[8, 9], [10]], [0, 0])
    mine = model.score(final_states(model, pair))
    naive = [model(torch.tensor([ids])).logits[0] for ids in ([5, 6, 7, 8, 9], [5, 6, 7, 10])]
    assert_close(mine, torch.stack(naive), atol=1e-5)
    shared = gradients(model, (mine[0] - mine[1]).sum())
    assert relative_difference(shared, gradients(model, (naive[0] - naive[1]).sum())) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_moe", "mamba", "lfm2"])
def test_half_precision_weights_score_as_the_models_own_logits_in_float32(architecture, dtype):
    model = tiny_model(architecture, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        logps = score_tokens(model, completions()).logps
    mine = torch.cat([row[: len(c)] for row, c in zip(logps, COMPLETIONS, strict=True)])
    assert mine.dtype == torch.float32
    # Not rounded to the weights' type: a log-prob of -5 in bf16 would be off by up to 2e-2.
    assert_close(mine, torch.cat(naive_scores(model)), rtol=1e-3, atol=1e-3)


def test_wrong_requests_say_what_was_wanted():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="temperature=0"):
        score_tokens(model, completions(), temperature=0.0)
    with pytest.raises(ValueError, match="no_grad"):
        score_tokens(model, completions(), micro_batch_size=2)
    with torch.no_grad(), pytest.raises(ValueError, match="micro_batch_size=0"):
        score_tokens(model, completions(), micro_batch_size=0)
    with pytest.raises(TypeError, match="DataParallel"):
        score_tokens(nn.DataParallel(model), completions())
