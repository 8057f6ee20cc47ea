"""Names that other programs have for keys and values, and what there is here.

They are those of the Trainer of transformers, of Lightning, nanoGPT, torchvision's references and
timm.
"""

# The keys whose values mean the same here.
RENAMED = {
    "epochs": "epoch max_epochs n_epochs nepochs num_epochs num_train_epochs",
    "max_steps": "iterations max_iters max_train_steps num_iterations num_steps num_train_steps "
    "steps total_steps train_steps",
    "max_tokens": "num_tokens total_tokens train_tokens",
    "optimizer.lr": "base_lr learning_rate lr max_lr optimizer.learning_rate peak_lr",
    "optimizer.weight_decay": "wd weight_decay",
    "optimizer.momentum": "momentum",
    "batch_size": "bs global_batch_size total_batch_size train_batch_size",
    "accumulate": "accumulate_grad_batches accumulation_steps grad_accum grad_accum_steps "
    "gradient_accumulation gradient_accumulation_steps",
    "max_grad_norm": "clip_grad clip_grad_norm grad_clip grad_clip_norm gradient_clip_val max_norm",
    "warmup_steps": "lr_warmup_steps num_warmup_steps warmup_iters",
    "evaluate_every": "eval_every eval_interval eval_steps val_every val_loss_every",
    "checkpoint.every_steps": "checkpoint_every save_every save_interval save_steps",
    "checkpoint.keep": "save_total_limit",
    "log_every": "log_every_n_steps log_interval logging_steps",
    "patience": "early_stopping_patience",
    "seed": "manual_seed random_seed rng_seed",
    "runs_dir": "default_root_dir log_dir logdir out_dir output_dir",
    "name": "exp_name experiment_name run_name",
    "resume": "ckpt_path resume_from resume_from_checkpoint",
    "model.weights": "init_from pretrained_path weights",
    "data.num_workers": "dataloader_num_workers num_workers workers",
    "data.root": "data_dir data_path dataroot root train_data",
    "data.context": "block_size context context_length max_length max_seq_len seq_len seq_length "
    "sequence_length",
    "data.val_fraction": "val_fraction val_size val_split validation_split",
    "data.num_classes": "num_classes vocab_size vocabulary",
    "loss.label_smoothing": "label_smoothing smoothing",
    "ema": "ema_decay model_ema_decay",
    "compile": "torch_compile",
    "strategy.find_unused_parameters": "ddp_find_unused_parameters find_unused_parameters",
    "tracker": "report_to",
    "strategy": "distributed_strategy distribution parallelism",
    "data": "dataset dataset_name",
    "model": "arch architecture model_name network",
    "optimizer": "opt optim",
    "scheduler": "lr_schedule lr_scheduler lr_scheduler_type sched",
}
PRECISION = (
    "Use precision=bf16 or precision=fp16, mixed precision by torch.autocast, or "
    "precision=float32, the default"
)
RANKS = (
    "Start ranks with `ddp-lab train --nproc N strategy=ddp`; by default there is one for each GPU"
)
RATES = (
    "Nothing finds a learning rate before the run. Use a sweep, `ddp-lab train -m "
    "optimizer.lr=0.01,0.03,0.1`, or experiment=search"
)
SCALED = "Use scaling=weak, with which batch_size is the batch of each replica"
AUTO_BATCH = "Use batch_size=auto, the largest that fits on the devices"
RECOMPUTED = "Use checkpoint_activations=block"
SHORT = "Use max_steps=N for a run of N steps"
# What there is in place of other keys.
INSTEAD = {
    PRECISION: "amp bf16 dtype fp16 fp8 half mixed_precision use_amp",
    "Use float32_matmul=high for TF32": "allow_tf32 tf32",
    RANKS: "devices gpus nproc nproc_per_node num_gpus num_processes world_size",
    RATES: "auto_lr_find find_lr lr_find lr_finder lr_range_test",
    SCALED: "micro_batch_size per_device_batch_size per_device_train_batch_size per_gpu_batch_size",
    AUTO_BATCH: "auto_find_batch_size auto_scale_batch_size",
    RECOMPUTED: "activation_checkpointing grad_checkpointing gradient_checkpointing",
    SHORT: "fast_dev_run limit_train_batches overfit_batches",
    "Use patience=N, to stop after N epochs without a better val_loss": "early_stopping",
    "Use model.weights=FILE, or with model=torchvision a name such as IMAGENET1K_V1": "pretrained",
    "Use strategy.batch_norm=sync": "sync_batchnorm sync_bn",
    "Use tracker=wandb": "use_wandb wandb wandb_log wandb_project",
    "Use tracker=tensorboard, the default": "tensorboard",
    "Use device=cuda:N, or cpu": "accelerator gpu",
    "Use data.val_split and data.test_split for the names of a dataset's own splits, and "
    "data.val_root for token shards": "test_data val_data val_root",
}
NAMES = {name: key for key, names in RENAMED.items() for name in names.split()}
ADVICE = {name: text for text, names in INSTEAD.items() for name in names.split()}

FLOAT16 = "Use fp16, which scales the loss, or bf16, which has the range of float32"
FLOAT8 = "8-bit floats are not supported. Use bf16"
IS_FLOAT32 = "Use float32, the default"
IS_BF16 = "Use bf16"
# What there is in place of values of a key.
VALUES = {
    "precision": {
        **dict.fromkeys(("float16", "half", "16", "16-mixed", "16-true", "amp"), FLOAT16),
        **dict.fromkeys(("fp8", "float8", "8"), FLOAT8),
        **dict.fromkeys(("fp32", "32", "32-true", "full"), IS_FLOAT32),
        **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true", "mixed"), IS_BF16),
    },
}


def explain_name(key: str, value: object) -> str:
    """Return what there is in place of a key, as a sentence; "" if the name is not known."""
    if key in NAMES:
        return f"Use {NAMES[key]}={value}"
    return ADVICE.get(key, "")


def explain_value(key: str, value: object) -> str:
    """Return what there is in place of the value of a key; "" if it is not known."""
    return VALUES.get(key, {}).get(str(value), "")
