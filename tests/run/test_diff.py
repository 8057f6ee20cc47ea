"""`ddp-lab runs diff`: why two runs differ. Causes are planted, and must be named first."""

import json
import shutil

import pytest
from launches import SMALL, main_in_world
from worlds import once, run_world

from ddp_lab.commands import runs
from ddp_lab.run.diff import compare_runs
from ddp_lab.run.recorded_differences import rule_of

TRAINED = [*SMALL, "epochs=2", "log_every=1", "tracker=none", "device=cpu", "strategy=single"]
TEXT = [
    "task=tokens",
    "data=text",
    "data.context=8",
    "model=gpt",
    "model.depth=1",
    "model.width=8",
    "model.heads=2",
    "batch_size=8",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@once
def train(root, name, *overrides):
    """Train a run, once for each name, and return its directory."""
    run_world(1, main_in_world, *TRAINED, f"runs_dir={root}", f"name={name}", *overrides)
    return root / name


def cause(one, other):
    """Return the first cause that the command names, and its comparison."""
    comparison = compare_runs(one, other)
    assert comparison.causes, comparison
    return comparison.causes[0].name, comparison


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "name", "step"),
    [
        ("seed=1", "seed", 1),
        ("optimizer.lr=0.02", "optimizer.lr", 2),
        ("optimizer.momentum=0.5", "optimizer.momentum", 3),
    ],
)
def test_cause_of_a_real_difference_is_named_first(override, name, step, root):
    base = train(root, "base")
    named, comparison = cause(base, train(root, name, override))
    assert named == name
    assert comparison.loss.step == step
    assert comparison.loss.equal_until == step - 1
    assert comparison.without_effect == ["name"] or "name" not in comparison.without_effect
    assert not comparison.missing


def test_changed_text_at_the_same_path_is_named_first(root):
    text = root / "text.txt"
    text.write_text("to be or not to be, " * 20)
    line = [*TEXT, f"data.root={text}", "epochs=1"]
    small = {each.partition("=")[0] for each in SMALL}
    kept = [each for each in TRAINED if each.partition("=")[0] not in small]
    run = [*kept, *line, f"runs_dir={root}"]
    run_world(1, main_in_world, *run, "name=text1")
    text.write_text(text.read_text().replace("not", "now"))
    run_world(1, main_in_world, *run, "name=text2")
    named, comparison = cause(root / "text1", root / "text2")
    assert named == "data, samples of train"
    assert comparison.loss.step == 1


def test_equal_runs_have_no_difference(root, command):
    base = train(root, "base")
    train(root, "again")
    code, output, errors = command(runs.main, "diff", "base", "again", "--runs-dir", root)
    assert (code, errors) == (0, "")
    assert "no recorded loss differs, of 14 that both have" in output
    assert output.splitlines()[0] == f"{base} -> {root / 'again'}"
    assert len(output.splitlines()) == 2


def test_runs_without_a_common_loss_are_not_called_equal(root, tmp_path, command):
    base = train(root, "base")
    begun = shutil.copytree(base, tmp_path / "begun")
    (begun / "metrics.jsonl").unlink()
    code, output, _ = command(runs.main, "diff", base, begun)
    assert code == 1
    assert "nothing to compare: there is no step of which both have recorded the loss" in output


def edited(base, folder, edits, from_step, factor):
    """Copy a run, change what it has recorded, and multiply its losses from a step on.

    Args:
        base: the run directory.
        folder: of the copy.
        edits: by file, what replaces what; or the field of a JSON file, and its new value.
        from_step: the first step whose loss changes.
        factor: of the losses.
    """
    shutil.copytree(base, folder)
    for file, (old, new) in edits.items():
        path = folder / file
        text = path.read_text()
        if path.suffix == ".json":
            record = json.loads(text)
            *groups, field = old.split("/")
            node = record
            for group in groups:
                node = node[group]
            node[field] = new
            path.write_text(json.dumps(record))
        else:
            assert text.count(old) == 1, text
            path.write_text(text.replace(old, new))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for name in [name for name in row if name.endswith("loss")]:
            if row["step"] >= from_step:
                row[name] *= factor
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


LAST_DIGITS = 1 + 1e-7
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
PLANTED = {
    "batch_size": ({CONFIG: ("\nbatch_size: 24\n", "\nbatch_size: 12\n")}, 1, 1.1),
    "precision": ({CONFIG: ("precision: float32", "precision: bf16")}, 1, 1.001),
    "data.val_fraction": ({CONFIG: ("val_fraction: 0\n", "val_fraction: 0.1\n")}, 1, 1.1),
    "warmup_epochs": ({CONFIG: ("warmup_epochs: 0", "warmup_epochs: 1")}, 2, 1.1),
    "epochs": ({CONFIG: ("\nepochs: 2\n", "\nepochs: 3\n")}, 3, 1.1),
    "number of ranks": ({CONFIG: ("ranks: 1\n", "ranks: 2\n")}, 1, LAST_DIGITS),
    "version of torch": ({ENVIRONMENT: ("versions/torch", "2.9.0")}, 2, LAST_DIGITS),
    "devices": ({ENVIRONMENT: ("devices", "1 x NVIDIA H100")}, 1, LAST_DIGITS),
    "cpu": ({ENVIRONMENT: ("cpu", "DEFAULT")}, 4, LAST_DIGITS),
    "data, order": ({"data.json": ("order", "0123456789abcdef")}, 1, 1.1),
    "data, classes": ({"data.json": ("classes", ["a", "b"])}, 1, 1.1),
    "code of mynet": ({ENVIRONMENT: ("code/mynet", "0123456789abcdef")}, 1, 1.1),
    "model": ({ENVIRONMENT: ("model", "4 tensors, 0123456789abcdef")}, 1, 1.1),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_cause_is_named_first(name, root, tmp_path):
    edits, from_step, factor = PLANTED[name]
    base = train(root, "base")
    named, comparison = cause(base, edited(base, tmp_path / "other", edits, from_step, factor))
    assert named == name
    assert comparison.loss.step == from_step
    assert comparison.loss.is_rounding == (factor == LAST_DIGITS)


@pytest.mark.parametrize(
    ("from_step", "factor", "expected"),
    [
        (1, 1.1, "seed"),
        (2, 1.1, "optimizer.lr"),
        (1, LAST_DIGITS, "version of torch"),
    ],
)
def test_first_step_that_differs_decides_between_causes(
    from_step, factor, expected, root, tmp_path
):
    edits = {
        CONFIG: ("\nseed: 0\n", "\nseed: 1\n"),
        ENVIRONMENT: ("versions/torch", "2.9.0"),
    }
    base = train(root, "base")
    other = edited(base, tmp_path / "other", edits, from_step, factor)
    config = other / CONFIG
    config.write_text(config.read_text().replace("lr: 0.01\n", "lr: 0.02\n"))
    named, comparison = cause(base, other)
    assert named == expected
    # a learning rate changes no loss before that of step 2
    excluded = [each.name for each in comparison.excluded]
    assert excluded == (["optimizer.lr"] if from_step == 1 else [])


def test_earliest_cause_is_named_if_only_the_loss_of_an_epoch_is_recorded(root, tmp_path):
    target = "_target_: ddp_lab.models.simple_cnn.simple_cnn"
    edits = {CONFIG: (target, "_target_: mynet.Net\n  size: 8")}
    base = train(root, "base")
    other = edited(base, tmp_path / "other", edits, 1, 1.1)
    config = other / CONFIG
    config.write_text(config.read_text().replace("lr: 0.01\n", "lr: 0.02\n"))
    first = edited(base, tmp_path / "first", {}, 1, 1)
    for folder in (first, other):
        rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(row for row in rows if '"epoch"' in row[:20]))
    named, comparison = cause(first, other)
    assert comparison.loss.step > 2
    assert named == "model._target_"
    names = [each.name for each in comparison.causes]
    assert "optimizer.lr" in names
    assert "model.size" not in names  # an option of the other model


def test_command_prints_the_cause_and_exits_with_1(root, command):
    train(root, "base")
    other = train(root, "seed", "seed=1")
    code, output, errors = command(runs.main, "diff", "base", other, "--runs-dir", root)
    assert (code, errors) == (1, "")
    first, loss, likely, *rest = output.splitlines()
    assert first == f"{root / 'base'} -> {other}"
    assert loss.startswith("first loss that differs: step 1: loss ")
    assert likely.startswith("likely cause: seed: 0 -> 1: the initial weights, ")
    assert not rest, "the order of the samples follows from the seed"


def test_command_exits_with_0_if_all_losses_are_equal_and_with_1_if_there_are_none(
    root, tmp_path, command
):
    base = train(root, "base")
    equal = edited(base, tmp_path / "equal", {}, 1, 1)
    code, output, errors = command(runs.main, "diff", base, equal)
    assert (code, errors) == (0, ""), output
    assert "no recorded loss differs, of " in output

    empty = edited(base, tmp_path / "empty", {}, 1, 1)
    (empty / "metrics.jsonl").write_text("")
    code, output, errors = command(runs.main, "diff", base, empty)
    assert (code, errors) == (1, ""), output
    assert "nothing to compare: " in output


def test_runs_of_older_versions_are_compared_by_what_they_have(root, tmp_path, command):
    base = train(root, "base")
    edits = {CONFIG: ("precision: float32", "precision: bf16")}
    older = edited(base, tmp_path / "older", edits, 1, 1.1)
    for name in ("environment.json", "data.json"):
        (older / name).unlink()
    code, output, _ = command(runs.main, "diff", base, older)
    assert code == 1
    assert "likely cause: precision: float32 -> bf16" in output
    assert f"not recorded: {older}/data.json, {older}/environment.json" in output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("diff mine", "ddp-lab runs: needs nothing, [show] NAME, diff NAME NAME, or --clean"),
        (
            "diff bace base",
            "bace: there is no such run: it is neither the directory of a run nor the name of one "
            "in {ROOT}. Did you mean base?",
        ),
    ],
)
def test_mistake_is_one_message(line, message, root, command):
    train(root, "base")
    code, _, errors = command(runs.main, *line.split(), "--runs-dir", root)
    assert code == 2
    assert message.format(ROOT=root) in errors


def test_every_key_of_the_config_has_a_rule():
    from configs import config
    from omegaconf import OmegaConf

    from ddp_lab.config.build import leaves

    values = OmegaConf.to_container(config(), resolve=True)
    assert not [key for key, _ in leaves(values) if rule_of(key).keys == "*"]
