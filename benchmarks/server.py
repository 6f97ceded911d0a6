"""Load-test examples/serve.py on this machine: our models against Transformers' own classes behind the same server.

    python benchmarks/server.py                                        # random weights of the size of v3-base
    python benchmarks/server.py --model FOLDER --peers "ours int8" "in-tree float32"
    python benchmarks/server.py --peers "ours float32" --minutes 10    # hold the load

A peer is an engine and a dtype. All servers are up at once, and peers take turns: each has the load for `--seconds`,
`--rounds` times. The clients are threads of another process. Each sends a sentence pair, waits for the answer and sends
the next; lengths are those of MNLI. Requests per second are the median of the rounds, percentiles those of all
requests of a peer. An error is any answer but 200, or none. Writes benchmarks/results/server.csv.
"""

import argparse
import http.client
import json
import multiprocessing
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import transformers
from encoder import BASE, MNLI_LENGTHS, V3
from timing import RESULTS, environment, write_rows
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from hf_deberta import PRESETS
from hf_deberta.tokenization_hf_deberta import load_tokenizer

SERVER = Path(__file__).parents[1] / "examples" / "serve.py"
WORDS = ["the", "man", "is", "on", "a", "dog", "and", "in", "of", "to", "not", "with"]
WARM_UP_SECONDS = 5.0
STARTING_SECONDS = 180.0


@dataclass
class Peer:
    name: str
    port: int
    server: subprocess.Popen
    worker: int = 0  # id of a process with the model
    first_mib: int = 0  # resident memory of that process after the warm-up
    last_mib: int = 0
    times: list[float] = field(default_factory=list)  # seconds of each request
    rates: list[float] = field(default_factory=list)  # requests per second of each round
    errors: list[str] = field(default_factory=list)


def save_random_model(preset: str, folder: str) -> None:
    """Save a classifier that both engines load, with a tokenizer that makes a token of each word."""
    vocabulary = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = transformers.DebertaV2Config(**{**BASE, **V3, **PRESETS[preset]})
    transformers.DebertaV2ForSequenceClassification(config).save_pretrained(folder)


def make_bodies(model: str) -> list[str]:
    """Return one request for each of MNLI's lengths, with as many tokens as the model's tokenizer counts."""
    tokenizer, generator = load_tokenizer(model), random.Random(0)
    bodies = []
    for length in MNLI_LENGTHS:
        words = ["the", "man"]
        while len(tokenizer(*split_pair(words))["input_ids"]) < length:
            words.append(generator.choice(WORDS))
        bodies.append(json.dumps({"texts": [split_pair(words)]}))
    return bodies


def split_pair(words: list[str]) -> tuple[str, str]:
    """Return premise and hypothesis; premises of MNLI have about two thirds of the words."""
    border = -(-2 * len(words) // 3) if len(words) > 2 else 1
    return " ".join(words[:border]), " ".join(words[border:])


@contextmanager
def running_server(name: str, arguments: argparse.Namespace) -> Iterator[Peer]:
    """Start the server of a peer, and stop it at the end."""
    engine, dtype = name.split()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SERVER), "--model", arguments.model, "--engine", engine, "--dtype", dtype]
    command += ["--port", str(port), "--workers", str(arguments.workers)]
    command += ["--max_batch_tokens", str(arguments.max_batch_tokens)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield Peer(name, port, process)
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(peer: Peer) -> None:
    """Wait until a worker answers, and keep its process id."""
    end = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < end and peer.server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", peer.port, timeout=STARTING_SECONDS)
            connection.request("GET", "/health")
            peer.worker = json.loads(connection.getresponse().read())["process"]
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"{peer.name}: the server did not start: run {SERVER.name} with the same flags to see why")


def send_requests(port: int, bodies: list[str], seconds: float, client: int) -> tuple[list[float], list[str]]:
    """Send one request after another until the time is up; return the seconds of each, and the errors."""
    generator, end = random.Random(client), time.monotonic() + seconds
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times: list[float] = []
    errors: list[str] = []
    while time.monotonic() < end:
        start = time.perf_counter()
        try:
            connection.request("POST", "/classify", generator.choice(bodies), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                errors.append(str(answer.status))
        except (OSError, http.client.HTTPException) as error:
            errors.append(type(error).__name__)
            connection.close()
        times.append(time.perf_counter() - start)
    return times, errors


def put_load(port: int, bodies: list[str], seconds: float, clients: int) -> tuple[float, list[float], list[str]]:
    """Run all clients, each in a thread; return requests per second, the seconds of each request, and the errors."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        results = list(threads.map(lambda client: send_requests(port, bodies, seconds, client), range(clients)))
    times = [value for times, _ in results for value in times]
    errors = [error for _, errors in results for error in errors]
    return (len(times) - len(errors)) / (time.perf_counter() - start), times, errors


def measure(arguments: argparse.Namespace) -> list[Peer]:
    """Start all servers, then let the peers take turns."""
    bodies = make_bodies(arguments.model)
    context = multiprocessing.get_context("spawn")
    with ExitStack() as servers, ProcessPoolExecutor(1, context) as process:
        peers = [servers.enter_context(running_server(name, arguments)) for name in arguments.peers]
        for peer in peers:
            wait_until_ready(peer)
        for peer in peers:
            process.submit(put_load, peer.port, bodies, WARM_UP_SECONDS, arguments.clients).result()
            peer.first_mib = resident_mib(peer.worker)
        for turn in range(arguments.rounds):
            for peer in peers:
                load = process.submit(put_load, peer.port, bodies, arguments.seconds, arguments.clients)
                rate, times, errors = load.result()
                peer.rates.append(rate)
                peer.times += times
                peer.errors += errors
                print(f"round {turn + 1}, {peer.name}: {rate:.1f} requests/s, {len(errors)} errors", flush=True)
        for peer in peers:
            peer.last_mib = resident_mib(peer.worker)
    return peers


def resident_mib(process: int) -> int:
    """Return the resident memory of a process, 0 if it has ended."""
    status = Path(f"/proc/{process}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))


def result_row(peer: Peer, arguments: argparse.Namespace) -> dict[str, object]:
    percentiles = quantiles(peer.times, n=100)
    return {
        "peer": peer.name,
        "model": arguments.preset if arguments.is_random else Path(arguments.model).name,
        "clients": arguments.clients,
        "workers": arguments.workers,
        "max_batch_tokens": arguments.max_batch_tokens,
        "seconds": f"{arguments.seconds * arguments.rounds:g}",
        "requests": len(peer.times),
        "errors": len(peer.errors),
        "requests_per_second": f"{median(peer.rates):.1f}",
        "p50_ms": f"{1e3 * percentiles[49]:.0f}",
        "p99_ms": f"{1e3 * percentiles[98]:.0f}",
        "mib_after_warm_up": peer.first_mib,
        "mib_at_end": peer.last_mib,
        **environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", default=["ours float32", "in-tree float32"])
    parser.add_argument("--preset", default="v3-base", help="size of the random model")
    parser.add_argument("--model", help="folder or Hub id of a classifier, in place of a random one")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--max_batch_tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one turn of one peer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="hold the load for so long: one round")
    parser.add_argument("--no-write", action="store_true", help="print the results, write no file")
    arguments = parser.parse_args()
    if arguments.minutes:
        arguments.seconds, arguments.rounds = 60 * arguments.minutes, 1
    transformers.logging.set_verbosity_error()
    arguments.is_random = arguments.model is None
    with tempfile.TemporaryDirectory() as folder:
        if arguments.is_random:
            arguments.model = folder
            save_random_model(arguments.preset, folder)
        peers = measure(arguments)
    rows = [result_row(peer, arguments) for peer in peers]
    for row, peer in zip(rows, peers, strict=True):
        print(", ".join(f"{name} {value}" for name, value in row.items()), *sorted(set(peer.errors)), flush=True)
    if not arguments.no_write:
        key = ("peer", "model", "clients", "workers", "max_batch_tokens", "seconds", "machine")
        write_rows(RESULTS / "server.csv", rows, key)
    if any(peer.errors for peer in peers):
        raise SystemExit("there were errors")


if __name__ == "__main__":
    main()
