"""The command line: it trains, and answers bad input with one line and no traceback."""

import json
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from rl_trainers.cli.main import main


@pytest.fixture
def folder(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"say {i}", "text": f"text {i}"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def short(completion_ids):\n    return [-len(ids) for ids in completion_ids]\nnumber = 3\n"
    )
    return tmp_path


def arguments(folder, command, **changes):
    options = {
        "model": folder / "model",
        "dataset": folder / "rows.jsonl",
        "output_dir": folder / "run",
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "bf16": False,
        "report_to": "none",
        **({} if command == "sft" else {"reward_functions": folder / "rewards.py:short"}),
        **({} if command == "sft" else {"max_completion_length": 4}),
        **changes,
    }
    flags = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    return [command, *(part for flag in flags for part in flag)]


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_a_command_trains_and_saves_a_model(folder, command):
    assert main(arguments(folder, command)) == 0
    AutoModelForCausalLM.from_pretrained(folder / "run")
    assert (folder / "run" / "metrics.jsonl").read_text()


def test_flags_stand_over_the_config_file(folder):
    config = folder / "config.yaml"
    config.write_text(f"model: {folder}/model\ndataset: {folder}/rows.jsonl\nmax_steps: 5\n")
    flags = arguments(folder, "sft", model=None, dataset=None)
    assert main([*flags, "--config", str(config)]) == 0
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_generation": 4}, "unknown option 'num_generation'; did you mean 'num_generations'?"),
        ({"max_steps": "many"}, "max_steps"),
        ({"model": "{folder}/absent"}, "absent"),
        ({"dataset": "{folder}/absent.jsonl"}, "there is no file"),
        ({"dataset_split": "test"}, None),
        ({"reward_functions": "{folder}/rewards.py:number"}, "cannot be called"),
        ({"reward_functions": "{folder}/rewards.py:long"}, "has no 'long'"),
        ({"reward_functions": None}, "no reward function"),
        ({"model": None}, "no model was given"),
        ({"config": "{folder}/absent.yaml"}, "there is no such file"),
        ({"loss_type": "gpro"}, "gpro"),
    ],
)
def test_bad_input_is_one_clear_line(folder, capfd, changes, words):
    changes = {
        name: value.format(folder=folder) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    code = main(arguments(folder, "grpo", **changes))
    stderr = capfd.readouterr().err
    if words is None:  # a split of a single file is a name like any other
        assert code == 0
        return
    assert code == 2
    assert "Traceback" not in stderr
    (line,) = [text for text in stderr.splitlines() if text.startswith("rl-train: error")]
    assert words in line


def test_an_unknown_key_of_a_config_file_is_refused(folder, capfd):
    config = folder / "config.toml"
    config.write_text("learningrate = 0.1\n")
    assert main([*arguments(folder, "sft"), "--config", str(config)]) == 2
    assert "did you mean 'learning_rate'?" in capfd.readouterr().err


def test_a_dataset_without_the_column_says_which_it_has(folder, capfd):
    (folder / "rows.jsonl").write_text('{"question": "why?"}\n')
    assert main(arguments(folder, "grpo")) == 2
    assert "no column 'prompt', only ['question']" in capfd.readouterr().err


def test_an_unknown_command_is_refused_with_the_nearest(capfd):
    assert main(["grop"]) == 2
    assert "did you mean 'grpo'?" in capfd.readouterr().err


def test_help_loads_no_torch():
    """I1: the top-level help, and importing the package, stay light."""
    code = (
        "import sys, rl_trainers; from rl_trainers.cli.main import main; main(['--help']); "
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rl-train COMMAND" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_help_of_a_command_lists_its_options(capfd):
    with pytest.raises(SystemExit) as left:
        main(["grpo", "--help"])
    assert left.value.code == 0
    assert "--num_generations" in capfd.readouterr().out


def test_check_counts_what_is_wrong(folder, capfd):
    (folder / "rows.jsonl").write_text('{"text": "fine"}\n{"text": ""}\n')
    flags = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl")]
    assert main(["check", *flags]) == 0
    out = capfd.readouterr().out
    assert "data audit of 2 rows: 1 " in out
    assert main(["check", *flags, "--strict"]) == 2
    assert "data audit of 2 rows: 1 " in capfd.readouterr().err
