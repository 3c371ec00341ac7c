"""The scripts that people run, and what they share. Effects live here; the mathematics is in `jaxgrow`."""

from importlib.util import find_spec

# The extra `train` of pyproject.toml, as it is imported.
NEEDS = (
    "array_record",
    "grain",
    "jinja2",
    "matplotlib",
    "pyarrow",
    "scipy",
    "tensorboard",
    "tensorflow_datasets",
    "tokenizers",
)

if missing := [name for name in NEEDS if find_spec(name) is None]:
    # Of an error that bears this package's own name, `python -m` prints the line alone.
    raise ImportError(
        f"{', '.join(missing)}: not installed; pip install -e '.[train]'", name=__name__
    )
