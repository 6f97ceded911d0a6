r"""Pretrain a DeBERTa on text: masked language modelling with the enhanced mask decoder, or an autoregressive model.

Train a new model and its tokenizer on one file:

    hf-deberta mlm --config_preset v3-small --train_file corpus.txt --train_tokenizer 32000 --output_dir my-deberta

Continue pretraining from a released checkpoint, on several GPUs:

    accelerate launch -m hf_deberta mlm \
        --model_name_or_path microsoft/deberta-v3-base --train_file 'notes/*.txt' --bf16 \
        --output_dir my-domain-deberta

Train an autoregressive model on a dataset of the Hub:

    hf-deberta mlm --objective causal --config_preset v3-small --dataset_name Salesforce/wikitext \
        --dataset_config_name wikitext-103-raw-v1 --train_tokenizer 32000 --output_dir my-causal-deberta

Repeat the command to resume an interrupted run. Flags are named as in Transformers' run_mlm.py.
"""

from dataclasses import dataclass
from textwrap import shorten
from typing import Literal

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta import HfDebertaForCausalLM, HfDebertaForMaskedLM
from hf_deberta.pretraining.arguments import (
    MaskingArguments,
    NewModelArguments,
    PretrainingArguments,
    check_model_fits,
    prepare,
    run_pretraining,
)
from hf_deberta.pretraining.corpus import CorpusArguments
from hf_deberta.pretraining.language_model_trainer import LanguageModelTrainer
from hf_deberta.training.command_line import flag, free_flag
from hf_deberta.training.errors import InputError, input_errors

logger = logging.get_logger(__name__)


@dataclass
class ModelArguments(NewModelArguments):
    """The model and its objective."""

    model_name_or_path: str | None = flag(
        None, "Continue from this checkpoint: an official DeBERTa, Transformers', or one of hf_deberta."
    )
    from_scratch: bool = flag(False, "Use the checkpoint's configuration and tokenizer, but new weights.")
    objective: Literal["mlm", "causal", "joint"] = flag(
        "mlm", "mlm; causal (attend to earlier tokens only); joint (both on the same rows: DeBERTa-MT)."
    )
    perplexity_stride: int | None = free_flag(
        None,
        "After training a causal model, evaluate whole documents in windows of --max_seq_length that "
        "advance by this many tokens: perplexity per token and per word, bits per byte.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        flags = [n for n in ("model_name_or_path", "config_preset", "config_name") if getattr(self, n) is not None]
        if len(flags) != 1:
            names = " and ".join(f"--{flag}" for flag in flags) or "none"
            raise InputError(f"give one of --model_name_or_path, --config_preset, --config_name, not {names}")
        if self.perplexity_stride is not None and self.objective == "mlm":
            raise InputError("--perplexity_stride is for models that predict the next token: add --objective causal")

    @property
    def checkpoint(self) -> str | None:
        return self.model_name_or_path

    @property
    def new_model(self) -> bool:
        return self.from_scratch or self.model_name_or_path is None

    def make_model(
        self, tokenizer: PreTrainedTokenizerBase, length: int, do_train: bool
    ) -> HfDebertaForMaskedLM | HfDebertaForCausalLM:
        """Load the checkpoint, or make a new model. Say so if the head is new; without training that is an error."""
        config = self.new_config(tokenizer, length) if self.new_model else self.load_config(str(self.checkpoint))
        check_model_fits(config, tokenizer, length, causal=self.objective != "mlm")
        model_class = HfDebertaForMaskedLM if self.objective == "mlm" else HfDebertaForCausalLM
        with input_errors("", OSError, ValueError):
            if self.new_model:
                return model_class(config)
            model, info = model_class.from_pretrained(
                self.checkpoint, config=config, dtype="float32", output_loading_info=True, **self.hub_options()
            )
        missing = sorted(info["missing_keys"])
        if missing and not do_train:
            names = shorten(", ".join(missing), 300)
            raise InputError(
                f"{self.checkpoint} has no weights for {names}, and with --do_train false they would stay random: name "
                "another checkpoint"
            )
        if new := [name for name in missing if not name.startswith(f"{model.base_model_prefix}.")]:
            logger.warning(
                f"{self.checkpoint} has no head for language modelling ({', '.join(new)}): the head starts at random, "
                "and is trained with the rest"
            )
        return model


def main() -> None:
    run_pretraining("mlm", ModelArguments, MaskingArguments, make_trainer, __doc__)


def make_trainer(
    model_args: ModelArguments,
    corpus_args: CorpusArguments,
    masking_args: MaskingArguments,
    training_args: PretrainingArguments,
) -> LanguageModelTrainer:
    stride = model_args.perplexity_stride
    if stride is not None and not 1 <= stride < corpus_args.max_seq_length:
        raise InputError(
            f"--perplexity_stride must be at least 1 and below --max_seq_length, {corpus_args.max_seq_length}, not "
            f"{stride}: each window keeps some context"
        )
    masking = None if model_args.objective == "causal" else masking_args
    corpus, options = prepare(model_args, corpus_args, masking, training_args)
    evaluated = {"eval": "validation", "test": "test"}
    sizes = {name: corpus.text_size(split) for name, split in evaluated.items() if stride and split in corpus.splits}
    logger.info(f"{options['model'].num_parameters():,} parameters")
    return LanguageModelTrainer(objective=model_args.objective, perplexity_stride=stride, text_sizes=sizes, **options)
