"""The messages of commands about a user's mistakes, and old names of config keys, as users still write them."""

import json
import shlex
import sys

import pytest
from configs import config
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from launches import SMALL, launch, main_in_world, read_metrics
from omegaconf import OmegaConf
from worlds import run_world

from ddp_lab.config.errors import ConfigError, SampleError
from ddp_lab.launch.command import user_errors
from ddp_lab.launch.command_line import explain, explain_unknown_key, rename_keys, rename_overrides, warn


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (
            ["model=own", "model._target_=own_models.Plain", "model.hidden=8"],
            "model.hidden",
            "model.hidden=8: the config does not set this option of own_models.Plain; use +model.hidden=8",
        ),
        (["optimizer.betas=[1,2]", "optimizer=adamw"], "optimizer.betas", "use +optimizer.betas=[1,2]"),
        (["model=own", "model.hidden=8"], "model.hidden", "model.hidden=8: there is no such key; allowed: "),
        (
            ["model=own", "model._target_=own_models.Plain", "model.hiden=8"],
            "model.hiden",
            "model.hiden=8: there is no such key",
        ),
        (["strategy=ddp,fsdp", "batchsize=3"], "batchsize", "batchsize=3: there is no such key; did you mean batch_size?"),
        (["checkpoint.hidden=8"], "checkpoint.hidden", "checkpoint.hidden=8: there is no such key"),
    ],
)
def test_key_that_is_not_set_is_explained(overrides, key, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    assert message in explain_unknown_key(key)


@pytest.mark.parametrize(
    ("override", "advised"),
    [
        ("data.root=bilder ü", """'data.root="bilder ü"'"""),
        ("+data.root=a=b (2)", """'+data.root="a=b (2)"'"""),
        ('runs_dir=the "ü" runs\\', r"""'runs_dir="the \"ü\" runs\\"'"""),
        ("name=katze's", """'name="katze'"'"'s"'"""),
    ],
)
def test_value_that_hydra_cannot_read_is_advised_in_quotes(override, advised):
    parser = OverridesParser.create()
    with pytest.raises(OverrideParseException) as error:
        parser.parse_overrides([override])
    message = explain(error.value)
    assert message == f"{override}: Hydra cannot read this value. Put it in quotes, within those of the shell: {advised}"
    (argument,) = shlex.split(advised)
    assert parser.parse_overrides([argument])[0].value() == override.partition("=")[2]


@pytest.mark.parametrize("override", ["strategy.plan={'5':replicate}", "strategy.cut=[a"])
def test_override_that_hydra_cannot_read_is_named(override):
    with pytest.raises(OverrideParseException) as error:
        OverridesParser.create().parse_overrides([override])
    message = explain(error.value)
    assert message.startswith(f"{override}: Hydra cannot read this override (")
    assert message.endswith("). Overrides look like key=value, key=[a,b] or key={a:b}: ddp-lab train --help")


def test_sample_that_cannot_be_read_is_reported_by_the_rank_that_read_it(monkeypatch, capsys):
    @user_errors()
    def command() -> None:
        raise SampleError("sample 5 cannot be read")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit) as ended:
        command()
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: sample 5 cannot be read\n")


def test_exception_of_a_rank_is_written_to_its_error_file_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended, user_errors():
        raise RuntimeError("a bug")
    assert (ended.value.code, capsys.readouterr().err) == (1, "")
    callstack = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert callstack.startswith("Traceback")
    assert callstack.endswith("RuntimeError: a bug\n")


WARNING = "warning: data.shift is now called data.crop_padding; the old name is accepted until the next release\n"


@pytest.mark.parametrize(
    ("override", "renamed"),
    [
        ("data.shift=2", "data.crop_padding=2"),
        ("+data.shift=2", "+data.crop_padding=2"),
        ("~data.shift=0", "~data.crop_padding=0"),
        ("name=data.shift=2", None),
        ("data.shifts=2", None),
        ("data.shift", None),  # a path
    ],
)
def test_override_with_an_old_name_gets_the_new_one_and_a_warning_on_rank_0(override, renamed, monkeypatch, capsys):
    assert rename_overrides(["-m", override]) == ["-m", renamed or override]
    assert capsys.readouterr().err == (WARNING if renamed else "")
    monkeypatch.setenv("RANK", "1")
    assert rename_overrides(["-m", override]) == ["-m", renamed or override]
    assert capsys.readouterr().err == ""


def test_key_under_both_names_is_refused():
    message = "data.shift: is the old name of data.crop_padding, which is given, too; remove data.shift"
    with pytest.raises(ConfigError, match=message):
        rename_overrides(["data.shift=2", "++data.crop_padding=2"])
    with pytest.raises(ConfigError, match=message):
        rename_keys(config("data.crop_padding=3", "+data.shift=2"))


def test_removed_key_is_refused_on_the_command_line_and_ignored_with_a_warning_in_a_config(capsys):
    with pytest.raises(ConfigError, match=r"^strategy\.balance=time: was removed; name the first block of the second stage"):
        rename_overrides(["+strategy.balance=time"])
    cfg = config("+strategy.balance=time")
    warn(rename_keys(cfg))
    assert "balance" not in cfg.strategy
    assert capsys.readouterr().err.startswith("warning: strategy.balance has no effect any more; name the first block")


def test_old_name_trains_as_the_new_one_in_a_sweep_and_in_yaml(tmp_path):
    """The sweep warns once, not once for each job."""
    line = [*SMALL, "epochs=1"]
    code, output = launch(
        "python train.py -m", *line, "data.shift=0,2", f"runs_dir={tmp_path}/runs", f"hydra.sweep.dir={tmp_path}"
    )
    assert code == 0, output
    assert output.count(WARNING) == output.count("warning") == 1
    runs = {OmegaConf.load(path).data.crop_padding: path.parent for path in (tmp_path / "runs").glob("*/config.yaml")}
    assert set(runs) == {0, 2}
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndata:\n  shift: 2\n")
    run_world(1, main_in_world, "--config-dir", str(tmp_path), "experiment=mine", *line, f"runs_dir={tmp_path}", "name=yaml")
    losses = [read_metrics(path)[-1]["train_loss"] for path in (tmp_path / "yaml", runs[2], runs[0])]
    assert losses[0] == losses[1] != losses[2]
    assert "shift" not in OmegaConf.load(tmp_path / "yaml" / "config.yaml").data
