"""A causal language model with something of ours on top, saved beside it and loaded with it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_models.adapters import is_peft
from rl_models.heads import unwrap
from rl_models.load import ModelLoadError, load_causal_lm, need_extra


class PreTrainedModelWrapper(nn.Module):
    """A causal language model and a part of ours on its hidden states, saved and loaded together.

    A subclass makes its part in `__init__`, names its attribute in `part_name`, and gives
    `forward`. What is not found on the wrapper is looked up on the model, so `config`,
    `generation_config`, `gradient_checkpointing_enable` and the like are the model's.

    The folder that `save_pretrained` writes is the model's own (plain transformers load it), with
    the part in one more safetensors file, its keys under `<part_name>.`.
    """

    pretrained_model: Any
    part_name: ClassVar[str]
    part_options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, pretrained_model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "pretrained_model":
                raise
            return getattr(super().__getattr__("pretrained_model"), name)

    @property
    def is_peft_model(self) -> bool:
        """Whether the wrapped model carries adapters."""
        return is_peft(self.pretrained_model)

    @classmethod
    def from_pretrained(
        cls,
        name_or_model: str | os.PathLike[str] | nn.Module,
        *,
        peft_config: Any = None,
        is_trainable: bool = True,
        **options: Any,
    ) -> Any:
        """Load the model and its part, or wrap a model that is already there with a new part.

        Args:
            name_or_model: what `save_pretrained` wrote (also with adapters), any name that
                `load_causal_lm` takes, or a model object.
            peft_config: put a new adapter of this configuration on the model.
            is_trainable: of an adapter that is loaded.
            options: of the part (see the subclass) and of `load_causal_lm`.

        Raises:
            ModelLoadError: as `load_causal_lm`, and for a folder without the part, unless a new one
                is asked for (`new_<part_name>=True`).
        """
        new_part = options.pop(f"new_{cls.part_name}", False)
        mine = {name: options.pop(name) for name in cls.part_options if name in options}
        if isinstance(name_or_model, nn.Module):
            if options:
                raise TypeError(f"{', '.join(options)}: a model object is taken as it is loaded")
            return cls(_with_adapter(name_or_model, peft_config), **mine)
        state = None if new_part else cls._read_part(Path(name_or_model))
        model = _load_model(name_or_model, is_trainable, options)
        wrapper = cls(_with_adapter(model, peft_config), **mine)
        if state is not None:
            part = getattr(wrapper, cls.part_name)
            part.to(next(iter(state.values())).dtype).load_state_dict(state, strict=True)
        return wrapper

    @classmethod
    def _read_part(cls, folder: Path) -> dict[str, Tensor]:
        """The part's weights: from its own file, or where others keep it, among the model's."""
        prefix = f"{cls.part_name}."
        own = folder / f"{cls.part_name}.safetensors"
        for file in [own, *sorted(folder.glob("*.safetensors"))]:
            if file.exists():
                state = {k: v for k, v in load_file(file).items() if k.startswith(prefix)}
                if state:
                    return {key.removeprefix(prefix): value for key, value in state.items()}
        raise ModelLoadError(
            f"{folder} holds no {cls.part_name} (no key {prefix}* in its safetensors files); "
            f"pass new_{cls.part_name}=True to start with a new one"
        )

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Write the model as transformers (or PEFT) do, and the part in a file of its own.

        Args:
            save_directory: a folder, made when missing.
            options: of the model's `save_pretrained`, such as `max_shard_size`.
        """
        state = options.pop("state_dict", None)
        if state is not None:
            prefix = "pretrained_model."
            options["state_dict"] = {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix)
            }
        self.pretrained_model.save_pretrained(save_directory, **options)
        part = getattr(self, self.part_name).state_dict()
        tensors = {f"{self.part_name}.{k}": v.detach().cpu().contiguous() for k, v in part.items()}
        file = Path(save_directory) / f"{self.part_name}.safetensors"
        partial = file.with_suffix(".partial")
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.replace(file)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        **options: Any,
    ) -> str:
        """Upload what `save_pretrained` writes; the repository is made when it is missing.

        Args:
            repo_id: `owner/name`.
            commit_message: "Upload <class>" by default.
            private: whether a new repository is.
            token: as in huggingface_hub.
            revision: branch to upload to.
            create_pr: open a pull request instead.
            options: of `save_pretrained`.

        Returns:
            The address of the commit.
        """
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, **options)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {type(self).__name__}",
                revision=revision,
                create_pr=create_pr,
            )
        return str(commit)

    def generate(self, *args: Any, **options: Any) -> Any:
        """The model's `generate`."""
        return self.pretrained_model.generate(*args, **options)

    def hidden_size(self) -> int:
        """Width of the model's hidden states."""
        return unwrap(self.pretrained_model).config.get_text_config().hidden_size


def _with_adapter(model: nn.Module, peft_config: Any) -> nn.Module:
    if peft_config is None:
        return model
    need_extra("peft", "adapters", "peft")
    from peft import get_peft_model

    return get_peft_model(model, peft_config)


def _load_model(
    name: str | os.PathLike[str], is_trainable: bool, options: dict[str, Any]
) -> PreTrainedModel | nn.Module:
    if not (Path(name) / "adapter_config.json").exists():
        return load_causal_lm(name, **options)
    need_extra("peft", "adapters", "peft")
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(os.fspath(name)).base_model_name_or_path
    if not base:
        raise ModelLoadError(
            f"{name} does not say which model its adapter belongs to (base_model_name_or_path); "
            "load that model, put the adapter on it with peft, and wrap the result"
        )
    model = load_causal_lm(base, **options)
    return PeftModel.from_pretrained(model, os.fspath(name), is_trainable=is_trainable)
