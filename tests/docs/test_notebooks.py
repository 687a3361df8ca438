"""The notebooks as they are stored: without outputs, with links that lead somewhere; tests/integration runs them."""

import json

import pytest

from tests.docs.markdown import ROOT, named
from tests.docs.test_links import broken_links

NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))


def text_of(cell):
    return "".join(cell["source"])


def complaints(notebook, path):
    """What is wrong with the stored `notebook`."""
    found = []
    for number, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] == "markdown":
            found += broken_links(text_of(cell), path)
        elif cell["outputs"] or cell["execution_count"] is not None:
            found.append(f"cell {number} has outputs: clear them before you commit")
    tagged = [cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        found.append(f"{len(tagged)} cells are tagged `parameters`; the test needs one to make the notebook small")
    if notebook["metadata"]["kernelspec"]["name"] != "python3":
        found.append("its kernel is not python3, which every Jupyter has")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_stored_notebook_is_clean(path):
    assert complaints(json.loads(path.read_text("utf-8")), path) == []


def test_every_notebook_is_found_and_linked():
    page = (ROOT / "docs/notebooks.md").read_text("utf-8")
    assert [path.name for path in NOTEBOOKS] == ["laboratory.ipynb", "your_own_reward.ipynb"]
    assert all(f"](../examples/notebooks/{path.name})" in page for path in NOTEBOOKS)


def test_outputs_and_broken_links_in_a_notebook_are_found():
    notebook = json.loads(NOTEBOOKS[0].read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code[0]["metadata"] = {}
    code[1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["x"]}]
    notebook["cells"][0]["source"] = ["see [it](../nothing.md)"]
    notebook["metadata"]["kernelspec"]["name"] = "my-environment"
    assert len(complaints(notebook, NOTEBOOKS[0])) == 4
