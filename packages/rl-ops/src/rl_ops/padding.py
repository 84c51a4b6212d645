"""Padding, cutting and shifting of token tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["flush_left", "flush_right", "pad", "pad_to_length"]


def pad(
    tensors: Sequence[Tensor],
    padding_value: float | bool = 0,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
) -> Tensor:
    """Stack tensors of different lengths into one, padded.

    Args:
        tensors: ``[L_i, ...]``, equal rank, dtype and device. Dimensions after the first may differ
            too; they are padded at their end.
        padding_value: fills the rest.
        padding_side: "right" or "left", for the first dimension.
        pad_to_multiple_of: rounds the padded length up to a multiple of it.

    Returns:
        ``[N, L, ...]``, L the longest length (rounded up).

    Raises:
        ValueError: no tensors, or tensors that do not go together.

    Example:
        >>> pad([torch.tensor([1, 2, 3]), torch.tensor([4])], padding_side="left")
        tensor([[1, 2, 3],
                [0, 0, 4]])
    """
    shape = _padded_shape(tensors, padding_side, pad_to_multiple_of)
    first = tensors[0]
    if shape[1:] == list(first.shape[1:]) and all(t.shape[1:] == first.shape[1:] for t in tensors):
        padded = torch.nn.utils.rnn.pad_sequence(
            list(tensors), batch_first=True, padding_value=padding_value, padding_side=padding_side
        )
        missing = shape[0] - padded.shape[1]
        if missing == 0:
            return padded
        filler = padded.new_full((len(tensors), missing, *shape[1:]), padding_value)
        return torch.cat([padded, filler] if padding_side == "right" else [filler, padded], dim=1)
    out = first.new_full((len(tensors), *shape), padding_value)
    for row, tensor in zip(out, tensors, strict=True):
        start = shape[0] - tensor.shape[0] if padding_side == "left" else 0
        region = (
            slice(start, start + tensor.shape[0]),
            *(slice(size) for size in tensor.shape[1:]),
        )
        row[region] = tensor
    return out


def pad_to_length(
    tensor: Tensor, length: int, padding_value: float | bool = 0, dim: int = -1
) -> Tensor:
    """Pad or cut ``tensor`` at the end of ``dim`` to exactly ``length``.

    Example:
        >>> pad_to_length(torch.tensor([[1, 2], [3, 4]]), 3, padding_value=9)
        tensor([[1, 2, 9],
                [3, 4, 9]])
    """
    if length < 0:
        raise ValueError(f"length is {length}: pass 0 or more")
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor.narrow(dim, 0, length)
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, padding_value)], dim=dim)


def flush_left(mask: Tensor, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Shift each row so that its first unmasked position comes first; drop unused columns.

    Args:
        mask: ``[N, M]``; non-zero marks what is kept. Gaps inside a row stay where they are.
        tensors: ``[N, M, ...]``, shifted alike. What stands outside the mask wraps round or is cut.

    Returns:
        The shifted mask, or ``(mask, *tensors)``.

    Example:
        >>> flush_left(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]))
        tensor([[1, 1],
                [1, 1]])
    """
    _check_flush(mask, tensors)
    return _roll_rows(_first_kept(mask), mask, tensors, keep="left")


def flush_right(mask: Tensor, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Shift each row so that its last unmasked position comes last; drop unused columns.

    The mirror of :func:`flush_left`.

    Example:
        >>> flush_right(torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0]]))
        tensor([[1, 1],
                [0, 1]])
    """
    _check_flush(mask, tensors)
    return _roll_rows(-_first_kept(mask.flip(1)), mask, tensors, keep="right")


def _padded_shape(
    tensors: Sequence[Tensor], padding_side: str, pad_to_multiple_of: int | None
) -> list[int]:
    """Check the arguments of :func:`pad` and return the padded shape of one item."""
    if padding_side not in ("left", "right"):
        raise ValueError(f'padding_side is {padding_side!r}: pass "left" or "right"')
    if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of is {pad_to_multiple_of}: pass 1 or more, or None")
    if len(tensors) == 0:
        raise ValueError(
            "pad got an empty list: at least one tensor is needed to know type and rank"
        )
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.dim() == 0:
            raise ValueError(f"tensor {i} has no dimension to pad: pass tensors of rank 1 or more")
        if (tensor.dim(), tensor.dtype, tensor.device) != (first.dim(), first.dtype, first.device):
            raise ValueError(
                f"tensor {i} has rank {tensor.dim()}, {tensor.dtype}, {tensor.device}; "
                f"tensor 0 has rank {first.dim()}, {first.dtype}, {first.device}: all must agree"
            )
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    if pad_to_multiple_of is not None:
        shape[0] += -shape[0] % pad_to_multiple_of
    return shape


def _check_flush(mask: Tensor, tensors: tuple[Tensor, ...]) -> None:
    if mask.dim() != 2:
        raise ValueError(f"mask has shape {list(mask.shape)}: pass [rows, length]")
    for i, tensor in enumerate(tensors):
        if tensor.shape[:2] != mask.shape:
            raise ValueError(
                f"tensor {i} has shape {list(tensor.shape)}, the mask {list(mask.shape)}: "
                "the first two dimensions must agree"
            )


def _first_kept(mask: Tensor) -> Tensor:
    """Return the position of each row's first non-zero, 0 for empty rows and for length 0."""
    if mask.shape[1] == 0:
        return mask.new_zeros(mask.shape[0], dtype=torch.int64)
    return mask.bool().to(torch.int8).argmax(1)


def _roll_rows(
    shift: Tensor, mask: Tensor, tensors: tuple[Tensor, ...], *, keep: str
) -> Tensor | tuple[Tensor, ...]:
    """Roll every row by its own shift in one gather, then cut unused columns."""
    length = mask.shape[1]
    positions = torch.arange(length, device=mask.device)
    source = (positions + shift[:, None]) % max(length, 1)
    rolled_mask = mask.gather(1, source)
    used = rolled_mask.bool().any(0)
    width = int(used.sum()) if length == 0 else _used_width(used, keep)
    columns = slice(0, width) if keep == "left" else slice(length - width, length)
    rolled = [rolled_mask[:, columns]]
    for tensor in tensors:
        index = source[:, columns].reshape(*source[:, columns].shape, *(1,) * (tensor.dim() - 2))
        rolled.append(tensor.gather(1, index.expand(-1, -1, *tensor.shape[2:])))
    return rolled[0] if not tensors else tuple(rolled)


def _used_width(used: Tensor, keep: str) -> int:
    """Return how many columns reach from the kept side to the farthest used one."""
    columns = used.nonzero().flatten()
    if columns.numel() == 0:
        return 0
    return int(columns[-1]) + 1 if keep == "left" else used.numel() - int(columns[0])
