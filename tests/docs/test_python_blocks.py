"""Every Python program that a page shows runs, with tiny models in place of the hub's; those of a page share their
names, as for a reader who goes from top to bottom.
"""

import pytest

from tests.docs.markdown import Block, all_blocks


def run_blocks(blocks: list[Block]) -> dict:
    """Runs `blocks` in one namespace and returns it. Those that stand for a file of their own are tested where that
    file is used.
    """
    names: dict = {}
    for block in blocks:
        if block.file_name is None:
            # Blank lines first, so that an error names the line of the page.
            exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)
    return names


def programs(page: str) -> list[Block]:
    return [block for block in all_blocks("python") if block.page == page]


@pytest.mark.parametrize(
    "page", sorted({block.page for block in all_blocks("python")} - {"README.md", "docs/environments.md"})
)
def test_the_programs_of_a_page_run(page, workplace):
    run_blocks(programs(page))


def test_the_program_of_the_readme_trains(workplace):
    names = run_blocks(programs("README.md"))
    assert names["trainer"].state.global_step == 1
    assert (workplace / "outputs/polite/final/policy/model.safetensors").is_file()
