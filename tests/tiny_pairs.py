"""Tiny pairs of generator and discriminator, rows to train them on, and their trainer."""

import torch
from numerics import tiny_config, train_step
from transformers import TrainingArguments

from hf_deberta.pretraining.rtd_pretraining import HfDebertaForRtdPretraining, HfDebertaRtdConfig
from hf_deberta.pretraining.rtd_trainer import RtdTrainer

MASK = 4
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
WORDS = "generator.deberta.embeddings.word_embeddings.weight"


def tiny_pair(sharing="gdes", seed=0, temperature=0.0, dtype=torch.float32, **fields):
    """Three and two layers. With temperature 0 the sampled tokens do not depend on how a batch is split."""
    torch.manual_seed(seed)
    discriminator = tiny_config(**{"num_hidden_layers": 3, **fields})
    config = HfDebertaRtdConfig.from_discriminator(
        discriminator, embedding_sharing=sharing, sampling_temperature=temperature
    )
    model = HfDebertaForRtdPretraining(config).to(dtype)
    if sharing == "gdes":
        torch.nn.init.normal_(model.discriminator.get_input_embeddings().delta, std=0.05)
    return model.train()


def tiny_rows(lengths=(12, 5, 9, 3, 11, 8, 4, 12), width=12):
    """Masked rows, padded to one width, with 0 to 5 labels each."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, length in enumerate(lengths):
        mask = (torch.arange(width) < length).long()
        original = torch.randint(5, 128, (width,), generator=generator) * mask
        chosen = torch.randperm(length, generator=generator)[: number % 6]
        labels = torch.full((width,), -100).scatter(0, chosen, original[chosen])
        ids = original.scatter(0, chosen, MASK)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def batch_of(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


trained = train_step


LOGGED = ("loss", "lm_loss", "rtd_loss", "masked_accuracy", "replaced_found", "original_kept")


class ThroughEpochs(list):
    """Rows whose indices count through the epochs, as in `packing.TokenRows`."""

    def __getitem__(self, index):
        return super().__getitem__(index % len(self))


def trainer_of(
    model, folder, decoupled=False, kind=RtdTrainer, callbacks=None, eval_dataset=None, train_dataset=None, **arguments
):
    """By default two steps over all rows with plain gradient descent."""
    defaults = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return kind(
        model,
        TrainingArguments(str(folder), **{**defaults, **arguments}),
        train_dataset=ThroughEpochs(train_dataset or tiny_rows()),
        eval_dataset=eval_dataset,
        callbacks=callbacks,
        **({"decoupled": decoupled} if kind is RtdTrainer else {}),
    )


def run(trainer):
    trainer.train()
    logs = [{name: entry[name] for name in LOGGED} for entry in trainer.state.log_history if "loss" in entry]
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, logs
