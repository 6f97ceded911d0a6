"""Rows per second of fine-tuning a classifier, data loading included: run_glue.py against Transformers' own classes.

    python benchmarks/end_to_end.py                                   # on a GPU: v3-base, 16,000 rows
    python benchmarks/end_to_end.py --preset tiny --rows 64           # a rehearsal

Peers: "trainer in-tree" is `Trainer` with DebertaV2ForSequenceClassification and the collator of Transformers' example
script; "run_glue.py" is ours, eager, and "run_glue.py, CUDA graphs" with --cuda_graphs true. All train one epoch of the
same rows, 32 a batch, from the same random weights, in bfloat16 where there is a GPU. Rows have the lengths of MNLI's
pairs. The rate is Trainer's, over the whole training: compilation and capture count. Writes results/end_to_end.csv.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
import transformers
from encoder import MNLI_LENGTHS, in_tree_config
from scripts import run_script
from timing import in_new_process, record, report_failure, require_ours
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hf_deberta

BATCH = 32
PEERS = {"trainer in-tree": None, "run_glue.py": "false", "run_glue.py, CUDA graphs": "true"}
WORDS = [f"w{number}" for number in range(90)]


def write_model(folder: Path, preset: str) -> None:
    """Write random weights and a tokenizer whose words are tokens."""
    torch.manual_seed(0)
    config = hf_deberta.HfDebertaConfig.from_preset(preset)
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    vocabulary = {word: number for number, word in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    transformers.DebertaV2Model(in_tree_config(config)).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_rows(file: Path, number: int) -> None:
    generator = random.Random(0)
    with file.open("w") as lines:
        for length in generator.choices(MNLI_LENGTHS, k=number):
            words = generator.choices(WORDS, k=length - 3)
            first, second = " ".join(words[: length // 2]), " ".join(words[length // 2 :])
            label = ("a", "b", "c")[generator.randrange(3)]
            lines.write(json.dumps({"sentence1": first, "sentence2": second, "label": label}) + "\n")


def train_in_tree(folder: Path) -> float:
    """Train as Transformers' example script does; return rows per second."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    inputs = tokenizer([row["sentence1"] for row in rows], [row["sentence2"] for row in rows])
    data = [
        {"input_ids": ids, "attention_mask": mask, "labels": "abc".index(row["label"])}
        for ids, mask, row in zip(inputs["input_ids"], inputs["attention_mask"], rows, strict=True)
    ]
    model = transformers.DebertaV2ForSequenceClassification.from_pretrained(folder, num_labels=3)
    arguments = transformers.TrainingArguments(
        str(folder / "in-tree"), num_train_epochs=1, per_device_train_batch_size=BATCH, bf16=torch.cuda.is_available(),
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    collator = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    result = transformers.Trainer(model, arguments, data_collator=collator, train_dataset=data).train()
    return result.metrics["train_samples_per_second"]


def measure(peer: str, folder: Path, script: str) -> float:
    """Return rows per second of a peer in a process of its own."""
    if PEERS[peer] is None:
        return float(in_new_process(script, "--in_tree", folder))
    flags = {"model_name_or_path": folder, "train_file": folder / "train.jsonl", "do_eval": False, "recipe": "none"}
    flags |= {"num_train_epochs": 1, "per_device_train_batch_size": BATCH, "bf16": torch.cuda.is_available()}
    return run_script("run_glue.py", folder / "ours", {**flags, "cuda_graphs": PEERS[peer]})["train_samples_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="v3-base")
    parser.add_argument("--rows", type=int, default=16_000)
    parser.add_argument("--peers", nargs="+", default=[*PEERS])
    parser.add_argument("--in_tree", type=Path, help="internal: train Transformers' class on the rows of this folder")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.in_tree:
        print(train_in_tree(args.in_tree))
        return
    device, measured = "cuda" if torch.cuda.is_available() else "cpu", []
    setting = {"preset": args.preset, "rows": args.rows, "batch": BATCH, "device": device}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, args.preset)
        write_rows(folder / "train.jsonl", args.rows)
        for peer in args.peers:
            with report_failure(peer):
                rate = measure(peer, folder, __file__)
                print(f"{peer:<26} {rate:8.1f} rows a second", flush=True)
                row = {"peer": peer, **setting, "rows_per_second": f"{rate:.1f}"}
                record("end_to_end.csv", [row], ("peer", "preset", "rows", "device"), device)
                measured.append(f"ours {peer}")
    require_ours([f"ours {peer}" for peer in args.peers if PEERS[peer]], measured)


if __name__ == "__main__":
    main()
