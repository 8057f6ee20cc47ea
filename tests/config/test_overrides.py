"""Overrides that are refused before Hydra composes the config of them, and those that are not."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.overrides import check_overrides

PLAIN = ["model=own", "model._target_=own_models.Plain"]
SEARCH = (
    "experiment=search needs hydra/launcher=torchrun (the default), hydra/sweeper=optuna and a "
    "sampler with a seed"
)
REFUSED = {
    "an option that does not exist": (
        ["strategy=ddq"],
        "strategy=ddq: there is no such option; allowed: ddp, ddp_pipeline, dp, ",
    ),
    "an option of several that does not exist": (
        ["strategy=ddp,ddq"],
        "strategy=ddp,ddq: has several values. Use one of them, ",
    ),
    "no option": (
        ["model=null"],
        "model=null: a group cannot be null or a list. Use one of: book_resnet18",
    ),
    "a list of options": (
        ["model=[gpt]"],
        "model=[gpt]: a group cannot be null or a list. Use one of: ",
    ),
    "several values": (
        ["optimizer.lr=1,2"],
        "optimizer.lr=1,2: has several values. Use one of them, ",
    ),
    "a key": (
        ["batchsize=3"],
        "batchsize=3: there is no such key; did you mean batch_size? allowed: seed, ",
    ),
    "a key in a number": (
        ["epochs.a=3"],
        "epochs.a=3: there is no such key; did you mean epochs? allowed: ",
    ),
    "a key of a group": (
        ["checkpoint.hidden=8"],
        "checkpoint.hidden=8: there is no such key; allowed: ",
    ),
    "a key of another option": (
        ["strategy.tp=2"],
        "strategy.tp=2: there is no such key; strategy=mesh and strategy=tp have it; allowed: none",
    ),
    "a key of one other option": (
        ["strategy=ddp", "strategy.algorithm=ring"],
        "strategy.algorithm=ring: there is no such key; strategy=scratch has it; allowed: "
        "strategy.batch_norm, ",
    ),
    "a nested key of another option": (
        ["data.dataset.train_size=3"],
        "data.dataset.train_size=3: there is no such key; data=synthetic has it; allowed: ",
    ),
    "a key of another option without its group": (
        ["tp=2"],
        "tp=2: there is no such key; did you mean strategy.tp? strategy=mesh and strategy=tp have "
        "it; allowed: seed, ",
    ),
    "a key of an option and of the config": (
        ["schedule=cosine"],
        "schedule=cosine: there is no such key; did you mean scheduler? allowed: seed, ",
    ),
    "the first of two keys": (
        ["eppochs=3", "batchsize=3"],
        "eppochs=3: there is no such key; did you",
    ),
    "a key of another option of Hydra": (
        ["hydra/launcher=basic", "hydra.launcher.nproc_per_node=2"],
        "hydra.launcher.nproc_per_node=2: hydra/launcher=basic has no such key; "
        "hydra/launcher=torchrun has more",
    ),
    "an option of a class": (
        [*PLAIN, "model.hidden=8"],
        "model.hidden=8: the config does not set this option of own_models.Plain; use "
        "+model.hidden=8",
    ),
    "an option of a class that is chosen later": (
        ["optimizer.betas=[1,2]", "optimizer=adamw"],
        "optimizer.betas=[1,2]: the config does not set this option of torch.optim.AdamW; use "
        "+optimizer",
    ),
    "an option that the class lacks": (
        [*PLAIN, "model.hiden=8"],
        "model.hiden=8: there is no such key",
    ),
    "a key of a model without a class": (
        ["model=own", "model.hidden=8"],
        "model.hidden=8: there is no such key",
    ),
    "a removed key": (
        ["~optimizer.betas"],
        "~optimizer.betas: cannot be removed, because the config does not set optimizer.betas",
    ),
    "a removed key that is null": (
        ["~optimizer.fused"],
        "~optimizer.fused: cannot be removed, because optimizer.fused has no value: it is null. "
        "Leave this override out, or set a value with optimizer.fused=VALUE",
    ),
    "a removed key that is missing": (
        ["model=own", "~model._target_"],
        "~model._target_: cannot be removed, because model._target_ has no value: it is not set. ",
    ),
    "an added key that exists": (
        ["+epochs=3"],
        "+epochs=3: the config sets epochs already. Use epochs=3",
    ),
    "an added option": (
        ["+strategy=ddp"],
        "+strategy=ddp: the config has a strategy already. Use strategy=ddp",
    ),
    "a table in place of a list": (
        ["optimizer.groups={match:'*.bias',lr_scale:2}"],
        "optimizer.groups={match:'*.bias',lr_scale:2}: must be a list. Use "
        """'optimizer.groups=[{match:'"'"'*.bias'"'"',lr_scale:2}]'""",
    ),
    "a table in place of an empty list": (
        ["callbacks={_target_:mine.Samples,n:4}"],
        "callbacks={_target_:mine.Samples,n:4}: must be a list. Use "
        "'callbacks=[{_target_:mine.Samples,n:4}]'",
    ),
    "no value": (["epochs"], "epochs: overrides look like key=value: ddp-lab train --help"),
    "nothing": ([""], "'': overrides look like key=value: ddp-lab train --help"),
    "options that exclude each other": (
        ["experiment=search", "hydra/launcher=basic"],
        "hydra.launcher.nproc_per_node: is set, but the chosen hydra/launcher has no such key. "
        f"Remove one of the two; {SEARCH}",
    ),
}
ALLOWED = {
    "an option and its keys": ["strategy=scratch", "strategy.algorithm=ring"],
    "a key before its option": ["strategy.algorithm=ring", "strategy=scratch"],
    "keys of an experiment": [
        "experiment=search",
        "hydra.launcher.nproc_per_node=3",
        "hydra.sweeper.n_trials=2",
    ],
    "a new key": ["+optimizer.maximize=true"],
    "a key below a new one": ["+tracker_options.mine={}", "tracker_options.mine.a=3"],
    "a forced key": ["++epochs=3", "++optimizer.nesterov=true"],
    "an element of a list": ["data.mean=[0,1]"],
    "a removed option": ["~task"],
    "a removed key": ["~optimizer.momentum"],
    "a removed key that has been set": ["optimizer.fused=true", "~optimizer.fused"],
    "an interpolation": ["data.root=${runs_dir}"],
    "no value of a key": ["name=null"],
}
SWEEPS = {
    "strategies with a key of theirs": ["strategy=scratch,ddp", "strategy.algorithm=ring"],
    "values": ["optimizer.lr=0.1,0.2", "epochs=range(1,3)"],
    "experiments": ["experiment=book_lenet,book_resnet18", "epochs=1"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_override_is_refused_with_what_is_allowed(case):
    overrides, message = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        check_overrides(overrides)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("case", ALLOWED)
def test_override_is_allowed(case):
    check_overrides(ALLOWED[case])


@pytest.mark.parametrize("case", SWEEPS)
def test_several_values_are_allowed_in_a_sweep(case):
    check_overrides(SWEEPS[case], sweep=True)
    with pytest.raises(ConfigError, match="has several values"):
        check_overrides(SWEEPS[case])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=ddp,ddq"], "strategy=ddq: there is no such option"),
        (
            ["strategy=ddp,fsdp", "batchsize=3"],
            "batchsize=3: there is no such key; did you mean batch_size?",
        ),
    ],
)
def test_mistake_in_a_sweep_is_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        check_overrides(overrides, sweep=True)
    assert str(error.value).startswith(message)


def test_options_and_keys_of_the_users_own_yaml_are_known(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: own_models.Plain\nhidden: 3\n")
    chosen = ["model=mine", "model.hidden=4"]
    check_overrides(chosen, str(tmp_path))
    with pytest.raises(ConfigError, match="model=mine: there is no such option"):
        check_overrides(chosen)
    with pytest.raises(ConfigError, match="hidden=4: there is no such key; model=mine has it; "):
        check_overrides(["model.hidden=4"], str(tmp_path))
    with pytest.raises(ConfigError, match="no/directory: there is no such directory"):
        check_overrides(chosen, "no/directory")


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
    with pytest.raises(ConfigError) as error:
        check_overrides([override])
    advice = f"Put it in quotes, within those of the shell: {advised}"
    assert str(error.value) == f"{override}: Hydra cannot read this value. {advice}"
    (argument,) = shlex.split(advised)
    parsed = OverridesParser.create().parse_overrides([argument])
    assert parsed[0].value() == override.partition("=")[2]


@pytest.mark.parametrize("mark", ["'", '"'])
def test_names_in_quotes_are_advised_without(mark):
    override = f"strategy.plan={{{mark}layers.*.up{mark}: column, {mark}5{mark}:row}}"
    with pytest.raises(ConfigError) as error:
        check_overrides([override])
    advised = "'strategy.plan={layers.*.up: column, 5:row}'"
    assert str(error.value) == (
        f"{override}: Hydra cannot read names in quotes. Write them without quotes, within those "
        f"of the shell: {advised}"
    )
    parsed = OverridesParser.create().parse_overrides(shlex.split(advised))
    assert parsed[0].value() == {"layers.*.up": "column", 5: "row"}


@pytest.mark.parametrize("override", ["tracker_options={5:a", "strategy.cut=[a"])
def test_override_that_hydra_cannot_read_is_named(override):
    with pytest.raises(ConfigError) as error:
        check_overrides([override])
    message = str(error.value)
    assert message.startswith(f"{override}: Hydra cannot read this override (")
    assert message.endswith(
        "). Overrides look like key=value, key=[a,b] or key={a:b}: ddp-lab train --help"
    )
