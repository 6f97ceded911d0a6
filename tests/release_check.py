"""Check what `make package` has built: contents and metadata, and the wheel in an empty environment.

    make release-check

pip downloads the versions of constraints.txt, about 1 GB. The first part of the tests has only what the wheel requires;
the second adds the extra `train`. Everything runs offline, in a folder from which the repository cannot be imported.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_WHEEL_BYTES = 1_000_000
ROUND_TRIP = """
import torch
from transformers import AutoModelForSequenceClassification
import hf_deberta
print(hf_deberta.__file__)
config = hf_deberta.HfDebertaConfig.from_preset("tiny", num_labels=3)
model = hf_deberta.HfDebertaForSequenceClassification(config).eval()
model.save_pretrained("saved")
ids = torch.tensor([[1, 5, 6, 7, 2]])
with torch.no_grad():
    for options in ({}, {"trust_remote_code": True}):
        loaded = AutoModelForSequenceClassification.from_pretrained("saved", **options).eval()
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
"""
SMALL = ("--use_cpu", "--max_steps=1", "--max_train_samples=32", "--max_eval_samples=8", "--max_predict_samples=8")


def check_wheel(path: Path) -> None:
    """Check that the wheel holds the package and its data files, and nothing else."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = [file for file in (ROOT / "hf_deberta").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    expected = {"hf_deberta_command.py", *(str(file.relative_to(ROOT)) for file in package)}
    if names != expected:
        raise SystemExit(f"{path.name}: missing {sorted(expected - names)}, too many {sorted(names - expected)}")
    if path.stat().st_size > MAX_WHEEL_BYTES:
        raise SystemExit(f"{path.name} has {path.stat().st_size:,} bytes, more than {MAX_WHEEL_BYTES:,}")


def check_source(path: Path) -> None:
    """Check that the source distribution holds every file of the repository; `make package` built the wheel from it."""
    with tarfile.open(path) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if missing := sorted(set(listed.splitlines()) - names):
        raise SystemExit(f"{path.name}: missing {missing}")


def check_in_empty_environment(wheel: Path, folder: Path) -> None:
    """Install the wheel into a new environment, and load, save and train there."""
    venv.create(folder / "environment", with_pip=True)
    programs, work = folder / "environment" / "bin", folder / "work"
    work.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}

    def run(program: str, *arguments: object) -> str:
        """Run a program of the environment and return what it printed."""
        print("release-check:", program, str(arguments[-1]).strip().splitlines()[-1], flush=True)
        done = subprocess.run(
            [programs / program, *map(str, arguments)], cwd=work, env=variables, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}release-check: {program} failed with exit status {done.returncode}")
        return done.stdout

    def install(*packages: object) -> None:
        run("python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", *packages)

    install("torch")  # first, so that no other package pulls in a different build of it
    install(wheel)
    run("python", "-m", "pip", "check")
    version = run("hf-deberta", "--version").split()
    if version != ["hf-deberta", wheel.name.split("-")[1]]:
        raise SystemExit(f"hf-deberta --version prints {' '.join(version)}, the wheel is {wheel.name}")
    if str(folder) not in run("python", "-c", ROUND_TRIP):
        raise SystemExit("hf_deberta was not imported from the wheel")
    run("hf-deberta", "inspect", "v3-base")
    install(f"{wheel}[train]")
    run("hf-deberta", "glue", "--demo", *SMALL)
    if "eval_accuracy" not in (work / "demo_output" / "glue" / "all_results.json").read_text():
        raise SystemExit("hf-deberta glue --demo wrote no accuracy")
    install("twine")  # last: its packages could hide one that the wheel should require
    print(run("twine", "check", "--strict", *wheel.parent.iterdir()))


def main() -> None:
    (wheel,), (source,) = (ROOT / "dist").glob("*.whl"), (ROOT / "dist").glob("*.tar.gz")
    check_wheel(wheel)
    check_source(source)
    with tempfile.TemporaryDirectory() as folder:
        check_in_empty_environment(wheel, Path(folder))
    print(f"{wheel.name} and {source.name} can be published (with {sys.version.split()[0]})")


if __name__ == "__main__":
    main()
