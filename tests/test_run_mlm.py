"""`run_mlm.py`: from text to a model, changed runs, two processes; bad input, of `run_rtd.py` too."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from example_rows import write_corpus
from fine_tuning_models import results, run_script
from huggingface_hub.utils import filter_repo_objects
from test_parity_with_transformers import in_tree
from test_saved_folders import FakeHub
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, pipeline

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaModel
from hf_deberta.commands import mlm
from hf_deberta.pretraining.arguments import PretrainingArguments
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.errors import InputError
from hf_deberta.training.model_card import describe_output

TINY = ["--config_preset", "tiny", "--train_tokenizer", "300", "--tokenizer_type", "bpe", "--max_seq_length", "32"]
RUN = ["--use_cpu", "--disable_tqdm", "true", "--per_device_train_batch_size", "4", "--learning_rate", "1e-3"]
ABSOLUTE = ["--config_overrides", "position_biased_input=true,max_position_embeddings=20"]
CONVOLUTION = ["--config_overrides", "conv_kernel_size=3"]
PAIR = ["--generator_name_or_path", "g", "--discriminator_name_or_path", "d"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt")


def run_mlm(*arguments: object) -> None:
    run_script("run_mlm.py", *arguments)


def log_of(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def test_from_text_to_a_model(text, tmp_path):
    out = tmp_path / "out"
    run_mlm(*TINY, *RUN, "--train_file", text, "--output_dir", out, "--max_steps", 8, "--logging_steps", 4)
    metrics = results(out)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]), rel=1e-4)
    logged = [entry for entry in log_of(out) if "loss" in entry]
    assert len(logged) == 2
    for entry in logged:
        assert entry["tokens_per_second"] > 0 and "mfu" not in entry and entry["perplexity"] > 1
        assert 0 <= entry["masked_accuracy"] <= 1
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.emd_steps == 2 and model.config.vocab_size == len(tokenizer)
    assert pipeline("fill-mask", model=model, tokenizer=tokenizer)("the old [MASK]")[0]["score"] > 0
    card = (out / "README.md").read_text()
    parts = ("from scratch on the corpus.txt", "training_steps: 8", "- loss: ", "learning_rate", "from_pretrained(")
    assert not [part for part in parts if part not in card]
    tokenizer.mask_token = "<mask>"
    tokenizer.save_pretrained(out)
    assert '("Paris is the <mask> of France.")' in describe_output(out, "run_mlm.py")


@pytest.mark.slow
def test_continue_from_a_transformers_checkpoint(text, tmp_path):
    """With --from_scratch its configuration and tokenizer are used, but not its weights."""
    run_mlm(*TINY, *RUN, "--train_file", text, "--output_dir", tmp_path / "first", "--max_steps", 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    theirs = in_tree("v3", "ForMaskedLM", vocab_size=len(tokenizer), position_buckets=16, max_position_embeddings=64)
    theirs.save_pretrained(tmp_path / "in-tree")
    tokenizer.save_pretrained(tmp_path / "in-tree")
    weight = theirs.deberta.encoder.layer[0].output.dense.weight
    arguments = [*RUN, "--train_file", text, "--max_seq_length", 32, "--max_steps", 1, "--learning_rate", "1e-6"]
    for name, extra in {"continued": [], "new": ["--from_scratch"]}.items():
        out = tmp_path / name
        run_mlm("--model_name_or_path", tmp_path / "in-tree", *extra, *arguments, "--output_dir", out)
        trained = AutoModelForMaskedLM.from_pretrained(out).deberta.encoder.layer[0].output.dense.weight
        assert torch.allclose(trained, weight, atol=1e-4) == (name == "continued")


def test_continue_on_longer_rows(text, tmp_path, caplog):
    """Without the decoder, whose absolute positions end; the tokenizer's limit becomes the length of the rows."""
    short = ["--config_overrides", "max_position_embeddings=64", "--max_steps", 1]
    run_mlm(*TINY, *RUN, "--train_file", text, "--output_dir", tmp_path / "first", *short)
    longer = ["--sample_by", "document", "--max_seq_length", 100, "--emd_steps", 0, "--max_steps", 1]
    longer += ["--validation_split_percentage", 0]
    first = ["--model_name_or_path", tmp_path / "first"]
    run_mlm(*first, *RUN, "--train_file", text, "--output_dir", tmp_path / "longer", *longer)
    config, tokenizer = (kind.from_pretrained(tmp_path / "longer") for kind in (HfDebertaConfig, AutoTokenizer))
    assert (config.max_position_embeddings, config.max_distance, tokenizer.model_max_length) == (64, 64, 100)
    assert "on average, a token has 100 tokens of its own document in its row" in caplog.text


def test_a_new_head_is_named(tmp_path, caplog):
    config, tokenizer = HfDebertaConfig.from_preset("tiny", vocab_size=300), train_tokenizer(["a b"], 262, "bpe")
    HfDebertaModel(config).save_pretrained(tmp_path / "encoder")
    HfDebertaForMaskedLM(config).save_pretrained(tmp_path / "whole")
    for name in ("encoder", "whole"):
        caplog.clear()
        args = mlm.ModelArguments(model_name_or_path=str(tmp_path / name))
        args.make_model(tokenizer, 16, do_train=True)
        message = "encoder has no head for language modelling .*: the head starts at random"
        assert (re.search(message, caplog.text) is not None) == (name == "encoder")
    args = mlm.ModelArguments(model_name_or_path=str(tmp_path / "encoder"))
    with pytest.raises(InputError, match="with --do_train false they would stay random"):
        args.make_model(tokenizer, 16, do_train=False)


@pytest.mark.slow
def test_a_joint_objective_and_perplexity_of_a_test_split(tmp_path):
    """A data set's test split is evaluated, with the words and bytes of its text as units."""
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, (split, number) in enumerate({"train": 80, "validation": 10, "test": 12}.items()):
        write_corpus(folder / f"{split}.txt", number, seed)
    command = [*TINY, *RUN, "--dataset_name", folder, "--cache_dir", tmp_path / "cache", "--max_steps", 2]
    command += ["--objective", "joint", "--perplexity_stride", 16, "--output_dir", tmp_path / "out"]
    run_mlm(*command)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = AutoTokenizer.from_pretrained(tmp_path / "out")("the old", return_tensors="pt").input_ids[:, :-1]
    assert prompt[0, 0] == 1 and 2 not in prompt  # [CLS] at the beginning, no [SEP]
    assert model.generate(prompt, max_new_tokens=2).shape[1] == prompt.shape[1] + 2
    metrics = results(tmp_path / "out")
    for name, split in (("eval", "validation"), ("test", "test")):
        text = (folder / f"{split}.txt").read_text()
        per_word = math.log(metrics[f"{name}_word_perplexity"]) * len(text.split())
        assert math.log(metrics[f"{name}_token_perplexity"]) * (len(text.split())) <= per_word  # a word has tokens
        size = len(text.replace("\n", "").encode())
        assert metrics[f"{name}_bits_per_byte"] * size * math.log(2) == pytest.approx(per_word, rel=1e-4)
        assert metrics[f"{name}_perplexity"] > 1


class Hub(FakeHub):
    """Records the names of all files that would be uploaded, in folders too."""

    def __init__(self):
        super().__init__(has_card=False)
        self.names: list[set[str]] = []

    def upload_folder(self, folder_path, ignore_patterns, **kwargs):
        paths = (path.relative_to(folder_path) for path in Path(folder_path).rglob("*") if path.is_file())
        self.names.append(set(filter_repo_objects(map(str, paths), ignore_patterns=ignore_patterns)))
        return SimpleNamespace(done=lambda: True)


@pytest.mark.slow
def test_pushed_files(text, tmp_path, monkeypatch):
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", hub)
    out = tmp_path / "mine"
    steps = ["--max_steps", 4, "--save_steps", 2, "--eval_strategy", "steps", "--eval_steps", 2]
    run_mlm(*TINY, *RUN, "--train_file", text, "--output_dir", out, *steps, "--push_to_hub", "--hub_token", "hf_secret")
    assert (out / "checkpoint-4").exists() and (out / "_tokens").exists()
    needed = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    code = {path.name for path in out.glob("*.py")}
    assert "modeling_hf_deberta.py" in code
    assert len(hub.names) == 4  # at both checkpoints, with the final model, and after its evaluation
    for names in hub.names:
        assert needed | code <= names
        assert not [name for name in names if name.startswith(("_", "checkpoint-"))]
    assert "README.md" in hub.names[-1] and "- loss: " in (out / "README.md").read_text()
    assert not [name for name in hub.names[-1] if b"hf_secret" in (out / name).read_bytes()]


@pytest.mark.parametrize("script", ["run_mlm.py", "run_rtd.py"])
@pytest.mark.parametrize("each", [False, True])
def test_main_process_tokenizes_first(monkeypatch, text, tmp_path, script, each):
    received = {}

    def stop(self, **options):
        received.update(options)
        raise InputError("stop here")

    monkeypatch.setattr(PretrainingArguments, "main_process_first", stop)
    flags = ["--save_on_each_node"] if each else []
    with pytest.raises(SystemExit, match="stop here"):
        run_script(script, *TINY, "--train_file", text, "--output_dir", tmp_path, *flags)
    assert received["local"] == each


BAD_INPUT = {
    "mlm": [
        ([], "give one of --model_name_or_path, --config_preset, --config_name, not none"),
        (["--config_preset", "tiny", "--config_name", "x"], "not --config_preset and --config_name"),
        (["--config_preset", "tiny"], "a new model needs a tokenizer"),
        (["--model_name_or_path", "x", "--train_tokenizer", 300], "a vocabulary that a trained model does not have"),
        (["--config_preset", "huge"], "invalid choice: 'huge' (choose from 'v1-base', "),
        ([*TINY, "--config_overrides", "hidden=3"], "unknown field hidden; HfDebertaConfig documents"),
        ([*TINY, "--config_overrides", "emd_steps"], "name=value,name=value, but has 'emd_steps'"),
        ([*TINY, "--label_smoothing_factor", 0.1], "--label_smoothing_factor 0.1 is not supported"),
        ([*TINY, "--train_sampling_strategy", "group_by_length"], "group_by_length is not supported"),
        ([*TINY, "--stopping_strategy", "none"], "invalid choice: 'none' (choose from 'first_exhausted', "),
        ([*TINY, "--config_overrides", "max_position_embeddings=20"], "more than the 20 absolute positions of"),
        ([*TINY, *ABSOLUTE, "--emd_steps", 0], "more than the 20 absolute positions of"),
        ([*TINY, "--max_seq_length", 9], "--max_seq_length must be at least 10, not 9"),
        ([*TINY, "--config_overrides", "vocab_size=250"], "but the model's vocabulary has 250: use"),
        ([*TINY, *CONVOLUTION, "--objective", "causal"], "conv_kernel_size=0, or use --objective mlm"),
        ([*TINY, "--perplexity_stride", 8], "add --objective causal"),
        ([*TINY, "--perplexity_stride", 32, "--objective", "causal"], "below --max_seq_length, 32, not 32"),
        ([*TINY, "--do_train", "false"], "--do_train false evaluates a trained model"),
        ([*TINY, "--dtype", "float32"], "--dtype"),
        ([*TINY, "--recipe", "paper:v1-base", "--max_stpes", 5], "--max_stpes 5; did you mean --max_steps? --help-all"),
    ],
    "rtd": [
        ([], "give one of --config_preset, --config_name (a new pair)"),
        ([*TINY, "--generator_name_or_path", "x"], "--generator_name_or_path needs --discriminator_name_or_path"),
        ([*TINY, "--push_to_hub"], "--push_to_hub uploads one model, but this script writes two"),
        ([*TINY, "--rtd_weight", -1], "rtd_weight must be 0 or more and finite, not -1"),
        ([*TINY, "--do_train", "false"], "with random weights: name a checkpoint"),
        ([*PAIR, "--generator_layers", 2], "--generator_layers is for a new generator, but g has its layers"),
    ],
}


@pytest.mark.parametrize(
    ("script", "arguments", "message"), [(x, *row) for x, rows in BAD_INPUT.items() for row in rows]
)
def test_bad_input_is_reported_in_one_line(text, tmp_path, script, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        run_script(f"run_{script}.py", *arguments, "--train_file", text, "--output_dir", tmp_path / "out", "--use_cpu")
    assert message in stopped.value.code and stopped.value.code.startswith(f"run_{script}.py: ")
    assert not (tmp_path / "out" / "_tokens").exists()  # reported before the corpus is tokenized


@pytest.mark.slow
def test_another_run_is_refused(text, tmp_path, caplog):
    """A finished or interrupted run is neither evaluated nor resumed as another run; it may become longer."""
    command = [*TINY, *RUN, "--train_file", text, "--output_dir", tmp_path, "--tokens_dir", tmp_path / "tokens"]
    run_mlm(*command, "--max_steps", 2, "--save_steps", 1)
    changed = ["--objective", "causal", "--seed", 7, "--max_train_samples", 100, "--per_device_train_batch_size", 8]
    parts = ("objective mlm, now causal", "seed 42, now 7", "text [0-9a-f ]{129}, now [0-9a-f ]{129}", "batch 4, now 8")
    for finished in (True, False):
        if not finished:
            (tmp_path / "model.safetensors").unlink()
            (tmp_path / "trainer_state.json").unlink()
        with pytest.raises(SystemExit, match="^run_mlm.py: .* with other settings: ") as stopped:
            run_mlm(*command, "--max_steps", 2, *changed)
        assert not [part for part in parts if not re.search(part, stopped.value.code)]
    free = ["--save_steps", 5, "--logging_steps", 1, "--dataloader_num_workers", 1, "--eval_strategy", "epoch"]
    free += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2, "--max_eval_samples", 2]
    run_mlm(*command, "--max_steps", 2, *free)
    assert (tmp_path / "model.safetensors").exists() and "becomes longer" not in caplog.text
    run_mlm(*command, "--max_steps", 3)
    assert "becomes longer (steps 2, now 3)" in caplog.text and log_of(tmp_path)[-1]["step"] == 3
    run_mlm(*command, "--max_steps", 1, "--objective", "causal", "--resume_from_checkpoint", "false")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)).__name__ == "HfDebertaForCausalLM"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
