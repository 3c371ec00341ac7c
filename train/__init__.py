"""The commands that train, evaluate and compare models. The mathematics is in `jaxgrow`."""

import sys
from importlib.util import find_spec

# Import names of the packages in the extra `train` of pyproject.toml.
NEEDS = (
    "array_record",
    "grain",
    "jinja2",
    "matplotlib",
    "pyarrow",
    "scipy",
    "tensorboardX",
    "tensorflow_datasets",
    "tokenizers",
)

_COMMAND = sys.argv[:1] == ["-m"]  # `python -m train.X`, and not an import by a program
if _COMMAND:
    import signal

    # Until `prepare_command`, Ctrl-C ends the process as other programs, without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from train.common import endings

    endings.prepare_command()
    from train.arguments import check_arguments
    from train.common.errors import exits_cleanly

    exits_cleanly(check_arguments)

if missing := [name for name in NEEDS if find_spec(name) is None]:
    # `python -m` prints only the message, without a traceback, if the error has this package's
    # name.
    raise ImportError(
        f"{', '.join(missing)}: not installed; run pip install -e '.[train]'", name=__name__
    )
