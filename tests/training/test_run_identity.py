"""What identifies a run, and that another run is refused in its folder."""

import dataclasses
import importlib
import math

import pyarrow as pa
import pytest
from datasets import Dataset
from transformers import TrainingArguments

from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.pretraining.arguments import PretrainingArguments
from hf_deberta.training.errors import InputError
from hf_deberta.training.run_identity import (
    BEST_MODEL_FLAGS,
    IDENTIFYING_FLAGS,
    RunArguments,
    compare_with_recorded_run,
    content_hash,
    identifying_flags,
    record_run,
)

TASKS = [f"hf_deberta.fine_tuning.tasks.{name}" for name in ("glue", "ner", "race", "squad", "superglue")]
TRAINING = [*TASKS, "hf_deberta.fine_tuning.run", "hf_deberta.commands.mlm", "hf_deberta.commands.rtd"]
# Flags of our own that may change when a run resumes.
FREE_FLAGS = {
    # where data and downloads are, and how fast they are read
    "cache_dir", "token", "trust_remote_code", "preprocessing_num_workers", "overwrite_cache", "tokens_dir",
    "streaming",
    # what is predicted, and how scores are reported
    "test_file", "axb_file", "axg_file", "max_predict_samples", "n_best_size", "max_answer_length",
    "null_score_diff_threshold", "return_entity_level_metrics", "perplexity_stride",
    # which rows are left out; those that are trained on identify a run
    "skip_bad_rows",
    # how fast steps are
    "cuda_graphs", "pad_to_multiple_of",
    # flags that only choose values for others, or several runs
    "recipe", "demo", "num_seeds", "ignore_mismatched_sizes",
}  # fmt: skip


def arguments(folder, **fields) -> RunArguments:
    run = RunArguments(str(folder / "out"), use_cpu=True, **fields)
    run.identifying_flags = {"learning_rate": 1e-3, "model_name_or_path": str(folder / "model")}
    return run


def claim_folder(arguments: RunArguments, settings: dict, may_grow: tuple[str, ...] = ()) -> bool:
    """As `RunTrainer.train_or_resume` does."""
    settings = arguments.run_settings(settings)
    same_run = compare_with_recorded_run(arguments, settings, may_grow) is not None
    record_run(arguments, settings, same_run)
    return same_run


def test_identifying_flags_are_selected():
    flags = {"learning_rate": 1e-3, "max_seq_length": 128, "sift": True}
    others = {"do_predict": True, "logging_steps": 5, "token": "hf_secret", "hub_token": "hf_secret"}
    others |= {"push_to_hub": True, "eval_steps": 4, "unheard_of": 1}
    assert identifying_flags({**flags, **others}) == flags
    assert identifying_flags({**flags, **others}, exclude=("sift",)) == {"learning_rate": 1e-3, "max_seq_length": 128}
    best = {**flags, **others, "load_best_model_at_end": True}
    assert identifying_flags(best) == {**flags, "load_best_model_at_end": True, "eval_steps": 4}


def test_every_flag_of_ours_is_identifying_or_free():
    """A new flag of a script must be added to one of the lists, and a removed one taken out."""
    scripts = [vars(importlib.import_module(name)) for name in TRAINING]
    kinds = {
        kind for names in scripts for kind in names.values() if getattr(kind, "__name__", "").endswith("Arguments")
    }
    fields = [field for kind in kinds if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)]
    flags = {field.name for field in fields if field.init}
    of_trainer = {field.name for field in dataclasses.fields(TrainingArguments)}
    identifying = {*IDENTIFYING_FLAGS, *BEST_MODEL_FLAGS}
    assert identifying <= flags | of_trainer
    assert not identifying & FREE_FLAGS
    assert flags - of_trainer - identifying == FREE_FLAGS


def test_another_run_is_refused(tmp_path):
    assert not claim_folder(arguments(tmp_path), {"steps": 4})
    assert claim_folder(arguments(tmp_path), {"steps": 4})
    changed = arguments(tmp_path, seed=7)
    changed.identifying_flags["learning_rate"] = 0.5
    message = r"out .* learning_rate 0.001, now 0.5, seed 42, now 7; .*--output_dir.*--resume_from_checkpoint false"
    with pytest.raises(InputError, match=message):
        claim_folder(changed, {"steps": 4})
    with pytest.raises(InputError, match="steps 4, now 5"):
        claim_folder(arguments(tmp_path), {"steps": 5})
    grown = compare_with_recorded_run(arguments(tmp_path), {"steps": 5}, may_grow=("steps",))
    assert grown == {"steps": "steps 4, now 5"}
    assert claim_folder(arguments(tmp_path), {"steps": 5}, may_grow=("steps",))
    with pytest.raises(InputError, match="steps 5, now 4"):
        claim_folder(arguments(tmp_path), {"steps": 4}, may_grow=("steps",))
    for content in ("", "[]", '{"steps": 5'):
        (tmp_path / "out" / "run.json").write_text(content)
        with pytest.raises(InputError, match="run.json is damaged.*--resume_from_checkpoint false"):
            claim_folder(arguments(tmp_path), {"steps": 5})


def test_changed_starting_weights_are_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"1")
    claim_folder(arguments(tmp_path), {})
    (tmp_path / "model" / "model.safetensors").touch()
    assert claim_folder(arguments(tmp_path), {})
    (tmp_path / "model" / "model.safetensors").write_bytes(b"2")
    with pytest.raises(InputError, match="settings: weights of model_name_or_path [0-9a-f]{16}, now "):
        claim_folder(arguments(tmp_path), {})


def test_starting_over_archives_checkpoints_and_deletes_results(tmp_path):
    """Metrics of the previous run would be in the card of this run."""
    folder, over = tmp_path / "out", {"resume_from_checkpoint": "false"}
    results, others = {"all_results.json", "predict_results.json"}, {"predictions_own.jsonl"}
    folder.mkdir()
    for name in {*results, *others}:
        (folder / name).touch()
    assert not claim_folder(arguments(tmp_path, **over), {})  # the files are the user's
    assert claim_folder(arguments(tmp_path), {})
    assert {path.name for path in folder.iterdir()} == {*results, *others, "run.json"}
    for number in (2, 3):
        (folder / f"checkpoint-{number}").mkdir()
        assert not claim_folder(arguments(tmp_path, seed=number, **over), {})
        assert {path.name for path in folder.iterdir()} == {*others, "run.json", "_before"}
        assert [path.name for path in (folder / "_before").iterdir()] == [f"checkpoint-{number}"]
    assert claim_folder(arguments(tmp_path, seed=3), {})


def test_content_hash_depends_on_values_alone(tmp_path):
    columns = {"input_ids": [[n, n + 1] * (n % 3 + 1) for n in range(40)], "labels": [n % 2 for n in range(40)]}
    columns |= {"text": [None if n == 5 else "x" * n for n in range(40)], "odd": [n % 2 == 1 for n in range(40)]}
    rows = Dataset.from_dict(columns)
    rows.save_to_disk(tmp_path / "kept")
    parts = pa.concat_tables([rows.data.table.slice(0, 7), rows.data.table.slice(7)])
    twice = Dataset.from_dict({name: values * 2 for name, values in columns.items()})
    backwards = [*range(39, -1, -1)]
    same = [rows, Dataset.load_from_disk(tmp_path / "kept"), Dataset(parts), twice.select(range(40, 80))]
    same += [twice.select(range(40)), rows.select(backwards).select(backwards)]
    assert len({content_hash(variant) for variant in same}) == 1
    others = [rows.select(range(39)), rows.rename_column("labels", "label"), rows.select([1, 0, *range(2, 40)])]
    others.append(Dataset.from_dict({**columns, "labels": [1 - label for label in columns["labels"]]}))
    assert len({content_hash(variant) for variant in [rows, *others]}) == 5


def test_processes_that_are_not_connected_are_refused(tmp_path, monkeypatch):
    """As accelerate launch starts them on a machine without a GPU."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="2 processes were started, but they cannot find each other.* add --use_cpu"):
        RunArguments(str(tmp_path))


@pytest.mark.parametrize("kind", [RunArguments, FineTuningArguments, PretrainingArguments])
def test_a_training_without_a_step_is_refused(tmp_path, kind):
    refused = [("num_train_epochs", 0), ("num_train_epochs", -1.0), ("num_train_epochs", math.nan)]
    for name, value in [*refused, ("max_steps", 0), ("max_steps", -2)]:
        fields = {name: value}
        with pytest.raises(InputError, match=rf"--{name} {value} .*trains nothing"):
            kind(str(tmp_path), use_cpu=True, do_train=True, **fields)
        kind(str(tmp_path), use_cpu=True, **{"do_train": False, "do_eval": True, **fields})
    kind(str(tmp_path), use_cpu=True, do_train=True, num_train_epochs=0, max_steps=5)
    kind(str(tmp_path), use_cpu=True, do_train=True, num_train_epochs=0.1)
