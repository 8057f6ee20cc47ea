"""`model.weights=DIR`: a directory of safetensors, of which each rank reads its own part."""

import json
import logging

import pytest
import torch
from configs import config
from launches import main_in_world, read_metrics, refusal_in_world
from safetensors.torch import load_file, save_file
from slow_rows import extra, slow, slow_but
from training import full_weights
from worlds import once, run_world

from ddp_lab.models import stored_weights
from ddp_lab.models.chain import tied_parameters
from ddp_lab.models.stored_weights import StoredTensor, open_directory
from ddp_lab.models.transformers_models import transformers_model
from ddp_lab.run.build import build
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.world.runtime import Runtime

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "tie_word_embeddings": True}
TOKENS = 256
PIPELINE = ["strategy=pipeline", "strategy.schedule=gpipe", "strategy.num_microbatches=2"]
TEXT = ["data=text", "data.context=16", "task=tokens", "epochs=1", "batch_size=8", "speed=off"]
TEXT += ["optimizer.lr=0.1", "device=cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a small Llama as transformers does, in several files, and a text."""
    folder = tmp_path_factory.mktemp("stored")
    torch.manual_seed(5)
    llama = transformers_model("llama", [16], TOKENS, TOKENS, **SIZES)
    llama.save_pretrained(folder / "llama", max_shard_size="40KB")
    assert len(list((folder / "llama").glob("*.safetensors"))) > 2
    (folder / "text.txt").write_bytes(b"to be or not, " * 30)
    return folder


def llama(folder, *others: str) -> list[str]:
    where = [f"model.name={folder}/llama", f"model.weights={folder}/llama"]
    return [*TEXT, f"data.root={folder}/text.txt", "model=transformers", *where, *others]


READ = [0]  # bytes of tensors that this process has read


def begin(overrides: list[str], is_large: bool = False) -> dict:
    """Place the model of a run; return what this rank has read, its buffers, and all weights.

    Args:
        overrides: of the run.
        is_large: whether the model passes for a large one, which has no data before it is placed.
    """
    if is_large:
        stored_weights.LARGE = 0
    logging.disable(logging.WARNING)
    StoredTensor.__getitem__ = counting(StoredTensor.__getitem__)
    with Runtime("cpu", timeout=60) as runtime:
        cfg = config(*overrides)
        job = build(cfg, runtime)
        assert READ == [0]
        assert any(each.is_meta for each in job.model.parameters()) == is_large
        assert not any(buffer.is_meta for buffer in job.model.buffers())
        strategy = job.trainer().strategy
        buffers = {name: tensor.clone() for name, tensor in strategy.module.named_buffers()}
        assert not any(tensor.is_meta for tensor in strategy.module.parameters())
        tied = tied_parameters(strategy.module)
        if runtime.world_size == 1:
            weights = dict(strategy.module.state_dict())
        else:
            weights = full_weights(strategy)
        is_stage = isinstance(strategy, Pipeline)
        return {
            "bytes": READ[0],
            "own": sum(tensor.nbytes for tensor in strategy.module.parameters() if is_stage),
            "buffers": buffers,
            "weights": weights,
            "tied": tied,
        }


def counting(read):
    def counted(self, part):
        tensor = read(self, part)
        READ[0] += tensor.nbytes
        return tensor

    return counted


STRATEGIES = {
    "single": (1, ["strategy=single"]),
    "ddp": (2, ["strategy=ddp"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "pipeline": (2, PIPELINE),
    "split": (1, ["strategy=split", "strategy.devices=[cpu,cpu]"]),
}
QUICK = [("ddp", False)]
SLOW = [("single", True), *((name, True) for name in ("split", "fsdp", "pipeline"))]
EXTRA = [*((name, False) for name in ("split", "fsdp", "pipeline")), ("ddp", True)]


@once
def placed(folder, strategy: str, is_large: bool):
    size, options = STRATEGIES[strategy]
    return run_world(size, begin, llama(folder, *options), is_large)


@pytest.mark.parametrize(
    ("strategy", "is_large"),
    [
        *QUICK,
        *slow(SLOW),
        *extra(EXTRA),
    ],
)
def test_weights_and_buffers_are_those_of_the_directory(strategy, is_large, folder):
    expected = {
        name: tensor
        for file in (folder / "llama").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    ranks = placed(folder, strategy, is_large)
    weights = ranks[0]["weights"]
    assert weights.keys() == {*expected, "lm_head.weight"}
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert torch.equal(weights["lm_head.weight"], expected["model.embed_tokens.weight"])
    frequencies = transformers_model("llama", [16], TOKENS, TOKENS, **SIZES).model.rotary_emb
    for rank in ranks:
        assert rank["tied"] == ranks[0]["tied"]
        for name, buffer in rank["buffers"].items():
            assert torch.equal(buffer, frequencies.get_buffer(name.rpartition(".")[2])), name


@pytest.mark.slow
def test_each_rank_reads_its_own_part_only(folder):
    ranks = {name: placed(folder, name, name != "ddp") for name in ("single", "ddp")}
    ranks |= {name: placed(folder, name, True) for name in ("fsdp", "pipeline")}
    whole = sum(
        tensor.nbytes
        for file in (folder / "llama").glob("*.safetensors")
        for tensor in load_file(file).values()
    )
    assert [rank["bytes"] for rank in ranks["single"]] == [whole]
    assert [rank["bytes"] for rank in ranks["ddp"]] == [whole, whole]
    assert sum(rank["bytes"] for rank in ranks["fsdp"]) == whole
    assert max(rank["bytes"] for rank in ranks["fsdp"]) < 0.51 * whole
    for rank in ranks["pipeline"]:
        assert rank["bytes"] == rank["own"]
        assert rank["bytes"] < 0.8 * whole  # both stages have the embedding, which is the head


def train(folder, *options: str) -> None:
    name = options[0].partition("=")[2]
    main_in_world(*llama(folder, *options), f"runs_dir={folder}", f"name={name}")


@pytest.mark.slow
def test_training_begins_from_the_directory_under_every_strategy(folder):
    run_world(1, train, folder, "strategy=single")
    run_world(2, train, folder, "strategy=fsdp")
    run_world(2, train, folder, *PIPELINE)
    (expected,) = read_metrics(folder / "single")
    for strategy in ("fsdp", "pipeline"):
        (row,) = read_metrics(folder / strategy)
        assert row["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)


def begin_by_block(overrides: list[str]) -> dict:
    return begin(overrides, is_large=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "strategy.shard=null",
        "strategy.tp=2",
        "strategy.pp=2 strategy.cut=[block1]",
    ],
)
def test_blocks_of_a_chain_are_read_by_block(options, tmp_path):
    """A mesh reads a GPT with a tied head, whose file has one name of it."""
    overrides = [*TEXT, "data.root=README.md", "model=gpt", "model.depth=2", "model.width=16"]
    overrides += ["model.heads=2", "model.tied=true"]
    (single,) = run_world(1, begin_by_block, overrides)
    first = {name: tensor for name, tensor in single["weights"].items() if "head.lin" not in name}
    shifted = {name: tensor + 1 for name, tensor in first.items()}
    save_file(shifted, tmp_path / "model.safetensors")
    overrides.append(f"model.weights={tmp_path}")
    ranks = run_world(2, begin_by_block, [*overrides, "strategy=mesh", *options.split()])
    weights = ranks[0]["weights"]
    assert all(torch.equal(weights[name], tensor) for name, tensor in shifted.items())
    assert torch.equal(weights["head.linear.weight"], weights["embed.tokens.weight"])
    whole = sum(tensor.nbytes for tensor in shifted.values())
    assert max(rank["bytes"] for rank in ranks) < 0.9 * whole


@pytest.mark.slow
def test_parameters_that_are_left_out_keep_their_initial_weights(tmp_path):
    sizes = {key: value for key, value in SIZES.items() if "tie" not in key}
    vit = transformers_model("vit", [1, 28, 28], 3, **sizes, patch_size=7)
    vit.save_pretrained(tmp_path)
    overrides = ["data=synthetic", "data.dataset.channels=1", "data.dataset.train_size=20"]
    overrides += ["batch_size=4", "model=transformers", f"model.name={tmp_path}"]
    overrides += [f"model.weights={tmp_path}", "model.weights_except=[classifier.*]"]
    weights = {}
    for size, strategy in ((1, "single"), (2, "fsdp")):
        ranks = run_world(size, begin, [*overrides, f"strategy={strategy}", "device=cpu"])
        weights[strategy] = ranks[0]["weights"]
    assert weights["single"]["classifier.weight"].shape == (10, 32)
    assert weights["single"]["classifier.weight"].std() > 0
    for name, tensor in weights["single"].items():
        assert torch.equal(tensor, weights["fsdp"][name]), name
        if not name.startswith("classifier"):
            assert torch.equal(tensor, vit.state_dict()[name]), name


def broken(folder, kind: str):
    path = folder / kind
    path.mkdir(exist_ok=True)
    tensors = load_file(folder / "all.safetensors")
    if kind == "missing":
        del tensors["model.norm.weight"]
    elif kind == "extra":
        tensors["model.other"] = torch.zeros(3)
    elif kind == "vocabulary":
        tensors["model.embed_tokens.weight"] = torch.zeros(99, 32)
    if kind == "pickle":
        torch.save(tensors, path / "pytorch_model.bin")
    elif kind == "damaged":
        (path / "model.safetensors").write_bytes(b"no safetensors")
    elif kind == "outside":
        index = {"weight_map": {"model.norm.weight": "../all.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "absent":
        index = {"weight_map": {"model.norm.weight": "model-00001.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, path / "model.safetensors")
    return path


MISTAKES = {
    "missing": "are not the weights of this model: 1 missing: model.norm.weight. Use the model",
    "extra": "are not the weights of this model: 1 not in the model: model.other. Use the model",
    "vocabulary": "2 of another shape: model.embed_tokens.weight [99, 32] instead of [256, 32]",
    "pickle": "has neither model.safetensors.index.json nor model.safetensors. Use a directory",
    "damaged": "is damaged or no directory of safetensors (SafetensorError: ",
    "outside": "names ../all.safetensors, which is outside the directory",
    "absent": "model-00001.safetensors",
}


@pytest.mark.parametrize("kind", slow_but(["missing", "pickle", "outside"], MISTAKES))
def test_directories_that_do_not_fit_are_refused_in_one_message(kind, folder):
    tensors = {}
    for file in (folder / "llama").glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(tensors, folder / "all.safetensors")
    overrides = llama(folder)[:-1]
    line = " ".join([*overrides, f"model.weights={broken(folder, kind)}"])
    (refused,) = run_world(1, refusal_in_world, line)
    code, errors = refused
    text = " ".join(errors.split())
    assert code in (1, 2)
    assert MISTAKES[kind] in text
    assert "Traceback" not in text


def test_nothing_is_read_where_a_directory_is_opened(folder):
    stored = open_directory(folder / "llama")
    norm = stored["model.norm.weight"]
    assert (norm.shape, norm.dtype) == ((32,), torch.float32)
    assert norm[(slice(3, 5),)].tolist() == norm.read()[3:5].tolist()
