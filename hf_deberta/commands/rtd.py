r"""Pretrain a DeBERTaV3: replaced token detection with gradient-disentangled embedding sharing.

Train a new pair of generator and discriminator, and its tokenizer, on one file:

    hf-deberta rtd --config_preset v3-small --train_file corpus.txt --train_tokenizer 32000 --output_dir my-deberta

Continue pretraining from a released pair, on several GPUs. Its generator lies beside the discriminator:

    accelerate launch -m hf_deberta rtd \
        --discriminator_name_or_path microsoft/deberta-v3-large --train_file 'notes/*.txt' \
        --bf16 --output_dir my-domain-deberta

Continue from two checkpoints:

    hf-deberta rtd --generator_name_or_path my-deberta/generator --discriminator_name_or_path \
        my-deberta/discriminator --train_file notes.txt --output_dir my-domain-deberta

Writes two ordinary checkpoints: OUTPUT_DIR/discriminator, the model to fine-tune, and OUTPUT_DIR/generator, a
masked-language model. Repeat the command to resume an interrupted run.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta.pretraining.arguments import (
    LOADING_ERRORS,
    MaskingArguments,
    NewModelArguments,
    PretrainingArguments,
    check_model_fits,
    prepare,
    run_pretraining,
)
from hf_deberta.pretraining.corpus import CorpusArguments
from hf_deberta.pretraining.rtd_pretraining import HfDebertaForRtdPretraining, HfDebertaRtdConfig
from hf_deberta.pretraining.rtd_trainer import RtdTrainer
from hf_deberta.training.command_line import flag
from hf_deberta.training.errors import InputError, input_errors

logger = logging.get_logger(__name__)


@dataclass
class PairArguments(NewModelArguments):
    """Generator and discriminator, and how they are trained together."""

    discriminator_name_or_path: str | None = flag(None, "Continue from this discriminator.")
    generator_name_or_path: str | None = flag(
        None, "Continue from this generator; by default the one beside the discriminator."
    )
    generator_layers: int | None = flag(None, "Layers of a new generator; by default half of the discriminator's.")
    embedding_sharing: str = flag(
        "gdes", "gdes (gradient-disentangled), es (one table for both), nes (a table for each)."
    )
    rtd_weight: float = flag(50.0, "Weight of the discriminator's loss: 50 in the paper, 10 in the released script.")
    sampling_temperature: float = flag(
        1.0, "Temperature of sampling from the generator's predictions; 0 takes the most likely token."
    )
    decoupled: bool = flag(False, "Step the generator first, then the discriminator, as the released script does.")

    def __post_init__(self) -> None:
        super().__post_init__()
        generator, discriminator = self.generator_name_or_path, self.discriminator_name_or_path
        starts = [name for name in (self.config_preset, self.config_name, discriminator) if name is not None]
        if generator is not None and discriminator is None:
            raise InputError(
                "--generator_name_or_path needs --discriminator_name_or_path: give both, or the discriminator alone if "
                "the generator lies beside it"
            )
        if len(starts) != 1:
            raise InputError(
                "give one of --config_preset, --config_name (a new pair) or --discriminator_name_or_path (continue)"
            )
        if self.generator_layers is not None and not self.new_model:
            raise InputError(
                f"--generator_layers is for a new generator, but {generator or discriminator} has its layers already: "
                "leave it out"
            )

    @property
    def checkpoint(self) -> str | None:
        return self.discriminator_name_or_path

    def make_model(self, tokenizer: PreTrainedTokenizerBase, length: int, do_train: bool) -> HfDebertaForRtdPretraining:
        with input_errors("", *LOADING_ERRORS):
            if self.checkpoint is None:
                discriminator = self.new_config(tokenizer, length)
                fields = self.pair_fields()
                config = HfDebertaRtdConfig.from_discriminator(discriminator, self.generator_layers, **fields)
                pair = HfDebertaForRtdPretraining(config)
            else:
                names = (self.generator_name_or_path, self.checkpoint)
                for name in filter(None, names):
                    self.load_config(name)  # refuses another largest distance
                options = {"dtype": "float32", **self.config_fields(), **self.hub_options()}
                pair = HfDebertaForRtdPretraining.from_pair(*names, options=options, **self.pair_fields())
        check_model_fits(pair.generator.config, tokenizer, length)
        return pair

    def pair_fields(self) -> dict[str, Any]:
        """Fields of `HfDebertaRtdConfig`."""
        return {name: getattr(self, name) for name in ("embedding_sharing", "rtd_weight", "sampling_temperature")}


@dataclass
class RtdMaskingArguments(MaskingArguments):
    """As DeBERTaV3: single words are masked, and all of them become [MASK]."""

    max_ngram: int = 1
    mask_prob: float = 1.0
    random_prob: float = 0.0


def main() -> None:
    run_pretraining("rtd", PairArguments, RtdMaskingArguments, make_trainer, __doc__)


def make_trainer(
    pair_args: PairArguments,
    corpus_args: CorpusArguments,
    masking_args: RtdMaskingArguments,
    training_args: PretrainingArguments,
) -> RtdTrainer:
    if training_args.push_to_hub:
        raise InputError(
            "--push_to_hub uploads one model, but this script writes two: after training, push "
            "OUTPUT_DIR/discriminator and OUTPUT_DIR/generator"
        )
    if training_args.save_format == "transformers":
        raise InputError(
            "--save_format transformers: Transformers has no class with the discriminator's head; leave it out here, "
            "and give it when you fine-tune OUTPUT_DIR/discriminator"
        )
    _, options = prepare(pair_args, corpus_args, masking_args, training_args)
    pair = options["model"]
    logger.info(
        f"parameters: generator {pair.generator.num_parameters():,}, "
        f"discriminator {pair.discriminator.num_parameters():,}. loss = lm_loss + {pair.config.rtd_weight:g} x rtd_loss"
    )
    return RtdTrainer(decoupled=pair_args.decoupled, **options)
