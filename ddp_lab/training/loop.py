"""The training loop, the same for all strategies and ranks."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ddp_lab.config.errors import TrainingError, count
from ddp_lab.observe.log import log, log_if_slow
from ddp_lab.training.hooks import Run, overrides
from ddp_lab.training.metrics import Evaluation, evaluate, means
from ddp_lab.training.plan import FitSettings
from ddp_lab.training.progress import Progress


def fit(run: Run) -> Progress:
    """Train from `run.position` to the end, and evaluate and log after each epoch.

    Return the position at the end.

    The logged duration of an epoch is that of its training steps, without the evaluation.

    Args:
        run: what is trained and evaluated, with the hooks, whose exceptions end the training.

    Raises:
        TrainingError: every batch of an epoch was skipped, or all its targets are ignored.
    """
    settings = run.settings
    run.sync.begin(run.position)
    for hook in run.hooks:
        hook.on_start(run)
    while not stop_reasons(run.position, settings):
        train_epoch(run)
        require_something_learned(run)
        with averages(run), log_if_slow(f"epoch {run.position.epoch}: evaluating"):
            results, following = evaluate_epoch(run)
            run.note_energy(run.position, following)
            log_epoch(run, results)
            for hook in run.hooks:
                hook.on_evaluate(results)
        run.position = following
        for hook in run.hooks:
            hook.on_epoch_end(run.position)

    reasons = stop_reasons(run.position, settings)
    if "epochs" not in reasons:
        how = "stopped early" if settings.is_stalled(run.position) else "ended"
        log.info(f"{how}: {' and '.join(reasons.values())}")
    return run.position


def train_epoch(run: Run) -> None:
    """Take the remaining steps of an epoch from `run.position`, which moves along.

    It ends before the end of the epoch where a limit of the run is reached.
    """
    loader = run.loaders["train"]
    step = run.step
    before_step = overrides(run.hooks, "before_step")
    on_step_end = overrides(run.hooks, "on_step_end")
    loader.begin_at(run.position.stream)
    loader.set_epoch(run.position.order, run.position.samples)
    run.strategy.train()
    run.begin_epoch()

    position = run.position
    evaluate_every = run.settings.evaluate_every
    if is_evaluation_due(run):  # of the step with which the last launch ended
        evaluate_within_epoch(run)
    steps_done = -(-position.samples // loader.batch_size)
    label = f"epoch {position.epoch}"
    total = len(loader)
    if loader.data.is_endless:
        total = run.settings.last_step
    if run.settings.epochs is not None:
        label += f"/{run.settings.epochs}"
    with run.logger.bar(label, steps_done, total) as advance_bar:
        batches = iter(step.batches(loader))
        asked = time.perf_counter()
        with log_if_slow("loading the first batch"):
            batch = next(batches, None)
        while batch is not None:
            run.waited += time.perf_counter() - asked
            global_size = batch if isinstance(batch, int) else batch.global_size
            for change in before_step:
                batch = change(batch)
            step(batch)

            position.samples += global_size
            position.step += 1
            position.lr = run.eager.lr
            for react in on_step_end:
                react(position)
            if advance_bar is not None:
                advance_bar()
            if position.step >= run.ends_after:
                break
            if evaluate_every and position.step % evaluate_every == 0:
                evaluate_within_epoch(run)

            asked = time.perf_counter()
            batch = next(batches, None)
    run.position = run.current()


def is_evaluation_due(run: Run) -> bool:
    """Return whether an evaluation within the epoch is missing after the last step."""
    every = run.settings.evaluate_every
    position = run.position
    return bool(every and position.step % every == 0 and position.evaluated_at < position.step)


def evaluate_within_epoch(run: Run) -> None:
    """Evaluate the validation set, or else the test set, and go on with the epoch. Collective.

    After the last step of an epoch it does nothing: the evaluation of the epoch follows.
    """
    position = run.position
    if position.samples == run.loaders["train"].data.size:
        return
    start = time.perf_counter()
    joules_before = run.joules_here()
    name = "val" if "val" in run.loaders else "test"
    with averages(run), log_if_slow(f"step {position.step}: evaluating"):
        evaluation = evaluate(
            run.strategy, run.loaders[name], run.task, after_batch(run), run.metrics
        )
    if not evaluation.is_finite:
        run.note_not_finite({name: evaluation})
    metrics = evaluation.metrics(name)
    run.logger.evaluation(position.epoch, position.step, **metrics)
    validation = metrics if name == "val" else {}
    after = position.evaluated(validation, run.lower_is_better)
    position.best = after.best
    position.best_epochs = after.best_epochs
    position.best_steps = after.best_steps
    position.evaluated_at = after.evaluated_at
    run.strategy.train()
    seconds = time.perf_counter() - start
    run.leave_out(seconds, run.joules_here() - joules_before)
    for react in overrides(run.hooks, "on_evaluated"):
        react(position, {name: evaluation}, seconds)


def averages(run: Run) -> AbstractContextManager[object]:
    """Return a context in which the model has the averages of its weights, if there are any."""
    return run.eager.ema.in_use() if run.eager.ema else nullcontext()


def after_batch(run: Run) -> Callable[[], None]:
    """Return what calls the hooks after each batch of an evaluation."""
    batches = 0

    def react() -> None:
        nonlocal batches
        batches += 1
        for hook in run.hooks:
            hook.on_evaluation_batch(run.position, batches)

    return react


def require_something_learned(run: Run) -> None:
    """Check that a sample of the epoch has counted.

    Raises:
        TrainingError: none has.
    """
    if run.position.sums[-1] != 0:
        return
    skipped = run.eager.running_sums.skip_not_finite
    causes = "all targets are ignored"
    if skipped:
        causes = f"every batch was skipped (on_nan=skip): lower optimizer.lr; or {causes}"
    kind = "not_finite" if skipped else "exception"
    raise TrainingError(f"epoch {run.position.epoch} has nothing to learn from: {causes}", kind)


def evaluate_epoch(run: Run) -> tuple[dict[str, Evaluation], Progress]:
    """Evaluate the sets that are due after an epoch. Collective.

    The validation set comes first, because it decides whether the epoch is the last one.

    Returns:
        The metrics by set, and the position at the beginning of the next epoch; or the same one
        within the epoch in which the run ends.
    """
    results: dict[str, Evaluation] = {}
    react = after_batch(run)
    if "val" in run.loaders:
        results["val"] = evaluate(run.strategy, run.loaders["val"], run.task, react, run.metrics)
    validation = results["val"].metrics("val") if results else {}
    following = run.position.evaluated(validation, run.lower_is_better)
    if following.samples == run.loaders["train"].data.size:
        following = following.next_epoch()
    is_due = run.settings.evaluate_test == "every_epoch" or stop_reasons(following, run.settings)
    if "test" in run.loaders and is_due:
        results["test"] = evaluate(run.strategy, run.loaders["test"], run.task, react, run.metrics)
    return results, following


def log_epoch(run: Run, results: dict[str, Evaluation]) -> None:
    """Log the metrics of an epoch, and which of them are not finite."""
    position = run.position
    if not all(evaluation.is_finite for evaluation in results.values()):
        run.note_not_finite(results)
    training = means(run.strategy.task, position.sums)
    metrics = {f"train_{name}": value for name, value in training.items()}
    for name, evaluation in results.items():
        metrics |= evaluation.metrics(name)
    scale = run.strategy.loss_scale
    if scale is not None:
        saved = scale.saved()
        metrics |= {"loss_scale": saved["scale"], "skipped_steps": saved["skipped_steps"]}

    run.logger.epoch(
        position.epoch,
        step=position.step,
        **metrics,
        lr=position.lr,
        seconds=position.seconds,
        samples_per_second=position.samples / position.seconds,
        **run.energy_fields(),
    )


def stop_reasons(progress: Progress, settings: FitSettings) -> dict[str, str]:
    """Return why a run is over, by what has to be raised to continue it; {} if it is not."""
    reasons = dict[str, str]()
    name = settings.criterion
    stalled = progress.stalled(name)
    if settings.epochs is not None and progress.epoch > settings.epochs:
        reasons["epochs"] = f"{progress.epoch - 1} of epochs={settings.epochs} are done"
    for limit in settings.limits:
        if progress.step >= limit.steps:
            reasons[limit.key] = f"{limit.key}={limit.value} is reached at step {progress.step:,}"
    if settings.is_out_of_time(progress):
        reasons["max_minutes"] = (
            f"max_minutes={settings.max_minutes:g} have passed at step {progress.step:,}"
        )
    if settings.is_stalled(progress):
        best = progress.best_epochs.get(name)
        if best is None:
            epochs = count(stalled, "epoch")
            no_better = f"none of the {epochs} has a finite {name} that is kept as the best"
        elif stalled == 1:
            no_better = f"the last epoch had no better {name} than epoch {best}"
        else:
            no_better = f"the last {stalled} epochs had no better {name} than epoch {best}"
        reasons[f"patience above {stalled}"] = f"{no_better} (patience={settings.patience})"
    return reasons
