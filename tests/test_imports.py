"""Which package may import which: configs -> train -> jaxslm <- convert; torch stays in convert."""

import pytest

from tests.conftest import REPOSITORY
from tests.jaxslm.test_package import imports

FORBIDDEN = {
    "jaxslm": {"torch", "optax", "configs"},
    "convert": {"train", "configs"},
    "train": {"torch", "convert", "configs"},
    "configs": {"torch", "convert"},
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_meet_only_where_the_design_says(package):
    paths = sorted((REPOSITORY / package).rglob("*.py"))
    assert paths
    for path in paths:
        named = {name.split(".")[0] for name in imports(path)}
        assert not named & FORBIDDEN[package], path
