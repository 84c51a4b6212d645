"""The package as a whole: what it needs, exports and shows."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import rl_decode

README = Path(__file__).parents[1] / "README.md"


def modules() -> list[str]:
    return [f"rl_decode.{module.name}" for module in pkgutil.iter_modules(rl_decode.__path__)]


def test_every_example_in_a_docstring_runs():
    ran = 0
    for name in ("rl_decode", *modules()):
        result = doctest.testmod(importlib.import_module(name))
        assert result.failed == 0, name
        ran += result.attempted
    assert ran > 10


def test_the_examples_of_the_readme_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
        shown = capsys.readouterr().out.splitlines()
        assert shown == [line[2:] for line in block.splitlines() if line.startswith("# ")]
    assert blocks


def test_the_readme_lists_every_public_name():
    text = README.read_text(encoding="utf-8")
    for name in rl_decode.__all__:
        assert name.startswith("__") or f"`{name}" in text, name


def test_importing_loads_the_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules); import rl_decode;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['rl_decode']"
