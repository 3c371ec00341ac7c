"""The workflows use extras, markers, files, packages and versions that exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = {p.name: yaml.safe_load(p.read_text()) for p in ROOT.glob(".github/workflows/*.yml")}
JOBS = {(file, name): job for file, of in WORKFLOWS.items() for name, job in of["jobs"].items()}
# The package of each tool that a workflow runs.
TOOLS = {name: name for name in ("pytest", "ruff", "basedpyright")} | {"sphinx-build": "sphinx"}


def rows(job: dict) -> list[dict]:
    """Return the rows of the matrix of a job: one axis, or rows to include."""
    matrix = job.get("strategy", {}).get("matrix", {"include": [{}]})
    assert len(matrix) == 1
    return [
        row if key == "include" else {key: row} for key, values in matrix.items() for row in values
    ]


def expanded(text: str, row: dict) -> str:
    """Replace the variables of the matrix; a variable that it does not have is a KeyError."""
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: str(row[found[1]]), text)


def commands(job: dict, row: dict) -> list[list[str]]:
    """Return the words of each shell command of a job, as the shell splits them."""
    found = []
    for line in "\n".join(step.get("run", "") for step in job["steps"]).splitlines():
        words = shlex.shlex(expanded(line, row), posix=True, punctuation_chars=True)
        words.whitespace_split = True
        found.append([])
        for word in words:
            if word in ("&&", ";"):
                found.append([])
            elif "=" not in word or found[-1]:  # A variable before a command is none of its words.
                found[-1].append(word)
    return [words for words in found if words]


def packages(requirements: list[str]) -> set[str]:
    """Return the names of required packages; an extra of this project stands for its packages."""
    found = set()
    for text in requirements:
        own = re.match(r"(?:jaxgrow|\.)\[([\w,-]+)\]", text)
        for extra in own[1].split(",") if own else ():
            found |= packages(PROJECT["project"]["optional-dependencies"][extra])
        found.add(re.split(r"[\[=<>!; ]", text)[0])
    return found


def value(words: list[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words else None


EVERY = [words for job in JOBS.values() for row in rows(job) for words in commands(job, row)]


@pytest.mark.parametrize(("file", "name"), JOBS)
def test_every_job_installs_the_tools_that_it_runs(file, name):
    """An extra that does not exist is a KeyError."""
    for row in rows(JOBS[file, name]):
        installed: set[str] = set()
        for words in commands(JOBS[file, name], row):
            # An unquoted ``>`` of a version would be a redirection.
            assert not {"<", ">", ">>", "|"} & set(words), words
            if words[:2] == ["pip", "install"]:
                installed |= packages(words[2:])
            assert words[0] not in TOOLS or TOOLS[words[0]] in installed, words


def test_markers_and_files_exist():
    markers = {m.partition(":")[0] for m in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    used = [words for words in EVERY if words[0] == "pytest"]
    assert len(used) >= 8
    for words in used:
        expression = re.findall(r"\w+", value(words, "-m") or "")
        assert set(expression) - {"not", "and", "or"} <= markers, words
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words


def test_chosen_tests_exist():
    chosen = [words for words in EVERY if "-k" in words]
    assert chosen
    for words in chosen:
        files = [ROOT / word for word in words if word.endswith(".py")]
        assert any(f'"{value(words, "-k")}"' in file.read_text() for file in files), words


def test_versions_are_those_that_the_readme_names():
    readme = (ROOT / "README.md").read_text()
    named = re.search(r"Python (\S+) to (\S+), JAX (\S+) to (\d\.\d+)", readme)
    python, last_python, jax, last_jax = named.groups()
    assert PROJECT["project"]["requires-python"] == f">={python}"
    assert f"jax>={jax}" in PROJECT["project"]["dependencies"]
    for at in (("tests.yml", "tests"), ("nightly.yml", "slow"), ("nightly.yml", "aot")):
        tested = rows(JOBS[at])
        assert (tested[0]["python"], tested[-1]["python"]) == (python, last_python)
        assert (tested[0]["jax"], tested[-1]["jax"]) == (jax, last_jax)
    interop = PROJECT["project"]["optional-dependencies"]["interop-test"]
    oldest = re.search(r"transformers>=([\d.]+)", str(interop))
    assert rows(JOBS["nightly.yml", "interop"])[0]["transformers"] == f"=={oldest[1]}.*"


@pytest.mark.parametrize("action", ["actions/deploy-pages", "pypa/gh-action-pypi-publish"])
def test_a_job_that_publishes_has_an_environment_and_a_token(action):
    """GitHub Pages and the package index identify the job by its environment."""
    jobs = [job for job in JOBS.values() if any(action in s.get("uses", "") for s in job["steps"])]
    assert jobs
    for job in jobs:
        assert job["environment"] and job["permissions"]["id-token"] == "write"
