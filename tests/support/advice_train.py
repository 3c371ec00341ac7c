"""The messages of `train` that advise something, and how their advice is followed."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import runs
from advice import (
    Case,
    Place,
    changed,
    cli,
    command,
    last,
    part,
    parts,
    settings,
    values_of,
    without,
)
from finetunings import FAMILIES, cola, squad, tuning
from limits import using_limits
from tokenizers import Tokenizer, models

from jaxgrow.models import BERTConfig, LlamaConfig, ViTConfig
from train import generate, pretrain
from train.config.experiment import Experiment, check_experiment, load_experiment
from train.config.overrides import with_overrides
from train.data.text import Data
from train.extras import joining
from train.extras.advice.fits import Measured, fit_savings
from train.extras.evaluation.benchmarks import Benchmarks
from train.extras.fine_tune import Best
from train.extras.images.images import Images
from train.extras.inherit import Inherit
from train.extras.labelled.task import Labelled
from train.extras.modifiers import Rewarm
from train.extras.text.mixing import training_text
from train.plan.methods import Growing, GrowTo, Scratch, TrainStage
from train.state.mesh import Mesh
from train.state.optim import Optim
from train.store.workdir import Workdir

TEXT = "abcd efgh\n" * 40


def read(experiment: Experiment) -> Any:
    """Read the data of an experiment."""
    return experiment.data.sources(experiment.model)


def setting(
    says: str,
    make: Callable[[Place], Experiment],
    chosen: Callable[[Place, str], Any] | str | None = None,
    call: Callable[[Experiment], Any] = read,
) -> Case:
    """A case of an experiment whose settings are changed as a message says.

    Args:
      says: words of the message.
      make: makes the experiment.
      chosen: overrides ``a.b=c`` if the user chooses the values; their settings must stand in the
        message. None: the message names the values as well.
      call: what fails, and succeeds after the change.
    """

    def follows(place: Place, said: str) -> None:
        if chosen is None:
            found = [f"{name}={value}" for name, value in settings(said)]
        else:
            new = chosen if isinstance(chosen, str) else chosen(place, said)
            found = new.format_map(place).split() if isinstance(new, str) else new
            for override in found:
                name = override.partition("=")[0]
                assert name in said or re.search(rf"\b{name.rpartition('.')[2]}\b", said), said
        assert found, f"no setting found in: {said}"
        call(with_overrides(make(place), found))

    return Case(says, lambda place: call(make(place)), follows)


def corpus(copies: int = 4, **files: str | bytes) -> Callable[[Place], Path]:
    """Write copies of each file: ``a_txt`` is written as ``a-0.txt``, ``a-1.txt``, ..."""

    def write(place: Place) -> Path:
        folder = place.folder / "files"
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            for i in range(copies):
                path = folder / name.replace("_", f"-{i}.")
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder

    return write


def of(files: Callable[[Place], Path], model: Any = None, sub: str = "", **data: Any):
    """An experiment on a corpus."""

    def make(place: Place) -> Experiment:
        folder = files(place)
        about = {"source": "text", "valid_fraction": 0.5} | data
        about |= {"path": str(folder / sub), "cache": str(place.folder / "cache")}
        if data.get("valid_path") == "{text}":
            about["valid_path"] = str(place["text"])
        e = runs.experiment(place.folder, data=Data(**about))
        return e if model is None else replace(e, model=model)

    return make


def lines(**fields: Any) -> str:
    return (json.dumps(fields) + "\n") * 20


IDS = np.arange(400, dtype=np.uint16).tobytes()
LOW = (np.arange(400) % 97).astype(np.uint16).tobytes()
SIZES = dict(vocab=256, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=16)
BERT = BERTConfig(**SIZES)
WIDE = replace(runs.MODEL, vocab=512)


def table(place: Place, **columns: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = place.folder / "files"
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return folder


def itself(place: Place) -> Experiment:
    folder = corpus(1, a_txt=TEXT)(place)
    return of(lambda _: folder, valid_path=str(folder / "a-0.txt"))(place)


def escaping(place: Place) -> Path:
    folder = corpus(a_txt=TEXT)(place)
    (place.folder / "outside.md").write_text("---\nconfigs: []\n---\n")
    if not (folder / "README.md").is_symlink():
        (folder / "README.md").symlink_to(place.folder / "outside.md")
    return folder


def plain_tokenizer(file: Path) -> Path:
    file = file.with_suffix(".json")
    Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(file))
    return file


def beginless(place: Place) -> Experiment:
    return of(corpus(a_txt=TEXT), bos=True, tokenizer=str(place["plain"]))(place)


def ids(**changes: Any) -> dict[str, Any]:
    return {"source": "tokens", "tokenizer": "none"} | changes


def only(place: Place, said: str) -> str:
    """The first field that the message lists after ``only``."""
    return "data.field=" + part(r"only (\w+)", said)


DATA = [
    setting("only {', '.join(record) or 'none'}; set data.field", of(corpus(a_jsonl=lines(body=TEXT))), only),
    setting("is not text, but {record[root]}", of(corpus(a_jsonl=lines(text=3, body=TEXT))), "data.field=body"),
    setting("has no field {field}, only", of(corpus(a_csv="body,x\n" + "abcd efgh,1\n" * 40), sub="a-0.csv"), only),
    setting("only {_listed(schema.names)}", of(lambda p: table(p, body=[TEXT] * 9)), only),
    setting("set data.ids to the type", of(corpus(a_bin=LOW + b"\0"), **ids()), "data.ids=uint8"),
    setting("only {', '.join(record)[:200]", of(corpus(a_jsonl=lines(ids=[1, 2] * 40)), **ids()), only),
    setting("is not a list of token ids", of(corpus(a_jsonl=lines(input_ids="a", ids=[1, 2] * 40)), **ids()),
        "data.field=ids"),
    setting("but the ids of data.tokenizer=", of(corpus(a_bin=IDS), WIDE, **ids(tokenizer="bytes")), "data.tokenizer=none"),
    setting("but model.vocab is {vocab}; raise model.vocab to {text", of(corpus(a_bin=IDS), **ids())),
    setting("a masked model needs the mask", of(corpus(a_bin=LOW), BERT, **ids()), "data.tokenizer=bytes"),
    setting("data.whole_words: the tokenizer", of(corpus(a_txt=TEXT), BERT, whole_words=True), "data.whole_words=false"),
    setting("because the training text is one document", of(corpus(1, a_txt=TEXT), attend="document", valid_path="{text}"),
        "data.attend=row"),
    setting("every file of data.path=", itself, "data.valid_path={text}"),
    setting("has no training file", of(corpus(validation_txt=TEXT, valid_txt=TEXT))),
    setting("there is no corpus at", of(corpus(a_txt=TEXT), sub="elsewhere"), "data.path={more}"),
    setting("files are read if data.path names", of(corpus(1, a_md=TEXT), valid_path="{text}"), "data.path={files}/a-0.md"),
    setting("; or set data.splits=ignore", of(escaping)),
    setting("has no token that begins texts", beginless, "data.bos=auto"),
    setting("for validation; give more text", of(corpus(1, a_txt=TEXT)), "data.valid_path={text}"),
    setting("data.source=tokens has no text", of(corpus(a_bin=LOW), **ids()),
        "data.source=text data.path={more} data.tokenizer=bytes", lambda e: list(training_text(e.data))),
]  # fmt: skip


def more(folder: Path) -> Path:
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text(TEXT)
    return folder


def text_file(file: Path) -> Path:
    file.with_suffix(".txt").write_text(TEXT)
    return file.with_suffix(".txt")


# --- fields that do not fit together ---


def of_class(says: str, kind: type, wrong: dict[str, Any], **fix: Any) -> Case:
    """A case of a dataclass that refuses its fields; ``fix``: other values, None leaves one out."""

    def follows(place: Place, said: str) -> None:
        for name, value in fix.items():
            assert name in said or str(value) in said, said
        kind(**{k: v for k, v in (wrong | fix).items() if v is not None})

    return Case(says, lambda place: kind(**wrong), follows)


TOKENS, TEXTS = {"source": "tokens", "path": "x"}, {"source": "text", "path": "x"}
CLASSES = [
    of_class("needs data.path, a file or folder of", Data, {"source": "text"}, path="x"),
    of_class("data.tokenizer=none is for", Data, TEXTS | {"tokenizer": "none"}, tokenizer="bytes"),
    of_class("data.bos has no effect on", Data, TOKENS | {"bos": True}, bos="auto"),
    of_class("data.bos=true needs a tokenizer", Data, TEXTS | {"bos": True}, bos="auto"),
    of_class("data.ids is for data.source=tokens", Data, TEXTS | {"ids": "uint32"}, ids=None),
    of_class("needs data.name, such as wiki40b", Data, {"source": "tfds"}, name="wiki40b/en"),
    of_class("can name several paths only", Data, {"path": ("x", "y")}, source="text"),
    of_class("needs data.path: a folder with a folder", Images, {"source": "folder"}, path="x"),
    of_class("needs data.path: the folder of the four", Images, {"source": "idx"}, path="x"),
    of_class("needs data.name, such as imagenet", Images, {"source": "tfds"}, name="imagenet2012"),
    of_class("mesh.gradients=step supports", Mesh, {"gradients": "step", "tensor": 2}, gradients="layer"),
    of_class("base (CompleteP) is supported", Optim, {"name": "sgd", "base": runs.SMALL}, base=None),
    of_class("noise breaks the symmetry", GrowTo, {"fresh": True, "noise": 20.0}, noise=None),
]  # fmt: skip


# --- mixtures of texts ---


Pairs: TypeAlias = list[tuple[Any, Any]]


def of_paths(
    says: str, wrong: Pairs, right: Callable[[Pairs, str], Pairs], name: str = "path"
) -> Case:
    """A case of the pairs of ``data.path`` or ``data.valid_path``; ``right`` corrects them.

    ``@`` stands for the folder of the files.
    """
    files = corpus(1, a_txt=TEXT, b_txt=TEXT.upper(), c_txt="abc", d_txt=TEXT)

    def call(place: Place, change: Callable[[Pairs], Pairs]) -> None:
        at = f"{files(place)}/"

        def written(pairs: Pairs) -> Pairs:
            texts = ([x.replace("@", at) if isinstance(x, str) else x for x in y] for y in pairs)
            return [(first, second) for first, second in texts]

        paths: dict[str, Any] = {"path": f"{at}a-0.txt", "valid_path": str(place["text"])}
        paths[name] = written(change(written(wrong)))
        data = Data("text", **paths, cache=str(place.folder / "cache"))
        read(runs.experiment(place.folder, data=data))

    def follows(place: Place, said: str) -> None:
        assert f"data.{name}" in said, said
        call(place, lambda pairs: right(pairs, said))

    return Case(says, lambda place: call(place, list), follows)


def left_out(said_as: str) -> Callable[[Pairs, str], Pairs]:
    """Leave out the path that a pattern finds in the message; the first one gets its weight."""

    def right(pairs: Pairs, said: str) -> Pairs:
        assert re.search("leave (it |)out|give it once", said), said
        gone = [pair for pair in pairs if pair[0].endswith(part(said_as, said))]
        assert len(gone) == 1, said
        (path, weight), *others = [pair for pair in pairs if pair not in gone]
        return [(path, weight + gone[0][1] * ("the sum" in said)), *others]

    return right


MIXTURES = [
    of_paths("data.path: the weight of", [("@a-0.txt", 2), ("@b-0.txt", 0)], left_out(r"weight of (\S+) is")),
    of_paths("give it once, with the sum", [("@a-0.txt", 2), ("@./a-0.txt", 1), ("@b-0.txt", 1)],
        left_out(r" and (\S+), which")),
    of_paths("names the same text twice", [("@a-0.txt", 2), ("@d-0.txt", 1), ("@b-0.txt", 1)], left_out(r"and in (\S+):")),
    of_paths("give more text, or leave it out", [("@a-0.txt", 2), ("@c-0.txt", 1)], left_out(r"text of (\S+) in")),
    of_paths("twice, in {other}", [("@[ab]-0.txt", 2), ("@a-0.txt", 1)], left_out(r"and in (\S+):")),
    of_paths("that have no file in common", [("@[ab]-0.txt", 2), ("@a-0.txt", 1)],
        lambda pairs, said: [("@b-0.txt", 2), pairs[1]]),
    of_paths("data.path has no weight", [("@a-0.txt", 2), ("@b-0.txt", None)],
        lambda pairs, said: [(path, weight or 1) for path, weight in pairs] if "give one to each" in said else pairs),
    of_paths("no file matches", [("@*.jsonl", 2), ("@b-0.txt", 1)], lambda pairs, said: [("@**/a*.txt", 2), pairs[1]]),
    of_paths("data.valid_path needs a name", [("my set", "@b-0.txt")],
        lambda pairs, said: [(part(r"\{(\w+): ", said), pairs[0][1])], "valid_path"),
    of_paths("data.valid_path has a name twice", [("a", "@b-0.txt"), ("a", "@d-0.txt")],
        lambda pairs, said: [pairs[0], ("another", pairs[1][1])] if "another name" in said else pairs, "valid_path"),
    Case("can be a mixture of several paths", lambda p: of_images(square, path=[f"{p.folder}/a", "b"])(p),
        lambda p, said: read(of_images(square)(p))),
]  # fmt: skip


# --- methods ---

COPIES = ("expert_copies",)
METHODS = [
    Case("cannot be divided into", lambda p: runs.experiment(p.folder, accumulate=3),
        lambda p, said: runs.experiment(p.folder, accumulate=3, batch=int(part(r"batch to a multiple of (\d+)", said)))),
    Case("cannot be halved", lambda p: runs.experiment(p.folder, ramp=(0.1, 0.2, 0.3, 0.4)),
        lambda p, said: runs.experiment(p.folder, ramp=(0.1, 0.2, 0.3, 0.4),
        batch=int(part(r"batch to a multiple of (\d+)", said)))),
    Case("copies by utility differ", lambda p: GrowTo(by=COPIES, utility=2, noise=5.0),
        lambda p, said: [GrowTo(by=COPIES, **{name: 2}) for name in parts(r"leave out (\w+) or (\w+)", said)]),
    Case("set steps, or epochs", lambda p: runs.experiment(p.folder, steps=0),
        lambda p, said: runs.experiment(p.folder, steps=1, name=part("set (steps)", said))),
    Case("cannot take", lambda p: read(runs.experiment(p.folder, model=VIT)),
        lambda p, said: read(of_images(square)(p))),
]  # fmt: skip


# --- images ---


def pictures(place: Place, *sizes: tuple[int, int]) -> Path:
    from PIL import Image

    folder = place.folder / "pictures"
    for label in "ab":
        (folder / label).mkdir(parents=True, exist_ok=True)
        for i, (width, height) in enumerate(sizes * 4):
            Image.new("RGB", (width, height), (i * 9, 0, 0)).save(folder / label / f"{i}.png")
    return folder


def square(place: Place) -> Path:
    return pictures(place, (8, 8))


def idx_files(place: Place, side: int = 8, other: int = 8) -> Path:
    folder = place.folder / "idx"
    folder.mkdir(exist_ok=True)
    for name, count in (("train", 32), ("t10k", 16)):
        pixels = bytes([0, 0, 8, 3]) + np.array([count, side, other], ">i4").tobytes()
        labels = bytes([0, 0, 8, 1]) + np.array([count], ">i4").tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(pixels + bytes(count * side * other))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels + bytes(range(count)))
    return folder


VIT = ViTConfig(
    image=8, patch=4, channels=3, classes=2, layers=2, embed=8, heads=2, head_dim=4, mlp=16
)


def of_images(files: Callable[[Place], Path], model: Any = VIT, **data: Any):
    def make(place: Place) -> Experiment:
        about = {"source": "folder", "path": str(files(place)), "cache": str(place.folder / "c")}
        return runs.experiment(place.folder, data=Images(**about | data), model=model)

    return make


IMAGES = [
    setting("numbers, but the images have", of_images(square, mean=(0.5, 0.5), std=(0.5, 0.5)),
        lambda p, said: [f"data.mean=({'0.5,' * 3})", "data.std=(0.5,0.5,0.5)"] if "have 3 channels" in said else []),
    setting("{here}, which is not a square", of_images(lambda p: pictures(p, (8, 9))), "data.size=8"),
    setting("{here}, but {first}", of_images(lambda p: pictures(p, (8, 8), (9, 9))), "data.size=8"),
    setting("pixels, which is not a square", of_images(lambda p: idx_files(p, 8, 9), replace(VIT, channels=1, classes=32),
        source="idx"), "data.size=8"),
    setting("there are no images at", of_images(lambda p: p.folder / "none"),
        lambda p, said: f"data.path={square(p)}"),
    setting("data.path should name the", of_images(lambda p: p.folder, replace(VIT, channels=1, classes=32), source="idx"),
        lambda p, said: f"data.path={idx_files(p)}"),
]  # fmt: skip


# --- labelled texts ---


def of_task(make: Callable[[Place], Labelled], model: Any = None):
    def experiment(place: Place) -> Experiment:
        classes = {} if model else {"head": "classes"}
        own = replace(model or FAMILIES["gpt2"], **classes)
        return runs.experiment(place.folder, data=make(place), model=own)

    return experiment


BYTES: dict[str, Any] = {"tokenizer": "bytes", "length": 16}


def sentences(place: Place, **changes: Any) -> Labelled:
    return Labelled("cola", str(cola(place.folder / "cola")), **BYTES | changes)


def own_table(place: Place, rows: str, **changes: Any) -> Labelled:
    (place.folder / "table.csv").write_text(rows)
    changes = BYTES | {"text": ("text",)} | changes
    return Labelled("table", str(place.folder / "table.csv"), **changes)


def many(place: Place) -> Labelled:
    rows = "".join(f"t{i},{i / 7}\n" for i in range(60))
    return own_table(place, f"text,label\n{rows}")


def good_table(place: Place) -> Path:
    (place.folder / "good.csv").write_text(ROWS)
    return place.folder / "good.csv"


def without_row(place: Place, said: str) -> None:
    line = int(part(r"line (\d+) has no label", said))
    rows = (ROWS + "cc,\n").splitlines(keepends=True)
    read(of_task(lambda p: own_table(p, "".join(rows[: line - 1] + rows[line:])))(place))


def questions(place: Place) -> Labelled:
    folder = squad(place.folder / "squad")
    for name in ("train", "dev"):
        file = folder / f"{name}-v1.1.json"
        content = json.loads(file.read_text())
        question = content["data"][0]["paragraphs"][0]["qas"][0]
        question["answers"], question["is_impossible"] = [], True
        file.write_text(json.dumps(content))
        shutil.copy(file, folder / f"{name}-v2.0.json")
    return Labelled("squad1", str(folder), **BYTES)


def rewarmed(name: str, warmup: int = 0) -> Callable[[Place], Experiment]:
    def make(place: Place) -> Experiment:
        stage = TrainStage(0.5, modifiers=(Rewarm(),))
        to = GrowTo((stage,), by=runs.DOUBLED, moments="asymmetric")
        optim = Optim(name=name, peak_lr=1e-2, warmup=warmup)
        method = Growing(runs.SMALL, TrainStage(0.5), (to,))
        return runs.experiment(place.folder, method=method, optim=optim)

    return make


def fine_tuned(place: Place) -> Experiment:
    e = tuning(cola(place.folder / "cola")).of(place["reading"], 1e-2, 0)
    return replace(e, optim=replace(e.optim, base=runs.SMALL))


ROWS = "text,label\n" + "aa,x\nbb,y\n" * 30
TASKS = [
    setting("the largest id of the tokenizer is {self.vocab",
        of_task(sentences, replace(FAMILIES["gpt2"], vocab=200, head="classes"))),
    setting("as it was published, and name the folder of", of_task(lambda p: Labelled("cola", str(p.folder), **BYTES)),
        lambda p, said: f"data.path={cola(p.folder / 'published')}"),
    setting("has no answer, as in version 2", of_task(questions, replace(FAMILIES["bert"], head="spans"))),
    Case("delete the row", lambda p: read(of_task(lambda p: own_table(p, ROWS + "cc,\n"))(p)), without_row),
    setting("set data.label, or", of_task(many, replace(FAMILIES["gpt2"], head="classes", classes=1)), "data.number=true"),
    setting("has no rows; name another table", of_task(lambda p: own_table(p, "text,label\n", labels=("x", "y"))),
        lambda p, said: f"data.path={good_table(p)}"),
    setting("name a file of validation rows", of_task(lambda p: own_table(p, "text,label\na,x\n", labels=("x", "y"))),
        lambda p, said: f"data.valid_path={good_table(p)}"),
    setting("data.path names the labelled rows", of_task(lambda p: Labelled("table", str(p.folder / "none.csv"), **BYTES)),
        lambda p, said: f"data.path={good_table(p)}"),
    setting("has no split train", of_task(lambda p: Labelled("table", str(p["more"]), **BYTES)),
        lambda p, said: f"data.path={good_table(p)}"),
    setting("lower data.length to", of_task(lambda p: sentences(p, length=64))),
    setting("two texts and the tokens around", of_task(lambda p: sentences(p, length=2)),
        lambda p, said: f"data.length={part('at least ([0-9]+)', said)}"),
    setting("needs a model with head=", of_task(sentences, FAMILIES["gpt2"]),
        lambda p, said: [f"model.{n}={v}" for n, v in re.findall(r"(head|classes)=(\w+)", said.partition(", but")[0])]),
]  # fmt: skip


# --- settings of an experiment ---


def of_experiment(**changes: Any) -> Callable[[Place], Experiment]:
    return lambda place: runs.experiment(place.folder, **changes)


def loaded(place: Place, overrides: list[str], **options: Any) -> Experiment:
    """Load a config file with overrides."""
    return load_experiment(
        runs.script(place.folder, runs.experiment(place.folder)), overrides, **options
    )


def of_text(says: str, fix: Callable[[str], list[str]], overrides: str) -> Case:
    """A case of a config file with overrides; ``fix``: the overrides after the advice."""
    return Case(
        says,
        lambda place: loaded(place, overrides.split(), corpus=False).plan,
        lambda place, said: loaded(place, fix(said)),
    )


def steps_of(said: str) -> list[str]:
    return [part(r"CONFIG:(steps=[0-9_]+)", said)]


MIXTURE = LlamaConfig(**SIZES, kv_heads=2, experts=2, active=1)
MASKED = Growing(replace(BERT, layers=1, masked=0.3))
CONFIGS = [
    of_text("positions are not divisible by the", lambda said: ["mesh.context=2"], "mesh.context=3"),
    of_text("pmap replicates the model", lambda said: ["mesh.fsdp=2", *(f"{n}={v}" for n, v in settings(said))],
        "parallel=pmap mesh.fsdp=2"),
    Case("both set the length of the run", lambda p: runs.experiment(p.folder, epochs=2.0),
        lambda p, said: [runs.experiment(p.folder, **{n: eval(v)}, **({"epochs": 2.0} if n == "steps" else {}))
            for n, v in re.findall(r"(steps|epochs)=(0|None)", said)]),
    of_text("the number of steps follows from {why}", steps_of, "epochs=2"),
    Case("which cannot be read", lambda p: loaded(p, ["epochs=2", f"data.path={p.folder / 'none'}"]),
        lambda p, said: loaded(p, steps_of(said))),
    setting("trained on the same samples, with", of_experiment(model=BERT, method=MASKED),
        lambda p, said: [f"method.small.masked={part('model.masked=([0-9.]+)', said)}"] if "masked" in said else [],
        check_experiment),
    setting("shards the experts, which needs", of_experiment(model=MIXTURE, mesh=Mesh(expert=2)), "mesh.expert=1",
        check_experiment),
    setting("not divisible by the {devices} devices of mesh.expert",
        of_experiment(model=replace(MIXTURE, capacity=1.25), mesh=Mesh(expert=3)), "mesh.expert=2", check_experiment),
    of_text("--set takes a.b=c", lambda said: ["steps=4"], "steps"),
    of_text("--set {name}: {error}", lambda said: [f"{part('did you mean ([a-z_.]+)', said)}=0.1"],
        "optim.peak_rl=0.1"),
    Case("is not an index from", lambda p: with_overrides(of_experiment(method=runs.VCYCLE)(p), ["method.up.9.lr=2"]),
        lambda p, said: with_overrides(of_experiment(method=runs.VCYCLE)(p),
            [f"method.up.{part('from 0 to ([0-9]+)', said)}.lr=2"])),
    of_text("--set {name}: {_wrong_type", lambda said: ["steps=4"], "steps=four"),
    of_text("must be at least 1", lambda said: ["batch=8"], "batch=0"),
    setting("rewarm uses the step count", rewarmed("sgd"), "optim.name=adamw", check_experiment),
    setting("rewarm warms up the new entries", rewarmed("adamw", 2), "optim.warmup=0", check_experiment),
    setting("that a growth has just made, but no growth",
        of_experiment(method=Scratch((Rewarm(),)), optim=Optim(warmup=0)), "method.rewarm=None", check_experiment),
    setting("optim.base is for pre-training", fine_tuned, "optim.base=None", check_experiment),
    setting("has a context of {self.small.length}", of_experiment(method=Inherit(replace(runs.SMALL, context=4))),
        "method.small.context=8", check_experiment),
]  # fmt: skip


# --- commands ---


def half_run(folder: Path) -> Path:
    home = folder.with_name("of config")  # with the same corpus
    home.mkdir(exist_ok=True)
    runs.killed(runs.experiment(home, checkpoint_every=2), folder, 4)
    return folder


def run_folder(folder: Path) -> Path:
    e = runs.experiment(folder.with_name("of run"), checkpoint_every=4, steps=4, name="tiny")
    pretrain.run_experiment(e, folder)
    return folder


def config(file: Path) -> Path:
    folder = file.with_name("of config")
    folder.mkdir(exist_ok=True)
    made = Path(runs.script(folder, runs.experiment(folder, steps=2, name="tiny")))
    return made.rename(file.with_suffix(".py"))


ASK = "train.generate {reading} --prompt ab --max-new 2"
PRETRAIN = "train.pretrain {config} --workdir {new}"
COMMANDS = [
    cli("nor vocab.json and merges.txt", ASK.replace("reading", "bare"), "--tokenizer bytes"),
    cli("--samples is {a.samples}", f"{ASK} --samples 0", values_of(r"at least (\d)", "--samples")),
    cli("without --temperature gives", f"{ASK} --samples 2", values_of(r"such as (\d)", "--temperature")),
    cli("has no effect without --temperature", f"{ASK} --seed 3", values_of(r"such as (\d)", "--temperature")),
    cli("remove its beginning with --cut", f"{ASK.replace('ab', 'a' * 30)}", "--cut"),
    cli("--stream prints one text", f"{ASK} --stream --json",
        lambda words, said: (without(words, "--json") if "without --samples and --json" in said else words)),
    cli("no chat template", f"{ASK} --chat"),
    cli("{option} names no {kind}", "train.evaluate {reading} --tasks ,", "--tasks {text}"),
    cli("not between 1 and the context", "train.evaluate {reading} --tasks {text} --stride 99",
        values_of(r"context of (\d+)", "--stride")),
    cli("nothing is downloaded: put it", "train.evaluate {reading} --tasks bits_per_byte --data {new}", "--data {more}"),
    cli("alone need", "train.tokenizer {config} --vocab 9 --out {out}.json", values_of(r"alone need (\d+)", "--vocab")),
    cli("the corpus is too small for", "train.tokenizer {config} --vocab 99999 --out {out}.json",
        values_of(r"gives only (\d+)", "--vocab")),
    cli("{text} exists already", "train.tokenizer {config} --vocab 260 --out {text}", "--out {out}.json"),
    cli("--profile must be", f"{PRETRAIN} --profile -1", values_of(r"(\d) or more", "--profile"), slow=True),
    cli("is also the folder of the new run", "train.pretrain {config}:steps=8 --workdir {half} --from {half}",
        "--workdir {new}"),
    cli("contains a run of another config", "train.pretrain {config}:batch=4 --workdir {copied}", "--workdir {new}",
        slow=True),
    cli("which a run would replace", "train.pretrain {config} --workdir {reading}", "--workdir {new}", slow=True),
    cli("--set with a field and values", "train.sweep {config} --workdir {new}",
        lambda words, said: [*words, "--set", part(r"such as (\S+)", said)], slow=True),
    cli("--halving takes increasing", "train.sweep {config} --set optim.peak_lr=1e-2,2e-2 --workdir {new} "
        "--halving 0.5,0.25 --set steps=20", values_of(r"such as ([0-9.,]+),", "--halving"), slow=True),
    cli("has no effect without a task with a name", "train.compare {config} --data {more} --workdir {new}",
        lambda words, said: without(words, "--data") if "leave out --data" in said else words, slow=True),
    cli("two runs have the same name", "train.compare {config} {config} --workdir {new}",
        lambda words, said: [*words[:2], words[2] + part(r"CONFIG(:name=\w+)", said), *words[3:]], slow=True),
    cli("sets seed={experiment.seed}", "train.compare {config}:seed=3 --workdir {new}",
        lambda words, said: [*(w.replace(":seed=3", "") for w in words), *parts(r"(--seeds) (\d+)", said)], slow=True),
    cli("{option} takes fractions", "train.compare {config} --frontier 2 --workdir {new}", "--frontier 0.5", slow=True),
    cli("settings without a fraction", "train.compare {config} --frontier :optim.peak_lr=1e-3 --workdir {new}",
        lambda words, said: [w.replace(":optim", part(r"write ([0-9.]+):", said) + ":optim") for w in words], slow=True),
    cli("--seeds needs at least one", "train.compare {config} --seeds , --workdir {new}",
        values_of(r"such as (\d),", "--seeds"), slow=True),
    cli("--seeds takes numbers", "train.compare {config} --seeds -1 --workdir {new}", values_of(r"between (\d)", "--seeds"),
        slow=True),
    cli("more than once: a repeated", "train.compare {config} --seeds 1,1 --workdir {new}",
        values_of(r"names (\d)", "--seeds"), slow=True),
    cli("must be greater than 0 and at most 1", "train.preflight {config} --on cpu:1 --utilisation 2",
        values_of(r"at most (\d)", "--utilisation"), slow=True),
    cli("--on must be kind:size", "train.preflight {config} --on cpu:0", last(r"(cpu:\d)"), slow=True),
    cli("--write takes the name", "train.advise {config} --write advised.txt", "--write {new}.py", slow=True),
    cli("forecasts and pilots are for batches", "train.advise {config}:ramp=0.5",
        lambda words, said: [w.replace("ramp=0.5", part(r"set (ramp=\(\));", said)) for w in words], slow=True),
    cli("--budget must be between", "train.advise {config} --budget 1", values_of(r"one step, ([0-9.e+]+),", "--budget")),
    cli("--at takes parameters", "train.scaling scratch={comparison} scratch={bigger} --at 5",
        values_of(r"such as ([0-9e:]+),", "--at")),
    cli("is not RUN=FILE", "train.scaling {comparison} scratch={bigger}",
        lambda words, said: [words[0], f"scratch={words[1]}", words[2]]),
]  # fmt: skip


def quoted(place: Place, cell: str, record: int) -> None:
    rows = f"body\n{cell}\n" + "abcd efgh\n" * 40
    make = of(corpus(a_csv=rows), sub="a-0.csv", field="body")
    with using_limits(record=record):
        read(make(place))


LONG = "abcd " * 200
SPLIT = f'"{"abcd efgh" * 35}\n{"abcd efgh" * 35}\n{"abcd efgh" * 35}"'


def stdin(lines: str) -> Callable[[Place], None]:
    def ask(place: Place) -> None:
        before, sys.stdin = sys.stdin, io.StringIO(lines)
        try:
            command(*place.words(ASK.replace("ab", "-")))
        finally:
            sys.stdin = before

    return ask


def linked(place: Place) -> None:
    if not place["own"].exists():
        (place["own"] / "other").mkdir(parents=True)
        (place["own"] / "checkpoints").symlink_to(place["own"] / "other")
    command(*place.words("train.pretrain {config} --workdir {own}"))


def locked(place: Place) -> None:
    with Workdir(place["own"]).alone():
        command(*place.words("train.pretrain {config} --workdir {own}"))


def elsewhere(place: Place, said: str) -> None:
    assert "--workdir" in said
    command(*place.words(PRETRAIN))


def other_data(place: Place) -> None:
    experiment = runs.experiment(place.folder, checkpoint_every=2)  # writes the corpus
    runs.killed(experiment, place["own"], 2)
    with (place.folder / "corpus" / "0.txt").open("a") as file:
        file.write("more")
    pretrain.run_experiment(experiment, place["own"])


def restored_data(place: Place, said: str) -> None:
    assert "restore the original data" in said
    pretrain.run_experiment(runs.experiment(place.folder, checkpoint_every=2), place["own"])


def smaller_is_better(place: Place, said: str) -> None:
    [by] = re.findall(r"best\.by=(\w+)", said)
    assert Best(by).better(1.0, 2.0)


def counted(place: Place, context: int) -> None:
    model = replace(FAMILIES["gpt2"], head="classes", context=context)
    check_experiment(runs.experiment(place.folder, model=model, data=sentences(place, length=16)))


def compared(row: dict[str, Any]) -> Callable[[Path], Path]:
    def make(file: Path) -> Path:
        about = {"run": "scratch", "parameters": 1e9, "saved_frontier": [0.1, 0.2, 0.15]}
        about |= {"tokens_per_parameter": 20.0, "below_frontier": [False] * 3, "seeds": [0, 1, 2]}
        file.write_text(json.dumps({"rows": [about | row]}))
        return file

    return make


SCALING = "train.scaling scratch={comparison} scratch={bigger}"
OTHERS = [
    Case("correct the quotes of the row, or", lambda p: quoted(p, SPLIT, 600),
        lambda p, said: quoted(p, SPLIT, int(part(r"--limits record=(\d+)", said)))),
    Case("raise it, such as with --limits", lambda p: quoted(p, LONG, 600),
        lambda p, said: quoted(p, LONG, int(part(r"--limits record=(\d+)", said)))),
    Case("stdin has no lines", stdin(""), lambda p, said: stdin("ab\n")(p)),
    Case("the lines are not UTF-8", lambda p: not_utf8(p, b"caf\xe9\n"),
        lambda p, said: not_utf8(p, b"caf\xe9\n".decode("latin-1").encode())),
    Case("{prompt} is not UTF-8", lambda p: generate._check_prompt("caf\udce9"),
        lambda p, said: generate._check_prompt(b"caf\xe9".decode("latin-1"))),
    Case("has no metrics besides the loss", lambda p: Data().scores(p, p, p), smaller_is_better),
    Case("is a link, which a run does not", linked, elsewhere),
    Case("another process uses", locked, elsewhere),
    Case("--few-shot is", lambda p: Benchmarks(few_shot=-1).load([]),
        lambda p, said: Benchmarks(few_shot=int(part(r"less than (\d)", said))).load([]), slow=True, needs="lm_eval"),
    Case("--limit is", lambda p: Benchmarks(limit=0).load([]),
        lambda p, said: Benchmarks(limit=int(part(r"less than (\d)", said))).load([]), slow=True, needs="lm_eval"),
    Case("was started with other data", other_data, restored_data, slow=True),
    Case("is counted with", lambda p: counted(p, 8), lambda p, said: counted(p, int(part(r"data.length=(\d+)", said)))),
    cli("the run in {workdir.folder} has begun", "train.pretrain {config}:steps=8 --workdir {half} --from {copied}",
        "--workdir {new}"),
    cli("give an earlier checkpoint as RUN@STEP", "train.pretrain {config}:steps=2 --from {half}@4 --workdir {new}",
        changed("an earlier checkpoint as RUN@STEP", "@4", "@2")),
    cli("set model as in that run", "train.pretrain {config}:steps=8:model.mlp=8 --from {half} --workdir {new}",
        changed("set model as in that run", ":model.mlp=8", "")),
    cli("has the optimizer state of another optimizer",
        "train.pretrain {config}:steps=8:optim.name=sgd --from {copied}@4 --workdir {new}",
        changed("set optim.name as in that run", ":optim.name=sgd", "")),
    cli("has no average of its weights", "train.pretrain {config}:steps=8:optim.ema=0.5 --from {copied}@4 --workdir {new}",
        lambda words, said: [w.replace("optim.ema=0.5", part(r"set (\S+),", said)) for w in words]),
    Case("does not fit {len(devices)} devices", lambda p: Mesh(data=3).over(jax.devices()),
        lambda p, said: Mesh(data=int(part(r"fit (\d)", said))).over(jax.devices())),
    Case("belong together: give all three", lambda p: joining._check("a:1", None, 0),
        lambda p, said: [joining._check("a:1", 1, 0), joining._check(None, None, None)]),
    Case("must be HOST:PORT", lambda p: joining._check("a", 1, 0), lambda p, said: joining._check("a:1", 1, 0)),
    Case("--process must be between", lambda p: joining._check("a:1", 2, 2),
        lambda p, said: joining._check("a:1", 2, int(part(r"and (\d)", said)))),
    cli("--at asks for", f"{SCALING} --at 5e9:50",
        lambda words, said: [*words[:-1], "5e9:" + part(r"comparisons have (\S+),", said)]),
    Case("no comparison has several seeds", lambda p: fit_savings([]), lambda p, said: fit_savings([
        Measured((x, 20.0), (0.1, 0.2, 0.15)[: len(part(r"--seeds ([0-9,]+)", said).split(","))], 0)
        for x in (1e9, 4e9)])),
    cli("does not have a saving against", "train.scaling scratch={no_saving} scratch={bigger}",
        changed("compare with --frontier", "no_saving", "comparison")),
    cli("every run of the baseline", "train.compare {config}:optim.peak_lr=1e38 --workdir {new}",
        changed("lower its optim.peak_lr", "1e38", "1e-3"), slow=True),
    cli("such as CONFIG:batch=8", "train.compare {config} {config}:name=b:batch=4 --workdir {new}",
        changed(":eval_batches=", "batch=4", "batch=4:eval_batches=4"), slow=True),
    cli("a sweep takes one batch", "train.sweep {config} --set batch=4,8 --workdir {new}",
        changed("sweep the settings of each batch", "batch=4,8", "batch=4"), slow=True),
]  # fmt: skip


def not_utf8(place: Place, content: bytes) -> None:
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(content), "utf-8")
    try:
        generate._stdin()
    finally:
        sys.stdin = before


MAKERS = {
    "more": more,
    "text": text_file,
    "plain": plain_tokenizer,
    "config": config,
    "copied": run_folder,
    "half": half_run,
    "comparison": compared({}),
    "bigger": compared({"parameters": 4e9}),
    "no_saving": compared({"saved_frontier": None}),
}
CASES = [*DATA, *CLASSES, *MIXTURES, *METHODS, *IMAGES, *TASKS, *CONFIGS, *COMMANDS, *OTHERS]
