"""Write shards of tokens for data=tokens from text files, in the public format of GPT-2.

ddp-lab shards books/*.txt --bytes --output shards
ddp-lab shards books/*.txt --tokenizer gpt2/ --output shards --val-fraction 0.005

Files follow each other in the given order. With --tokenizer each begins with the end-of-text token,
if the tokenizer has one, and is encoded in pieces of about 256 KiB that end with a line: only
where two pieces meet may the tokens differ from those of the whole text. The held-out end of each
file, which begins with a line, is written to val_*.bin, the rest to train_*.bin. If it fails,
nothing is written.
"""

import argparse
import shlex
from pathlib import Path

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.launchers.arguments import Parser, refuse_ranks

ROUNDED_TO = 64  # a vocabulary of such a multiple is faster on GPUs


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab shards", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="text files")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="directory of the shards"
    )
    tokens = parser.add_mutually_exclusive_group(required=True)
    tokens.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="directory of a tokenizer of transformers"
    )
    tokens.add_argument("--bytes", action="store_true", help="bytes as tokens: 256 different ones")
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.01,
        metavar="F",
        help="fraction of each file to hold out for validation (default: 0.01; 0: none)",
    )
    parser.add_argument(
        "--shard-size",
        type=int,
        default=100_000_000,
        metavar="N",
        help="tokens of a shard (default: 100,000,000, which take 200 MB)",
    )

    namespace = parser.parse_args(arguments)
    if not 0 <= namespace.val_fraction < 1:
        raise ConfigError(
            f"--val-fraction {namespace.val_fraction:g}: must be a number from 0 to below 1"
        )
    if not 1 <= namespace.shard_size < 2**31:
        raise ConfigError(f"--shard-size {namespace.shard_size}: must be from 1 to 2,147,483,647")
    return namespace


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    refuse_ranks("ddp-lab shards")
    for path in namespace.files:
        if not path.is_file():
            raise ConfigError(f"{path}: is not a file; use text files, for example DIR/*.txt")

    from ddp_lab.data.shard_writer import ByteEncoder, TokenizerEncoder, write_shards

    encoder = ByteEncoder() if namespace.bytes else TokenizerEncoder(namespace.tokenizer)
    writers = write_shards(
        namespace.files, namespace.output, encoder, namespace.val_fraction, namespace.shard_size
    )
    data = ["data=tokens"]
    for writer, key in zip(writers, ("root", "val_root"), strict=True):
        if writer.tokens:
            pattern = f"{namespace.output}/{writer.name}_*.bin"
            data.append(f"data.{key}={shlex.quote(pattern)}")
            files = count(len(writer.paths), "file")
            tokens = count(writer.tokens, "token")
            print(f"{pattern}: {files}, {tokens}")
    vocabulary = -(-encoder.vocabulary // ROUNDED_TO) * ROUNDED_TO
    data.append(f"data.num_classes={vocabulary}")
    print(f"ddp-lab train task=tokens model=gpt2 {' '.join(data)}")
