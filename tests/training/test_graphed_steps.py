"""Steps as graphs: recorded on the CPU (tests/recorded_graphs.py), and as CUDA graphs where there is a GPU."""

import random

import pytest
import torch
from all_trainers import STEPS, TRAINERS
from example_rows import MNLI_LENGTHS
from numerics import tiny_inputs, tiny_model
from recorded_graphs import SimulatedCaptures, use_recorded_graphs
from tiny_pairs import tiny_pair, trainer_of
from tiny_trainers import classifier
from torch import nn
from torch.nn import functional

from hf_deberta import HfDebertaForSequenceClassification
from hf_deberta.engines.unpadding import round_up
from hf_deberta.pretraining.language_model_trainer import LanguageModelTrainer
from hf_deberta.training import graphed_steps
from hf_deberta.training.graphed_steps import MAX_CHANGES, WARMUP_CALLS, GraphedSteps, GraphMemory

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Graphs on this device; on the CPU, values are not read, as on a GPU."""
    if request.param == "cpu":
        use_recorded_graphs(monkeypatch)
    return request.param


def trained(make, folder, device, uses_graphs=True, **arguments):
    """Return the trainer, what it logged, and its weights."""
    trainer = make(folder, **{**STEPS, "use_cpu": device == "cpu", **arguments})
    trainer.uses_graphs = uses_graphs
    trainer.train()
    times = ("runtime", "per_second", "mfu", "flos")
    logs = [{k: v for k, v in entry.items() if not any(t in k for t in times)} for entry in trainer.state.log_history]
    return trainer, logs, [weight.detach().clone() for weight in trainer.model.parameters()]


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_run_with_graphs_is_the_eager_run(kind, device, tmp_path):
    """Logs, evaluations and weights, with accumulation and several shapes: bit for bit on the CPU."""
    _, logs, weights = trained(TRAINERS[kind], tmp_path / "eager", device, uses_graphs=False)
    trainer, graphed_logs, graphed_weights = trained(TRAINERS[kind], tmp_path / "graphed", device)
    steps = trainer.graphed["training"]
    assert steps.reason is None and steps.graphs
    evaluations = [steps for kind, steps in trainer.graphed.items() if kind != "training"]
    assert all(steps.graphs and steps.reason is None for steps in evaluations)
    assert evaluations or isinstance(trainer, LanguageModelTrainer)  # which reads labels when it evaluates
    if device == "cpu":
        assert graphed_logs == logs
        assert all(map(torch.equal, graphed_weights, weights))
    rel, smallest = (2e-2, 0.05) if kind == "bf16" else (1e-3, 1e-4)  # 0.05: one of 24 rows gets another label
    for found, expected in zip(graphed_logs, logs, strict=True):
        assert found == pytest.approx(expected, rel=rel, abs=smallest)


def test_resuming_between_graphs_is_exact(device, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 6}
    whole, _, weights = trained(TRAINERS["mlm"], tmp_path, device, **saving)
    trainer = TRAINERS["mlm"](tmp_path, **{**STEPS, "use_cpu": device == "cpu", **saving})
    trainer.uses_graphs = True
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert trainer.graphed["training"].graphs and trainer.state.global_step == whole.state.global_step
    for found, expected in zip(trainer.model.parameters(), weights, strict=True):
        # on a GPU a graph may sum in another order, and Adam moves a weight by the learning rate, 5e-5
        torch.testing.assert_close(found, expected, rtol=1.3e-6, atol=1e-5 if device == "cpu" else 1e-4)


# ---- a loop of one's own -----------------------------------------------------------------------------------------


class Loop:
    """A model, an optimizer, and a step that counts its eager calls."""

    def __init__(self, device, graphed=True, **fields):
        self.model = tiny_model(HfDebertaForSequenceClassification, dtype=torch.float32, **fields).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.eager, self.device = 0, device
        self.step = GraphedSteps(self.model, self.compute) if graphed else self.compute

    def compute(self, inputs):
        self.eager += 1
        loss = self.model(**inputs).loss
        loss.backward()
        return loss.detach()

    def run(self, steps=6, lengths=(9, 4, 7), set_to_none=True):
        losses = []
        for number in range(steps):
            inputs = {**tiny_inputs(lengths, seed=number), "labels": torch.tensor([0, 1, 1])}
            losses.append(self.step({name: value.to(self.device) for name, value in inputs.items()}))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none)
        return [*map(float, losses)]  # read at the end: each result is a tensor of its own


def both(device, use, rel=1e-4):
    """Compare what `use` returns for loops with and without graphs; return the first of these loops."""
    loops = Loop(device), Loop(device, graphed=False)
    found, expected = map(use, loops)
    assert found == pytest.approx(expected, rel=rel)
    return loops[0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loop(set_to_none, device):
    loop = both(device, lambda loop: loop.run(set_to_none=set_to_none))
    assert loop.eager == WARMUP_CALLS + 2  # the first graph is made from two more calls


def test_other_weights_mean_new_graphs(device):
    """Replaced, frozen, or resized between steps."""

    def use(loop):
        losses = loop.run()
        loop.model.deberta.embeddings.requires_grad_(False)
        losses += loop.run()
        loop.model.resize_token_embeddings(140, mean_resizing=False)
        return losses + loop.run()

    assert both(device, use).eager == 3 * (WARMUP_CALLS + 2)


def test_other_settings_of_modules_mean_new_graphs(device):
    """A rate of dropout, what adapters note in a dictionary or a list, or a part that is frozen without dropout."""

    def use(loop):
        torch.manual_seed(1)
        layer = loop.model.deberta.encoder.layer[0]
        losses = loop.run()
        set_rate, set_names = (
            (lambda: setattr(layer.output.dropout, "p", 0.5)),
            (lambda: setattr(layer, "active", ["a"])),
        )
        for change in (set_rate, set_names, layer.eval):
            change()
            losses += loop.run()
        return losses

    assert both(device, use).eager == 4 * (WARMUP_CALLS + 2)


def test_settings_that_change_at_every_step_run_eagerly(device, warnings_so_far):
    def use(loop):
        losses = []
        for number in range(2 * MAX_CHANGES):
            loop.model.steps_so_far = number
            losses += loop.run(steps=1)
        return losses

    loop = both(device, use)
    assert loop.step.reason is not None and "settings of modules" in warnings_so_far()[-1]


def test_forward_passes(device):
    """Without gradients, in either mode of PyTorch: tensors of inference mode cannot be written to outside of it."""
    model = tiny_model(HfDebertaForSequenceClassification, dtype=torch.float32).to(device).eval()
    answer = GraphedSteps(model, lambda inputs: model(**inputs).logits)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        for seed in range(WARMUP_CALLS + 2):
            inputs = {name: value.to(device) for name, value in tiny_inputs((9, 4, 7), seed=seed).items()}
            with mode():
                torch.testing.assert_close(answer(inputs), model(**inputs).logits)
    assert len(answer.graphs) == 2 and answer.reason is None


def test_an_outer_autocast_means_other_graphs(device):
    """Which cast the weights themselves: the eager step just before has left casts that no optimizer changes."""

    def use(loop):
        losses, step = loop.run(), loop.step

        def autocast(inputs):
            with torch.autocast(device, torch.bfloat16):
                return step(inputs)

        loop.step = autocast
        losses += loop.run()
        loop.step = step
        return losses + loop.run()

    loop = both(device, use, rel=1e-4 if device == "cpu" else 2e-2)
    assert len(loop.step.graphs) == 2 and loop.eager == 2 * (WARMUP_CALLS + 2)


@pytest.mark.parametrize("graphed", [False, True])
def test_a_weight_without_a_gradient_keeps_none(graphed, device):
    """Although an earlier micro-batch gave it one: an optimizer would move it with a gradient of 0."""
    heads = nn.ModuleDict({name: nn.Linear(3, 1) for name in "ab"}).to(device)

    def compute(inputs):
        loss = heads[inputs["head"]](inputs["x"]).sum()
        loss.backward()
        return loss.detach()

    step = GraphedSteps(heads, compute) if graphed else compute
    for names in ["ab"] * 5 + ["b"]:
        heads.zero_grad()
        for name in names:
            step({"head": name, "x": torch.ones(2, 3, device=device)})
    assert heads["a"].weight.grad is None and heads["b"].weight.grad.tolist() == [[2.0, 2.0, 2.0]]
    assert not graphed or len(step.graphs) == 2


def test_errors_beside_masked_values_count():
    masked = torch.tensor([torch.finfo(torch.float32).min, 1.0, 2.0, -torch.inf])
    assert graphed_steps.relative_error(masked.clone(), masked) == 0
    assert graphed_steps.relative_error(masked + torch.tensor([0, 0.5, 0, 0]), masked) > 0.1


def test_rare_shapes_run_eagerly(device, monkeypatch):
    monkeypatch.setattr(graphed_steps, "MAX_GRAPHS", 1)

    def use(loop):
        return loop.run() + loop.run(2, (8, 3, 2)) + loop.run(4, (7, 3, 2)) + loop.run()

    loop = both(device, use)
    assert len(loop.step.graphs) == 1 and loop.eager == WARMUP_CALLS + 2 + 6


def test_a_wrong_replay_is_noticed(device, monkeypatch, warnings_so_far):
    """Here it does not read the new inputs, because a step keeps its own."""

    class Stale(Loop):
        kept = None

        def compute(self, inputs):
            self.kept = self.kept or inputs
            return super().compute(self.kept if self.eager > WARMUP_CALLS else inputs)

    loop = Stale(device)
    loop.run()
    assert "the first replay differs from the eager step by" in "".join(warnings_so_far())
    assert not loop.step.graphs and loop.eager > 6


def reads_a_value(loop):
    compute = loop.compute
    loop.step.step = lambda inputs: compute(inputs) * (1 if float(inputs["labels"].sum()) else 2)


def drops_layers(loop):
    loop.step.step = lambda inputs: random.random() and loop.compute(inputs)


def hooks_a_layer(loop):
    loop.model.deberta.encoder.layer[0].register_forward_hook(lambda *_: None)


def hooks_a_weight(loop):
    next(loop.model.parameters()).register_hook(lambda gradient: gradient)


def checkpoints_layers(loop):
    loop.model.gradient_checkpointing_enable()


REASONS = {
    reads_a_value: "a step cannot be captured, ",
    drops_layers: "a step cannot be captured, RuntimeError: it draws random numbers on the host",
    hooks_a_layer: "HfDebertaLayer has a hook",
    hooks_a_weight: "a weight of Embedding has a hook",
    checkpoints_layers: "gradient checkpointing is on",
}


@pytest.mark.parametrize("change", REASONS)
def test_what_a_graph_cannot_hold_runs_eagerly(change, device, warnings_so_far):
    loop, expected = Loop(device), Loop(device, graphed=False).run()
    change(loop)
    assert loop.run() == pytest.approx(expected, rel=1e-4)
    assert warnings_so_far() == [f"steps run without CUDA graphs: {loop.step.reason}"]
    assert loop.step.reason.startswith(REASONS[change]) and not loop.step.graphs


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_capture_leaves_the_rest_usable(device, monkeypatch):
    """Dropout, casts, the current stream, and graphs in the same memory, from before and after."""
    memory = GraphMemory(torch.device(device))
    if device == "cpu":
        captures = SimulatedCaptures(monkeypatch)
        memory.stream = torch.cuda.Stream()
    stream, layer = torch.cuda.current_stream(), nn.Linear(3, 1).to(device)

    def compute(inputs):
        loss = functional.dropout(layer(inputs["x"])).sum()
        loss.backward()
        return loss.detach()

    def run(step):
        steps = GraphedSteps(layer, step, torch.bfloat16, memory=memory)
        for _ in range(WARMUP_CALLS + 2):
            with torch.autocast(device, torch.bfloat16):
                assert steps({"x": torch.ones(2, 3, device=device)}).isfinite()
        return steps

    before = run(compute)
    failed = run(lambda inputs: compute(inputs) * float(inputs["x"].sum()))
    assert failed.reason.startswith("a step cannot be captured, ") and "previous error" not in failed.reason
    assert torch.cuda.current_stream() == stream
    assert device != "cpu" or [*(+captures.references).values()] == [1]  # the graph from before
    before.graphs[next(iter(before.graphs))].replay()
    after = run(compute)
    assert before.graphs and after.graphs and not failed.graphs
    if device == "cpu":
        assert not captures.recording and sorted((+captures.references).values()) == [1, 2]


def test_inputs_that_may_hold_tensors_run_eagerly(device):
    loop = Loop(device)
    step = GraphedSteps(loop.model, lambda inputs: loop.compute(inputs["batch"]))
    inputs = {**tiny_inputs(), "labels": torch.tensor([0, 1, 1])}
    step({"batch": {name: value.to(device) for name, value in inputs.items()}})
    assert step.reason == "the input batch is a dict"


def test_anomaly_detection_runs_eagerly(device):
    loop = Loop(device)
    with torch.autograd.detect_anomaly(check_nan=False):
        loop.run(1)
    assert loop.step.reason.startswith("anomaly detection")


def test_what_a_trainer_runs_eagerly(device, tmp_path, warnings_so_far):
    """Flags of Trainer, and steps that note more in Python than a graph could change."""
    options = {"cuda_graphs": "true", "use_cpu": device == "cpu"}
    for flag, value in {"torch_compile": True, "torch_empty_cache_steps": 2, "sift": True}.items():
        assert not classifier(tmp_path, **options, **{flag: value}).uses_graphs
    trainer_of(tiny_pair(), tmp_path, decoupled=True, use_cpu=device == "cpu")
    reasons = ("--torch_compile", "--torch_empty_cache_steps", "--sift", "--decoupled")
    assert {f"steps run without CUDA graphs: {reason}" for reason in reasons} <= {*warnings_so_far()}


def test_scripts_have_no_graphs_unless_they_are_asked_for(device, tmp_path):
    for setting, expected in {"auto": False, "false": False, "true": True}.items():
        trainer = classifier(tmp_path, cuda_graphs=setting, use_cpu=device == "cpu")
        assert trainer.uses_graphs is expected


def test_fp16_finds_its_scale_first(device):
    """Steps that overflow are not compared; a graph follows as soon as they are finite."""
    scaler, loop = torch.amp.GradScaler(device, init_scale=2.0**18), Loop(device)

    def scaled(inputs):
        loss = loop.model(**inputs).loss.half()
        scaler.scale(loss).backward()
        return loss.detach()

    loop.step = GraphedSteps(loop.model, scaled, torch.float16)
    inputs = {**tiny_inputs(), "labels": torch.tensor([0, 1, 1])}
    for _ in range(6):
        loop.step({name: value.to(device) for name, value in inputs.items()})
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    assert loop.step.graphs and loop.step.reason is None and float(scaler.get_scale()) < 2.0**17


def test_graphs_without_a_gpu_are_warned_of(tmp_path, warnings_so_far):
    assert not classifier(tmp_path, cuda_graphs="true").uses_graphs
    assert "steps run without CUDA graphs: there is no GPU" in warnings_so_far()


def test_batches_of_mnli_have_few_shapes():
    """At most 16 graphs, and at most 8 % more tokens, with the padding and the rounding of run_glue.py."""
    generator, real, computed, shapes = random.Random(0), 0, 0, set()
    for _ in range(2000):
        lengths = generator.choices(MNLI_LENGTHS, k=32)
        shapes.add((-(-max(lengths) // 64) * 64, round_up(sum(lengths))))
        real, computed = real + sum(lengths), computed + round_up(sum(lengths))
    print(f"{len(shapes)} shapes, {computed / real - 1:.1%} more tokens")
    assert len(shapes) <= 16 and computed <= 1.08 * real
