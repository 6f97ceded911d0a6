"""Measure int8 on the CPU: the speed-up, and how often the predicted label stays the same.

    python benchmarks/int8.py --train_file sst2/train.jsonl --validation_file sst2/validation.jsonl

A small model (4 layers x 256, byte BPE) is trained for a few minutes on a file of rows with "sentence" and "label".
PyTorch then quantizes its linear layers dynamically to int8, and both models predict the labels of the validation file.
Speed is measured with a base-size classifier. Writes benchmarks/results/int8.csv.
"""

import argparse
import copy
import json
import warnings
from pathlib import Path

import torch
import transformers
from encoder import make_inputs, make_models, make_step
from timing import RESULTS, environment, medians, time_interleaved, write_rows
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from torch import nn

import hf_deberta

SPECIAL_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]


def read_sentences(path: Path) -> tuple[list[str], torch.Tensor]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["sentence"] for row in rows], torch.tensor([row["label"] for row in rows])


def train_tokenizer(sentences: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    return tokenizer


def encode(tokenizer: Tokenizer, sentences: list[str]) -> dict[str, torch.Tensor]:
    encodings = tokenizer.encode_batch(sentences)
    ids, mask = ([getattr(each, name) for each in encodings] for name in ("ids", "attention_mask"))
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def fine_tune(tokenizer: Tokenizer, sentences: list[str], labels: torch.Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    config = hf_deberta.HfDebertaConfig.from_preset("v3-base", **small, vocab_size=8000, num_labels=2)
    model = hf_deberta.HfDebertaForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    for _ in range(steps):
        chosen = torch.randint(len(sentences), (32,)).tolist()
        batch = encode(tokenizer, [sentences[i] for i in chosen])
        loss = model(**batch, labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def quantize(model: nn.Module) -> nn.Module:
    """Return a copy with int8 weights in linear layers; activations are quantized in each forward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "torchao will replace this"
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)


@torch.no_grad()
def predict(model: nn.Module, tokenizer: Tokenizer, sentences: list[str]) -> torch.Tensor:
    batches = [sentences[start : start + 64] for start in range(0, len(sentences), 64)]
    return torch.cat([model(**encode(tokenizer, batch)).logits.argmax(-1) for batch in batches])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--validation_file", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    sentences, labels = read_sentences(arguments.train_file)
    tokenizer = train_tokenizer(sentences)
    model = fine_tune(tokenizer, sentences, labels, arguments.steps)
    sentences, labels = read_sentences(arguments.validation_file)
    full, int8 = (predict(each, tokenizer, sentences) for each in (model, quantize(model)))
    agreement = float((full == int8).float().mean())
    accuracies = [float((predictions == labels).float().mean()) for predictions in (full, int8)]
    print(
        f"same label {agreement:.4f} of {len(labels)}; accuracy float32 {accuracies[0]:.4f}, int8 {accuracies[1]:.4f}"
    )
    rows = [
        {"what": what, "case": f"{len(labels)} sentences", "value": f"{value:.4f}", **environment()}
        for what, value in zip(
            ("agreement", "accuracy float32", "accuracy int8"), (agreement, *accuracies), strict=True
        )
    ]
    for case in ("1x32", "1x128", "8x128"):
        base = make_models(["ours sdpa"], classify=True)["ours sdpa"].eval()
        model_inputs, _ = make_inputs(case, "cpu")
        peers = {"float32": base, "int8": quantize(base)}
        steps = {name: make_step("ours sdpa", peer, model_inputs, None, "forward") for name, peer in peers.items()}
        for name, time in medians(time_interleaved(steps, 11)).items():
            print(f"{case} {name}: {time:.1f} ms")
            rows.append({"what": f"milliseconds {name}", "case": case, "value": f"{time:.1f}", **environment()})
    write_rows(RESULTS / "int8.csv", rows, ("what", "case", "machine"))


if __name__ == "__main__":
    main()
