"""Load, save and initialize: the base class of every `HfDeberta` model."""

from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from .checkpoint_conversion import register_conversions
from .configuration_hf_deberta import HfDebertaConfig
from .hub_export import AUTO_MAP, upload, write_code, write_model_card

HUB_ARGUMENTS = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


class HfDebertaPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialising, for every `HfDeberta` class.

    `from_pretrained` reads our checkpoints, in-tree `deberta` and `deberta-v2` ones, and the official releases.
    `save_pretrained` always writes our names; see `export_to_transformers` for the way back.
    """

    config: HfDebertaConfig
    config_class = HfDebertaConfig
    base_model_prefix = "deberta"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    accepts_loss_kwargs = True  # every loss here divides by num_items_in_batch
    _no_split_modules = ["HfDebertaLayer"]  # not the embeddings: the decoder and the masked-LM head use them too
    # parts of a checkpoint that another head of the family uses
    _keys_to_ignore_on_load_unexpected: set[str] | list[str] | None = [
        r"lm_predictions\.",
        r"mask_predictions\.",
        r"cls\.predictions\.",
        r"position_embeddings\.",
        r"embeddings\._weight$",
        r"^config$",
    ]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "init_buffers"):  # each module knows how to fill its own buffers
            module.init_buffers()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # Transformers looks for its own interface in the source; ours is disentangled_attention

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Transformers' own check does not know "triton", which has to be asked for until it has run on a GPU."""
        if requested_attention == "triton":
            return "triton"
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path=None, *args, **kwargs):
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"the weights in {pretrained_model_name_or_path} are not a whole safetensors file ({error}); "
                "download or save them again"
            ) from error
        except (UnpicklingError, EOFError) as error:
            raise OSError(
                f"the .bin weights in {pretrained_model_name_or_path} are broken or hold more than tensors, which "
                "could run code when loaded; get them as safetensors, or convert them where you trust them"
            ) from error
        except RuntimeError as error:
            if "PytorchStreamReader" in str(error):
                raise OSError(
                    f"the .bin weights in {pretrained_model_name_or_path} are not a whole file; download them again"
                ) from error
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise RuntimeError(
                f"the weights in {pretrained_model_name_or_path} have other sizes than the configuration, as listed "
                "above; load them with their own configuration, or pass ignore_mismatched_sizes=True to start those "
                "weights anew"
            ) from error

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        *args,
        push_to_hub: bool = False,
        save_original_format: bool = False,
        **kwargs,
    ) -> None:
        """As in Transformers; writes the source files, `auto_map` and a model card too, see `hub_export`."""
        hub_arguments = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
        token = hub_arguments.get("token")
        self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(
            save_directory, is_main_process, *args, save_original_format=save_original_format, token=token, **kwargs
        )
        if not is_main_process:
            return
        if not getattr(self, "_hf_peft_config_loaded", False):  # an adapter alone needs no code
            write_code(save_directory)
            write_model_card(save_directory, type(self).__name__, self.config)
        if push_to_hub:
            upload(save_directory, hub_arguments.pop("repo_id", Path(save_directory).name), **hub_arguments)

    def push_to_hub(self, repo_id: str, *, max_shard_size: int | str = "50GB", **hub_arguments) -> str:
        """Upload what `save_pretrained` writes; a model card that the repository has is kept.

        Takes `commit_message`, `commit_description`, `private`, `token`, `revision`, `create_pr` and `tags`, as in
        Transformers.
        """
        with TemporaryDirectory() as folder:
            write_model_card(folder, type(self).__name__, self.config, name=repo_id)
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            return upload(folder, repo_id, **hub_arguments)


register_conversions()
