"""Images and their classes: decoded once into a file, or read as they are stored.

A source of the training loop has a length and ``sample(i, rng) -> (inputs, targets)``, which is
pure: the same generator gives the same sample. Without validation images, some images are held out.
"""

import hashlib
import io
import json
import math
import os
import posixpath
import tarfile
import time
import warnings
import zipfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

import jax
import numpy as np
from tqdm import tqdm

from jaxgrow.checkpoints.io.checksums import sha256
from jaxgrow.models import Config
from jaxgrow.typed import Json
from jaxgrow.untrusted import UntrustedError, file_limits, open_regular
from train.common.errors import UserError
from train.common.files import read_record, write_record
from train.data.dataset import DATASETS, Batch, Source
from train.data.workers import core_count
from train.extras.cache import cache_folder, cached_folder, make_again
from train.extras.decoding import (
    COMPRESSED,
    MAGIC,
    decompress_stream,
    in_folder,
    read_regular,
    readable_file,
)
from train.extras.images import idx
from train.extras.images.augment import Augment
from train.extras.labelled.metrics import accuracy
from train.extras.labelled.supervised import Prepared, Supervised
from train.extras.splitting import held_out_rows, more_held_out
from train.extras.text.mixed_paths import refuse_several

_SUFFIXES = {".jpg", ".jpeg", ".png"}
_VALIDATION = ("val", "valid", "validation", "test")
_AT_ONCE = 1024  # images that are copied at once
_SPEED = 10**8  # pixels of a scan that any JPEG decodes in a second


@dataclass(frozen=True)
class Images(Supervised):
    """A dataset of images, each of one class.

    ``source="digits"`` is scikit-learn's dataset of 1797 images of 8 x 8 pixels, which needs no
    files. ``"folder"`` is a folder at ``path``, or a tar or zip of it, with one folder of ``.jpg``
    and ``.png`` files for each class. If these are in folders ``train`` and ``val``, ``valid``,
    ``validation`` or ``test``, the images of the first one of the latter are used for validation,
    and other folders are not read. ``"idx"`` is a folder with the four files of MNIST, of
    Fashion-MNIST, or of another dataset in this layout; its test images are used for validation.
    ``"tfds"`` is the tensorflow-datasets dataset ``name``, which is prepared under ``path`` if
    necessary; it is read without TensorFlow.
    """

    modality = "images"
    source: Literal["digits", "folder", "idx", "tfds"] = "digits"
    path: str | None = None
    name: str | None = None  # for "tfds", e.g. "imagenet2012"
    size: int | None = None  # pixels per side after resizing; None: all images have the same size
    augment: Augment = field(default_factory=Augment)
    valid_fraction: float = 0.1  # the part held out if the source lacks a validation split
    # Processes that decode and augment; 0: a thread of this process; None: one process per core.
    workers: int | None = 0
    cache: str = "~/.cache/jaxgrow"
    # 1: gray, 3: colour; None: as the images are stored.
    channels: int | None = None
    # The mean and the standard deviation of each channel, from 0 to 1. Empty: the values of
    # ImageNet, or 0.5 for gray images.
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    # The choices that use a field (`train.extras.effect`).
    used_with = {
        "path": {"source": ("folder", "idx", "tfds")},
        "name": {"source": ("tfds",)},
        "valid_fraction": {"source": ("digits", "folder", "tfds")},
    }

    def __post_init__(self):
        refuse_several(self.path, "Images")
        if not 0 < self.valid_fraction <= 0.5:
            raise ValueError(
                f"valid_fraction must be between 0 and 0.5, but is {self.valid_fraction}"
            )
        if self.size is not None and self.size < 1:
            raise ValueError(f"size must be at least one pixel, but is {self.size}")
        if self.workers is not None and self.workers < 0:
            raise ValueError(
                f"workers must be a number of processes, at least 0, but is {self.workers}"
            )
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be 1 or 3, but is {self.channels}")
        if len(self.mean) != len(self.std) or not all(x > 0 for x in self.std):
            raise ValueError(
                f"mean and std must have one number per channel, and std positive ones, but are {self.mean} and {self.std}"
            )
        if self.source == "folder" and self.path is None:
            raise ValueError(
                "data.source=folder needs data.path: a folder with a folder of images for each class, or a tar or zip of it"
            )
        if self.source == "idx" and self.path is None:
            raise ValueError(
                "data.source=idx needs data.path: the folder of the four files of MNIST"
            )
        if self.source == "tfds" and self.name is None:
            raise ValueError("data.source=tfds needs data.name, such as imagenet2012")

    def prepared(self, model: Config) -> Prepared:
        self.check_modality(model)
        split = read_images(self)

        def scores(outputs: np.ndarray) -> dict[str, float]:
            labels = np.array([split.valid.label(i) for i in range(len(split.valid))])
            return {"accuracy": accuracy(outputs.argmax(-1), labels)}

        classes = split.classes
        return Prepared(
            split.train,
            {"valid": split.valid},
            "classes",
            len(classes),
            classes,
            0,
            split.identity,
            {"valid": scores},
            ("accuracy",),
        )

    def sources(self, model: Config) -> tuple[Source, dict[str, Source]]:
        self.check_modality(model)
        split = read_images(self)
        sizes = model.integers()
        fits = {
            "pixels a side": (split.shape[0], sizes["image"]),
            "channels": (split.shape[2], sizes["channels"]),
            "classes": (len(split.classes), sizes["classes"]),
        }
        wrong = [
            f"{name}: {has} in the images, {takes} in the model"
            for name, (has, takes) in fits.items()
            if has != takes
        ]
        if wrong:
            raise UserError(f"the images do not fit the model: {'; '.join(wrong)}")
        return split.train, {"": split.valid}

    def shapes(self, model: Config, samples: int) -> Batch:
        inputs, targets = model.batch_shapes(samples)
        if self.augment.softens:
            targets = jax.ShapeDtypeStruct((samples, model.integers()["classes"]), np.float32)
        return inputs, targets

    def more_validation(self, name: str = "") -> str:
        return more_held_out(read_images(self).held, self.valid_fraction)

    def write_inputs(self, run: Path, config: Config, folder: Path) -> Json:
        from train.extras.images.processor import FILE, Normal, default_normal, processor_settings

        size, channels = (config.integers()[name] for name in ("image", "channels"))
        normal = Normal(self.mean, self.std) if self.mean else default_normal(channels)
        shorter = round(size * 8 / 7) if self.source == "tfds" and self.size is not None else size
        write_record(folder / FILE, processor_settings(normal, size, shorter))
        return {}


class Store(Protocol):
    """Stored images with the numbers of their classes."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> tuple[Any, int]: ...  # a Pillow image


class Pictures:
    """Some of the images of a store, augmented for training or unchanged for validation.

    Inputs are float32 [size, size, channels], normalised. Targets are the class, int32. If
    ``augment`` mixes images or smooths labels, they are the probability of each class, float32
    [classes].
    """

    what = "images"

    def __init__(
        self, kept: "_Kept", chosen: np.ndarray, augment: Augment | None, workers: int = 0
    ):
        self.kept = kept
        self.chosen = chosen
        self.augment = augment
        self.workers = workers

    def __len__(self) -> int:
        return len(self.chosen)

    def sample(self, i: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        from train.extras.images import pixels

        image, label = self._at(i)
        if self.augment is None:
            return pixels.normalised_pixels(
                pixels.central_crop(image, self.kept.size), *self.kept.normal
            ), np.asarray(label, np.int32)
        other = (
            self._at(int(rng.integers(len(self))))
            if self.augment.mixup or self.augment.cutmix
            else None
        )
        size = self.kept.size
        classes = len(self.kept.classes)
        return pixels.augmented_sample(
            (image, label), other, self.augment, size, classes, rng, *self.kept.normal
        )

    def label(self, i: int) -> int:
        """The class of an image."""
        return self.kept.store[int(self.chosen[i])][1]

    def _at(self, i: int) -> tuple[Any, int]:
        image, label = self.kept.store[int(self.chosen[i])]
        return image.convert("L" if self.kept.channels == 1 else "RGB"), label


@dataclass(frozen=True)
class Split:
    train: Pictures
    valid: Pictures
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # [rows, columns, channels] of an input
    identity: Json  # JSON; identifies the images by content, not by path
    held: bool  # whether ``data.valid_fraction`` of the images are the validation images


def read_images(data: Images) -> Split:
    """The training images and the validation images.

    Raises:
      UserError: the images or a library that reads them are missing, or the images are empty or
        unreadable.
    """
    try:
        import PIL  # noqa: F401
        import sklearn.datasets  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"images need Pillow and scikit-learn ({error}): pip install -e '.[vision]'"
        ) from error

    train, valid = _source_images(data)
    train = _as_asked(train, data)
    valid = None if valid is None else _as_asked(valid, data)
    held_out = valid is None and train.split is None
    if valid is None:
        mine, held = train.split or held_out_rows(len(train.store), data.valid_fraction)
        valid = train
    else:
        mine = np.arange(len(train.store))
        held = np.arange(len(valid.store))
    workers = core_count() if data.workers is None else data.workers
    name = data.name if data.source == "tfds" else Path(data.path or data.source).name
    return Split(
        Pictures(train, mine, data.augment, workers),
        Pictures(valid, held, None),
        train.classes,
        (train.size, train.size, train.channels),
        {"name": name, "train": _images_hash(train, mine), "valid": _images_hash(valid, held)},
        held_out,
    )


def _source_images(data: Images) -> "tuple[_Kept, _Kept | None]":
    """The images of the source, and of its validation split if it has one."""
    if data.source == "tfds":
        return _tfds_images(data)
    if data.source == "folder":
        return _folder_images(data), None
    if data.source == "idx":
        return _idx(data, "train"), _idx(data, "valid")
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images[..., None] * (255 / 16)).astype(np.uint8)  # type: ignore[union-attr]
    labels = digits.target.astype(np.int32)  # type: ignore[union-attr]
    return _kept(pixels, labels, 10, data.size), None


def _images_hash(kept: "_Kept", chosen: np.ndarray) -> str:
    what = json.dumps([kept.content, kept.classes, kept.size, kept.channels, *kept.normal])
    return hashlib.sha256(what.encode() + chosen.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class _Kept:
    store: Store
    classes: tuple[str, ...]
    size: int  # pixels per side of a sample
    channels: int
    content: str  # hash of the content
    # The mean and the standard deviation of each channel; empty: the default values.
    normal: tuple[tuple[float, ...], ...] = ()
    # The numbers of the images for training and for validation; None: hold out a part.
    split: tuple[np.ndarray, np.ndarray] | None = None


def _as_asked(kept: _Kept, data: Images) -> _Kept:
    """The images with the channels and the normalisation that the user chose.

    Raises:
      UserError: the normalisation has a different number of channels.
    """
    channels = data.channels or kept.channels
    normal = (data.mean, data.std) if data.mean else ()
    if data.mean and len(data.mean) != channels:
        raise UserError(
            f"data.mean has {len(data.mean)} numbers, but the images have {channels} channels: set data.mean and data.std to "
            "one number for each channel"
        )
    return replace(kept, channels=channels, normal=normal)


class _Array:
    """Images as an array, uint8 [count, rows, columns, channels], in memory or memory-mapped.

    With a ``size``, an image is resized to this number of pixels per side when it is read.
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, size: int | None = None):
        self.pixels = pixels
        self.labels = labels
        self.size = size

    def __reduce__(self):  # a worker process maps the file again instead of copying it
        if isinstance(self.pixels, np.memmap):
            return _mapped_images, (Path(str(self.pixels.filename)).parent,)
        return _Array, (self.pixels, self.labels, self.size)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        from PIL import Image, ImageOps

        pixels = self.pixels[i]
        image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        if self.size is not None:
            image = ImageOps.fit(image, (self.size, self.size), Image.Resampling.BICUBIC)
        return image, int(self.labels[i])


def _mapped_images(folder: Path) -> _Array:
    try:
        pixels, labels = (
            np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("pixels", "labels")
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"the images in {folder} are damaged: {error}; {make_again(folder)}"
        ) from error
    return _Array(pixels, labels)


def _kept(pixels: np.ndarray, labels: np.ndarray, classes: int, size: int | None) -> _Kept:
    """Gray images in memory, whose classes are numbers."""
    content = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    names = tuple(map(str, range(classes)))
    return _Kept(_Array(pixels, labels, size), names, size or pixels.shape[1], 1, content)


# --- the files of MNIST ---


def _idx(data: Images, split: str) -> _Kept:
    assert data.path is not None
    folder = Path(data.path).expanduser()
    classes = 1 + max(int(idx.read_idx(folder, name)[1].max()) for name in ("train", "valid"))
    pixels, labels = idx.read_idx(folder, split)
    if pixels.shape[1] != pixels.shape[2] and data.size is None:
        raise UserError(
            f"the images in {folder} have {pixels.shape[1]} x {pixels.shape[2]} pixels, which is not a "
            "square; set data.size"
        )
    return _kept(pixels, labels, classes, data.size)


# --- folders, and archives of folders ---


def _folder_images(data: Images) -> _Kept:
    assert data.path is not None
    path = Path(data.path).expanduser()
    if not path.exists():
        raise UserError(
            f"there are no images at {path}; set data.path to a folder or an archive of images"
        )
    files = {path.name: path}
    if path.is_dir():
        files = {name: path / name for name, _ in _contents(path) if _is_image(name)}
        with readable_file(path):
            for file in files.values():
                in_folder(path, file)
    identity = []
    for name, file in sorted(files.items()):
        # The name of a symlink decides the class, and its target the pixels.
        about = file.stat()
        identity.append((name, str(file.resolve()), about.st_size, about.st_mtime_ns))
    key = json.dumps(["names, splits, pixels of 8 bits", identity, data.size])
    folder = cache_folder(data.cache, [str(path.resolve()), data.size], key)
    cached_folder(folder, lambda work: _decode(path, data.size, work))
    store = _mapped_images(folder)
    about = read_record(
        folder / "about.json", make_again(folder), ("classes", "content", "trained")
    )
    size, channels = store.pixels.shape[2:]
    split = None
    if about["trained"] < len(store):
        split = np.arange(about["trained"]), np.arange(about["trained"], len(store))
    return _Kept(store, tuple(about["classes"]), size, channels, about["content"], split=split)


def _is_image(name: str) -> bool:
    """Whether a file is an image that is not hidden, in a folder that is not hidden."""
    place = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in place.parts)
    return place.suffix.lower() in _SUFFIXES and not hidden


def _contents(path: Path, wanted: Container[str] = ()) -> Iterator[tuple[str, bytes]]:
    """The names of all files, with the bytes of the wanted files."""
    with readable_file(path):
        read = _in_folder if path.is_dir() else _in_zip if _is_zip(path) else _in_tar
        made = 0
        size = 0 if path.is_dir() else path.stat().st_size
        for n, (name, content) in enumerate(read(path, wanted), 1):
            made += 0 if path.is_dir() else len(content)
            file_limits().check(str(path), entries=n)
            file_limits().check_expansion(str(path), made, size)
            yield name, content


def _is_zip(path: Path) -> bool:
    with open_regular(path.resolve()) as raw:
        return zipfile.is_zipfile(raw)


def _in_folder(path: Path, wanted: Container[str]) -> Iterator[tuple[str, bytes]]:
    for file in path.rglob("*"):
        name = file.relative_to(path).as_posix()
        if file.is_symlink() and file.is_dir():
            in_folder(path, file)
        elif not file.is_dir():
            yield name, read_regular(in_folder(path, file)) if name in wanted else b""


def _in_zip(path: Path, wanted: Container[str]) -> Iterator[tuple[str, bytes]]:
    with open_regular(path.resolve()) as raw, zipfile.ZipFile(raw) as archive:
        for about in archive.infolist():
            content = b""
            if about.filename in wanted:
                # `zipfile` reads no more than this size.
                file_limits().check(f"{about.filename} in {path}", record=about.file_size)
                content = archive.read(about)
            yield about.filename, content


def _in_tar(path: Path, wanted: Container[str]) -> Iterator[tuple[str, bytes]]:
    with open_regular(path.resolve()) as raw:
        head = raw.peek(8)  # type: ignore[attr-defined]
        kind = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)
        file: Any = raw if kind is None else decompress_stream(raw, COMPRESSED[kind], path)
        before = -1
        with file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                # Otherwise a negative size makes `tarfile` read the same member forever.
                if member.offset <= before:
                    raise tarfile.TarError("its members are not in order")
                before = member.offset
                yield member.name, _member(archive, member, path) if member.name in wanted else b""
            # `tarfile` treats a damaged header or a truncated archive as the end, so read the
            # block that must follow.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.TarError("it is cut off or damaged; copy or pack it again")


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes:
    file = archive.extractfile(member)
    # The size of a sparse member, or of the target of a link, does not depend on the archive.
    content = b"" if file is None else file.read(file_limits().record + 1)
    file_limits().check(f"{member.name} in {path}, or its first part,", record=len(content))
    return content


def _splits(names: list[str]) -> tuple[list[str], list[str]]:
    """The images for training and for validation, by the folders that they are in.

    All images are for training, unless a folder ``train`` of classes is next to a validation
    folder.
    """
    places = [PurePosixPath(name).parts for name in names]
    common = posixpath.commonpath([PurePosixPath(name).parent for name in names])
    top = len(PurePosixPath(common).parts)
    below: dict[str, list[str]] = {}
    for name, place in zip(names, places, strict=True):
        below.setdefault(place[top], []).append(name)
    valid = next((split for split in _VALIDATION if split in below), None)
    # With fewer parts, ``train`` is the name of a class.
    classes = any(place[top] == "train" and len(place) > top + 2 for place in places)
    return (below["train"], below[valid]) if valid and classes else (names, [])


def _decode(path: Path, size: int | None, work: Path) -> None:
    """Write pixels, labels and classes, in the order of the file names: training images first."""
    names = sorted({name for name, _ in _contents(path) if _is_image(name)})
    if not names:
        raise UserError(f"no images in {path}: there is no .jpg, .jpeg or .png file")
    train, valid = _splits(names)
    names = train + valid
    of = {name: PurePosixPath(name).parent.name for name in names}
    if astray := [name for name in names if not of[name]]:
        raise UserError(
            f"{astray[0]} in {path} has no class: put each image into a folder with the name of its class"
        )
    classes = sorted({of[name] for name in train})
    if unknown := [name for name in valid if of[name] not in classes]:
        raise UserError(
            f"{unknown[0]} in {path} is a validation image of the class {of[unknown[0]]!r}, but no training image is of this "
            "class: put each image into a folder with the name of its class"
        )
    if len(classes) == 1:
        raise UserError(
            f"all images in {path} are of one class, {classes[0]!r}, but training needs at least two classes"
        )
    _write_pixels(path, names, size, work / "pixels.npy")
    np.save(work / "labels.npy", np.array([classes.index(of[name]) for name in names], np.int32))
    content = hashlib.sha256(
        "".join(sha256(work / f"{part}.npy") for part in ("pixels", "labels")).encode()
    ).hexdigest()
    write_record(
        work / "about.json", {"classes": classes, "content": content, "trained": len(train)}
    )


def _write_pixels(path: Path, names: list[str], size: int | None, file: Path) -> None:
    place = {name: i for i, name in enumerate(names)}
    pixels = None
    first = ""
    gray = True
    files = _contents(path, place)
    shown: Json = {"desc": "decode", "unit": " files", "disable": None, "leave": False}
    for name, content in tqdm(files, total=len(names), **shown):
        if name not in place:
            continue
        image, is_gray = _decoded_image(content, f"{name} in {path}", size)
        gray = gray and is_gray
        here = f"{name} in {path} has {image.width} x {image.height} pixels"
        if pixels is None:
            if image.width != image.height:
                raise UserError(f"{here}, which is not a square; set data.size")
            shape = (len(names), image.height, image.width, 3)
            first = name
            if size is None:
                stored = [path / each for each in names] if path.is_dir() else [path]
                read = sum(each.stat().st_size for each in stored)
                file_limits().check_expansion(str(path), math.prod(shape), read)
            pixels = _new_array(file, shape)
        if image.size != pixels.shape[1:3]:
            raise UserError(
                f"{here}, but {first} {pixels.shape[1]} x {pixels.shape[2]}; set data.size"
            )
        pixels[place[name]] = np.asarray(image)
    assert pixels is not None  # names is not empty
    if gray:
        _narrow(pixels, file)


def _new_array(file: Path, shape: tuple[int, ...]) -> np.memmap:
    """A new array in a file. Its space on the disk is taken at once.

    If the disk became full later, the system would end the process with SIGBUS.
    """
    array = np.lib.format.open_memmap(file, "w+", np.uint8, shape)
    if hasattr(os, "posix_fallocate"):
        with file.open("rb+") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return array


def _narrow(pixels: np.ndarray, file: Path) -> None:
    """Write one of three equal channels to ``file``, in parts, because memory may be small."""
    part = file.with_suffix(".part")
    shape = (*pixels.shape[:3], 1)
    gray = _new_array(part, shape)
    for first in range(0, len(gray), _AT_ONCE):
        gray[first : first + _AT_ONCE] = pixels[first : first + _AT_ONCE, ..., :1]
    gray.flush()
    part.replace(file)


def _decoded_image(content: bytes, name: str, size: int | None) -> tuple[Any, bool]:
    """Decode an image.

    Returns:
      A Pillow image in colours, and whether the file has only gray.

    Raises:
      UserError: the file is damaged.
    """
    from PIL import Image, ImageOps

    with readable_file(name, "replace or remove the image"), _opened(content, name) as opened:
        gray = opened.mode in ("1", "L")
        image = opened.convert("RGB")
    if size is not None:
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return image, gray


class _TimedBytes(io.BytesIO):
    """The bytes of an image. Reading them fails when its decoder has computed for too long."""

    def __init__(self, content: bytes, name: str):
        super().__init__(content)
        self._name = name
        self._end = time.thread_time() + file_limits().seconds

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() > self._end:
            raise _too_slow(self._name)
        return super().read(size)


def _too_slow(what: str) -> UntrustedError:
    seconds = file_limits().seconds
    return UntrustedError(
        f"{what} takes more than {seconds:g} s to decode. If you trust the file, use --limits seconds={10 * seconds:g}"
    )


def _opened(content: bytes, name: str) -> Any:
    """A Pillow image of at most 8 bits per channel, from a PNG or JPEG file.

    Other decoders of Pillow start programs, such as Ghostscript, or have had more errors.

    Pillow itself cuts gray values of 16 bits off at 255, so nearly all pixels would be white.

    Args:
      content: the bytes of the file.
      name: the file, for messages.

    Raises:
      UntrustedError: the image takes too much time.
    """
    from PIL import Image

    # Pillow only warns before it decodes an image of a gigabyte.
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    image = Image.open(_TimedBytes(content, name), formats=("PNG", "JPEG"))
    # A scan of a JPEG may have only a few bytes, but for each of them the decoder visits all pixels.
    scans = 1 if image.format == "PNG" else content.count(b"\xff\xda")
    if scans * image.width * image.height > _SPEED * file_limits().seconds:
        raise _too_slow(f"{name}, with {scans} scans of {image.width} x {image.height} pixels,")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image


# --- tensorflow-datasets ---


class _Records:
    """Encoded images, because the images of ImageNet differ in size."""

    def __init__(self, source: Any, image: str, label: str):
        self.source = source
        self.image = image
        self.label = label

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        name = f"record {i} of tensorflow-datasets"
        with readable_file(name, "prepare the dataset again"):
            record = self.source[i]
            image = _opened(record[self.image], name)
            image.load()
            return image, int(record[self.label])


def _tfds_images(data: Images) -> tuple[_Kept, _Kept | None]:
    import tensorflow_datasets as tfds

    from train.extras.text.tfds import prepared_dataset

    assert data.name is not None
    builder = prepared_dataset(data.name, data.path)
    keys = builder.info.supervised_keys or ("image", "label")
    features = builder.info.features
    if not all(key in features for key in keys) or not hasattr(features[keys[1]], "names"):
        raise UserError(
            f"{data.name} is not a dataset of images with one class each: its features are {', '.join(features)}"
        )
    rows, columns, channels = features[keys[0]].shape
    if data.size is None and (rows is None or rows != columns):
        raise UserError(f"the images of {data.name} are not all squares of one size; set data.size")

    def kept(split: str) -> _Kept:
        source = builder.as_data_source(split, decoders={keys[0]: tfds.decode.SkipDecoding()})
        store = _Records(source, *keys)
        info = builder.info.splits[split]
        what = [
            builder.info.full_name,
            split,
            info.num_examples,
            info.num_bytes,
            list(info.shard_lengths),
        ]
        content = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        return _Kept(
            store,
            tuple(features[keys[1]].names),
            data.size or rows,
            1 if channels == 1 else 3,
            content,
        )

    valid = next((s for s in ("validation", "test") if s in builder.info.splits), None)
    return kept("train"), kept(valid) if valid else None


DATASETS.add("Images", Images)
