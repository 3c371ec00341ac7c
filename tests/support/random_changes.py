"""Random changes of a file: of its bytes, of one JSON value, or of one member of an archive."""

import io
import json
import random
import zipfile
from typing import Any

# JSON texts that replace a value of a JSON file.
VALUES = [
    *("null", "true", "[]", "{}", '""', '"x"', '"\\ud800"', '"\\u0000\\u001b[2J"', "0", "-1", "0.5"),
    *("NaN", "Infinity", "1e400", "9" * 30, "9" * 5000, str(2**31), str(2**63), "1e300", "[[[1]]]"),
    *('{"a":{"b":[null]}}', '["a","a"]', "[" * 900 + "]" * 900, "[" * 200_000, '"' + "a" * 70_000 + '"'),
    *('{"a":1,"a":2}', "[1,2,3]", "-0.0", "\xff"),
]  # fmt: skip
MARK = "\uffff value \uffff"


def _places(value: Any, place: tuple = ()) -> list[tuple]:
    """Return the keys that lead to every value of a JSON value."""
    items = {dict: dict.items, list: enumerate}.get(type(value), lambda value: ())
    inner = items(value)
    return [place, *(found for key, x in inner for found in _places(x, (*place, key)))]


def _changed_json(text: str, rng: random.Random) -> str:
    """Replace, delete or repeat one value."""
    value = [json.loads(text)]
    *above, last = rng.choice(_places(value)[1:])
    parent: Any = value
    for key in above:
        parent = parent[key]
    if rng.random() < 0.2 and above:
        del parent[last]
        return json.dumps(value[0])
    parent[last] = MARK
    new = rng.choice(VALUES)
    if above and isinstance(parent, dict) and rng.random() < 0.1:
        new += f",{json.dumps(last)}:{new}"
    return json.dumps(value[0]).replace(json.dumps(MARK), new)


def _changed_bytes(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return rng.randbytes(9)
    # Most formats have their structure at the beginning or at the end.
    near = rng.choice([0, 0, max(0, len(content) - 200)])
    at = rng.randrange(near, min(len(content), near + rng.choice([20, 200, len(content)])))
    with_ = rng.choice(
        [b"", b"\0" * 8, b"\xff" * 8, rng.randbytes(4), b"\xed\xa0\x80", content[:50]]
    )
    return content[:at] + with_ + content[at + rng.choice([0, 1, len(with_), 100]) :]


def _changed_zip(content: bytes, rng: random.Random) -> bytes:
    """Change one member, so that the checksums of the archive fit."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        names = old.namelist()
        chosen = rng.choice(names)
        for name in names:
            member = old.read(name)
            new.writestr(name, _changed_bytes(member, rng) if name == chosen else member)
    return out.getvalue()


def changed(content: bytes, rng: random.Random) -> bytes:
    """Return the content of a file with one change that suits its format."""
    if rng.random() < 0.05:
        return rng.choice([b"", b"\0", b"{}", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
    length = int.from_bytes(content[:8], "little")
    try:
        if content[8:9] == b"{" and length < len(content) and rng.random() < 0.7:
            text = _changed_json(content[8 : 8 + length].decode(), rng)
            head = text.encode("utf-8", "surrogatepass")
            return len(head).to_bytes(8, "little") + head + content[8 + length :]
        if zipfile.is_zipfile(io.BytesIO(content)) and rng.random() < 0.7:
            return _changed_zip(content, rng)
        lines = content.decode().split("\n")
        json.loads(lines[0])
        chosen = 0 if len(lines) == 1 else rng.randrange(len(lines))
        if rng.random() < 0.9:
            lines[chosen] = _changed_json(lines[chosen], rng)
            encoding = "latin1" if "\xff" in lines[chosen] else "utf-8"
            return "\n".join(lines).encode(encoding, "surrogatepass")
    except (ValueError, RecursionError):
        pass
    try:
        if rng.random() < 0.9:
            return _changed_json(content.decode(), rng).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        pass
    return _changed_bytes(content, rng)
