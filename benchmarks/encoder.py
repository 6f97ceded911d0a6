"""A whole base-size encoder (12 x 768) against its peers: forward, or a training step.

    python benchmarks/encoder.py                              # forward, float32, all cases
    python benchmarks/encoder.py --mode training --cases 8x128 mnli
    python benchmarks/encoder.py --device cuda --dtype bfloat16

Peers: in-tree DebertaV2 (eager, all it has), BERT with SDPA (the same matrices without position terms, a floor), ours
with each backend, and on processors where oneDNN helps without it as well, in-tree under `hf_deberta.enable()`, and
`disentangled-flash` and `flashdeberta` where they are installed and can run. DeBERTa peers hold the same weights. A
case is batch x tokens without padding; "mnli" is a padded batch of 32 sentence pairs, through the sequence
classifiers. A peer that fails is left out with the reason; if it is one of ours, the exit status says so at the end.
Writes benchmarks/results/encoder.csv.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import transformers
from timing import RESULTS, circumstances, interleaved, medians, wait, write_rows

import hf_deberta
from hf_deberta.model.attention import BACKENDS
from hf_deberta.model.dense import prefers_onednn

# tokens of 32 pairs of MNLI's validation set, drawn at random, in word pieces of a 30k vocabulary
MNLI_LENGTHS = (40, 27, 33, 39, 75, 68, 85, 81, 33, 33, 64, 53, 13, 34, 45, 81)
MNLI_LENGTHS += (85, 31, 59, 68, 34, 45, 36, 51, 37, 32, 16, 67, 30, 64, 37, 101)
CASES = ("1x32", "1x128", "8x128", "2x512", "1x2048", "mnli")
BASE = {
    "vocab_size": 1000,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_labels": 3,
}
V3 = {
    "relative_attention": True,
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
}
EXACT = 1e-4  # peers whose float32 states are further from in-tree's are not the same model


def models(peers: list[str], classify: bool) -> dict[str, torch.nn.Module]:
    """One model per peer that is installed; DeBERTa ones with equal weights."""
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(**BASE, **V3)
    kind = transformers.DebertaV2ForSequenceClassification if classify else transformers.DebertaV2Model
    in_tree = kind(config)
    ours_kind = hf_deberta.HfDebertaForSequenceClassification if classify else hf_deberta.HfDebertaModel
    made = {}
    for peer in peers:
        if peer == "in-tree":
            made[peer] = in_tree
        elif peer == "bert":
            bert_kind = transformers.BertForSequenceClassification if classify else transformers.BertModel
            made[peer] = bert_kind(transformers.BertConfig(**BASE, max_position_embeddings=8192))
        elif peer in ("disentangled-flash", "enabled"):
            made[peer] = kind(config)
        elif peer == "flashdeberta":
            made[peer] = flashdeberta(classify)(config)
        else:
            made[peer] = ours_kind(hf_deberta.HfDebertaConfig.from_dict(config.to_dict()))
            made[peer].set_attn_implementation(peer.removeprefix("ours ").partition(",")[0])
        if peer not in ("in-tree", "bert"):
            made[peer].load_state_dict(in_tree.state_dict(), strict=False)
    return made


def flashdeberta(classify: bool) -> type:
    import flashdeberta

    return flashdeberta.FlashDebertaV2ForSequenceClassification if classify else flashdeberta.FlashDebertaV2Model


def backends(device: str) -> list[str]:
    """Ours that are different things there: elsewhere than on CUDA, "triton" is "sdpa"."""
    return [backend for backend in BACKENDS if backend != "triton" or device == "cuda"]


def available(device: str) -> list[str]:
    """Peers that are installed and can run there."""
    peers = ["in-tree", "bert", *(f"ours {backend}" for backend in backends(device)), "enabled"]
    if device == "cpu" and prefers_onednn():
        peers.append("ours sdpa, no oneDNN")  # what other processors have
    for name, module, cuda_only in (
        ("disentangled-flash", "disentangled_flash", False),
        ("flashdeberta", "flashdeberta", True),
    ):
        if cuda_only and device != "cuda":
            continue
        try:
            __import__(module)
        except Exception as reason:  # not installed, or made for another version of what it imports
            print(f"{name} is left out: {reason}")
            continue
        peers.append(name)
    return peers


def speed_up(peer: str, model: torch.nn.Module, length: int, device: str, training: bool) -> None:
    """Switch a peer to its best settings."""
    if peer == "disentangled-flash":
        from disentangled_flash import optimize_deberta

        encoder = getattr(model, "deberta", model)
        backend = "triton" if device == "cuda" else "torch"
        lengths = None if training else [length]
        optimize_deberta(encoder, backend=backend, inference=not training, sequence_lengths=lengths)


def inputs(case: str, device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Model inputs, and labels for the classifiers."""
    generator = torch.Generator().manual_seed(1)
    if case == "mnli":
        lengths = torch.tensor(MNLI_LENGTHS)
        batch, tokens = len(lengths), int(lengths.max())
    else:
        batch, tokens = map(int, case.split("x"))
    ids = torch.randint(5, BASE["vocab_size"], (batch, tokens), generator=generator)
    given = {"input_ids": ids.to(device)}
    if case != "mnli":
        return given, None
    real = torch.arange(tokens) < lengths[:, None]
    given = {"input_ids": (ids * real).to(device), "attention_mask": real.long().to(device)}
    return given, torch.randint(0, BASE["num_labels"], (batch,), generator=generator).to(device)


def step(peer: str, model: torch.nn.Module, given: dict, labels: torch.Tensor | None, mode: str) -> Callable[[], None]:
    """One forward pass without gradients, or forward and backward."""

    def forward() -> None:
        with settings(peer), torch.no_grad():
            model(**given)

    def training() -> None:
        with settings(peer):
            forward_and_backward()

    def forward_and_backward() -> None:
        model.zero_grad(set_to_none=True)
        if labels is not None:
            model(**given, labels=labels).loss.backward()
        else:
            model(**given).last_hidden_state.square().mean().backward()

    return forward if mode == "forward" else training


def settings(peer: str) -> AbstractContextManager:
    """What is on around each call of a peer."""
    if peer == "enabled":
        return hf_deberta.enable()
    return torch.backends.mkldnn.flags(enabled=False) if peer == "ours sdpa, no oneDNN" else nullcontext()


def check_exact(case: str, made: dict[str, torch.nn.Module], given: dict) -> None:
    """Every DeBERTa peer must compute what in-tree does, up to 512 tokens, where in-tree is right."""
    if "in-tree" not in made or given["input_ids"].shape[1] > 512:
        return
    real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    with torch.no_grad():
        results = {}
        for peer, model in made.items():
            if peer != "bert":
                with settings(peer):
                    results[peer] = model.eval()(**given)[0]
    if case != "mnli":
        results = {peer: states[real] for peer, states in results.items()}
    for peer, states in results.items():
        error = float((states - results["in-tree"]).abs().max())
        if error > EXACT:
            raise SystemExit(f"{peer} is {error:.1e} off in-tree at {case}: not the same model")


def measure(case: str, arguments: argparse.Namespace) -> list[dict]:
    training = arguments.mode == "training"
    given, labels = inputs(case, arguments.device)
    length = given["input_ids"].shape[1]
    made, steps = {}, {}
    for peer in arguments.peers:
        try:
            model = models([peer], classify=case == "mnli")[peer]
            model.to(arguments.device, getattr(torch, arguments.dtype)).train(training)
            speed_up(peer, model, length, arguments.device, training)
            call = step(peer, model, given, labels, arguments.mode)
            call()
            wait(arguments.device)
        except Exception as reason:  # a kernel that does not compile, too little memory, another package's version
            print(f"{peer} is left out at {case}: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
            continue
        made[peer], steps[peer] = model, call
    if arguments.dtype == "float32":
        check_exact(case, made, given)
    for model in made.values():
        model.train(training)
    tokens = given["input_ids"].numel()
    repeats = arguments.repeats or max(5, min(31, 12000 // tokens))
    found = medians(interleaved(steps, repeats, arguments.device))
    report(case, found)
    about = {"mode": arguments.mode, "case": case, "dtype": arguments.dtype, "device": arguments.device}
    return [
        {
            "peer": peer,
            **about,
            "milliseconds": f"{milliseconds:.1f}",
            "repeats": repeats,
            **circumstances(arguments.device),
        }
        for peer, milliseconds in found.items()
    ]


def report(case: str, found: dict[str, float]) -> None:
    ours = found.get("ours sdpa")
    text = ", ".join(
        f"{peer} {time:.1f} ms" + (f" ({time / ours:.2f})" if ours and peer != "ours sdpa" else "")
        for peer, time in found.items()
    )
    print(f"{case:>7}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("forward", "training"), default="forward")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--peers", nargs="+", help="by default all that are installed")
    parser.add_argument("--repeats", type=int, help="by default as many as a few seconds allow")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    arguments.peers = arguments.peers or available(arguments.device)
    transformers.logging.set_verbosity_error()
    print("in brackets: the peer's time over that of ours with sdpa")
    missing = []
    for case in arguments.cases:
        rows = measure(case, arguments)
        if rows and not arguments.no_write:
            write_rows(RESULTS / "encoder.csv", rows, ("peer", "mode", "case", "dtype", "device", "machine"))
        done = {row["peer"] for row in rows}
        missing += [f"{peer} at {case}" for peer in arguments.peers if peer.startswith("ours") and peer not in done]
    if missing:
        raise SystemExit(f"left out: {', '.join(missing)}")


if __name__ == "__main__":
    main()
