"""Rows of ids from whatever holds them, checked, by duck typing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def to_row(ids: Any, name: str = "ids") -> list[int]:
    """One row of integer ids, a new list, from a list, a tuple, an array or a 1-D tensor.

    Raises:
        TypeError: anything else, with the place of the first thing that is no id.
    """
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    elif isinstance(ids, list):
        ids = ids.copy()
    return _checked(ids, name)


def to_rows(inputs: Any) -> list[list[int]]:
    """Rows of ids, new lists, from a matrix or a list of rows; a single row of ids is one row.

    Raises:
        TypeError: with the place of the first thing that is neither a row nor an id.
    """
    if isinstance(inputs, dict) or hasattr(inputs, "input_ids"):
        raise TypeError("inputs is a mapping; give its 'input_ids' (or the generated ids) alone")
    is_array = hasattr(inputs, "tolist")
    if is_array:
        inputs = inputs.tolist()
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Iterable):
        raise TypeError(f"inputs is {described(inputs)}; give rows of token ids")
    rows = list(inputs)
    if rows and all(_is_scalar(item) for item in rows):
        return [to_row(rows, "inputs")]
    if (
        is_array
        and isinstance(rows[0] if rows else None, list)
        and type((rows[0] or [0])[0]) is int
    ):
        return rows  # new lists already, and an array holds one type
    return [to_row(row, f"inputs[{place}]") for place, row in enumerate(rows)]


def id_bounds(inputs: Any) -> tuple[int, int] | None:
    """The lowest and highest id of an array or tensor; None where only a loop could tell."""
    lowest, highest = getattr(inputs, "min", None), getattr(inputs, "max", None)
    if not (callable(lowest) and callable(highest)) or 0 in getattr(inputs, "shape", (0,)):
        return None
    return int(lowest()), int(highest())


def _checked(ids: Any, name: str) -> list[int]:
    if isinstance(ids, (str, bytes, dict)) or not isinstance(ids, Iterable):
        raise TypeError(f"{name} is {described(ids)}; give a row of token ids (integers)")
    row = ids if isinstance(ids, list) else list(ids)
    if not row:
        return row
    if type(row[0]) is int and type(row[-1]) is int:
        try:  # a sum tells what is no int at a fraction of the cost of looking at each
            if type(sum(row)) is int:
                return row
        except Exception:  # whatever adding them raises, the loop below says which it was
            pass
    return [_to_id(item, f"{name}[{place}]") for place, item in enumerate(row)]


def to_masks(mask: Any) -> list[list[int]]:
    """Rows of zeros and ones, or of truth values, from what `to_rows` takes.

    Raises:
        TypeError: with the place of the first row that holds anything else.
    """
    mask = mask.tolist() if hasattr(mask, "tolist") else mask
    if not isinstance(mask, (list, tuple)):
        raise TypeError(f"attention_mask is {described(mask)}; give rows of 0 and 1")
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in mask]
    if rows and all(isinstance(item, int) for item in rows):
        rows = [rows]
    for place, row in enumerate(rows):
        if not isinstance(row, (list, tuple)) or not all(
            isinstance(item, int) and item in (0, 1) for item in row
        ):
            raise TypeError(f"attention_mask[{place}] is {described(row)}; give rows of 0 and 1")
    return [list(row) for row in rows]


def to_ids(ids: Any, name: str) -> tuple[int, ...]:
    """Distinct ids from one id, or from a list, set, array or tensor of them.

    Raises:
        TypeError: for anything else, with the place.
    """
    if isinstance(ids, int) or getattr(ids, "ndim", None) == 0:
        ids = [ids]
    return tuple(dict.fromkeys(to_row(ids, name)))


def to_flags(value: Any, count: int, name: str) -> list[bool]:
    """A truth value for each row, from one for all or one a row.

    Raises:
        ValueError: a list of the wrong length, with both counts.
        TypeError: something that is no truth value.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    flags = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(flags) != count:
        raise ValueError(f"{name} has {len(flags)} values for {count} rows; give one a row, or one")
    flags = [flag.tolist() if hasattr(flag, "tolist") else flag for flag in flags]
    for place, flag in enumerate(flags):
        if not isinstance(flag, int):
            raise TypeError(f"{name}[{place}] is {described(flag)}; give True or False")
    return [bool(flag) for flag in flags]


def _is_scalar(item: Any) -> bool:
    if isinstance(item, int):
        return True
    return hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0


def _to_id(item: Any, place: str) -> int:
    if hasattr(item, "tolist"):  # a NumPy integer or a 0-D tensor
        item = item.tolist()
    if isinstance(item, int) and not isinstance(item, bool):
        return int(item)
    raise TypeError(f"{place} is {described(item)}; token ids are integers")


def described(item: Any) -> str:
    if item is None:
        return "None"
    shown = repr(item)
    return f"a {type(item).__name__} ({shown if len(shown) <= 40 else shown[:37] + '...'})"
