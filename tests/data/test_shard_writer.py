"""`ddp-lab shards`: what it writes is what data=tokens reads."""

import re
import shlex
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from launches import main_in_world, read_metrics
from token_shards import write_shard
from worlds import run_world

from ddp_lab.commands import shards
from ddp_lab.data import shard_writer
from ddp_lab.data.shard_writer import held_out_from, pieces_of

WORDS = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "nobler", "größe"]


def text(lines: int, seed: int = 0) -> str:
    words = np.random.default_rng(seed).choice(WORDS, (lines, 7))
    return "".join(f"{' '.join(line)}.\n" for line in words)


def read(folder: Path, name: str) -> list[list[int]]:
    """Return the tokens of each shard, read as the format says, after a check of its header."""
    tokens = []
    for path in sorted(folder.glob(f"{name}_*.bin")):
        content = path.read_bytes()
        header = np.frombuffer(content[:1024], "<i4")
        tokens.append(np.frombuffer(content[1024:], "<u2").tolist())
        assert header[:3].tolist() == [20240520, 1, len(tokens[-1])]
        assert not header[3:].any()
    return tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """Return the directory of a byte-level BPE, as GPT-2's is, of 300 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text(50)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.mark.covers(
    "shards --output", "shards --bytes", "shards --val-fraction", "shards --shard-size"
)
def test_bytes_are_those_of_the_files_and_each_files_end_is_held_out(tmp_path, command):
    texts = [text(40, 1).encode(), text(60, 2).encode()]
    for number, content in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(content)
    files = [tmp_path / f"{number}.txt" for number in range(2)]
    out = tmp_path / "out"
    code, printed, errors = command(
        shards.main,
        *files,
        "--bytes",
        "--output",
        out,
        "--val-fraction",
        "0.2",
        "--shard-size",
        999,
    )
    assert code == 0, errors
    trained = read(out, "train")
    held_out = read(out, "val")
    assert {len(shard) for shard in trained[:-1]} == {999}
    parts = [bytes(chain.from_iterable(shards_of_set)) for shards_of_set in (trained, held_out)]
    # the first line that begins in the last fifth of each file
    cut = [each.index(b"\n", round(0.8 * len(each)) - 1) + 1 for each in texts]
    assert parts[0] == b"".join(each[:at] for each, at in zip(texts, cut, strict=True))
    assert parts[1] == b"".join(each[at:] for each, at in zip(texts, cut, strict=True))
    assert f"{out}/train_*.bin: {len(trained)} files, {len(parts[0]):,} tokens" in printed
    assert "data.num_classes=256" in printed
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []


@pytest.mark.covers("shards --tokenizer")
def test_tokens_decode_to_the_texts(tokenizer, tmp_path, command, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setattr(shard_writer, "PIECE", 500)
    texts = [text(40, 1), text(60, 2)]
    for number, content in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(content)
    files = [tmp_path / f"{number}.txt" for number in range(2)]
    out = tmp_path / "out"
    flags = ("--tokenizer", tokenizer, "--output", out, "--val-fraction", 0)
    code, printed, errors = command(shards.main, *files, *flags)
    assert code == 0, errors
    assert "data.num_classes=320" in printed  # 300 as a multiple of 64
    assert "val_root" not in printed
    (tokens,) = read(out, "train")
    assert read(out, "val") == []
    loaded = AutoTokenizer.from_pretrained(str(tokenizer))
    assert loaded.decode(tokens) == "".join(f"<|endoftext|>{each}" for each in texts)
    expected = [[loaded.eos_token_id, *loaded(each)["input_ids"]] for each in texts]
    assert tokens == [*chain(*expected)], "pieces that end with lines have the tokens of the whole"


@pytest.mark.slow
def test_printed_line_trains_on_the_shards(tokenizer, tmp_path, command):
    source = tmp_path / "a text.txt"
    source.write_text(text(300))
    out = tmp_path / "my shards"
    flags = ("--tokenizer", tokenizer, "--output", out, "--val-fraction", 0.1)
    code, printed, errors = command(shards.main, source, *flags)
    assert code == 0, errors
    line = shlex.split(re.findall(r"^ddp-lab train (.*)$", printed, re.MULTILINE)[0])
    small = "data.context=16 model=gpt model.depth=1 model.width=16 model.heads=2 device=cpu "
    small += "data.num_workers=0 batch_size=16 epochs=1 optimizer.lr=1 tracker=none"
    losses = []
    for ranks, strategy in ((1, "single"), (2, "ddp"), (3, "ddp")):
        where = (f"runs_dir={tmp_path}", f"name=run{ranks}", f"strategy={strategy}")
        batch = "batch_size=18"
        run_world(ranks, main_in_world, *line, *small.split(), *where, batch)
        (row,) = read_metrics(tmp_path / f"run{ranks}")
        losses.append([row["train_loss"], row["val_loss"]])
    assert losses[0][0] < np.log(320)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.3, 0.5, 0.999])
@pytest.mark.parametrize(
    "content",
    ["ä" * 100, "ab\nc\n\n" * 20, "a\n" + "ö" * 99, "", "x", "\n"],
    ids=["letters", "lines", "line", "empty", "x", "break"],
)
def test_held_out_end_begins_with_a_line_or_a_character(fraction, content, tmp_path):
    path = tmp_path / "t.txt"
    data = content.encode()
    path.write_bytes(data)
    at = held_out_from(path, fraction)
    beginning = data[:at].decode()
    end = data[at:].decode()
    assert beginning + end == content
    if fraction == 0:
        assert end == ""
    if "\n\n" in content and 0 < fraction < 0.99 and end:
        assert beginning.endswith("\n")


def test_pieces_of_a_file_are_all_of_it_and_end_with_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "PIECE", 10)
    data = b"".join(b"x" * (length % 7) + b"\n" for length in range(40)) + b"y" * 55
    (tmp_path / "t").write_bytes(data)
    for start, end in ((0, len(data)), (3, 90), (5, 5)):
        pieces = list(pieces_of(tmp_path / "t", start, end))
        assert b"".join(pieces) == data[start:end]
        assert all(len(piece) <= 20 for piece in pieces)
        lines = [piece for piece in pieces[:-1] if b"y" not in piece]
        assert all(piece.endswith(b"\n") for piece in lines)


MISTAKES = [
    ("t.txt --output o", "one of the arguments --tokenizer --bytes is required"),
    ("t.txt --output o --bytes --tokenizer d", "not allowed with argument"),
    ("no.txt --output o --bytes", "no.txt: is not a file; use text files, for example DIR/*.txt"),
    ("t.txt --output o --tokenizer no", "--tokenizer no: is not a directory on this machine"),
    ("t.txt --output o --tokenizer d", "--tokenizer d: cannot be loaded: "),
    ("t.txt --output d --bytes", "--output d: has shards already, such as val_0.bin. Remove them"),
    ("t.txt --output t.txt --bytes", "--output t.txt: cannot be written (File exists)"),
    ("t.txt --output o --bytes --val-fraction 1", "--val-fraction 1: must be a number from 0 to"),
    ("t.txt --output o --bytes --val-fraction 0.99", "leaves nothing to train on"),
    ("t.txt --output o --bytes --val-fraction 0.001", "holds out nothing of these files"),
    ("t.txt --output o --bytes --shard-size 0", "--shard-size 0: must be from 1 to 2,147,483,647"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_mistake_is_one_message_and_nothing_is_written(
    line, message, tmp_path, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("to be")
    (tmp_path / "d").mkdir()
    write_shard(tmp_path / "d" / "val_0.bin", [1])
    code, printed, errors = command(shards.main, *line.split())
    assert (code, errors.count("error: "), printed) == (2, 1, ""), errors
    assert message in errors
    assert not [*(tmp_path / "o").glob("*")]


def test_text_that_is_not_utf8_and_large_vocabulary_are_refused(
    tokenizer, tmp_path, command, monkeypatch
):
    (tmp_path / "t.txt").write_bytes(b"gr\xf6\xdfe " * 9)
    flags = ("--tokenizer", tokenizer, "--output", tmp_path / "o")
    code, _, errors = command(shards.main, tmp_path / "t.txt", *flags)
    assert (code, "t.txt: is not text in UTF-8 (invalid start byte). Convert it" in errors) == (
        2,
        True,
    ), errors
    assert shard_writer.LARGEST_VOCABULARY == 65536
    monkeypatch.setattr(shard_writer, "LARGEST_VOCABULARY", 299)
    code, _, errors = command(shards.main, tmp_path / "t.txt", *flags)
    assert (code, "has 300 tokens, but those of shards are uint16" in errors) == (2, True)
