"""Several samples in one row: best-fit packing, with every per-token column carried along."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray

Strategy = Literal["bfd", "bfd_split", "wrapped"]
STRATEGIES = ("bfd", "bfd_split", "wrapped")
WINDOW = 10_000
Ints = NDArray[np.int64]

logger = logging.getLogger(__name__)


class Pieces(NamedTuple):
    """Slices of a flat token array, in the order in which they are packed.

    Attributes:
        starts: first token of each piece, ``[P]``.
        lengths: tokens in each piece, ``[P]``.
        packs: which pack each piece belongs to, never decreasing, ``[P]``.
    """

    starts: Ints
    lengths: Ints
    packs: Ints


def best_fit_decreasing(lengths: Sequence[int] | Ints, capacity: int) -> list[Ints]:
    """Bins of item indices: each item, longest first, goes where it leaves the least room.

    The room left in a bin is a whole number up to ``capacity``, so bins are kept by it, and items
    of one length are placed together; the time is that of sorting the items plus one step for each
    bin touched.

    Args:
        lengths: length of each item, from 1 to ``capacity``.
        capacity: room of a bin.

    Returns:
        For each bin the indices of its items; bins are in the order of their earliest item.

    Raises:
        ValueError: an item is longer than the capacity, or not positive.

    Reference:
        D. S. Johnson, "Near-optimal bin packing algorithms", MIT thesis, 1973.

    Example:
        >>> [bin.tolist() for bin in best_fit_decreasing([4, 2, 3, 1, 2], capacity=4)]
        [[0], [1, 4], [2, 3]]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size == 0:
        return []
    if sizes.min() < 1 or sizes.max() > capacity:
        raise ValueError(
            f"lengths from {sizes.min()} to {sizes.max()}: want 1 to the capacity {capacity}"
        )
    order = np.argsort(-sizes, kind="stable")
    bin_of = _assign(sizes[order], capacity)
    # Items of a bin together, in their own order; bins by their earliest item.
    assigned = np.empty_like(bin_of)
    assigned[order] = bin_of
    by_bin = np.argsort(assigned, kind="stable")
    bounds = np.flatnonzero(np.diff(assigned[by_bin])) + 1
    bins = np.split(by_bin, bounds)
    return [bins[k] for k in np.argsort([b[0] for b in bins], kind="stable")]


def _assign(sizes: Ints, capacity: int) -> Ints:
    """Bin of each item; ``sizes`` must be descending."""
    bin_of = np.empty(len(sizes), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    occupied = 0  # bit r is set while some bin has room r
    count = 0
    edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    for begin, stop in pairwise(edges):
        size = int(sizes[begin])
        item = begin
        while item < stop:
            above = occupied >> size
            if above:
                room = size + (above & -above).bit_length() - 1
                bins = with_room[room]
                target = bins.pop()
                if not bins:
                    occupied ^= 1 << room
            else:
                room, target = capacity, count
                count += 1
            # Once an item is in, the same bin is the best fit for the next of this size.
            fits = min(room // size, stop - item)
            bin_of[item : item + fits] = target
            item += fits
            room -= fits * size
            if room:
                with_room[room].append(target)
                occupied |= 1 << room
    return bin_of


def plan_packs(lengths: Sequence[int] | Ints, seq_length: int, strategy: Strategy) -> Pieces:
    """Which tokens go where, from the lengths of the samples alone.

    Args:
        lengths: tokens of each sample; the samples lie one after the other in a flat array.
        seq_length: most tokens in a pack.
        strategy: ``bfd`` keeps the first ``seq_length`` tokens of a longer sample; ``bfd_split``
            cuts it into several and keeps them all; ``wrapped`` fills each pack to the brim and
            goes on in the next.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    if strategy == "wrapped":
        return _plan_wrapped(offsets, seq_length)
    if strategy == "bfd":
        starts, pieces = offsets[:-1], np.minimum(sizes, seq_length)
    else:
        counts = -(-sizes // seq_length)
        owner = np.repeat(np.arange(len(sizes)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = offsets[owner] + within * seq_length
        pieces = np.minimum(seq_length, offsets[owner + 1] - starts)
    keep = pieces > 0
    starts, pieces = starts[keep], pieces[keep]
    bins = best_fit_decreasing(pieces, seq_length)
    if not bins:
        empty = np.zeros(0, dtype=np.int64)
        return Pieces(empty, empty, empty)
    order = np.concatenate(bins)
    packs = np.repeat(np.arange(len(bins)), [len(b) for b in bins])
    return Pieces(starts[order], pieces[order], packs)


def _plan_wrapped(offsets: Ints, seq_length: int) -> Pieces:
    total = int(offsets[-1])
    edges = np.union1d(offsets, np.arange(0, total, seq_length))
    starts = edges[:-1]
    return Pieces(starts, np.diff(edges), starts // seq_length)


def pack_dataset(
    dataset: Dataset | IterableDataset,
    seq_length: int,
    strategy: Strategy = "bfd",
    map_kwargs: Mapping[str, Any] | None = None,
    *,
    window: int = WINDOW,
    untrain_first: bool = False,
) -> Any:
    """Pack the samples of a tokenised dataset into rows of at most ``seq_length`` tokens.

    Every column of lists as long as ``input_ids`` (masks, labels) is packed with it; other columns
    are left out. Added are ``position_ids``, 0 at the first token of each sample, and
    ``seq_lengths``, the samples' lengths. A sample that is split goes on at position 0, as
    attention does not reach its first part. Samples are packed within windows of ``window`` rows;
    the last pack of a window may be short.

    Args:
        dataset: map-style or streaming, with ``input_ids``.
        seq_length: most tokens in a pack.
        strategy: see `plan_packs`. With ``bfd`` the tokens lost are counted in the log.
        map_kwargs: for ``dataset.map``, e.g. ``num_proc``.
        window: rows that are packed together.
        untrain_first: set ``loss_mask`` to 0 on the first token of each piece, which nothing in its
            pack predicts.

    Raises:
        ValueError: unknown strategy, ``seq_length`` below 1, or no ``input_ids``.

    Example:
        >>> from datasets import Dataset
        >>> rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
        >>> pack_dataset(rows, 4)["input_ids"][:]
        [[1, 2, 3, 6], [4, 5]]
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: want one of {STRATEGIES}")
    if seq_length < 1:
        raise ValueError(f"seq_length={seq_length}: want at least 1")
    names = column_names(dataset)
    if "input_ids" not in names:
        raise ValueError(
            f"columns {names}: want 'input_ids'; tokenise the dataset before packing it"
        )
    step = _PackStep(seq_length, strategy, untrain_first)
    options: dict[str, Any] = dict(map_kwargs or {})
    if isinstance(dataset, IterableDataset):
        return dataset.map(
            step.on_lists, batched=True, batch_size=window, remove_columns=names, **options
        )
    if strategy == "bfd":
        _log_cut(dataset, seq_length)
    options.setdefault("desc", "Packing")
    packed = dataset.with_format("arrow").map(
        step, batched=True, batch_size=window, remove_columns=names, **options
    )
    return packed.with_format(None)


def column_names(dataset: Any) -> list[str]:
    """Columns of a dataset; a streaming one that does not know them is asked for its first row."""
    names = dataset.column_names
    if names is None:
        first = next(iter(dataset), None)
        names = list(first) if first is not None else []
    return list(names)


def token_counts(dataset: Dataset, column: str = "input_ids") -> Ints:
    """Length of each row's list, read without making Python lists."""
    table = dataset.with_format("arrow")
    counts = [
        table[k : k + WINDOW].column(column).combine_chunks()
        for k in range(0, len(dataset), WINDOW)
    ]
    if not counts:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.diff(_flat(c)[1]) for c in counts])


def _log_cut(dataset: Dataset, seq_length: int) -> None:
    lost = np.maximum(token_counts(dataset) - seq_length, 0)
    if lost.any():
        logger.warning(
            "packing 'bfd' cut %d rows to %d tokens and lost %d tokens; 'bfd_split' and 'wrapped' "
            "lose none",
            int((lost > 0).sum()), seq_length, int(lost.sum()),
        )  # fmt: skip


class _PackStep:
    """One window of rows to packs; a plain object, so that its hash is the same in every run."""

    def __init__(self, seq_length: int, strategy: Strategy, untrain_first: bool) -> None:
        self.seq_length = seq_length
        self.strategy = strategy
        self.untrain_first = untrain_first

    def on_lists(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """The same for a batch of Python lists, as streaming datasets give it."""
        return self(
            pa.table({name: pa.array(values) for name, values in batch.items()})
        ).to_pydict()

    def __call__(self, table: pa.Table) -> pa.Table:
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        _, offsets = _flat(columns["input_ids"])
        pieces = plan_packs(np.diff(offsets), self.seq_length, self.strategy)
        gather, bounds = _gather(pieces)
        out: dict[str, pa.Array] = {}
        for name, column in columns.items():
            # only lists that lie along the tokens can be packed with them
            if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
                continue
            flat, own = _flat(column)
            if np.array_equal(own, offsets) and flat.dtype != object:
                out[name] = _as_lists(flat[gather], bounds, column.type.value_type)
        positions = np.arange(len(gather)) - np.repeat(
            np.cumsum(pieces.lengths) - pieces.lengths, pieces.lengths
        )
        if self.untrain_first and "loss_mask" in out:
            mask, _ = _flat(out["loss_mask"])
            out["loss_mask"] = _as_lists(np.where(positions == 0, 0, mask), bounds, pa.int64())
        out["position_ids"] = _as_lists(positions, bounds, pa.int64())
        first_piece = np.searchsorted(pieces.packs, np.arange(len(bounds)))
        out["seq_lengths"] = _as_lists(pieces.lengths, first_piece, pa.int64())
        return pa.table(out)


def _gather(pieces: Pieces) -> tuple[Ints, Ints]:
    """Places of the packed tokens in the flat array, and where each pack begins among them."""
    ends = np.cumsum(pieces.lengths)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(
        ends - pieces.lengths, pieces.lengths
    )
    gather = np.repeat(pieces.starts, pieces.lengths) + within
    count = int(pieces.packs[-1]) + 1 if len(pieces.packs) else 0
    sizes = np.bincount(pieces.packs, weights=pieces.lengths, minlength=count).astype(np.int64)
    return gather, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _flat(column: Any) -> tuple[NDArray[Any], Ints]:
    """Values and offsets of a list column; a null row is an empty one."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    lengths = pa.compute.fill_null(pa.compute.list_value_length(column), 0)
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), offsets


def _as_lists(values: NDArray[Any], bounds: Ints, kind: pa.DataType) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(bounds, pa.int64()), pa.array(values, kind)).cast(
        pa.list_(kind)
    )
