"""Flags that the pretraining scripts share, and what they make of them."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, PreTrainedTokenizerBase, TrainingArguments

from hf_deberta import PRESETS, HfDebertaConfig
from hf_deberta.pretraining.corpus import Corpus
from hf_deberta.pretraining.masking import Masking, Vocabulary
from hf_deberta.pretraining.packing import Rows, check_rows
from hf_deberta.runs.command_line import errors_as_sentences, words_and_flags
from hf_deberta.runs.run_identity import WITHOUT_EFFECT, RunArguments, decisive
from hf_deberta.tokenization_hf_deberta import load_tokenizer

NOT_HERE = {  # flags of Transformers' run_mlm.py
    "--model_type": "--config_preset or --config_name says what a new model is",
    "--pad_to_max_length": "rows are packed to full length, and with --no_pack padded to the longest of a batch",
    "--dtype": "weights are trained in float32, and --bf16 computes in bfloat16",
    "--use_fast_tokenizer": "a tokenizer is always the fast one if there is one",
    "--trust_remote_code": "code of a checkpoint is never run",
}
WITHOUT_EFFECT_HERE = WITHOUT_EFFECT | {  # its length is looked at as steps, the training text by its fingerprint
    "max_steps", "num_train_epochs", "tokens_dir",
}  # fmt: skip
OF_THE_BEST = {  # which model that is, at most, so of no effect unless it is kept
    "validation_file", "max_eval_samples", "eval_steps", "eval_strategy", "eval_delay", "eval_on_start",
    "bf16_full_eval", "fp16_full_eval", "prediction_loss_only", "metric_for_best_model", "greater_is_better",
    "save_steps", "save_strategy",
}  # fmt: skip


@dataclass
class NewModelArguments:
    """A new model, its tokenizer, and where downloads come from."""

    config_preset: str | None = field(
        default=None, metadata={"help": f"Start anew at a published size: {', '.join(PRESETS)}."}
    )
    config_name: str | None = field(default=None, metadata={"help": "Start anew with this configuration."})
    config_overrides: str | None = field(
        default=None, metadata={"help": "Fields of the configuration: 'hidden_size=256,pos_att_type=c2p'."}
    )
    emd_steps: int | None = field(
        default=None, metadata={"help": "Times the last layer decodes with absolute positions; 0: no decoder."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "A tokenizer, if not that of the model."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads are kept."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the checkpoint."})
    token: str | None = field(default=None, metadata={"help": "Token for private repositories."})

    def __post_init__(self) -> None:
        self.overrides()  # misspelt ones are said at once

    def loading(self) -> dict[str, Any]:
        return {"cache_dir": self.cache_dir, "revision": self.model_revision, "token": self.token}

    def overrides(self) -> dict[str, Any]:
        emd_steps = {} if self.emd_steps is None else {"emd_steps": self.emd_steps}
        return emd_steps | parse_overrides(self.config_overrides)

    def new_config(self, tokenizer: PreTrainedTokenizerBase, length: int, name: str | None = None) -> HfDebertaConfig:
        """Of a preset, or of the configuration `name`, with the tokenizer's vocabulary."""
        fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **self.overrides()}
        if self.config_preset is not None:
            fields.setdefault("max_position_embeddings", max(512, length))
            return HfDebertaConfig.from_preset(self.config_preset, **fields)
        return HfDebertaConfig.from_pretrained(name or self.config_name, **fields, **self.loading())

    def tokenizer(self, corpus: Corpus, folder: Path, name: str | None, starts_anew: bool) -> PreTrainedTokenizerBase:
        """One learnt from the corpus, the one asked for, or that of the checkpoint `name`."""
        if corpus.arguments.train_tokenizer is not None:
            if not starts_anew:
                raise ValueError("--train_tokenizer makes words that a trained model does not know: add --from_scratch")
            return corpus.tokenizer(folder / "tokenizer", corpus.arguments.max_seq_length)
        name = self.tokenizer_name or name or self.config_name
        if name is None:
            raise ValueError(
                "a new model needs a tokenizer: learn one (--train_tokenizer 32000) or give --tokenizer_name"
            )
        return load_tokenizer(name, **self.loading())


@dataclass
class MaskingArguments:
    """What is to be guessed."""

    masking: str = field(
        default="unbiased", metadata={"help": "unbiased, or official: the released generator, see training/masking.py."}
    )
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to be guessed."})
    max_ngram: int = field(default=3, metadata={"help": "Words of a masked span at most."})
    mask_prob: float = field(default=0.8, metadata={"help": "Share of them that becomes [MASK]."})
    random_prob: float = field(default=0.1, metadata={"help": "Share of them that becomes a random word."})
    whole_word_mask: bool = field(default=True, metadata={"help": "Mask whole words; --no_whole_word_mask for pieces."})

    def of(self, tokenizer: PreTrainedTokenizerBase) -> Masking:
        shares = (self.mlm_probability, self.max_ngram, self.masking)
        return Masking(Vocabulary.of(tokenizer), *shares, self.mask_prob, self.random_prob, self.whole_word_mask)


@dataclass
class PretrainingArguments(RunArguments):
    """Trainer's, with defaults after the papers: learning rate 2e-4, Adam's epsilon 1e-6, weight decay 0.01."""

    learning_rate: float = 2e-4
    adam_epsilon: float = 1e-6
    weight_decay: float = 0.01
    warmup_steps: float = 0.05
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 32
    num_train_epochs: float = 1.0
    logging_steps: float = 50
    save_steps: float = 500
    save_total_limit: int | None = 2
    do_train: bool = True
    do_eval: bool = True
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "By default the last checkpoint of OUTPUT_DIR, if there is one; false: start anew; a path: start "
            "from that one, each time the command is given."
        },
    )

    def __post_init__(self) -> None:
        if self.label_smoothing_factor != 0:
            raise ValueError(
                f"--label_smoothing_factor {self.label_smoothing_factor:g} is not supported: the losses here are those "
                "of the papers, without smoothing; leave it out"
            )
        if self.train_sampling_strategy != "random":
            raise ValueError(
                f"--train_sampling_strategy {self.train_sampling_strategy} is not supported: the order of rows depends "
                "on --seed (or --data_seed) and epoch alone; leave it out"
            )
        super().__post_init__()


def run_with_arguments(kinds: tuple[type, ...], run: Callable) -> Any:
    """`run` with the command line, or a JSON file, as arguments. What a user can mend is said in a sentence."""
    parser = HfArgumentParser(kinds)
    with errors_as_sentences(Path(sys.argv[0]).name):
        given, _ = words_and_flags(parser)
        *parts, unknown = parser.parse_args_into_dataclasses(given, return_remaining_strings=True)
        check_flags(unknown)
        flags = vars(parser.parse_args(given))
        of_the_best = set() if flags["load_best_model_at_end"] else OF_THE_BEST
        parts[-1].decisive = decisive(flags, WITHOUT_EFFECT_HERE | of_the_best)
        return run(*parts)


def check_flags(unknown: list[str]) -> None:
    """What is left of a command line must be nothing."""
    if unknown:
        hints = [NOT_HERE[name] for word in unknown if (name := word.partition("=")[0]) in NOT_HERE]
        raise ValueError("; ".join([f"there is no flag {' '.join(unknown)}", *hints, "--help lists all"]))


def check_what_is_evaluated(training_args: TrainingArguments, starts_anew: bool, flags: str) -> None:
    if starts_anew and not training_args.do_train:
        raise ValueError(
            f"--do_train false evaluates a trained model, and this one would be new, with random weights: give {flags}"
        )


def check(config: HfDebertaConfig, tokenizer: PreTrainedTokenizerBase, length: int, causal: bool = False) -> None:
    """Whether model, tokenizer and rows go together, which is asked before a corpus is tokenised."""
    check_rows(tokenizer, length)
    known = config.max_position_embeddings
    if (config.uses_mask_decoder or config.position_biased_input) and length > known:
        raise ValueError(
            f"--max_seq_length {length} is more than the {known} absolute positions of the model; take shorter rows, "
            f"or, for a new model, --config_overrides max_position_embeddings={length}"
        )
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model knows {config.vocab_size}; use the one that "
            "belongs to it"
        )
    if causal and config.conv_kernel_size > 0:
        raise ValueError(
            f"the convolution (conv_kernel_size={config.conv_kernel_size}) looks at the next token, which a causal or "
            "joint objective must not; add --config_overrides conv_kernel_size=0, or take --objective mlm"
        )


def rows_of(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    masking: Masking | None,
    training_args: TrainingArguments,
) -> dict[str, Rows]:
    """Rows of each split; the corpus is tokenised if it has not been."""
    args = corpus.arguments
    tokens_dir = args.tokens_dir or Path(training_args.output_dir) / "_tokens"  # push_to_hub leaves out what begins so
    anew = args.overwrite_cache and training_args.should_save  # by one process, the others read what it wrote
    found = {}
    for split in corpus.splits:
        tokens = corpus.tokens(split, tokenizer, tokens_dir, anew)
        found[split] = Rows(tokens, tokenizer, args.max_seq_length, masking, args.pack, training_args.seed)
    return found


def parse_overrides(text: str | None) -> dict[str, Any]:
    """'hidden_size=256,pos_att_type=c2p|p2c,relative_attention=false' as fields."""
    fields = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"--config_overrides takes name=value,name=value and not {part!r}")
        try:
            fields[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            fields[name.strip()] = value
    check_fields(fields)
    return fields


def check_fields(names: Iterable[str]) -> None:
    known = {*HfDebertaConfig.__dataclass_fields__, "attn_implementation"}
    for name in names:
        if name not in known:
            close = " or ".join(get_close_matches(name, sorted(known), n=2))
            meant = f" (do you mean {close}?)" if close else ""
            raise ValueError(f"--config_overrides: unknown field {name}{meant}; HfDebertaConfig documents all")
