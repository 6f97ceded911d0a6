"""Tiny trainers: a language model on made-up rows, a classifier, and one that only saves checkpoints."""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_deberta import HfDebertaConfig, HfDebertaForCausalLM, HfDebertaForMaskedLM, HfDebertaForSequenceClassification
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.trainer import FineTuningTrainer
from hf_deberta.pretraining.language_model_trainer import LanguageModelTrainer
from hf_deberta.pretraining.masking import Masking, Vocabulary
from hf_deberta.pretraining.packing import RowCollator, TokenRows
from hf_deberta.pretraining.token_file import TokenFile
from hf_deberta.training.checkpoints import AtomicCheckpointsMixin

CLASS_ROWS = Dataset.from_dict({"input_ids": [[1, n + 5, 2] for n in range(8)], "labels": [0, 1] * 4})


class Tokenizer:
    cls_token_id, sep_token_id, pad_token_id = 1, 2, 0


SPECIAL = np.arange(128) < 5
MASKING = Masking(Vocabulary(4, SPECIAL, np.ones(128, bool), np.arange(5, 128), np.zeros(128, bool)), max_ngram=1)


def language_model_rows(objective: str, pack: bool, rows: int | None = None) -> TokenRows:
    """Return rows of 16 tokens, or of fewer if not packed: so many, or those of 40 documents."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 25, 40)
    if rows is not None:
        sizes = np.full(rows, 14) if pack else rng.integers(1, 15, rows)
    tokens = TokenFile(rng.integers(5, 128, sizes.sum()).astype(np.uint16), sizes.cumsum(), {})
    return TokenRows(tokens, Tokenizer, 16, None if objective == "causal" else MASKING, pack)


def language_model_trainer(
    folder, objective: str, pack: bool = True, arguments_class: type = TrainingArguments, rows=None, **arguments
) -> LanguageModelTrainer:
    torch.manual_seed(0)
    fields = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    kind = HfDebertaForMaskedLM if objective == "mlm" else HfDebertaForCausalLM
    defaults = {"max_steps": 3, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    data = language_model_rows(objective, pack, rows)
    return LanguageModelTrainer(
        model=kind(HfDebertaConfig.from_preset("tiny", **fields)),
        args=arguments_class(str(folder), **{**defaults, **arguments}),
        data_collator=RowCollator(0),
        train_dataset=data,
        eval_dataset=data,
        objective=objective,
    )


class AtomicTrainer(AtomicCheckpointsMixin, Trainer):
    pass


def checkpointing_trainer(folder: Path, arguments_class: type = TrainingArguments, **fields) -> AtomicTrainer:
    """A classifier with dropout, and a checkpoint after every second of six steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 100}
    model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny", **sizes))
    rows = Dataset.from_dict({"input_ids": torch.randint(5, 100, (8, 6)).tolist(), "labels": [0, 1] * 4})
    defaults = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    defaults |= {"lr_scheduler_type": "constant", "disable_tqdm": True, "use_cpu": True, "report_to": "none"}
    args = arguments_class(str(folder), **{**defaults, **fields})
    return AtomicTrainer(model, args, train_dataset=rows, eval_dataset=rows)


def fine_tuning_arguments(folder: Path, **fields) -> FineTuningArguments:
    defaults = {"do_train": True, "max_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    return FineTuningArguments(str(folder), **{**defaults, **fields})


def classifier(folder: Path, sift: bool = False, task=None, **fields) -> FineTuningTrainer:
    torch.manual_seed(0)
    return FineTuningTrainer(
        HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny")),
        fine_tuning_arguments(folder, **{"per_device_train_batch_size": 2, **fields}),
        default_data_collator,
        splits={"train": CLASS_ROWS, "validation": CLASS_ROWS},
        sift=SiftArguments(sift=sift),
        task=task,
    )


def collate_padded(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Pad inputs, and labels of tokens, to the longest of the batch."""
    pad, choices = torch.nn.utils.rnn.pad_sequence, isinstance(rows[0]["input_ids"][0], list)
    ids = [ids for row in rows for ids in (row["input_ids"] if choices else [row["input_ids"]])]
    padded = pad([*map(torch.tensor, ids)], batch_first=True)
    if choices:
        padded = padded.unflatten(0, (len(rows), -1))
    batch = {"input_ids": padded, "attention_mask": (padded != 0).long()}
    for name in rows[0].keys() - {"input_ids"}:
        values = [torch.tensor(row[name]) for row in rows]
        one_dim = values[0].dim() == 1
        batch[name] = pad(values, batch_first=True, padding_value=-100) if one_dim else torch.stack(values)
    return batch
