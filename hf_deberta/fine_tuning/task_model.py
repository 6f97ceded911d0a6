"""The model of a task: which checkpoint, its tokenizer, its weights with the head and the labels of the task.

A DeBERTa of any format is loaded by our classes, another model by Transformers' own.

>>> args = ModelArguments("microsoft/deberta-v3-base")
>>> model = load_model(args, HfDebertaForSequenceClassification, num_labels=3)
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta import HfDebertaConfig
from hf_deberta.tokenization_hf_deberta import load_tokenizer as load_deberta_tokenizer

DEBERTA = {"deberta", "deberta-v2", "hf_deberta"}

logger = logging.get_logger(__name__)


@dataclass
class ModelArguments:
    """Which model to fine-tune, and by which recipe."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A checkpoint: any DeBERTa, or any other model that Auto classes load."}
    )
    intermediate: str | None = field(
        default=None,
        metadata={
            "help": "Start from this checkpoint that was fine-tuned on another task, with a new classifier; the paper "
            "starts RTE, MRPC, STS-B, COPA and RACE from MNLI."
        },
    )
    recipe: str = field(
        default="auto",
        metadata={"help": "auto: published settings for checkpoint and task, which any flag overrides; none: no such."},
    )
    cls_dropout: float | None = field(default=None, metadata={"help": "Dropout before the classifier."})
    config_name: str | None = field(default=None, metadata={"help": "A configuration, if not that of the model."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "A tokenizer, if not that of the model."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads are kept."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the checkpoint."})
    token: str | None = field(default=None, metadata={"help": "Token for private repositories."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that a model of the Hub brings along."})
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Load a checkpoint whose classifier has another size; it gets a new one."}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, ...; the model's choice."})
    demo: bool = field(default=False, metadata={"help": "A tiny model on made-up data: how it looks, offline."})

    def __post_init__(self) -> None:
        if self.recipe not in ("auto", "none"):
            raise ValueError(f"--recipe is auto or none, not {self.recipe!r}")
        if self.start is None and not self.demo:
            raise ValueError("say which checkpoint to fine-tune with --model_name_or_path (or see one run: --demo)")

    @property
    def start(self) -> str | None:
        """Where the weights are from."""
        return self.intermediate or self.model_name_or_path

    def loading(self) -> dict[str, Any]:
        return {**self.downloads(), "revision": self.model_revision, "trust_remote_code": self.trust_remote_code}

    def downloads(self) -> dict[str, Any]:
        """Where they are kept, and whose they are."""
        return {"cache_dir": self.cache_dir, "token": self.token}


def deberta_config(name: str, args: Namespace | ModelArguments) -> HfDebertaConfig | None:
    """The configuration of a checkpoint, of whichever format, if it is a DeBERTa."""
    loading = {"cache_dir": args.cache_dir, "revision": args.model_revision, "token": args.token}
    fields, _ = PretrainedConfig.get_config_dict(args.config_name or name, **loading)
    if not fields:
        raise OSError(f"{name} holds no config.json: it is no model, or not a path or a name on the Hub")
    if fields.get("model_type", "deberta-v2") not in DEBERTA:
        return None
    return HfDebertaConfig.from_pretrained(args.config_name or name, **loading)


def load_tokenizer(args: ModelArguments, **options: Any) -> PreTrainedTokenizerBase:
    name, options = args.tokenizer_name or args.start, args.loading() | options
    if deberta_config(args.start, args) is None:
        return AutoTokenizer.from_pretrained(name, **options)
    return load_deberta_tokenizer(name, **options)


def load_model(
    args: ModelArguments, ours: type[PreTrainedModel], auto: type | None = None, **fields: Any
) -> PreTrainedModel:
    """A DeBERTa of any format by our class, another model by Transformers' own.

    Parameters of the head that the checkpoint does not hold are in the model's `new_weights`, by name.

    Args:
        fields: of the configuration.
    """
    config, options = deberta_config(args.start, args), args.loading()
    if args.attn_implementation is not None:
        options["attn_implementation"] = args.attn_implementation
    options["ignore_mismatched_sizes"] = args.ignore_mismatched_sizes or args.intermediate is not None
    if config is None and auto is None:
        raise ValueError(f"{args.start} is not a DeBERTa, and Transformers has no such head for other models")
    options |= {"dtype": torch.float32, "output_loading_info": True}
    if config is None:
        if args.config_name is not None:
            raise ValueError(
                f"--config_name {args.config_name} is for a DeBERTa, which {args.start} or that configuration is not: "
                "leave it out"
            )
        if args.cls_dropout is not None:
            logger.warning(f"--cls_dropout is not known to {args.start}, and left out")
        return fit_for_task(*auto.from_pretrained(args.start, **options, **fields), args)
    options.pop("trust_remote_code")
    if args.cls_dropout is not None:
        fields["cls_dropout"] = args.cls_dropout
    for name, value in fields.items():
        setattr(config, name, value)
    try:
        model, info = ours.from_pretrained(args.start, config=config, **options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        if args.config_name is not None:
            raise ValueError(
                f"the weights of {args.start} have other sizes than --config_name {args.config_name}: leave it out"
            ) from error
        raise ValueError(
            f"{args.start} has a classifier of another size than this task, which has {config.num_labels} labels: "
            "go on from it with --intermediate in place of --model_name_or_path, or add --ignore_mismatched_sizes"
        ) from error
    return fit_for_task(model, info, args)


def label_fields(labels: Sequence[str]) -> dict[str, dict]:
    """Fields of the configuration that name the labels, as pipelines ask for them in both directions."""
    return {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}


def labels_in_order(labels: tuple[str, ...] | None, args: ModelArguments) -> tuple[str, ...] | None:
    """The labels of a task, as the checkpoint numbers them if it knows just these, in capitals or not."""
    known = checkpoint_labels(args)
    if not labels or not known or len(known) != len(labels):
        return labels
    by_name = dict(zip(_in_small(labels), labels, strict=True))
    if len(by_name) == len(labels) and by_name.keys() == set(_in_small(known)):
        return tuple(by_name[name] for name in _in_small(known))
    if args.intermediate is None and not all(name.startswith("LABEL_") for name in known):
        logger.warning(f"{args.start} calls its labels {', '.join(known)}; they are taken for {', '.join(labels)}")
    return labels


def checkpoint_labels(args: ModelArguments) -> tuple[str, ...] | None:
    """By number; None for a regression."""
    fields, _ = PretrainedConfig.get_config_dict(args.start, **args.loading())
    if fields.get("problem_type") == "regression":
        return None
    kept = {name: fields[name] for name in ("id2label", "num_labels") if name in fields}
    return tuple(PretrainedConfig(**kept).id2label.values())  # two are the default, and then not in the file


def fit_for_task(model: PreTrainedModel, info: dict[str, Any], args: ModelArguments) -> PreTrainedModel:
    """After an intermediate task that had other labels, a new classifier.

    Args:
        info: of loading, as `from_pretrained` gives it.
    """
    new = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    model.new_weights = sorted(name for name in new if not name.startswith(f"{model.base_model_prefix}."))
    if args.intermediate is None:
        return model
    config, before = model.config, checkpoint_labels(args)
    now = None if config.problem_type == "regression" else tuple(config.id2label.values())
    if _in_small(before) != _in_small(now):
        for name, module in model.named_children():
            if name in ("classifier", "score"):
                initialise(model, module)
                model.new_weights += [f"{name}.{of}" for of, _ in module.named_parameters()]
    return model


def _in_small(labels: tuple[str, ...] | None) -> list[str] | None:
    return labels and [label.lower() for label in labels]


def initialise(model: PreTrainedModel, module: nn.Module) -> None:
    """As in a new model, also where weights have been loaded, which Transformers marks and leaves alone."""
    for part in module.modules():
        for marked in (part, *part.parameters(recurse=False)):
            marked._is_hf_initialized = False
        model._init_weights(part)


def longest_input(args: Any, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, default: int = 128) -> int:
    """--max_seq_length, but not more than the tokenizer or the model's positions allow."""
    length, most = args.max_seq_length or default, tokenizer.model_max_length
    if config.model_type != HfDebertaConfig.model_type or config.position_biased_input:
        most = min(most, getattr(config, "max_position_embeddings", None) or most)
    if length > most:
        logger.warning(f"--max_seq_length {length} is more than the model takes: {most}")
    return min(length, most)
