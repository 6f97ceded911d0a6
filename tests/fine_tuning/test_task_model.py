"""The model of a task: its maximum input length, its labels, and which weights of the head are new."""

import json
import logging
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    DebertaV2Config,
    XLNetConfig,
)

from hf_deberta import (
    HfDebertaConfig,
    HfDebertaForMultipleChoice,
    HfDebertaForSequenceClassification,
    HfDebertaModel,
    export_to_transformers,
)
from hf_deberta.fine_tuning import task_model
from hf_deberta.fine_tuning.task_model import (
    ModelArguments,
    checkpoint_labels,
    label_fields,
    labels_in_checkpoint_order,
    load_config,
    load_tokenizer,
    max_input_length,
)
from hf_deberta.training.errors import InputError

CLASSES = (HfDebertaForSequenceClassification, AutoModelForSequenceClassification)
BERT = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=100)
REGRESSION = {"num_labels": 1, "problem_type": "regression"}


def load_model(args, deberta_class, auto_class=None, do_train=True, **fields):
    config = load_config(args, auto_class, **fields)
    return task_model.load_model(args, config, deberta_class, auto_class, do_train)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (BertConfig(max_position_embeddings=48), 48),
        (HfDebertaConfig.from_preset("tiny", max_position_embeddings=48), 200),
        (HfDebertaConfig.from_preset("tiny", max_position_embeddings=48, position_biased_input=True), 48),
        (DebertaV2Config(max_position_embeddings=48, position_biased_input=False), 200),
    ],
)
def test_absolute_positions_limit_the_input_length(config, limit, caplog):
    tokenizer = tokenizer_with_limit(10**30)  # that of a tokenizer without a limit
    assert max_input_length(200, tokenizer, config) == limit
    assert ("--max_seq_length 200 exceeds the maximum of the model; using 48" in caplog.text) == (limit == 48)
    assert max_input_length(200, tokenizer_with_limit(30), config) == (30 if limit == 48 else 200)
    assert max_input_length(None, tokenizer_with_limit(30), config, default=40) == 30
    assert max_input_length(None, tokenizer, config, default=40) == 40
    assert max_input_length(200, tokenizer, XLNetConfig()) == 200  # its max_position_embeddings are -1


def tokenizer_with_limit(limit):
    return SimpleNamespace(model_max_length=limit, num_special_tokens_to_add=lambda pair: 3)


def test_an_input_has_room_for_text():
    tokenizer, config = tokenizer_with_limit(512), HfDebertaConfig.from_preset("tiny")
    for length in (0, -1, 2, 4):
        with pytest.raises(InputError, match=f"--max_seq_length must be at least 5, .* of each text, not {length}"):
            max_input_length(length, tokenizer, config)
    assert max_input_length(5, tokenizer, config) == 5


def test_labels_match_the_checkpoint_by_name(tmp_path, caplog):
    args = ModelArguments(str(tmp_path))
    HfDebertaConfig(**label_fields(["NO", "Yes"])).save_pretrained(tmp_path)
    assert labels_in_checkpoint_order(("yes", "no"), args, do_train=False) == ("no", "yes")
    assert labels_in_checkpoint_order(("good", "bad"), args, do_train=True) == ("good", "bad") and not caplog.text
    assert labels_in_checkpoint_order(("good", "bad"), args, do_train=False) == ("good", "bad")
    assert "are NO, Yes; they are read as good, bad" in caplog.text


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        (label_fields(["a", "b", "c"]), ("a", "b", "c")),
        ({"num_labels": 2}, ("LABEL_0", "LABEL_1")),  # the default, which config.json leaves out
        (REGRESSION, None),
        ({"num_labels": 1}, None),  # a regression, as Transformers and our head have it
        ({**label_fields(["a"]), "problem_type": "multi_label_classification"}, ("a",)),
    ],
)
def test_labels_of_a_checkpoint(tmp_path, fields, labels):
    HfDebertaConfig(**fields).save_pretrained(tmp_path)
    assert checkpoint_labels(ModelArguments(str(tmp_path))) == labels


def test_labels_are_in_the_order_of_their_numbers(tmp_path):
    """A config.json may have them in the order of text, 0, 1, 10, 11, 2, ..., as older versions wrote it."""
    names = {str(number): f"name {number}" for number in range(12)}
    in_text_order = json.dumps({"model_type": "bert", "id2label": names}, sort_keys=True)
    (tmp_path / "config.json").write_text(in_text_order)
    assert checkpoint_labels(ModelArguments(str(tmp_path))) == tuple(names.values())


@pytest.fixture(params=["ours", "bert"])
def checkpoints(request, tmp_path):
    """A base model, and a classifier with the labels x and y."""
    base = HfDebertaModel(HfDebertaConfig.from_preset("tiny")) if request.param == "ours" else BertModel(BERT)
    base.save_pretrained(tmp_path / "base")
    load_model(ModelArguments(str(tmp_path / "base")), *CLASSES, **label_fields(["x", "y"])).save_pretrained(
        tmp_path / "tuned"
    )
    return tmp_path


def test_a_head_without_weights_must_be_trained(checkpoints):
    base, tuned = (ModelArguments(str(checkpoints / name)) for name in ("base", "tuned"))
    with pytest.raises(InputError, match=r"base has no weights for classifier\.bias, classifier\.weight.* --do_train"):
        load_model(base, *CLASSES, do_train=False, num_labels=2)
    load_model(base, *CLASSES, num_labels=2)
    load_model(tuned, *CLASSES, do_train=False, num_labels=2)


def test_dropout_before_the_classifier(checkpoints, caplog):
    """Of a DeBERTa; other models have no such field."""
    args = ModelArguments(str(checkpoints / "tuned"), cls_dropout=0.25)
    config = load_model(args, *CLASSES, num_labels=2).config
    is_deberta = isinstance(config, HfDebertaConfig)
    assert getattr(config, "cls_dropout", None) == (0.25 if is_deberta else None)
    assert ("--cls_dropout is ignored" in caplog.text) == (not is_deberta)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (label_fields(["good", "bad"]), "2 labels: good, bad"),
        (label_fields(["x", "y", "z"]), "3 labels: x, y, z"),
        (REGRESSION, "regression"),
        ({**label_fields(["x", "z"]), "problem_type": "multi_label_classification"}, "2 labels: x, z"),
        (label_fields(["X", "y"]), None),
    ],
    ids=["other labels", "more labels", "regression", "multi-label", "same labels"],
)
@pytest.mark.parametrize("ignore_mismatched_sizes", [False, True])
@pytest.mark.parametrize("field", ["model_name_or_path", "intermediate"])
def test_a_head_with_other_labels_is_replaced(checkpoints, notices, fields, message, field, ignore_mismatched_sizes):
    """One line says so. Without training it is an error, or a warning."""
    tuned = str(checkpoints / "tuned")
    before = load_model(ModelArguments(tuned), *CLASSES, do_train=False, **label_fields(["x", "y"])).state_dict()
    args = ModelArguments(**{field: tuned}, ignore_mismatched_sizes=ignore_mismatched_sizes)
    model = load_model(args, *CLASSES, **fields)
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed - {"classifier.bias"} == ({"classifier.weight"} if message else set())
    assert model.config.problem_type == fields.get("problem_type")
    expected = f"The head of {tuned} (x, y) is replaced by a new one for {message}.\n"
    assert notices.text.endswith(expected) if message else not notices.text
    if message and (field == "intermediate" or len(after["classifier.bias"]) != 2):
        with pytest.raises(InputError, match=r"no weights for .*classifier\.weight"):
            load_model(args, *CLASSES, do_train=False, **fields)


def test_a_head_of_unnamed_labels_is_kept(tmp_path, notices):
    HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny")).save_pretrained(tmp_path)
    args, saved = ModelArguments(str(tmp_path)), load_file(tmp_path / "model.safetensors")
    model = load_model(args, *CLASSES, **label_fields(["good", "bad"]))
    assert torch.equal(model.classifier.weight, saved["classifier.weight"]) and not notices.text
    assert load_model(args, *CLASSES, **label_fields(["a", "b", "c"])).classifier.weight.shape[0] == 3
    assert "(LABEL_0, LABEL_1) is replaced by a new one for 3 labels: a, b, c." in notices.text


def test_a_head_for_choices_has_no_labels(checkpoints, notices):
    tuned = checkpoints / "tuned"
    load_model(ModelArguments(intermediate=str(tuned)), HfDebertaForMultipleChoice, AutoModelForMultipleChoice)
    assert notices.text.endswith(f"The head of {tuned} (x, y) is replaced by a new one of another size.\n")


@pytest.fixture
def notices(caplog, monkeypatch):
    """What is logged from INFO on by us, and warnings of Transformers."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level("INFO", logger="hf_deberta")
    return caplog


def test_a_classifier_that_zero_3_divides_is_gathered_before_it_is_replaced(checkpoints, monkeypatch):
    gathered = []

    def gather(parameters, modifier_rank):
        gathered.append(([parameter.shape for parameter in parameters], modifier_rank))
        return nullcontext()

    zero = SimpleNamespace(GatheredParameters=gather)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
    monkeypatch.setattr(task_model, "is_deepspeed_zero3_enabled", lambda: True)
    load_model(ModelArguments(intermediate=str(checkpoints / "tuned")), *CLASSES, **label_fields(["good", "bad"]))
    assert gathered == [([(2, 32), (2,)], 0)]


def test_a_configuration_of_another_size_is_an_error(tmp_path):
    HfDebertaModel(HfDebertaConfig.from_preset("tiny")).save_pretrained(tmp_path)
    HfDebertaConfig.from_preset("tiny", hidden_size=96).save_pretrained(tmp_path / "wide")
    args = ModelArguments(str(tmp_path), config_name=str(tmp_path / "wide"))
    with pytest.raises(InputError, match="other sizes than .*--config_name"):
        load_model(args, *CLASSES)


def test_what_needs_a_deberta(tmp_path):
    """A head that Transformers lacks, and --config_name."""
    BertModel(BERT).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="is not a DeBERTa"):
        load_model(ModelArguments(str(tmp_path)), HfDebertaForSequenceClassification)
    with pytest.raises(InputError, match="--config_name"):
        load_model(ModelArguments(str(tmp_path), config_name=str(tmp_path)), *CLASSES)


def test_folders_without_a_model(tmp_path):
    for content in (None, "{}"):
        if content:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(InputError, match=r"config\.json"):
            load_model(ModelArguments(str(tmp_path)), *CLASSES)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "hf_deberta", "hidden_size": 10}))
    with pytest.raises(InputError, match="num_attention_heads must divide hidden_size"):
        load_model(ModelArguments(str(tmp_path)), *CLASSES)


@pytest.mark.parametrize("field", ["model_name_or_path", "intermediate", "config_name", "tokenizer_name"])
def test_a_folder_that_does_not_exist(tmp_path, field):
    HfDebertaModel(HfDebertaConfig.from_preset("tiny")).save_pretrained(tmp_path)
    args = ModelArguments(**{"model_name_or_path": str(tmp_path), field: "~/nowhere"})
    with pytest.raises(InputError, match="~/nowhere"):
        load_tokenizer(args, load_config(args))


def test_a_trained_model_keeps_the_flags_of_its_inputs(checkpoints, tmp_path):
    """Those of the last training."""
    args = ModelArguments(str(checkpoints / "tuned"))
    args.reading_flags = {"text_column_names": ["premise", "hypothesis"], "max_seq_length": None}
    model = load_model(args, *CLASSES, num_labels=2)
    model.save_pretrained(tmp_path / "first")
    again = ModelArguments(str(tmp_path / "first"))
    assert load_model(again, *CLASSES, do_train=False).config.fine_tuning_flags == args.reading_flags
    assert load_model(again, *CLASSES).config.fine_tuning_flags == {}
    if isinstance(model, HfDebertaForSequenceClassification):
        export_to_transformers(model, tmp_path / "exported")
        exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
        assert exported.config.fine_tuning_flags == args.reading_flags


def test_a_folder_without_a_tokenizer(tmp_path):
    HfDebertaConfig.from_preset("tiny").save_pretrained(tmp_path)
    with pytest.raises(InputError):
        load_tokenizer(ModelArguments(str(tmp_path)), HfDebertaConfig())
    with pytest.raises(InputError, match="use --model_name_or_path"):
        ModelArguments()
