"""Write a saved model as a file for another runtime: python -m hf_deberta.export --help"""

import argparse
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers

from hf_deberta.commands.any_checkpoint import MODEL_HELP, load_checkpoint
from hf_deberta.export import to_onnx, to_openvino

FORMATS = {"onnx": to_onnx, "openvino": to_openvino}
DTYPES = {"float32": torch.float32, "int8": torch.int8}
HOW_TO_RUN = {
    "onnx": 'onnxruntime.InferenceSession("{file}").run(None, {{"input_ids": ids, "attention_mask": mask}})',
    "openvino": 'openvino.compile_model("{file}")({{"input_ids": ids, "attention_mask": mask}})',
}
PACKED = ('"attention_mask": mask', '"cu_seq_lens_q": boundaries')


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m hf_deberta.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    parser.add_argument("--to", required=True, choices=FORMATS, help="the runtime's format")
    parser.add_argument("--output", required=True, type=Path, help="file to write: NAME.onnx or NAME.xml")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="type of the weights")
    parser.add_argument("--packed", action="store_true", help="inputs are one row of documents and cu_seq_lens_q")
    parser.add_argument("--architecture", help="class of hf_deberta, by default that of the saved model's head")
    args = parser.parse_args(arguments)
    transformers.logging.disable_progress_bar()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names operators of torchvision, which we do not use
    warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated", FutureWarning)  # by PyTorch
    try:
        model = load_checkpoint(args.model, args.architecture)
        print(f"Writing {args.output}: {model.num_parameters():,} parameters, which may take a minute", flush=True)
        file = FORMATS[args.to](model, args.output, packed=args.packed, dtype=DTYPES[args.dtype])
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped; no file was written", file=sys.stderr)
        return 130
    names = (file.name, f"{file.name}.data", f"{file.stem}.bin")  # the last two hold weights beside the graph
    size = sum(path.stat().st_size for name in names if (path := file.with_name(name)).exists())
    call = HOW_TO_RUN[args.to].format(file=file)
    print(f"Wrote {file}, {size / 1e6:,.0f} MB. Run it: {call.replace(*PACKED) if args.packed else call}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
