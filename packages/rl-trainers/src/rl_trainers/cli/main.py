"""``rl-train``: chooses the command; imports nothing heavy before one was chosen."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from rl_trainers._version import __version__

COMMANDS = {
    "sft": "supervised fine-tuning on text, conversations or prompts with completions",
    "grpo": "reinforcement learning against reward functions (GRPO)",
    "check": "look through a dataset as training will see it, and count what is wrong",
}

USAGE_ERROR = 2


def help_text() -> str:
    """What ``rl-train --help`` prints."""
    lines = "\n".join(f"  {name:<6} {what}" for name, what in COMMANDS.items())
    return (
        "usage: rl-train COMMAND [--config FILE] [--OPTION VALUE ...]\n\n"
        f"commands:\n{lines}\n\n"
        "rl-train COMMAND --help lists the options of a command.\n"
        "example:\n"
        "  rl-train grpo --model path/to/model --dataset prompts.jsonl \\\n"
        "      --reward_functions rewards.py:exact --output_dir runs/first"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors of use are one line, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return _fail(f"there is no command {command!r}{hint} (choose from {', '.join(COMMANDS)})")
    module = importlib.import_module(f"rl_trainers.cli.{command}")
    try:
        module.run(rest)
    except KeyboardInterrupt:
        return _fail("stopped by the keyboard")
    # What the layers below raise for bad input; anything else is our fault and is shown whole.
    except (ValueError, TypeError, FileNotFoundError, ImportError, RuntimeError) as error:
        if "--traceback" in arguments:
            raise
        return _fail(" ".join(str(error).split()))
    return 0


def _fail(message: str) -> int:
    print(f"rl-train: error: {message}", file=sys.stderr)
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
