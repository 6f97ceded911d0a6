"""The server example: answers, limits, overload, shutdown. All on 127.0.0.1."""

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.pretraining.tokenizer_training import train_tokenizer

pytest.importorskip("fastapi", reason="needs pip install '.[serve]' and Python 3.11")
import serve
import uvicorn

ROOT = Path(__file__).parents[2]
TIMEOUT = 120  # seconds until a test gives up: a busy machine may take long to import everything
TEXTS = ["one text", ("a premise", "and a hypothesis"), "a longer text with more words than others", ("a premise", "")]
LABELS = ["contradiction", "neutral", "entailment"]


class Client:
    """One connection that stays open."""

    def __init__(self, port: int):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        self.headers: dict[str, str] = {}

    def send(self, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        """Return status and answer. Bytes are sent as they are, without a body the method is GET."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        self.connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        self.headers, content = dict(answer.headers), answer.read()
        return answer.status, json.loads(content) if content.startswith(b"{") else {"detail": content.decode()}

    def classify(self, *texts: Any) -> tuple[int, dict[str, Any]]:
        return self.send("/classify", {"texts": texts})


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return the first true value."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if value := condition():
                return value
        time.sleep(0.02)
    raise TimeoutError


class LengthClassifier:
    """Stands in for a model: the score of a text is its number of words. Computes while `open` is set.

    `started` is set when a computation begins.
    """

    labels = ["length"]

    def __init__(self, settings: serve.Settings):
        self.open, self.started = LengthClassifier.open, LengthClassifier.started

    def tokenize(self, text):
        return {"input_ids": [1] * sum(len(part.split()) for part in ([text] if isinstance(text, str) else text))}

    def probabilities(self, rows):
        self.started.set()
        assert self.open.wait(TIMEOUT)
        lengths = [len(row["input_ids"]) for row in rows]
        if 13 in lengths:
            raise RuntimeError("13 words")
        return [[float(length)] for length in lengths]


@pytest.fixture
def length_server(monkeypatch) -> Iterator[Callable[..., int]]:
    """Start a server in a thread of this process; its computations wait for `LengthClassifier.open`."""
    LengthClassifier.open, LengthClassifier.started = threading.Event(), threading.Event()
    monkeypatch.setattr(serve, "Classifier", LengthClassifier)
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(**settings) -> int:
        port = free_port()
        app = serve.create_app(serve.Settings(model="none", max_wait_ms=0, **settings))
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical"))
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        wait_for(lambda: Client(port).send("/health"))
        return port

    yield start
    LengthClassifier.open.set()
    for server, thread in running:
        server.should_exit = True
        thread.join(TIMEOUT)


@pytest.mark.parametrize(
    "path, body, status, detail",
    [
        ("/classify", b"{", 400, "JSON"),
        ("/classify", b"[" * 100_000, 400, "parsing"),
        ("/classify", {"texts": []}, 422, "texts"),
        ("/classify", {"texts": [["a", "b", "c"]]}, 422, "texts.0"),
        ("/classify", {"texts": ["a", 3]}, 422, "texts.1"),
        ("/classify", {"texts": ["half of a pair: \ud800"]}, 422, "surrogates"),
        ("/classify", {"texts": ["a", "b c d e f"]}, 413, "text 1 has 5 tokens: send at most 4"),
        ("/classify", {"texts": ["a"] * 6}, 413, "6 texts: send at most 5"),
        ("/classify", {"texts": ["a b"] * 5}, 413, "10 tokens: send at most 8"),
        ("/classify", {"texts": ["a", ["b", "c" * 64]]}, 413, "text 1 has 65 characters: send at most 64"),
        ("/classify", {"texts": ["a" * 43] * 3}, 413, "the request has 129 characters: send at most 128"),
        ("/classify", {"texts": ["a" * 2**20]}, 413, "Too Large"),
        ("/rerank", {"query": "a"}, 422, "documents"),
    ],
)
def test_bad_requests_get_a_sentence(length_server, path, body, status, detail):
    LengthClassifier.open.set()
    port = length_server(max_length=4, max_texts=5, max_queue_tokens=8)
    found, answer = Client(port).send(path, body)
    assert (found, detail in answer["detail"]) == (status, True), (found, answer)
    assert Client(port).classify("a b") == (200, {"labels": ["length"], "probabilities": [[2.0]]})


def test_texts_that_wait_for_the_tokenizer_are_limited_by_characters(length_server, monkeypatch):
    probabilities = LengthClassifier.probabilities  # waits for `open`
    monkeypatch.setattr(LengthClassifier, "tokenize", lambda self, text: {"input_ids": probabilities(self, [])})
    port = length_server(max_queue_tokens=8)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(Client(port).classify, "a" * 100)
        assert LengthClassifier.started.wait(TIMEOUT)
        status, answer = Client(port).classify("a" * 29)
        LengthClassifier.open.set()
        assert status == 503 and "100 characters are waiting" in answer["detail"]
        assert first.result(TIMEOUT)[0] == 200 and Client(port).classify("a" * 29)[0] == 200


def test_rerank_sorts_documents(length_server):
    LengthClassifier.open.set()
    client = Client(length_server())
    status, answer = client.send("/rerank", {"query": "a b", "documents": ["c", "d e f", "g h"]})
    assert status == 200
    assert [(result["index"], result["score"]) for result in answer["results"]] == [(1, 5.0), (2, 4.0), (0, 3.0)]


def test_overload_is_refused_and_accepted_requests_are_answered(length_server):
    """While the model computes, the event loop still answers; what fits into the queue waits."""
    port = length_server(max_batch_tokens=4, max_queue_tokens=8)
    client = Client(port)

    def waiting_tokens() -> int:
        return client.send("/health")[1]["waiting_tokens"]

    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(Client(port).classify, "a b c d")
        assert LengthClassifier.started.wait(TIMEOUT)
        second = threads.submit(Client(port).classify, "a b c d", "a b")
        third = threads.submit(Client(port).classify, "a b")
        wait_for(lambda: waiting_tokens() == 8)  # the first is computed, and the queue has room for the other two
        wait_for(lambda: client.classify("a b c d e f g")[0] == 503)
        assert client.headers["retry-after"] == "1"
        assert "waiting" in client.classify("a b c d e f g")[1]["detail"]
        LengthClassifier.open.set()
        assert [answer.result(TIMEOUT)[0] for answer in (first, second, third)] == [200, 200, 200]
    assert client.classify("a b c d e f g")[0] == 200


def test_a_request_that_waits_too_long_gets_504(length_server):
    port = length_server(timeout_s=0.2)
    status, answer = Client(port).classify("a b")
    assert status == 504 and "0.2 seconds" in answer["detail"]
    LengthClassifier.open.set()
    wait_for(lambda: Client(port).classify("a b")[0] == 200)


def test_a_failure_of_the_model_is_an_error_of_its_requests_only(length_server):
    LengthClassifier.open.set()
    client = Client(length_server())
    assert client.classify(" ".join("a" * 13)) == (500, {"detail": "the model failed with RuntimeError"})
    assert client.classify("a b")[0] == 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = train_tokenizer([" ".join(map(str, TEXTS))] * 20, 300, "bpe")
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.3}
    config = HfDebertaConfig.from_preset("tiny", **fields, id2label=dict(enumerate(LABELS)))
    torch.manual_seed(0)
    HfDebertaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint) -> Iterator[tuple[subprocess.Popen, int]]:
    """The example as its users start it: a supervisor and one worker."""
    port = free_port()
    command = [sys.executable, "examples/serve.py", "--model", str(checkpoint), "--port", str(port)]
    command += ["--max_batch_tokens", "64", "--max_wait_ms", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: process.poll() is not None or Client(port).send("/health"))
        yield process, port
    finally:
        process.terminate()
        process.wait(TIMEOUT)


@pytest.mark.slow
def test_answers_are_those_of_the_model(server, checkpoint):
    status, answer = Client(server[1]).classify(*TEXTS)
    assert status == 200 and answer["labels"] == LABELS
    model = HfDebertaForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = serve.load_tokenizer(str(checkpoint))
    for text, probabilities in zip(TEXTS, answer["probabilities"], strict=True):
        inputs = tokenizer([text], return_tensors="pt")  # as training scripts do
        with torch.no_grad():
            expected = model(**inputs).logits.softmax(-1)[0]
        torch.testing.assert_close(torch.tensor(probabilities), expected, atol=1e-5, rtol=0)
    status, answer = Client(server[1]).send("/rerank", {"query": "a", "documents": ["b"]})
    assert status == 400 and "neutral" in answer["detail"]


def test_weights_that_are_not_finite_do_not_start(checkpoint, monkeypatch):
    model = serve.load_model(serve.Settings(str(checkpoint)))
    torch.nn.init.constant_(model.classifier.weight[:1], torch.nan)
    monkeypatch.setattr(serve, "load_model", lambda settings: model)
    with pytest.raises(FloatingPointError, match="not finite"):
        serve.Classifier(serve.Settings(str(checkpoint), threads=1))


@pytest.mark.slow
def test_shutdown_answers_accepted_requests(server):
    process, port = server
    with ThreadPoolExecutor(1) as threads:
        client = Client(port)
        answer = threads.submit(client.classify, *TEXTS * 60)
        wait_for(lambda: answer.done() or Client(port).send("/health")[1]["waiting_tokens"])
        process.terminate()
        assert answer.result(TIMEOUT)[0] == 200
    assert process.wait(TIMEOUT) == 0
    with pytest.raises(ConnectionError):
        Client(port).send("/health")


SLOW_IMPORT = """
import sys, time
sys.path.append("examples")
if __name__ == "__mp_main__":  # in the worker
    time.sleep(4)
import serve
serve.START_TIMEOUT_S, serve.ANSWER_TIMEOUT_S = {start}, 1
if __name__ == "__main__":
    serve.main()
"""


@pytest.fixture
def slow_server(checkpoint, tmp_path) -> Iterator[Callable[..., tuple[int, Path]]]:
    """Start the example with a worker whose imports take longer than an answer may; return port and log."""
    processes: list[subprocess.Popen] = []

    def start(start_timeout: int) -> tuple[int, Path]:
        script, log, port = tmp_path / "slow.py", tmp_path / "log", free_port()
        script.write_text(SLOW_IMPORT.format(start=start_timeout))
        command = [sys.executable, str(script), "--model", str(checkpoint), "--port", str(port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file))
        return port, log

    yield start
    for process in processes:
        process.terminate()
        process.wait(TIMEOUT)


@pytest.mark.slow
def test_a_worker_may_start_slowly_but_must_answer_then(slow_server):
    port, log = slow_server(start_timeout=TIMEOUT)
    worker = wait_for(lambda: Client(port).send("/health"))[1]["process"]
    assert "Worker [" not in log.read_text()
    time.sleep(5)  # the supervisor, which asks twice a second, learns that the worker has started
    os.kill(worker, signal.SIGSTOP)
    wait_for(lambda: f"Worker [{worker}] did not answer within 1 seconds" in log.read_text())
    assert wait_for(lambda: Client(port).send("/health"))[1]["process"] != worker


@pytest.mark.slow
def test_a_worker_that_never_starts_is_replaced_with_the_reason(slow_server):
    _, log = slow_server(start_timeout=1)
    wait_for(lambda: len(re.findall(r"Worker \[\d+\] did not start within 1 seconds", log.read_text())) >= 2)


@pytest.mark.parametrize(
    "flags, message",
    [(["--model", "/no/such/folder"], "/no/such/folder"), (["--engine", "in-tree", "--dtype", "int8"], "int8")],
)
def test_what_cannot_start_is_said_at_once(checkpoint, monkeypatch, flags, message):
    monkeypatch.setattr(sys, "argv", ["serve.py", "--model", str(checkpoint), *flags])
    with pytest.raises(SystemExit, match=message):
        serve.main()


DOCUMENTATION = serve.__doc__ + (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def test_commands_in_the_documentation_have_the_flags_of_the_server():
    commands = re.findall(r"python examples/serve\.py ([^`\n]*)", DOCUMENTATION)
    assert len(commands) >= 2
    for flags in commands:
        HfArgumentParser(serve.Settings).parse_args_into_dataclasses(shlex.split(flags, comments=True))


def test_requests_in_the_documentation_are_answered(length_server):
    LengthClassifier.open.set()
    port = length_server()
    requests = re.findall(r"curl 127\.0\.0\.1:8000(/\w+) --json '(.*)'", DOCUMENTATION)
    assert {path for path, _ in requests} == {"/classify", "/rerank"}
    for path, body in requests:
        status, answer = Client(port).send(path, json.loads(body))
        fields = re.search(rf"8000{path} .*\n# {{\"(\w+)\"", DOCUMENTATION)
        assert status == 200 and fields[1] in answer
    client = Client(port)
    assert client.send("/")[0] == 307 and client.headers["location"] == "docs"
