"""Infer in threads and train over and over, and check that memory, open files and results stay as they were.

    python tests/soak.py --minutes 60 --csv soak.csv

Each thread sends batches of random lengths through its own models: one of each head, and an in-tree classifier under
`enable()`. Every batch is one of a fixed set, whose outputs must stay bit-equal. Meanwhile the main thread repeats one
short training run with checkpoints, whose final loss must stay the same. Exit code 1 if anything grew or changed.
"""

import argparse
import csv
import gc
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from numerics import tiny_inputs
from tiny_trainers import checkpointing_trainer
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification, PrinterCallback, set_seed
from transformers.utils import logging

import hf_deberta
from hf_deberta import HfDebertaConfig

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 3}
SIZES |= {"max_position_embeddings": 256}
BATCHES = 24  # different batches per thread
MEMORY_GROWTH = 0.03  # allowed growth of the median resident memory, from the second quarter to the last


def make_models() -> list[torch.nn.Module]:
    """Return one model of each head, and Transformers' classifier, which computes with this package."""
    set_seed(0)
    config = HfDebertaConfig.from_preset("tiny", **SIZES)
    heads = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForPreTraining")
    fields = {name: getattr(config, name) for name in ("vocab_size", "position_buckets")}
    in_tree = DebertaV2Config(
        **SIZES, **fields, relative_attention=True, pos_att_type=["c2p", "p2c"], norm_rel_ebd="layer_norm",
        share_att_key=True, type_vocab_size=0, position_biased_input=False,
    )  # fmt: skip
    models = [getattr(hf_deberta, f"HfDeberta{head}")(config) for head in heads]
    return [model.eval() for model in (*models, DebertaV2ForSequenceClassification(in_tree))]


def make_batches(seed: int) -> list[dict[str, torch.Tensor]]:
    generator, batches = random.Random(seed), []
    for _ in range(BATCHES):
        rows, longest = generator.randint(1, 6), generator.choice((3, 17, 40, 64, 200))
        lengths = [generator.randint(1, longest) for _ in range(rows)]
        batches.append(tiny_inputs(lengths, seed=generator.randrange(2**31)))
    return batches


def infer(
    models: list[torch.nn.Module], seed: int, stop: threading.Event, count: Callable[[], None], changed: list[str]
) -> None:
    """Run random batches through random models until `stop`, and note outputs that differ from the first ones."""
    batches, first = make_batches(seed), {}
    generator = random.Random(seed)
    while not stop.is_set():
        number, index = generator.randrange(len(models)), generator.randrange(len(batches))
        try:
            with torch.no_grad():
                output = models[number](**batches[index])[0]
        except Exception as error:  # the main thread reports it
            changed.append(f"thread {seed}: {type(models[number]).__name__}, batch {index}: {error!r}")
            return
        expected = first.setdefault((number, index), output.clone())
        if not torch.equal(output, expected):
            changed.append(f"thread {seed}: {type(models[number]).__name__}, batch {index}")
            return
        count()


def train(folder: str) -> float:
    """Return the loss of a short training run that writes checkpoints."""
    trainer = checkpointing_trainer(Path(folder), save_total_limit=1, logging_strategy="no")
    trainer.remove_callback(PrinterCallback)
    return trainer.train().training_loss


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def soak(minutes: float, threads: int, samples: int) -> tuple[list[dict[str, float]], list[str]]:
    """Return measurements over time, and a line for everything that changed or grew."""
    stop, changed, passes = threading.Event(), [], [0]
    lock, rows, losses = threading.Lock(), [], set()

    def count() -> None:
        with lock:
            passes[0] += 1

    hf_deberta.enable()
    workers = [
        threading.Thread(target=infer, args=(make_models(), seed, stop, count, changed)) for seed in range(threads)
    ]
    for worker in workers:
        worker.start()
    begin, runs = time.monotonic(), 0
    while ((now := time.monotonic() - begin) < minutes * 60 or len(rows) < 4) and not changed:
        with tempfile.TemporaryDirectory() as folder:
            losses.add(train(folder))
        runs += 1
        if now >= len(rows) * minutes * 60 / samples:
            gc.collect()
            rows.append(
                {
                    "minutes": round(now / 60, 2),
                    "passes": passes[0],
                    "training_runs": runs,
                    "resident_mb": round(resident_megabytes(), 1),
                    "open_files": open_files(),
                    "threads": threading.active_count(),
                }
            )
            print(rows[-1], flush=True)
    stop.set()
    for worker in workers:
        worker.join()
    hf_deberta.disable()
    if len(losses) > 1:
        changed.append(f"training gave {len(losses)} different losses: {sorted(losses)}")
    return rows, changed + growth(rows)


def growth(rows: list[dict[str, float]]) -> list[str]:
    """Compare the last quarter of the measurements with the second one."""
    quarter = len(rows) // 4
    if not quarter:
        return [f"only {len(rows)} measurements: choose a longer time"]
    found = []
    for name, allowed in (("resident_mb", MEMORY_GROWTH), ("open_files", 0), ("threads", 0)):
        before = statistics.median(row[name] for row in rows[quarter : 2 * quarter])
        after = statistics.median(row[name] for row in rows[-quarter:])
        if after > before * (1 + allowed):
            found.append(f"{name} grew from {before:g} to {after:g}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows, changed = soak(arguments.minutes, threads=2, samples=60)
    if arguments.csv:
        with open(arguments.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    print("\n".join(changed) or "memory, open files, threads and results stayed as they were")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
