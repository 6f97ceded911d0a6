"""Pretrain a DeBERTa on text: masked-language modelling with the enhanced mask decoder.

From scratch, tokenizer included, on one file:

    python run_mlm.py --config_preset v3-small --train_file corpus.txt --train_tokenizer 32000 --output_dir my-deberta

Go on from a released checkpoint, on several GPUs:

    accelerate launch run_mlm.py --model_name_or_path microsoft/deberta-v3-base --train_file 'notes/*.txt' --bf16 \
        --output_dir my-domain-deberta

The same command goes on where it was stopped (one that names a checkpoint, --resume_from_checkpoint PATH, starts from
that each time). Flags are those of Transformers' `run_mlm.py`, but for a few that have no use here, and ours; --help
lists all.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from hf_deberta import HfDebertaConfig, HfDebertaForCausalLM, HfDebertaForMaskedLM
from hf_deberta.pretraining.arguments import (
    MaskingArguments,
    NewModelArguments,
    PretrainingArguments,
    check,
    check_what_is_evaluated,
    rows_of,
    run_with_arguments,
)
from hf_deberta.pretraining.corpus import Corpus, CorpusArguments
from hf_deberta.pretraining.language_model_trainer import LanguageModelTrainer
from hf_deberta.pretraining.packing import RowCollator
from hf_deberta.runs.command_line import as_input_error

logger = logging.get_logger("run_mlm")


@dataclass
class ModelArguments(NewModelArguments):
    """Which model, from where, and by which objective it learns."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Go on from this checkpoint: any DeBERTa, official, of Transformers, or ours."}
    )
    from_scratch: bool = field(default=False, metadata={"help": "Take its configuration and tokenizer, no weights."})
    objective: str = field(
        default="mlm",
        metadata={"help": "mlm; causal (each token sees those before it); joint (both on the same rows: DeBERTa-MT)."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [n for n in ("model_name_or_path", "config_preset", "config_name") if getattr(self, n) is not None]
        if len(given) != 1:
            said = " and ".join(f"--{name}" for name in given) or "none"
            raise ValueError(f"give one of --model_name_or_path, --config_preset, --config_name, not {said}")
        if self.objective not in ("mlm", "causal", "joint"):
            raise ValueError(f"--objective is mlm, causal or joint, not {self.objective!r}")
        self.starts_anew = self.from_scratch or self.model_name_or_path is None


def main() -> None:
    kinds = (ModelArguments, CorpusArguments, MaskingArguments, PretrainingArguments)
    run_with_arguments(kinds, lambda *parts: prepare(*parts).train_and_evaluate())


def prepare(
    model_args: ModelArguments,
    corpus_args: CorpusArguments,
    masking_args: MaskingArguments,
    training_args: PretrainingArguments,
) -> LanguageModelTrainer:
    check_what_is_evaluated(training_args, model_args.starts_anew, "--model_name_or_path, no --from_scratch")
    set_seed(training_args.seed)
    folder, base = Path(training_args.output_dir), model_args.model_name_or_path
    with training_args.main_process_first(local=training_args.save_on_each_node, desc="tokenizing"):
        corpus = Corpus(corpus_args, model_args.cache_dir, model_args.token)
        tokenizer = model_args.tokenizer(corpus, folder, base, model_args.starts_anew)
        config = make_config(model_args, tokenizer, corpus_args.max_seq_length)
        check(config, tokenizer, corpus_args.max_seq_length, causal=model_args.objective != "mlm")
        masking = None if model_args.objective == "causal" else masking_args.of(tokenizer)
        rows = rows_of(corpus, tokenizer, masking, training_args)
    model = make_model(model_args, config)
    for split, found in rows.items():
        logger.warning(f"{split}: {found.tokens.about['tokens']:,} tokens in {len(found):,} rows")
    logger.warning(f"{model.num_parameters():,} parameters")
    return LanguageModelTrainer(
        model=model,
        args=training_args,
        data_collator=RowCollator(tokenizer.pad_token_id),
        train_dataset=rows["train"],
        eval_dataset=rows.get("validation"),
        processing_class=tokenizer,
        objective=model_args.objective,
        context=rows["train"].context(),
        about={**corpus_args.about(), "base": None if model_args.starts_anew else base},
    )


@as_input_error(StrictDataclassError)
def make_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase, length: int) -> HfDebertaConfig:
    if args.starts_anew:
        return args.new_config(tokenizer, length, args.model_name_or_path)
    return HfDebertaConfig.from_pretrained(args.model_name_or_path, **args.overrides(), **args.loading())


def make_model(args: ModelArguments, config: HfDebertaConfig) -> HfDebertaForMaskedLM:
    """The checkpoint to go on from, or a new model."""
    kind = HfDebertaForMaskedLM if args.objective == "mlm" else HfDebertaForCausalLM
    if args.starts_anew:
        return kind(config)
    return kind.from_pretrained(args.model_name_or_path, config=config, dtype="float32", **args.loading())


if __name__ == "__main__":
    main()
