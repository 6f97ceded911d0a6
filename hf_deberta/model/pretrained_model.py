"""`HfDebertaPreTrainedModel`: how every `HfDeberta` class is initialized, loaded and saved."""

import errno
import json
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from traceback import walk_tb
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from .attention import check_attention_name
from .attention_auto import AUTO
from .checkpoint_conversion import register_conversions
from .configuration_hf_deberta import HfDebertaConfig, check_path
from .hub_export import AUTO_MAP, upload, write_code, write_model_card
from .peft_targets import register_default_targets

HUB_ARGUMENTS = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")

# a checkpoint whose weights are smaller than this is not the model that its configuration describes
LARGE_MODEL = 10**8  # parameters; below, the mismatch is reported tensor by tensor
MIN_BYTES_PER_PARAMETER = 0.1  # weights of 1 bit have 0.125
WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")
INDEX_FILES = ("*.safetensors.index*.json", "*.bin.index*.json")


class HfDebertaPreTrainedModel(PreTrainedModel):
    """Base class of every `HfDeberta` model.

    `from_pretrained` reads checkpoints of this package, of Transformers' `deberta` and `deberta-v2`, and the official
    releases. `save_pretrained` always writes the names of this package; `export_to_transformers` converts back.
    """

    config: HfDebertaConfig
    config_class = HfDebertaConfig
    base_model_prefix = "deberta"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    accepts_loss_kwargs = True  # every loss of this package divides by num_items_in_batch
    _no_split_modules = ["HfDebertaLayer"]  # not the embeddings: the decoder and the masked-LM head use them too
    # parts of a checkpoint that belong to another head
    _keys_to_ignore_on_load_unexpected: set[str] | list[str] | None = [
        r"lm_predictions\.",
        r"mask_predictions\.",
        r"cls\.predictions\.",
        r"position_embeddings\.",
        r"embeddings\._weight$",
        r"^config$",
    ]

    def __init__(self, config: HfDebertaConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        register_default_targets()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_buffers = getattr(module, "init_buffers", None)  # defined by modules with buffers that are not saved
        if callable(init_buffers):
            init_buffers()

    def ignore_on_load(self, *patterns: str) -> None:
        """Load checkpoints silently whose keys match the class's patterns or these; forget those of the encoder.

        Call it after `post_init`, which adds the patterns of the encoder to those of a head.
        """
        self._keys_to_ignore_on_load_unexpected = {*(type(self)._keys_to_ignore_on_load_unexpected or ()), *patterns}

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # Transformers searches the source for its own attention interface, which is not used here

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return the attention implementation to use: "auto", a backend, or a registered function."""
        if requested_attention is None:
            return AUTO
        check_attention_name(requested_attention)
        return requested_attention

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers; raises OSError for a file that is truncated, or that holds more than tensors.

        No code of the checkpoint runs, and no weights are read outside of its folder, except through symbolic links,
        of which the Hub's cache consists.
        """
        check_path(pretrained_model_name_or_path)  # before Transformers looks for an adapter there
        folder = Path(str(pretrained_model_name_or_path), kwargs.get("subfolder") or "")
        if folder.is_dir():
            check_json_files(folder)
            check_declared_size(folder, kwargs.get("config"))
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"{pretrained_model_name_or_path} has a truncated or corrupt .safetensors file ({error}); "
                "download or save it again"
            ) from error
        except (UnpicklingError, EOFError) as error:
            raise OSError(
                f"{pretrained_model_name_or_path} has a .bin file that is truncated or holds more than tensors, which "
                "could run code when loaded; use .safetensors weights, or convert the file where you trust it"
            ) from error
        except (RuntimeError, OSError) as error:
            is_system_error = isinstance(error, OSError) and error.errno != errno.EINVAL  # no permission, disk failure
            if is_system_error or not _was_raised_in(error, "torch.serialization"):
                raise
            raise OSError(
                f"{pretrained_model_name_or_path} has a truncated or corrupt .bin file; download it again"
            ) from error

    def save_pretrained(  # type: ignore[override]  # arguments after state_dict are passed on, by name
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        *,
        push_to_hub: bool = False,
        save_original_format: bool = False,
        **kwargs: Any,
    ) -> None:
        """As in Transformers; also writes the source files, `auto_map` and a model card, see `hub_export`."""
        hub_arguments = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
        token = hub_arguments.get("token")
        self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(
            save_directory,
            is_main_process,
            state_dict,
            save_original_format=save_original_format,
            token=token,
            **kwargs,
        )
        if not is_main_process:
            return
        if not getattr(self, "_hf_peft_config_loaded", False):  # an adapter is saved without the model's code
            write_code(save_directory)
            write_model_card(save_directory, type(self).__name__, self.config)
        if push_to_hub:
            upload(save_directory, hub_arguments.pop("repo_id", Path(save_directory).name), **hub_arguments)

    def push_to_hub(  # type: ignore[override]  # Transformers' other arguments are passed on, by name
        self, repo_id: str, *, max_shard_size: int | str = "50GB", **hub_arguments: Any
    ) -> str:
        """Upload the files that `save_pretrained` writes; keep the repository's model card if it has one.

        `hub_arguments` may be `commit_message`, `commit_description`, `private`, `token`, `revision`, `create_pr` and
        `tags`, as in Transformers.
        """
        with TemporaryDirectory() as folder:
            write_model_card(folder, type(self).__name__, self.config, name=repo_id)
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            return upload(folder, repo_id, **hub_arguments)


def check_json_files(folder: Path) -> None:
    """Raise OSError for an index of weights or a generation configuration that is damaged or names other folders."""
    indices = {path for pattern in INDEX_FILES for path in folder.glob(pattern)}
    for path in sorted({*indices, *folder.glob("generation_config.json")}):
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise OSError(f"{path} is not valid JSON ({error}); save the model again") from error
        if not isinstance(fields, dict):
            raise OSError(f"{path} must contain a JSON object, {{...}}, not {type(fields).__name__}")
        if path.name == "generation_config.json":
            continue
        shards = fields.get("weight_map")
        if not isinstance(shards, dict) or not shards or not isinstance(fields.get("metadata"), dict):
            raise OSError(f"{path} must have the objects metadata and weight_map, which names the file of each tensor")
        for shard in shards.values():
            if not isinstance(shard, str) or Path(shard).is_absolute() or ".." in Path(shard).parts:
                raise OSError(f"{path} must name files in its own folder, not {shard!r:.200}")


def check_declared_size(folder: Path, config: Any) -> None:
    """Raise OSError if a large model is declared and the weights hold a small part of it, before memory is taken."""
    if not isinstance(config, HfDebertaConfig):
        if not (folder / "config.json").is_file():
            return
        config = HfDebertaConfig.from_pretrained(folder)
    declared = config.approximate_parameters()
    size = sum(path.stat().st_size for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    if declared > LARGE_MODEL and 0 < size < declared * MIN_BYTES_PER_PARAMETER:
        raise OSError(
            f"the configuration of {folder} describes a model of {declared:,} parameters, and its weights are a file "
            f"of {size:,} bytes: one of the two is damaged"
        )


def _was_raised_in(error: Exception, module: str) -> bool:
    """True if a function of `module` is in the traceback of `error`."""
    return any(frame.f_globals.get("__name__") == module for frame, _ in walk_tb(error.__traceback__))


register_conversions()
