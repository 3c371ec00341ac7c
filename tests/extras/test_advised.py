"""The advice of messages that name a setting or a command works: a test follows it."""

import re
import runpy
from pathlib import Path

import advice_library
import advice_train
import pytest
from advice import Case, Place, refused

MODULES = [advice_library, advice_train]
ROOT = Path(__file__).parents[2]
# A message that matches names a setting, an option, a command or a package to install.
ADVISES = re.compile(
    r"--[a-z]|CONFIG:|pip install|python -m |\btrain\.[a-z]+\b"
    r"|\b(?:data|model|optim|mesh|method)\.[a-z_]+"
    r"|jaxgrow (?:grow|convert|inspect|interpolate|architectures|prune|report|suggest)\b"
    r"|\b(?i:set|leave out|use|give|raise|lower|choose|needs?)\b[^;.]*?\b[a-z_]+=[^,]"
    r"|: (?:also )?(?:set|raise|lower|leave|leave out) (?!both|the|one|them)[a-z_]{3,}"
    r"|[:;] leave it out to\b|RUN@STEP"
)
# Messages whose advice a test cannot follow, by some of their words, with the reason.
_INSTALLS = "it installs a package"
_TFDS = "it needs a dataset that tensorflow-datasets has prepared"
_MACHINE = "it depends on the speed or the memory of the machine"
_SEVERAL = "it needs several processes"
_PART = "it is a part of another message"
_LONG = "the second attempt trains for minutes"
EXCEPTIONS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("requires the package tokenizers", "growing the optimizer state of PyTorch"),
            *("plots require matplotlib", "pip install -e '.[train]'", "pip install jinja2"),
            *("there is no working compiler", "images need Pillow", "loggers={name} needs"),
            "need lm-eval, which is not installed",
        ),
        _INSTALLS,
    ),
    **dict.fromkeys(
        (
            *("has no split 'train', only", "has no feature {field}", "is not text, but {type(doc"),
            *("tensorflow-datasets cannot prepare", "are not all squares of one size"),
        ),
        _TFDS,
    ),
    "takes more than {bounds.seconds}": _MACHINE,
    "s to decode. If you trust the file": _MACHINE,
    "bytes of memory; if you trust the file, use": _MACHINE,
    "needs more than {bounds.bytes}": _MACHINE,
    "JAX cannot find them": _SEVERAL,
    "parallel=pmap supports only one process": _SEVERAL,
    "would split the devices of a host": _SEVERAL,
    **dict.fromkeys(
        (
            *(" and data.tokenizer=bytes", "--coordinator {coordinator}", "with --from {recorded"),
            "--set {' '.join(own or within)}",
            *("without --from", "it has too many aliases", "it makes {len(text)} characters"),
        ),
        _PART,
    ),
    **dict.fromkeys(
        (
            *("two fine-tunings have the same name", "diverged with every learning rate"),
            *("race: the small model in", "race: all operators", "--steps must be at least 20"),
            *("--by names no operator", "--measure has no recipe"),
            "time='variance' needs a variance",
        ),
        _LONG,
    ),
    "cannot stop at the ends of documents": "only a family of a user can lack it",
    "no Python file in the standard library": "every Python has these files",
    "was moved, removed or replaced while": "the folder is moved while a run uses it",
    "the checkpoint counts": "the log is restored from a backup of the user",
    # Other tests follow the advice of these messages.
    **dict.fromkeys(
        (
            *("{source.what}, less than one batch", "lower eval_batches or the batches of"),
            "the validation data has {len(source)}",
        ),
        "tests/extras/test_advice.py",
    ),
    **dict.fromkeys(
        (
            *("leave out frozen and drop", "for which the cost of adapters", "leave out mask_BS"),
            *("leave out keep_mask", "adapters need equal widths", "labels names the classes"),
            *("best is not supported together", "freezes the rest of the body"),
            *("a LoRA or an adapter, not both", "dropout is not supported together"),
            *("maps of an axis differ between parameters", "encoders do not support for padded"),
        ),
        "an argument or a field is left out, which needs no value",
    ),
    **dict.fromkeys(
        (
            *("loop requires the layers", "is not a loop: give", "{why}, but loop is {self.loop}"),
            *("loop adds no weights", "{name} changes no size, but the target has"),
            "pass its own layer with jaxgrow grow",
        ),
        "tests/extras/test_interop_forms.py",
    ),
    "a loop runs at least one layer at least twice": "tests/operators/test_loops.py",
    "dropped='freeze' is not supported for a model with a loop": "tests/operators/test_loops.py",
    "leave out freeze or loop": "tests/operators/test_loops.py",
    "is a run whose special tokens get other ids": "tests/extras/test_token_changes.py",
    "the adapter is a DoRA": "tests/extras/test_peft.py",
    "use_dora is true": "tests/extras/test_peft.py",
    "of the budget would train the small": "tests/extras/test_advise.py",
    "To merge them, give both": "tests/extras/test_merge.py",
    "infinite or negative second moments in": "tests/train/test_checkpoint.py",
    "which are in no group": "tests/extras/test_torch_optimizer.py",
    "folders of torch.distributed": "tests/extras/test_torch_optimizer.py",
    "does not read the {name} of": "tests/checkpoints/test_layer_lists.py",
    "with --set mesh.data=1 --set": "tests/train/test_mesh.py",
    "and activations are not yet counted": "tests/train/test_mesh.py",
    "started from another model in": "tests/train/test_continue.py",
    "--apply and --out must": "tests/extras/test_learned_maps.py",
    "{out} exists already; give": "tests/extras/test_learned_maps.py",
    "set data.field": "tests/extras/test_formats.py",
    "its phases with a fixed number of steps take": "tests/extras/test_timing.py",
    "has the times of another config": "tests/extras/test_timing.py",
    "the model already has an adapter": "tests/extras/test_adapting.py",
    "a task of lm-eval (lm-eval ls": "the user chooses a task of lm-eval",
    "a copy of the dataset {path}": "tests/extras/test_harness.py",
}
MAKERS = {name: make for module in MODULES for name, make in module.MAKERS.items()}
MADE: dict[str, Path] = {}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """Leave out slow cases by default, and cases whose package is not installed."""
    return [pytest.mark.slow] * case.slow + [pytest.mark.interop] * bool(case.needs)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=marks(c), id=c.says) for module in MODULES for c in module.CASES],
)
def test_following_the_advice_succeeds(home, tmp_path, case: Case):
    if case.needs:
        pytest.importorskip(case.needs)
    place = Place(home, tmp_path, MAKERS, MADE)
    said = refused(lambda: case.fails(place))
    assert all(words in said for words in re.split(r"\{.*?\}|\{.*", case.says)), said
    case.follows(place, said)


def test_every_message_that_advises_has_a_case_or_a_reason():
    lines = runpy.run_path(str(ROOT / "docs/messages.py"))["all_messages"]()
    texts = dict.fromkeys(x.split(": ", 1)[1] for x in lines if x.startswith("- "))
    known = {case.says for module in MODULES for case in module.CASES} | EXCEPTIONS.keys()
    unknown = [
        text
        for text in texts
        if ADVISES.search(re.sub(r"\{(?:[^{}]|\{[^{}]*\})*\}", "{}", text))
        and not any(words in text for words in known)
    ]
    assert unknown == [], "add a case to tests/support/advice_*.py"
    for reason in EXCEPTIONS.values():
        assert not reason.startswith("tests/") or (ROOT / reason).is_file(), reason
    gone = [words for words in EXCEPTIONS if not any(words in text for text in texts)]
    assert gone == [], "these messages do not exist: delete their exceptions"
