"""The files around the packages: licence, map of the sources, what the repository may mention."""

import re
from pathlib import Path

import pytest

from closeness import assert_close
from source_map import difference, undescribed
from sources import PACKAGES, ROOT

NOT_OURS = {".git", ".nox", ".venv", "dist", "site", "runs", "build", "__pycache__"}
TEXTS = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".jsonl", ".cfg", ".css", ""}

# A path on one machine. Written in parts, so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:" + "|".join(["work", "root", "home", "opt"]) + r")/")


def texts():
    for path in sorted(ROOT.rglob("*")):
        inside = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in inside[:-1])
        if path.is_file() and path.suffix in TEXTS and not hidden and not NOT_OURS & {*inside}:
            yield path, path.read_text(encoding="utf-8", errors="replace")


def test_the_repository_speaks_of_no_machine():
    faults = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not faults


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_ships_the_licence_of_the_repository(package):
    copy = ROOT / "packages" / package / "LICENSE"
    assert copy.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_each_module_trainer_and_loss_has_its_row_in_the_map():
    assert not undescribed(), "a module, trainer or loss without a docstring"
    found = difference()
    assert not found, f"python testing/source_map.py --write\n{found}"


@pytest.mark.parametrize("tolerances", [{"rtol": 1e6}, {"atol": 0.02}])
def test_a_tolerance_that_proves_nothing_is_refused(tolerances):
    with pytest.raises(ValueError, match="proves nothing"):
        assert_close(1.0, 2.0, **tolerances)


def test_a_difference_in_value_or_shape_fails():
    for actual, expected in [(1.0, 1.001), ([1.0, 2.0], [1.0]), (float("nan"), 0.0)]:
        with pytest.raises(AssertionError):
            assert_close(actual, expected)


def test_every_test_file_is_collected():
    """A test file outside the folders that the sessions run would never run."""
    known = {ROOT / "packages" / package / "tests" for package in PACKAGES}
    known.add(ROOT / "integration-tests")
    found = {path for path, _ in texts() if path.name.startswith("test_")}
    assert not [path for path in found if not known & {Path(p) for p in path.parents}]
