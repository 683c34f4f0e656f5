#!/usr/bin/env python3
"""Do the tasks of `tasks.toml` as a reader would, each from the text of one page.

`.ci/tasks.py PYTHON WHEEL [TASK ...]` runs the Python and bash blocks of each page in order, in a new
process of the interpreter PYTHON and in an empty folder, and prints a row a task. Before that it installs
what the page's `pip install` lines name, with WHEEL for jaxfed. A `none` block right after a block of code
is what the code prints; numbers may differ by a hundredth.
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
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
LONGEST = 600  # seconds for a task


class Block(NamedTuple):
    """A block of code on a page."""

    language: str
    line: int  # of the page, where the code begins
    code: str
    output: str | None = None  # what the page says that it prints


def tasks() -> dict[str, Mapping]:
    """The tasks by name."""
    listed = tomllib.loads((ROOT / ".ci" / "tasks.toml").read_text("utf8"))["task"]
    return {task["name"]: task for task in listed}


def blocks(text: str, sections: list[str] | None = None) -> list[Block]:
    """The blocks of a page's beginning and of some of its sections, or of all.

    Raises:
        ValueError: if the page lacks a section.
    """
    found: list[Block] = []
    heading, missing = None, set(sections or ())
    fence = re.compile(r"^## (?P<heading>[^\n]+)$|^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
    for match in fence.finditer(text):
        language, code = match["language"], match["code"]
        if language is None:
            heading = match["heading"]
            missing.discard(heading)
        elif sections is None or heading is None or heading in sections:
            if language == "none" and found:
                found[-1] = found[-1]._replace(output=code)
            elif language in ("python", "bash"):
                line = text.count("\n", 0, match.start("code")) + 1
                found.append(Block(language, line, code))
    if missing:
        raise ValueError(f"sections: the page has none called {', '.join(sorted(missing))}")
    return found


def requirements(code: str, wheel: str) -> list[str]:
    """What the `pip install` lines of a bash block install, with the wheel for jaxfed."""
    lines = re.findall(r"^pip install (.+)$", code, re.M)
    words = [word for line in lines for word in shlex.split(line, comments=True)]
    return [re.sub(r"^jaxfed(?=\[|$)", lambda _: wheel, word) for word in words]


def same(printed: str, shown: str) -> bool:
    """Whether texts agree but for a hundredth in their numbers with decimals."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", shown).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    return all(abs(float(a) - float(b)) <= 0.01 * abs(float(b)) for a, b in pairs)


def execute(page: str, listed: list[Block]) -> None:
    """Run blocks in this process and folder; raise a RuntimeError that names the block that fails."""
    names: dict = {"__name__": "__main__"}
    for block in listed:
        place = f"{page}, line {block.line}"
        printed = io.StringIO()
        try:
            if block.language == "bash":
                code = re.sub(r"^pip install .+$", "", block.code, flags=re.M)
                command = ["bash", "-euo", "pipefail", "-c", code]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                print(done.stdout + done.stderr, end="")
                if done.returncode:
                    raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-2000:]}")
                printed.write(done.stdout)
            else:
                # Empty lines in front, so that a traceback has the page's lines.
                compiled = compile("\n" * (block.line - 1) + block.code, page, "exec")
                with redirect_stdout(printed):
                    exec(compiled, names)
                print(printed.getvalue(), end="")
        except BaseException as error:
            raise RuntimeError(f"{place}: {type(error).__name__}: {error}") from error
        if block.output is not None and not same(printed.getvalue(), block.output):
            raise RuntimeError(f"{place}: prints\n{printed.getvalue()}and not\n{block.output}")


def perform(task: Mapping, python: Path, wheel: str) -> str:
    """Install what a task needs, and do it; return why it failed, or nothing."""
    listed = blocks((DOCS / task["page"]).read_text("utf8"), task.get("sections"))
    for block in listed:
        needed = requirements(block.code, wheel) if block.language == "bash" else []
        install = [python, "-m", "pip", "install", "--quiet", *needed]
        if needed and subprocess.run(install, check=False).returncode:
            return f"{task['page']}, line {block.line}: {' '.join(needed)} do not install"
    with tempfile.TemporaryDirectory(prefix="jaxfed-task-") as folder:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {"HOME": folder, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        (work := Path(folder) / "work").mkdir()
        command = [python, "-P", __file__, "--here", task["name"]]
        try:
            done = subprocess.run(
                command, cwd=work, env=environment, capture_output=True, text=True,
                timeout=LONGEST, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{task['page']}: takes more than {LONGEST} seconds"
    return "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-4000:]


def rows(names: list[str], python: Path, wheel: str) -> Iterator[tuple[str, float, str]]:
    """Do the tasks; yield each one's name, seconds, and why it failed."""
    known = tasks()
    for name in names or known:
        start = time.monotonic()
        fault = perform(known[name], python, wheel)
        yield name, time.monotonic() - start, fault


def main(arguments: list[str]) -> int:
    """Run the command line; return the number of tasks that fail."""
    if arguments[0] == "--here":
        task = tasks()[arguments[1]]
        execute(task["page"], blocks((DOCS / task["page"]).read_text("utf8"), task.get("sections")))
        return 0
    failed = 0
    for name, seconds, fault in rows(arguments[2:], Path(arguments[0]).absolute(), arguments[1]):
        print(f"{name:40} {seconds:5.0f} s  {'fails' if fault else 'done'}", flush=True)
        if fault:
            print(fault, flush=True)
        failed += bool(fault)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
