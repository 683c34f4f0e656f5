#!/usr/bin/env python3
"""Do the tasks of `tasks.toml` as a reader would, each from the text of one page.

`.ci/tasks.py PYTHON WHEEL [TASK ...]` runs the Python and bash blocks of each page in order, in a
new process of the interpreter PYTHON and in an empty folder, and prints a row a task. Before that
it installs what the `pip install` lines of the page name, with WHEEL for jaxfed. A `none` block
after a block of code is what the code prints; its decimal numbers may differ by a hundredth.
"""

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path(__file__).resolve()
DOCS = SCRIPT.parents[1] / "docs"
BLOCK = re.compile(r"^## ([^\n]+)$|^```(\w+)\n(.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
LONGEST = 900  # seconds for a task


class Block(NamedTuple):
    """A block of code on a page."""

    language: str
    line: int  # of the page, where the code begins
    code: str
    output: str | None = None  # what the page says that it prints


def tasks() -> dict[str, dict[str, Any]]:
    """The tasks by name."""
    listed = tomllib.loads(SCRIPT.with_suffix(".toml").read_text("utf8"))["task"]
    return {task["name"]: task for task in listed}


def blocks(text: str, sections: list[str] | None = None) -> list[Block]:
    """The blocks of a page's beginning and of some of its sections, or of all."""
    found: list[Block] = []
    section, missing = None, set(sections or ())
    for match in BLOCK.finditer(text):
        heading, language, code = match.groups()
        if heading is not None:
            section = heading
            missing.discard(heading)
        elif sections is None or section is None or section in sections:
            if language == "none":
                found[-1] = found[-1]._replace(output=code)
            elif language in ("python", "bash"):
                line = text.count("\n", 0, match.start(3)) + 1
                found.append(Block(language, line, code))
    if missing:
        raise ValueError(f"sections: the page has none called {', '.join(sorted(missing))}")
    return found


def blocks_of(task: Mapping[str, Any]) -> list[Block]:
    """The blocks of a task."""
    return blocks((DOCS / task["page"]).read_text("utf8"), task.get("sections"))


def requirements(block: Block, wheel: str) -> list[str]:
    """What the `pip install` lines of a block install, with the wheel for jaxfed."""
    lines = re.findall(r"^pip install (.+)$", block.code, re.M)
    words = [word for line in lines for word in shlex.split(line, comments=True)]
    return [re.sub(r"^jaxfed(?=\[|$)", lambda _: wheel, word) for word in words]


def same(printed: str, shown: str) -> bool:
    """Whether texts agree, but for a hundredth in their decimal numbers."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", shown).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    return all(abs(float(a) - float(b)) <= 0.01 * abs(float(b)) for a, b in pairs)


def run(block: Block, page: str, names: dict[str, Any]) -> str:
    """Run a block in this process and folder; return what it prints."""
    if block.language == "bash":
        code = re.sub(r"^pip install .+$", "", block.code, flags=re.M)
        command = ["bash", "-euo", "pipefail", "-c", code]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    # Empty lines in front, so that a traceback has the page's lines.
    code = compile("\n" * (block.line - 1) + block.code, page, "exec")
    with redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    return printed.getvalue()


def execute(page: str, listed: list[Block]) -> None:
    """Run blocks; a RuntimeError names the one that fails, or prints other than the page says."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in listed:
        place = f"{page}, line {block.line}"
        try:
            printed = run(block, page, names)
        except BaseException as error:
            raise RuntimeError(f"{place}: {type(error).__name__}: {error}") from error
        print(printed, end="")
        if block.output is not None and not same(printed, block.output):
            raise RuntimeError(f"{place}: prints\n{printed}and not\n{block.output}")


def perform(task: Mapping[str, Any], python: Path, wheel: str) -> str:
    """Install what a task needs, and do it; return why it failed, or nothing."""
    for block in blocks_of(task):
        needed = requirements(block, wheel)
        install = [python, "-m", "pip", "install", "--quiet", *needed]
        if needed and subprocess.run(install, check=False).returncode:
            return f"{task['page']}, line {block.line}: {' '.join(needed)} do not install"
    with tempfile.TemporaryDirectory(prefix="jaxfed-task-") as folder:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {"HOME": folder, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        command = ["timeout", str(LONGEST), python, "-P", SCRIPT, "--here", task["name"]]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=folder, env=environment, check=False, **streams)
    return done.stdout[-6000:] if done.returncode else ""


def main(arguments: list[str]) -> int:
    """Run the command line; return the number of tasks that fail."""
    known = tasks()
    if arguments[0] == "--here":
        execute(known[arguments[1]]["page"], blocks_of(known[arguments[1]]))
        return 0
    python, wheel, *names = arguments
    failed = 0
    for name in names or known:
        start = time.monotonic()
        fault = perform(known[name], Path(python).absolute(), wheel)
        state = f"fails\n{fault}" if fault else "done"
        print(f"{name:40} {time.monotonic() - start:5.0f} s  {state}", flush=True)
        failed += bool(fault)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
