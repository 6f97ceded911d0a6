"""Columns of csv files that tasks read as numbers."""

import pytest

from hf_deberta.fine_tuning.tasks.expand_rows import number_type, with_numbers
from hf_deberta.training.data_files import Source, read_table


@pytest.mark.parametrize(
    ("fields", "kind", "values"),
    [
        (["1", "", "-20"], "int64", [1, None, -20]),
        (["1.5", "2.0", ""], "float64", [1.5, 2.0, None]),
        (["0012", "13", "14"], None, ["0012", "13", "14"]),
        (["3.50", "+4", "1e5"], "float64", [3.5, 4.0, 1e5]),
        (["123456789012345678", "", "1"], "int64", [123456789012345678, None, 1]),
        (["99999999999999999999", "1", "2"], None, ["99999999999999999999", "1", "2"]),
        (["True", "FALSE", "1"], None, ["True", "FALSE", "1"]),
        (["+1", "2", "-3"], None, ["+1", "2", "-3"]),
        (["1.5", "nan", "inf"], None, ["1.5", "nan", "inf"]),
    ],
)
def test_columns_of_csv_are_numbers_where_a_task_asks_for_them(tmp_path, fields, kind, values):
    path = tmp_path / "a.csv"
    path.write_text(',"b\nb",\n' + "".join(f"{field},x,\n" for field in fields))  # as Excel ends lines
    rows = read_table(path)
    assert rows.column_names == ["Unnamed: 0", "b\nb", "Unnamed: 2"]
    assert rows["Unnamed: 0"][:] == [field or None for field in fields]
    assert number_type(rows, "Unnamed: 0") == kind
    assert with_numbers(rows, ["Unnamed: 0"], Source("train", {"a.jsonl": 3})) is rows
    rows = with_numbers(rows, ["Unnamed: 0", "no column"], Source("train", {str(path): 3}))
    assert rows["Unnamed: 0"][:] == values
