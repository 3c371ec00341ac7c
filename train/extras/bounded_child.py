"""The process that `train.extras.bounded` starts: it runs templates and tokenizers of others.

It is a script without imports from this package, so that it starts quickly. Each line of stdin is a
request, and each line of stdout its answer: ``{"result": ..}`` or ``{"error": ".."}``. If it has
``"bytes"``, as many bytes follow the line.
"""

import json
import sys
from array import array
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from itertools import chain

# Texts that let a slow regular expression, or a normaliser that multiplies text, show itself.
_PROBES = ("a", "A", "0", " ", "\n", "-", "é", "日", " a", "aA0 -\n", "the quick brown fox ")
_PROBE = 4096  # characters of a probe
_MOST = 256  # tokens for a character
_loaded = []  # the tokenizer that encodes, or a file of Parquet and its batches
_ANSWER = 1 << 20  # bytes of batches in one answer


def main():
    sys.stdout.buffer.write(b"{}\n")
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        content = b""
        try:
            job, library = _JOBS[request["job"]]
            import_module(library)  # its own memory does not count
            _limit(request["bytes"], request["seconds"])
            result = job(request)
            if isinstance(result, tuple):
                result, content = result
            answer = {"result": result, "bytes": len(content)}
        except MemoryError:
            answer = {"memory": True}
        except BaseException as error:  # a panic of Rust is not an `Exception`
            about = " ".join(str(error).split())[:500]
            named = "jinja2" in type(error).__module__
            answer = {"error": about if named else f"{type(error).__name__}: {about}"}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        del content


def _limit(memory, seconds):
    """Limit the memory, and the computing time of one request."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = usage.ru_utime + usage.ru_stime
        amounts = {"CORE": 0, "CPU": int(used + seconds) + 1, "DATA": memory}
        for name, amount in amounts.items():
            limit = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(limit, (amount, resource.getrlimit(limit)[1]))


def _rendered(request):
    template = _environment().from_string(request["template"])
    text = template.render(
        messages=request["messages"], add_generation_prompt=True, **request["names"]
    )
    if len(text) > request["record"]:
        raise ValueError(
            f"it makes {len(text):,} characters; the limit is --limits record={request['record']}"
        )
    return text


def _environment():
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag ``{% generation %}``, which marks the answers of a chat without changing them."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message):
        raise TemplateError(message)

    def to_json(value, indent=None, ensure_ascii=False, **options):
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _try_tokenizer(request):
    """Load a tokenizer, and encode texts that show excessive time or memory."""
    from tokenizers import Tokenizer, models

    if "folder" in request:
        models.BPE.from_file(*request["folder"])
        return None
    tokenizer = Tokenizer.from_file(request["file"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for probe in _PROBES:
        text = (probe * _PROBE)[:_PROBE]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > _MOST * _PROBE:
            raise ValueError(f"it makes {len(ids):,} tokens of {len(text):,} characters")
        tokenizer.decode(ids)
    # The main process encodes these names, as text.
    tokenizer.encode_special_tokens = True
    for token in tokenizer.get_added_tokens_decoder().values():
        tokenizer.encode(token.content, add_special_tokens=False)
    return None


def _load_tokenizer(request):
    from tokenizers import Tokenizer

    _loaded[:] = [Tokenizer.from_str(request["tokenizer"])]


def _encoded_texts(request):
    """The number of ids of each text, and the bytes of all ids, and perhaps of their places."""
    texts = request["texts"]
    tokenizer = _loaded[0]
    # Not a part of the file: names of special tokens in a text are text, except in a rendered chat.
    tokenizer.encode_special_tokens = not request["control"]
    encode = tokenizer.encode_batch if request["spans"] else tokenizer.encode_batch_fast
    ids = array("I")
    places = array("I")
    sizes = []
    for text, encoded in zip(
        texts, encode(texts, add_special_tokens=request["framed"]), strict=True
    ):
        found = encoded.ids
        if len(found) > _MOST * (len(text) + 1):
            raise ValueError(f"it makes {len(found):,} tokens of {len(text):,} characters")
        sizes.append(len(found))
        ids.extend(found)
        if request["spans"]:
            places.extend(chain.from_iterable(encoded.offsets))
    return sizes, ids.tobytes() + places.tobytes()


def _yaml_as_json(request):
    """The JSON of a YAML text, in which aliases may repeat a part any number of times."""
    from yaml import CSafeLoader, load  # Flax requires it

    parts = json.JSONEncoder(default=str, skipkeys=True).iterencode(
        load(request["text"], CSafeLoader)
    )
    size = 0
    kept = []
    for part in parts:
        kept.append(part)
        size += len(part)
        if size > request["record"]:
            raise ValueError(f"it has too many aliases; the limit is --limits record={size - 1}")
    return "".join(kept)


def _table(request):
    """The names of the columns of a Parquet or Arrow file, and the declared sizes of its parts."""
    import pyarrow as pa
    from pyarrow import parquet

    path = request["path"]
    if path.endswith(".arrow"):
        _loaded[:] = [pa.ipc.open_stream(pa.OSFile(path))]
        return {"names": _loaded[0].schema.names, "parts": []}
    file = parquet.ParquetFile(path, buffer_size=request["buffer"], pre_buffer=False)
    about = file.metadata
    places = ((group, n) for group in range(about.num_row_groups) for n in range(about.num_columns))
    parts = (about.row_group(group).column(n) for group, n in places)
    _loaded[:] = [file]
    sizes = [(part.path_in_schema, part.total_uncompressed_size) for part in parts]
    return {"names": file.schema_arrow.names, "parts": sizes}


def _start_rows(request):
    rows, columns = request["rows"], request["columns"]
    if hasattr(_loaded[0], "iter_batches"):
        batches = _loaded[0].iter_batches(rows, columns=columns, use_threads=False)
    else:
        # The writer chooses the size of a batch: Hugging Face `datasets` takes 1000 rows.
        batches = (
            batch.select(columns).slice(first, rows)
            for batch in _loaded[0]
            for first in range(0, batch.num_rows, rows)
        )
    _loaded.append(map(_without_dictionaries, batches))


def _without_dictionaries(batch):
    """The batch with values in place of dictionaries, so that its size is that of its values."""
    import pyarrow as pa

    columns = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pa.record_batch(columns, names=batch.schema.names)


def _next_batches(request):
    """The number of the next batches, and a stream of them; no bytes at the end."""
    import pyarrow as pa

    taken = []
    size = 0
    for batch in _loaded[1]:
        taken.append(batch)
        size += batch.nbytes
        if size >= _ANSWER or len(taken) == 64:
            break
    if not taken:
        return 0
    content = pa.BufferOutputStream()
    with pa.ipc.new_stream(content, taken[0].schema) as stream:
        for batch in taken:
            stream.write_batch(batch)
    return len(taken), content.getvalue()


# Name -> the function of a job, and the library that it uses.
_JOBS = {
    "render": (_rendered, "jinja2"),
    "tokenizer": (_try_tokenizer, "tokenizers"),
    "load": (_load_tokenizer, "tokenizers"),
    "encode": (_encoded_texts, "tokenizers"),
    "yaml": (_yaml_as_json, "yaml"),
    "table": (_table, "pyarrow.parquet"),
    "rows": (_start_rows, "pyarrow.parquet"),
    "batches": (_next_batches, "pyarrow.parquet"),
}

if __name__ == "__main__":
    main()
