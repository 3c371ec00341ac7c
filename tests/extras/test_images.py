"""Images: reading from folders and archives, caching, the validation split, and augmentation."""

import gzip
import io
import lzma
import os
import shutil
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import chex
import numpy as np
import pytest
import tensorflow_datasets as tfds
from pictures import CLASSES, picture, tree
from PIL import Image
from prepared import prepare

from train.common.errors import UserError
from train.extras.images import pixels
from train.extras.images.augment import DEIT, Augment
from train.extras.images.images import Images, read_images


@pytest.fixture
def data(tmp_path):
    path, cache = str(tree(tmp_path / "tree")), str(tmp_path / "cache")
    return Images("folder", path, valid_fraction=0.25, cache=cache)


def whole(source) -> list[tuple[bytes, int]]:
    """Return every sample of a source without augmentation."""
    samples = (source.sample(i, np.random.default_rng(0)) for i in range(len(source)))
    return [(x.tobytes(), int(y)) for x, y in samples]


def normalised(folder) -> set[tuple[bytes, int]]:
    """Every image of a folder, with its class."""
    files = [*Path(folder).rglob("*.png")]
    images = [pixels.normalised_pixels(Image.open(file)).tobytes() for file in files]
    return {*zip(images, (CLASSES.index(file.parent.name) for file in files), strict=True)}


# --- reading ---


def test_digits_are_there_without_a_file():
    found = read_images(Images())
    assert (len(found.train), len(found.valid)) == (1617, 180)
    assert (found.shape, len(found.classes)) == ((8, 8, 1), 10)
    x, y = found.train.sample(0, np.random.default_rng(0))
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((8, 8, 1), np.float32, (), np.int32)
    assert -1 <= x.min() < 0 < x.max() <= 1
    assert len({int(found.valid.sample(i, np.random.default_rng(0))[1]) for i in range(180)}) == 10
    large, _ = read_images(Images(size=16)).train.sample(0, np.random.default_rng(0))
    assert large.shape == (16, 16, 1)


def test_a_sample_is_its_file_normalised(data):
    found = read_images(data)
    assert found.classes == CLASSES and found.shape == (12, 12, 3)
    assert {*whole(found.train), *whole(found.valid)} == normalised(data.path)
    x = pixels.normalised_pixels(Image.new("RGB", (1, 1), (255, 0, 128)))
    expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, (128 / 255 - 0.406) / 0.225]
    np.testing.assert_allclose(x[0, 0], expected, rtol=1e-6)


def archived(data, kind: str, tmp_path) -> str:
    """Write the tree to an archive in another order, below another folder, with unrelated files."""
    root, path = Path(data.path), tmp_path / f"tree.{kind}"
    files = sorted(root.rglob("*.png"), reverse=True)
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("README.txt", "no image")
            for file in files:
                archive.write(file, f"train/{file.relative_to(root)}")
        return str(path)
    with tarfile.open(path, f"w:{kind.partition('.')[2]}") as archive:
        junk = tarfile.TarInfo("train/ant/._0.png")  # macOS adds such files.
        junk.size = 4
        archive.addfile(junk, io.BytesIO(b"junk"))
        for file in files:
            archive.add(file, f"train/{file.relative_to(root)}")
    return str(path)


@pytest.mark.parametrize("kind", ["tar", "tar.xz", "zip"])
def test_an_archive_is_its_folder(data, kind, tmp_path):
    paths = (data.path, archived(data, kind, tmp_path))
    folder, archive = (read_images(replace(data, path=path)) for path in paths)
    assert archive.classes == folder.classes
    assert whole(archive.train) == whole(folder.train)
    assert whole(archive.valid) == whole(folder.valid)


def test_gray_images_have_one_channel_and_mixed_ones_three(tmp_path, data, monkeypatch):
    gray, saved, save = replace(data, path=str(tree(tmp_path / "gray", mode="L"))), [], np.save
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda file, x: (saved.append(np.ndim(x)), save(file, x)))
        found = read_images(gray)
    assert found.shape == (12, 12, 1)
    assert saved == [1]  # the labels; the images are not copied in memory
    assert {*whole(found.train), *whole(found.valid)} == normalised(gray.path)
    picture(0).save(Path(gray.path) / "ant" / "0.png")
    assert read_images(gray).shape == (12, 12, 3)


def test_images_of_all_sizes_are_brought_to_one(data):
    picture(7, (20, 16)).save(Path(data.path) / "bee" / "4.png")
    with pytest.raises(UserError, match=r"bee/4.png in .* 20 x 16 pixels, but .* 12 x 12; set"):
        read_images(data)
    found = read_images(replace(data, size=10))
    assert found.shape == (10, 10, 3)
    assert {len(x) for x, _ in whole(found.train)} == {10 * 10 * 3 * 4}


def test_gray_images_of_16_bits_keep_their_values(tmp_path, data):
    gray = np.random.default_rng(0).integers(0, 1 << 16, (12, 12), np.uint16)
    for file in Path(data.path).rglob("*.png"):
        Image.fromarray(gray).save(file)
    found = read_images(data)
    assert found.shape == (12, 12, 1)
    expected = pixels.normalised_pixels(Image.fromarray((gray >> 8).astype(np.uint8)))
    np.testing.assert_array_equal(found.train.sample(0, np.random.default_rng(0))[0], expected)


@pytest.mark.parametrize("archive", [False, True])
def test_hidden_folders_are_no_classes(tmp_path, data, archive):
    for hidden in (".thumbnails", "ant/.ipynb_checkpoints"):
        (Path(data.path) / hidden).mkdir()
        picture(0).save(Path(data.path) / hidden / "0.png")
    found = read_images(replace(data, path=archived(data, "zip", tmp_path)) if archive else data)
    assert found.classes == CLASSES
    assert len(found.train) + len(found.valid) == 24


@pytest.mark.parametrize("archive", [False, True])
def test_the_folders_of_splits_are_splits(tmp_path, data, archive):
    tree(tmp_path / "splits" / "train")
    for split, count in (("val", 3), ("test", 2)):
        tree(tmp_path / "splits" / split, count=count)
    splits = replace(data, path=str(tmp_path / "splits"))
    path = archived(splits, "zip", tmp_path) if archive else splits.path
    found = read_images(replace(splits, path=path))
    assert found.classes == CLASSES
    assert (len(found.train), len(found.valid)) == (24, 9)
    for split, images in (("train", found.train), ("val", found.valid)):
        alone = read_images(replace(data, path=f"{splits.path}/{split}"))
        assert sorted(whole(images)) == sorted(whole(alone.train) + whole(alone.valid))
    picture(0).save(tmp_path / "splits" / "val" / "0.png")  # as in the archive of ImageNet
    with pytest.raises(UserError, match=r"val/0.png in .* no training image is of this class"):
        read_images(splits)


def test_train_and_test_can_be_classes(data):
    root = Path(data.path)
    for name in ("train", "test"):
        shutil.copytree(root / "ant", root / name)
    found = read_images(data)
    assert found.classes == tuple(sorted({*CLASSES, "train", "test"}))
    assert len(found.train) + len(found.valid) == 40


# --- the cache ---


def test_the_folder_of_a_symlink_is_its_class(tmp_path, data):
    # Links out of the folder are an error, so the images are in a hidden folder inside.
    originals = shutil.copytree(data.path, tmp_path / "links" / ".originals")
    for name in CLASSES:
        (tmp_path / "links" / name).mkdir(parents=True)
        for file in (originals / name).iterdir():
            (tmp_path / "links" / name / f"{name}{file.name}").symlink_to(file)
    links = replace(data, path=str(tmp_path / "links"))

    def counted() -> list[int]:
        found = read_images(links)
        return np.bincount([y for _, y in whole(found.train) + whole(found.valid)]).tolist()

    assert counted() == [8, 8, 8]
    # the order of the files stays the same
    (tmp_path / "links" / "ant" / "ant7.png").rename(tmp_path / "links" / "bee" / "ant7.png")
    assert counted() == [7, 9, 8]


def test_images_are_decoded_once_and_again_when_a_file_changes(data, monkeypatch):
    before = whole(read_images(data).train)
    with monkeypatch.context() as patch:
        patch.setattr("PIL.Image.open", None)  # A call would raise an error.
        assert whole(read_images(replace(data, augment=Augment())).train) == before
    for file in Path(data.path).rglob("*.png"):
        picture(0).save(file)
        os.utime(file, ns=(0, 0))
    assert len(set(whole(read_images(data).train))) == len(CLASSES)


def test_decoding_that_fails_leaves_nothing_behind(data, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("numpy.lib.format.open_memmap", full)
        with pytest.raises(OSError, match="No space left"):
            read_images(data)
    assert list(Path(data.cache).iterdir()) == []
    assert len(read_images(data).train) == 18


# --- validation split ---


def test_training_and_validation_images_are_a_partition(data):
    found = read_images(data)
    train, valid = set(whole(found.train)), set(whole(found.valid))
    assert not train & valid and (len(train), len(valid)) == (18, 6)
    assert {y for _, y in valid} == {0, 1, 2}
    assert whole(read_images(data).valid) == whole(found.valid)


# --- errors ---


def only_one_class(folder: Path) -> None:
    for name in CLASSES[1:]:
        shutil.rmtree(folder / name)


def damage(folder: Path) -> None:
    file = folder / "bee" / "3.png"
    file.write_bytes(file.read_bytes()[:200])


@pytest.mark.parametrize(("change", "says"), [
    (lambda folder: [file.unlink() for file in folder.rglob("*.png")],
     r"no images in .*/tree: there is no .jpg, .jpeg or .png file"),
    (only_one_class, "are of one class, 'ant'"),
    (lambda folder: picture(0).save(folder / "stray.png"), r"stray.png in .* has no class"),
    (damage, r"cannot read bee/3.png in .*/tree"),
], ids=["empty", "one class", "outside of a class", "damaged"])  # fmt: skip
def test_folders_that_hold_no_classes_of_images_are_refused(data, change, says):
    change(Path(data.path))
    with pytest.raises(UserError, match=says):
        read_images(data)
    assert not [*Path(data.cache).glob("*")]


def test_a_damaged_archive_is_named(tmp_path, data):
    path = tmp_path / "damaged.tar.xz"
    packed = Path(archived(data, "tar.xz", tmp_path)).read_bytes()
    for content in (lzma.compress(b"no archive"), packed[: len(packed) // 2]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read .*/damaged.tar.xz"):
            read_images(replace(data, path=str(path)))


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[vision\]'"):
        read_images(Images())


@pytest.mark.parametrize(("kind", "name", "value"), [
    *((Images, *wrong) for wrong in (("valid_fraction", 0.0), ("size", 0))),
    *((Augment, *w) for w in (("erasing", 1.5), ("smoothing", -0.1), ("mixup", -1.0), ("randaugment", -1))),
])  # fmt: skip
def test_settings_that_cannot_be(kind, name, value):
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        kind(**{name: value})


# --- tensorflow-datasets ---


def test_a_tfds_set_stays_encoded_and_keeps_its_split(tmp_path):
    """Images of different sizes."""

    def rows(count):
        for i in range(count):
            file = io.BytesIO()
            picture(i, (10 + i, 12)).save(file, "png")
            yield {"image": io.BytesIO(file.getvalue()), "label": i % 3}

    features = {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(names=CLASSES)}
    prepare(tmp_path, "tiny_pictures", features, {"train": rows(6), "test": rows(2)})
    data = Images("tfds", str(tmp_path), "tiny_pictures", size=8)
    found = read_images(data)
    assert (len(found.train), len(found.valid), found.classes) == (6, 2, CLASSES)
    samples = [found.train.sample(i, np.random.default_rng(0)) for i in range(6)]
    assert {x.shape for x, _ in samples} == {(8, 8, 3)}
    assert sorted(int(y) for _, y in samples) == [0, 0, 1, 1, 2, 2]
    crops = (pixels.central_crop(picture(i, (10 + i, 12)), 8) for i in range(2))
    expected = {pixels.normalised_pixels(crop).tobytes() for crop in crops}
    assert {x for x, _ in whole(found.valid)} == expected
    message = r"images of tiny_pictures are not all squares of one size; set data.size"
    with pytest.raises(UserError, match=message):
        read_images(replace(data, size=None))


# --- augmentation ---


def drawn(augment: Augment, count: int = 50, size=(12, 12), image=None, to: int = 12):
    image, rng = picture(3, size) if image is None else image, np.random.default_rng(0)
    return [pixels.changed(image, augment, to, rng) for _ in range(count)]


@pytest.mark.parametrize("augment", [Augment(crop="pad", flip=True), DEIT])
def test_a_sample_is_pure_in_its_generator(data, augment):
    source = read_images(replace(data, augment=augment)).train

    one, again, other, third = (source.sample(2, np.random.default_rng(i)) for i in (0, 0, 1, 2))
    chex.assert_trees_all_equal(one, again)
    assert (one[0] != other[0]).any() or (one[0] != third[0]).any()


def test_validation_is_never_augmented(data):
    assert whole(read_images(replace(data, augment=DEIT)).valid) == whole(read_images(data).valid)


def test_a_flip_is_a_mirror_half_of_the_time():
    same, found = pixels.normalised_pixels(picture(3)), drawn(Augment(flip=True), 400)
    flipped = [np.array_equal(x, same[:, ::-1]) for x in found]
    assert all(f or np.array_equal(x, same) for f, x in zip(flipped, found, strict=True))
    assert 150 < sum(flipped) < 250


def test_a_padded_crop_shifts_by_every_offset():
    same = pixels.normalised_pixels(picture(3, (16, 16)))
    black = pixels.normalised_pixels(Image.new("RGB", (20, 20)))
    black[2:18, 2:18] = same
    offsets = {(i, j): black[i : i + 16, j : j + 16].tobytes() for i in range(5) for j in range(5)}
    found = {x.tobytes() for x in drawn(Augment(crop="pad"), 300, (16, 16), to=16)}
    assert found == set(offsets.values())


def test_a_resized_crop_shows_a_part_of_the_image_enlarged():
    """The crop of a horizontal ramp shows the cropped width, scaled to the output size.

    The crop covers at least 8 % of the area, with an aspect ratio from 3/4 to 4/3.
    """
    ramp = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1)))
    crops = drawn(Augment(crop="resized"), 200, image=ramp, to=32)
    wide = [(x[4, -1, 0] - x[4, 0, 0]) / 2 for x in crops]
    assert 0.2 < min(wide) < 0.4 and 0.9 < max(wide) <= 1.0
    # No rectangle fits.
    assert pixels._rectangle(100, 2, (1.0, 1.0), 1.001, np.random.default_rng(0)) is None
    strip = drawn(Augment(crop="resized"), 5, (200, 2), to=8)  # The fallback is the central crop.
    assert {x.shape for x in strip} == {(8, 8, 3)}


@pytest.mark.parametrize("name", pixels.OPERATIONS)
def test_operations_of_randaugment_keep_size_and_mode(name):
    for mode in ("RGB", "L"):
        image = picture(5, (40, 30), mode).point(lambda v: 40 + v // 2)
        for level in (-1.0, -0.5, 0.5, 1.0):
            found = pixels.OPERATIONS[name](image, level)
            assert (found.size, found.mode) == (image.size, mode)
            if (name, mode) != ("color", "L"):  # Gray images have no color to change.
                assert found.tobytes() != image.tobytes()


def test_operations_by_hand():
    line = Image.fromarray(np.array([[0, 60, 130, 255]], np.uint8))

    def values(name, level):
        return np.asarray(pixels.OPERATIONS[name](line, level))[0].tolist()

    assert values("invert", 1.0) == [255, 195, 125, 0]
    assert values("posterize", 0.5) == [0, 0, 128, 192]  # two bits remain
    assert values("solarize", 0.5) == [0, 60, 125, 0]  # inverts values from 128
    assert values("solarize_add", 1.0) == [110, 170, 130, 255]  # changes values below 128
    assert values("brightness", 1.0) == [0, 114, 247, 255]  # multiplies by 1.9
    two = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4))
    quarter = np.asarray(pixels.OPERATIONS["translate_x"](two, 1 / 0.45 / 4))
    np.testing.assert_array_equal(quarter[:, :3], np.asarray(two)[:, 1:])


def test_randaugment_applies_each_operation_half_the_time(monkeypatch):
    levels = []
    record = {"record": lambda image, level: levels.append(level) or image}
    monkeypatch.setattr(pixels, "OPERATIONS", record)
    drawn(Augment(randaugment=2), 1000)
    assert 900 < len(levels) < 1100
    assert abs(np.mean(np.abs(levels)) - 0.9) < 0.01 and 0.03 < np.std(np.abs(levels)) < 0.05
    assert abs(np.mean(np.sign(levels))) < 0.1 and max(levels) <= 1


def test_erasing_makes_noise_of_a_rectangle():
    gray = Image.new("L", (40, 40), 128)
    found = drawn(Augment(erasing=0.25), 400, image=gray, to=40)
    parts = [np.mean(x != x[0, 0]) if (x != found[0][0, 0]).any() else 0.0 for x in found]
    erased = [p for p in parts if p]
    assert 60 < len(erased) < 140


@pytest.mark.parametrize("augment", [Augment(mixup=0.8), Augment(cutmix=1.0), DEIT])
def test_targets_are_probabilities(data, augment):
    source, rng = read_images(replace(data, augment=augment)).train, np.random.default_rng(0)
    for i in range(len(source)):
        x, y = source.sample(i, rng)
        assert (x.dtype, y.dtype, y.shape) == (np.float32, np.float32, (3,))
        assert y.min() >= 0 and abs(y.sum() - 1) < 1e-6


def test_mixup_and_cutmix_mix_targets_in_proportion():
    rng, zero = np.random.default_rng(0), np.zeros((20, 30, 3), np.float32)
    one = zero + 1
    shares = {"mixup": [], "cutmix": []}
    for name, found in shares.items():
        for _ in range(200):
            share, x = pixels.mixed_pixels(one, zero, Augment(**{name: 1.0}), rng)
            np.testing.assert_allclose(x.mean(), share, atol=1e-6)
            assert len(np.unique(x)) <= (1 if name == "mixup" else 2)
            found.append(share)
    assert abs(np.mean(shares["mixup"]) - 0.5) < 0.06  # Beta(1, 1)
    both = Augment(mixup=1.0, cutmix=1.0)
    mixed = [pixels.mixed_pixels(one, zero, both, rng)[1] for _ in range(400)]
    assert 150 < sum(set(np.unique(x)) <= {0.0, 1.0} for x in mixed) < 250


def test_label_smoothing():
    np.testing.assert_allclose(pixels.smooth_label(1, 4, 0.2), [0.05, 0.85, 0.05, 0.05], rtol=1e-6)
    rng = np.random.default_rng(0)
    x, y = pixels.augmented_sample((picture(0), 2), None, Augment(), 12, 4, rng)
    assert y == 2 and y.dtype == np.int32
    np.testing.assert_array_equal(x, pixels.normalised_pixels(picture(0)))


# --- the files of MNIST ---


def idx_file(file: Path, values: np.ndarray) -> None:
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    file.write_bytes(gzip.compress(head + values.tobytes()))


@pytest.fixture
def mnist(tmp_path):
    """Write 6 training and 4 validation images as Fashion-MNIST is published."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 6), ("t10k", 4)):
        pixels = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        idx_file(tmp_path / f"{name}-images-idx3-ubyte.gz", pixels)
        idx_file(tmp_path / f"{name}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8))
    return tmp_path


def test_the_files_of_mnist_are_read(mnist):
    split = read_images(Images("idx", str(mnist)))
    assert split.shape == (28, 28, 1) and split.classes == tuple("012345")
    assert (len(split.train), len(split.valid)) == (6, 4)
    raw = gzip.decompress((mnist / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    image = Image.fromarray(np.frombuffer(raw, np.uint8).reshape(4, 28, 28)[2])
    large = read_images(Images("idx", str(mnist), size=32))
    resized = image.resize((32, 32), Image.Resampling.BICUBIC)
    for of, expected in ((split, image), (large, resized)):
        pixels, label = of.valid.sample(2, np.random.default_rng(0))
        assert label == 2
        expected = (np.asarray(expected) / 255 - 0.5) / 0.5
        np.testing.assert_allclose(pixels[..., 0], expected, atol=1e-6)


def test_mnist_has_one_label_for_each_image(mnist):
    idx_file(mnist / "train-labels-idx1-ubyte.gz", np.zeros(5, np.uint8))
    with pytest.raises(UserError, match="one label for each"):
        read_images(Images("idx", str(mnist)))
