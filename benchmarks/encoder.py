"""Time a whole encoder, of base size (12 x 768) or --preset, against its peers: a forward pass or a training step.

    python benchmarks/encoder.py                              # forward, float32, all cases
    python benchmarks/encoder.py --mode training --cases 8x128 mnli
    python benchmarks/encoder.py --dtype int8                 # bfloat16 and int8 print their difference from float32
    python benchmarks/encoder.py --device cuda --dtype bfloat16
    python benchmarks/encoder.py --device cuda --dtype bfloat16 --mode step

Peers: in-tree (Transformers' DeBERTa), enabled (the same under `enable()`), bert, disentangled-flash, "ours BACKEND",
"ours optimized" (after `optimize()`), "onnxruntime in-tree" and "openvino in-tree" (Transformers' graph at its fastest
setting), "openvino ours" (the file of `to_openvino`). GPUs also have modernbert and flashdeberta. After a comma a peer
may have an addition: "no oneDNN", "no cuDNN" (for attention), "compiled" (torch.compile), "layers compiled", "CUDA
graph".

Training is forward and backward with weights in --dtype. A step is what fine-tuning does: a classifier with its whole
vocabulary and weights in float32, autocast to --dtype, dropout, clipping and fused AdamW; with CUDA graphs, which are
those of `GraphedSteps`, padding and the number of real tokens are rounded up as run_glue.py does.

All DeBERTa peers hold the same weights. A case is batch x tokens without padding; "mnli" is a padded batch of 32
sentence pairs, computed by the sequence classifiers. On a GPU the file also gets the peak of memory, the operations of
the model as the paper defines it (not those of an implementation) per second and as a share of the GPU's peak, and the
energy of a row. A peer that fails is skipped with the reason; if it is one of ours, the script exits with an error at
the end. Writes benchmarks/results/encoder.csv.
"""

import argparse
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import transformers
from runtimes import MODULES, RUNTIMES, Graphs, fastest_runner
from timing import (
    joules_per_call,
    peak,
    record,
    report_failure,
    require_ours,
    start_counting,
    synchronize,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_deberta
from hf_deberta.engines.onednn import prefers_onednn
from hf_deberta.engines.unpadding import round_up
from hf_deberta.gpu_check import time_interleaved
from hf_deberta.model.attention import AUTO, BACKENDS
from hf_deberta.pretraining.throughput import peak_operations, training_operations

# Lengths of 32 random pairs of MNLI's validation set, in word pieces of a 30k vocabulary.
MNLI_LENGTHS = [40, 27, 33, 39, 75, 68, 85, 81, 33, 33, 64, 53, 13, 34, 45, 81]
MNLI_LENGTHS += [85, 31, 59, 68, 34, 45, 36, 51, 37, 32, 16, 67, 30, 64, 37, 101]
CASES = ("1x32", "1x128", "8x128", "2x512", "1x2048", "mnli")
SIZES = {"vocab_size": 1000, "num_labels": 3}
MAX_TOKENS = 32768
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
OTHER_MODELS = ("bert", "modernbert")  # than DeBERTa
MAX_DIFFERENCE = 1e-4  # in float32; a DeBERTa peer that differs more from in-tree is not the same model


def in_tree_config(config: hf_deberta.HfDebertaConfig) -> transformers.DebertaV2Config:
    """Return the configuration of the same model in Transformers' classes."""
    fields = {name: value for name, value in config.to_dict().items() if value is not None}
    return transformers.DebertaV2Config.from_dict(fields, legacy=False)


def make_model(peer: str, classify: bool, preset: str = "v3-base", whole: bool = False) -> Any:
    """Return the model of a peer, whose name has no addition; those of DeBERTa have equal weights on each device.

    With `whole` it has its published vocabulary.
    """
    torch.manual_seed(0)
    given = {"num_labels": SIZES["num_labels"]} if whole else SIZES
    config = hf_deberta.HfDebertaConfig.from_preset(preset, **given)
    kind = "ForSequenceClassification" if classify else "Model"
    in_tree = getattr(transformers, f"DebertaV2{kind}")(in_tree_config(config))
    if peer in ("in-tree", "enabled", "disentangled-flash") or peer.endswith(" in-tree"):
        return in_tree
    if peer == "bert":
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        sizes = {name: getattr(config, name) for name in names}
        bert_config = transformers.BertConfig(**given, **sizes, max_position_embeddings=MAX_TOKENS)
        return getattr(transformers, f"Bert{kind}")(bert_config)
    if peer == "modernbert":  # of base size, whatever the preset
        modern = transformers.ModernBertConfig(**SIZES, **SPECIAL_TOKENS, max_position_embeddings=MAX_TOKENS)
        return getattr(transformers, f"ModernBert{kind}")(modern)
    model: Any
    if peer == "flashdeberta":
        import flashdeberta

        model = getattr(flashdeberta, f"FlashDebertaV2{kind}")(in_tree.config)
    else:
        model = getattr(hf_deberta, f"HfDeberta{kind}")(config)
        if peer.removeprefix("ours ") in (*BACKENDS, AUTO):
            model.set_attn_implementation(peer.removeprefix("ours "))
    model.load_state_dict(in_tree.state_dict(), strict=False)
    return model


def available_peers(device: str, training: bool = False) -> list[str]:
    """Return the peers that are installed and can run on the device."""
    # "triton" is "sdpa" on a CPU, and "eager" has not enough memory for the long cases on a GPU
    backends = ["sdpa", "triton", AUTO] if device == "cuda" else ["eager", "sdpa"]
    peers = ["in-tree", "bert", *(f"ours {backend}" for backend in backends), "enabled"]
    peers += ["modernbert"] if device == "cuda" else []
    if device == "cpu" and prefers_onednn():
        peers.append("ours sdpa, no oneDNN")  # as on other processors
    modules: dict[str, tuple[str, ...]] = {"disentangled-flash": ("disentangled_flash",)}
    if device == "cuda":
        modules["flashdeberta"] = ("flashdeberta",)
    elif not training:
        peers.append("ours optimized")
        modules |= {name: MODULES[name.split()[0]] for name in RUNTIMES}
    for name, needed in modules.items():
        with report_failure(name):  # not installed, or incompatible with an installed version
            for module in needed:
                __import__(module)
            peers.append(name)
    return peers


def split_name(peer: str) -> tuple[str, str]:
    """Return the name of a peer and the addition after its comma, or nothing."""
    name, _, addition = peer.partition(", ")
    additions = ["no oneDNN", "no cuDNN", "compiled", "layers compiled", "CUDA graph"]
    if name in (*RUNTIMES, "ours optimized"):
        additions = []
    if addition and addition not in additions:
        raise SystemExit(f"{peer!r}: write {' or '.join([*map(repr, additions), 'nothing'])} after the comma")
    return name, addition


def prepare(peer: str, model: Any, inputs: dict[str, Any], args: argparse.Namespace, graphs: Graphs) -> Any:
    """Return the model of a peer in the type that is timed, with its fastest settings."""
    training, device, dtype = args.mode != "forward", args.device, args.dtype
    peer, addition = split_name(peer)
    model.train(training)
    if peer in RUNTIMES:
        return fastest_runner(peer, model, inputs_of(peer, inputs), dtype, graphs)
    if peer == "ours optimized":
        return hf_deberta.optimize(model, dtype=getattr(torch, dtype))
    if args.mode != "step":
        model = quantize(model) if dtype == "int8" else model.to(getattr(torch, dtype))
    if addition == "compiled":
        model.compile()
    elif addition == "layers compiled":
        for layer in getattr(model, "deberta", model).encoder.layer:
            layer.compile()
    if peer == "disentangled-flash":
        from disentangled_flash import optimize_deberta

        backend = "triton" if device == "cuda" else "torch"
        lengths = None if training else [inputs["input_ids"].shape[1]]
        encoder = getattr(model, "deberta", model)
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
    ids = torch.randint(5, SIZES["vocab_size"], (batch, tokens), generator=generator)
    if case != "mnli":
        return {"input_ids": ids.to(device)}, None
    real = torch.arange(tokens) < lengths[:, None]
    inputs: dict[str, Any] = {"input_ids": (ids * real).to(device), "attention_mask": real.long().to(device)}
    if device != "cpu":
        inputs["num_real_tokens"] = sum(MNLI_LENGTHS)  # as our trainers do
    return inputs, torch.randint(0, SIZES["num_labels"], (batch,), generator=generator).to(device)


def inputs_of(peer: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that a peer's model has."""
    return {name: value for name, value in inputs.items() if name != "num_real_tokens" or peer.startswith("ours")}


def make_step(
    peer: str, model: Any, inputs: dict, labels: torch.Tensor | None, args: argparse.Namespace
) -> Callable[[], None]:
    """Return a call that runs one forward pass without gradients, forward and backward, or a whole training step."""
    inputs, mode = inputs_of(peer, inputs), args.mode
    if mode == "step":
        return make_whole_step(peer, model, inputs, labels, args)

    def compute(inputs: dict[str, Any]) -> torch.Tensor:
        if mode == "forward":
            return model(**inputs)[0]
        loss = model(**inputs).last_hidden_state.square().mean() if labels is None else model(**inputs).loss
        loss.backward()
        return loss.detach()

    if labels is not None and mode == "training":
        inputs = {**inputs, "labels": labels}
    step = graphed(peer, model, compute)

    def call() -> None:
        with settings(peer), torch.set_grad_enabled(mode == "training"):
            if mode == "training":
                model.zero_grad()
            step(inputs)

    warm_up(step, call)
    return call


def make_whole_step(
    peer: str, model: Any, inputs: dict[str, Any], labels: torch.Tensor | None, args: argparse.Namespace
) -> Callable[[], None]:
    """Return a call that updates the weights of a classifier once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = len(inputs["input_ids"])
    inputs["labels"] = torch.zeros(batch, dtype=torch.long, device=args.device) if labels is None else labels
    dtype = getattr(torch, args.dtype)

    def compute(inputs: dict[str, Any]) -> torch.Tensor:
        with torch.autocast(args.device, dtype, enabled=dtype != torch.float32):
            loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    step = graphed(peer, model, compute, dtype)
    if step is not compute:
        for name in ("input_ids", "attention_mask"):
            if name in inputs:
                inputs[name] = torch.nn.functional.pad(inputs[name], (0, -inputs[name].shape[1] % 64))
        if "num_real_tokens" in inputs:
            inputs["num_real_tokens"] = round_up(inputs["num_real_tokens"])

    def call() -> None:
        with settings(peer):
            step(inputs)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    # a capture counts as tracing, where some versions mask even rows without padding: a slower kernel for BERT
    never_tracing = mock.patch.object(transformers.masking_utils, "is_tracing", lambda *_: False)
    with nullcontext() if "attention_mask" in inputs else never_tracing:
        warm_up(step, call)
    return call


def graphed(
    peer: str, model: nn.Module, compute: Callable[[dict[str, Any]], Any], dtype: torch.dtype | None = None
) -> Any:
    """Return the step, replayed as a CUDA graph if the peer's name says so."""
    if split_name(peer)[1] != "CUDA graph":
        return compute
    from hf_deberta.training.graphed_steps import GraphedSteps  # imported late: it imports Trainer

    return GraphedSteps(model, compute, dtype)


def warm_up(step: Any, call: Callable[[], None]) -> None:
    """Call until a graphed step has its graph."""
    if hasattr(step, "graphs"):
        for _ in range(3):
            call()
        if not step.graphs:
            raise RuntimeError(f"there is no graph: {step.reason}")


def settings(peer: str) -> AbstractContextManager:
    """Return the context in which each call of a peer runs."""
    name, addition = split_name(peer)
    if name == "enabled":
        return hf_deberta.enable()
    if addition == "no cuDNN":
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return torch.backends.mkldnn.flags(enabled=False) if addition == "no oneDNN" else nullcontext()


@torch.no_grad()
def differences(case: str, models: dict[str, Any], inputs: dict[str, Any], dtype: str, preset: str) -> dict[str, float]:
    """The largest difference of each DeBERTa peer from in-tree in float32, of hidden states or logits.

    None beyond 512 tokens, where in-tree is not right. Exits if a peer in float32 computes something else.
    """
    if inputs["input_ids"].shape[1] > 512:
        return {}
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    with real.device:
        in_tree = make_model("in-tree", case == "mnli", preset).eval()
    expected = in_tree(**inputs_of("in-tree", inputs))[0]
    result = {}
    for peer, model in models.items():
        if split_name(peer)[0] in OTHER_MODELS:
            continue
        if isinstance(model, nn.Module):
            model.eval()
        with settings(peer):
            difference = (model(**inputs_of(peer, inputs))[0].float() - expected).abs()
        result[peer] = float((difference if case == "mnli" else difference[real]).max())
        if dtype == "float32" and not result[peer] <= MAX_DIFFERENCE:
            raise SystemExit(f"{peer} differs from in-tree by {result[peer]:.1e} at {case}: it is not the same model")
    return result


def measure(case: str, args: argparse.Namespace, graphs: Graphs) -> list[dict]:
    """Time all peers in one case; return the rows of the result file."""
    training, classify = args.mode != "forward", case == "mnli" or args.mode == "step"
    inputs, labels = make_inputs(case, args.device)
    models: dict[str, Any] = {}
    steps: dict[str, Callable[[], None]] = {}
    for peer in args.peers:
        with report_failure(f"{peer} at {case}"):
            with torch.device(args.device):  # on a CPU random weights take longer than the times of a GPU
                whole = args.mode == "step" and args.preset != "tiny"
                model = make_model(split_name(peer)[0], classify, args.preset, whole)
            model = prepare(peer, model, inputs, args, graphs)
            call = make_step(peer, model, inputs, labels, args)
            call()
            synchronize(args.device)
            models[peer], steps[peer] = model, call
    compared = args.dtype == "float32" or (args.device == "cpu" and not training)
    errors = differences(case, models, inputs, args.dtype, args.preset) if compared and args.mode != "step" else {}
    if training:
        for model in models.values():
            model.train()
    repeats = args.repeats or max(5, min(31, 12000 // inputs["input_ids"].numel()))
    times = time_interleaved(steps, repeats, torch.device(args.device))
    ours = times.get("ours optimized", times.get("ours sdpa"))
    rows = []
    for peer, time in times.items():
        chosen = getattr(models[peer], "settings", "")
        difference = f"{errors[peer]:.1e}" if peer in errors else ""
        ratio = f"({time / ours:.2f})" if ours else ""
        print(f"{case:>7}  {peer:<31} {time:9.1f} ms {ratio:>8}  {difference:8} {chosen}".rstrip(), flush=True)
        row = {"peer": peer, "mode": args.mode, "case": case, "dtype": args.dtype, "device": args.device}
        row |= {"preset": args.preset, "milliseconds": f"{time:.1f}", "difference": difference, "settings": chosen}
        rows.append({**row, "repeats": repeats})
        if args.device == "cuda":
            rows[-1] |= work_on_gpu(peer, steps[peer], time, inputs, args)
    return rows


def work_on_gpu(
    peer: str, step: Callable[[], None], milliseconds: float, inputs: dict[str, Any], args: argparse.Namespace
) -> dict[str, str]:
    """Return the peak of memory, the energy of a row, and the operations per second of a DeBERTa."""
    start_counting(args.device)
    step()
    synchronize(args.device)
    # with the weights of all peers; a graph has taken its memory before
    work = {"peak_mib": "" if peer.endswith("CUDA graph") else f"{peak(args.device) / 2**20:.0f}"}
    with report_failure("energy"):
        work["joules_per_row"] = f"{joules_per_call(step) / len(inputs['input_ids']):.4f}"
    if split_name(peer)[0] in OTHER_MODELS:
        return work
    config = hf_deberta.HfDebertaConfig.from_preset(args.preset, **SIZES)
    rows, tokens = inputs["input_ids"].shape
    lengths = MNLI_LENGTHS if "attention_mask" in inputs else [tokens] * rows
    real, pairs = sum(lengths), sum(length**2 for length in lengths)
    passes = 3 if args.mode == "forward" else 1
    rate = training_operations(config, real, pairs / real, 0, vocab_size=0) / passes / milliseconds * 1e3
    device_peak = peak_operations(torch.device(args.device)) if args.dtype == "bfloat16" else None
    return {**work, "tflops": f"{rate / 1e12:.1f}", "share_of_peak": f"{rate / device_peak:.3f}" if device_peak else ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("forward", "training", "step"), default="forward")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--preset", default="v3-base")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "int8"), default="float32")
    parser.add_argument("--peers", nargs="+", help="default: all that are installed")
    parser.add_argument("--repeats", type=int, help="default: as many as a few seconds allow")
    args = parser.parse_args()
    training = args.mode != "forward"
    args.peers = args.peers or available_peers(args.device, training)
    if args.dtype == "int8" and (training or args.device != "cpu"):
        raise SystemExit("--dtype int8 is for --mode forward --device cpu")
    transformers.logging.set_verbosity_error()
    print("in brackets: the time divided by that of ours optimized, or of ours sdpa if the first is not timed")
    done: set[str] = set()
    graphs = {False: Graphs(), True: Graphs()}  # of encoders, of classifiers
    for case in args.cases:
        rows = measure(case, args, graphs[case == "mnli"])
        if rows:
            record("encoder.csv", rows, ("peer", "mode", "case", "dtype", "device", "preset"), args.device)
        done |= {f"{row['peer']} at {case}" for row in rows}
    require_ours([f"{peer} at {case}" for case in args.cases for peer in args.peers if peer.startswith("ours")], done)


if __name__ == "__main__":
    main()
