"""The messages of commands about a user's mistakes."""

import json
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from ddp_lab.config.errors import SampleError
from ddp_lab.launchers.command import user_errors
from ddp_lab.launchers.command_line import explain, explain_unknown_key


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
def test_key_that_is_not_set_is_explained(overrides, key, message):
    assert message in explain_unknown_key(key, overrides)


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
    message = explain(error.value, [override])
    assert message == f"{override}: Hydra cannot read this value. Put it in quotes, within those of the shell: {advised}"
    (argument,) = shlex.split(advised)
    assert parser.parse_overrides([argument])[0].value() == override.partition("=")[2]


@pytest.mark.parametrize("override", ["tracker_options={'5':a}", "strategy.cut=[a"])
def test_override_that_hydra_cannot_read_is_named(override):
    with pytest.raises(OverrideParseException) as error:
        OverridesParser.create().parse_overrides([override])
    message = explain(error.value, [override])
    assert message.startswith(f"{override}: Hydra cannot read this override (")
    assert message.endswith("). Overrides look like key=value, key=[a,b] or key={a:b}: ddp-lab train --help")


def test_sample_that_cannot_be_read_is_reported_by_the_rank_that_read_it(monkeypatch, capsys):
    @user_errors([])
    def command() -> None:
        raise SampleError("sample 5 cannot be read")

    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        command()
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: sample 5 cannot be read\n")


def test_exception_of_a_rank_is_written_to_its_error_file_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended, user_errors([]):
        raise RuntimeError("a bug")
    assert (ended.value.code, capsys.readouterr().err) == (1, "")
    callstack = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert callstack.startswith("Traceback")
    assert callstack.endswith("RuntimeError: a bug\n")
