"""The table of families in docs/models.md is made from the family modules: `python -m tests.unit.models.test_docs` writes it."""

from __future__ import annotations

from pathlib import Path

from quire import models

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- families: made by python -m tests.unit.models.test_docs -->\n", "<!-- end of families -->\n"


def table() -> str:
    """A row for each module: what it is, in the first line of its docstring, and the names it answers to."""
    rows = ["| family | `general.architecture` of a GGUF | class in `config.json` |", "|---|---|---|"]
    for module in models.families():
        about = (module.__doc__ or "").strip().split("\n", 1)[0].rstrip(".")
        gguf, folder = (", ".join(f"`{name}`" for name in names) for names in (module.ARCHS, module.HF_ARCHS))
        rows.append(f"| {about} | {gguf} | {folder} |")
    return "\n".join(rows) + "\n"


def test_the_table_is_what_the_modules_say():
    page = PAGE.read_text()
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)] == table(), (
        "run python -m tests.unit.models.test_docs"
    )


def test_every_supported_name_is_in_it():
    made = table()
    assert models.supported() and models.supported_hf()
    assert all(f"`{name}`" in made for name in [*models.supported(), *models.supported_hf()])


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(BEGIN) + len(BEGIN)] + table() + page[page.index(END) :])
