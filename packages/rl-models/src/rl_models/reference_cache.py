"""Reference log-probs on disk, found again by what they are of: weights, row and settings."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from rl_models.batch import CompletionBatch, SequenceBatch


class Scores(Protocol):
    """Anything with the references' `score`."""

    def score(self, batch: SequenceBatch | CompletionBatch, *, temperature: float = 1.0) -> Tensor:
        """Log-probs of the batch."""


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over names, shapes, types and values of all weights, and the model's class.

    A changed weight changes it; a name or a path does not enter.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(value.shape)} {value.dtype}".encode())
        flat = value.detach().cpu().contiguous().view(-1)
        digest.update(memoryview(flat.view(torch.uint8).numpy()) if len(flat) else b"")
    return digest.hexdigest()


class CachedReference:
    """A reference whose log-probs are kept in a file and computed once a row, over all runs.

    A row is known by its tokens, the tokens scored, the temperature, and the hash of the weights;
    so neither another order of the data nor another batch size misses, and no other model hits.
    The first batch that is found is computed all the same and compared.

    Args:
        reference: what scores the rows that are not there yet.
        path: an SQLite file, made when missing; several processes may share it.
        model: the model that the reference scores with, for `weights_hash`.
        tolerance: largest difference to the live log-probs on the batch that is checked.

    Raises:
        ValueError: on `score`, when kept and live log-probs differ by more than the tolerance.

    Example:
        >>> from rl_models import BaseReference
        >>> from rl_models.testing import tiny_model
        >>> model = tiny_model("llama")
        >>> batch = CompletionBatch.from_ids([[1, 2]], [[3, 4]], [0])
        >>> with CachedReference(BaseReference(model), ":memory:", model=model) as cached:
        ...     bool((cached.score(batch) == cached.score(batch)).all())
        True
    """

    def __init__(
        self,
        reference: Scores,
        path: str | os.PathLike[str],
        *,
        model: nn.Module,
        tolerance: float = 1e-3,
    ) -> None:
        self.reference = reference
        self.tolerance = tolerance
        self._weights = weights_hash(model)
        self._checked = False
        if str(path) != ":memory:":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(path, timeout=60)
        self._file.execute("create table if not exists logps (row text primary key, value blob)")

    def score(self, batch: SequenceBatch | CompletionBatch, *, temperature: float = 1.0) -> Tensor:
        """Log-probs of the batch, from the file where they are there."""
        scored = batch.score_mask if isinstance(batch, SequenceBatch) else batch.scored()
        keys = self._keys(batch, temperature)
        kept = {
            place: row for place, key in enumerate(keys) if (row := self._find(key)) is not None
        }
        missing = [place for place in range(len(keys)) if place not in kept]
        result = torch.zeros(scored.shape, device=scored.device)
        for place, row in kept.items():
            result[place, scored[place]] = row.to(scored.device)
        if kept and not self._checked:
            rows = torch.tensor(list(kept), device=scored.device)
            self._check(batch.rows(rows), result[rows], temperature)
        if missing:
            rows = torch.tensor(missing, device=scored.device)
            live = self.reference.score(batch.rows(rows), temperature=temperature)
            result[rows, : live.shape[1]] = live
            self._keep([(keys[p], result[p][scored[p]]) for p in missing])
        return result

    def close(self) -> None:
        """Close the file; also done on leaving a `with` block."""
        self._file.close()

    def __enter__(self) -> CachedReference:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keys(self, batch: SequenceBatch | CompletionBatch, temperature: float) -> list[str]:
        rows = batch if isinstance(batch, SequenceBatch) else batch.as_sequences()
        columns = zip(
            rows.input_ids, rows.score_mask, rows.positions(), rows.attended(), strict=True
        )
        device = rows.input_ids.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        settings = f"{self._weights} {float(temperature)} {autocast} "
        return [
            hashlib.sha256(
                (settings + str([x[real].tolist() for x in (ids, mask, places)])).encode()
            ).hexdigest()
            for ids, mask, places, real in columns
        ]

    def _find(self, key: str) -> Tensor | None:
        row = self._file.execute("select value from logps where row = ?", (key,)).fetchone()
        return (
            None
            if row is None
            else torch.frombuffer(bytearray(row[0]), dtype=torch.float32)
            if row[0]
            else torch.empty(0)
        )

    def _keep(self, rows: list[tuple[str, Tensor]]) -> None:
        values = [(key, value.float().cpu().numpy().tobytes()) for key, value in rows]
        with self._file:
            self._file.executemany("insert or replace into logps values (?, ?)", values)

    def _check(
        self, batch: SequenceBatch | CompletionBatch, kept: Tensor, temperature: float
    ) -> None:
        live = self.reference.score(batch, temperature=temperature)
        difference = float((live - kept[:, : live.shape[1]]).abs().max())
        if not difference <= self.tolerance:
            raise ValueError(
                f"kept reference log-probs differ from live ones by {difference:.2g} (at most "
                f"{self.tolerance:g} wanted): the reference is not the model they were kept for, "
                "or computes otherwise now; give another path or delete the file"
            )
        self._checked = True
