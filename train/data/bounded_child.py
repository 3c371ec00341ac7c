"""The process that `train.data.bounded` starts: it runs templates and tokenizers of others.

It is a script without imports from this package, so that it starts quickly. Each line of stdin is a
request, and each line of stdout its answer: ``{"result": ..}`` or ``{"error": ".."}``.
"""

import json
import os
import sys
from contextlib import suppress
from datetime import datetime

# Memory of the libraries themselves.
_OWN = 1 << 30
# Texts that let a slow regular expression, or a normaliser that multiplies text, show itself.
_PROBES = ("a", "A", "0", " ", "\n", "-", "é", "日", " a", "aA0 -\n", "the quick brown fox ")
_PROBE = 4096  # characters of a probe
_MOST = 256  # tokens for a character


def main():
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        _limit(request["bytes"], request["seconds"])
        job = {"render": _rendered, "tokenizer": _tried}[request["job"]]
        try:
            answer = {"result": job(request)}
        except BaseException as error:  # a panic of Rust is not an `Exception`
            about = " ".join(str(error).split())[:500]
            named = "jinja2" in type(error).__module__
            answer = {"error": about if named else f"{type(error).__name__}: {about}"}
        print(json.dumps(answer), flush=True)


def _limit(memory, seconds):
    """Limit the memory, and the time in case that the parent is killed."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory + _OWN, resource.RLIM_INFINITY))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = usage.ru_utime + usage.ru_stime
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 2, hard))


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


def _tried(request):
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
    return None


if __name__ == "__main__":
    main()
