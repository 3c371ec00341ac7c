"""``import jaxgrow`` provides the public modules and has no side effects."""

import inspect
import os
import pkgutil
import subprocess
import sys

import pytest

import jaxgrow

PACKAGES = [jaxgrow, jaxgrow.layerdrop, jaxgrow.checkpoints, jaxgrow.models, jaxgrow.operators]


def test_importing_is_silent_and_loads_no_heavy_module():
    heavy = "torch transformers tensorflow orbax tensorstore grain matplotlib scipy PIL"
    code = f"import sys, jaxgrow; sys.exit(', '.join(sys.modules.keys() & set({heavy.split()!r})) or None)"
    nowhere = os.environ | {"JAX_PLATFORMS": "nowhere"}  # a backend that cannot be initialised
    done = subprocess.run([sys.executable, "-c", code], env=nowhere, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_submodules_are_attributes_that_nothing_hides(package):
    assert all(hasattr(package, name) for name in package.__all__)
    for module in pkgutil.iter_modules(package.__path__):
        if hasattr(package, module.name):
            assert inspect.ismodule(getattr(package, module.name)), (
                f"{package.__name__}.{module.name}"
            )


def test_the_library_is_there_after_one_import():
    public = {
        module.name
        for module in pkgutil.iter_modules(jaxgrow.__path__)
        if not module.name.startswith("_")
    }
    # These modules serve the commands and the trainer; extras are imported by their own names.
    others = {"cli", "extras", "registry", "signals", "tables", "typed", "untrusted"}
    assert public - set(jaxgrow.__all__) == others
