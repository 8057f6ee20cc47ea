"""Export the model of a trained run to a file, under the model's own parameter names.

ddp-lab export runs/mine --output model.safetensors   the weights, for safetensors.torch.load_file
ddp-lab export runs/mine --output model.onnx          for onnxruntime and others
ddp-lab export runs/mine --output model.pt2           for torch.export.load

ONNX needs pip install 'ddp_lab[export]'.

The weights are the best ones if a validation set chose them, else those of the newest checkpoint.
The input of the last two is `images`, float32 [batch, channels, height, width], normalised; the
output is `logits`. Any batch size is allowed.
"""

import argparse

from ddp_lab.launchers.arguments import Parser, check_output, replacing


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab export", __doc__)
    parser.add_run()
    parser.add_output("file to write: .safetensors, .onnx or .pt2", required=True)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    from ddp_lab.run.build_trained import open_run
    from ddp_lab.run.export import describe_input, find_writer

    write = find_writer(namespace.output)
    check_output(namespace.output, namespace.force)
    run = open_run(namespace.run, namespace.checkpoint)
    with replacing(namespace.output) as temporary:
        write(run, temporary)
    print(f"{namespace.output}: {run.checkpoint}; {describe_input(run)}")
