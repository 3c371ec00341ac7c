"""The entrances of `train/data/`: which of them are attacked, and why are the others safe?

`entrances` describes the table.
"""

from entrances import Row, Subject, todo

SUBJECTS: dict[str, Subject] = {}

ROWS: dict[str, Row] = {
    "train/data/formats.py::_of_tfds": todo("no subject yet"),
    "train/data/images.py::_mapped": todo("no subject yet"),
    "train/data/images.py::_folder": todo("no subject yet"),
    "train/data/images.py::_contents": todo("no subject yet"),
    "train/data/images.py::_decode": todo("no subject yet"),
    "train/data/images.py::_write_pixels": todo("no subject yet"),
    "train/data/images.py::_narrow": todo("no subject yet"),
    "train/data/images.py::_opened": todo("no subject yet"),
    "train/data/labelled/glue.py::is_unnamed": todo("no subject yet"),
    "train/data/labelled/glue.py::rows_of": todo("no subject yet"),
    "train/data/labelled/squad.py::_articles": todo("no subject yet"),
    "train/data/labelled/table.py::_lines": todo("no subject yet"),
    "train/data/labelled/table.py::_objects": todo("no subject yet"),
    "train/data/named_splits.py::_front_matter": todo("no subject yet"),
    "train/data/processor.py::normal_in": todo("no subject yet"),
    "train/data/processor.py::_read": todo("no subject yet"),
    "train/data/special.py::copied": todo("no subject yet"),
    "train/data/text.py::tokens": todo("no subject yet"),
    "train/data/text.py::_mapped": todo("no subject yet"),
    "train/data/text.py::_make": todo("no subject yet"),
    "train/data/text.py::tokenizer": todo("no subject yet"),
    "train/data/tokenise.py::tokenise": todo("no subject yet"),
    "train/data/corpus.py::shards": todo("no subject yet"),
    "train/data/corpus.py::splits": todo("no subject yet"),
    "train/data/decoding.py::<module>": todo("no subject yet"),
    "train/data/decoding.py::in_folder": todo("no subject yet"),
    "train/data/decoding.py::json_object": todo("no subject yet"),
    "train/data/decoding.py::opened": todo("no subject yet"),
    "train/data/decoding.py::read_regular": todo("no subject yet"),
    "train/data/formats.py::_parquet_batches": todo("no subject yet"),
    "train/data/formats.py::_stream": todo("no subject yet"),
    "train/data/token_files.py::_npy": todo("no subject yet"),
    "train/data/token_files.py::_raw": todo("no subject yet"),
    "train/data/tfds.py::checked_info": todo("no subject yet"),
    "train/data/cache.py::_make": todo("no subject yet"),
    "train/data/cache.py::_remove": todo("no subject yet"),
    "train/data/images.py::_Records.__getitem__": todo("no subject yet"),
    "train/data/images.py::_in_tar": todo("no subject yet"),
    "train/data/images.py::_in_zip": todo("no subject yet"),
    "train/data/bounded_child.py::_tried": todo("no subject yet"),
    "train/data/trial.py::check_tokenizer": todo("no subject yet"),
}

# The number of rows that still need a subject.
OPEN = 41
