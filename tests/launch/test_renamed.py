"""Old names of config keys, as users still write them."""

import pytest
from configs import config
from launches import SMALL, launch, main_in_world, read_metrics
from omegaconf import OmegaConf
from worlds import run_world

from ddp_lab.config.errors import ConfigError
from ddp_lab.launch.command_line import rename_keys, rename_overrides

WARNING = "warning: data.shift is now called data.crop_padding; the old name is accepted until the next release\n"


@pytest.mark.parametrize(
    ("override", "renamed"),
    [
        ("data.shift=2", "data.crop_padding=2"),
        ("data.shift=0,2", "data.crop_padding=0,2"),
        ("+data.shift=2", "+data.crop_padding=2"),
        ("++data.shift=2", "++data.crop_padding=2"),
        ("~data.shift", "~data.crop_padding"),
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
