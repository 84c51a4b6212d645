"""What users can call does not change unnoticed."""

import pytest

from public_api import MODULES, difference


@pytest.mark.parametrize("module", MODULES)
def test_public_names_and_signatures_are_the_stored_ones(module):
    found = difference(module)
    assert not found, f"if meant: python testing/public_api.py --write\n{found}"
