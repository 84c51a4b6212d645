"""The reward runner: combining, isolating, and refusing what is no reward."""

import asyncio
import math
import threading

import pytest
import torch

from closeness import assert_close
from rl_trainers.rewards import RewardRunner, load_reward_function

SHOWN = {"completions": ["a", "bb", "ccc", "dddd"], "place": [0, 1, 2, 3]}


def length(completions):
    return [float(len(text)) for text in completions]


def place(place, **kwargs):
    assert "completions" in kwargs
    return torch.tensor(place)


def test_totals_are_weighted_sums():
    """E5: what is reported is what was added."""
    scored = RewardRunner([length, place], weights=[0.5, 10.0])(SHOWN, count=4)
    assert scored.names == ("length", "place")
    assert_close(scored.total, [0.5, 11.0, 21.5, 32.0])
    assert_close(scored.by_function[:, 1], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (1.0, TypeError, "returned float 1.0 for 4"),
        ([1.0, 2.0], ValueError, "returned 2 values for 4"),
        (["a", "b", "c", "d"], TypeError, "returned 'a'"),
        ("abcd", TypeError, "returned str"),
        ([1.0, 2.0, math.inf, 0.0], ValueError, "returned inf"),
    ],
)
def test_an_answer_that_is_no_list_of_numbers_stops_the_run(returned, error, words):
    """E1: with the function's name and both counts."""

    def bad():
        return returned

    with pytest.raises(error, match=f"'bad' {words}"):
        RewardRunner(bad)(SHOWN, count=4)


def test_none_and_nan_are_not_scorable():
    """E2: out of the total where another function answered, NaN where none did."""

    def partial():
        return [None, math.nan, 1.0, 2.0]

    def first(completions):
        return [5.0, None, None, 1.0]

    scored = RewardRunner([partial, first])(SHOWN, count=4)
    assert_close(scored.total, [5.0, math.nan, 1.0, 3.0])
    assert scored.failures == {"partial: NaN": 1}


def test_a_function_that_raises_harms_no_other():
    """E3."""

    def broken():
        raise KeyError("missing")

    scored = RewardRunner([broken, length])(SHOWN, count=4)
    assert_close(scored.total, [1, 2, 3, 4])
    assert scored.by_function[:, 0].isnan().all()
    assert scored.failures == {"broken: KeyError: 'missing'": 4}


def test_a_function_past_its_limit_is_left_behind():
    """E3: the others are scored, the reason is kept."""
    release = threading.Event()

    def endless():
        release.wait()
        return [0.0] * 4

    try:
        scored = RewardRunner([endless, length], timeout=0.05)(SHOWN, count=4)
    finally:
        release.set()
    assert_close(scored.total, [1, 2, 3, 4])
    assert scored.failures == {"endless: no answer within 0.05 s": 4}


def test_functions_run_side_by_side():
    """E3: each waits for the other, so one after the other would never end."""
    meeting = threading.Barrier(2, timeout=10)

    def one():
        meeting.wait()
        return [1.0] * 4

    def two():
        meeting.wait()
        return [2.0] * 4

    assert_close(RewardRunner([one, two])(SHOWN, count=4).total, [3.0] * 4)


def test_a_coroutine_function_is_awaited():
    async def later(completions):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    assert_close(RewardRunner(later)(SHOWN, count=4).total, [1.0] * 4)


def test_two_functions_of_one_name_stay_apart():
    assert RewardRunner([length, length]).names == ("length_1", "length_2")


def test_what_cannot_be_a_reward_is_refused():
    with pytest.raises(TypeError, match="cannot be called"):
        RewardRunner(["exact"])
    with pytest.raises(ValueError, match="no reward function"):
        RewardRunner([])
    with pytest.raises(ValueError, match=r"2 entries for 1 reward functions"):
        RewardRunner(length, weights=[1.0, 2.0])


def test_a_function_is_found_by_file_and_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def exact(completions):\n    return [1.0] * len(completions)\n")
    assert load_reward_function(f"{file}:exact")(["a"]) == [1.0]
    assert load_reward_function("math:sqrt") is math.sqrt
    for spec, words in {
        "exact": "module:name",
        f"{file}:other": "has no 'other'",
        f"{tmp_path}/absent.py:exact": "there is no file",
        "no_such_module_here:exact": "cannot import",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_reward_function(spec)
