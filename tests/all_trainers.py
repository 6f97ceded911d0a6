"""A tiny trainer of every kind, by name: tasks, objectives, adapters, and a model of Transformers."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from tiny_pairs import batch_of, tiny_pair, tiny_rows, trainer_of
from tiny_trainers import collate_padded, fine_tuning_arguments, language_model_trainer
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hf_deberta import HfDebertaConfig, HfDebertaForQuestionAnswering, HfDebertaForSequenceClassification
from hf_deberta.fine_tuning.trainer import FineTuningTrainer
from hf_deberta.training.graphed_steps import GraphedStepsMixin
from hf_deberta.training.run_identity import RunArguments

STEPS = {
    "max_steps": 20, "logging_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 2, "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


def padded_rows(**labels):
    """Rows of two lengths, so that batches have few shapes."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(24):
        ids = torch.randint(5, 128, (8 if number % 5 else 12,), generator=generator).tolist()
        rows.append(
            {"input_ids": [*ids[: 4 + number % 5], 2], **{name: values[number % 4] for name, values in labels.items()}}
        )
    return Dataset.from_list(rows)


def classifier_trainer(folder, model_class=HfDebertaForSequenceClassification, labels=None, fields=None, **arguments):
    torch.manual_seed(0)
    rows = padded_rows(**(labels or {"labels": [0, 1, 1, 0]}))
    return FineTuningTrainer(
        model_class(HfDebertaConfig.from_preset("tiny", **(fields or {}))),
        fine_tuning_arguments(folder, do_eval=True, **arguments),
        collate_padded,
        splits={"train": rows, "validation": rows},
    )


def frozen(folder, **arguments):
    trainer = classifier_trainer(folder, **arguments)
    trainer.model.deberta.embeddings.requires_grad_(False)
    return trainer


def adapted(folder, **arguments):
    peft = pytest.importorskip("peft")
    trainer = classifier_trainer(folder, **arguments)
    settings = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query_proj", "value_proj"])
    trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, settings).to(trainer.args.device)
    return trainer


class BertTrainer(GraphedStepsMixin, Trainer):
    pass


def bert(folder, **arguments):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=128, **sizes))
    arguments["gradient_accumulation_steps"] = 4  # the last step of an epoch has 2 micro-batches
    rows, arguments = padded_rows(labels=[0, 1, 1, 0]), TrainingArguments(str(folder), **arguments)
    trainer = BertTrainer(model, arguments, data_collator=collate_padded, train_dataset=rows, eval_dataset=rows)
    trainer.model_accepts_loss_kwargs = False  # Trainer divides the loss by the number of micro-batches
    return trainer


def language_model(objective, pack=True):
    return partial(language_model_trainer, objective=objective, pack=pack, arguments_class=RunArguments)


def pair(folder, **arguments):
    defaults = {"optim": "adamw_torch", "max_grad_norm": 1.0}
    trainer = trainer_of(tiny_pair(), folder, eval_dataset=tiny_rows(), **{**defaults, **arguments})
    trainer.data_collator = lambda rows: {**batch_of(rows), "max_predictions_per_row": 6}
    return trainer


ANSWERS = {"start_positions": [0, 1, 2, 1], "end_positions": [1, 2, 3, 3]}
NUMBERS = {"labels": [0.5, 1.0, -1.0, 2.0]}
SEVERAL_LABELS = {"labels": [[0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]}
REGRESSION = {"problem_type": "regression", "num_labels": 1}
MULTI_LABEL = {"problem_type": "multi_label_classification", "num_labels": 2}
TRAINERS = {
    "classes": classifier_trainer,
    "bf16": partial(classifier_trainer, bf16=True, fields={"hidden_size": 64}),  # heads that Triton's kernels take
    "answers": partial(classifier_trainer, model_class=HfDebertaForQuestionAnswering, labels=ANSWERS),
    "regression": partial(classifier_trainer, labels=NUMBERS, fields=REGRESSION),
    "several labels": partial(classifier_trainer, labels=SEVERAL_LABELS, fields=MULTI_LABEL),
    "label smoothing": partial(classifier_trainer, label_smoothing_factor=0.1),
    "frozen weights": frozen,
    "adapters": adapted,
    "bert": bert,
    "mlm": language_model("mlm"),
    "mlm, padded": language_model("mlm", pack=False),
    "causal": language_model("causal"),
    "joint": language_model("joint"),
    "rtd": pair,
}
