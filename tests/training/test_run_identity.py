"""What identifies a run, and that another run is refused in its folder."""

import dataclasses
import math

import pyarrow as pa
import pytest
from datasets import Dataset

from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.tasks.squad import SquadArguments
from hf_deberta.pretraining.arguments import PretrainingArguments
from hf_deberta.pretraining.corpus import CorpusArguments
from hf_deberta.training.errors import InputError
from hf_deberta.training.run_identity import (
    BEST_MODEL_FLAGS,
    RunArguments,
    compare_with_recorded_run,
    content_hash,
    identifying_flags,
    record_run,
)


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


@pytest.mark.parametrize("classes", [(SquadArguments, FineTuningArguments), (CorpusArguments, PretrainingArguments)])
def test_flags_identify_a_run_unless_their_field_says_otherwise(classes):
    """Of Trainer's flags a list does, and some only if they decide which checkpoint is kept."""
    flags = {field.name: 1 for kind in classes for field in dataclasses.fields(kind)} | {
        "load_best_model_at_end": False
    }
    identifying = identifying_flags(flags, classes)
    assert {"train_file", "max_seq_length", "learning_rate"} <= identifying.keys()
    assert not {"test_file", "token", "hub_token", "recipe", "cuda_graphs", "logging_steps"} & identifying.keys()
    assert ("max_steps" in identifying) == (FineTuningArguments in classes)  # pretraining may become longer
    best = identifying_flags({**flags, "load_best_model_at_end": True}, classes)
    assert best.keys() - identifying.keys() == set(BEST_MODEL_FLAGS)


def test_copies_to_mps_are_waited_for(monkeypatch):
    """PyTorch pins no memory for it, and a copy from other memory may read what has been freed meanwhile."""
    monkeypatch.setattr("transformers.TrainingArguments.__post_init__", lambda self: None)  # would look for the device
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert RunArguments().accelerator_config == {"non_blocking": True}
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert RunArguments().accelerator_config is None and not RunArguments().dataloader_pin_memory


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
