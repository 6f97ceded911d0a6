"""The model of a task: a checkpoint with its tokenizer, and a head with the labels of the task.

Our classes load DeBERTa checkpoints of every format; Transformers' Auto classes load all other models.

>>> args = ModelArguments("microsoft/deberta-v3-base")
>>> config = load_config(args, num_labels=3)
>>> model = load_model(args, config, HfDebertaForSequenceClassification)
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from hf_deberta import HfDebertaConfig
from hf_deberta.tokenization_hf_deberta import load_tokenizer as load_deberta_tokenizer
from hf_deberta.training.command_line import flag, free_flag
from hf_deberta.training.errors import InputError, input_errors

DEBERTA_TYPES = {"deberta", "deberta-v2", "hf_deberta"}
CLASSIFIER_NAMES = ("classifier", "score")

logger = logging.get_logger(__name__)


@dataclass
class ModelArguments:
    """Which checkpoint to fine-tune."""

    model_name_or_path: str | None = flag(
        None, "Checkpoint to fine-tune: a DeBERTa, or any model that Auto classes load."
    )
    intermediate: str | None = flag(
        None,
        "Instead of --model_name_or_path: a checkpoint fine-tuned on another task, whose classifier is "
        "replaced. v1 and v2 started RTE, MRPC, STS-B, COPA, RACE and aNLI from an MNLI model.",
    )
    cls_dropout: float | None = flag(None, "Dropout before the classifier.")
    config_name: str | None = flag(None, "Name or folder (default: the checkpoint's).")
    tokenizer_name: str | None = flag(None, "Name or folder (default: the checkpoint's).")
    cache_dir: str | None = free_flag(None, "Folder for downloaded files.")
    model_revision: str = flag("main", "Branch, tag or commit of the checkpoint.")
    token: str | None = free_flag(None, "Hub token for private repositories.")
    trust_remote_code: bool = free_flag(False, "Allow code from the checkpoint's repository to run.")
    ignore_mismatched_sizes: bool = free_flag(
        False, "Train tensors of other sizes than the checkpoint's from random numbers; classifiers always."
    )
    attn_implementation: str | None = flag(None, "Attention backend: auto, eager, sdpa or triton (default: auto).")
    demo: bool = free_flag(False, "Train a tiny model on made-up rows, offline; always from the start.")

    # flags that say what the model reads, to be saved in its config.json
    reading_flags: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not self.checkpoint and not self.demo:
            raise InputError("no checkpoint given: use --model_name_or_path, or try --demo")

    @property
    def checkpoint(self) -> str:
        """Name or folder of the weights to start from."""
        return self.intermediate or self.model_name_or_path or ""

    def load_options(self) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained`."""
        return {**config_options(self), "trust_remote_code": self.trust_remote_code}

    def download_options(self) -> dict[str, Any]:
        return {"cache_dir": self.cache_dir, "token": self.token}


def load_deberta_config(args: Namespace | ModelArguments) -> HfDebertaConfig | None:
    """The configuration of the checkpoint or of --config_name; None if it is not a DeBERTa."""
    name = str(args.config_name or args.intermediate or args.model_name_or_path)
    fields = read_config(name, args)
    if fields.get("model_type", "deberta-v2") not in DEBERTA_TYPES:
        return None
    with input_errors("", OSError, ValueError, StrictDataclassError):
        return HfDebertaConfig.from_pretrained(name, **config_options(args))


def read_config(name: str, args: Namespace | ModelArguments) -> dict[str, Any]:
    """The fields of a config.json, in a folder or on the Hub."""
    with input_errors(name, OSError, ValueError, RecursionError):
        fields, _ = PretrainedConfig.get_config_dict(name, **config_options(args))
        if not fields:
            raise InputError(f"{name} has no config.json: it is neither a model folder nor a model on the Hub")
    if not isinstance(fields, dict):
        raise InputError(f"the config.json of {name} must contain a JSON object, {{...}}")
    return fields


def config_options(args: Namespace | ModelArguments) -> dict[str, Any]:
    return {"cache_dir": args.cache_dir, "revision": args.model_revision, "token": args.token}


def load_tokenizer(args: ModelArguments, config: PretrainedConfig, **options: Any) -> PreTrainedTokenizerBase:
    name, options = args.tokenizer_name or args.checkpoint, args.load_options() | options
    with input_errors(name, OSError, ValueError):
        if isinstance(config, HfDebertaConfig):
            return load_deberta_tokenizer(name, **options)
        return AutoTokenizer.from_pretrained(name, **options)


def load_config(args: ModelArguments, auto_class: Any = None, **config_fields: Any) -> PretrainedConfig:
    """Return the configuration of the model with these fields, such as the labels of the task.

    For a checkpoint that is not a DeBERTa, heads and flags that only DeBERTas have are refused.
    """
    config = load_deberta_config(args)
    with input_errors(args.checkpoint, OSError, ValueError, StrictDataclassError):
        if config is None and auto_class is None:
            raise InputError(f"{args.checkpoint} is not a DeBERTa, and Transformers has no such head for others")
        if config is None and args.config_name is not None:
            raise InputError(
                f"--config_name {args.config_name} requires that this configuration and {args.checkpoint} are "
                "DeBERTas: leave it out"
            )
        if config is None:
            return AutoConfig.from_pretrained(args.checkpoint, **args.load_options(), **config_fields)
        if args.cls_dropout is not None:
            config_fields["cls_dropout"] = args.cls_dropout
        for name, value in config_fields.items():
            setattr(config, name, value)
        config.validate()
    return config


def load_model(
    args: ModelArguments,
    config: PretrainedConfig,
    deberta_class: type[PreTrainedModel],
    auto_class: Any = None,
    do_train: bool = True,
) -> PreTrainedModel:
    """Load a DeBERTa with `deberta_class`, any other model with `auto_class`.

    Args:
        config: of `load_config`.
        do_train: if False, tensors that the checkpoint does not have are an error: they would stay random.
    """
    is_deberta = isinstance(config, HfDebertaConfig)
    if args.cls_dropout is not None and not is_deberta:
        logger.warning(f"--cls_dropout is ignored: {args.checkpoint} is not a DeBERTa")
    model_class: Any = deberta_class if is_deberta else auto_class
    options = args.load_options() | {"config": config, "dtype": torch.float32, "ignore_mismatched_sizes": True}
    attention_errors: tuple[type[Exception], ...] = ()
    if args.attn_implementation is not None:
        options["attn_implementation"], attention_errors = args.attn_implementation, (ValueError, ImportError)
    with input_errors(args.checkpoint, OSError, StrictDataclassError, *attention_errors):
        model, info = model_class.from_pretrained(args.checkpoint, **options, output_loading_info=True)
    missing, mismatched = info["missing_keys"], {name for name, *_ in info["mismatched_keys"]}
    others = [name for name in mismatched if name.partition(".")[0] not in CLASSIFIER_NAMES]
    if do_train:
        model.config.fine_tuning_flags = args.reading_flags  # instead of those of an earlier training
    if others and args.intermediate is None and not args.ignore_mismatched_sizes:
        raise InputError(
            f"the checkpoint {args.checkpoint} has other sizes than this model for {', '.join(sorted(others))}: leave "
            "out a --config_name of another size, or add --ignore_mismatched_sizes to start them from random numbers"
        )
    new = missing | mismatched
    if args.intermediate is not None or do_train:
        new |= replace_classifier(model, args, missing, mismatched)
    if new and not do_train:
        raise InputError(
            f"{args.checkpoint} has no weights for {shorten(', '.join(sorted(new)), 300)}, and without --do_train "
            "they would stay random: give a checkpoint fine-tuned on the task, or add --do_train"
        )
    return model


def replace_classifier(
    model: PreTrainedModel, args: ModelArguments, missing: set[str], mismatched: set[str]
) -> set[str]:
    """Start a new classifier if the checkpoint's has other labels than the model; return its parameters' names.

    Without --intermediate, LABEL_0, LABEL_1, ... are no names: such a classifier is kept if it has the right size.
    """
    old, config = checkpoint_labels(args), model.config
    labels = None if config.problem_type == "regression" else tuple((config.id2label or {}).values())
    has_names = old is None or not all(label.startswith("LABEL_") for label in old)
    is_other = _lowercase(old) != _lowercase(labels) and (has_names or args.intermediate is not None)
    replaced = set()
    for name, module in model.named_children():
        names = {f"{name}.{parameter}" for parameter, _ in module.named_parameters()}
        if name not in CLASSIFIER_NAMES or not (is_other or names & mismatched):
            continue
        if is_other and (args.intermediate is not None or not names <= missing | mismatched):
            initialize(model, module)
        if not names & missing:
            aim = in_words(labels) if labels is None else f"{len(labels)} labels: {in_words(labels)}"
            aim = "of another size" if old == labels else f"for {aim}"  # one logit per choice, whatever the labels
            logger.info(f"The head of {args.checkpoint} ({in_words(old)}) is replaced by a new one {aim}.")
        replaced |= names
    return replaced


def in_words(labels: Sequence[str] | None) -> str:
    return "regression" if labels is None else shorten(", ".join(labels), 200)


def initialize(model: PreTrainedModel, module: nn.Module) -> None:
    """Initialize a module as in a new model, also if weights were loaded into it."""
    whole: AbstractContextManager = nullcontext()
    if is_deepspeed_zero3_enabled():  # which divides parameters among processes
        zero = sys.modules["deepspeed"].zero
        whole = zero.GatheredParameters(list(module.parameters()), modifier_rank=0)  # what the main process writes
    with whole:
        for submodule in module.modules():
            part: Any
            for part in (submodule, *submodule.parameters(recurse=False)):
                part._is_hf_initialized = False  # set by from_pretrained; _init_weights skips what has it
            model._init_weights(submodule)


# Labels


def label_fields(labels: Sequence[str]) -> dict[str, Any]:
    """The configuration fields id2label and label2id."""
    return {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}


def labels_in_checkpoint_order(labels: tuple[str, ...], args: ModelArguments, do_train: bool) -> tuple[str, ...]:
    """The labels of a task, numbered as in the checkpoint if that has the same ones (ignoring case)."""
    stored = checkpoint_labels(args)
    if not labels or not stored or len(stored) != len(labels):
        return labels
    by_name = {label.lower(): label for label in labels}
    if len(by_name) == len(labels) and by_name.keys() == {label.lower() for label in stored}:
        return tuple(by_name[label.lower()] for label in stored)
    if not do_train and not all(name.startswith("LABEL_") for name in stored):
        logger.warning(f"The labels of {args.checkpoint} are {', '.join(stored)}; they are read as {', '.join(labels)}")
    return labels


def checkpoint_labels(args: ModelArguments) -> tuple[str, ...] | None:
    """Labels of the checkpoint in order; None for a regression, which is what one label means by default."""
    fields = read_config(args.checkpoint, args)
    stored = {name: fields[name] for name in ("id2label", "num_labels") if name in fields}
    labels: Any = PretrainedConfig(**stored).id2label or {}  # two labels are the default, and not stored
    problem_type = fields.get("problem_type") or ("regression" if len(labels) == 1 else None)
    return None if problem_type == "regression" else tuple(label for _, label in sorted(labels.items()))


def _lowercase(labels: tuple[str, ...] | None) -> list[str] | None:
    return None if labels is None else [label.lower() for label in labels]


def max_input_length(
    max_seq_length: int | None, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, default: int = 128
) -> int:
    """--max_seq_length or the default, limited to what the tokenizer and the model's positions allow.

    DeBERTa's relative positions do not end, absolute ones do. Without those the limit of a tokenizer, often 512, holds
    for the default only.
    """
    length, limit = default if max_seq_length is None else max_seq_length, tokenizer.model_max_length
    minimum = tokenizer.num_special_tokens_to_add(pair=True) + 2
    if length < minimum:
        raise InputError(
            f"--max_seq_length must be at least {minimum}, the special tokens of a pair and a token of each text, not "
            f"{length}"
        )
    if getattr(config, "position_biased_input", True):  # other models have no such field
        positions = getattr(config, "max_position_embeddings", None) or 0
        limit = min(limit, positions) if positions > 0 else limit  # XLNet has -1
    elif max_seq_length is not None:
        return length
    if length > limit:
        logger.warning(f"--max_seq_length {length} exceeds the maximum of the model; using {limit}")
    return min(length, limit)
