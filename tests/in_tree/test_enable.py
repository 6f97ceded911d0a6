"""`hf_deberta.enable()`: in-tree classes keep their names, files and numbers; `disable()` undoes every change."""

import gc
import inspect
import json
import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers
from numerics import assert_same_by_name
from safetensors.torch import load_file
from test_parity_with_transformers import HEADS, SHAPES, assert_same, batch, in_tree, outputs, released
from tokenizer_files import write_bpe, write_spm
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoConfig, AutoTokenizer, Trainer, TrainingArguments, pipeline
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2

import hf_deberta
from hf_deberta import HfDebertaConfig, HfDebertaModel, HfDebertaTokenizer, disable, enable
from hf_deberta.engines import attention_sdpa
from hf_deberta.in_tree import encoder
from hf_deberta.model import attention
from hf_deberta.model.attention import BACKENDS
from hf_deberta.model.modeling_hf_deberta import HfDebertaSelfAttention
from hf_deberta.pretraining.tokenizer_training import train_tokenizer

RELEASES = ["v1", "v2", "v3"]
AUTO = {head: getattr(transformers, f"Auto{head}" if head == "Model" else f"AutoModel{head}") for head in HEADS}
TEXTS = ["Paris is the capital of France.", "a good store", "Ann Lee works in Rome, not in Paris"]


@pytest.fixture(autouse=True)
def disabled_before_and_after():
    disable()
    yield
    disable()


def changed_by_enable():
    """All state of Transformers that `enable()` may change: the in-tree modules and their classes.

    The forward function of attention may be in-tree's or the one that also accepts a `BatchLayout`.
    """
    modules = [modeling_deberta, modeling_deberta_v2, transformers.models.deberta.tokenization_deberta]
    modules.append(transformers.models.deberta_v2.tokenization_deberta_v2)
    state = {module.__name__: dict(vars(module)) for module in modules}
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, type):
                state[f"{module.__name__}.{name}"] = dict(vars(value))
        if attention := state.get(f"{module.__name__}.DisentangledSelfAttention"):
            attention["forward"] = inspect.unwrap(attention["forward"])
    return state


@contextmanager
def enabled():
    """`enable()`, with in-tree attention made to fail, which must not be called."""

    def fail(*arguments):
        raise AssertionError("in-tree attention ran")

    with enable(), pytest.MonkeyPatch.context() as patch:
        for module in (modeling_deberta, modeling_deberta_v2):
            patch.setattr(module, "scaled_size_sqrt", fail)
        yield


# ---- same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, head", [*product(SHAPES, HEADS[:1]), *product(RELEASES, HEADS[1:])])
@pytest.mark.usefixtures("unpad_tiny_models")
def test_same_outputs_of_a_model_in_memory(shape, head, caplog):
    model = in_tree(shape, head)
    longest = 40 if "narrow" in shape else 129
    for lengths in [(37, 20, 5), (1,), (6, 6), (longest, 7)]:
        inputs = batch(lengths=lengths, types=model.config.type_vocab_size > 0)
        before = outputs(model, inputs)
        with enabled():
            assert_same(before, outputs(model, inputs), inputs["attention_mask"])
            as_tuple = model(**inputs, return_dict=False)
            attentions = model(**inputs, output_attentions=True).attentions or ()
        expected = model(**inputs, output_attentions=True).attentions or ()
        is_real = inputs["attention_mask"].bool()[:, None, :, None]
        for found, wanted in zip(attentions, expected, strict=True):
            assert ((found - wanted) * is_real).abs().max() < 1e-5
        after = outputs(model, inputs)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert isinstance(as_tuple, tuple) and len(as_tuple) == len(model(**inputs, return_dict=False))
    assert not caplog.records


@pytest.mark.parametrize("shape", RELEASES)
@pytest.mark.usefixtures("unpad_tiny_models")
def test_dropout_and_autocast(shape):
    """In-tree v1 fails under autocast."""
    model, inputs = in_tree(shape, "ForSequenceClassification"), batch()
    dropping = in_tree(shape, "Model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5).train()
    expected = model(**inputs).logits
    with enabled():
        assert not torch.allclose(*(dropping(**inputs).last_hidden_state for _ in range(2)))
        for layer in dropping.encoder.layer:
            layer.attention.self.dropout = torch.nn.Identity()
        assert torch.equal(*(dropping(**inputs).last_hidden_state for _ in range(2)))
        layer.attention.self.dropout = torch.nn.AlphaDropout()  # attention would not call it
        with pytest.raises(TypeError, match="AlphaDropout"):
            dropping(**inputs)
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(**inputs).logits - expected).abs().max() < 0.05


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "not reentrant", "reentrant"])
@pytest.mark.parametrize("shape", RELEASES)
@pytest.mark.usefixtures("unpad_tiny_models")
def test_same_gradients(shape, reentrant):
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = in_tree(shape, "ForSequenceClassification", **dropout).train()
    inputs = {**batch(), "labels": torch.tensor([0, 1, 1])}

    def gradients():
        model.zero_grad()
        model(**inputs).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with enabled():
        assert_same_by_name(gradients(), expected)


QA_LABELS = {"start_positions": torch.tensor([1, 0]), "end_positions": torch.tensor([2, 1])}
# head, layers, mask and labels; states at padding are constant, because the biases of a new model are zero
PADDING_WITH_GRADIENTS = {
    "a loss over padding": ("ForQuestionAnswering", 2, [[1] * 6, [1] * 2 + [0] * 4], QA_LABELS),
    "a row of padding": ("ForSequenceClassification", 12, [[1] * 6, [0] * 6], {"labels": torch.tensor([1, 0])}),
}


@pytest.mark.parametrize("case", PADDING_WITH_GRADIENTS)
def test_gradients_of_padding_are_small_from_scratch(case):
    """A LayerNorm of constant states multiplies gradients; in-tree those of a row of padding are NaN."""
    head, layers, mask, labels = PADDING_WITH_GRADIENTS[case]
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
    config = transformers.DebertaV2Config(**sizes, **relative, num_hidden_layers=layers)
    model = getattr(transformers, f"DebertaV2{head}")(config)
    with enabled():
        model(torch.randint(1, 50, (2, 6)), torch.tensor(mask), **labels).loss.backward()
    assert all(each.grad.norm() < 100 for each in model.parameters() if each.grad is not None)


@pytest.mark.parametrize("shape", ["v1", "v3"])
@pytest.mark.usefixtures("unpad_tiny_models")
def test_other_token_masks(shape, warnings_so_far):
    model, (ids, mask) = in_tree(shape, "ForSequenceClassification"), batch(lengths=(9, 4, 7)).values()
    for form in (mask[:, None, None], mask[1:2]):
        expected = model(ids, form).logits
        with enabled():
            assert (model(ids, form).logits - expected).abs().max() < 1e-5
    assert not warnings_so_far()
    with enabled():
        model(ids.flip(1), mask.flip(1))
    assert any("padding_side = 'right'" in message for message in warnings_so_far())


@pytest.mark.parametrize("shape", ["v1", "v3"])
@pytest.mark.parametrize("dims", [3, 4])
def test_pair_masks_through_the_encoder(shape, dims):
    """As GLiNER does: embeddings and encoder are called separately, with a mask of pairs."""
    model, document = in_tree(shape, "Model"), torch.tensor([[0] * 5 + [1] * 4 + [2] * 3])
    mask = document[:, :, None] == document[:, None, :]
    ids = torch.randint(1, 99, document.shape)
    embeddings = model.embeddings(input_ids=ids, mask=torch.ones_like(ids))
    mask = mask if dims == 3 else mask[:, None]
    expected = model.encoder(embeddings, mask).last_hidden_state
    with enabled():
        assert (model.encoder(embeddings, mask).last_hidden_state - expected).abs().max() < 1e-5
        alone = model(input_ids=ids[:, 5:9]).last_hidden_state
        assert (model.encoder(embeddings, mask.float() if dims == 3 else mask)[0][:, 5:9] - alone).abs().max() < 1e-5


BUCKETS = {"position_buckets": 16}
FAR = {"v1": ("v1", {}), "v2": ("v2", BUCKETS), "v3": ("v3", BUCKETS), "no buckets": ("v3", {"position_buckets": -1})}
FAR |= {"odd": ("v3", {"position_buckets": 15}), "two": ("v3", {"position_buckets": 2})}


@pytest.mark.parametrize(
    "shape, path",
    [
        *((shape, "auto") for shape in FAR),
        *(("v3", path) for path in ("eager", "device", "exported", "optimized")),
        *product(("odd", "two"), ("exported", "optimized")),
    ],
)
@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.usefixtures("unpad_tiny_models")
def test_past_the_largest_distance_rows_are_as_chosen(shape, clamp, path, tmp_path, monkeypatch, warnings_so_far):
    name, fields = FAR[shape]
    model, inputs = in_tree(name, "Model", max_relative_positions=64, **fields), batch(lengths=(150, 90))
    model.save_pretrained(tmp_path)
    official = outputs(HfDebertaModel.from_pretrained(tmp_path).eval(), inputs)
    expected = {False: outputs(model, inputs), True: official}
    monkeypatch.setattr(attention_sdpa, "uses_device_path", lambda query: path == "device")
    monkeypatch.setattr(encoder, "is_tracing_or_exporting", lambda: path == "exported")  # then in-tree code computes
    used = f"Those of {'the official code' if clamp else 'Transformers'} are in use; for the others, call hf_deberta"
    with enable("eager" if path == "eager" else "auto", clamp_relative_distance=clamp):
        if path == "optimized":
            hf_deberta.optimize(model)
        outputs(model, batch(lengths=(64,)))
        assert not any(used in message for message in warnings_so_far())
        assert_same(expected[clamp], outputs(model, inputs), inputs["attention_mask"])
        warns = shape not in ("v1", "no buckets") and path != "exported"
        assert sum(used in message for message in warnings_so_far()) == warns
        if path != "optimized":  # such a model refuses the other rows
            with enable(clamp_relative_distance=not clamp):
                assert_same(expected[not clamp], outputs(model, inputs), inputs["attention_mask"])


def context_of(attention, states, *others):
    """The context that a layer's attention computes from the layer's inputs, in this package or in Transformers."""
    if isinstance(attention, HfDebertaSelfAttention):
        table, layout, *_ = others
        return attention(states, attention.project_keys(states, table, layout), layout)[0]
    layout, _, _, table, *_ = others
    return attention(states, layout, False, None, None, table)[0]


def test_some_rows_of_each_projection_are_some_heads():
    """As in a process of a column-wise tensor-parallel plan."""
    for model in (in_tree("v3", "Model"), HfDebertaModel(HfDebertaConfig.from_preset("tiny")).eval()):
        layer, calls = model.encoder.layer[0], []
        attention = layer.attention.self
        layer.register_forward_hook(lambda _, inputs, output, calls=calls: calls.append(inputs))
        with enable():
            model(**batch())
            whole = context_of(attention, *calls[0])
            for each in (attention.query_proj, attention.key_proj, attention.value_proj):
                each.weight.data, each.bias.data = each.weight.data[:16], each.bias.data[:16]
            torch.testing.assert_close(context_of(attention, *calls[0]), whole[..., :16])


def test_fake_tensors_are_not_kept():
    """A model that was made and run under FakeTensorMode leaves nothing behind for real models, nor they for it."""
    fields, ids = {"max_relative_positions": 40, "position_buckets": 12}, torch.tensor([[1, 5, 9, 2]])
    expected = in_tree("v3", "Model", **fields)(input_ids=ids).last_hidden_state
    with enable():
        for real in (False, True, False):
            with nullcontext() if real else FakeTensorMode() as mode:
                model = in_tree("v3", "Model", **fields)
                states = model(input_ids=ids if real else mode.from_tensor(ids)).last_hidden_state
                assert isinstance(states, FakeTensor) != real
                if real:
                    assert (states - expected).abs().max() < 1e-5


@pytest.mark.parametrize("option", ["talking_head", "narrow", "query_states"])
@pytest.mark.usefixtures("unpad_tiny_models")
def test_unsupported_calls_stay_in_tree(option):
    more_buckets_than_distances = {"max_relative_positions": 16, "position_buckets": 64}
    fields = {"talking_head": {"talking_head": True}, "narrow": more_buckets_than_distances}.get(option, {})
    model, inputs = in_tree("v1" if option == "talking_head" else "v3", "Model", **fields), batch(lengths=(12, 5))

    def states():
        embeddings = model.embeddings(inputs["input_ids"], mask=inputs["attention_mask"])
        extra = {"query_states": embeddings + 1} if option == "query_states" else {}
        return model.encoder(embeddings, inputs["attention_mask"], **extra).last_hidden_state

    expected = states()
    with enable():
        assert torch.equal(states(), expected) or option == "talking_head"  # its LayerNorm rounds differently
        assert (states() - expected).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("shape", RELEASES)
def test_compiles_without_a_break_and_exports(shape):
    model, inputs, other = in_tree(shape, "Model"), batch(), batch(lengths=(20, 4, 3))
    with enable(), torch.no_grad():
        expected = model(**other).last_hidden_state
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
        compiled(**inputs)
        real = other["attention_mask"].bool()
        assert (compiled(**other).last_hidden_state - expected)[real].abs().max() < 1e-5
        length = torch.export.Dim("length", min=2, max=512)
        dynamic = {name: {1: length} for name in inputs}
        exported = torch.export.export(model, (), kwargs=inputs, dynamic_shapes=dynamic, strict=False).module()
        assert (exported(**other).last_hidden_state - expected)[real].abs().max() < 1e-5


# ---- unchanged code ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, head", [*(("v1", head) for head in HEADS), ("v2", "Model"), ("v3", "ForMaskedLM")])
def test_auto_classes_load_and_save_in_tree_files(shape, head, tmp_path):
    theirs = in_tree(shape, head)
    theirs.config.id2label = {0: "no", 1: "yes"}
    theirs.save_pretrained(tmp_path)
    AUTO[head].from_pretrained(tmp_path).save_pretrained(tmp_path / "before")
    with enabled():
        model = AUTO[head].from_pretrained(tmp_path)
        model.save_pretrained(tmp_path / "after")
        inputs = batch()
        assert_same(outputs(theirs, inputs), outputs(model, inputs), inputs["attention_mask"])
        again = AUTO[head].from_config(AutoConfig.from_pretrained(tmp_path / "before"))
        again.load_state_dict(theirs.state_dict())
    assert type(model) is type(theirs) is type(again) and model.config.id2label == {0: "no", 1: "yes"}
    assert sorted(path.name for path in (tmp_path / "after").iterdir()) == ["config.json", "model.safetensors"]
    texts = [(tmp_path / name / "config.json").read_text() for name in ("before", "after")]
    assert json.loads(texts[0]) == json.loads(texts[1])
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("before", "after")]
    assert saved[0].keys() == saved[1].keys() and all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


PIPELINES = {
    "token-classification": ("v1", "ForTokenClassification", {}),
    "fill-mask": ("v2", "ForMaskedLM", {"top_k": 3}),
    "zero-shot-classification": ("v3", "ForSequenceClassification", {"candidate_labels": ["store", "capital"]}),
}


@pytest.mark.parametrize("task", PIPELINES)
def test_pipelines(task, tmp_path, caplog):
    shape, head, options = PIPELINES[task]
    labels = {"id2label": {0: "contradiction", 1: "entailment"}, "label2id": {"contradiction": 0, "entailment": 1}}
    in_tree(shape, head, **labels, vocab_size=300).save_pretrained(tmp_path)
    train_tokenizer(TEXTS * 4, 280, "bpe").save_pretrained(tmp_path)
    text = "Paris is the [MASK] of France."
    before = pipeline(task, model=tmp_path)(text, **options)
    caplog.clear()
    with enabled(), caplog.at_level(logging.WARNING):
        after = pipeline(task, model=tmp_path)(text, **options)
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    numbers = re.compile(r"\d+\.\d+")
    assert numbers.sub("", str(after)) == numbers.sub("", str(before))
    found, expected = (list(map(float, numbers.findall(str(answer)))) for answer in (after, before))
    assert found == pytest.approx(expected, abs=1e-5)


def test_gradient_accumulation_does_not_multiply_the_loss(tmp_path):
    rows = [{"input_ids": [1, 5 + i, 9, 2], "labels": i % 2} for i in range(8)]

    def first_loss(**steps):
        model = in_tree("v3", "ForSequenceClassification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        options = {"max_steps": 1, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        trainer = Trainer(model, TrainingArguments(tmp_path, **options, **steps), train_dataset=rows)
        trainer.train()
        return trainer.state.log_history[0]["loss"]

    class OwnHead(modeling_deberta_v2.DebertaV2PreTrainedModel):
        pass

    with enable():
        whole = first_loss(per_device_train_batch_size=8)
        parts = first_loss(per_device_train_batch_size=2, gradient_accumulation_steps=4)
        assert not hasattr(OwnHead, "accepts_loss_kwargs")  # its loss may divide by the number of items
    assert parts == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("shape", RELEASES)
@pytest.mark.usefixtures("unpad_tiny_models")
def test_a_release_gets_the_head_that_transformers_gives_it(shape, tmp_path, caplog):
    """A new one; `HfDebertaForMaskedLM` reads the trained head and the decoder of the same files."""
    _, folder = released(tmp_path, shape)
    inputs, found = batch(), []
    for block in (nullcontext(), enabled()):
        with block:
            torch.manual_seed(0)
            model = AUTO["ForMaskedLM"].from_pretrained(folder).eval()
            found.append((outputs(model, inputs), model.state_dict(), model.config.to_dict()))
    (expected, weights, config), (states, enabled_weights, enabled_config) = found
    assert_same(expected, states, inputs["attention_mask"])
    assert config == enabled_config and caplog.text.count("LOAD REPORT") == 2
    assert weights.keys() == enabled_weights.keys()
    assert all(torch.equal(weights[name], enabled_weights[name]) for name in weights)


# ---- tokenizers --------------------------------------------------------------------------------------------------


def test_v1_pairs_are_tokenized_as_in_the_original(tmp_path):
    write_bpe(tmp_path, TEXTS)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deberta"}))
    in_tree_class = transformers.DebertaTokenizer
    with enable():
        for tokenizer in (AutoTokenizer.from_pretrained(tmp_path), in_tree_class.from_pretrained(tmp_path)):
            assert type(tokenizer) is HfDebertaTokenizer
            assert tokenizer("a", "b")["token_type_ids"] == [0, 0, 0, 1, 1]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "DebertaTokenizerFast"}))
        assert type(AutoTokenizer.from_pretrained(tmp_path)) is HfDebertaTokenizer

        class Mine(in_tree_class):
            pass

        assert type(Mine.from_pretrained(tmp_path)) is Mine
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is in_tree_class


def test_v3_uses_the_normalizer_of_its_file(tmp_path):
    pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf", reason="Transformers reads spm.model with it")
    write_spm(tmp_path, TEXTS, vocab_size=60)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deberta-v2"}))
    before = AutoTokenizer.from_pretrained(tmp_path)
    with enable():
        after = AutoTokenizer.from_pretrained(tmp_path)
    assert type(before) is transformers.DebertaV2Tokenizer and type(after) is HfDebertaTokenizer
    assert after("a good store")["input_ids"] == before("a good store")["input_ids"]
    assert after("\uff50aris")["input_ids"] == after("paris")["input_ids"] != before("\uff50aris")["input_ids"]


# ---- on and off --------------------------------------------------------------------------------------------------


def test_disable_undoes_every_change():
    before = changed_by_enable()
    assert "hf_deberta" not in modeling_deberta.DebertaEncoder.forward.__module__  # no earlier test left a change
    assert repr(enable()) == "hf_deberta enabled"  # what a notebook prints
    assert changed_by_enable() != before
    disable()
    after = changed_by_enable()
    assert before.keys() == after.keys()
    for name in before:
        assert before[name] == after[name], name
    disable()  # a second call has no effect


def is_on():
    return modeling_deberta_v2.DebertaV2Encoder.forward.__module__.startswith("hf_deberta")


def test_repeated_nested_overlapping_and_unused_calls():
    enable()
    once = modeling_deberta_v2.DebertaV2Encoder.forward
    gc.collect()  # frees the return value of enable()
    enable()
    assert is_on() and modeling_deberta_v2.DebertaV2Encoder.forward is once
    with enable():
        assert is_on()
    assert is_on()  # it was on before the block
    disable()
    assert not is_on()
    with enable():
        with enable():
            pass
        assert is_on()
    assert not is_on()
    with pytest.raises(RuntimeError, match="on purpose"), hf_deberta.enable():
        raise RuntimeError("on purpose")
    assert not is_on()
    with pytest.raises(ValueError, match='"flash_attention_2"` is not supported: choose one of auto'):
        enable(attn_implementation="flash_attention_2")
    assert not is_on()
    first, second = enable(), enable()
    first.close()
    first.close()  # has no effect
    assert is_on()
    second.close()
    assert not is_on()
    earlier = enable()
    disable()
    later = enable()
    earlier.close()  # ended by disable()
    assert is_on()
    later.close()
    assert not is_on()


@pytest.fixture
def backends_in_use(monkeypatch):
    """Names of the backends that compute, one by one; "auto" stands for sdpa on the CPU."""
    names = []

    def recording(name, backend):
        def attend(*call):
            names.append(name)
            return BACKENDS["eager"].attend(*call) if name == "triton" else backend.attend(*call)

        return replace(backend, attend=attend, unsupported_reason=lambda *call: None)

    for name, backend in dict(BACKENDS).items():
        if name != "eager":
            monkeypatch.setitem(BACKENDS, name, recording(name, backend))
    return names


def test_attn_implementation_of_the_latest_call_that_has_not_ended(backends_in_use, monkeypatch):
    model, inputs = in_tree("v3", "Model"), batch()

    def used():
        backends_in_use.clear()
        model(**inputs)
        (name,) = set(backends_in_use) or {"in-tree or eager"}
        return name

    with enable():
        assert used() == "sdpa"
        with enable(attn_implementation="triton"):
            assert used() == "triton"
            with enable("eager"):
                assert used() == "in-tree or eager"
            assert used() == "triton"
            model(**inputs, output_attentions=True)
        assert used() == "sdpa"
    first, second = enable("triton"), enable("sdpa")
    assert used() == "sdpa"
    first.close()
    assert used() == "sdpa"
    second.close()
    enable("triton")
    disable()
    with enable():
        assert used() == "sdpa"
        monkeypatch.setattr(attention, "choose_backend", lambda *call: "triton")
        assert used() == "triton"  # "auto" may choose it


@pytest.mark.parametrize("shape", RELEASES)
@pytest.mark.parametrize("turn_off", [disable, enable])
@pytest.mark.usefixtures("unpad_tiny_models")
def test_a_forward_pass_ends_as_it_began(shape, turn_off):
    """It is changed in its first layer: enabled before and disabled then, or the reverse."""
    model, inputs = in_tree(shape, "ForMaskedLM"), batch()
    expected = outputs(model, inputs)
    if turn_off is disable:
        enable()
    hook = model.deberta.encoder.layer[0].register_forward_pre_hook(lambda *_: turn_off() and None)
    found = outputs(model, inputs)
    hook.remove()
    assert_same(expected, found, inputs["attention_mask"])


def test_blocks_of_many_threads():
    before, interval = changed_by_enable(), sys.getswitchinterval()

    def enter_and_leave(_):
        for _ in range(100):
            with enable():
                assert is_on()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(enter_and_leave, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert changed_by_enable() == before
