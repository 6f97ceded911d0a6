"""Fine-tuning: the trainer that the scripts share, what they do with it, and runs over several seeds.

A script reads top to bottom: `parsed` gives its arguments, with the recipe of the task as defaults; `over_seeds` runs
it once or with several seeds; in a run, `load_tokenizer` and `load_model` make what `FineTuningTrainer` trains, and
`train_and_evaluate` is what `Trainer` users write in their main().
"""

import copy
import gc
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils.memory import clear_device_cache
from torch.utils.data import Sampler, SequentialSampler
from transformers import EarlyStoppingCallback, TrainerState
from transformers.utils import logging

from hf_deberta import HfDebertaConfig, HfDebertaForEntityChoice
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.sift import SiftTrainer
from hf_deberta.runs.checkpoints import TRAINER_STATE_NAME, AtomicCheckpointsMixin, atomic_write, last_checkpoint
from hf_deberta.runs.model_card import update_results, write_training_card
from hf_deberta.runs.row_order import RowOrder, SetEpochCallback
from hf_deberta.runs.run_identity import check_same_run, content_hash, write_json

WEIGHTS = "model*.safetensors"
CLOCKS = ("runtime", "per_second", "preparation_time")  # not of the model

logger = logging.get_logger(__name__)


class FineTuningTrainer(SiftTrainer, AtomicCheckpointsMixin):
    """`Trainer` with SiFT on request, whole checkpoints, an order of rows that depends on seed and epoch alone (so
    that a run goes on exactly), predictions in the order of the rows, and a model card.

    With `train_sampling_strategy="group_by_length"`, inputs of like length share a batch. Ours need it less, since
    they leave padding out of a batch; others are up to twice as fast.

    Args:
        about: what the model card says, see `model_card.write_training_card`.
    """

    def __init__(self, *args, about: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        check_smoothing(self)
        self.about = about or {"data": "task data"}
        self.order: RowOrder | None = None
        self.trained = False
        self.evaluated = self.eval_dataset  # what metrics are computed of
        self.add_callback(SetEpochCallback(self))
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))

    def _get_train_sampler(self, train_dataset=None) -> Sampler:
        rows = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        lengths = None
        if self.args.train_sampling_strategy == "group_by_length":
            # of several choices the longest
            lengths = [max(map(len, ids)) if isinstance(ids[0], list) else len(ids) for ids in rows["input_ids"]]
        self.order = RowOrder(len(rows), seed, lengths, self.args.total_batch)
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
        """What makes a run another run, besides its flags."""
        rows = self.train_dataset
        return {"batch": self.args.total_batch, "rows": len(rows), "content of rows": content_hash(rows)}

    def takes_up_finished_run(self) -> bool:
        """Whether `output_dir` holds this run, trained to its end: then its model is taken. Another run is refused."""
        folder = Path(self.args.output_dir)
        state, found = folder / TRAINER_STATE_NAME, check_same_run(self.args, self.settings())
        if found and self.args.resume_from_checkpoint is None and state.exists() and list(folder.glob(WEIGHTS)):
            self.state = TrainerState.load_from_json(str(state))
            # by the class, which asks for no more than these files, however the model is to be wrapped
            kept = type(self.model).from_pretrained(folder, config=self.model.config, dtype=self.model.dtype)
            self.model.load_state_dict(kept.state_dict())
            logger.warning(f"{folder} holds this run, trained to its end: nothing is trained")
            return True
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            for path in (state, folder / "README.md"):  # what they tell is of a run before
                path.unlink(missing_ok=True)
        return False

    def create_model_card(self, **kwargs) -> None:
        if self.model.config.model_type == HfDebertaConfig.model_type:
            write_training_card(self, **self.about)
        else:
            base = self.about.get("base")
            known = {"dataset": self.about["data"], "finetuned_from": None if base and os.path.exists(base) else base}
            super().create_model_card(**{**known, **kwargs})


def check_smoothing(trainer: FineTuningTrainer) -> None:
    """Trainer smooths labels that are classes, one for each logit's row, and no others."""
    model, share = trainer.model, trainer.args.label_smoothing_factor
    problem = getattr(model.config, "problem_type", None)
    others = problem in ("regression", "multi_label_classification")
    if share and (others or isinstance(model, HfDebertaForEntityChoice) or trainer.label_names != ["labels"]):
        raise ValueError(
            f"--label_smoothing_factor {share:g} is for labels that are classes, one each: of sequences, words or "
            "choices; numbers, lists, answers in a text and the entities of ReCoRD are none, so leave it out"
        )


def check_what_is_evaluated(trainer: FineTuningTrainer) -> None:
    """Weights of a head that no checkpoint holds are random."""
    new = getattr(trainer.model, "new_weights", [])
    if new and not trainer.args.do_train:
        raise ValueError(
            f"without --do_train a fine-tuned model is evaluated or predicts, and {', '.join(new)} of this one "
            "would be new, with random weights: name a model of the task, or add --do_train"
        )


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
    check_what_is_evaluated(trainer)
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
    if args.do_train and (trainer.trained or not has_card(Path(args.output_dir))):
        trainer.create_model_card()  # predicting may take long, or be stopped
    return metrics


def has_card(folder: Path) -> bool:
    """Of a trained model: beside its weights, `save_model` writes one that knows of no training."""
    card = folder / "README.md"
    return card.exists() and "generated_from_trainer" in card.read_text(encoding="utf-8")


def write_card_and_push(trainer: FineTuningTrainer) -> None:
    """Push, or write the model card with all that is known now, and say what there is.

    Of a run that was trained before, and stopped while predicting, the card lacks the scores of prediction alone.
    """
    folder = Path(trainer.args.output_dir)
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    elif trainer.trained:
        trainer.create_model_card()
    elif trainer.args.do_train and trainer.is_world_process_zero():
        update_results(folder)
    if trainer.is_world_process_zero() and folder.is_dir():
        files = sorted(path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py")
        logger.warning(f"{folder} holds {', '.join(files)}")


# Several seeds


def over_seeds(args: FineTuningArguments, run: Callable[[FineTuningArguments], dict[str, float]]) -> None:
    """`run` once, or with each of --num_seeds seeds in a folder of its own.

    A seed that was trained is not trained again. The model of the best one, by the metric that judges, is copied to
    --output_dir, beside `seeds.json`.
    """
    if args.num_seeds == 1:
        run(args)
        return destroy_process_group()
    folder, found = Path(args.output_dir), {}
    for seed in range(args.seed, args.seed + args.num_seeds):
        one = copy.copy(args)
        one.seed, one.output_dir = seed, str(folder / f"seed-{seed}")
        found[seed] = run(one)
        clear_device_cache(garbage_collection=True)  # a trainer knows itself, so its model would stay
    if args.should_save and args.do_eval:
        metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        keep_best(folder, found, metric, args.greater_is_better)
    destroy_process_group()


def destroy_process_group() -> None:
    """Let the other processes go in order, once nothing holds their group any more."""
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


def keep_best(folder: Path, found: dict[int, dict[str, float]], metric: str, greater_is_better: bool) -> None:
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
    best = (max if greater_is_better else min)(found, key=lambda seed: found[seed][metric])
    summary["best_seed"] = best
    for path in sorted((folder / f"seed-{best}").iterdir()):
        if path.is_file():
            with atomic_write(folder / path.name) as unfinished:
                shutil.copyfile(path, unfinished)
                if path.name == "README.md":  # it names the folder
                    text = unfinished.read_text(encoding="utf-8").replace(f"seed-{best}", folder.resolve().name)
                    unfinished.write_text(text, encoding="utf-8")
    write_json(folder / "seeds.json", summary)
    print(f"the model of seed {best} is in {folder}")
