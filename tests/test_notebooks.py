"""The notebooks run offline and print what their files say; other outputs (plots, measured numbers) exist."""

import re

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from execute_notebooks import METADATA, NOTEBOOKS, execute, missing_libraries  # noqa: E402

PLOTS = {"attention": 2, "fine_tune": 1, "pretrain": 1}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell) -> list[str]:
    """What the cell printed or returned as text; plots return their size."""
    return [output["text"] if output.output_type == "stream" else output.data["text/plain"] for output in cell.outputs]


def plots(notebook) -> int:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def check_outputs(notebook, name: str) -> None:
    """All cells ran in order, without errors, warnings or progress bars, and drew their plots."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error" and output.get("name") != "stderr", output
    assert plots(notebook) == PLOTS.get(name, 0)
    assert sum(bool(cell.outputs) for cell in cells) >= 4


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_notebook_is_small_clean_and_says_how_to_install(name):
    """And its links resolve."""
    text = NOTEBOOKS[name].read_text(encoding="utf-8")
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    nbformat.validate(notebook)
    check_outputs(notebook, name)
    assert notebook.metadata == METADATA and all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    assert "pip install" in notebook.cells[0].source
    assert len(text) < 200_000 and not re.search(r"/(home|root|tmp|work|Users)/", text)
    markdown = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for link in re.findall(r"\]\(([^)#\s]+)", markdown):
        assert (NOTEBOOKS[name].parent / link).exists(), link


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_prints_what_its_file_says(name):
    """Of cells with the tag "varies", which print measured numbers, only the number of outputs is compared.

    Those with the tag "hub" run, too, with a model that a later cell makes.
    """
    if missing := missing_libraries(name):
        pytest.skip(f"{name}.ipynb needs {' and '.join(missing)}")
    notebook = execute(NOTEBOOKS[name])
    check_outputs(notebook, name)
    for cell, committed in zip(code_cells(notebook), code_cells(nbformat.read(NOTEBOOKS[name], 4)), strict=True):
        if "varies" in cell.metadata.get("tags", ()):
            assert len(cell.outputs) == len(committed.outputs)
        else:
            assert texts(cell) == texts(committed), f"{name}.ipynb prints something else: make notebooks\n{cell.source}"
