"""What makes a run another run, and what a folder that holds one says to it."""

import pyarrow as pa
import pytest
from datasets import Dataset

from hf_deberta.runs.run_identity import RunArguments, check_same_run, content_of, decisive


def arguments(folder, **fields) -> RunArguments:
    found = RunArguments(str(folder / "out"), use_cpu=True, **fields)
    found.decisive = {"learning_rate": 1e-3, "model_name_or_path": str(folder / "model")}
    return found


def test_flags_without_effect_do_not_decide():
    flags = {"learning_rate": 1e-3, "max_seq_length": 128, "sift": True, "do_predict": True, "logging_steps": 5}
    assert decisive({**flags, "token": "hf_secret", "hub_token": "hf_secret", "push_to_hub": True}) == {
        "learning_rate": 1e-3,
        "max_seq_length": 128,
        "sift": True,
    }


def test_another_run_is_refused(tmp_path, caplog):
    assert not check_same_run(arguments(tmp_path), {"steps": 4})
    assert check_same_run(arguments(tmp_path), {"steps": 4})
    changed = arguments(tmp_path, seed=7)
    changed.decisive["learning_rate"] = 0.5
    said = r"out holds a run with other settings: learning_rate 0.001, now 0.5, seed 42, now 7; take another --output"
    with pytest.raises(ValueError, match=said):
        check_same_run(changed, {"steps": 4})
    with pytest.raises(ValueError, match="steps 4, now 5"):
        check_same_run(arguments(tmp_path), {"steps": 5})
    assert not caplog.text
    assert check_same_run(arguments(tmp_path), {"steps": 5}, may_grow=("steps",))
    assert "is to be longer than it was (steps 4, now 5): it goes on" in caplog.text
    with pytest.raises(ValueError, match="steps 5, now 4"):
        check_same_run(arguments(tmp_path), {"steps": 4}, may_grow=("steps",))


def test_weights_that_changed(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"1")
    check_same_run(arguments(tmp_path), {})
    (tmp_path / "model" / "model.safetensors").touch()
    assert check_same_run(arguments(tmp_path), {})
    (tmp_path / "model" / "model.safetensors").write_bytes(b"2")
    with pytest.raises(ValueError, match="settings: weights of model_name_or_path [0-9a-f]{16}, now "):
        check_same_run(arguments(tmp_path), {})


def test_a_run_that_begins_anew_leaves_no_checkpoint_of_the_last(tmp_path):
    check_same_run(arguments(tmp_path), {})
    for number in (2, 3):
        (tmp_path / "out" / f"checkpoint-{number}").mkdir()
        assert not check_same_run(arguments(tmp_path, seed=number, resume_from_checkpoint="false"), {})
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["_before", "run.json"]
        assert [path.name for path in (tmp_path / "out" / "_before").iterdir()] == [f"checkpoint-{number}"]
    assert check_same_run(arguments(tmp_path, seed=3), {})


def test_the_content_of_rows_is_that_of_their_values(tmp_path):
    columns = {"input_ids": [[n, n + 1] * (n % 3 + 1) for n in range(40)], "labels": [n % 2 for n in range(40)]}
    rows = Dataset.from_dict(columns)
    rows.save_to_disk(tmp_path / "kept")
    parts = pa.concat_tables([rows.data.table.slice(0, 7), rows.data.table.slice(7)])
    twice = Dataset.from_dict({name: values * 2 for name, values in columns.items()})
    same = [rows, Dataset.load_from_disk(tmp_path / "kept"), Dataset(parts), twice.select(range(40, 80))]
    same.append(rows.select([*range(39, -1, -1)]).select([*range(39, -1, -1)]))
    assert len({content_of(found) for found in same}) == 1
    others = [rows.select(range(39)), rows.rename_column("labels", "label"), rows.select([1, 0, *range(2, 40)])]
    others.append(Dataset.from_dict({**columns, "labels": [1 - label for label in columns["labels"]]}))
    assert len({content_of(found) for found in [rows, *others]}) == 5


def test_the_batch_is_that_of_all(tmp_path):
    given = arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert given.total_batch == 12
