"""`python notebooks/build.py [NAME ...]`: run each percent source and store it, with its outputs, as a notebook."""

import sys
from pathlib import Path

import jupytext
import nbclient
import nbformat

FOLDER = Path(__file__).parent

for path in sorted(FOLDER.glob("[0-9]*.py")):
    if sys.argv[1:] and path.stem not in sys.argv[1:]:
        continue
    notebook = jupytext.read(path)
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"  # the same in each build
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if "outputs" in cell:  # what libraries say aside has times of day, too
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)  # the version of this machine's Python
    nbformat.write(notebook, path.with_suffix(".ipynb"))
    print(f"{path.stem}: {len(notebook.cells)} cells")
