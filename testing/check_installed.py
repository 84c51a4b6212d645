"""Check an environment that one package was installed into. Run with the package's name.

Everything installed must follow from what the package declares, the package and its siblings must
come from files of this repository and not from an index, and each of its modules must import with
that and nothing more: an undeclared import, or one that needs an extra, fails here.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from importlib import metadata
from pathlib import Path

SEEDED = {"pip", "setuptools", "wheel"}
OURS = {"rl-ops", "rl-decode", "rl-data", "rl-models", "rl-trainers"}

# Modules may need it, since builds of torch for CUDA bring it along; nothing declares it.
COMES_WITH_TORCH = {"triton"}


def normalised(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[._-]+", "-", name).lower()


def declared_closure(package: str) -> set[str]:
    """Names reachable from a package through declared requirements, platform markers ignored."""
    reached: set[str] = set()
    waiting = [(package, "")]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        reached.add(name)
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # ruled out by a marker
            continue
        for requirement in needed:
            of_extra = re.findall(r"""extra == ['"]([^'"]+)""", requirement)
            if of_extra and extra not in of_extra:
                continue
            target, extras = re.match(r"([\w.-]+)\s*(?:\[([^\]]*)\])?", requirement).groups("")
            for found in {"", *(e.strip() for e in extras.split(","))}:
                edge = (normalised(target), found)
                if edge not in seen:
                    seen.add(edge)
                    waiting.append(edge)
    return reached


def faults_of(package: str) -> list[str]:
    """What is wrong with this environment, in words; an empty list if nothing is."""
    installed = {normalised(d.metadata["Name"]) for d in metadata.distributions()} - SEEDED
    faults = [
        f"{name} is installed, though {package} does not declare it"
        for name in sorted(installed - declared_closure(package))
    ]
    for name in sorted(installed & OURS):
        origin = metadata.distribution(name).read_text("direct_url.json") or ""
        if "file://" not in origin:
            faults.append(f"{name} did not come from a wheel of this repository")
    module = importlib.import_module(package.replace("-", "_"))
    if Path(sys.prefix).resolve() not in Path(module.__file__ or "").resolve().parents:
        faults.append(f"{module.__name__} was imported from {module.__file__}, not as installed")
    for found in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ImportError as error:
            if error.name in COMES_WITH_TORCH:
                continue
            faults.append(f"{found.name} does not import with what is declared: {error}")
    return faults


def main(package: str) -> int:
    """Check, print each fault, and return the exit code."""
    faults = faults_of(package)
    for fault in faults:
        print(fault)
    print(f"{package}: installed as declared" if not faults else f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
