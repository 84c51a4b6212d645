"""Best-fit packing of a million rows: seconds for the plan and a dataset, and how full packs are.

Run: python packages/rl-data/benchmarks/packing.py [rows] [pack length]
"""

import sys
import time

import numpy as np
import pyarrow as pa
from datasets import Dataset

from rl_data import pack_dataset
from rl_data.packing import best_fit_decreasing


def log_normal_lengths(rows, capacity, seed=0):
    """Lengths as chat data has them: median 200 tokens, a long tail, cut at the capacity."""
    draws = np.random.default_rng(seed).lognormal(mean=np.log(200), sigma=1.0, size=rows)
    return np.clip(draws.astype(np.int64), 1, capacity)


def token_dataset(lengths):
    """Rows of zeros of the given lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = pa.LargeListArray.from_arrays(
        pa.array(offsets), pa.array(np.zeros(offsets[-1], dtype=np.int64))
    )
    return Dataset(pa.table({"input_ids": ids.cast(pa.large_list(pa.int64()))}))


def main():
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    capacity = int(sys.argv[2]) if len(sys.argv) > 2 else 2048
    lengths = log_normal_lengths(rows, capacity)
    begin = time.perf_counter()
    bins = best_fit_decreasing(lengths, capacity)
    seconds = time.perf_counter() - begin
    fill = lengths.sum() / (len(bins) * capacity)
    print(
        f"plan: {rows:,} rows into {len(bins):,} packs of {capacity:,}: {seconds:.2f} s, "
        f"{fill:.2%} full"
    )

    part = min(rows, 50_000)
    dataset = token_dataset(lengths[:part])
    for strategy in ("bfd", "bfd_split", "wrapped"):
        begin = time.perf_counter()
        packed = pack_dataset(dataset, capacity, strategy, {"load_from_cache_file": False})
        seconds = time.perf_counter() - begin
        fill = lengths[:part].sum() / (len(packed) * capacity)
        print(
            f"{strategy}: {part:,} rows, {lengths[:part].sum():,} tokens: {seconds:.2f} s, "
            f"{fill:.2%} full"
        )


if __name__ == "__main__":
    main()
