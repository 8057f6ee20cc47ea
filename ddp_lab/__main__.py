"""`ddp-lab COMMAND ...` and `python -m ddp_lab COMMAND ...`.

Without a command, the arguments are those of `train`.
"""

import difflib
import importlib
import sys

COMMANDS = {
    "train": "train a model (the default: ddp-lab OVERRIDES)",
    "evaluate": "evaluate a trained run on its test or validation set",
    "predict": "predict the classes of image files with a trained run",
    "export": "write the model of a trained run as .safetensors, .onnx or .pt2",
    "eject": "write a run as one file of plain PyTorch, without ddp_lab",
    "merge": "make one file of a sharded checkpoint",
    "verify": "verify that every strategy computes what one device computes, for your model",
    "advise": "plan each strategy's memory and communication, or measure it (--measure)",
    "shards": "write shards of tokens for data=tokens from text files",
    "doctor": "check machines and config before a launch",
    "submit": "submit a run to Slurm or Kubernetes, after showing it",
    "runs": "list runs, show one, say why two differ, or delete empty ones",
    "watch": "show a run on a page: curves, a light per rank, stacks of ranks that hang",
    "exercise": "write an all-reduce, a schedule or a sharded optimizer, and have it checked",
}
HELP = ("-h", "--help", "help")


def main() -> None:
    name, *arguments = sys.argv[1:] if is_command(sys.argv[1:2]) else ["train", *sys.argv[1:]]
    if name in HELP:
        print(
            "usage: ddp-lab COMMAND ...\n",
            *(f"  {each:<10}{text}" for each, text in COMMANDS.items()),
            sep="\n",
        )
        print(
            "\n`ddp-lab COMMAND --help` describes a command. `python -m ddp_lab` is the same as "
            "`ddp-lab`."
        )
    elif name == "--version":
        from ddp_lab.launchers.arguments import installed

        print(", ".join(map(installed, ("ddp_lab", "torch"))))
    elif name not in COMMANDS:
        close = [f" Did you mean {each}?" for each in difflib.get_close_matches(name, COMMANDS, 1)]
        allowed = f"allowed: {', '.join(COMMANDS)}, or overrides such as epochs=3"
        print(
            f"error: {name}: there is no such command.{''.join(close)} {allowed}", file=sys.stderr
        )
        sys.exit(2)
    else:
        try:
            from ddp_lab.launchers.command import command  # loads Hydra, which --help does not need

            with command():
                importlib.import_module(f"ddp_lab.commands.{name}").main(arguments)
        except KeyboardInterrupt:  # during that import; later the command handles it
            sys.exit(130)


def is_command(first: list[str]) -> bool:
    """Return whether the first argument is neither an override nor an option of `train`."""
    return bool(first) and (
        first[0] in (*HELP, "--version") or ("=" not in first[0] and first[0][:1] not in "-+~")
    )


if __name__ == "__main__":
    main()
