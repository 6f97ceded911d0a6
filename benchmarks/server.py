"""Load-test examples/serve.py on this machine: our engine against Transformers' own class behind the same server.

    python benchmarks/server.py                                        # random weights of the size of v3-base
    python benchmarks/server.py --model FOLDER --peers "ours int8" "in-tree float32"
    python benchmarks/server.py --peers "ours float32" --minutes 10    # hold the load

A peer is an engine and a dtype. All servers run at once, and the peers take turns: each gets the load for `--seconds`,
`--rounds` times. The clients, threads of another process, send one pair of sentences after another with the lengths of
MNLI, each as soon as its answer has come. Percentiles are over all requests of a peer, requests per second the median
of the rounds. An error is any answer but 200, or none. Writes benchmarks/results/server.csv.
"""

import argparse
import http.client
import json
import multiprocessing
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import transformers
from encoder import BASE, MNLI_LENGTHS, V3
from tokenizers import Tokenizer, models, pre_tokenizers
from timing import RESULTS, environment, write_rows

from hf_deberta import PRESETS
from hf_deberta.tokenization_hf_deberta import load_tokenizer

SERVER = Path(__file__).parents[1] / "examples" / "serve.py"
STARTING_SECONDS = 120
WARM_UP_SECONDS = 5
WORDS = ["the", "man", "is", "on", "a", "dog", "and", "in", "of", "to", "not", "with"]


def save_random_model(preset: str, folder: str) -> None:
    """Save a classifier that both engines load, with random weights and a tokenizer that knows one piece per word."""
    vocabulary = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
    config = transformers.DebertaV2Config(**{**BASE, **V3, **PRESETS[preset]})
    transformers.DebertaV2ForSequenceClassification(config).save_pretrained(folder)
