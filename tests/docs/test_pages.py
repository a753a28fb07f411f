"""Every code block of the README and of docs/ runs, and prints what the page shows.

Each page is one session in an empty folder, from top to bottom:

- `python` blocks run in this process and share their names.
- A `python` block whose first line is `# NAME.py` is not run, but saved as a file, which a `sh` block may run.
- A `diff` block changes the last `python` block; the result is a block like any other.
- The commands of a `sh` block run in the folder, except those of `UNTESTED`; `make` needs a target in the Makefile.
  `fpipe` and `python` are processes forked from one that has imported torch, and so are those of `torchrun`, which
  itself runs on the README's page alone: those that it starts import torch again.
- A `text` block directly below any of these is what it prints. Below `<!-- numbers vary -->`, numbers are not compared.
"""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.forked import ROOT, script

BIN = Path(sys.executable).parent
BLOCK = re.compile(r"(<!-- numbers vary -->\s*)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = [page for page in FILES if BLOCK.search(page.read_text())]
UNTESTED = ("git", "pip", "python3", "tensorboard")  # they need the network, or do not end


class Block(NamedTuple):
    language: str
    text: str
    line: int
    output: str | None  # of the `text` block directly below
    numbers_vary: bool


def blocks(page: Path) -> Iterator[Block]:
    content = page.read_text()
    matches = list(BLOCK.finditer(content))
    for match, following in zip_longest(matches, matches[1:]):
        output = None
        if following and following[2] == "text" and not content[match.end() : following.start()].strip():
            output = following[3]
        line = content.count("\n", 0, match.start(3))
        yield Block(match[2], match[3], line, output, bool(following and following[1]))


class Session:
    """Run the blocks of one page."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page, self.folder = page, folder
        self.names = {"__name__": "__main__"}
        self.program = ""  # the last `python` block

    def run(self, block: Block) -> str:
        match block.language:
            case "python":
                return self.python(block.text, block.line)
            case "diff":
                return self.python(patched(self.program, block.text), block.line)
            case "sh":
                return "".join(self.shell(command) for command in commands(block.text))
        return ""

    def python(self, text: str, line: int) -> str:
        self.program = text
        if name := re.match(r"# (\w+\.py)\n", text):
            (self.folder / name[1]).write_text(text)
            return ""
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile("\n" * line + text, self.page, "exec"), self.names)
        return output.getvalue()

    def shell(self, command: str) -> str:
        program, *arguments = shlex.split(command, comments=True)
        if program == "make":
            assert f"\n{arguments[0]}: " in (ROOT / "Makefile").read_text(), command
        if program in (*UNTESTED, "make"):
            return ""
        if program == "torchrun":
            *flags, processes, name = arguments
            assert flags == ["--standalone", "--nproc-per-node"], command
            if self.page.name == "README.md":
                return script(BIN / program, *arguments, cwd=self.folder)
            return script(self.folder / name, processes=int(processes), cwd=self.folder)
        if program == "python":
            return script(self.folder / arguments[0], cwd=self.folder)
        assert program == "fpipe", command
        into = self.folder / arguments[arguments.index(">") + 1] if ">" in arguments else None
        output = script(BIN / "fpipe", *(arguments[:-2] if into else arguments), cwd=self.folder)
        if into:
            into.write_text(output)
        return "" if into else output


def commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def patched(program: str, diff: str) -> str:
    """Apply a diff without line numbers: lines between those that it shows stay as they are."""
    rest, result = program.splitlines(), []
    for sign, line in ((line[:1], line[1:]) for line in diff.splitlines()):
        if sign == "+":
            result.append(line)
        elif sign in ("-", " "):
            at = rest.index(line)
            result += [*rest[:at], *([line] if sign == " " else [])]
            rest = rest[at + 1 :]
    return "\n".join([*result, *rest, ""])


def lines(text: str, numbers_vary: bool) -> list[str] | list[list[str]]:
    shown = [line.rstrip() for line in text.strip("\n").splitlines()]
    return [re.sub(r"[\d.,]+", "#", line).split() for line in shown] if numbers_vary else shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = Session(page, tmp_path)
    for block in blocks(page):
        output = session.run(block)
        if block.output is not None:
            expected = lines(block.output, block.numbers_vary)
            assert lines(output, block.numbers_vary) == expected, f"{page.name}, line {block.line}"


@pytest.mark.parametrize(
    "package", ["fpipe", "fpipe.handlers", "fpipe.interop", "fpipe.schedules", "fpipe.tensorboard"]
)
def test_the_reference_has_every_public_name(package):
    """Each name is on a page, and each public module has a page."""
    reference = "\n".join(page.read_text() for page in ROOT.glob("docs/api/*.md"))
    module = import_module(package)
    missing = [n for n in module.__all__ if not re.search(rf":: {package}\.{n}\b|^# {package}\.{n}$", reference, re.M)]
    assert missing == []
