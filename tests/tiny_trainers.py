"""Tiny trainers of both kinds: a language model on made-up rows, and a classifier."""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainingArguments, default_data_collator

from hf_deberta import HfDebertaConfig, HfDebertaForCausalLM, HfDebertaForMaskedLM, HfDebertaForSequenceClassification
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.trainer import FineTuningTrainer
from hf_deberta.pretraining.language_model_trainer import LanguageModelTrainer
from hf_deberta.pretraining.masking import Masking, Vocabulary
from hf_deberta.pretraining.packing import RowCollator, TokenRows
from hf_deberta.pretraining.token_file import TokenFile

CLASS_ROWS = Dataset.from_dict({"input_ids": [[1, n + 5, 2] for n in range(8)], "labels": [0, 1] * 4})


class Tokenizer:
    cls_token_id, sep_token_id, pad_token_id = 1, 2, 0


SPECIAL = np.arange(128) < 5
MASKING = Masking(Vocabulary(4, SPECIAL, np.ones(128, dtype=bool), np.arange(5, 128)), max_ngram=1)


def language_model_rows(objective: str, pack: bool, rows: int | None = None) -> TokenRows:
    """Return rows of 16 tokens, or of fewer if not packed: so many, or those of 40 documents."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 25, 40)
    if rows is not None:
        sizes = np.full(rows, 14) if pack else rng.integers(1, 15, rows)
    tokens = TokenFile(rng.integers(5, 128, sizes.sum()).astype(np.uint16), sizes.cumsum(), {})
    return TokenRows(tokens, Tokenizer, 16, None if objective == "causal" else MASKING, pack)


def language_model_trainer(
    folder,
    objective: str,
    pack: bool = True,
    arguments_class: type = TrainingArguments,
    rows: int | None = None,
    **arguments,
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
        context_length=data.mean_context_length(),
    )


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
    batch = {name: [torch.tensor(row[name]) for row in rows] for name in rows[0] if name != "input_ids"}
    if isinstance(rows[0]["input_ids"][0], list):
        ids = [torch.tensor(choice) for row in rows for choice in row["input_ids"]]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).unflatten(0, (len(rows), -1))
    else:
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    others = {
        name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=-100)
        if values[0].dim() == 1
        else torch.stack(values)
        for name, values in batch.items()
    }
    return {**others, "input_ids": padded, "attention_mask": (padded != 0).long()}
