"""Tasks of the lm-evaluation-harness: scores on published files equal the harness's own scores.

The harness computes its scores on the datasets of the Hugging Face hub.
"""

import json
import math
import sys
from types import SimpleNamespace

import jax
import pytest
import runs

from jaxgrow.checkpoints import load, orbax
from jaxgrow.extras.models.generation import generate
from jaxgrow.models import BERTConfig
from train import evaluate as command
from train.common.errors import UserError
from train.extras.evaluation import benchmarks
from train.extras.evaluation.benchmarks import BOOTSTRAP, Benchmarks
from train.extras.evaluation.published import PUBLISHED
from train.extras.evaluation.scoring import Scorer
from train.extras.pretrained import open_text_model
from train.extras.tokenizers.loading import load_tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="pip install -e '.[eval]'")
datasets = pytest.importorskip("datasets")
# The harness emits warnings that the default settings of the tests turn into errors.
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

SIZES = dict(vocab=256, context=64, layers=2, embed=16, heads=2, head_dim=8, mlp=32)
PIECES = ["the cat", "a dog ran", "they", "who goes", "it is late", "we sang", "no one", "a house"]
PAIRS = [
    {"sentence_good": f"{a} is here", "sentence_bad": f"{a} are here", "UID": "x"} for a in PIECES
]
PASSAGES = [
    {"text": f"one two {a} and then {b}"} for a, b in zip(PIECES, PIECES[::-1], strict=True)
]
GOALS = [{"goal": f"Open {a}", "sol1": "pull hard", "sol2": f"push {a}"} for a in PIECES]
SWAGS = [
    {"activity_label": "Run", "ctx_a": f"A man [x] runs {a}.", "ctx_b": "he"}
    | {"ctx": f"A man [x] runs {a}. he", "endings": [a, f"{a} [title] up", "stops", "flies"]}
    | {"label": i % 4}
    for i, a in enumerate(PIECES)
]
CHOICES = [["so", a, "because"] for a in PIECES]
LABELS = ["A", "B", "C"]
OPTIONS = [
    [{"text": text, "label": label} for text, label in zip(choices, LABELS, strict=True)]
    for choices in CHOICES
]
ASKED = [
    {"question": {"stem": f"Why {a}?", "choices": options}, "answerKey": "B"}
    for a, options in zip(PIECES, OPTIONS, strict=True)
]
PAGES = [
    " \n = Robert Boulter = \n \n Robert Boulter is an English actor , known for 1 @,@ 000 plays . \n \n = = Career = = \n"
    ' \n He said " it \'s late " ( twice ) . \n \n',
    " = Du = Fu = \n \n Du Fu = was = a poet : one of the Tang dynasty 's . \n = = = Works = = = \n",
]
BLIMP = ("npi_present_1", "wh_island")
PARTS = [f"blimp_{name}" for name in BLIMP]
TASKS = ["lambada_openai", *PARTS, "piqa", "hellaswag", "arc_easy", "wikitext"]


def lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def published(folder):
    """Write files in the format in which their authors published them."""
    lines(folder / "lambada_test.jsonl", PASSAGES)
    for name in BLIMP:
        lines(folder / "blimp" / f"{name}.jsonl", PAIRS)
    lines(folder / "piqa/valid.jsonl", GOALS)
    (folder / "piqa/valid-labels.lst").write_text("0\n1\n" * 4)
    lines(folder / "piqa/train.jsonl", GOALS[:4])
    (folder / "piqa/train-labels.lst").write_text("1\n0\n" * 2)
    lines(folder / "hellaswag_val.jsonl", SWAGS)
    lines(folder / "arc_easy/ARC-Easy-Test.jsonl", ASKED)
    (folder / "wikitext2").mkdir()
    (folder / "wikitext2" / "wiki.test.raw").write_text("".join(PAGES))
    return folder


def of_the_hub(folder):
    """Write copies of the datasets on the Hugging Face hub."""
    lines(folder / "EleutherAI/lambada_openai/test.jsonl", PASSAGES)
    piqa = folder / "baber/piqa"
    lines(piqa / "validation.jsonl", [g | {"label": i % 2} for i, g in enumerate(GOALS)])
    lines(piqa / "train.jsonl", [g | {"label": 1 - i % 2} for i, g in enumerate(GOALS[:4])])
    swags = [s | {"label": str(s["label"])} for s in SWAGS]
    lines(folder / "Rowan/hellaswag/validation.jsonl", swags)
    asked = [
        {"question": f"Why {a}?", "choices": {"text": texts, "label": LABELS}, "answerKey": "B"}
        for a, texts in zip(PIECES, CHOICES, strict=True)
    ]
    pages = [{"page": PAGES[0].removesuffix("\n")}, {"page": PAGES[1]}]
    for name, split, parts, records in (
        ("nyu-mll/blimp", "train", BLIMP, PAIRS),
        ("allenai/ai2_arc", "test", ["ARC-Easy"], asked),
        ("EleutherAI/wikitext_document_level", "test", ["wikitext-2-raw-v1"], pages),
    ):
        card = "---\nconfigs:\n"
        for part in parts:
            file = f"{part}/{split}.jsonl"
            lines(folder / name / file, records)
            card += f"- config_name: {part}\n  data_files:\n  - {{split: {split}, path: {file}}}\n"
        (folder / name / "README.md").write_text(f"{card}---\n")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Write published files, copies of the hub's datasets, and a PyTorch model."""
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("harness")
    published(folder / "files")
    of_the_hub(folder / "hub")
    sizes = dict(vocab_size=256, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    config = hf.GPT2Config(**sizes, initializer_range=0.3)
    torch.manual_seed(0)
    hf.GPT2LMHeadModel(config).save_pretrained(folder / "model")
    load_tokenizer("bytes").save(str(folder / "model" / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def hflm(home):
    """Return the harness's own model."""
    hf = pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    model = hf.AutoModelForCausalLM.from_pretrained(home / "model")
    tokenizer = hf.AutoTokenizer.from_pretrained(home / "model")
    return HFLM(model, tokenizer=tokenizer, device="cpu", batch_size=8)


def of_hflm(home, monkeypatch, tasks, **settings):
    """Return the harness's own scores on copies of the hub's datasets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "cache")
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    loaded = Benchmarks(home / "hub", few_shot=settings.get("num_fewshot")).load(tasks)
    found = lm_eval.simple_evaluate(
        hflm(home),
        tasks=[task for tasks in loaded.values() for task in tasks],
        task_manager=benchmarks._manager(None),  # a new one would search for all tasks, for 10 s
        bootstrap_iters=BOOTSTRAP,
        **settings,
    )
    return found["results"]


def assert_same(ours, theirs, tasks):
    """Check that accuracies are equal and other scores, or logarithms of perplexities, agree."""
    for task in tasks:
        for metric, value in theirs[task].items():
            if not metric.endswith(",none") or isinstance(value, str):
                continue
            found = ours[task][metric.removesuffix(",none")]
            if "perplexity" in metric and "stderr" not in metric:
                assert math.log(found) == pytest.approx(math.log(value), rel=1e-5), (task, metric)
            else:
                close = value if metric.startswith("acc") else pytest.approx(value, rel=1e-3)
                assert found == close, (task, metric)


def test_numbers_on_published_files_are_those_of_the_harness(home, monkeypatch):
    theirs = of_hflm(home, monkeypatch, TASKS)
    ours = Benchmarks(home / "files").run(open_text_model(home / "model"), TASKS)
    assert_same(ours, theirs, TASKS)
    assert 0 < ours["piqa"]["acc"] < 1 and ours["piqa"]["acc_stderr"] > 0
    assert ours["wikitext"]["word_perplexity"] > 1
    assert ours["piqa"]["files"] == [str(home / "files" / "piqa" / "valid.jsonl")]


def test_few_shots_come_from_the_training_split(home, monkeypatch):
    theirs = of_hflm(home, monkeypatch, ["piqa"], num_fewshot=1)
    ours = Benchmarks(home / "files", few_shot=1).run(open_text_model(home / "model"), ["piqa"])
    assert_same(ours, theirs, ["piqa"])
    assert ours["piqa"]["few_shot"] == 1
    assert len(ours["piqa"]["files"]) == 2
    with pytest.raises(UserError, match=r"hellaswag needs hellaswag_train.jsonl in"):
        Benchmarks(home / "files", few_shot=1).load(["hellaswag"])


def test_log_likelihoods_are_those_of_the_harness(home):
    from train.extras.evaluation.harness import Harness

    ours, theirs = Harness(home / "model"), hflm(home)
    pairs = [("one two", " three"), ("", "the end"), ("a ", "b"), ("x" * 100, " the end")]
    pairs.append(("", "y" * 64))
    asked = [SimpleNamespace(args=pair, arguments=pair) for pair in pairs]
    found = zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True)
    for (a, greedy), (b, likeliest) in found:
        assert a == pytest.approx(b, rel=1e-5) and greedy == likeliest
    texts = [SimpleNamespace(args=(text,)) for text in ("short", "long text " * 30)]
    expected = pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-5)
    assert ours.loglikelihood_rolling(texts) == expected


def test_the_command_prints_metrics_with_their_errors(home, monkeypatch, capsys):
    out = home / "found.json"
    arguments = f"--tasks piqa,wikitext2 --data {home}/files --json {out} --limit 6".split()
    monkeypatch.setattr(sys, "argv", ["evaluate", str(home / "model"), *arguments])
    command.main()
    said, found = capsys.readouterr().out, json.loads(out.read_text())["tasks"]
    for text in (f"{found['piqa']['acc']:.4f}", "acc stderr", "bits per byte"):
        assert text in said
    assert found["wikitext2"]["files"] == [str(home / "files/wikitext2/wiki.test.raw")]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Write definitions of a task and of groups."""
    folder = tmp_path_factory.mktemp("own")
    lines(folder / "mine.jsonl", PAIRS)
    (folder / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'mine.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: ''\ndoc_to_target: 0\n"
        "doc_to_choice: '{{[sentence_good, sentence_bad]}}'\nmetric_list: [{metric: acc}]\n"
    )
    (folder / "inner.yaml").write_text(f"group: inner\ntask: [{PARTS[0]}]\n")
    for name, more in (("piqa", ""), ("hellaswag", "fewshot_split: train, ")):
        task = f"{{task: {name}, {more}num_fewshot: 2}}"
        (folder / f"few_{name}.yaml").write_text(f"group: few_{name}\ntask: [{task}]\n")
    (folder / "outer.yaml").write_text(
        f"group: outer\ntask: [inner, {{task: {PARTS[1]}}}]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: false}]\n"
    )
    return folder


def test_a_task_of_the_users_own_is_run(home, own):
    model = open_text_model(home / "model")

    def accuracy(task, *given, **settings):
        return Benchmarks(*given, **settings).run(model, [task])[task]["acc"]

    blimp = accuracy("blimp_wh_island", home / "files")
    assert accuracy("mine", include=own) == accuracy("mine", home / "files", include=own) == blimp


def test_a_group_may_have_groups(home, own):
    model, both = open_text_model(home / "model"), Benchmarks(home / "files", include=own)
    alone = both.run(model, PARTS)
    found = both.run(model, ["outer"])["outer"]
    scores = [alone[name]["acc"] for name in PARTS]
    assert [found["by"][name]["acc"] for name in PARTS] == scores
    assert found["acc"] == pytest.approx(sum(scores) / 2)


def test_few_shots_of_the_task_itself_come_from_the_training_split(home, own):
    """The control has no examples. Without a training file, they were the evaluated questions."""
    tasks = Benchmarks(home / "files", include=own)
    assert [f.name for f in tasks.files(["few_piqa"])["few_piqa"]] == ["valid.jsonl", "train.jsonl"]
    assert [f.name for f in tasks.files(["piqa"])["piqa"]] == ["valid.jsonl"]
    with pytest.raises(UserError, match=r"hellaswag needs hellaswag_train.jsonl in"):
        tasks.load(["few_hellaswag"])


def test_a_masked_model_scores_pairs_by_pseudo_likelihood(home, tmp_path):
    config = BERTConfig(**SIZES)
    orbax.export_model(tmp_path / "bert", config, jax.tree.map(lambda x: 8 * x, runs.fresh(config)))
    load_tokenizer("bytes").save(str(tmp_path / "bert" / "tokenizer.json"))
    model = open_text_model(tmp_path / "bert")
    scorer, tasks = Scorer(model), Benchmarks(home / "files")

    def scores(name):
        return scorer([scorer.after([], scorer.encode(f" {pair[name]}")) for pair in PAIRS])

    pairs = zip(scores("sentence_good"), scores("sentence_bad"), strict=True)
    right = [good.loss < bad.loss for good, bad in pairs]
    found = tasks.run(model, ["blimp_wh_island"])["blimp_wh_island"]
    assert found["acc"] == sum(right) / len(right)
    with pytest.raises(UserError, match="a masked model has no perplexity of running text"):
        tasks.run(model, ["wikitext"])


def test_it_generates_until_a_text(home):
    from lm_eval.api.instance import Instance

    from train.extras.evaluation.harness import Harness

    harness = Harness(home / "model")

    def several(count, **settings):
        asked = ("one two", {"max_gen_toks": 8} | settings)
        return harness.generate_until([Instance("generate_until", {}, asked, 0)] * count)

    def generated(**settings):
        return several(1, **settings)[0]

    whole = generated()
    [tokens] = generate(*load(home / "model"), [list(b"one two")], max_new=8, end=0)
    assert whole == load_tokenizer("bytes").decode(tokens.tolist())
    assert generated(until=[whole[2]]) == generated(until=whole[2]) == whole.split(whole[2])[0]
    assert generated(do_sample=True, temperature=1e-6) == whole
    assert generated(do_sample=True, temperature=0.0, top_k=5) == whole  # a control of sampling
    for how in ({"temperature": 1.0}, {"top_k": 50}, {"top_k": 0, "top_p": 0.95}):
        assert len({*several(4, do_sample=True, **how)}) > 1
    # More new tokens than the context of 64: half of it is for the prompt, which is not cut.
    [tokens] = generate(*load(home / "model"), [list(b"one two")], max_new=32, end=0)
    assert generated(max_gen_toks=256) == load_tokenizer("bytes").decode(tokens.tolist())


def test_tasks_that_cannot_be_run_are_refused(home):
    for task, settings, says in (
        ("sudoku", {}, "there is no task 'sudoku'"),
        (
            "arc_challenge",
            {},
            r"needs ARC-Challenge-Test.jsonl or .* in .*ai2_arc or .*, or a copy",
        ),
        ("sciq", {}, "sciq needs a copy of the dataset allenai/sciq at .*allenai/sciq; put it"),
        (
            "blimp_wh_island",
            {"few_shot": 2},
            "--few-shot 2 has no effect on blimp_wh_island, because",
        ),
        ("piqa", {"few_shot": -1}, "--few-shot is -1, less than 0"),
        ("piqa", {"limit": 0}, "--limit is 0, less than 1"),
    ):
        with pytest.raises(UserError, match=says):
            Benchmarks(home / "files", **settings).load([task])


@pytest.mark.parametrize(("task", "name", "content", "says"), [
    ("lambada_openai", "lambada_test.jsonl", "{", "line 1 is not JSON"),
    ("lambada_openai", "lambada_test.jsonl", '{"txt": "a b"}', "line 1: text is missing; there are txt"),
    ("lambada_openai", "lambada_test.jsonl", '{"text": "one"}', "line 1 is a single word"),
    ("piqa", "valid.jsonl", '{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}', "the label is 2, not 0 or 1"),
    ("hellaswag", "hellaswag_val.jsonl", json.dumps(SWAGS[0] | {"label": 4}), "the label is '4', but there are 4"),
    ("arc_easy", "ARC-Easy-Test.jsonl", json.dumps(ASKED[0] | {"answerKey": "D"}), "the answer is 'D', but the choices are"),
    ("blimp_wh_island", "wh_island.jsonl", "", "has no records"),
])  # fmt: skip
def test_damaged_files_are_named(tmp_path, task, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        Benchmarks(tmp_path).load([task])


@pytest.mark.slow  # reads the definitions of all tasks
def test_every_published_dataset_is_that_of_a_task():
    manager = benchmarks._manager(None)
    read = {
        (manager.task_index[name].cfg or {}).get("dataset_path") for name in manager.all_subtasks
    }
    assert PUBLISHED.keys() <= read
