"""The example of int8: a trained classifier keeps its labels."""

import accelerate_loop
import int8
from example_rows import sentiment_rows
from fine_tuning_models import write_json_lines


def test_labels_agree(tiny_model, sentiment, tmp_path, capsys):
    accelerate_loop.main(["--model", str(tiny_model), *sentiment, "--learning_rate", "3e-3", "--batch_size", "16"])
    rows = sentiment_rows(50, 3)
    file = write_json_lines(tmp_path / "rows.jsonl", rows)
    flags = ["--model", "accelerate_loop", "--rows", str(file), "--columns", "sentence", "--max_rows", "40"]
    labels, rounded = int8.main(flags)
    same = int((labels == rounded).sum())
    right = sum(found == row["label"] for found, row in zip(labels.tolist(), rows, strict=False))
    assert len(labels) == 40 and right >= 38 and same >= 38
    assert f"40 rows: {same} with the same label ({same / 40:.1%});" in capsys.readouterr().out
