"""The plan of prompts: nothing left out, nothing shared between ranks, any sizes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_trainers.online.plan import Plan, WindowSampler

sizes = st.integers(min_value=1, max_value=5)


@given(prompts=st.integers(1, 40), batch=sizes, window=sizes, iterations=sizes, ranks=sizes)
def test_windows_of_all_ranks_walk_through_permutations_of_the_dataset(
    prompts, batch, window, iterations, ranks
):
    plan = Plan(
        num_prompts=prompts,
        prompts_per_micro_step=batch,
        micro_steps_per_window=window,
        num_iterations=iterations,
        num_ranks=ranks,
        seed=1,
    )
    stream = [
        row
        for number in range(2 * plan.windows_per_epoch)
        for rank in range(ranks)
        for row in plan.window(number, rank=rank)
    ]
    for start in range(0, len(stream) - prompts + 1, prompts):
        assert sorted(stream[start : start + prompts]) == list(range(prompts))
    first_epoch = stream[: plan.windows_per_epoch * plan.window_prompts * ranks]
    assert set(first_epoch) == set(range(prompts))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_micro_step_of_a_window_sees_its_rows(ranks):
    plan = Plan(
        num_prompts=12,
        prompts_per_micro_step=2,
        micro_steps_per_window=2,
        num_iterations=3,
        num_ranks=ranks,
        seed=0,
    )
    for rank in range(ranks):
        sampler = WindowSampler(plan, rank=rank, epoch=lambda: 0)
        rows = [tuple(batch) for batch in sampler]
        assert len(rows) == len(sampler) == plan.micro_steps_per_epoch
        assert set(Counter(rows).values()) == {2 * 3}


def test_the_next_epoch_has_another_order():
    plan = Plan(
        num_prompts=50,
        prompts_per_micro_step=5,
        micro_steps_per_window=2,
        num_iterations=1,
        num_ranks=1,
        seed=0,
    )
    epochs = [list(WindowSampler(plan, rank=0, epoch=lambda e=e: e)) for e in (0, 1, 0)]
    assert epochs[0] == epochs[2]
    assert epochs[0] != epochs[1]


def test_the_plan_says_its_sizes():
    plan = Plan(
        num_prompts=5,
        prompts_per_micro_step=1,
        micro_steps_per_window=2,
        num_iterations=1,
        num_ranks=1,
        seed=0,
    )
    assert "3 windows an epoch" in str(plan)
