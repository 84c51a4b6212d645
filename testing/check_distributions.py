"""Check what the built sdists and wheels hold. Run with the files as arguments."""

from __future__ import annotations

import email
import re
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGES = Path(__file__).parent.parent / "packages"


def version_in_source(module: str) -> str:
    """The version that stands in a package's ``_version.py``."""
    package = PACKAGES / module.replace("_", "-")
    text = (package / "src" / module / "_version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'__version__ = "([^"]+)"', text)
    return version


def is_shipped(path: Path) -> bool:
    """Whether a file below a package's source folder belongs in its wheel."""
    return path.is_file() and "__pycache__" not in path.parts


def wheel_faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel, in words; an empty list if nothing is."""
    module, version = wheel.name.split("-")[:2]
    info = f"{module}-{version}.dist-info"
    source = PACKAGES / module.replace("_", "-") / "src"
    wanted = {str(p.relative_to(source)) for p in source.rglob("*") if is_shipped(p)}
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    faults = [f"{name} is missing" for name in sorted((wanted | {f"{module}/py.typed"}) - held)]
    faults += [
        f"{name} does not belong in a wheel"
        for name in sorted(held)
        if not name.startswith((f"{module}/", f"{info}/")) or "tests/" in name or ".pyc" in name
    ]
    if f"{info}/licenses/LICENSE" not in held:
        faults.append("the licence's text is missing")
    if metadata["License-Expression"] != "Apache-2.0":
        faults.append(f"License-Expression is {metadata['License-Expression']!r}")
    if version != version_in_source(module):
        faults.append(f"the version is {version}, the source says {version_in_source(module)}")
    if not metadata.get_payload().strip():
        faults.append("the long description is empty; README.md is what the index shows")
    return faults


def sdist_faults(sdist: Path) -> list[str]:
    """What is wrong with an sdist, in words; an empty list if nothing is."""
    root = sdist.name.removesuffix(".tar.gz")
    module = root.rsplit("-", 1)[0]
    with tarfile.open(sdist) as archive:
        held = {name.removeprefix(f"{root}/") for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", f"src/{module}/py.typed"}
    faults = [f"{name} is missing" for name in sorted(wanted - held)]
    if not any(name.startswith("tests/test_") for name in held):
        faults.append("the tests are missing")
    faults += [f"{name} does not belong in an sdist" for name in sorted(held) if ".pyc" in name]
    return faults


def main(files: list[str]) -> int:
    """Check every file, print each fault, and return the exit code."""
    faults = 0
    for path in map(Path, files):
        found = wheel_faults(path) if path.suffix == ".whl" else sdist_faults(path)
        faults += len(found)
        for fault in found:
            print(f"{path.name}: {fault}")
    print(f"{len(files)} distributions checked, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
