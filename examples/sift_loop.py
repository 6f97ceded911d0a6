"""Scale-invariant fine-tuning (SiFT) in a plain PyTorch loop.

    python examples/sift_loop.py --train_file train.jsonl --validation_file dev.jsonl

Rows have a `sentence` and a `label`, which counts from 0: {"sentence": "a fine film", "label": 1}. SiFT adds a context
manager and a second loss to a loop, and a step then has three forward passes. docs/sift.md has the equations and the
published settings. It prints the means of both losses, and the accuracy:

    epoch 1: loss ..., sift loss ..., accuracy ...
"""

import argparse

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, set_seed

from hf_deberta import HfDebertaForSequenceClassification, HfDebertaTokenizer
from hf_deberta.fine_tuning.sift import PerturbedEmbeddings, SiftArguments, sift_loss


def main(flags: list[str] | None = None) -> list[tuple[float, float, float]]:
    """Return loss, SiFT loss and accuracy of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="microsoft/deberta-v3-base", help="folder or Hub id")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--sift_lambda", type=float, default=5.0, help="weight of the SiFT loss")
    arguments = parser.parse_args(flags)
    set_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    rows = load_dataset("json", data_files={"train": arguments.train_file, "validation": arguments.validation_file})
    num_labels = max(rows["train"]["label"]) + 1
    tokenizer = HfDebertaTokenizer.from_pretrained(arguments.model)
    rows = rows.map(lambda batch: tokenizer(batch["sentence"], truncation=True, max_length=128), batched=True)
    rows = rows.select_columns([*tokenizer.model_input_names, "label"])
    collator = DataCollatorWithPadding(tokenizer)
    train = DataLoader(rows["train"], 16, shuffle=True, collate_fn=collator)
    validation = DataLoader(rows["validation"], 32, collate_fn=collator)
    model = HfDebertaForSequenceClassification.from_pretrained(arguments.model, num_labels=num_labels).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    settings = SiftArguments(sift=True, sift_lambda=arguments.sift_lambda)

    epochs = []
    for epoch in range(1, arguments.epochs + 1):
        model.train()
        losses = []
        for batch in train:
            batch = batch.to(device)
            with PerturbedEmbeddings(model, settings) as embeddings:
                outputs = model(**batch)
                adversarial = sift_loss(model, batch, outputs, embeddings)
                loss = outputs.loss + settings.sift_lambda * adversarial
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(torch.stack([outputs.loss.detach(), adversarial.detach()]))
        model.eval()
        with torch.no_grad():
            batches = [batch.to(device) for batch in validation]
            right = torch.cat([model(**batch).logits.argmax(-1) == batch["labels"] for batch in batches])
        task, adversarial = torch.stack(losses).mean(0).tolist()
        epochs.append((task, adversarial, right.float().mean().item()))
        print("epoch {}: loss {:.3f}, sift loss {:.4f}, accuracy {:.3f}".format(epoch, *epochs[-1]))
    return epochs


if __name__ == "__main__":
    main()
