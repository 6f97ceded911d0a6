"""Libraries that use DeBERTa: do they give the same numbers with this package, and in how much less time?

    pip install sentence-transformers setfit trl peft gliner lightning torchao
    python benchmarks/consumers.py --model cross-encoder/nli-deberta-v3-xsmall

Each library loads the same weights as Transformers' own class ("in-tree"), as this class under `hf_deberta.enable()`,
and as the class of this package ("native"), on this CPU. Dropout is 0, so that training gives the same numbers, too.
The difference is the largest from "in-tree" of any score, embedding or loss. The time is processor time, the median of
`--repeats` turns. A library that is not installed is skipped. GLiNER 0.2.29 requires Transformers below 5.17; it was
measured in an environment of its own. Writes benchmarks/results/consumers.csv.
"""

import argparse
import importlib.metadata
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from timing import record
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

import hf_deberta

Call = Callable[[], torch.Tensor]  # returns the numbers that are compared
WORDS = ["the", "man", "is", "on", "a", "dog", "and", "in", "of", "to", "not", "with"]
DRAW = random.Random(0)
TEXTS = [" ".join(DRAW.choices(WORDS, k=DRAW.randint(8, 48))) for _ in range(16)]
PAIRS = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True))
LABELS = [number % 2 for number in range(len(TEXTS))]
BATCH, STEPS = 8, 2


def cross_encoder(folder: str) -> Call:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(folder, device="cpu")
    return lambda: torch.as_tensor(model.predict(PAIRS, batch_size=BATCH))


def sentence_transformer(folder: str) -> Call:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")
    return lambda: torch.as_tensor(model.encode(TEXTS, batch_size=BATCH))


def setfit(folder: str) -> Call:
    """Train on pairs, then compare the probabilities of the labels."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    model = SetFitModel.from_pretrained(folder, device="cpu")
    settings = TrainingArguments(batch_size=BATCH, max_steps=STEPS, report_to="none", save_strategy="no")
    trainer = Trainer(model, settings, Dataset.from_dict({"text": TEXTS, "label": LABELS}))

    def call() -> torch.Tensor:
        set_seed(0)
        trainer.train()
        return model.predict_proba(TEXTS)

    return call


def reward_trainer(folder: str) -> Call:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    rows = Dataset.from_dict({"chosen": TEXTS, "rejected": TEXTS[::-1]})
    settings = RewardConfig(
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = RewardTrainer(load(folder), settings, train_dataset=rows, processing_class=tokenizer)

    def call() -> torch.Tensor:
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    return call


def peft(folder: str) -> Call:
    """Train an adapter for a few steps, and compare the losses."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load(folder), LoraConfig(task_type="SEQ_CLS", target_modules=["query_proj", "value_proj"]))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, batches = torch.optim.AdamW(weights, 1e-3), tokenize(folder)

    def call() -> torch.Tensor:
        losses = []
        for batch in batches:
            losses.append(model(**batch).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).detach()

    return call


def lightning(folder: str) -> Call:
    from lightning import LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = load(folder).train(), []

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-5)

    module, batches = Classifier(), DataLoader(tokenize(folder), batch_size=None)
    outputs = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")

    def call() -> torch.Tensor:
        module.losses.clear()
        Trainer(accelerator="cpu", max_epochs=1, **dict.fromkeys(outputs, False)).fit(module, batches)
        return torch.stack(module.losses)

    return call


def torchao(folder: str) -> Call:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, batches = load(folder), tokenize(folder)
    quantize_(model, Int8WeightOnlyConfig())

    @torch.inference_mode()
    def call() -> torch.Tensor:
        return torch.cat([model(**batch).logits.flatten() for batch in batches])

    return call


def gliner(folder: str) -> Call:
    """Compare the scores of all spans of a model whose head is random."""
    from gliner import GLiNER

    settings = {"model_name": folder, "span_mode": "markerV0", "max_width": 4, "max_len": 128}
    model = GLiNER.from_config({**settings, "hidden_size": 384}).eval()

    def call() -> torch.Tensor:
        with torch.inference_mode():
            rows = model.inference(TEXTS, ["person", "place"], threshold=0, batch_size=BATCH, flat_ner=False)
        return torch.tensor([entity["score"] for row in rows for entity in row])

    return call


CONSUMERS: dict[str, tuple[str, Callable[[str], Call]]] = {  # name -> package, how to set up its call
    "CrossEncoder": ("sentence-transformers", cross_encoder),
    "SentenceTransformer": ("sentence-transformers", sentence_transformer),
    "SetFit, training": ("setfit", setfit),
    "RewardTrainer, training": ("trl", reward_trainer),
    "LoRA, training": ("peft", peft),
    "GLiNER": ("gliner", gliner),
    "Lightning, training": ("lightning", lightning),
    "int8 weights": ("torchao", torchao),
}


def load(folder: str) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder)


def tokenize(folder: str) -> list[Any]:
    """Return the texts in batches with labels."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batches = []
    for start in range(0, len(TEXTS), BATCH):
        rows = slice(start, start + BATCH)
        batches.append({**tokenizer(TEXTS[rows], padding=True, return_tensors="pt")})
        batches[-1]["labels"] = torch.tensor(LABELS[rows], dtype=torch.float)
    return batches


def save_both(model: str, folder: Path) -> dict[str, str]:
    """Save the checkpoint, without dropout and with one label, for either class; return the folders."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    in_tree, native = str(folder / "in-tree"), str(folder / "native")
    set_seed(0)
    head = {"num_labels": 1, "ignore_mismatched_sizes": True}
    AutoModelForSequenceClassification.from_pretrained(model, **head, **no_dropout).save_pretrained(in_tree)
    AutoTokenizer.from_pretrained(model).save_pretrained(in_tree)
    hf_deberta.HfDebertaForSequenceClassification.from_pretrained(in_tree).save_pretrained(native)
    hf_deberta.HfDebertaTokenizer.from_pretrained(model).save_pretrained(native)
    return {"in-tree": in_tree, "enable()": in_tree, "native": native}


def enabled(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call while Transformers' classes compute with this package."""
    with hf_deberta.enable():
        return call(*arguments)


def measure(set_up: Callable[[str], Call], folders: dict[str, str], repeats: int) -> dict[str, tuple[float, float]]:
    """Return the difference from in-tree and the milliseconds of each way to load the model."""
    calls, numbers = {}, {}
    for way, folder in folders.items():
        set_seed(0)
        if way == "enable()":
            calls[way] = partial(enabled, enabled(set_up, folder))
        else:
            calls[way] = set_up(folder)
        numbers[way] = calls[way]()
    times: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(repeats):
        for way, call in calls.items():
            start = time.process_time()
            call()
            times[way].append(1e3 * (time.process_time() - start))
    return {way: ((numbers[way] - numbers["in-tree"]).abs().max().item(), median(times[way])) for way in folders}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a classifier of DeBERTa v2 or v3, in Transformers' format")
    parser.add_argument("--name", help="of --model in the results, by default its last part")
    parser.add_argument("--only", nargs="+", default=list(CONSUMERS), choices=list(CONSUMERS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folders = save_both(args.model, Path(temporary))
        for name in args.only:
            package, set_up = CONSUMERS[name]
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                print(f"{name} is skipped: {package} is not installed")
                continue
            results = measure(set_up, folders, args.repeats)
            for way, (difference, milliseconds) in results.items():
                row = {"consumer": name, "library": package, "version": version, "way": way}
                row |= {"model": args.name or Path(args.model).name, "max_abs_difference": f"{difference:.1e}"}
                row |= {"milliseconds": f"{milliseconds:.0f}"}
                row |= {"times_as_fast": f"{results['in-tree'][1] / milliseconds:.2f}"}
                print(", ".join(f"{column} {value}" for column, value in row.items()), flush=True)
                record("consumers.csv", [row], ("consumer", "way", "model"))


if __name__ == "__main__":
    main()
