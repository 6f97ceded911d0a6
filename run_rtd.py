"""Pretrain a DeBERTaV3: replaced token detection with gradient-disentangled embedding sharing.

From scratch, tokenizer included, on one file:

    python run_rtd.py --config_preset v3-small --train_file corpus.txt --train_tokenizer 32000 --output_dir my-deberta

Go on from a released pair, whose generator lies beside the discriminator, on several GPUs (else name the generator too,
by --generator_name_or_path):

    accelerate launch run_rtd.py --discriminator_name_or_path microsoft/deberta-v3-base --train_file 'notes/*.txt' \
        --bf16 --output_dir my-domain-deberta

It writes OUTPUT_DIR/discriminator, the model to fine-tune, and OUTPUT_DIR/generator, which fills masks: two ordinary
checkpoints. The same command goes on where it was stopped (one that names a checkpoint, --resume_from_checkpoint PATH,
starts from that each time). --help lists all flags.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from hf_deberta import HfDebertaConfig
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
from hf_deberta.pretraining.packing import RowCollator
from hf_deberta.pretraining.released_generator import released_generator_config
from hf_deberta.pretraining.rtd_pretraining import HfDebertaForRtdPretraining, HfDebertaRtdConfig, RtdTrainer
from hf_deberta.runs.command_line import as_input_error

logger = logging.get_logger("run_rtd")


@dataclass
class PairArguments(NewModelArguments):
    """Generator and discriminator, from where, and how they learn together."""

    discriminator_name_or_path: str | None = field(default=None, metadata={"help": "Go on from this discriminator ..."})
    generator_name_or_path: str | None = field(
        default=None, metadata={"help": "... and this generator; by default the one beside it, as released."}
    )
    generator_layers: int | None = field(
        default=None, metadata={"help": "Layers of a new generator; half of the discriminator's if not given."}
    )
    embedding_sharing: str = field(
        default="gdes", metadata={"help": "gdes (gradient-disentangled), es (one table for both), nes (none)."}
    )
    rtd_weight: float = field(
        default=50.0, metadata={"help": "Of the discriminator's loss: 50 in the paper, 10 in the released script."}
    )
    sampling_temperature: float = field(
        default=1.0, metadata={"help": "Of the draw from the generator's guesses; 0 takes the best."}
    )
    decoupled: bool = field(
        default=False,
        metadata={"help": "Step the generator first, then the discriminator, as released."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        generator, discriminator = self.generator_name_or_path, self.discriminator_name_or_path
        if generator is not None and discriminator is None:
            raise ValueError(
                "--generator_name_or_path and --discriminator_name_or_path belong together: give both, or the "
                "discriminator alone where the generator lies beside it, as released"
            )
        given = [x for x in (self.config_preset, self.config_name, discriminator) if x is not None]
        if len(given) != 1:
            raise ValueError(
                "give one of --config_preset, --config_name (start anew), or --discriminator_name_or_path (go on)"
            )
        self.starts_anew = discriminator is None
        if self.generator_layers is not None and not self.starts_anew:
            raise ValueError(
                f"--generator_layers is for a new generator, and that of {generator or discriminator} has its layers: "
                "leave it out"
            )

    def together(self) -> dict[str, str | float]:
        return {name: getattr(self, name) for name in ("embedding_sharing", "rtd_weight", "sampling_temperature")}


@dataclass
class RtdMaskingArguments(MaskingArguments):
    """As DeBERTaV3: single words, and all of them become [MASK]."""

    max_ngram: int = 1
    mask_prob: float = 1.0
    random_prob: float = 0.0


def main() -> None:
    kinds = (PairArguments, CorpusArguments, RtdMaskingArguments, PretrainingArguments)
    run_with_arguments(kinds, lambda *parts: prepare(*parts).train_and_evaluate())


def prepare(
    pair_args: PairArguments,
    corpus_args: CorpusArguments,
    masking_args: RtdMaskingArguments,
    training_args: PretrainingArguments,
) -> RtdTrainer:
    if training_args.push_to_hub:
        raise ValueError(
            "--push_to_hub knows one model, and this makes two: afterwards, load OUTPUT_DIR/discriminator and "
            "OUTPUT_DIR/generator, and push each"
        )
    check_what_is_evaluated(training_args, pair_args.starts_anew, "--discriminator_name_or_path")
    set_seed(training_args.seed)
    folder, base = Path(training_args.output_dir), pair_args.discriminator_name_or_path
    with training_args.main_process_first(local=training_args.save_on_each_node, desc="tokenizing"):
        corpus = Corpus(corpus_args, pair_args.cache_dir, pair_args.token)
        tokenizer = pair_args.tokenizer(corpus, folder, base, pair_args.starts_anew)
        config = make_config(pair_args, tokenizer, corpus_args.max_seq_length)
        check(config.generator, tokenizer, corpus_args.max_seq_length)
        rows = rows_of(corpus, tokenizer, masking_args.of(tokenizer), training_args)
    pair = make_pair(pair_args, config)
    for split, found in rows.items():
        logger.warning(f"{split}: {found.tokens.about['tokens']:,} tokens in {len(found):,} rows")
    logger.warning(
        f"parameters: generator {pair.generator.num_parameters():,}, "
        f"discriminator {pair.discriminator.num_parameters():,}"
    )
    return RtdTrainer(
        model=pair,
        args=training_args,
        data_collator=RowCollator(tokenizer.pad_token_id),
        train_dataset=rows["train"],
        eval_dataset=rows.get("validation"),
        processing_class=tokenizer,
        decoupled=pair_args.decoupled,
        context=rows["train"].context(),
        about={**corpus_args.about(), "base": base},
    )


@as_input_error(StrictDataclassError)
def make_config(args: PairArguments, tokenizer: PreTrainedTokenizerBase, length: int) -> HfDebertaRtdConfig:
    if args.starts_anew:
        config = args.new_config(tokenizer, length)
        return HfDebertaRtdConfig.from_discriminator(config, args.generator_layers, **args.together())
    loading = {**args.overrides(), **args.loading()}
    discriminator = HfDebertaConfig.from_pretrained(args.discriminator_name_or_path, **loading)
    if args.generator_name_or_path is None:
        generator = released_generator_config(args.discriminator_name_or_path, **loading)
    else:
        generator = HfDebertaConfig.from_pretrained(args.generator_name_or_path, **loading)
    return HfDebertaRtdConfig(generator=generator, discriminator=discriminator, **args.together())


def make_pair(args: PairArguments, config: HfDebertaRtdConfig) -> HfDebertaForRtdPretraining:
    """The pair to go on from, or a new one."""
    if args.starts_anew:
        return HfDebertaForRtdPretraining(config)
    loading = {"dtype": "float32", **args.overrides(), **args.loading()}
    names = (args.generator_name_or_path, args.discriminator_name_or_path)
    return HfDebertaForRtdPretraining.from_pair(*names, loading=loading, **args.together())


if __name__ == "__main__":
    main()
