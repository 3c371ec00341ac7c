"""The advice of messages that name a setting or a command works: a test follows it."""

import itertools
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
# Messages whose advice a test cannot follow, by some of their words: the reason, or the test that follows it.
EXCEPTIONS = {
    "it installs a package": [
        "requires the package tokenizers", "growing the optimizer state of PyTorch", "plots require matplotlib",
        "pip install -e '.[train]'", "pip install jinja2", "there is no working compiler", "images need Pillow",
        "loggers={name} needs", "need lm-eval, which is not installed",
    ],
    "it needs a dataset that tensorflow-datasets has prepared": [
        "has no split 'train', only", "has no feature {field}", "is not text, but {type(doc",
        "tensorflow-datasets cannot prepare", "are not all squares of one size",
    ],
    "it depends on the speed or the memory of the machine": [
        "takes more than {bounds.seconds}", "s to decode. If you trust the file",
        "bytes of memory; if you trust the file, use", "needs more than {bounds.bytes}",
    ],
    "it needs several processes": [
        "JAX cannot find them", "parallel=pmap supports only one process", "would split the devices of a host",
    ],
    "it is a part of another message": [
        " and data.tokenizer=bytes", "--coordinator {coordinator}", "with --from {recorded",
        "--set {' '.join(own or within)}", "without --from", "it has too many aliases",
        "it makes {len(text)} characters",
    ],
    "the second attempt trains for minutes": [
        "two fine-tunings have the same name", "diverged with every learning rate", "race: the small model in",
        "race: all operators", "--steps must be at least 20", "--measure has no recipe",
        "needs models that were fine-tuned on it",
        "time='variance' needs a variance",
    ],
    "only a family of a user can lack it": ["cannot stop at the ends of documents"],
    "every Python has these files": ["no Python file in the standard library"],
    "the folder is moved while a run uses it": ["was moved, removed or replaced while"],
    "the log is restored from a backup of the user": ["the checkpoint counts"],
    "tests/extras/test_advice.py": [
        "{source.what}, less than one batch", "lower eval_batches or the batches of",
        "the validation data has {len(source)}",
    ],
    "an argument or a field is left out, which needs no value": [
        "leave out frozen and drop", "for which the cost of adapters", "leave out mask_BS", "leave out keep_mask",
        "leave out targets", "leave out lengths", "leave out positions",
        "adapters need equal widths", "labels names the classes", "best is not supported together",
        "freezes the rest of the body", "a LoRA or an adapter, not both", "dropout is not supported together",
        "maps of an axis differ between parameters", "encoders do not support for padded",
        "because lm-eval always evaluates without",
    ],
    "tests/extras/test_interop_forms.py": [
        "loop requires the layers", "is not a loop: give", "{why}, but loop is {self.loop}", "loop adds no weights",
        "{name} changes no size, but the target has", "pass its own layer with jaxgrow grow",
    ],
    "tests/models/test_segments.py": ["would count targets of tokens that the mask hides"],
    "tests/operators/test_loops.py": [
        "a loop runs at least one layer at least twice", "dropped='freeze' is not supported for a model with a loop",
        "leave out freeze or loop",
    ],
    "tests/extras/test_token_changes.py": ["is a run whose special tokens get other ids"],
    "tests/extras/test_peft.py": ["the adapter is a DoRA", "use_dora is true"],
    "tests/extras/test_advise.py": ["of the budget would train the small"],
    "tests/extras/test_merge.py": ["To merge them, give both"],
    "tests/train/test_checkpoint.py": ["infinite or negative second moments in"],
    "tests/extras/test_torch_optimizer.py": ["which are in no group", "folders of torch.distributed"],
    "tests/checkpoints/test_layer_lists.py": ["does not read the {name} of"],
    "tests/train/test_mesh.py": [
        "--set mesh.data=1 --set mesh.fsdp", "and activations are not yet counted", "has divided its batches among",
    ],
    "tests/train/test_continue.py": ["started from another model in"],
    "tests/extras/test_learned_maps.py": ["--apply and --out must", "{out} exists already; give"],
    "tests/extras/test_formats.py": ["set data.field"],
    "tests/extras/test_timing.py": ["its phases with a fixed number of steps take", "has the times of another config"],
    "tests/extras/test_adapting.py": ["the model already has an adapter"],
    "the user chooses a task of lm-eval": ["a task of lm-eval (lm-eval ls"],
    "tests/extras/test_harness.py": ["a copy of the dataset {path}"],
}  # fmt: skip
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
    excepted = list(itertools.chain(*EXCEPTIONS.values()))
    known = {case.says for module in MODULES for case in module.CASES}.union(excepted)
    unknown = [
        text
        for text in texts
        if ADVISES.search(re.sub(r"\{(?:[^{}]|\{[^{}]*\})*\}", "{}", text))
        and not any(words in text for words in known)
    ]
    assert unknown == [], "add a case to tests/support/advice_*.py"
    for reason in EXCEPTIONS:
        assert not reason.startswith("tests/") or (ROOT / reason).is_file(), reason
    gone = [words for words in excepted if not any(words in text for text in texts)]
    assert gone == [], "these messages do not exist: delete their exceptions"
