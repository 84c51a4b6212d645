"""Loading models and tokenizers: Hub name, folder or GGUF file; one clear error each, no pickle."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


class ModelLoadError(RuntimeError):
    """A model or tokenizer that cannot be loaded; the message is one line that says what to do."""


def load_causal_lm(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = torch.float32,
    attn_implementation: str | None = None,
    quantization: str | None = None,
    trust_remote_code: bool = False,
    device_map: Any = None,
    revision: str | None = None,
) -> PreTrainedModel:
    """Load a causal language model whose every weight comes from the files.

    Args:
        name_or_path: a Hub name, a folder, a `.gguf` file, or a folder with exactly one of these
            and no `config.json`. GGUF weights are dequantised, so the model trains and saves.
        dtype: of the weights; "auto" takes the checkpoint's. The default float32 is the one to
            train in: bf16 weights round most updates of a small learning rate away (compute in
            bf16 through autocast).
        attn_implementation: as in transformers; None lets it choose.
        quantization: None, "8bit", or "4bit" (NF4, double quantised; not on the CPU) through
            bitsandbytes.
        trust_remote_code: run the model code in the repository; off unless you have read it.
        device_map: as in transformers.
        revision: branch, tag or commit on the Hub.

    Raises:
        ModelLoadError: no such folder or name, only pickled weights, a cut or corrupt safetensors
            file, weights that the model needs and the files lack, or a missing extra.

    Example:
        >>> model = load_causal_lm("path/to/folder")  # doctest: +SKIP
    """
    path = _local_path(name_or_path)
    arguments: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    optional = {
        "attn_implementation": attn_implementation,
        "device_map": device_map,
        "revision": revision,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    if (gguf := _gguf_file(path)) is not None:
        source = str(gguf.parent)
        arguments |= _gguf_arguments(gguf, quantization)
    else:
        source = str(path or name_or_path)
        arguments["use_safetensors"] = True
        if path is not None:
            check_weight_files(path)
        if quantization is not None:
            arguments["quantization_config"] = _bitsandbytes_config(quantization, dtype)
    with _one_clear_error(source):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, **arguments
        )
    model, info = loaded
    _refuse_invented_weights(source, info)
    _align(model)
    return model


def load_tokenizer(
    name_or_path: str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hub name, a folder or a GGUF file (path rules of `load_causal_lm`).

    Nothing is changed in it: no pad token is invented, since masks come from lengths here.

    Raises:
        ModelLoadError: no such folder or name, or no tokenizer in it.

    Example:
        >>> tokenizer = load_tokenizer("path/to/folder")  # doctest: +SKIP
    """
    path = _local_path(name_or_path)
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        arguments["revision"] = revision
    if (gguf := _gguf_file(path)) is not None:
        need_extra("gguf", "GGUF files", "gguf")
        arguments["gguf_file"] = gguf.name
        path = gguf.parent
    source = str(path or name_or_path)
    with _one_clear_error(source):
        return AutoTokenizer.from_pretrained(source, **arguments)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Refuse a tokenizer whose ids the model has no embedding for.

    A model may have more rows than the tokenizer has tokens (they are padded to round sizes).

    Raises:
        ModelLoadError: the tokenizer's highest id is past the last row of the embedding.
    """
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= rows:
        raise ModelLoadError(
            f"the tokenizer's ids go up to {highest}, but the model embeds {rows} tokens; take the "
            f"model's own tokenizer, or call model.resize_token_embeddings({highest + 1})"
        )


def _local_path(name_or_path: str | os.PathLike[str]) -> Path | None:
    """The path when there is one; None for a Hub name; an error for a path that is not there."""
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    is_path = (
        isinstance(name_or_path, Path)
        or not text
        or text.startswith(("/", ".", "~"))
        or text.endswith(("/", ".gguf"))
        or text.count("/") > 1
        or "\\" in text
        # "runs/model" where there is a folder "runs": meant as a path, and no Hub name to wait for.
        or (text.count("/") == 1 and path.parent.is_dir())
    )
    if is_path:
        raise ModelLoadError(
            f"there is no file or folder {text!r}; check the path, or give a Hub name (owner/name)"
        )
    return None


def _gguf_file(path: Path | None) -> Path | None:
    if path is None:
        return None
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelLoadError(
            f"{path} is a file, but not a .gguf one; give the folder that the model is in"
        )
    if (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelLoadError(f"{path} holds several GGUF files ({names}); give the path of one")
    return files[0] if files else None


def _gguf_arguments(gguf: Path, quantization: str | None) -> dict[str, Any]:
    need_extra("gguf", "GGUF files", "gguf")
    if quantization is not None:
        raise ModelLoadError(
            f"quantization={quantization!r} with a GGUF file, which is dequantised to train; "
            "save the loaded model as safetensors and load that folder with quantization"
        )
    arguments: dict[str, Any] = {"gguf_file": gguf.name}
    if hasattr(transformers, "GgufConfig"):
        # Newer versions keep the blocks packed unless told otherwise, and then refuse to save.
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return arguments


def _bitsandbytes_config(quantization: str, dtype: torch.dtype | str) -> Any:
    if quantization not in ("4bit", "8bit"):
        raise ModelLoadError(f"quantization={quantization!r}; wanted None, '4bit' or '8bit'")
    need_extra("bitsandbytes", f"quantization={quantization!r}", "bitsandbytes")
    if quantization == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    if not torch.accelerator.is_available():
        # On CPUs with AVX512-BF16 bitsandbytes packs 4-bit weights for good in the first forward
        # without gradients, and training afterwards gets none, without an error.
        raise ModelLoadError(
            "quantization='4bit' on the CPU loses gradients after a forward in eval mode; "
            "use a GPU, or quantization='8bit' or None"
        )
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else dtype,
    )


def need_extra(module: str, what: str, extra: str) -> None:
    """Refuse with the command that installs a missing optional dependency.

    Raises:
        ModelLoadError: `module` is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise ModelLoadError(
            f"{what} need the package {module}, which is not installed; "
            f"run: pip install 'rl-models[{extra}]'"
        )


def check_weight_files(folder: Path) -> None:
    """Refuse a folder whose weights are pickled, missing, cut or corrupt, naming the file.

    Raises:
        ModelLoadError: as said.
    """
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{file} is cut or corrupt ({error}); copy or download it again"
            ) from error
    for index in folder.glob("*.safetensors.index.json"):
        wanted = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(wanted - {file.name for file in files}):
            raise ModelLoadError(
                f"{folder} lacks {', '.join(missing)}, which {index.name} lists; copy it there"
            )
    if not files:
        pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        seen = f"only pickled weights ({pickles[0].name})" if pickles else "no weights"
        raise ModelLoadError(
            f"{folder} holds {seen}; wanted *.safetensors or a *.gguf file "
            "(pickles can run code and are never loaded)"
        )


@contextmanager
def _one_clear_error(source: str) -> Iterator[None]:
    """Turn what a loader raises into one line that names the source."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError, RuntimeError, ImportError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        where = "" if Path(source).exists() else " (no such folder here, so taken as a Hub name)"
        raise ModelLoadError(f"cannot load {source!r}{where}: {message}") from error


def _align(model: PreTrainedModel) -> None:
    """Copy weights that stand in the file's memory map at odd addresses into memory of their own.

    Matrix products round differently there, so the same weights would score differently after
    saving and loading; and a file that is overwritten in training would change them.
    """
    for value in (*model.parameters(), *model.buffers()):
        if value.device.type == "cpu" and value.is_floating_point() and value.data_ptr() % 64:
            value.data = value.data.clone()


def _refuse_invented_weights(source: str, info: dict[str, Any]) -> None:
    """Missing weights would be filled with random numbers; that is an error, not a warning."""
    missing = sorted(info.get("missing_keys", ()))
    mismatched = sorted(str(key) for key in info.get("mismatched_keys", ()))
    if missing or mismatched:
        names = (missing + mismatched)[:3]
        raise ModelLoadError(
            f"{source!r} lacks {len(missing)} weights that its config needs and has "
            f"{len(mismatched)} of another shape ({', '.join(names)}, ...); "
            "config and weights are of different models"
        )
