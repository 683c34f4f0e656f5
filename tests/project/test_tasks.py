"""The script that does the ten tasks from their pages."""

import importlib.util
import sys

import pytest

from tests.helpers import ROOT, blocks

spec = importlib.util.spec_from_file_location("ci_tasks", ROOT / ".ci" / "tasks.py")
ci_tasks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ci_tasks)

PAGE = """# A page

```bash
pip install 'jaxfed[plot]' flax  # both
echo one
```

## First

```python
x = 1.0
print(2 * x)
```

```none
2.001
```

## Second

```python
print(x)
raise ValueError("no")
```
"""


def test_a_page_is_read_section_by_section():
    languages = [block.language for block in ci_tasks.blocks(PAGE)]
    assert languages == ["bash", "python", "python"]
    beginning, first = ci_tasks.blocks(PAGE, ["First"])
    assert beginning.line == 4 and "echo one" in beginning.code
    assert first.output == "2.001\n" and first.line == 11
    with pytest.raises(ValueError, match="the page has none called Third"):
        ci_tasks.blocks(PAGE, ["First", "Third"])


def test_installations_are_those_of_the_page_with_the_wheel():
    block = ci_tasks.blocks(PAGE)[0]
    assert ci_tasks.requirements(block, "/a/x.whl") == ["/a/x.whl[plot]", "flax"]


@pytest.mark.parametrize(
    ("printed", "equal"),
    [("2.0\n", True), ("2.1\n", False), ("2\n", False), ("2.0 3.0\n", False)],
)
def test_output_is_compared_up_to_a_hundredth(printed, equal):
    assert ci_tasks.same(printed, "2.001\n") is equal


def test_blocks_share_names_and_an_error_names_its_block(capsys):
    ci_tasks.execute("page.md", ci_tasks.blocks(PAGE, ["First"]))
    assert capsys.readouterr().out == "one\n2.0\n"
    with pytest.raises(RuntimeError, match=r"page.md, line 22: ValueError: no"):
        ci_tasks.execute("page.md", ci_tasks.blocks(PAGE))
    other = PAGE.replace("2.001", "2.1").replace("echo one", "ls nowhere")
    with pytest.raises(RuntimeError, match=r"page.md, line 11: prints\n2.0\nand not\n2.1"):
        ci_tasks.execute("page.md", ci_tasks.blocks(other)[1:])
    with pytest.raises(RuntimeError, match=r"page.md, line 4: .*exit status 2"):
        ci_tasks.execute("page.md", ci_tasks.blocks(other))


def test_a_task_runs_elsewhere_with_nothing_of_this_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(ci_tasks, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text("```bash\npip install jaxfed\n```\n")
    task = {"name": "one", "page": "page.md"}
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    said = ci_tasks.perform(task, failing, "/no/wheel")
    assert said == "page.md, line 2: /no/wheel do not install"


def test_every_block_of_the_tasks_pages_is_run():
    run = {}
    for task in ci_tasks.tasks().values():
        found = {block.code for block in ci_tasks.blocks_of(task)}
        run.setdefault(ci_tasks.DOCS / task["page"], set()).update(found)
    assert len(ci_tasks.tasks()) == 10
    for page, codes in run.items():
        assert codes >= set(blocks(page)), page


def test_a_task_that_fails_is_shown_and_counted(monkeypatch, capsys):
    faults = {"own channel": "why", "own algorithm": ""}
    monkeypatch.setattr(ci_tasks, "perform", lambda task, *given: faults[task["name"]])
    assert ci_tasks.main([sys.executable, "x.whl", *faults]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("fails") and lines[1] == "why" and lines[2].endswith("done")
