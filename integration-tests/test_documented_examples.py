"""Every example in the READMEs and on the site runs as it stands, offline.

The working folder holds what the examples name: a tiny model and tokenizer in a folder with the
name of the real one, and a few rows of data.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import commands_of, pages, python_of
from sources import ROOT

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.fixture
def working_folder(tmp_path, monkeypatch, tiny_model_folder):
    (tmp_path / MODEL).parent.mkdir(parents=True)
    (tmp_path / MODEL).symlink_to(tiny_model_folder)
    write_rows(
        tmp_path / "conversations.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": f"What is {n} + 1?"},
                    {"role": "assistant", "content": f"{n + 1}"},
                ]
            }
            for n in range(8)
        ],
    )
    write_rows(
        tmp_path / "sums.jsonl",
        [
            {
                "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
                "answer": f"{n + 1}",
            }
            for n in range(8)
        ],
    )
    (tmp_path / "rewards.py").write_text(
        "def right_answer(answers, answer, **kwargs):\n"
        "    return [float(said.strip() == right) for said, right in zip(answers, answer)]\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("page", [p for p in pages() if python_of(p)], ids=name_of)
def test_the_python_of_a_page_runs(page, working_folder):
    program = compile(python_of(page), str(page), "exec")
    exec(program, {"__name__": "__main__"})


@pytest.mark.parametrize("command", sorted({c for p in pages() for c in commands_of(p)}), ids=str)
def test_a_documented_command_line_runs(command, working_folder):
    scripts = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command.split(), env=scripts, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
