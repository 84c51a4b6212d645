"""A row scores the same alone, padded, packed, or under a shared prompt, whatever the model is."""

from __future__ import annotations

import copy
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

from closeness import assert_close
from rl_models import CompletionBatch, SequenceBatch, disable_dropout, score_tokens
from rl_models.testing import ARCHITECTURES, tiny_model

# What falls back to plain rows, or to one row a packed sample, and says so.
NO_SHARING = {"mamba", "qwen3_next"}
NO_PACKING = {"bloom", "opt", "gpt_oss", "mamba", "lfm2", "qwen3_next"}
LAYOUTS = ("alone", "right", "left", "packed", "shared", "one_row", "micro_batches")


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def model(request):
    return tiny_model(request.param)


def scores(model, layout: str) -> list[torch.Tensor]:
    """The log-probs of each completion, computed in one of the layouts."""
    if layout == "one_row":
        model = one_row_model(model)
    if layout in ("shared", "one_row", "micro_batches"):
        batch = CompletionBatch.from_ids(PROMPTS, COMPLETIONS, PROMPT_INDEX, pad_token_id=2)
        size = 4 if layout == "micro_batches" else None
        with torch.set_grad_enabled(size is None):
            logps = score_tokens(model, batch, micro_batch_size=size).logps
        assert bool((logps[~batch.real()] == 0).all())
        return [row[: len(c)] for row, c in zip(logps, COMPLETIONS, strict=True)]
    if layout == "alone":
        batches = [row_batch([row], "right") for row in whole_rows()]
        return [score_tokens(model, batch).logps[batch.score_mask] for batch in batches]
    batch = row_batch(whole_rows(), layout)
    logps = score_tokens(model, batch).logps
    assert bool((logps[~batch.score_mask] == 0).all())
    flat = logps[batch.score_mask]
    return list(flat.split([len(c) for c in COMPLETIONS]))


def one_row_model(model):
    """The model under gradient checkpointing, where no cache can be: one row a prompt, or plain."""
    model = copy.deepcopy(model)
    disable_dropout(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its new name is not in 5.16
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def row_batch(rows: list[tuple[list[int], int]], layout: str) -> SequenceBatch:
    """Rows padded on one side with a real token's id, or packed two to a row and padded."""
    samples = [(ids, [0] * n + [1] * (len(ids) - n), list(range(len(ids)))) for ids, n in rows]
    if layout == "packed":
        pairs = zip(samples[::2], samples[1::2], strict=True)
        samples = [tuple(a + b for a, b in zip(x, y, strict=True)) for x, y in pairs]
    width = max(len(ids) for ids, _, _ in samples)
    columns: list[list[list[int]]] = [[], [], [], []]
    for ids, mask, positions in samples:
        gap = width - len(ids)
        filled = (ids, [2]), (mask, [0]), ([1] * len(ids), [0]), (positions, [0])
        for column, (values, pad) in zip(columns, filled, strict=True):
            column.append(pad * gap + values if layout == "left" else values + pad * gap)
    ids, mask, attended, positions = (torch.tensor(column) for column in columns)
    return SequenceBatch(ids, mask.bool(), attended, positions if layout == "packed" else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_scores_as_the_row_alone_in_the_model_itself(model, layout, dtype, capsys):
    architecture = model.config.model_type
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the fallbacks, which have their own test
        if dtype is torch.float32:
            mine = torch.cat(scores(model, layout))
        else:
            with torch.autocast("cpu", dtype):
                mine = torch.cat(scores(model, layout))
    mine, wanted = mine.detach(), torch.cat(naive_scores(model)).detach()
    difference = float((mine - wanted).abs().max())
    with capsys.disabled():
        print(f"\n  {architecture} {layout} {dtype}: largest difference {difference:.1e}", end="")
    assert mine.dtype == torch.float32
    if dtype is torch.float32:
        assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    else:
        # Autocast rounds to 8 bits: compare with the same model's own forward under autocast.
        with torch.autocast("cpu", dtype):
            rounded = torch.cat(naive_scores(model)).detach()
        noise = float((rounded - wanted).abs().max())
        close = (mine - wanted).abs() < 3 * noise + 1e-2
        # Rounding may send a token that is nearly tied between two experts to the other one.
        assert float(close.float().mean()) >= (
            0.9 if hasattr(model.config, "num_experts_per_tok") else 1.0
        )


def test_the_shared_prompt_has_the_gradient_of_plain_rows(model, capsys):
    batch = CompletionBatch.from_ids(PROMPTS, COMPLETIONS, PROMPT_INDEX)
    weight = torch.randn(batch.completion_ids.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        shared = gradients(model, (score_tokens(model, batch).logps * weight).sum())
    rows = zip(naive_scores(model), weight, strict=True)
    naive = gradients(model, sum((x * w[: len(x)]).sum() for x, w in rows))
    difference = relative_difference(shared, naive)
    with capsys.disabled():
        print(
            f"\n  {model.config.model_type}: relative gradient difference {difference:.1e}", end=""
        )
    assert difference < 1e-5


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_a_model_that_cannot_share_or_pack_says_so_once(architecture):
    model = tiny_model(architecture)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            scores(model, "shared")
            scores(model, "packed")
    said = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    said = [text for text in said if "computed" in text]
    wanted = (architecture in NO_SHARING) + (architecture in NO_PACKING)
    assert len(said) == wanted, said
