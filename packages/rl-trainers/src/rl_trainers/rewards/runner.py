"""Calls reward functions on a batch of completions and combines what they return.

A function is any callable that takes keyword arguments and returns one number (or ``None``) a
completion. It is shown ``prompts``, ``completions``, ``completion_ids``, ``answers``, ``states``,
``finish_reasons``, ``trainer_state``, ``log_metric``, ``log_extra`` and every column of the rows;
of these it receives the ones its signature names, or all if it takes ``**kwargs``.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RewardFunction = Callable[..., Sequence[float | None]]


@dataclass(frozen=True)
class ScoredRewards:
    """What the functions said of ``N`` completions.

    Attributes:
        total: ``[N]`` weighted sums, the numbers that the advantages use; NaN where no function
            gave a score ('not scorable').
        by_function: ``[N, F]`` unweighted scores, NaN where that function gave none.
        names: the ``F`` function names.
        failures: how many scores each function failed to give, by ``name: reason``.
    """

    total: Tensor
    by_function: Tensor
    names: tuple[str, ...]
    failures: Counter[str]


class RewardRunner:
    """Runs reward functions side by side, each call isolated from the others.

    A function that raises, runs past ``timeout`` or returns ``None`` or NaN for a row gives no
    score there; the row's total is then the weighted sum of the other functions, and NaN if
    there is none. A function that answers for the wrong number of rows, or with something that
    is no number, is a fault in the function: the run stops and names it.

    Args:
        functions: one callable or several.
        weights: one factor a function; all 1 by default.
        timeout: seconds that a function may take for one batch; ``None`` for no limit.

    Raises:
        TypeError: something in ``functions`` cannot be called.
        ValueError: no function was given, or the number of weights is not theirs.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction],
        *,
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
    ) -> None:
        listed = list(functions) if isinstance(functions, Sequence) else [functions]
        if not listed:
            raise ValueError("no reward function: pass at least one callable as reward_funcs")
        for function in listed:
            if not callable(function):
                raise TypeError(
                    f"reward_funcs holds {function!r} ({type(function).__name__}), which cannot be "
                    "called: pass functions that return one number a completion"
                )
        if weights is not None and len(weights) != len(listed):
            raise ValueError(
                f"reward_weights has {len(weights)} entries for {len(listed)} reward functions: "
                "give one weight a function"
            )
        self.functions = listed
        self.names = _unique_names(listed)
        self.weights = torch.tensor(list(weights or [1.0] * len(listed)), dtype=torch.float64)
        self.timeout = timeout

    def __call__(self, shown: Mapping[str, Any], *, count: int) -> ScoredRewards:
        """Score ``count`` completions described by ``shown``.

        Raises:
            TypeError: a function returned something that is not a list of numbers.
            ValueError: a function returned the wrong number of them.
        """
        failures: Counter[str] = Counter()
        pending = [_start(function, shown) for function in self.functions]
        columns = []
        for name, future in zip(self.names, pending, strict=True):
            returned = self._wait(name, future, count, failures)
            columns.append(_as_scores(name, returned, count, failures))
        by_function = torch.stack(columns, dim=1)
        scored = ~by_function.isnan()
        total = (by_function.nan_to_num(0.0) * self.weights).sum(dim=1)
        total[~scored.any(dim=1)] = math.nan
        return ScoredRewards(total, by_function, self.names, failures)

    def _wait(self, name: str, future: Future[Any], count: int, failures: Counter[str]) -> Any:
        try:
            return future.result(timeout=self.timeout)
        except Exception as error:
            # A TimeoutError is ours only while the call is still running.
            late = isinstance(error, TimeoutError) and not future.done()
            reason = f"no answer within {self.timeout} s" if late else _describe(error)
            failures[f"{name}: {reason}"] += count
            return [None] * count


def load_reward_function(spec: str) -> RewardFunction:
    """Import a reward function named ``module:name`` or ``path/to/file.py:name``.

    Raises:
        ValueError: the text has not this form, or the module or name does not exist.
    """
    target, separator, name = spec.rpartition(":")
    if not separator or not target or not name:
        raise ValueError(f"reward function {spec!r}: write it as module:name or file.py:name")
    try:
        module = _module_from_file(Path(target)) if target.endswith(".py") else _module(target)
    except (ImportError, OSError) as error:
        raise ValueError(f"reward function {spec!r}: cannot import {target!r}: {error}") from error
    if not hasattr(module, name):
        raise ValueError(f"reward function {spec!r}: {target!r} has no {name!r}")
    return getattr(module, name)


def _module(name: str) -> Any:
    # A console script does not have the working directory on its path, as `python -m` does.
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _module_from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _start(function: RewardFunction, shown: Mapping[str, Any]) -> Future[Any]:
    """Run one function in a thread of its own.

    The thread is a daemon, unlike those of an executor: a function that never returns must not
    keep the process from ending.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(_call(function, shown))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _call(function: RewardFunction, shown: Mapping[str, Any]) -> Any:
    returned = function(**_accepted(function, shown))
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


def _accepted(function: RewardFunction, shown: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(shown)
    named = {p.name for p in parameters}
    return {key: value for key, value in shown.items() if key in named}


def _as_scores(name: str, returned: Any, count: int, failures: Counter[str]) -> Tensor:
    if isinstance(returned, Tensor):
        returned = returned.tolist()
    if isinstance(returned, str) or not hasattr(returned, "__len__"):
        raise TypeError(
            f"reward function {name!r} returned {type(returned).__name__} {returned!r} for {count} "
            "completions: return a list with one number (or None) each"
        )
    if len(returned) != count:
        raise ValueError(
            f"reward function {name!r} returned {len(returned)} values for {count} completions: "
            "return one each, in the same order"
        )
    scores = torch.tensor([_as_score(name, value) for value in returned], dtype=torch.float64)
    missing = sum(1 for value in returned if value is not None and math.isnan(value))
    if missing:
        failures[f"{name}: NaN"] += missing
    return scores


def _as_score(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(
            f"reward function {name!r} returned {value!r} ({type(value).__name__}) for a "
            "completion: return a number, or None for one that cannot be scored"
        )
    score = float(value)
    if math.isinf(score):
        raise ValueError(f"reward function {name!r} returned {score}: return a finite number")
    return score


def _unique_names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    names = [getattr(f, "__name__", type(f).__name__) for f in functions]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if names.count(name) == 1 else f"{name}_{seen[name]}")
    return tuple(unique)
