"""Commands: python -m hf_deberta --help"""

import argparse
import sys

from hf_deberta import gpu_check


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m hf_deberta")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    summary = "check the Triton kernels on this machine's GPU, and time them against sdpa"
    command = commands.add_parser("gpu-check", help=summary, description=summary)
    gpu_check.add_arguments(command)
    command.set_defaults(run=gpu_check.main)
    args = parser.parse_args(arguments)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
