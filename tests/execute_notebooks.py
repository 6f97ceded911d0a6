"""Execute the notebooks in notebooks/ in place and keep their outputs: `make notebooks`.

    python tests/execute_notebooks.py              # all of them
    python tests/execute_notebooks.py quickstart   # one

A notebook whose libraries are not installed is left as it is, and the program says so.
"""

import argparse
import copy
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
LIBRARIES = {"faster": ("gliner", "sentence_transformers")}  # which a notebook needs beside the extra `dev`
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # tiny models
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm, where ipywidgets is not installed
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",  # no progress bars in the outputs
}


def missing_libraries(name: str) -> list[str]:
    return [library for library in LIBRARIES.get(name, ()) if find_spec(library) is None]


def has_tag(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def execute(path: Path, timeout: int = 300) -> NotebookNode:
    """Return the notebook with new outputs; it runs with this copy of the package, in an empty folder.

    A cell with the tag "first" makes what others read from the Hub, and runs before them. A cell with the tag "hub"
    keeps its outputs, which are those of a checkpoint of the Hub.
    """
    notebook = nbformat.read(path, as_version=4)
    cells, kept = notebook.cells, [copy.deepcopy(cell.get("outputs")) for cell in notebook.cells]
    notebook.cells = sorted(cells, key=lambda cell: not has_tag(cell, "first"))  # stable
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            startup_timeout=timeout,
            timeout=timeout,
            record_timing=False,
            coalesce_streams=True,  # one output, however the kernel split it
            resources={"metadata": {"path": folder}},
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}}),  # no TCP ports
        )
        client.execute(env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path})
    notebook.metadata, notebook.cells = NotebookNode(METADATA), cells
    for number, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        cell.execution_count = number
    for cell, outputs in zip(cells, kept, strict=True):
        if has_tag(cell, "hub"):
            cell.outputs = outputs
        cell.metadata = NotebookNode({name: cell.metadata[name] for name in ("tags",) if name in cell.metadata})
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NOTEBOOKS)}; default: all")
    names = parser.parse_args().names or NOTEBOOKS
    if unknown := [name for name in names if name not in NOTEBOOKS]:
        parser.error(f"there is no notebook {unknown[0]}; there are {', '.join(NOTEBOOKS)}")
    for name in names:
        if missing := missing_libraries(name):
            print(f"{name}: not executed, because {' and '.join(missing)} must be installed")
            continue
        nbformat.write(execute(NOTEBOOKS[name]), NOTEBOOKS[name])
        print(f"{name}: executed")


if __name__ == "__main__":
    main()
