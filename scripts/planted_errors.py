"""Plant errors in copies of this tree, one at a time, and report which test catches each.

python scripts/planted_errors.py              all errors; an hour on two busy cores
python scripts/planted_errors.py seed plan    the errors whose name or file contains one of these

Each error is one replacement in one file, listed with the least expensive test that fails because of it. First, all those tests
are run in a copy without errors. Exit code 0: all of them pass there, and each error is caught by its test.
"""

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300.0  # seconds for one test


@dataclass(frozen=True)
class Error:
    """A replacement that a test must notice.

    Attributes:
        name: what is wrong with it.
        file: where, relative to the root of the project.
        old, new: the text that is replaced, which must occur exactly once in the file, and its replacement.
        test: the id of the test that must fail.
    """

    name: str
    file: str
    old: str
    new: str
    test: str


JOB, MATERIALIZE, TRAIN = (f"ddp_lab/run/{name}.py" for name in ("job", "materialize", "train"))
LOOP, STEP = "ddp_lab/training/loop.py", "ddp_lab/training/step.py"
EVALUATION, SUMS = "ddp_lab/training/evaluation.py", "ddp_lab/strategies/sums.py"
MESH = "ddp_lab/strategies/mesh.py"
EMA, FSDP = "ddp_lab/training/ema.py", "ddp_lab/strategies/fsdp.py"
SCHEDULE, PLAN = "ddp_lab/training/schedule.py", "ddp_lab/training/plan.py"
LOADER, WORKERS, AUGMENT = "ddp_lab/data/loader.py", "ddp_lab/data/workers.py", "ddp_lab/data/augment.py"
TORCHRUN, SWEEP, SLURM = "ddp_lab/launch/torchrun.py", "ddp_lab/launch/sweep.py", "ddp_lab/launch/slurm.py"
KUBERNETES = "ddp_lab/launch/kubernetes.py"
MAIN, OUTCOME = "ddp_lab/commands/train.py", "ddp_lab/launch/outcome.py"
LOGGER = "ddp_lab/observe/logger.py"
CHECKPOINT, FILES, FOLDER, GUARD, RUN_DIR = (
    f"ddp_lab/resilience/{name}.py"
    for name in ("checkpoint", "checkpoint_files", "checkpoint_folder", "guard", "run_directory")
)
SHARDED_FILES, SHARDED_READ, SHARDED_STATE, SHARDED_WRITE = (
    f"ddp_lab/resilience/sharded_{name}.py" for name in ("files", "read", "state", "write")
)

BY_HAND = "tests/training/test_reference.py::test_train_equals_a_loop_written_by_hand[{}]"
SINGLE_SAMPLES = "tests/training/test_evaluation.py::test_evaluation_equals_sums_over_single_samples[6]"
SHARDED, DAMAGED_SHARDS = "tests/resilience/test_sharded.py::test_{}", "tests/resilience/test_damaged_shards.py::test_{}"
IMAGES = "tests/data/test_folder.py::test_images_are_the_same_for_any_world_workers_cache_and_resume[{}]"
MATRIX = "tests/strategies/test_equivalence.py::test_several_processes_equal_single[{}]"
CUBE = MATRIX.format("Mesh-None-1-2-2-True-1f1b-4-None-None-local-48 samples-clipped-vit-on-4")

# Without the formatter, which would write each argument on its own line.
# fmt: off
ERRORS = [
    Error("the seed is ignored when the model is made", JOB,
          "torch.manual_seed(self.cfg.seed)", "torch.manual_seed(0)", BY_HAND.format("lenet")),
    Error("the seed is ignored by the loaders", JOB,
          "seed=self.cfg.seed,", "seed=0,", BY_HAND.format("lenet")),
    Error("accumulate is ignored by the step", MATERIALIZE,
          "scheduler, cfg.accumulate,", "scheduler, 1,", BY_HAND.format("batch_norm")),
    Error("accumulate is ignored by the plan", JOB,
          "accumulate=cfg.accumulate", "accumulate=1",
          "tests/launch/test_launch.py::test_user_error_is_reported_once_with_exit_code_2"
          "[strategy=pipeline strategy.num_microbatches=12 batch_size=22 accumulate=2]"),
    Error("max_grad_norm is ignored", MATERIALIZE,
          "cfg.max_grad_norm,", "None,", BY_HAND.format("lenet")),
    Error("on_nan=skip is ignored", MATERIALIZE,
          'cfg.on_nan == "skip"', "False",
          "tests/resilience/test_faults.py::test_on_nan_skip_continues_after_a_loss_that_is_not_finite[python train.py]"),
    Error("warmup_epochs is ignored", MATERIALIZE,
          "round(cfg.warmup_epochs * plan.steps_per_epoch)", "0", BY_HAND.format("lenet")),
    Error("scaling is ignored", JOB,
          "scaling=cfg.scaling", 'scaling="strong"', BY_HAND.format("lenet-ddp")),
    Error("the loss is ignored", MATERIALIZE,
          "    strategy.loss = job.loss.to(strategy.device)\n", "", BY_HAND.format("lenet")),
    Error("mixup and cutmix are ignored by the step", MATERIALIZE,
          "ema, job.mix,", "ema, None,", BY_HAND.format("lenet")),
    Error("drop_path is ignored by the step", MATERIALIZE,
          "job.mix, drop_paths)", "job.mix)",
          "tests/strategies/test_equivalence.py::test_reference_trains_clips_and_augments"),
    Error("the seed is ignored by mixup and cutmix", JOB,
          "seed=cfg.seed,", "seed=0,", BY_HAND.format("lenet")),
    Error("decay_norms_and_biases is ignored", MATERIALIZE,
          "strategy.param_groups(cfg.decay_norms_and_biases)", "strategy.param_groups()", BY_HAND.format("lenet")),
    Error("the schedule counts steps as epochs", MATERIALIZE,
          "cfg.epochs, plan.steps_per_epoch,", "cfg.epochs * plan.steps_per_epoch, 1,", BY_HAND.format("batch_norm")),
    Error("the test set is augmented", JOB,
          "shuffle=False, crop_padding=0, flip=False", "shuffle=False",
          "tests/data/test_data.py::test_job_augments_the_training_split_only[device]"),

    Error("all blocks have the same random numbers", "ddp_lab/models/initial_weights.py",
          " block={name}", "", "tests/models/test_initial_weights.py::test_draw_depends_on_seed_and_name_only"),
    Error("a rank draws what other ranks hold too", "ddp_lab/strategies/fsdp.py",
          "        if self.initial_weights is None:\n            model.to(self.device)\n", "        self.to_device(model)\n",
          "tests/strategies/test_equivalence.py::test_ranks_allocate_their_own_part_of_the_model_and_one_block"
          "[FSDP-True-local-None-vit-on-2]"),
    Error("every step drops the same branches", "ddp_lab/models/drop_path.py",
          " step={step}", "", "tests/models/test_drop_path.py::test_drops_have_their_rate_and_differ_by_step_and_name"),
    Error("an elastic restart obeys resume=never", TRAIN,
          '"auto" if run_dir.restarted and checkpoints.files() else cfg.resume', "cfg.resume",
          "tests/resilience/test_faults.py::test_elastic_restart_of_a_sharded_model_ends_with_the_same_weights[pipeline]"),
    Error("checkpoint.keep is ignored", TRAIN,
          "cfg.checkpoint.keep, best,", "2, best,",
          "tests/resilience/test_checkpoint.py::test_checkpoints_are_saved_as_often_and_kept_as_many_as_asked"),
    Error("checkpoint.every_epochs is ignored", TRAIN,
          "every.every_epochs, every.every_steps,", "1, every.every_steps,",
          "tests/resilience/test_checkpoint.py::test_checkpoints_are_saved_as_often_and_kept_as_many_as_asked"),
    Error("the seed is not written into checkpoints", TRAIN,
          "cfg.seed, cfg.checkpoint.keep", "0, cfg.checkpoint.keep",
          "tests/resilience/test_resume.py::test_resume_with_another_seed_logs_a_warning"),
    Error("a run ends without waiting for its last checkpoint", TRAIN,
          "    guard.finish()\n", "",
          "tests/resilience/test_faults.py::test_last_checkpoint_that_cannot_be_written_fails_the_run"),

    Error("a preempted run exits with code 0", MAIN,
          "else EXIT_CODES.get(status, 0)", "else 0",
          "tests/resilience/test_faults.py::test_sigterm_without_torchrun_exits_with_75"),
    Error("the values in the config are not checked", MAIN,
          "    check(cfg)\n", "",
          "tests/test_startup.py::test_help_and_config_errors_do_not_load_torch"
          "[epochs=0-2-epochs=0: must be an integer of at least 1]"),

    Error("the model stays in evaluation mode after the first epoch", LOOP,
          "    strategy.train()\n", "", BY_HAND.format("batch_norm")),
    Error("evaluation runs in training mode", EVALUATION,
          "strategy.train(False)", "pass", BY_HAND.format("lenet")),
    Error("padding counts in the confusion matrix", SUMS,
          "real.to(counts.dtype)", "torch.ones_like(real).to(counts.dtype)", SINGLE_SAMPLES),
    Error("rows and columns of the confusion matrix are swapped", SUMS,
          "true * classes + logits.argmax(1)", "logits.argmax(1) * classes + true", SINGLE_SAMPLES),
    Error("the confusion matrix of the first epoch is drawn", LOGGER,
          "        if counts is not None:\n", "        if counts is not None and epoch == 1:\n",
          "tests/observe/test_logger.py::test_epoch_is_recorded_under_its_names"),
    Error("set_epoch is forgotten", LOOP,
          "    loader.set_epoch(before.epoch, before.samples)\n", "", BY_HAND.format("lenet")),
    Error("the highest val_loss counts as the best", "ddp_lab/training/progress.py",
          "value < self.best[name] if", "value > self.best[name] if",
          "tests/resilience/test_faults.py::test_early_stopping_persists_over_a_restart"),
    Error("the sums from before a resume are lost", LOOP,
          "earlier + now for", "now for",
          "tests/resilience/test_faults.py::test_run_killed_at_any_step_resumes_to_the_same_end[8]"),
    Error("every step's sums are kept", "ddp_lab/training/tally.py",
          "        self._add(sums)\n", '        self._add(sums)\n        self.__dict__.setdefault("kept", []).append(sums)\n',
          "tests/run/test_long_runs.py::test_memory_does_not_grow_with_the_number_of_steps[default]"),
    Error("every batch of a worker is kept", WORKERS,
          "        start += len(targets)\n",
          '        start += len(targets)\n        self.__dict__.setdefault("kept", []).append(targets)\n',
          "tests/run/test_long_runs.py::test_memory_does_not_grow_with_the_number_of_steps[workers]"),
    Error("every step is logged", LOOP,
          "        hooks.after_step(progress, here)\n",
          '        hooks.after_step(progress, here)\n        log.info(f"step {progress.step}")\n',
          "tests/run/test_long_runs.py::test_files_do_not_grow_with_the_number_of_steps[default-train.log]"),

    Error("gradients are not zeroed", STEP,
          "        self.optimizer.zero_grad()\n", "", BY_HAND.format("lenet")),
    Error("the learning rate of the next step is reported", STEP,
          '        self.lr = self.optimizer.param_groups[0]["lr"]\n        self.scheduler.step()\n',
          '        self.scheduler.step()\n        self.lr = self.optimizer.param_groups[0]["lr"]\n',
          BY_HAND.format("batch_norm")),
    Error("a skipped batch stays in BatchNorm's statistics", STEP,
          "            buffer.copy_(torch.where(finite.to(buffer.device, non_blocking=True), buffer, before))",
          "            pass",
          "tests/resilience/test_faults.py::test_on_nan_skip_continues_after_a_loss_that_is_not_finite[python train.py]"),

    Error("the warm-up is one step short", SCHEDULE,
          "return (step + 1) / (warmup_steps + 1)", "return (step + 1) / warmup_steps",
          "tests/config/test_config.py::test_schedules_have_the_expected_learning_rates"),
    Error("lr_scaling=sqrt scales linearly", PLAN,
          "math.sqrt(factor)", "factor",
          "tests/config/test_config.py::test_scaling_determines_global_batch_and_learning_rate[weak-sqrt-1024-0.2]"),

    Error("padding counts as samples", LOADER,
          "torch.where(places < self.shard.real, targets, IGNORE)", "targets",
          "tests/data/test_data.py::test_loader_without_shuffle_reads_every_sample_once[3-4]"),
    Error("a resumed epoch begins at its first sample", LOADER,
          "math.ceil(samples / self.shard.ranks)", "0",
          "tests/data/test_data.py::test_loader_resumes_within_an_epoch_for_any_world_size[1-device-1]"),
    Error("worker processes shuffle for themselves", WORKERS,
          "self.shard.order(epoch)[start:]", "torch.randperm(len(self.shard))[start:]",
          "tests/data/test_data.py::test_device_and_workers_loaders_yield_equal_tensors[2]"),
    Error("what workers loaded ahead of another epoch is not dropped", WORKERS,
          "(self._stream is None or self._keys.position != (self.epoch, self.start))", "self._stream is None",
          IMAGES.format("1-0-none")),
    Error("images that are read one by one are transformed alike in every epoch", "ddp_lab/data/transforms.py",
          "image seed={seed} epoch={epoch}", "image seed={seed} epoch=0", IMAGES.format("1-0-none")),
    Error("a cache has the images of another order", "ddp_lab/data/record.py",
          "self.places[number]", "self.places[-1 - number]", IMAGES.format("2-2-disk")),
    Error("a signal kills the worker processes", WORKERS,
          "worker_init_fn=ignore_signals,", "",
          "tests/resilience/test_faults.py::test_sigterm_to_all_processes_spares_the_loader_workers"),
    Error("every epoch augments alike", AUGMENT,
          " epoch={epoch}", "", "tests/data/test_data.py::test_draw_depends_on_epoch_and_seed_only"),
    Error("images are mirrored after they are moved", AUGMENT,
          "width - 1 - columns, columns)", "width - 1 - x - dx[:, None], columns)",
          "tests/data/test_data.py::test_augment_shifts_and_flips_every_image_separately"),

    Error("the exit code of a sweep's job is ignored", TORCHRUN,
          "code = process.wait()", "code = process.wait() and 0",
          "tests/launch/test_sweep.py::test_failed_job_does_not_end_the_sweep_and_only_it_runs_again"),
    Error("jobs side by side share a GPU", TORCHRUN,
          "names[i * self.nproc_per_node :", "names[i :",
          "tests/launch/test_sweep.py::test_concurrent_jobs_get_separate_gpus_or_are_rejected"),
    Error("the averages of the weights are not used after training", "ddp_lab/run/trained.py",
          'state.get("ema", state["model"])', 'state["model"]',
          "tests/test_after_training.py::test_evaluation_under_any_strategy_equals_the_one_of_training"),
    Error("files are predicted without normalisation", "ddp_lab/run/predict.py",
          "self.model(images * self.scale - self.offset)", "self.model(images.float())",
          "tests/test_after_training.py::test_predictions_of_files_equal_those_of_the_test_set"),
    Error("a preempted job counts as finished", SWEEP,
          ' and status["status"] == "finished"', "",
          "tests/launch/test_sweep.py::test_job_is_finished_when_its_status_is_and_all_epochs_are_done[preempted-3-False]"),
    Error("a finished job is not continued to more epochs", SWEEP,
          ' and status["epoch"] >= job.epochs', "",
          "tests/launch/test_sweep.py::test_job_is_finished_when_its_status_is_and_all_epochs_are_done[finished-2-False]"),
    Error("a strategy of one process is submitted to several nodes", SLURM,
          '["--nodes=1"]', "[]", "tests/launch/test_sweep.py::test_slurm_dry_run_prints_the_script_and_the_commands"),
    Error("a job that sbatch refused counts as submitted", SLURM,
          "if done.returncode:\n                print", "if False:\n                print",
          "tests/launch/test_slurm.py::test_sweep_reports_every_job_that_slurm_rejects"),
    Error("Kubernetes replaces variables in overrides", KUBERNETES,
          'argument.replace("$", "$$")', "argument",
          "tests/launch/test_kubernetes.py::test_manifest_passes_overrides_as_arguments_that_kubernetes_does_not_expand"),
    Error("a TrainJob that has failed is not created again", KUBERNETES,
          'ENDED = {"Complete", "Failed"}', 'ENDED = {"Complete"}',
          "tests/launch/test_kubernetes.py::test_trainjobs_are_created_once_and_again_after_they_have_ended"),
    Error("a status of an earlier launch counts as this one's", OUTCOME,
          ' if record["launch"] == launch else "none"', "",
          "tests/launch/test_slurm.py::test_outcome_is_the_status_of_this_launch_alone"),

    Error("strategies are compared with the last one and not with single", "scripts/comparison/report.py",
          "single = results[0]", "single = results[-1]",
          "tests/scripts/test_compare.py::test_rows_compare_every_strategy_with_single"),
    Error("the weights after 5 steps are reported as the last", "scripts/comparison/report.py",
          "max(found, default=0)", "min(found, default=0)",
          "tests/scripts/test_compare.py::test_table_has_the_numbers_of_records_and_checkpoints"),
    Error("the speed-up is inverted", "scripts/comparison/report.py",
          "result.rate / single.rate", "single.rate / result.rate",
          "tests/scripts/test_compare.py::test_rows_compare_every_strategy_with_single"),

    Error("a loss of NaN is written as it is, which is no JSON", LOGGER,
          "value if math.isfinite(value) else None", "value",
          "tests/observe/test_logger.py::test_epoch_is_recorded_under_its_names"),
    Error("TensorBoard shows the training loss as the test loss", LOGGER,
          'metrics[f"{name}_{kind}"], epoch', 'metrics[f"train_{kind}"], epoch',
          "tests/observe/test_logger.py::test_epoch_is_recorded_under_its_names"),
    Error("the columns of a profile are medians, which do not add up", "ddp_lab/observe/time_split.py",
          "part: statistics.mean(step[part]", "part: statistics.median(step[part]",
          "tests/observe/test_profile.py::test_summary_adds_up_to_the_step_even_if_ranks_wait_for_each_other_in_turn"),
    Error("a curve hides another that coincides with it", "ddp_lab/observe/coinciding.py",
          "if number > 0:", "if False:",
          "tests/observe/test_plot.py::test_curve_is_visible_where_a_part_of_it_coincides_with_another"),
    Error("the cost model of an all-reduce falls with the size", "scripts/lab_allreduce.py",
          "max(0.0, slow - fast)", "(slow - fast)",
          "tests/scripts/test_labs.py::test_cost_model_of_the_allreduce_never_falls_with_the_size[the largest is the fastest]"),
    Error("a record that is trained again is kept", "ddp_lab/observe/metrics_file.py",
          'row["epoch"] < epoch', 'row["epoch"] <= epoch',
          "tests/resilience/test_resume.py::test_run_without_its_last_checkpoint_ends_the_same"),

    Error("checkpoints are written in place", FILES,
          "os.replace(temporary, path)", "path.write_bytes(temporary.read_bytes())",
          "tests/resilience/test_damaged_files.py::test_files_are_replaced_and_never_written_in_place[checkpoint]"),
    Error("checkpoints are not compared with their hash", FILES,
          "return None if sha256(path) == expected else", "return None if True else",
          "tests/resilience/test_damaged_files.py::test_flipped_byte_in_a_named_file_is_refused"),
    Error("the newest checkpoint counts as the best", "ddp_lab/training/progress.py",
          "== self.epoch - 1", "",
          "tests/resilience/test_checkpoint.py::test_best_checkpoint_is_kept_besides_the_newest[val_loss-2]"),
    Error("the test set chooses the best epoch", LOOP,
          'progress.next_epoch(evaluated["val"].metrics("val") if evaluated else {})',
          'progress.next_epoch(evaluate(strategy, loaders["test"]).metrics("val"))',
          "tests/test_validation.py::test_validation_set_chooses_the_best_epoch_and_the_test_set_does_not"),
    Error("validation samples are trained on", "ddp_lab/data/held_out.py",
          "(~chosen).nonzero()", "(chosen | ~chosen).nonzero()",
          "tests/test_validation.py::test_validation_set_is_the_same_for_any_world_size_and_loader"),
    Error("checkpoint.best is ignored", TRAIN,
          "cfg.checkpoint.keep, best,", "cfg.checkpoint.keep, None,",
          "tests/resilience/test_checkpoint.py::test_only_the_last_two_checkpoints_and_the_best_are_kept"),
    Error("the averages are updated before the step", STEP,
          "        self._optimize()\n        if self.ema is not None:\n            self.ema.update()\n",
          "        if self.ema is not None:\n            self.ema.update()\n        self._optimize()\n",
          BY_HAND.format("batch_norm")),
    Error("the weights are evaluated and not their averages", LOOP,
          "ema.in_use() if ema else nullcontext()", "nullcontext()", BY_HAND.format("batch_norm")),
    Error("BatchNorm's statistics are not averaged", EMA,
          "trained | dict(module.named_buffers())", "trained", BY_HAND.format("batch_norm")),
    Error("a checkpoint saved during an evaluation has weights and averages exchanged", CHECKPOINT,
          "self.ema.end_use()  # a preemption may interrupt an evaluation", "pass",
          "tests/resilience/test_checkpoint.py"
          "::test_checkpoint_during_an_evaluation_has_weights_and_averages_in_their_places"),
    Error("the averages in a checkpoint are ignored", "ddp_lab/resilience/whole_state.py",
          'state.get("ema", state["model"])', 'state["model"]',
          "tests/resilience/test_checkpoint.py::test_averages_are_resumed_or_start_from_the_weights[True-2]"),
    Error("a run keeps its kernels where torch does, in a temporary directory", "ddp_lab/training/speed/cache.py",
          " and named != default_cache_dir() else", " else",
          "tests/training/test_auto.py::test_kernels_are_kept_in_the_cache_directory"),
    Error("a later launch of the same work measures a step again", "ddp_lab/training/speed/attempts.py",
          "leave_mark(mark, seconds)", "pass",
          "tests/training/test_auto.py::test_step_is_compiled_if_the_run_is_long_and_the_next_time_sooner"),
    Error("the averages of a compiled step's warm-up are kept", "ddp_lab/training/speed/warm_up.py",
          "step.ema.averages.values() if step.ema else ()", "()",
          "tests/training/test_speed.py::test_compiled_steps_produce_the_same_weights[ddp]"),
    Error("after an evaluation fsdp computes with the gathered averages", FSDP,
          "            module.reshard()", "            pass", MATRIX.format("FSDP-False-local-None-clipped-on-2")),
    Error("a checkpoint may run code", FILES,
          "weights_only=True)", "weights_only=False)",
          "tests/resilience/test_damaged_files.py::test_bad_files_are_refused[archive-cannot be read as a checkpoint]"),
    Error("checkpoints are ordered by name, where 10 comes before 9", FOLDER,
          "(step_of(path), path.suffix)", "(path.name, path.suffix)",
          "tests/resilience/test_checkpoint.py::test_checkpoints_are_ordered_by_step"),
    Error("checkpoint.format is ignored", JOB,
          'self.cfg.checkpoint.format == "sharded" or', "False or",
          SHARDED.format("format_depends_on_size_and_ranks[sharded-1-1-True]")),
    Error("shards are not compared with their hash", SHARDED_FILES,
          "elif sha256(folder / name) != expected.sha256:", "elif False:",
          DAMAGED_SHARDS.format("damaged_shards_are_named_and_the_previous_checkpoint_resumed[flipped]")),
    Error("what a killed save left is taken for a checkpoint", SHARDED_FILES,
          "read_manifest(temporary) is not None and ", "",
          DAMAGED_SHARDS.format("interrupted_save_is_completed_or_removed[partial-1]")),
    Error("the metadata of shards may run code", SHARDED_READ,
          "if is_dtype or (module_name, global_name) in ALLOWED:", "if True:",
          DAMAGED_SHARDS.format("crafted_checkpoint_does_not_run_code[pickle-True]")),
    Error("shards may refer to files outside their directory", SHARDED_READ,
          "and names <= ", "and names or ",
          DAMAGED_SHARDS.format("crafted_checkpoint_does_not_run_code[path-True]")),
    Error("the averages in shards are ignored", SHARDED_STATE,
          'if ema and saved.has("ema"):', "if False:",
          SHARDED.format("averages_are_resumed_or_start_from_the_weights[True-2]")),
    Error("shards have BatchNorm's statistics of any replica", SHARDED_STATE,
          "if strategy.dp_rank > 0 else", "if strategy.dp_rank > 1 else",
          "tests/resilience/test_sharded_ranks.py::test_rank_that_cannot_write_its_share_fails_the_checkpoint"),
    Error("a share is not copied, so training changes it", SHARDED_WRITE,
          '.to("cpu", copy=True)', '.to("cpu")',
          SHARDED.format("training_waits_for_the_copy_and_not_for_the_disk")),
    Error("the last epoch is not saved", GUARD,
          "if last or ", "if ",
          "tests/resilience/test_checkpoint.py::test_checkpoints_are_saved_as_often_and_kept_as_many_as_asked"),
    Error("weights that are not finite are saved", GUARD,
          "weights=True)", "weights=False)", "tests/resilience/test_faults.py::test_weights_not_finite_are_not_saved"),
    Error("a dead rank is not noticed", "ddp_lab/resilience/node_watch.py",
          "return None if is_alive", "return None if True or is_alive",
          "tests/resilience/test_nodes.py::test_rank_finds_the_next_rank_dead[0-phases0-1]"),
    Error("the ranks with the most progress are suspected of a hang", "ddp_lab/resilience/overview.py",
          "[: LISTED + 1]", "[-LISTED - 1 :]",
          "tests/resilience/test_nodes.py::test_overview_of_nodes_equals_the_overview_of_their_ranks"),
    Error("heartbeats of a killed launch stay in memory", "ddp_lab/resilience/node_board.py",
          "shutil.rmtree(made)", "pass",
          "tests/resilience/test_nodes.py::test_board_of_a_killed_launch_is_removed_by_the_next_and_one_in_use_is_not"),
    Error("every node reads the heartbeats of all nodes", "ddp_lab/resilience/node_link.py",
          "        if self.runtime.node == 0:\n            self._publish(store)\n        overview",
          "        self._publish(store)\n        overview",
          "tests/resilience/test_nodes.py::test_heartbeat_costs_two_operations_and_node_0_two_more"),
    Error("heartbeats are a second apart, and as long as each takes", "ddp_lab/resilience/unchanged.py",
          "max(self._next + self.period, now)", "now + self.period",
          "tests/resilience/test_nodes.py::test_turns_are_a_second_apart_however_long_they_take_and_missed_ones_are_left_out"),
    Error("a rank that has finished is aborted by a late answer of the store", "ddp_lab/world/ranks.py",
          "if any(thread.is_alive() for thread in self.abandoned)", "if False",
          "tests/resilience/test_nodes.py::"
          "test_rank_that_ends_while_the_store_does_not_answer_is_not_aborted_when_it_does"),
    Error("two launches may write in one directory", RUN_DIR,
          "self._lock = lock(path, RESTART_WAIT if name == restarted else LOCK_WAIT)", "pass",
          "tests/resilience/test_faults.py::test_second_writer_is_refused"),
    Error("two launches of the same second share a directory", RUN_DIR,
          "(root / name).mkdir()", "(root / name).mkdir(exist_ok=True)",
          "tests/world/test_ranks.py::test_launches_of_the_same_second_get_different_directories"),
    Error("a new launch takes the directory of the last one", RUN_DIR,
          "if agents & set(file.read_text().splitlines())", "if True",
          "tests/world/test_ranks.py::test_find_launch_returns_the_directory_of_this_launch_alone"),
    Error("a launch whose first node was replaced gets a new directory", "ddp_lab/world/ranks.py",
          'self.collect("launch", own) or [own]', "[own]",
          "tests/world/test_ranks.py::test_launch_whose_first_node_was_replaced_keeps_its_directory"),
    Error("a rank takes the name of an earlier start", "ddp_lab/world/attempt.py",
          "if name and store.check([answer]) and store.get(answer) == word:", "if name:",
          "tests/world/test_attempt.py::test_ranks_of_a_start_get_one_name_and_never_that_of_an_earlier_start"),
    Error("ranks that have started are reported as late", "ddp_lab/world/attempt.py",
          " if not store.check([key])]", "]",
          "tests/world/test_attempt.py::"
          "test_start_that_failed_before_its_ranks_agreed_leaves_nothing_that_the_next_start_uses"),
    Error("status.json is written in place", RUN_DIR,
          "os.replace(temporary, path)", "path.write_text(temporary.read_text()), temporary.unlink()",
          "tests/resilience/test_damaged_files.py::test_files_are_replaced_and_never_written_in_place[json]"),

    Error("ddp takes the mean over ranks of what is to be summed", "ddp_lab/strategies/ddp.py",
          "return count / self.dp_size", "return count", BY_HAND.format("lenet-ddp")),
    Error("scratch does not sum the gradients", "ddp_lab/strategies/scratch.py",
          "ALGORITHMS[self.algorithm](gradients_of(parameters))", "gradients_of(parameters)",
          "tests/resilience/test_resume.py::test_strategy_resumes_the_run_of_another[first0-second0]"),
    Error("the padding of a pipeline's mixed batch is not marked", "ddp_lab/strategies/pipeline.py",
          "IGNORE if targets.dim() == 1 else 0", "IGNORE if targets.dim() == 1 else targets[:1]",
          MATRIX.format("Pipeline-1f1b-5-None-None-recipe-on-2")),
    Error("a pipeline trains a weight of two stages twice", "ddp_lab/strategies/pipeline.py",
          "require_whole(model, stage_of, self.name)", "pass",
          "tests/models/test_own.py::test_cut_by_time_is_checked_for_shared_weights"),
    Error("a Sequential loses a module that it uses twice", "ddp_lab/models/make.py",
          "model.named_modules(remove_duplicate=False)", "model.named_modules()",
          "tests/models/test_own.py::test_sequential_that_uses_a_module_or_a_weight_twice_computes_the_same[one_activation]"),
    Error("gradients of different types are converted to one", "ddp_lab/strategies/all_reduce.py",
          "setdefault(parameter.dtype, [])", "setdefault(torch.float32, [])",
          "tests/models/test_own.py::test_every_strategy_equals_single[SeveralTypes-2-strategy=scratch]"),
    Error("a stage without parameters cannot be saved", "ddp_lab/strategies/saved_state.py",
          "if not self.module.state_dict():", "if False:",
          MATRIX.format("Pipeline-1f1b-4-None-(first,)-clipped-unbiased-on-2")),
    Error("scratch does not broadcast rank 0's weights", "ddp_lab/strategies/scratch.py",
          "dist.broadcast(tensor, src=0)", "pass", MATRIX.format("Scratch-flat-0.015625-local-on-2")),
    Error("fully_shard takes the mean over ranks of what a mesh sums", MESH,
          "part.set_gradient_divide_factor(1.0)", "pass",
          MATRIX.format("Mesh-None-None-1-1-False-1f1b-4-None-None-local-selective-48 samples-accumulate 2-vit-on-2")),
    Error("fsdp clips by the norm of a rank's shards if they are on the host", "ddp_lab/strategies/fsdp.py",
          "self.runtime.all_reduce(torch.stack(squares).sum().to(self.device))", "torch.stack(squares).sum()",
          MATRIX.format("FSDP-True-local-None-True-48 samples-accumulate 2-clipped-vit-on-2")),
    Error("fully_shard sums gradients in bf16", "ddp_lab/strategies/fully_shard.py",
          "reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16",
          "tests/strategies/test_state_memory.py::test_bf16_computes_with_copies_of_weights_that_are_kept_and_summed_in_float32[fsdp]"),
    Error("selective checkpointing keeps nothing", "ddp_lab/strategies/activation_checkpointing.py",
          "create_selective_checkpoint_contexts, kept()", "create_selective_checkpoint_contexts, []",
          "tests/strategies/test_activation_checkpointing.py"
          "::test_backward_pass_computes_the_block_again_without_matrix_multiplications_if_selective"),
    Error("a mesh counts gradients once for every rank that has them", MESH, "/ copies", "", CUBE),
    Error("the ranks along tp each report their sums", MESH,
          'self.has_loss and self.mesh["tp"].get_local_rank() == 0', "self.has_loss", CUBE),
    Error("the ranks along tp read different samples", MESH, "runtime.rank // tp % self.dp_size", "runtime.rank % self.dp_size",
          "tests/strategies/test_mesh.py::test_ranks_of_one_dp_read_the_same_samples_and_one_of_each_reports"),
]
# fmt: on


def copy_tree(target: Path) -> Path:
    """Copy what git tracks or would add, with changes that are not committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def plant(error: Error, root: Path) -> None:
    """Apply the replacement.

    Raises:
        ValueError: the old text does not occur exactly once, or the changed file is not valid Python.
    """
    path = root / error.file
    source = path.read_text()
    if (count := source.count(error.old)) != 1:
        raise ValueError(f"{error.name}: {error.old!r} must occur once in {error.file}, but occurs {count} times")
    changed = source.replace(error.old, error.new)
    try:
        compile(changed, error.file, "exec")
    except SyntaxError as problem:
        raise ValueError(f"{error.name}: {error.file} is no Python any more: {problem}") from None
    path.write_text(changed)


def run_tests(root: Path, tests: list[str], limit: float = LIMIT) -> dict[str, str]:
    """Return the outcome of each test: PASSED, FAILED or ERROR; "no result" if it was skipped, not found or timed out."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *tests],
        cwd=root,
        env=os.environ
        | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests' / 'support'}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return dict.fromkeys(tests, "no result")
    words = re.findall(r"^(PASSED|FAILED|ERROR) (.*)$", output, re.MULTILINE)
    return {
        test: next((word for word, line in words if line == test or line.startswith(f"{test} - ")), "no result")
        for test in tests
    }


def failing_without_error(tests: list[str]) -> list[str]:
    """Return the tests that do not pass in a copy of this tree. They run file by file, so that tests share fixtures."""
    failing = []
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for _, group in itertools.groupby(sorted(tests), lambda test: test.partition("::")[0]):
            outcomes = run_tests(Path(folder), list(group), 2 * LIMIT)
            failing += [test for test, word in outcomes.items() if word != "PASSED"]
    return failing


def is_caught(error: Error) -> bool:
    """Plant the error in a copy of this tree and run its test there. Print and return whether the test caught it."""
    with tempfile.TemporaryDirectory() as folder:
        plant(error, copy_tree(Path(folder)))
        start = time.perf_counter()
        word = run_tests(Path(folder), [error.test])[error.test]
    seconds = time.perf_counter() - start
    caught = word in ("FAILED", "ERROR")
    how = "caught by" if caught else f"SURVIVED ({word})"
    print(f"{error.name}: {how} {error.test} in {seconds:.0f} s", flush=True)
    return caught


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="plant only errors whose name or file contains one of these")
    arguments = parser.parse_args()
    words = arguments.words or [""]
    chosen = [error for error in ERRORS if any(word in f"{error.name} {error.file}" for word in words)]
    if not chosen:
        parser.error(f"{' '.join(words)}: no error has this in its name or file; ERRORS in this file lists them")
    tests = list(dict.fromkeys(error.test for error in chosen))
    failing = failing_without_error(tests)
    print(f"{len(tests) - len(failing)} of {len(tests)} tests pass without an error", *failing, sep="\n", flush=True)
    caught = sum(is_caught(error) for error in chosen)
    print(f"{caught} of {len(chosen)} errors are caught")
    return 0 if caught == len(chosen) and not failing else 1


if __name__ == "__main__":
    sys.exit(main())
