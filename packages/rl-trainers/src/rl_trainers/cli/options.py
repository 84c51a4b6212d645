"""Options of a command: a config file first, then flags over it, unknown names refused."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from transformers import HfArgumentParser

Config = TypeVar("Config")


@dataclass
class RunOptions:
    """What a command needs besides the trainer's config."""

    model: str = field(
        default="", metadata={"help": "Model: a Hub name, a folder or a .gguf file."}
    )
    dataset: str = field(
        default="",
        metadata={
            "help": "Rows: a .jsonl or .parquet file, a folder saved by datasets, or a Hub name."
        },
    )
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str = field(default="", metadata={"help": "Split to evaluate on; none by default."})
    traceback: bool = field(default=False, metadata={"help": "Show the traceback of an error."})


class _Parser(HfArgumentParser):
    """Raises instead of printing the usage of two hundred options and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(
    command: str, config: type[Config], arguments: Sequence[str]
) -> tuple[RunOptions, Config]:
    """Read ``arguments`` (and the file that ``--config`` names) into the two dataclasses.

    Raises:
        ValueError: an unknown name (the nearest one is suggested), a value of the wrong type, or
            no model or dataset.
    """
    file, flags = _split_config(list(arguments))
    kinds: list[Any] = [RunOptions, config]
    parser = _Parser(kinds, prog=f"rl-train {command}", allow_abbrev=False)
    known = {f.name for kind in kinds for f in fields(kind) if f.init}
    values = _read_config(file) if file else {}
    _refuse_unknown(values, known, where=str(file))
    # A default that came from the file is overwritten by a flag and by nothing else.
    parser.set_defaults(**values)
    options, parsed, unknown = parser.parse_args_into_dataclasses(
        args=flags, return_remaining_strings=True, look_for_args_file=False
    )
    _refuse_unknown([u.lstrip("-").split("=")[0] for u in unknown if u.startswith("-")], known)
    if unknown:
        raise ValueError(f"{unknown[0]!r} belongs to no option: write --name value")
    for name in ("model", "dataset"):
        if not getattr(options, name):
            raise ValueError(f"no {name} was given: add --{name} (rl-train {command} --help)")
    return options, parsed


def load_rows(options: RunOptions) -> tuple[Any, Any | None]:
    """The training rows, and the evaluation rows where a split was named.

    Raises:
        ValueError: the source cannot be read, or lacks the split.
    """
    return _rows(options.dataset, options.dataset_split), (
        _rows(options.dataset, options.eval_split) if options.eval_split else None
    )


def _rows(source: str, split: str) -> Any:
    import datasets

    path = Path(source)
    readers = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
    try:
        if path.suffix in readers:
            if not path.is_file():
                raise ValueError(f"there is no file {source!r}")
            kind = readers[path.suffix]
            loaded = datasets.load_dataset(kind, data_files={split: str(path)})
        elif path.is_dir() and any(path.glob("*.arrow")):
            return datasets.load_from_disk(str(path))
        elif path.is_dir() and (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(source)
    except (OSError, ValueError, datasets.exceptions.DatasetsError, ConnectionError) as error:
        raise ValueError(f"cannot read the dataset {source!r}: {_first_line(error)}") from error
    if split not in loaded:
        raise ValueError(f"dataset {source!r} has no split {split!r}, only {list(loaded)}")
    return loaded[split]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _split_config(arguments: list[str]) -> tuple[Path | None, list[str]]:
    for i, argument in enumerate(arguments):
        if argument == "--config":
            if i + 1 == len(arguments):
                raise ValueError("--config needs the path of a .yaml, .toml or .json file")
            return Path(arguments[i + 1]), arguments[:i] + arguments[i + 2 :]
        if argument.startswith("--config="):
            path = Path(argument.removeprefix("--config="))
            return path, arguments[:i] + arguments[i + 1 :]
    return None, arguments


def _read_config(path: Path) -> dict[str, Any]:
    readers: dict[str, Callable[[str], Any]] = {
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
        ".toml": tomllib.loads,
        ".json": json.loads,
    }
    if path.suffix not in readers:
        raise ValueError(f"config {path}: wanted a .yaml, .toml or .json file")
    if not path.is_file():
        raise ValueError(f"config {path}: there is no such file")
    try:
        values = readers[path.suffix](path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"config {path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"config {path}: wanted 'name: value' lines, got {type(values).__name__}")
    return values


def _refuse_unknown(names: Any, known: set[str], *, where: str = "the command line") -> None:
    for name in names:
        if name.replace("-", "_") not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where} has an unknown option {name!r}{hint}")
