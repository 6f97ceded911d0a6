r"""Serve a DeBERTa sequence classifier over HTTP: a reranker, an NLI model, a prompt guard.

    pip install '.[serve]'
    python examples/serve.py --model cross-encoder/nli-deberta-v3-base --dtype bfloat16 --workers 2

    curl 127.0.0.1:8000/classify --json '{"texts": ["one text", ["a premise", "a hypothesis"]]}'
    curl 127.0.0.1:8000/rerank --json '{"query": "a question", "documents": ["an answer", "another"]}'

/classify returns the probability of each label, /rerank the documents by the score of a model with one label, /health
the state of one worker. FastAPI answers requests; uvicorn runs the workers and replaces one that dies or hangs. Each
worker computes in one thread beside its event loop, in batches that are filled by tokens: rows differ too much in
length. docs/serving.md explains the choices.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse
from huggingface_hub.errors import HFValidationError
from pydantic import AfterValidator, BaseModel, Field
from token_batcher import QueueFull, Row, TokenBatcher
from transformers import AutoConfig, AutoModelForSequenceClassification, HfArgumentParser
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import multiprocess

import hf_deberta
from hf_deberta import HfDebertaForSequenceClassification
from hf_deberta.tokenization_hf_deberta import load_tokenizer

logger = logging.getLogger("uvicorn.error")
MAX_BODY_BYTES = 2**20
MAX_CONNECTIONS = 1000
START_TIMEOUT_S = 900  # until a worker has imported its libraries and loaded the model
ANSWER_TIMEOUT_S = 30  # for a started worker's answer to its supervisor
MAX_CHARACTERS_PER_TOKEN = 16  # of a text, on average: longer texts are not even tokenized, which would take seconds


@dataclass(frozen=True)
class Settings:
    model: str = field(metadata={"help": "folder or Hub id of a sequence classifier"})
    engine: Literal["ours", "in-tree"] = field(default="ours", metadata={"help": "in-tree: Transformers' own class"})
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = field(default=1, metadata={"help": "processes, each with its own copy of the model"})
    threads: int = field(default=0, metadata={"help": "threads of each model; 0: cores / workers"})
    max_length: int = field(default=512, metadata={"help": "tokens of one text or pair; longer ones get 413"})
    max_texts: int = field(default=256, metadata={"help": "texts of one request; more get 413"})
    max_batch_tokens: int = field(default=2048, metadata={"help": "real tokens of one batch"})
    max_wait_ms: float = field(default=5.0, metadata={"help": "how long an idle model waits for a fuller batch"})
    max_queue_tokens: int = field(default=65536, metadata={"help": "tokens that may wait; more get 503"})
    timeout_s: float = field(default=30.0, metadata={"help": "a request that takes longer gets 504"})


class Classifier:
    """A model and its tokenizer."""

    def __init__(self, settings: Settings):
        torch.set_num_threads(settings.threads)  # counts for the thread that calls it, so model and call share one
        self.tokenizer = load_tokenizer(settings.model, trust_remote_code=False)
        self.model = load_model(settings)
        self.labels = [self.model.config.id2label[number] for number in range(self.model.config.num_labels)]
        self.probabilities([self.tokenize("warm up")])

    def tokenize(self, text: str | tuple[str, str]) -> Row:
        rows = self.tokenizer([text], verbose=False)  # in a list: else it drops an empty second text and its [SEP]
        return {name: ids for name, (ids,) in rows.items()}

    @torch.inference_mode()
    def probabilities(self, rows: list[Row]) -> list[list[float]]:
        """Return the probability of each label for each row: [rows, labels]. A regression keeps its numbers."""
        logits = self.model(**self.tokenizer.pad(rows, return_tensors="pt")).logits.float()
        if not logits.isfinite().all():  # JSON would have null for them
            raise FloatingPointError("the model returns scores that are not finite: check its weights, or --dtype")
        problem = self.model.config.problem_type
        if problem == "regression":
            return logits.tolist()
        independent = problem == "multi_label_classification" or logits.shape[1] == 1
        return (logits.sigmoid() if independent else logits.softmax(-1)).tolist()


def load_model(settings: Settings) -> Any:
    dtype = getattr(torch, settings.dtype)
    if settings.engine == "in-tree":
        model = AutoModelForSequenceClassification.from_pretrained(settings.model, trust_remote_code=False, dtype=dtype)
        return model.eval()
    model = HfDebertaForSequenceClassification.from_pretrained(settings.model, dtype=torch.float32)
    return hf_deberta.optimize(model, dtype=dtype)


def check_encodable(text: str) -> str:
    """JSON can hold half of a surrogate pair, which no tokenizer takes."""
    text.encode()  # UnicodeEncodeError is a ValueError: pydantic makes a 422 of it
    return text


Text = Annotated[str, AfterValidator(check_encodable)]


class ClassifyRequest(BaseModel):
    texts: list[Text | tuple[Text, Text]] = Field(min_length=1)


class RerankRequest(BaseModel):
    query: Text
    documents: list[Text] = Field(min_length=1)


class Worker:
    """Answers requests in an event loop. One thread computes, one tokenizes, which no two threads may do at once."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.tokenizer_thread, self.model_thread = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.waiting_characters = 0  # of texts that are not yet tokenized

    @asynccontextmanager
    async def run(self, app: FastAPI) -> AsyncIterator[None]:
        """Load the model, then compute until uvicorn has answered the last accepted request and stops."""
        loop = asyncio.get_running_loop()
        self.classifier = await loop.run_in_executor(self.model_thread, Classifier, self.settings)
        self.batcher = TokenBatcher(
            self.classifier.probabilities,
            max_tokens=self.settings.max_batch_tokens,
            max_waiting_tokens=self.settings.max_queue_tokens,
            max_wait=self.settings.max_wait_ms / 1000,
        )
        task = asyncio.create_task(self.batcher.run(self.model_thread))
        yield
        task.cancel()

    async def score(self, texts: list[Any]) -> list[list[float]]:
        """Return the probabilities of each text or pair, or raise the HTTP error that says why not."""
        try:
            return await asyncio.wait_for(self.tokenize_and_compute(texts), self.settings.timeout_s)
        except QueueFull:
            waiting = f"{self.batcher.waiting_tokens} tokens and {self.waiting_characters} characters are waiting"
            raise HTTPException(503, f"{waiting}: try again later", {"Retry-After": "1"}) from None
        except TimeoutError:
            raise HTTPException(504, f"no result within {self.settings.timeout_s:g} seconds") from None
        except HTTPException:
            raise
        except Exception as error:  # passed on, it would close the connection
            logger.exception("the model failed")
            raise HTTPException(500, f"the model failed with {type(error).__name__}") from None

    async def tokenize_and_compute(self, texts: list[Any]) -> list[list[float]]:
        refuse_above(self.settings.max_texts, len(texts), "the request has {} texts")
        sizes = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
        self.refuse_long(sizes, "characters", MAX_CHARACTERS_PER_TOKEN)
        waiting, limit = self.waiting_characters + sum(sizes), self.settings.max_queue_tokens
        if self.batcher.waiting_tokens >= limit or waiting > limit * MAX_CHARACTERS_PER_TOKEN:
            raise QueueFull  # before the tokenizer has work
        self.waiting_characters = waiting
        loop = asyncio.get_running_loop()
        try:
            rows = await loop.run_in_executor(self.tokenizer_thread, lambda: [*map(self.classifier.tokenize, texts)])
        finally:
            self.waiting_characters -= sum(sizes)
        self.refuse_long([len(row["input_ids"]) for row in rows], "tokens")
        return await self.batcher.submit(rows)

    def refuse_long(self, sizes: list[int], unit: str, units_per_token: int = 1) -> None:
        """Refuse a request if one of its texts, or all together, have more units than the limits in tokens allow."""
        for number, size in enumerate(sizes):
            refuse_above(self.settings.max_length * units_per_token, size, f"text {number} has {{}} {unit}")
        refuse_above(self.settings.max_queue_tokens * units_per_token, sum(sizes), f"the request has {{}} {unit}")

    async def classify(self, request: ClassifyRequest) -> dict[str, Any]:
        return {"labels": self.classifier.labels, "probabilities": await self.score(request.texts)}

    async def rerank(self, request: RerankRequest) -> dict[str, Any]:
        if len(self.classifier.labels) > 1:
            names = ", ".join(self.classifier.labels)
            raise HTTPException(400, f"/rerank needs a model with one label. This one has {names}: use /classify")
        scores = await self.score([(request.query, document) for document in request.documents])
        results = [{"index": index, "score": score} for index, (score,) in enumerate(scores)]
        return {"results": sorted(results, key=lambda result: result["score"], reverse=True)}

    async def health(self) -> dict[str, Any]:
        return {"status": "ok", "process": os.getpid(), "waiting_tokens": self.batcher.waiting_tokens}


def refuse_above(limit: int, count: int, sentence: str) -> None:
    if count > limit:
        raise HTTPException(413, f"{sentence.format(count)}: send at most {limit}")


async def invalid_body(request: Request, error: Any) -> JSONResponse:
    """Say in one sentence what is wrong, in place of FastAPI's list."""
    first = error.errors()[0]
    status = 400 if first["type"] == "json_invalid" else 422
    place = ".".join(str(part) for part in first["loc"] if "function-" not in str(part))  # names of our functions
    return JSONResponse({"detail": f"{place}: {first['msg']}"}, status_code=status)


def create_app(settings: Settings) -> FastAPI:
    worker = Worker(settings)
    app = FastAPI(title="hf_deberta", lifespan=worker.run, max_body_size=MAX_BODY_BYTES)
    app.add_api_route("/classify", worker.classify, methods=["POST"])
    app.add_api_route("/rerank", worker.rerank, methods=["POST"])
    app.add_api_route("/health", worker.health)
    app.add_api_route("/", lambda: RedirectResponse("docs"), include_in_schema=False)
    app.add_exception_handler(RequestValidationError, invalid_body)
    return app


class WorkerProcess(multiprocess.Process):
    """A worker that may start slowly. uvicorn has one limit for answers, which imports alone can exceed."""

    is_started = False

    def start(self) -> None:
        super().start()
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.parent_conn.send(b"ping")

    def is_alive(self, timeout: float = 5) -> bool:
        """Return False, and log why, if uvicorn is to replace this worker."""
        if not self.is_started and self.parent_conn.poll():
            self.is_started = self.parent_conn.recv()  # the answer to the last ping
            if not self.is_started:
                self.parent_conn.send(b"ping")
        if not self.process.is_alive():
            reason = f"ended with exit status {self.exitcode}"
        elif not self.is_started and time.monotonic() > self.deadline:
            reason = f"did not start within {START_TIMEOUT_S} seconds"
        elif self.is_started and not self.ping(timeout):
            reason = f"did not answer within {timeout} seconds"
        else:
            return True
        logger.error(f"Worker [{self.pid}] {reason}")
        return False


def main() -> None:
    (settings,) = HfArgumentParser(cast(Any, Settings)).parse_args_into_dataclasses()
    try:
        kind = AutoConfig.from_pretrained(settings.model, trust_remote_code=False).model_type
    except HFValidationError:
        raise SystemExit(f"--model {settings.model}: there is no such folder") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {settings.model}: {error}") from None
    if settings.engine == "in-tree" and (settings.dtype == "int8" or kind == "hf_deberta"):
        raise SystemExit(f"--engine in-tree runs float32 and bfloat16, no {kind} in {settings.dtype}")
    settings = replace(settings, threads=settings.threads or max(1, torch.get_num_threads() // settings.workers))
    config = uvicorn.Config(
        partial(create_app, settings),
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=round(settings.timeout_s) + 5,
        timeout_worker_healthcheck=ANSWER_TIMEOUT_S,
    )
    cast(Any, multiprocess).Process = WorkerProcess  # the supervisor has no parameter for it
    # uvicorn.run would not supervise a single worker
    supervisor = multiprocess.Multiprocess(config, sockets=[config.bind_socket()])
    supervisor.run()
    if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
        raise SystemExit(STARTUP_FAILURE)


if __name__ == "__main__":
    main()
