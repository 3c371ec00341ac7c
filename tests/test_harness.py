"""The lm-evaluation-harness runs on our models, and its numbers are ours."""

import json
import math

import jax
import pytest
import runs

from jaxgrow.interop import orbax
from jaxgrow.models import GPT2Config
from train.data.text import tokenizer
from train.state.opened import opened
from train.tasks.scoring import Scorer
from train.tasks.zero_shot import evaluate

lm_eval = pytest.importorskip("lm_eval", reason="pip install -e '.[eval]'")
pytestmark = pytest.mark.filterwarnings("default")  # the harness has some of its own

CONFIG = GPT2Config(vocab=256, context=32, layers=2, embed=16, heads=2, head_dim=8, mlp=32)
PASSAGES = [{"text": "one two three"}, {"text": "a b c"}, {"text": "so it ends with the end"}]
PIECES = [
    {"sentence_good": "the cat is", "sentence_bad": "the cat are"},
    {"sentence_good": "we go", "sentence_bad": "we goes"},
]
GOALS = [{"goal": "Open", "sol1": "pull hard", "sol2": "push", "label": i} for i in (0, 1, 1)]
TEXT = "A text of several windows, each of which the model sees alone: one after the other, until it ends."
SETTINGS = {
    "lambada": """
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list: [{metric: perplexity, aggregation: perplexity}, {metric: acc, aggregation: mean}]
""",
    "blimp": """
output_type: multiple_choice
doc_to_text: ""
doc_to_target: 0
doc_to_choice: "{{[sentence_good, sentence_bad]}}"
metric_list: [{metric: acc, aggregation: mean}]
""",
    "piqa": """
output_type: multiple_choice
doc_to_text: "Question: {{goal}}\\nAnswer:"
doc_to_target: label
doc_to_choice: "{{[sol1, sol2]}}"
metric_list: [{metric: acc, aggregation: mean}, {metric: acc_norm, aggregation: mean}]
""",
    "text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}
FILES = {
    "lambada": ("lambada/lambada_test.jsonl", PASSAGES),
    "blimp": ("blimp/pairs.jsonl", PIECES),
    "piqa": ("piqa/valid.jsonl", GOALS),
    "text": ("text.jsonl", [{"text": TEXT}]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, the tasks' files, and their settings for the harness."""
    folder = tmp_path_factory.mktemp("harness")
    params = jax.tree.map(lambda x: 8 * x, runs.fresh(CONFIG))
    orbax.export(folder / "model", CONFIG, params)
    tokenizer("bytes").save(str(folder / "model" / "tokenizer.json"))
    for task, (name, records) in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        data = f"task: our_{task}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / name}}}}}\n"
        (folder / f"{task}.yaml").write_text(data + "test_split: test" + SETTINGS[task])
    (folder / "ptb.test.txt").write_text(TEXT)
    return folder


def test_its_numbers_are_ours(folder):
    from lm_eval.tasks import TaskManager

    from train.tasks.harness import Harness

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    theirs = lm_eval.simple_evaluate(
        Harness(folder / "model"), tasks=[f"our_{task}" for task in FILES], task_manager=manager, bootstrap_iters=0
    )["results"]
    ours = evaluate(Scorer(opened(folder / "model")), ["lambada", "blimp", "piqa", "ptb"], folder)
    perplexities = theirs["our_lambada"]["perplexity,none"], ours["lambada"]["perplexity"]
    assert math.log(perplexities[0]) == pytest.approx(math.log(perplexities[1]), rel=1e-5)
    assert theirs["our_lambada"]["acc,none"] == ours["lambada"]["accuracy"]
    assert theirs["our_blimp"]["acc,none"] == ours["blimp"]["accuracy"]
    assert theirs["our_piqa"]["acc,none"] == ours["piqa"]["accuracy"]
    assert theirs["our_piqa"]["acc_norm,none"] == pytest.approx(ours["piqa"]["accuracy_normalised"])
    assert theirs["our_text"]["bits_per_byte,none"] == pytest.approx(ours["ptb"]["bits_per_byte"])
    assert math.log2(theirs["our_text"]["byte_perplexity,none"]) == pytest.approx(ours["ptb"]["bits_per_byte"])


def test_it_generates_until_a_text(folder):
    from lm_eval.api.instance import Instance

    from train.tasks.harness import Harness

    harness = Harness(folder / "model")
    [whole] = harness.generate_until([Instance("generate_until", {}, ("one two", {"max_gen_toks": 8}), 0)])
    assert len(whole) > 2
    settings = {"max_gen_toks": 8, "until": [whole[2]]}
    [cut] = harness.generate_until([Instance("generate_until", {}, ("one two", settings), 0)])
    assert cut == whole.split(whole[2])[0]
