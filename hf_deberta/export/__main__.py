"""Write a saved model as a file for another runtime: python -m hf_deberta.export --help"""

import argparse
import sys
from pathlib import Path

import torch
import transformers

import hf_deberta
from hf_deberta.export import to_onnx, to_openvino

FORMATS = {"onnx": to_onnx, "openvino": to_openvino}
DTYPES = {"float32": torch.float32, "int8": torch.int8}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m hf_deberta.export", description=__doc__)
    parser.add_argument("--model", required=True, help="folder with a saved model, or its name on the Hub")
    parser.add_argument("--to", required=True, choices=FORMATS, help="the runtime's format")
    parser.add_argument("--output", required=True, type=Path, help="file to write: NAME.onnx or NAME.xml")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="type of the weights")
    parser.add_argument("--packed", action="store_true", help="inputs are one row of documents and cu_seq_lens_q")
    parser.add_argument("--architecture", help="class of hf_deberta, by default that of the saved model's head")
    args = parser.parse_args(arguments)
    transformers.logging.disable_progress_bar()
    try:
        architecture = model_class(args.model, args.architecture)
        model = architecture.from_pretrained(args.model, dtype=torch.float32, trust_remote_code=False)
        file = FORMATS[args.to](model, args.output, packed=args.packed, dtype=DTYPES[args.dtype])
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {file}")
    return 0


def model_class(folder: str, name: str | None = None) -> type[hf_deberta.HfDebertaPreTrainedModel]:
    """The class of hf_deberta with this name; by default that of the head which the checkpoint was saved with.

    Transformers' own classes have heads of the same names: DebertaV2ForTokenClassification.
    """
    if name is None:
        saved, _ = transformers.PretrainedConfig.get_config_dict(folder)
        (name,) = saved.get("architectures") or ["HfDebertaModel"]
        name = "HfDeberta" + name.removeprefix("Hf").removeprefix("Deberta").removeprefix("V2")
    architecture = getattr(hf_deberta, name, None)
    if not (isinstance(architecture, type) and issubclass(architecture, hf_deberta.HfDebertaPreTrainedModel)):
        raise ValueError(f"there is no head {name} in hf_deberta; pass --architecture HfDebertaModel or another class")
    return architecture


if __name__ == "__main__":
    sys.exit(main())
