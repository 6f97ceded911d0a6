"""`HfDebertaPreTrainedModel`: how every `HfDeberta` class is initialized, loaded, saved and uploaded.

Saved folders can be loaded where this package is not installed: next to the weights stand the source files of the model
(flat, so that `trust_remote_code=True` finds them), an `auto_map` in config.json with every head, and a model card.
"""

import errno
import json
import shutil
import sys
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi, ModelCard
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.dynamic_module_utils import get_relative_import_files

from .attention import AUTO, check_attention_name
from .configuration_hf_deberta import IN_TREE_DEFAULTS, HfDebertaConfig, check_path

if TYPE_CHECKING:
    # Transformers finds the files that a model needs by searching the text for relative imports. These lines make the
    # file of every head part of every saved folder, and cause no import circle because they never run.
    from .causal_language_model import HfDebertaForCausalLM  # noqa: F401
    from .enhanced_mask_decoder import HfDebertaForMaskedLM  # noqa: F401
    from .modeling_heads import HfDebertaForSequenceClassification  # noqa: F401
    from .modeling_hf_deberta import HfDebertaModel  # noqa: F401
    from .replaced_token_detection import HfDebertaForPreTraining  # noqa: F401

# Auto class -> "file.Class": the `auto_map` of config.json. Entity choice has no Auto class and uses its own name.
AUTO_MAP = {
    "AutoConfig": "configuration_hf_deberta.HfDebertaConfig",
    "AutoModel": "modeling_hf_deberta.HfDebertaModel",
    "AutoModelForTextEncoding": "modeling_hf_deberta.HfDebertaModel",
    "AutoModelForMaskedLM": "enhanced_mask_decoder.HfDebertaForMaskedLM",
    "AutoModelForCausalLM": "causal_language_model.HfDebertaForCausalLM",
    "AutoModelForPreTraining": "replaced_token_detection.HfDebertaForPreTraining",
    "AutoModelForSequenceClassification": "modeling_heads.HfDebertaForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_heads.HfDebertaForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_heads.HfDebertaForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_heads.HfDebertaForMultipleChoice",
    "HfDebertaForEntityChoice": "modeling_heads.HfDebertaForEntityChoice",
}

PIPELINE_TAGS = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}

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
    _input_embed_layer = "word_embeddings"  # of `embeddings`
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["HfDebertaLayer"]  # not the embeddings: the decoder and the masked-LM head use them too
    # parts of a checkpoint that belong to another head, or to none; see `expect_on_load`
    _keys_to_ignore_on_load_unexpected: set[str] | list[str] | None = [
        r"lm_predictions\.",
        r"mask_predictions\.",
        r"cls\.predictions\.",
        r"cls\.predictions\.decoder\.bias$",  # equal to cls.predictions.bias
        r"position_embeddings\.",
        r"embeddings\._weight$",
        r"^config$",
    ]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.config_class.model_type not in IN_TREE_DEFAULTS:  # whose checkpoints other classes read
            register_conversions(cls.config_class.model_type)

    def __init__(self, config: HfDebertaConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        register_default_peft_targets()

    def expect_on_load(self, *patterns: str) -> None:
        """Report keys of these patterns, which the class ignores, if a checkpoint has them and the model does not.

        Call it after `post_init`, which adds the patterns of the encoder to those of a head.
        """
        self._keys_to_ignore_on_load_unexpected = {*(type(self)._keys_to_ignore_on_load_unexpected or ())} - {*patterns}

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
            check_indices(folder)
            check_declared_size(folder, kwargs.get("config"), cls.config_class)
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except (SafetensorError, UnpicklingError, EOFError, RuntimeError, OSError) as error:
            if not _is_damaged_file(error):
                raise
            kind = ".safetensors" if isinstance(error, SafetensorError) else ".bin"
            raise OSError(
                f"{pretrained_model_name_or_path} has a {kind} file that is truncated or corrupt, or that holds more "
                f"than tensors and could run code when loaded ({error}); download or save it again"
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
        """As in Transformers; also writes the source files, `auto_map` and a model card, see `write_code`."""
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


def check_indices(folder: Path) -> None:
    """Raise OSError for an index of weights that is damaged or names files of other folders."""
    for path in (path for pattern in INDEX_FILES for path in folder.glob(pattern)):
        try:
            shards = list(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            shards = []
        if not shards:
            raise OSError(f"{path} must have a weight_map that names the file of each tensor; save the model again")
        for shard in shards:
            if Path(str(shard)).is_absolute() or ".." in Path(str(shard)).parts:
                raise OSError(f"{path} must name files in its own folder, not {shard!r:.200}")


def check_declared_size(folder: Path, config: Any, config_class: type[HfDebertaConfig]) -> None:
    """Raise OSError if a large model is declared and the weights hold a small part of it, before memory is taken."""
    if not isinstance(config, HfDebertaConfig):
        if not (folder / "config.json").is_file():
            return
        config = config_class.from_pretrained(folder)
    declared = config.approximate_parameters()
    size = sum(path.stat().st_size for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    if declared > LARGE_MODEL and 0 < size < declared * MIN_BYTES_PER_PARAMETER:
        raise OSError(
            f"the configuration of {folder} describes a model of {declared:,} parameters, and its weights are a file "
            f"of {size:,} bytes: one of the two is damaged"
        )


def _is_damaged_file(error: Exception) -> bool:
    """True if the error says that a file of weights cannot be read as such."""
    if isinstance(error, SafetensorError | UnpicklingError | EOFError):
        return True
    if isinstance(error, OSError) and error.errno != errno.EINVAL:  # no permission, disk failure
        return False
    return any(frame.f_globals.get("__name__") == "torch.serialization" for frame, _ in walk_tb(error.__traceback__))


# ---- names in other checkpoints: ours are those of the official v2 code and of in-tree `deberta-v2` -----------------


def unfuse_qkv(fused: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """Return query, key and value weights [hidden, hidden] from `in_proj` of v1 [heads * 3 * d, hidden].

    Each head of `in_proj` has its d query rows, then its d key rows, then its d value rows.
    """
    by_head = fused.unflatten(0, (heads, 3, -1))
    return [by_head[:, part].flatten(0, 1).contiguous() for part in range(3)]


def fuse_qkv(parts: list[torch.Tensor], heads: int) -> torch.Tensor:
    """Return `in_proj` of v1 from query, key and value weights: the exact inverse of `unfuse_qkv`."""
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2).contiguous()


class UnfuseQKV(ConversionOps):
    """`unfuse_qkv` as an operation of Transformers' checkpoint loader."""

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, config=None, **kwargs):
        (fused,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        return dict(zip(target_patterns, unfuse_qkv(fused, config.num_attention_heads), strict=True))

    @property
    def reverse_op(self):
        return FuseQKV()


class FuseQKV(ConversionOps):
    """`fuse_qkv` as an operation of Transformers' checkpoint loader."""

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, config=None, **kwargs):
        parts = [value[0] if isinstance(value, list) else value for value in map(input_dict.get, source_patterns)]
        return {target_patterns[0]: fuse_qkv(parts, config.num_attention_heads)}

    @property
    def reverse_op(self):
        return UnfuseQKV()


# patterns of parameter names in other checkpoints -> our names
RENAMINGS = [
    (r"^bert\.", "deberta."),
    (r"attention\.self\.q_bias$", "attention.self.query_proj.bias"),
    (r"attention\.self\.v_bias$", "attention.self.value_proj.bias"),
    (r"attention\.self\.pos_proj\.", "attention.self.pos_key_proj."),
    (r"attention\.self\.pos_q_proj\.", "attention.self.pos_query_proj."),
    (r"cls\.predictions\.transform\.", "lm_predictions.lm_head."),
    (r"cls\.predictions\.decoder\.weight$", "lm_predictions.lm_head.decoder.weight"),
    (r"cls\.predictions\.bias$", "lm_predictions.lm_head.bias"),
]


def register_conversions(model_type: str) -> None:
    """Register the conversions with Transformers' checkpoint loader; a later call replaces an earlier one."""
    fused = WeightConverter(
        "attention.self.in_proj.weight",
        [f"attention.self.{name}_proj.weight" for name in ("query", "key", "value")],
        operations=[UnfuseQKV()],
    )
    renamings = [WeightRenaming(source, target) for source, target in RENAMINGS]
    register_checkpoint_conversion_mapping(model_type, [*renamings, fused], overwrite=True)


def register_default_peft_targets() -> None:
    """Give PEFT's adapters the default `target_modules` of Transformers' `deberta-v2`.

    PEFT looks them up by model type in tables of its own and offers no way to register one. A row for ours is added,
    and no other row is changed. PEFT is not imported for that: this runs when a model is created after `import peft`.
    """
    for name, table in list(vars(sys.modules.get("peft.utils.constants", sys)).items()):
        if name.startswith("TRANSFORMERS_MODELS_TO_") and "deberta-v2" in table:
            table.setdefault("hf_deberta", table["deberta-v2"])


# ---- what stands beside the weights -------------------------------------------------------------------------------

MODEL_CARD = """---
library_name: transformers
tags:
- deberta
- hf_deberta
pipeline_tag: {pipeline_tag}
---

# {name}

A DeBERTa model: `{architecture}` with {layers} layers, hidden size {hidden_size} and a
vocabulary of {vocab_size} tokens.

```python
{load}
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=False)  # the tokenizer needs no custom code
```
"""
USE_OF_CARD = """
This needs Transformers 5.12 or later. With the `hf_deberta` package installed, `import hf_deberta` replaces
`trust_remote_code=True` and computes the same numbers faster: the Python files beside the weights are the model alone.
The package can also export this model to the format of Transformers' own classes:
`export_to_transformers(model, folder)`.
"""


def write_code(folder: str | Path) -> None:
    """Copy this file, and every sibling that it imports directly or indirectly, into `folder`."""
    for source in {__file__, *get_relative_import_files(__file__)}:
        target = Path(folder) / Path(source).name
        if not target.exists() or target.read_bytes() != Path(source).read_bytes():
            shutil.copyfile(source, target)


def loading_code(auto_class: str, name: str) -> str:
    """Return the Python lines of the model card that load the model."""
    if not auto_class.startswith("Auto"):
        module = "hf_deberta" if auto_class in AUTO_MAP else "your_module"
        return f'''from {module} import {auto_class}
from transformers import AutoTokenizer

model = {auto_class}.from_pretrained("{name}")'''
    return f'''from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{name}", trust_remote_code=True)'''


def write_model_card(folder: str | Path, architecture: str, config: HfDebertaConfig, name: str | None = None) -> None:
    """Write a README.md that shows how to load the model, unless `folder` has one."""
    path = Path(folder) / "README.md"
    if path.exists():
        return
    known = [auto for auto, cls in AUTO_MAP.items() if cls.endswith(f".{architecture}")]
    auto_class = known[0] if known else architecture or "AutoModel"
    name = name or Path(folder).resolve().name
    path.write_text(
        MODEL_CARD.format(
            name=name,
            architecture=architecture,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            load=loading_code(auto_class, name),
            pipeline_tag=PIPELINE_TAGS.get(auto_class, "feature-extraction"),
        )
        + USE_OF_CARD * bool(known),
        encoding="utf-8",
    )


def upload(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
    **commit: Any,
) -> str:
    """Upload the files of a saved folder, without its subfolders, to a Hub repository; create it if it is missing.

    If the repository already has a model card, that card is kept, and `tags` are added to it. `commit` may have
    `commit_message` and `commit_description`.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    has_card = api.file_exists(repo_id, "README.md", revision=revision)
    if tags:
        path = api.hf_hub_download(repo_id, "README.md", revision=revision) if has_card else Path(folder) / "README.md"
        card = ModelCard.load(path)
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
        card.save(Path(folder) / "README.md")
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        ignore_patterns=["*/*", *(["README.md"] if has_card and not tags else [])],
        revision=revision,
        create_pr=create_pr,
        **{"commit_message": "Upload model", **commit},
    )
