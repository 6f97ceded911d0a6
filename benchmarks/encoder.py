"""Time a whole base-size encoder (12 x 768) against its peers: a forward pass or a training step.

    python benchmarks/encoder.py                              # forward, float32, all cases
    python benchmarks/encoder.py --mode training --cases 8x128 mnli
    python benchmarks/encoder.py --dtype int8                 # bfloat16 and int8 print their difference from float32
    python benchmarks/encoder.py --device cuda --dtype bfloat16

Peers, by their names in the result file (docs/benchmarks.md explains them):

- in-tree: Transformers' DebertaV2, which has eager attention only
- enabled: the same while `hf_deberta.enable()` is on
- bert: BERT with SDPA, which has the same matrices without position terms
- ours sdpa, ours eager, ours triton: this package with each backend
- ours optimized: this package after `hf_deberta.optimize()`, forward on the CPU; with ", torch" without OpenVINO, with
  ", fixed shape" with the shape of the inputs among its `shapes`
- onnxruntime in-tree, openvino in-tree, openvino ours, openvino bert: other runtimes (runtimes.py) with their fastest
  settings, forward on the CPU; with ", any shape" the fastest settings of a graph for all shapes
- ours sdpa, no oneDNN: only on processors where oneDNN is used
- disentangled-flash, flashdeberta: where they are installed and can run
- any of these with ", compiled" (torch.compile) or, on CUDA, ", CUDA graph" after its name, if asked for by --peers

In int8 models of PyTorch without optimize() have dynamically quantized linear layers.

All DeBERTa peers hold the same weights. A case is batch x tokens without padding; "mnli" is a padded batch of 32
sentence pairs, computed by the sequence classifiers. A peer that fails is skipped with the reason; if it is one of
ours, the script exits with an error at the end. Writes benchmarks/results/encoder.csv.
"""

import argparse
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from runtimes import MODULES, RUNTIMES, Graphs, fastest_runner
from timing import RESULTS, environment, medians, synchronize, time_interleaved, write_rows
from torch import nn

import hf_deberta
from hf_deberta.engines.onednn import prefers_onednn
from hf_deberta.model.attention import BACKENDS

# Lengths of 32 random pairs of MNLI's validation set, in word pieces of a 30k vocabulary.
MNLI_LENGTHS = [40, 27, 33, 39, 75, 68, 85, 81, 33, 33, 64, 53, 13, 34, 45, 81]
MNLI_LENGTHS += [85, 31, 59, 68, 34, 45, 36, 51, 37, 32, 16, 67, 30, 64, 37, 101]
CASES = ("1x32", "1x128", "8x128", "2x512", "1x2048", "mnli")
BASE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_labels": 3,
}
V3: dict[str, Any] = {
    "relative_attention": True,
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
}
MAX_DIFFERENCE = 1e-4  # in float32; a DeBERTa peer that differs more from in-tree is not the same model
BERT_PEERS = ("bert", "openvino bert")


def make_models(peers: list[str], classify: bool) -> dict[str, Any]:
    """Return a model for each peer, whose name has no addition; those of DeBERTa have equal weights."""
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(**BASE, **V3)
    their_class = transformers.DebertaV2ForSequenceClassification if classify else transformers.DebertaV2Model
    in_tree = their_class(config)
    our_class = hf_deberta.HfDebertaForSequenceClassification if classify else hf_deberta.HfDebertaModel
    models: dict[str, Any] = {}
    for peer in peers:
        if peer == "in-tree":
            models[peer] = in_tree
        elif peer in BERT_PEERS:
            bert_class: Any = transformers.BertForSequenceClassification if classify else transformers.BertModel
            models[peer] = bert_class(transformers.BertConfig(**BASE, max_position_embeddings=8192))
        elif peer in ("disentangled-flash", "enabled") or peer.endswith(" in-tree"):
            models[peer] = their_class(config)
        elif peer == "flashdeberta":
            models[peer] = flashdeberta_class(classify)(config)
        else:
            models[peer] = our_class(hf_deberta.HfDebertaConfig.from_dict(config.to_dict()))
            if peer.removeprefix("ours ") in BACKENDS:
                models[peer].set_attn_implementation(peer.removeprefix("ours "))
        if peer not in ("in-tree", *BERT_PEERS):
            models[peer].load_state_dict(in_tree.state_dict(), strict=False)
    return models


def flashdeberta_class(classify: bool) -> type:
    import flashdeberta

    return flashdeberta.FlashDebertaV2ForSequenceClassification if classify else flashdeberta.FlashDebertaV2Model


def backends(device: str) -> list[str]:
    """Return our backends that differ on the device: off CUDA, "triton" falls back to "sdpa"."""
    return [backend for backend in BACKENDS if backend != "triton" or device == "cuda"]


def available_peers(device: str, training: bool = False) -> list[str]:
    """Return the peers that are installed and can run on the device."""
    peers = ["in-tree", "bert", *(f"ours {backend}" for backend in backends(device)), "enabled"]
    if device == "cpu" and prefers_onednn():
        peers.append("ours sdpa, no oneDNN")  # as on other processors
    modules: dict[str, tuple[str, ...]] = {"disentangled-flash": ("disentangled_flash",)}
    if device == "cuda":
        modules["flashdeberta"] = ("flashdeberta",)
    elif not training:
        peers += ["ours optimized", "ours optimized, torch"]
        modules |= {name: MODULES[name.split()[0]] for name in RUNTIMES}
        modules["ours optimized, fixed shape"] = ("openvino",)
    for name, needed in modules.items():
        try:
            for module in needed:
                __import__(module)
        except Exception as reason:  # not installed, or incompatible with an installed version
            print(f"{name} is skipped: {reason}")
            continue
        peers.append(name)
    return peers


def split_name(peer: str) -> tuple[str, str]:
    """Return the name of a peer and the addition after its comma, or nothing."""
    name, _, addition = peer.partition(", ")
    additions = ["no oneDNN", "compiled", "CUDA graph"]
    if name == "ours optimized":
        additions = ["torch", "fixed shape"]
    elif name in RUNTIMES:
        additions = ["any shape"]
    if addition and addition not in additions:
        raise SystemExit(f"{peer!r}: write {' or '.join(map(repr, additions))} after the comma, or nothing")
    return name, addition


def prepare(peer: str, model: Any, inputs: dict[str, Any], arguments: argparse.Namespace, graphs: Graphs) -> Any:
    """Return the model of a peer in the type that is timed, with its fastest settings."""
    training, device, dtype = arguments.mode == "training", arguments.device, arguments.dtype
    peer, addition = split_name(peer)
    model.to(device).train(training)
    if peer in RUNTIMES:
        return fastest_runner(peer, model, inputs_of(peer, inputs), dtype, graphs, any_shape=addition == "any shape")
    if peer == "ours optimized":
        shapes = [tuple(inputs["input_ids"].shape)] if addition == "fixed shape" else []
        runtime = "torch" if addition == "torch" else None
        return hf_deberta.optimize(model, dtype=getattr(torch, dtype), runtime=runtime, shapes=shapes)
    model = quantize(model) if dtype == "int8" else model.to(getattr(torch, dtype))
    if addition == "compiled":
        model.compile()
    if peer == "disentangled-flash":
        from disentangled_flash import optimize_deberta

        encoder = getattr(model, "deberta", model)
        backend = "triton" if device == "cuda" else "torch"
        lengths = None if training else [inputs["input_ids"].shape[1]]
        optimize_deberta(encoder, backend=backend, inference=not training, sequence_lengths=lengths)
    return model


def quantize(model: nn.Module) -> nn.Module:
    """Return a copy with int8 weights in linear layers; activations are quantized in each forward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "torchao will replace this"
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)


def make_inputs(case: str, device: str) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return the inputs of our models, and labels for the classifiers."""
    generator = torch.Generator().manual_seed(1)
    if case == "mnli":
        lengths = torch.tensor(MNLI_LENGTHS)
        batch, tokens = len(lengths), int(lengths.max())
    else:
        batch, tokens = map(int, case.split("x"))
    ids = torch.randint(5, BASE["vocab_size"], (batch, tokens), generator=generator)
    if case != "mnli":
        return {"input_ids": ids.to(device)}, None
    real = torch.arange(tokens) < lengths[:, None]
    inputs: dict[str, Any] = {"input_ids": (ids * real).to(device), "attention_mask": real.long().to(device)}
    if device != "cpu":
        inputs["num_real_tokens"] = sum(MNLI_LENGTHS)  # as our trainers do
    return inputs, torch.randint(0, BASE["num_labels"], (batch,), generator=generator).to(device)


def inputs_of(peer: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that a peer's model has."""
    return {name: value for name, value in inputs.items() if name != "num_real_tokens" or peer.startswith("ours")}


def make_step(peer: str, model: Any, inputs: dict, labels: torch.Tensor | None, mode: str) -> Callable[[], None]:
    """Return a call that runs one forward pass without gradients, or forward and backward."""
    inputs = inputs_of(peer, inputs)

    def forward() -> None:
        with settings(peer), torch.no_grad():
            model(**inputs)

    def training() -> None:
        with settings(peer):
            forward_and_backward()

    def forward_and_backward() -> None:
        model.zero_grad(set_to_none=True)
        if labels is not None:
            model(**inputs, labels=labels).loss.backward()
        else:
            model(**inputs).last_hidden_state.square().mean().backward()

    call = forward if mode == "forward" else training
    return captured(call) if split_name(peer)[1] == "CUDA graph" else call


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that replays the kernels of another as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def settings(peer: str) -> AbstractContextManager:
    """Return the context in which each call of a peer runs."""
    name, addition = split_name(peer)
    if name == "enabled":
        return hf_deberta.enable()
    return torch.backends.mkldnn.flags(enabled=False) if addition == "no oneDNN" else nullcontext()


@torch.no_grad()
def differences(case: str, models: dict[str, Any], inputs: dict[str, Any], dtype: str) -> dict[str, float]:
    """The largest difference of each DeBERTa peer from in-tree in float32, of hidden states or logits.

    None beyond 512 tokens, where in-tree is not right. Exits if a peer in float32 computes something else.
    """
    if inputs["input_ids"].shape[1] > 512:
        return {}
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    in_tree = make_models(["in-tree"], classify=case == "mnli")["in-tree"].to(real.device).eval()
    expected = in_tree(**inputs_of("in-tree", inputs))[0]
    result = {}
    for peer, model in models.items():
        if split_name(peer)[0] in BERT_PEERS:
            continue
        if isinstance(model, nn.Module):
            model.eval()
        with settings(peer):
            difference = (model(**inputs_of(peer, inputs))[0].float() - expected).abs()
        result[peer] = float((difference if case == "mnli" else difference[real]).max())
        if dtype == "float32" and not result[peer] <= MAX_DIFFERENCE:
            raise SystemExit(f"{peer} differs from in-tree by {result[peer]:.1e} at {case}: it is not the same model")
    return result


def measure(case: str, arguments: argparse.Namespace, graphs: Graphs) -> list[dict]:
    """Time all peers in one case; return the rows of the result file."""
    training = arguments.mode == "training"
    inputs, labels = make_inputs(case, arguments.device)
    models: dict[str, Any] = {}
    steps: dict[str, Callable[[], None]] = {}
    for peer in arguments.peers:
        try:
            name = split_name(peer)[0]
            model = make_models([name], classify=case == "mnli")[name]
            model = prepare(peer, model, inputs, arguments, graphs)
            call = make_step(peer, model, inputs, labels, arguments.mode)
            call()
            synchronize(arguments.device)
        except Exception as reason:  # a kernel that does not compile, too little memory, an incompatible version
            print(f"{peer} is skipped at {case}: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
            continue
        models[peer], steps[peer] = model, call
    compared = arguments.dtype == "float32" or (arguments.device == "cpu" and not training)
    errors = differences(case, models, inputs, arguments.dtype) if compared else {}
    for model in models.values():
        if training:
            model.train()
    tokens = inputs["input_ids"].numel()
    repeats = arguments.repeats or max(5, min(31, 12000 // tokens))
    times = medians(time_interleaved(steps, repeats, arguments.device, calls=1 if training else 2))
    chosen = {peer: getattr(model, "settings", "") for peer, model in models.items()}
    report(case, times, errors, chosen)
    setting = {"mode": arguments.mode, "case": case, "dtype": arguments.dtype, "device": arguments.device}
    return [
        {
            "peer": peer,
            **setting,
            "milliseconds": f"{milliseconds:.1f}",
            "difference": f"{errors[peer]:.1e}" if peer in errors else "",
            "settings": chosen[peer],
            "repeats": repeats,
            **environment(arguments.device),
        }
        for peer, milliseconds in times.items()
    ]


def report(case: str, times: dict[str, float], errors: dict[str, float], chosen: dict[str, str]) -> None:
    """Print a line for each peer: time, time divided by ours, difference from float32, settings."""
    ours = times.get("ours optimized", times.get("ours sdpa"))
    for peer, time in times.items():
        ratio = f"({time / ours:.2f})" if ours else ""
        error = f"difference {errors[peer]:.0e}" if peer in errors else ""
        print(f"{case:>7}  {peer:<31} {time:9.1f} ms {ratio:>8}  {error:<16} {chosen[peer]}".rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("forward", "training"), default="forward")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "int8"), default="float32")
    parser.add_argument("--peers", nargs="+", help="default: all that are installed")
    parser.add_argument("--repeats", type=int, help="default: as many as a few seconds allow")
    parser.add_argument("--no-write", action="store_true", help="print the times, write no file")
    arguments = parser.parse_args()
    training = arguments.mode == "training"
    arguments.peers = arguments.peers or available_peers(arguments.device, training)
    if arguments.dtype == "int8" and (training or arguments.device != "cpu"):
        raise SystemExit("--dtype int8 is for --mode forward --device cpu")
    transformers.logging.set_verbosity_error()
    print("in brackets: the time divided by that of ours optimized, or of ours sdpa if the first is not timed")
    missing = []
    graphs = {False: Graphs(), True: Graphs()}  # of encoders, of classifiers
    for case in arguments.cases:
        rows = measure(case, arguments, graphs[case == "mnli"])
        if rows and not arguments.no_write:
            write_rows(RESULTS / "encoder.csv", rows, ("peer", "mode", "case", "dtype", "device", "machine"))
        done = {row["peer"] for row in rows}
        missing += [f"{peer} at {case}" for peer in arguments.peers if peer.startswith("ours") and peer not in done]
    if missing:
        raise SystemExit(f"skipped: {', '.join(missing)}")


if __name__ == "__main__":
    main()
