"""What the fine-tuning scripts share: their flags and recipes, the trainer, and runs over several seeds.

A script reads top to bottom: `parsed` gives its arguments, with the recipe of the task as defaults; `over_seeds` runs
it once or with several seeds; in a run, `load_tokenizer` and `load_model` make what `FineTuningTrainer` trains, and
`train_and_evaluate` is what `Trainer` users write in their main().
"""

import copy
import gc
import json
import os
import shutil
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from torch.utils.data import Sampler, SequentialSampler
from transformers import (
    AutoTokenizer,
    EarlyStoppingCallback,
    HfArgumentParser,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging

from hf_deberta import HfDebertaConfig, HfDebertaModel
from hf_deberta.training.corpus import load_tokenizer as load_deberta_tokenizer
from hf_deberta.training.model_card import write_training_card
from hf_deberta.training.pretraining_trainer import NextEpoch
from hf_deberta.training.recipes import FROM_MNLI, find_recipe, size_of
from hf_deberta.training.row_order import RowOrder
from hf_deberta.training.sift import SiftTrainer
from hf_deberta.training.tokenizer_training import train_tokenizer
from hf_deberta.training.whole_checkpoints import WholeCheckpoints, last_checkpoint

DEBERTA = {"deberta", "deberta-v2", "hf_deberta"}
DECISIVE = ("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "warmup_steps", "seed")
DECISIVE += ("gradient_accumulation_steps", "weight_decay", "lr_scheduler_type", "optim", "data_seed")
DECISIVE += ("train_sampling_strategy", "metric_for_best_model")
CLOCKS = ("runtime", "per_second", "preparation_time")  # not of the model

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
        return {
            "cache_dir": self.cache_dir,
            "revision": self.model_revision,
            "token": self.token,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass
class FineTuningArguments(TrainingArguments):
    """Trainer's, with defaults as the papers and practitioners have them.

    Adam's epsilon 1e-6, weight decay 0.01; evaluation after each epoch, the best model is kept. Without --do_train,
    --do_eval and --do_predict a script does all three, as far as there is data.
    """

    adam_epsilon: float = 1e-6
    weight_decay: float = 0.01
    per_device_eval_batch_size: int = 32
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int | None = 1
    load_best_model_at_end: bool = True
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after so many evaluations without improvement."}
    )
    num_seeds: int = field(
        default=1, metadata={"help": "Train with so many seeds, from --seed on, and report median, mean and spread."}
    )

    def __post_init__(self) -> None:
        if self.num_seeds < 1:
            raise ValueError(f"--num_seeds is 1 or more, not {self.num_seeds}")
        if self.num_seeds > 1 and self.push_to_hub:
            raise ValueError(
                "--push_to_hub knows one model: without it, push OUTPUT_DIR, which holds the best, afterwards"
            )
        self.judged_by_user = self.metric_for_best_model is not None
        self.does_all = not (self.do_train or self.do_eval or self.do_predict)
        if self.does_all:
            self.do_train = self.do_eval = self.do_predict = True
        if not (self.do_train and self.do_eval):
            self.eval_strategy = "no"
        if self.eval_strategy == "steps" and self.save_strategy == "epoch":
            self.save_strategy, self.save_steps = "steps", self.eval_steps or self.logging_steps
        if "no" in (self.eval_strategy, self.save_strategy):
            self.load_best_model_at_end = False
        if self.use_cpu or not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # or torch warns that it has no use
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise ValueError("--early_stopping_patience needs evaluations along the way: --do_train with --do_eval")
        super().__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hub_token": None}  # training_args.bin is pushed

    def judge_by(self, metric: str, others: Iterable[str] = ()) -> None:
        """Keep the model that is best by this metric, larger being better, unless the user has named another."""
        if not self.judged_by_user:
            self.metric_for_best_model, self.greater_is_better = metric, True
        known = dict.fromkeys(name.removeprefix("eval_") for name in (metric, *others, "loss"))
        if self.metric_for_best_model.removeprefix("eval_") not in known:
            raise ValueError(
                f"--metric_for_best_model is one of {', '.join(known)} for this task, not {self.metric_for_best_model}"
            )

    def fit_to(self, splits: Iterable[str]) -> None:
        """Do what there is data for; what was asked for by name must have its split."""
        found = {split.partition("_")[0] for split in splits}
        for flag, split in (("do_train", "train"), ("do_eval", "validation"), ("do_predict", "test")):
            if getattr(self, flag) and split not in found:
                if not self.does_all or flag == "do_train":
                    alone = "; to evaluate or predict alone, say --do_eval or --do_predict" if self.does_all else ""
                    there = ", ".join(sorted(found))
                    raise ValueError(f"--{flag} needs {split} rows (--{split}_file), and there are {there}{alone}")
                setattr(self, flag, False)
        if not self.do_eval:
            if self.early_stopping_patience is not None:
                raise ValueError("--early_stopping_patience needs validation rows (--validation_file)")
            self.eval_strategy, self.load_best_model_at_end = IntervalStrategy.NO, False


# 1. Flags and recipes


def parsed(
    kinds: tuple[type, ...], task_of: Callable[[Namespace], str], demo: Callable[[Path], dict[str, Any]], run: Callable
) -> Any:
    """`run` with the arguments of the command line, or of a JSON file. What a user can mend is said in a sentence.

    Args:
        task_of: the task's name in the table of recipes, by the flags.
        demo: writes made-up data and a tiny model into a folder, and gives the flags that use them.
    """
    parser = HfArgumentParser(kinds)
    script = Path(sys.argv[0]).name
    given = sys.argv[1:]
    try:
        from_file = {}
        if len(given) == 1 and given[0].endswith(".json"):
            from_file, given = read_flags(Path(given[0])), []
        parser.set_defaults(**from_file)
        flags = parser.parse_args(given)
        if unknown := set(from_file) - {action.dest for action in parser._actions}:
            raise ValueError(f"{sys.argv[1]} has fields that are no flags: {', '.join(sorted(unknown))}")
        parser.set_defaults(**({**made_up(flags, demo), **from_file} if flags.demo else {}))
        flags = parser.parse_args(given)
        if flags.recipe == "auto" and not flags.demo and (flags.intermediate or flags.model_name_or_path):
            chosen, origin = recipe_flags(flags, task_of(flags))
            parser.set_defaults(**{**chosen, **from_file})
            say_recipe(chosen, origin, parser.parse_args(given))
        return run(*parser.parse_args_into_dataclasses(given))
    except (StrictDataclassError, ValueError, OSError) as error:
        if logging.get_verbosity() <= logging.DEBUG:  # TRANSFORMERS_VERBOSITY=debug: where it was raised
            raise
        said = error.__cause__ if isinstance(error, StrictDataclassError) else None
        raise SystemExit(f"{script}: {said or error}") from error


def read_flags(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


def say_recipe(chosen: dict[str, Any], origin: str, flags: Namespace) -> None:
    """Which settings hold because of the recipe, and which because of the user."""
    if int(os.environ.get("RANK", 0)) > 0 or not (flags.do_train or not (flags.do_eval or flags.do_predict)):
        return
    kept = {name: value for name, value in chosen.items() if getattr(flags, name) == value}
    yours = [name for name in chosen if name not in kept]
    said = ", ".join(f"--{name} {value:g}" for name, value in kept.items())
    logger.warning(
        f"recipe ({origin}): {said}"
        + (f"; yours: --{', --'.join(yours)}" if yours else "")
        + " (--recipe none: no such)"
    )


def recipe_flags(flags: Namespace, task: str) -> tuple[dict[str, Any], str]:
    """The recipe for this checkpoint and task, and where it is from."""
    config = deberta_config(flags.intermediate or flags.model_name_or_path, flags)
    size, width = (None, 768) if config is None else (size_of(config), config.hidden_size)
    recipe, origin = find_recipe(task, size, width, getattr(flags, "sift", False))
    devices = int(os.environ.get("WORLD_SIZE", 0)) or max(1, torch.cuda.device_count())
    chosen = recipe.flags(devices, flags.gradient_accumulation_steps)
    batch = chosen["per_device_train_batch_size"] * devices * flags.gradient_accumulation_steps
    if batch != recipe.batch:
        origin += f"; its batch of {recipe.batch} becomes {batch} on {devices} device{'s' * (devices > 1)}"
    if config is None or task.startswith("squad"):  # whose head has none
        chosen.pop("cls_dropout")
    chosen = {name: value for name, value in chosen.items() if hasattr(flags, name)}
    if task in FROM_MNLI and flags.intermediate is None and size in ("v1-base", "v1-large", "v2-xlarge", "v2-xxlarge"):
        logger.warning("the paper starts this task from a checkpoint fine-tuned on MNLI: --intermediate CHECKPOINT")
    return chosen, origin


def made_up(flags: Namespace, demo: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Flags of a demonstration; its files are written beside the output."""
    folder = Path(flags.output_dir or "demo_output") / "made_up"
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {
        "output_dir": str(folder.parent),
        "learning_rate": 1e-3,
        "num_train_epochs": 2.0,
        "per_device_train_batch_size": 32,
        "warmup_steps": 0.1,
        "logging_steps": 20,
        "resume_from_checkpoint": "false",
        "save_strategy": "no",
    }
    return {**defaults, **demo(folder)}


def deberta_config(name: str, args: Namespace | ModelArguments) -> HfDebertaConfig | None:
    """The configuration of a checkpoint, of whichever format, if it is a DeBERTa."""
    loading = {"cache_dir": args.cache_dir, "revision": args.model_revision, "token": args.token}
    fields, _ = PretrainedConfig.get_config_dict(args.config_name or name, **loading)
    if not fields:
        raise OSError(f"{name} holds no config.json: it is no model, or not a path or a name on the Hub")
    if fields.get("model_type", "deberta-v2") not in DEBERTA:
        return None
    return HfDebertaConfig.from_pretrained(args.config_name or name, **loading)


# 2. Model and tokenizer


def load_tokenizer(args: ModelArguments, **options: Any) -> PreTrainedTokenizerBase:
    name, options = args.tokenizer_name or args.start, args.loading() | options
    if deberta_config(args.start, args) is None:
        return AutoTokenizer.from_pretrained(name, **options)
    return load_deberta_tokenizer(name, **options)


def load_model(
    args: ModelArguments, ours: type[PreTrainedModel], auto: type | None = None, **fields: Any
) -> PreTrainedModel:
    """A DeBERTa of any format by our class, another model by Transformers' own.

    Args:
        fields: of the configuration.
    """
    config, options = deberta_config(args.start, args), args.loading()
    if args.attn_implementation is not None:
        options["attn_implementation"] = args.attn_implementation
    options["ignore_mismatched_sizes"] = args.ignore_mismatched_sizes or args.intermediate is not None
    if config is None and auto is None:
        raise ValueError(f"{args.start} is not a DeBERTa, and Transformers has no such head for other models")
    if config is None:
        if args.cls_dropout is not None:
            logger.warning(f"--cls_dropout is not known to {args.start}, and left out")
        return auto.from_pretrained(args.start, dtype=torch.float32, **options, **fields)
    options.pop("trust_remote_code")
    if args.cls_dropout is not None:
        fields["cls_dropout"] = args.cls_dropout
    for name, value in fields.items():
        setattr(config, name, value)
    try:
        model = ours.from_pretrained(args.start, config=config, dtype=torch.float32, **options)
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
    if args.intermediate and checkpoint_labels(args) != tuple(config.id2label.values()):
        new_classifier(model)
    return model


def labels_in_order(labels: tuple[str, ...] | None, args: ModelArguments) -> tuple[str, ...] | None:
    """The labels of a task, as the checkpoint numbers them if it knows just these."""
    known = checkpoint_labels(args)
    return known if labels and known and sorted(known) == sorted(labels) else labels


def checkpoint_labels(args: ModelArguments) -> tuple[str, ...] | None:
    """By number; None for a regression."""
    fields, _ = PretrainedConfig.get_config_dict(args.start, **args.loading())
    if fields.get("problem_type") == "regression":
        return None
    kept = {name: fields[name] for name in ("id2label", "num_labels") if name in fields}
    return tuple(PretrainedConfig(**kept).id2label.values())  # two are the default, and then not in the file


def new_classifier(model: PreTrainedModel) -> None:
    """Forget which classes an intermediate task had."""
    for name, module in model.named_children():
        if name == "classifier":
            for part in module.modules():
                model._init_weights(part)


def longest_input(args: Any, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, default: int = 128) -> int:
    """--max_seq_length, but not more than the tokenizer or the model's positions allow."""
    length, most = args.max_seq_length or default, tokenizer.model_max_length
    if config.model_type != HfDebertaConfig.model_type:  # ours know no longest input, or say so themselves
        most = min(most, getattr(config, "max_position_embeddings", None) or most)
    if length > most:
        logger.warning(f"--max_seq_length {length} is more than the model takes: {most}")
    return min(length, most)


# 3. Training


class FineTuningTrainer(SiftTrainer, WholeCheckpoints):
    """`Trainer` with SiFT on request, whole checkpoints, an order of rows that depends on seed and epoch alone (so
    that a run goes on exactly), predictions in the order of the rows, and a model card.

    With `train_sampling_strategy="group_by_length"`, inputs of like length share a batch. Ours need it less, since
    they leave padding out of a batch; others are up to twice as fast.

    Args:
        about: what the model card says, see `model_card.write_training_card`.
    """

    def __init__(self, *args, about: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.about = about or {"data": "task data"}
        self.order: RowOrder | None = None
        self.evaluated = self.eval_dataset  # what metrics are computed of
        self.add_callback(NextEpoch(self))
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))

    def _get_train_sampler(self, train_dataset=None) -> Sampler:
        rows = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        lengths = None
        if self.args.train_sampling_strategy == "group_by_length":
            # of several choices the longest
            lengths = [max(map(len, ids)) if isinstance(ids[0], list) else len(ids) for ids in rows["input_ids"]]
        batch = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        self.order = RowOrder(len(rows), seed, lengths, batch)
        return self.order

    def _get_eval_sampler(self, eval_dataset) -> Sampler | None:
        """In order, also where training groups by length: predictions belong to rows."""
        return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None

    def evaluate(self, eval_dataset=None, *args, **kwargs) -> dict[str, float]:
        self.evaluated = self.eval_dataset if eval_dataset is None else eval_dataset
        return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset, *args, **kwargs):
        self.evaluated = test_dataset
        return super().predict(test_dataset, *args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        warmup = self.args.get_warmup_steps(num_training_steps)
        if warmup >= num_training_steps:
            logger.warning(
                f"--warmup_steps {warmup} is not less than the {num_training_steps} steps of the run, so the learning "
                "rate never gets to what it should be; --warmup_steps 0.1 is a tenth of any run"
            )
        return super().create_scheduler(num_training_steps, optimizer)

    def settings(self) -> dict[str, Any]:
        """What makes a run another run."""
        found = {name: getattr(self.args, name) for name in DECISIVE}
        found |= {"data": self.about["data"], "start": self.about.get("base"), "rows": len(self.train_dataset)}
        found["sift"] = None if self.sift is None else vars(self.sift)
        return json.loads(json.dumps(found, default=str))

    def takes_up_finished_run(self) -> bool:
        """Whether `output_dir` holds this run, trained to its end: then its model is taken. Another run is refused."""
        folder = Path(self.args.output_dir)
        asked, settings = folder / "run.json", self.settings()
        anew = str(self.args.resume_from_checkpoint).lower() == "false"
        if asked.exists() and not anew:
            before = json.loads(asked.read_text(encoding="utf-8"))
            changed = [name for name, value in settings.items() if before.get(name) != value]
            if changed:
                raise ValueError(
                    f"{folder} holds a run with other settings: "
                    + ", ".join(f"{name} {before.get(name)}, now {settings[name]}" for name in changed)
                    + "; take another --output_dir, or start anew with --resume_from_checkpoint false"
                )
            state, whole = folder / "trainer_state.json", any(folder.glob("model*.safetensors"))
            if state.exists() and whole and self.args.resume_from_checkpoint is None:
                self.state = TrainerState.load_from_json(str(state))
                self._load_from_checkpoint(str(folder))
                logger.warning(f"{folder} holds this run, trained to its end: nothing is trained")
                return True
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "trainer_state.json").unlink(missing_ok=True)
            write_json(asked, settings)
        return False

    def create_model_card(self, **kwargs) -> None:
        if self.model.config.model_type == HfDebertaConfig.model_type:
            write_training_card(self, **self.about)
        else:
            base = self.about.get("base")
            known = {"dataset": self.about["data"], "finetuned_from": None if base and os.path.exists(base) else base}
            super().create_model_card(**{**known, **kwargs})


def evaluations_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """The validation splits by the suffix of their metrics; none for the main one: the first, or `_matched`."""
    suffixes = {split.removeprefix("validation"): split for split in inputs if split.startswith("validation")}
    main = next((suffix for suffix in ("", "_matched", *suffixes) if suffix in suffixes), None)
    return {"" if suffix == main else suffix: inputs[split] for suffix, split in suffixes.items()}


def train_and_evaluate(trainer: FineTuningTrainer, evaluations: dict[str, Any]) -> dict[str, float]:
    """Train as far as asked, going on where a run was stopped, then evaluate the model that is kept.

    Args:
        evaluations: data sets by the suffix of their metrics, "" for the main one.
    """
    args, metrics = trainer.args, {}
    if args.do_train and not trainer.takes_up_finished_run():
        result = trainer.train(resume_from_checkpoint=last_checkpoint(args))
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        for suffix, rows in evaluations.items():
            found = trainer.evaluate(rows)
            metrics |= {
                f"{name}{suffix}": value
                for name, value in found.items()
                if not suffix or not any(word in name for word in (*CLOCKS, "epoch"))
            }
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    return metrics


def finish(trainer: FineTuningTrainer) -> None:
    """Push, or write the model card, and say what there is now."""
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    elif trainer.args.do_train:
        trainer.create_model_card()
    folder = Path(trainer.args.output_dir)
    if trainer.is_world_process_zero() and folder.is_dir():
        files = sorted(path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py")
        logger.warning(f"{folder} holds {', '.join(files)}")


# 4. Several seeds


def over_seeds(args: FineTuningArguments, metric: str, run: Callable[[FineTuningArguments], dict[str, float]]) -> None:
    """`run` once, or with each of --num_seeds seeds in a folder of its own.

    A seed that was trained is not trained again. The best one's model is copied to --output_dir, beside `seeds.json`.

    Args:
        metric: which is the best, larger being better.
    """
    if args.num_seeds == 1:
        run(args)
        return leave()
    folder, found = Path(args.output_dir), {}
    for seed in range(args.seed, args.seed + args.num_seeds):
        one = copy.copy(args)
        one.seed, one.output_dir = seed, str(folder / f"seed-{seed}")
        found[seed] = run(one)
    if args.should_save and args.do_eval:
        keep_best(folder, found, metric)
    leave()


def leave() -> None:
    """Let the other processes go in order, once nothing holds their group any more."""
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


def keep_best(folder: Path, found: dict[int, dict[str, float]], metric: str) -> None:
    """Median, mean and spread to the screen and to seeds.json; the files of the best model."""
    first = found[min(found)]
    names = [name for name in first if name.startswith("eval_") and not any(word in name for word in CLOCKS)]
    summary: dict[str, Any] = {"seeds": found}
    print(f"\n{len(found)} seeds{'':22} median     mean      std      min      max")
    for name in names:
        values = [by_name[name] for by_name in found.values()]
        spread = {"median": statistics.median(values), "mean": statistics.mean(values), "std": statistics.stdev(values)}
        spread |= {"min": min(values), "max": max(values)}
        summary[name] = spread
        print(f"{name:28}" + "".join(f" {value:8.4f}" for value in spread.values()))
    best = max(found, key=lambda seed: found[seed][metric])
    summary["best_seed"] = best
    for path in sorted((folder / f"seed-{best}").iterdir()):
        if path.is_file():
            unfinished = folder / f"{path.name}.unfinished"
            shutil.copyfile(path, unfinished)
            os.replace(unfinished, folder / path.name)
    write_json(folder / "seeds.json", summary)
    print(f"the model of seed {best} is in {folder}")


def write_json(path: Path, content: dict[str, Any]) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(content, indent=2), encoding="utf-8")
    os.replace(unfinished, path)


# 5. Demonstrations


def write_made_up(folder: Path, texts: list[str], files: dict[str, list[dict]]) -> dict[str, Any]:
    """A tiny untrained model with a tokenizer of these texts, and rows as files; the flags that use them."""
    model = folder / "model"
    tokenizer = train_tokenizer(texts, 400, "bpe")
    config = HfDebertaConfig.from_preset(
        "tiny", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=64, intermediate_size=256
    )
    set_seed(0)
    tokenizer.save_pretrained(model)
    HfDebertaModel(config).save_pretrained(model)
    flags = {"model_name_or_path": str(model)}
    for split, rows in files.items():
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        flags[f"{split}_file"] = str(path)
    return flags
