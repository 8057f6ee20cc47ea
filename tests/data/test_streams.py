"""Streams: their order for any readers, ranks and processes, and what a resume reads again."""

import math
import pickle
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import own_datasets
import own_streams
import pytest
import torch
from slow_rows import slow_but

from ddp_lab.config.errors import ConfigError, SampleError
from ddp_lab.data import stream as streams
from ddp_lab.data.batch import LoaderOptions
from ddp_lab.data.images import ImageOptions
from ddp_lab.data.sources import Own, Reading
from ddp_lab.data.stream import Reader, Stream, copies_of, read_all, require_same_stream
from ddp_lab.data.stream_loader import StreamLoader, number_of_processes
from ddp_lab.run.build_data import make_source
from ddp_lab.world.planned import PlannedRuntime

BATCH = 12
IMAGES = ImageOptions(3, 8)


def stream_of(make: Callable[[], Any], readers: int = 1, **options: Any) -> Stream:
    stream = Stream(make, Reading("the stream", 5, **options), readers, state_seconds=0.0)
    stream.check(make())
    return stream


def loader(stream: Stream, rank: int = 0, ranks: int = 1, processes: int = 0) -> StreamLoader:
    options = LoaderOptions(
        BATCH, rank, ranks, torch.device("cpu"), [0.0], [1 / 255], True, 5, num_workers=processes
    )
    return StreamLoader(stream, options)


def read(stream: Stream, batches: int, ranks: int = 1, processes: int = 0, start: int = 0) -> Any:
    """Return the samples of global batches, [batches, BATCH, ...], in their order."""
    parts = []
    for rank in range(ranks):
        loader_of_rank = loader(stream, rank, ranks, processes)
        loader_of_rank.set_epoch(1, start)
        local = [batch.inputs for batch in islice(loader_of_rank, batches)]
        loader_of_rank.close()
        parts.append(torch.stack(local))
    return torch.stack(parts, 2).flatten(1, 2)


def in_order(readers: int, samples: int) -> torch.Tensor:
    """Return what k readers of `Images` yield in turn, which begin again."""
    parts = [[*own_streams.Images().shard(readers, reader)] for reader in range(readers)]
    images = []
    for number in range(samples):
        part = parts[number % readers]
        image, _ = part[number // readers % len(part)]
        images.append(image)
    return torch.stack(images).float()


# a multiple of the ranks, a divisor of them, and neither
@pytest.mark.parametrize("readers", slow_but([1, 3, 6], [1, 2, 3, 4, 6]))
@pytest.mark.parametrize("ranks", slow_but([1, 2, 3], [1, 2, 3, 4]))
def test_order_is_that_of_the_readers_for_any_ranks(readers, ranks):
    stream = stream_of(own_streams.Images, readers)
    expected = in_order(readers, 10 * BATCH).view(10, BATCH, 1, 28, 28)
    assert torch.allclose(read(stream, 10, ranks), expected, atol=1e-3)
    later = read(stream, 4, ranks, start=6 * BATCH)
    assert torch.allclose(later, expected[6:], atol=1e-3)


@pytest.mark.parametrize(
    ("readers", "ranks", "processes"), [pytest.param(4, 1, 2, marks=pytest.mark.slow), (4, 2, 4)]
)
def test_processes_do_not_change_the_order(readers, ranks, processes):
    stream = stream_of(own_streams.Noisy, readers)
    assert loader(stream, 0, ranks, processes)._processes == 2
    expected = read(stream, 5)
    assert torch.equal(read(stream, 5, ranks, processes), expected)
    # the first sample is not one of the first process
    later = read(stream, 2, ranks, processes, start=3 * BATCH)
    assert torch.equal(later, expected[3:])


def test_processes_divide_the_readers_and_the_batch():
    assert [number_of_processes(most, 12) for most in (0, 1, 2, 4, 5, 8, 20)] == [
        *(0, 1, 2, 4, 4, 6, 12),
    ]
    stream = stream_of(own_streams.Images, 9)
    assert loader(stream, processes=9)._processes == 3  # a batch has 12 samples


def test_random_numbers_of_a_sample_depend_on_its_place_alone():
    stream = stream_of(own_streams.Noisy, 2)
    torch.manual_seed(0)
    expected = read(stream, 6)
    torch.manual_seed(1)
    assert torch.equal(read(stream, 6, ranks=3), expected)
    assert torch.equal(read(stream, 2, ranks=2, start=4 * BATCH), expected[4:])
    # noise and buffer are other ones in each pass
    assert not torch.equal(expected[0], read(stream, 1, start=own_streams.SIZE // 4 * BATCH)[0])


def positions_after(stream: Stream, batches: int, ranks: int = 1) -> dict[str, Any]:
    """Return what a checkpoint after some batches has of a stream."""
    merged: dict[str, Any] = {}
    for rank in range(ranks):
        loader_of_rank = loader(stream, rank, ranks)
        loader_of_rank.set_epoch(1)
        _ = [*islice(loader_of_rank, batches)]
        position = loader_of_rank.stream_position(PlannedRuntime(1, 1, "float32"))
        assert position["readers"] == stream.readers
        for reader, state in position["states"].items():
            if reader not in merged or state[0] > merged[reader][0]:
                merged[reader] = state
    return {"readers": stream.readers, "states": merged}


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resume_from_a_state_reads_no_sample_again(readers, ranks, tmp_path, monkeypatch):
    stream = stream_of(own_streams.Stateful, readers)
    expected = read(stream, 9)
    position = positions_after(stream, 5, ranks)
    assert position["states"].keys() == {str(reader) for reader in range(readers)}
    notes = tmp_path / "notes"
    monkeypatch.setenv("STREAM_NOTES", str(notes))
    # 60 samples are one pass of 40 and half of the next one
    in_pass = 5 * BATCH % own_streams.SIZE // readers
    for rank in range(2):  # of another number of ranks
        notes.write_text("")
        resumed = loader(stream, rank, 2)
        resumed.begin_at(position)
        resumed.set_epoch(1, 5 * BATCH)
        local = torch.stack([batch.inputs for batch in islice(resumed, 4)])
        assert torch.equal(local, expected[5:, rank::2])
        begin = int(notes.read_text().split()[0])
        assert in_pass - ranks < begin <= in_pass


def test_position_after_the_checkpoint_is_not_used():
    stream = stream_of(own_streams.Stateful)
    expected = read(stream, 9)
    position = positions_after(stream, 8)
    resumed = loader(stream)
    resumed.begin_at(position)
    resumed.set_epoch(1, 2 * BATCH)
    assert torch.equal(next(iter(resumed)).inputs, expected[2])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (own_streams.Images, "it has no state_dict and load_state_dict"),
        (own_streams.Losing, "does not yield sample 12 again"),
        (own_streams.Unsaved, "its state_dict cannot be saved: ConfigError: it must consist of"),
        (partial(own_streams.hugging_face, "train", buffer=4), "does not yield sample"),
    ],
)
def test_state_that_would_change_the_order_is_not_used(make, problem, caplog):
    stream = stream_of(make, targets="label" if isinstance(make, partial) else 1)
    loader_of_rank = loader(stream)
    with caplog.at_level("INFO", logger="ddp_lab"):
        _ = [*islice(loader_of_rank, 4)]
    assert not loader_of_rank.positions
    lines = [record.getMessage() for record in caplog.records]
    line = next(line for line in lines if problem in line)
    assert line.startswith("the stream: a resume reads the samples before again, and skips them: ")
    assert sum(problem in line for line in lines) == 1


def targets_of(stream: Stream, batches: int, start: int = 0, position: Any = None) -> list[int]:
    loader_of_rank = loader(stream)
    loader_of_rank.begin_at(position or {})
    loader_of_rank.set_epoch(1, start)
    return [
        number for batch in islice(loader_of_rank, batches) for number in batch.targets.tolist()
    ]


@pytest.mark.parametrize(
    "readers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_stream_of_datasets_is_divided_by_its_shards_and_resumes_from_its_state(readers):
    stream = stream_of(partial(own_streams.hugging_face, "train"), readers, targets="label")
    per_reader = own_streams.SIZE // readers
    numbers = [
        number % readers * per_reader + number // readers % per_reader
        for number in range(5 * BATCH)
    ]
    assert targets_of(stream, 5) == [number % 10 for number in numbers]
    position = positions_after(stream, 4)
    assert len(position["states"]) == readers
    later = targets_of(stream, 5, 4 * BATCH, position)
    assert later == targets_of(stream, 5, 4 * BATCH)


def test_shuffled_stream_of_datasets_has_another_order_in_each_pass():
    make = partial(own_streams.hugging_face, "train", size=24, buffer=24)
    targets = targets_of(stream_of(make, targets="label"), 4)
    assert sorted(targets[:24]) == sorted(targets[24:])
    assert targets[:24] != targets[24:]


def pad(samples: list[Any]) -> Any:
    """Return a batch of images with their labels, with the number of samples in each row."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels) * 100 + len(samples)


def test_collate_fn_gets_all_samples_of_a_local_batch():
    stream = stream_of(own_streams.Images, 4, collate_fn=pad)
    assert not stream.has_fixed_shapes
    loader_of_rank = loader(stream, 1, 2, processes=4)
    assert loader_of_rank._processes == 1
    loader_of_rank.set_epoch(1)
    batch = next(iter(loader_of_rank))
    loader_of_rank.close()
    assert batch.targets.tolist() == [100 * (number % 10) + 6 for number in range(1, 12, 2)]


def test_first_samples_are_those_of_a_rank():
    stream = stream_of(own_streams.Images)
    batch = loader(stream, 1, 3).first(2)
    assert batch.targets.tolist() == [1, 4]
    assert batch.global_size == 6
    _, targets = stream.batch(0, range(3))
    assert isinstance(targets, torch.Tensor)
    assert targets.tolist() == [0, 1, 2]


def test_batches_are_full_and_never_end():
    loader_of_rank = loader(stream_of(own_streams.Images), 0, 3)
    assert [batch.global_size for batch in islice(loader_of_rank, 9)] == [BATCH] * 9
    assert len(loader_of_rank) > 10**15


@pytest.mark.parametrize(
    ("make", "readers", "message"),
    [
        (own_streams.Whole, 2, r"data.readers=2: the stream has no method shard\(num, index\)"),
        (own_streams.Once, 1, "iter() returns the same iterator twice"),
        (partial(own_streams.Images, 0), 1, "the stream: pass 1 has no samples; each must have"),
        (
            partial(own_streams.hugging_face, "train", shards=2),
            4,
            "data.readers=4: the stream has 2 shards, and a reader needs at least one. Use at most "
            "data.readers=2",
        ),
        (lambda: Unsharded(), 2, r"shard\(2, 0\) failed: ValueError: no parts"),
        (lambda: Unsharded(7), 2, r"shard\(2, 0\) must return an iterable dataset, got int"),
    ],
)
def test_stream_that_cannot_keep_its_order_is_refused(make, readers, message):
    with pytest.raises(ConfigError, match=message.replace("iter()", r"iter\(\)")):
        stream_of(make, readers)


class Unsharded(own_streams.Images):
    """Its method shard raises, or returns no dataset."""

    def __init__(self, part: Any = None):
        super().__init__()
        self.returned = part

    def shard(self, num, index):
        if self.returned is None:
            raise ValueError("no parts")
        return self.returned


def test_part_without_samples_is_reported_by_its_reader():
    stream = stream_of(partial(own_streams.Images, 3), 4)
    with pytest.raises(SampleError, match="pass 1 of reader 3 of 4 has no samples"):
        read(stream, 1)


@pytest.mark.parametrize("processes", [0, 1])
def test_sample_that_cannot_be_read_is_named(processes):
    stream = stream_of(own_streams.Failing)
    message = r"^the stream: sample 30 cannot be read: ValueError: file 30 is damaged \(own_str"
    with pytest.raises(SampleError, match=message):
        read(stream, 3, processes=processes)


def test_samples_of_different_shapes_are_refused_also_between_processes():
    with pytest.raises(SampleError, match="are in one batch, but their inputs have the shapes"):
        read(stream_of(Growing), 1)
    with pytest.raises(SampleError, match=r"two samples in one batch have the shapes \[\(1, 2\)"):
        read(stream_of(Growing, 2), 1, processes=2)


class Growing(own_streams.Images):
    """Even samples are smaller than odd ones."""

    def read(self, number):
        return torch.zeros(1, 2 + number % 2), 0


def test_crops_by_number_are_refused():
    options = LoaderOptions(
        BATCH, 0, 1, torch.device("cpu"), [0.0], [1.0], True, crop_padding=2, flip=True
    )
    with pytest.raises(ConfigError, match=r"data.flip=true: are drawn for all"):
        StreamLoader(stream_of(own_streams.Images), options)


def test_ranks_with_other_samples_are_refused():
    values = [("a", {"val": 3}), ("a", {"val": 3}), ("b", {"val": 3})]
    require_same_stream(values[:2])
    with pytest.raises(ConfigError, match="is not the same on rank 2 as on rank 0"):
        require_same_stream(values)


def test_stream_that_evaluates_is_counted_once(monkeypatch):
    reading = Reading("the stream", 5)
    items = read_all(own_streams.Ending(), reading, "val")
    assert [label for _, label in items] == [
        own_streams.Evaluated()[index][1] for index in range(31)
    ]
    monkeypatch.setattr(streams, "LISTED", 30)
    with pytest.raises(ConfigError, match="the val set is a stream of more than 30 samples"):
        read_all(own_streams.Ending(), reading, "val")
    with pytest.raises(ConfigError, match="sample 30 of the val set cannot be read: ValueError"):
        read_all(own_streams.Failing(), reading, "val")


def own(make: Callable[..., Any], readers: int = 1) -> Own:
    splits = {"train": "train", "val": "val", "test": None}
    return Own(make, "mine.stream", ["split"], splits, IMAGES, None, 5, readers=readers)


def test_stream_is_pickled_for_its_processes():
    """They may not be forks: with some versions of Python, and in the real step of a plan."""
    data = {
        "dataset": {"_target_": "own_streams.images"},
        "val_split": "val",
        "test_split": None,
        "num_classes": None,
        "readers": 2,
        **{name: getattr(IMAGES, name) for name in ImageOptions.__dataclass_fields__},
    }
    dataset = make_source(data, seed=5).load()
    copied = pickle.loads(pickle.dumps(dataset.train))
    assert torch.equal(read(copied, 2), read(dataset.train, 2))


def test_readers_of_a_map_style_dataset_are_refused():
    with pytest.raises(ConfigError, match=r"data.readers=2: is for a stream, an Iterable"):
        own(own_datasets.Shapes, readers=2).load()


def test_sets_of_a_stream_are_loaded_with_a_hash_of_its_first_sample():
    dataset = own(own_streams.ending).load()
    assert dataset.train.is_endless
    assert dataset.val is not None
    assert dataset.val.size == 31
    assert dataset.describe_sets() == "training on a stream, validating on 31"
    assert dataset.classes == [*map(str, range(10))]
    assert dataset.digest == own(own_streams.images).load().digest
    assert dataset.digest != own(own_streams.noisy).load().digest


def test_images_of_pillow_are_transformed_by_their_place():
    stream = stream_of(lambda: Pictures(), images=IMAGES, classes=3)
    assert stream.first[0].shape == (3, 8, 8)
    assert torch.equal(read(stream, 2), read(stream, 2, ranks=2))


class Pictures(torch.utils.data.IterableDataset):
    """Images of Pillow."""

    def __iter__(self):
        shapes = own_datasets.Shapes("train")
        return (shapes[index] for index in range(len(shapes)))


def test_object_of_a_user_is_copied():
    dataset = own_streams.Stateful()
    make = copies_of(dataset, "train")
    reader = Reader(Stream(make, Reading("train", 5)), 0)
    reader.take(7)
    assert dataset.done == 0
    dataset.generator = (number for number in range(3))
    with pytest.raises(ConfigError, match="train: every reader of a stream gets a copy of it"):
        copies_of(dataset, "train")


def test_ranks_read_only_the_samples_that_they_need(monkeypatch):
    """With readers that are a multiple of the ranks these are the samples that they train on."""
    drawn: list[int] = []
    draw = Reader.draw

    def counting(reader: Reader, convert: bool = True) -> Any:
        drawn.append(reader.index)
        return draw(reader, convert)

    monkeypatch.setattr(Reader, "draw", counting)
    for readers, ranks in ((1, 3), (2, 4), (4, 2), (4, 4), (6, 4)):
        stream = stream_of(own_streams.Images, readers)
        drawn.clear()
        loader_of_rank = loader(stream, 1, ranks)
        _ = [*islice(loader_of_rank, 4)]
        shared = math.gcd(readers, ranks)
        assert {index % shared for index in drawn} == {1 % shared}
        assert len(drawn) == pytest.approx(4 * BATCH / shared, abs=readers)
