"""Small files of GLUE tasks, and models that read them."""

import gzip
import lzma
from pathlib import Path

import pyarrow as pa

from jaxgrow.models import BERTConfig, GPT2Config
from train.extras.labelled import glue

SIZES = dict(vocab=400, layers=1, embed=8, heads=2, head_dim=4, mlp=8)
BERT = BERTConfig(**SIZES, context=512)
GPT2 = GPT2Config(**SIZES, context=512)
HEADERS = {
    "sst2": "sentence\tlabel",
    "mrpc": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "stsb": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
    "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    "mnli": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
    "qnli": "index\tquestion\tsentence\tlabel",
    "rte": "index\tsentence1\tsentence2\tlabel",
    "wnli": "index\tsentence1\tsentence2\tlabel",
}
ROWS = {
    "cola": ['gj04\t1\t\tThe cat "sat.', "gj04\t0\t*\tCat the sat."],
    "sst2": ["the cat \t1", "a dog \t0"],
    "mrpc": ['1\t10\t20\tThe cat "sat.\tA cat sat.', "0\t11\t21\tDogs\tCats"],
    "stsb": [
        "0\tnews\tf\t2012\t7\ta\tb\tThe cat\tA cat\t4.250",
        "1\tnews\tf\t2012\t8\ta\tb\tDogs\tCats\t0.000",
    ],
    "qqp": ["5\t1\t2\tWho sat?\tWho was sitting?\t1", "6\t3\t4\tWho?\tWhere?\t0"],
    "mnli": [
        "0\t1\t1n\tfiction\tb\tb\tp\tp\tThe cat sat.\tA cat sat.\tentailment\tentailment",
        "1\t2\t2c\tfiction\tb\tb\tp\tp\tDogs\tNo dogs\tneutral\tcontradiction",
    ],
    "qnli": ["0\tWho sat?\tThe cat sat.\tentailment", "1\tWhere?\tA dog.\tnot_entailment"],
    "rte": ["0\tThe cat sat.\tA cat sat.\tentailment", "1\tDogs\tCats\tnot_entailment"],
    "wnli": ["0\tThe cat sat.\tIt sat.\t1", "1\tDogs\tCats\t0"],
}
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda b: pa.compress(b, "zstd", True),
}


def saved(
    folder: Path, name: str, rows: list[str] | None = None, suffix: str = "", end: str = "\n"
) -> str:
    """Write the files of a task, all with the same rows."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ([HEADERS[name]] if name in HEADERS else []) + (ROWS[name] if rows is None else rows)
    for file in glue.TASKS[name].files[0].values():
        content = "".join(line + end for line in lines).encode()
        (folder / (file + suffix)).write_bytes(COMPRESS[suffix](content))
    return str(folder)
