"""Writing a tokenizer beside a model so that a folder's own files stay what they were."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rl_models.load import load_tokenizer

# What any tokenizer may have besides the files that it names itself.
_COMMON = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
# Left behind in the backend by the last call with padding or truncation; not part of what it is.
_LAST_CALL = ("padding", "truncation")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike[str]) -> bool:
    """Write the tokenizer's files into a folder, the original bytes when nothing was changed.

    Saving anew reorders keys, drops comments, and keeps the padding of the last call; files that
    came from a folder and mean the same are therefore copied instead.

    Args:
        tokenizer: the tokenizer; its `name_or_path` says where it came from.
        folder: where to write, made when missing.

    Returns:
        Whether the original files were copied (False: the tokenizer was changed, or did not come
        from a folder, and was saved anew).

    Example:
        >>> import tempfile
        >>> from rl_models.testing import tiny_tokenizer
        >>> save_tokenizer(tiny_tokenizer(), tempfile.mkdtemp())
        False
    """
    source, target = Path(tokenizer.name_or_path or ""), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if not tokenizer.name_or_path or not source.is_dir() or not _unchanged(tokenizer, source):
        tokenizer.save_pretrained(target)
        return False
    for name in {*_COMMON, *tokenizer.vocab_files_names.values()}:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)
        elif (source / name).exists() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    return True


def _unchanged(tokenizer: PreTrainedTokenizerBase, source: Path) -> bool:
    """Whether the tokenizer, saved anew, is the one in the folder, saved anew."""
    if (source / "tokenizer_config.json").exists():
        return _saved(tokenizer) == _saved(load_tokenizer(source))
    return False  # a GGUF file holds its tokenizer, and has no files to copy


def _saved(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files: dict[str, object] = {
            str(file.relative_to(folder)): file.read_bytes()
            for file in Path(folder).rglob("*")
            if file.is_file()
        }
    if "tokenizer.json" in files:
        backend = json.loads(files["tokenizer.json"])  # type: ignore[arg-type]
        files["tokenizer.json"] = {k: v for k, v in backend.items() if k not in _LAST_CALL}
    return files
