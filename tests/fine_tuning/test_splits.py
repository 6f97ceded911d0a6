"""Rows of a task from files, folders and data sets."""

import gzip
import json

import pytest
from datasets import Dataset

from hf_deberta.fine_tuning import splits
from hf_deberta.fine_tuning.splits import DataArguments, read_splits, require_plain_splits
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.fine_tuning.tasks import superglue
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.errors import InputError

ROWS = [{"sentence": "a b", "label": 0}, {"sentence": "c", "label": 1}, {"sentence": "d", "label": 1}]


def write(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_inputs_that_other_code_has_made_are_not_used(tmp_path, monkeypatch):
    """The text of WiC's inputs comes from a function of the package, of which datasets hashes the name alone."""
    file = write(tmp_path / "rows.jsonl", [{**dict.fromkeys(superglue.WIC_COLUMNS, "a"), "start1": 0, "end1": 1}])
    task = superglue.SuperGlue(ModelArguments(demo=True), superglue.SuperGlueArguments(task_name="wic"), None)
    task.targets_of_split, task.model_labels = {"train": None}, None
    tokenizer = train_tokenizer(["a b c * :"] * 20, 300, "bpe")

    def encode():
        task.rows = read_splits(DataArguments(train_file=file))[0]
        return tokenizer.decode(task.encode("train", tokenizer, 32)["input_ids"][0])

    monkeypatch.setattr(superglue.mark_spans, "__code__", (lambda text, spans: "b").__code__)
    assert "b" in encode()
    monkeypatch.setattr(superglue.mark_spans, "__code__", (lambda text, spans: "c").__code__)
    monkeypatch.setattr(splits, "code_hash", lambda: "other")
    assert "c" in encode()


def test_a_folder(tmp_path):
    for name in ("train.jsonl", "validation_matched.jsonl", "test.jsonl", "README.md", "trainer.txt"):
        write(tmp_path / name)
    (tmp_path / "test_b.csv.gz").write_bytes(gzip.compress(b"sentence\nNA\n"))
    found = read_splits(DataArguments(data_dir=str(tmp_path)))[0]
    assert set(found) == {"train", "validation_matched", "test", "test_b"} and found["test_b"][0] == {"sentence": "NA"}
    write(tmp_path / "own.jsonl", ROWS[:1])
    found = read_splits(DataArguments(data_dir=str(tmp_path), train_file=str(tmp_path / "own.jsonl")))[0]
    assert len(found["train"]) == 1


def test_rows_to_train_on_are_one_file(tmp_path):
    for name in ("train_0.jsonl", "train_1.jsonl", "validation_a.jsonl", "test_b.jsonl"):
        write(tmp_path / name)
    message = "has train_0.jsonl, train_1.jsonl, .*--train_file"
    for _ in range(2):  # also beside a file of the right name
        with pytest.raises(ValueError, match=message):
            read_splits(DataArguments(data_dir=str(tmp_path)))
        write(tmp_path / "train.jsonl")
    found = read_splits(DataArguments(data_dir=str(tmp_path), train_file=str(tmp_path / "train_1.jsonl")))[0]
    assert set(found) == {"train", "validation_a", "test_b"}


def test_other_names_of_validation(tmp_path):
    for name in ("dev", "dev_matched", "valid_a", "val_b"):
        write(tmp_path / f"{name}.jsonl")
    splits = {"validation", "validation_matched", "validation_a", "validation_b"}
    assert set(read_splits(DataArguments(data_dir=str(tmp_path)))[0]) == splits
    write(tmp_path / "validation.jsonl")
    with pytest.raises(ValueError, match="has dev.jsonl, validation.jsonl for the split 'validation'"):
        read_splits(DataArguments(data_dir=str(tmp_path)))
    named = DataArguments(data_dir=str(tmp_path), validation_file=str(tmp_path / "dev.jsonl"))
    assert set(read_splits(named)[0]) == splits


def test_shards_are_one_split(tmp_path):
    for number, row in enumerate(ROWS):
        Dataset.from_list([row]).to_parquet(tmp_path / f"train-{number:05}-of-00003.parquet")
    write(tmp_path / "validation_matched-00000-of-00001.jsonl")
    found = read_splits(DataArguments(data_dir=str(tmp_path)))[0]
    assert list(found["train"]) == ROWS and set(found) == {"train", "validation_matched"}
    (tmp_path / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(ValueError, match="for the split 'train'; expected one file, or every shard"):
        read_splits(DataArguments(data_dir=str(tmp_path)))


def test_folders_of_parts_are_splits(tmp_path):
    """As Spark writes them, with its markers beside."""
    for number, row in enumerate(ROWS):
        (tmp_path / "train").mkdir(exist_ok=True)
        name = f"part-{number:05}-5f1e-c000.snappy.parquet"
        Dataset.from_list([row]).to_parquet(tmp_path / "train" / name)
        (tmp_path / "train" / f".{name}.crc").touch()
    for folder, file, rows in (("dev.json", "part-00000-5f1e-c000.json", ROWS[:2]), ("logs", "part-0.json", ROWS)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / file, rows)
        (tmp_path / folder / "_SUCCESS").touch()
    (tmp_path / "test").mkdir()  # with nothing in it
    found = read_splits(DataArguments(data_dir=str(tmp_path)))[0]
    assert {split: list(rows) for split, rows in found.items()} == {"train": ROWS, "validation": ROWS[:2]}
    write(tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match="has train, train.jsonl for the split 'train'"):
        read_splits(DataArguments(data_dir=str(tmp_path)))


def test_the_configuration_of_the_tasks_own_data_set(monkeypatch):
    asked = []

    def load_dataset(name, config, **loading):
        asked.append((name, config))
        return {"train": Dataset.from_list(ROWS)}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    read_splits(DataArguments(), hub=("of/task", "all"))
    read_splits(DataArguments(dataset_config_name="middle"), hub=("of/task", "all"))
    read_splits(DataArguments(dataset_name="me/mine"), hub=("of/task", "all"))
    assert asked == [("of/task", "all"), ("of/task", "middle"), ("me/mine", None)]


def test_rows_that_are_trained_on_and_evaluated(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "b", "label": 1}\n', encoding="utf-8")
    read_splits(DataArguments(train_file=str(path), validation_file=str(tmp_path / "." / "rows.jsonl")))
    assert "rows.jsonl is a training and a validation file" in caplog.text


def test_an_empty_split_of_the_task(monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *_: {"train": Dataset.from_dict({"a": []})})
    with pytest.raises(ValueError, match="the split 'train' is empty .of/task."):
        read_splits(DataArguments(), hub=("of/task", None))


def test_further_splits_of_a_data_set_are_left_out(tmp_path, caplog):
    folder, names = str(tmp_path / "set"), ("train", "train_2", "test_a", "unsupervised")
    for split in names:
        Dataset.from_list(ROWS).to_parquet(tmp_path / "set" / f"{split}.parquet")
    files = [{"split": split, "path": f"{split}.parquet"} for split in names]

    def card(splits: list) -> None:
        configs = [{"config_name": "default", "data_files": splits}]
        (tmp_path / "set" / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")

    card(files)
    assert set(read_splits(DataArguments(dataset_name=folder))[0]) == {"train", "test_a"}
    assert "Unused splits of" in caplog.text and "train_2, unsupervised" in caplog.text
    card(files[1::2])
    with pytest.raises(ValueError, match="set has no split train, validation or test, only train_2, unsupervised"):
        read_splits(DataArguments(dataset_name=folder))


def test_a_data_set_names_validation_as_files_do(monkeypatch, caplog):
    there = {name: Dataset.from_list([{"a": name}] * 2) for name in ("train", "dev", "val_b", "valid")}
    monkeypatch.setattr("datasets.load_dataset", lambda *_: dict(there))
    found = read_splits(DataArguments(dataset_name="me/mine", max_eval_samples=1))[0]
    kept = {"train": ["train"] * 2, "validation": ["dev"], "validation_b": ["val_b"]}
    assert {split: rows["a"][:] for split, rows in found.items()} == kept
    assert ": valid" in caplog.text
    there["validation"] = Dataset.from_list([{"a": "validation"}])
    assert read_splits(DataArguments(dataset_name="me/mine"))[0]["validation"]["a"][:] == ["validation"]
    assert ": dev, valid" in caplog.text


def test_limits(tmp_path):
    path = write(tmp_path / "a.jsonl")
    args = DataArguments(train_file=path, validation_file=path, test_file=path, max_train_samples=1, max_eval_samples=2)
    assert {name: len(rows) for name, rows in read_splits(args)[0].items()} == {"train": 1, "validation": 2, "test": 3}
    assert len(read_splits(DataArguments(train_file=path, max_train_samples=99))[0]["train"]) == 3


def test_bad_input(tmp_path):
    path = write(tmp_path / "a.jsonl")
    (tmp_path / "header.csv").write_text("sentence,label\n")
    (tmp_path / "folder").mkdir()
    cases = [
        ({}, "no data given: use --train_file"),
        ({"train_file": str(tmp_path / "nowhere.jsonl")}, "there is no file"),
        ({"train_file": str(tmp_path / "header.csv")}, "there are no rows"),
        ({"train_file": path, "dataset_name": "x"}, "not both"),
        ({"train_file": path, "dataset_config_name": "x"}, "not both"),
        ({"data_dir": str(tmp_path / "nowhere")}, "not a folder"),
        ({"data_dir": str(tmp_path / "folder")}, "has no file"),
    ]
    for fields, message in cases:
        with pytest.raises(InputError, match=message):
            read_splits(DataArguments(**fields))


def test_scripts_for_plain_splits():
    rows = Dataset.from_dict({"a": [1]})
    assert list(require_plain_splits({"train": rows, "test": rows})) == ["train", "test"]
    with pytest.raises(ValueError, match="not validation_a: .*--validation_file"):
        require_plain_splits({"train": rows, "validation_a": rows})
