"""Flags that the pretraining scripts share, and the tokenizer, configuration and rows made from them."""

import json
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.utils import logging

from hf_deberta import PRESETS, HfDebertaConfig
from hf_deberta.pretraining.corpus import Corpus, CorpusArguments
from hf_deberta.pretraining.masking import Masking, Vocabulary
from hf_deberta.pretraining.packing import RowCollator, TokenRows, check_rows
from hf_deberta.pretraining.recipes import DEFAULT_ROWS, PUBLISHED, Recipe, find_recipe, parse_name
from hf_deberta.pretraining.trainer import PretrainingTrainer
from hf_deberta.tokenization_hf_deberta import load_tokenizer
from hf_deberta.training.command_line import flag, free_flag
from hf_deberta.training.errors import InputError, input_errors
from hf_deberta.training.processes import number_of_devices
from hf_deberta.training.run_identity import RunArguments
from hf_deberta.training.script import as_words, run_script, used_and_changed

logger = logging.get_logger(__name__)

# What Transformers raises when a configuration, tokenizer or checkpoint named by the user is missing or invalid.
LOADING_ERRORS = (OSError, ValueError, StrictDataclassError)


@dataclass
class NewModelArguments:
    """A new model, its tokenizer, and options of downloads."""

    config_preset: str | None = flag(None, "Train a new model of a published size.", choices=list(PRESETS))
    config_name: str | None = flag(None, "Train a new model with this configuration; vocab_size is the tokenizer's.")
    config_overrides: str | None = flag(None, "Change fields of the configuration: 'hidden_size=256,pos_att_type=c2p'.")
    emd_steps: int | None = flag(None, "Steps of the enhanced mask decoder; 0 trains without it.")
    tokenizer_name: str | None = flag(None, "Name or folder (default: the checkpoint's).")
    cache_dir: str | None = free_flag(None, "Folder for downloaded files.")
    model_revision: str = flag("main", "Branch, tag or commit of the checkpoint.")
    token: str | None = free_flag(None, "Hub token for private repositories.")

    def __post_init__(self) -> None:
        self.config_fields()  # report misspelt fields at once

    @property
    def checkpoint(self) -> str | None:
        """Name or folder of the checkpoint whose tokenizer and configuration are used."""
        return None

    @property
    def new_model(self) -> bool:
        """Whether weights start at random."""
        return self.checkpoint is None

    def make_model(self, tokenizer: PreTrainedTokenizerBase, length: int, do_train: bool) -> Any:
        """Load the model, or make a new one; raise an InputError if rows of this length do not fit."""
        raise NotImplementedError

    def hub_options(self) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained`."""
        options = {"cache_dir": self.cache_dir, "revision": self.model_revision, "token": self.token}
        return {**options, "trust_remote_code": False}  # code beside a checkpoint is never run

    def config_fields(self) -> dict[str, Any]:
        """Fields of the configuration that flags change."""
        emd_steps = {} if self.emd_steps is None else {"emd_steps": self.emd_steps}
        return emd_steps | parse_overrides(self.config_overrides)

    def new_config(self, tokenizer: PreTrainedTokenizerBase, length: int) -> HfDebertaConfig:
        """Make the configuration of a new model: of `config_preset`, of the checkpoint, or of `config_name`.

        The vocabulary size is the tokenizer's.
        """
        fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **self.config_fields()}
        name = self.checkpoint or self.config_name or ""
        with input_errors(name, *LOADING_ERRORS):
            if self.config_preset is not None:
                fields.setdefault("max_position_embeddings", max(512, length))
                return HfDebertaConfig.from_preset(self.config_preset, **fields)
            return HfDebertaConfig.from_pretrained(name, **fields, **self.hub_options())

    def load_config(self, name: str) -> HfDebertaConfig:
        """Load the configuration of checkpoint `name`, with the fields that flags change."""
        fields = self.config_fields()
        with input_errors(name, *LOADING_ERRORS):
            config = HfDebertaConfig.from_pretrained(name, **fields, **self.hub_options())
            if "max_position_embeddings" not in fields:
                return config
            own = HfDebertaConfig.from_pretrained(name, **self.hub_options()).max_position_embeddings
        if config.relative_attention and config.max_relative_positions < 1 and config.max_position_embeddings != own:
            raise InputError(
                f"max_position_embeddings is also the largest relative distance of {name}, and another one gives its "
                f"relative positions other weights: add max_relative_positions={own} to --config_overrides"
            )
        return config

    def make_tokenizer(self, corpus: Corpus, folder: Path) -> PreTrainedTokenizerBase:
        """Train a tokenizer on the corpus, or load `tokenizer_name` or the tokenizer of the checkpoint."""
        if corpus.arguments.train_tokenizer is not None:
            if not self.new_model:
                raise InputError(
                    "--train_tokenizer makes a vocabulary that a trained model does not have: leave it out, or "
                    "start a new model"
                )
            return corpus.train_tokenizer(folder / "tokenizer", corpus.arguments.max_seq_length)
        name = self.tokenizer_name or self.checkpoint or self.config_name
        if name is None:
            raise InputError(
                "a new model needs a tokenizer: train one with --train_tokenizer 32000, or give --tokenizer_name"
            )
        with input_errors(name, *LOADING_ERRORS):
            return load_tokenizer(name, **self.hub_options())


@dataclass
class MaskingArguments:
    """Which tokens are masked."""

    masking: str = flag("unbiased", "unbiased, or official: as the released code masks.")
    mlm_probability: float = flag(0.15, "Share of the tokens to predict.")
    max_ngram: int = flag(3, "Largest number of words in a masked span.")
    mask_prob: float = flag(0.8, "Share of the predicted tokens that become [MASK].")
    random_prob: float = flag(0.1, "Share of the predicted tokens that become a random token.")
    whole_word_mask: bool = flag(True, "Mask whole words; false masks single tokens of a word.")

    def make_masking(self, tokenizer: PreTrainedTokenizerBase) -> Masking:
        settings = (self.mlm_probability, self.max_ngram, self.masking, self.mask_prob, self.random_prob)
        return Masking(Vocabulary.from_tokenizer(tokenizer), *settings, self.whole_word_mask)


@dataclass
class PretrainingArguments(RunArguments):
    """Training, with defaults for small runs."""

    learning_rate: float = 2e-4
    warmup_steps: float = 0.05
    per_device_train_batch_size: int = 32
    logging_steps: float = 50
    save_steps: float = 500
    save_total_limit: int | None = 2
    do_train: bool = True
    do_eval: bool = True
    # the length is compared as a number of steps, which may grow: see `PretrainingTrainer.identifying_settings`
    num_train_epochs: float = field(default=1.0, metadata={"identifies": False})
    max_steps: int = field(default=-1, metadata={"identifies": False})
    recipe: str = free_flag(
        "none",
        "paper: the settings that the papers print for --config_preset; released: those of the released "
        "scripts; modern: those of newer encoders. With :MODEL those of another model. Any flag overrides the recipe.",
    )
    fixed_flags: ClassVar = (*RunArguments.fixed_flags, "label_smoothing_factor", "train_sampling_strategy")

    def __post_init__(self) -> None:
        if self.greater_is_better is None and str(self.metric_for_best_model).endswith("perplexity"):
            self.greater_is_better = False
        super().__post_init__()


def run_pretraining(
    objective: str,
    model_class: type[NewModelArguments],
    masking_class: type[MaskingArguments],
    make_trainer: Callable[..., PretrainingTrainer],
    description: str,
) -> None:
    """Train and evaluate what a command line says; `objective` selects the recipes: "mlm" or "rtd"."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    run_script(
        (model_class, CorpusArguments, masking_class, PretrainingArguments),
        lambda *arguments: make_trainer(*arguments).train_and_evaluate(),
        partial(choose_flags, objective=objective),
        description,
    )


def choose_flags(flags: Namespace, parse: Callable[[dict[str, Any]], Namespace], objective: str) -> Namespace:
    """Parse the command line again with the settings of --recipe as defaults, and log them with their source."""
    if flags.recipe == "none":
        return flags
    source, model = parse_name(flags.recipe)
    if not model:
        checkpoints = (getattr(flags, f"{name}_name_or_path", None) for name in ("model", "discriminator"))
        start = "new" if all(checkpoint is None for checkpoint in checkpoints) else "continued"
        model = getattr(flags, "config_preset", None)
        if model not in PUBLISHED[source, objective]:
            model = DEFAULT_ROWS.get((source, objective, start), model)
    recipe = find_recipe(source, objective, model)
    devices = number_of_devices(flags.use_cpu)
    published = recipe.flags(devices, flags.per_device_train_batch_size)
    settings = {name: value for name, value in published.items() if hasattr(flags, name)}
    if parse({"num_train_epochs": None}).num_train_epochs is not None:
        settings.pop("max_steps", None)  # the user chose the length in epochs
    flags = parse({"num_train_epochs": PretrainingArguments.num_train_epochs, **settings})
    overrides = settings.get("config_overrides")
    if overrides and flags.config_overrides != overrides:
        flags.config_overrides = settings["config_overrides"] = f"{overrides},{flags.config_overrides}"
    flags.recipe_message = describe_recipe(recipe, settings, flags, devices)
    logger.info(flags.recipe_message)
    return flags


def describe_recipe(recipe: Recipe, settings: dict[str, Any], flags: Namespace, devices: int) -> str:
    """Return the settings in use, where they are printed, and what the user changed or nobody published."""
    used, changed = used_and_changed(settings, flags)
    if "max_steps" in recipe.settings and "max_steps" not in settings:
        changed.append("max_steps")
    words = ", ".join(as_words(name, value) for name, value in used.items())
    rows, accumulation = flags.per_device_train_batch_size, flags.gradient_accumulation_steps
    message = f"Recipe: {recipe.source}. Used: {words or 'nothing'}. Rows per step: "
    message += f"{devices * rows * accumulation:,} = {devices} device(s) x {rows} x {accumulation}"
    message += f", published: {recipe.batch:,}."
    if changed:
        message += f" Overridden by you: {', '.join(f'--{name}' for name in changed)}."
    if recipe.missing:
        message += f" No figure is known for {', '.join(f'--{name}' for name in recipe.missing)}: our defaults."
    return message


def check_model_fits(
    config: HfDebertaConfig, tokenizer: PreTrainedTokenizerBase, length: int, causal: bool = False
) -> None:
    """Check that model, tokenizer and length of rows fit together, before the corpus is tokenized."""
    check_rows(tokenizer, length)
    positions = config.max_position_embeddings
    if (config.uses_mask_decoder or config.position_biased_input) and length > positions:
        raise InputError(
            f"--max_seq_length {length} is more than the {positions} absolute positions of the model: use shorter "
            f"rows; for a new model, --config_overrides max_position_embeddings={length}; to continue from a "
            "released checkpoint, --emd_steps 0, which leaves out the decoder, whose positions they are"
        )
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's vocabulary has {config.vocab_size}: use the "
            "model's tokenizer"
        )
    if causal and config.conv_kernel_size > 0:
        raise InputError(
            f"the convolution (conv_kernel_size={config.conv_kernel_size}) looks at the next token, which a causal or "
            "joint objective must not: add --config_overrides conv_kernel_size=0, or use --objective mlm"
        )


def prepare(
    model_args: NewModelArguments,
    corpus_args: CorpusArguments,
    masking_args: MaskingArguments | None,  # None for causal models
    training_args: PretrainingArguments,
) -> tuple[Corpus, dict[str, Any]]:
    """Return the corpus, and keyword arguments of the trainer, the model among them."""
    if model_args.new_model and not training_args.do_train:
        raise InputError(
            "--do_train false evaluates a trained model, but this one would be new, with random weights: name a "
            "checkpoint, without --from_scratch"
        )
    set_seed(training_args.seed)
    # other processes wait, and read the files of the main process
    main_process_first = partial(training_args.main_process_first, local=training_args.save_on_each_node)
    with main_process_first(desc="training the tokenizer"):
        corpus = Corpus(corpus_args, model_args.cache_dir, model_args.token)
        tokenizer = model_args.make_tokenizer(corpus, training_args.output_folder)
    # with ZeRO stage 3, all processes load the model together
    model = model_args.make_model(tokenizer, corpus_args.max_seq_length, training_args.do_train)
    masking = None if masking_args is None else masking_args.make_masking(tokenizer)
    with main_process_first(desc="tokenizing"):
        rows = make_rows(corpus, tokenizer, masking, training_args)
    checkpoint = None if model_args.new_model else model_args.checkpoint
    options = {
        "model": model,
        "args": training_args,
        "data_collator": RowCollator(tokenizer.pad_token_id),
        "train_dataset": rows["train"],
        "eval_dataset": rows.get("validation"),
        "test_dataset": rows.get("test"),
        "processing_class": tokenizer,
        "card_fields": {**corpus_args.card_fields(), "base": checkpoint},
    }
    return corpus, options


def make_rows(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, masking: Masking | None, training_args: TrainingArguments
) -> dict[str, TokenRows]:
    """Return the rows of each split. Tokenizes the corpus unless its token files exist."""
    args = corpus.arguments
    tokenizer.model_max_length = max(tokenizer.model_max_length, args.max_seq_length)  # it is saved with the model
    # push_to_hub ignores names that start with an underscore
    tokens_dir = args.tokens_dir or Path(str(training_args.output_dir)) / "_tokens"
    overwrite = args.overwrite_cache and training_args.should_save  # by one process; the others read what it wrote
    rows = {}
    for split in corpus.splits:
        with input_errors("", FileExistsError, NotADirectoryError):  # --tokens_dir is a file
            tokens = corpus.token_file(split, tokenizer, tokens_dir, overwrite)
        rows[split] = TokenRows(tokens, tokenizer, args.max_seq_length, masking, args.pack, training_args.seed)
        logger.info(
            f"{split}: {tokens.about['tokens']:,} tokens in {len(rows[split]):,} rows; on average, a token has "
            f"{rows[split].mean_context_length():,.0f} tokens of its own document in its row"
        )
    return rows


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Parse 'hidden_size=256,pos_att_type=c2p|p2c,relative_attention=false' into fields of the configuration."""
    fields: dict[str, Any] = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"--config_overrides must be name=value,name=value, but has {part!r}")
        try:
            fields[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            fields[name.strip()] = value
    if unknown := fields.keys() - {*HfDebertaConfig.__dataclass_fields__, "attn_implementation"}:
        raise InputError(
            f"--config_overrides: unknown field {', '.join(sorted(unknown))}; HfDebertaConfig documents the fields"
        )
    return fields
