"""Another class of the optimizer gets the options that it has."""

import pytest
from launches import SMALL, main_in_world, refusal_in_world
from worlds import run_world

ADAM = "optimizer._target_=torch.optim.Adam"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([ADAM], f"{ADAM}: momentum, nesterov of optimizer=sgd are left out"),
        pytest.param(
            [ADAM, "~optimizer.momentum"],
            f"{ADAM}: momentum, nesterov of optimizer=sgd are left",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["optimizer._target_=torch.optim.RMSprop", "optimizer.momentum=0.5"],
            "optimizer._target_=torch.optim.RMSprop: nesterov of optimizer=sgd is left out",
            marks=pytest.mark.slow,
        ),
        ([ADAM, "optimizer=adamw"], ""),
        pytest.param([], "", marks=pytest.mark.slow),
    ],
)
def test_defaults_that_the_class_lacks_are_left_out_and_logged_once(overrides, line, tmp_path):
    where = [f"runs_dir={tmp_path}", "name=run", "epochs=1"]
    run_world(1, main_in_world, *SMALL, *where, *overrides)
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count(" left out") == bool(line)
    assert line in log
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert ("nesterov" in config) == (not overrides)


@pytest.mark.parametrize("option", ["momentum=0.9", "nesterov=false"])
def test_option_that_is_typed_and_that_the_class_lacks_is_an_error(option, tmp_path):
    line = [*SMALL, f"runs_dir={tmp_path}", ADAM, f"optimizer.{option}"]
    ((code, printed),) = run_world(1, refusal_in_world, " ".join(line))
    name = option.partition("=")[0]
    assert code == 2
    assert printed.startswith(f"error: optimizer.{name}="), printed
    assert ": there is no such key; " in printed


def test_optimizer_with_modes_is_refused_with_averages(tmp_path):
    target = "optimizer._target_=own_optimizers.ScheduleFree"
    line = [*SMALL, f"runs_dir={tmp_path}", target, "ema=0.9"]
    ((code, printed),) = run_world(1, refusal_in_world, " ".join(line))
    assert code == 2
    assert printed.startswith("error: ema=0.9: is not supported with the optimizer ScheduleFree, ")
