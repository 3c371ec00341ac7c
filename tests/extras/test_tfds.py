"""A corpus of tensorflow-datasets is read without TensorFlow."""

from dataclasses import replace

import numpy as np
import pytest
import runs
import tensorflow_datasets as tfds

from train.common.errors import UserError
from train.extras.text.reading import read_tokens


class TinyDocs(tfds.core.GeneratorBasedBuilder):
    """A corpus of 6 training and 2 validation documents, written without TensorFlow."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = {"text": tfds.features.Text(), "title": tfds.features.Text()}
        features = tfds.features.FeaturesDict(text | {"number": tfds.features.Scalar(np.int64)})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        parts = {"train": ("train", 6), "validation": ("valid", 2)}
        return {split: self._generate_examples(*part) for split, part in parts.items()}

    def _generate_examples(self, name, count):
        for i in range(count):
            yield i, {"text": f"{name} {i} ä", "title": str(i), "number": i}


@pytest.fixture
def docs(tmp_path):
    data = runs.experiment(tmp_path).data
    return replace(data, source="tfds", name="tiny_docs", path=str(tmp_path / "tfds"))


def test_a_tfds_corpus_is_prepared_and_read_without_tensorflow(docs):
    found = read_tokens(docs)
    documents = found.train.tobytes().decode().split("\0")
    assert sorted(documents) == ["", *(f"train {i} ä" for i in range(6))]
    assert sorted(found.valid.tobytes().decode().split("\0")) == ["", "valid 0 ä", "valid 1 ä"]
    other = read_tokens(replace(docs, field="title"))
    assert sorted(other.train.tobytes().decode().split("\0")) == ["", *map(str, range(6))]


@pytest.mark.parametrize(("change", "says"), [
    ({"field": "body"}, r"tiny_docs has no feature 'body', only .*text.*title.*; set data.field"),
    ({"field": "number"}, r"feature .number. of tiny_docs is not text, but .*; set data.field"),
    ({"name": "no_such_docs"}, "tensorflow-datasets cannot prepare 'no_such_docs'"),
])  # fmt: skip
def test_unknown_datasets_and_features_are_refused(docs, change, says):
    with pytest.raises(UserError, match=says):
        read_tokens(replace(docs, **change))
