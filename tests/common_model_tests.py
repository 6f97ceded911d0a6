"""Run Transformers' common model tests on hf_deberta and, with equal inputs, on Transformers' own DeBERTa ("in-tree").

    python tests/common_model_tests.py
    python tests/common_model_tests.py -k "(v1 or v3) and save_load" --tb short
    python tests/common_model_tests.py --sdist transformers-5.23.0.tar.gz --workers 2

pip downloads the source distribution of the installed Transformers release. Its tests are copied to
a temporary folder, together with the few files that the distribution lacks, and pytest runs there
without network. Nothing is stored in this repository. The program prints a table of counts, and the
tests that hf_deberta fails or that only the in-tree classes pass; it exits with 0 if there are none.
Needs pytest 9 and parameterized, and pytest-xdist for --workers.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
from collections import Counter, defaultdict
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hf_deberta" / "sdist"
PACKAGE = "transformers_tests"  # the temporary package that contains the distribution's tests
SIDES = ("in-tree", "hf_deberta")
OUTCOMES = ("passed", "skipped", "failed")


# ---- Tested models: four shapes of DeBERTa, each with in-tree classes and ours ---------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
    "pad_token_id": 0,
}
V1_POSITIONS: dict[str, Any] = {
    "share_att_key": False,
    "position_buckets": -1,
    "norm_rel_ebd": "none",
}
LOG_BUCKETS: dict[str, Any] = {
    "share_att_key": True,
    "position_buckets": 4,  # so few that seven tokens reach the logarithmic buckets
    "norm_rel_ebd": "layer_norm",
}
HEADS = {
    "Model": "MODEL_MAPPING_NAMES",
    "ForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "ForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "ForPreTraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
}
SKIPPED_TESTS = {
    "test_reverse_loading_mapping": "hf_deberta saves its own names; export_to_transformers writes in-tree ones",
    "test_sdpa_can_dispatch_non_composite_models": "the default of hf_deberta is auto, not sdpa",
}


ABSOLUTE: dict[str, Any] = {
    "relative_attention": False,
    "position_biased_input": True,
    "pos_att_type": None,
    "type_vocab_size": 3,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # prefix of the in-tree classes, configuration fields
    "v1": ("Deberta", V1_POSITIONS | {"attention_key_bias": False}),
    "v2": ("DebertaV2", LOG_BUCKETS | {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "v3": ("DebertaV2", LOG_BUCKETS),
    "absolute": ("DebertaV2", V1_POSITIONS | ABSOLUTE),
}


class DebertaTester:
    """The `model_tester` of the common tests: makes a tiny configuration and inputs for it."""

    is_training = True
    batch_size = 5
    seq_length = 7
    num_choices = 4

    def __init__(self, common: ModuleType, config_class: type, fields: dict[str, Any]) -> None:
        self.common = common
        self.config_class = config_class
        self.fields = fields
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            setattr(self, name, fields[name])

    def get_config(self) -> Any:
        return self.config_class(**copy.deepcopy(self.fields))

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        shape = [self.batch_size, self.seq_length]
        token_types = self.fields.get("type_vocab_size", 1)
        inputs = {
            "input_ids": self.common.ids_tensor(shape, self.vocab_size),
            "token_type_ids": self.common.ids_tensor(shape, token_types),
            "attention_mask": self.common.random_attention_mask(shape),
        }
        return self.get_config(), inputs


def make_cases(common: ModuleType, config_common: ModuleType) -> dict[str, type]:
    """Return the test cases by name. The generated module in the temporary package calls this."""
    return {
        case_name(family, side): make_case(family, side, common, config_common) for family in FAMILIES for side in SIDES
    }


def case_name(family: str, side: str) -> str:
    return f"{family}_{side.replace('-', '_')}_Test"


def make_case(family: str, side: str, common: ModuleType, config_common: ModuleType) -> type:
    """Return the test case of one family for in-tree classes or ours."""
    prefix, fields = FAMILIES[family]
    library = importlib.import_module("transformers" if side == "in-tree" else "hf_deberta")
    prefix = prefix if side == "in-tree" else "HfDeberta"
    config_class = getattr(library, f"{prefix}Config")
    classes = {head: getattr(library, prefix + head, None) for head in HEADS}
    classes = {head: model_class for head, model_class in classes.items() if model_class}
    if side == "hf_deberta":
        register_our_heads(common, config_class.model_type, classes)

    def set_up(self: Any) -> None:
        self.model_tester = DebertaTester(common, config_class, SMALL | fields)

    def test_config(self: Any) -> None:
        tester = config_common.ConfigTester(self, config_class=config_class, hidden_size=48)
        tester.run_common_tests()

    def prepare(self: Any, inputs: dict, model_class: type, return_labels: bool = False) -> dict:
        prepare_in_mixin = common.ModelTesterMixin._prepare_for_class
        inputs = prepare_in_mixin(self, inputs, model_class, return_labels)
        if return_labels and model_class is classes.get("ForPreTraining"):
            inputs["labels"] = inputs["input_ids"] % 2  # 1: the token was replaced
        return inputs

    body = {
        "setUp": set_up,
        "test_config": test_config,
        "_prepare_for_class": prepare,
        "all_model_classes": tuple(classes.values()),
        "test_can_init_all_missing_weights_before_2023": side == "hf_deberta",
    }
    if side == "hf_deberta":
        body |= {test: unittest.skip(reason)(lambda self: None) for test, reason in SKIPPED_TESTS.items()}
    return type(case_name(family, side), (common.ModelTesterMixin, unittest.TestCase), body)


def register_our_heads(common: ModuleType, model_type: str, classes: dict[str, type]) -> None:
    """Add our class names to the tables by which the common tests select labels and skips.

    Only the tables of the test module change, not those of the library under test.
    """
    for head, model_class in classes.items():
        table = HEADS[head]
        setattr(common, table, {**getattr(common, table), model_type: model_class.__name__})


# ---- The temporary folder: the distribution's tests and the other files that they import -----------------------------

GENERATED = {
    "pytest.ini": """\
[pytest]
addopts = -p no:cacheprovider -p no:warnings
verbosity_subtests = 0
""",
    f"{PACKAGE}/__init__.py": "",
    f"{PACKAGE}/exporters/__init__.py": "",
    f"{PACKAGE}/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    f"{PACKAGE}/generation/__init__.py": "",
    f"{PACKAGE}/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    f"{PACKAGE}/utils/__init__.py": "",
    f"{PACKAGE}/utils/test_configuration_utils.py": """\
config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "id2label": {0: "label"},
    "label2id": {"label": "0"},
    "problem_type": "regression",
}
""",
    f"{PACKAGE}/test_deberta.py": """\
from common_model_tests import make_cases

from . import test_configuration_common, test_modeling_common

globals().update(make_cases(test_modeling_common, test_configuration_common))
""",
}


def download_sdist(release: str) -> Path:
    """Return the tarball of this release, from the cache or from the package index."""
    tarball = CACHE / f"transformers-{release}.tar.gz"
    if not tarball.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(CACHE)]
        package = ["--no-deps", "--no-binary", "transformers", f"transformers=={release}"]
        subprocess.run([*pip, *package], check=False)
    if not tarball.exists():
        raise SystemExit(f"pip could not download the source of transformers {release}; pass it with --sdist PATH")
    return tarball


def copy_tests(sdist: Path, release: str, folder: Path) -> None:
    """Fill a folder with the distribution's tests, as a package, and the generated files."""
    tests = f"transformers-{release}/tests"
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if member.name.startswith(f"{tests}/")]
        archive.extractall(folder, members=members, filter="data")
    if not (folder / tests / "test_modeling_common.py").exists():
        raise SystemExit(f"{sdist} has no {tests}/test_modeling_common.py, which the installed release has")
    (folder / tests).rename(folder / PACKAGE)
    for name, text in GENERATED.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def work_in(folder: Path) -> None:
    """Work in `folder` without network and with this repository importable, also in child processes."""
    paths = [str(REPOSITORY), str(Path(__file__).resolve().parent)]
    os.environ.update(
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",  # the models are tiny
        PYTHONPATH=os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    sys.path[:0] = paths
    os.chdir(folder)


# ---- Results ---------------------------------------------------------------------------------------------------------


class Outcomes:
    """A pytest plugin that records outcomes and reasons by test case and test: of the test itself and of sub-tests."""

    def __init__(self) -> None:
        self.reports: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            case, test = report.nodeid.split("::")[1:3]
            self.reports[case][test].append(report)

    def of_case(self, case: str) -> dict[str, tuple[str, str]]:
        """Return {test: (outcome, reason)}."""
        return {test: merge(reports) for test, reports in self.reports[case].items()}


def merge(reports: list[Any]) -> tuple[str, str]:
    """Return the first failure; otherwise a test has passed, unless it or all of its sub-tests were skipped."""
    subtests = [report for report in reports if hasattr(report, "context")]
    failures = [report for report in reports if report.outcome == "failed"]
    first = min(failures or subtests or reports, key=lambda report: report.outcome)  # passed before skipped
    return first.outcome, reason_of(first)


def reason_of(report: Any) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join(crash.message.split())[-300:] if crash else ""  # an assertion may print state dicts first


def print_counts(outcomes: Outcomes) -> None:
    """Print the number of tests that passed, were skipped and failed, of each family and side."""
    for family, side in product(FAMILIES, SIDES):
        number = Counter(outcome for outcome, _ in outcomes.of_case(case_name(family, side)).values())
        print(f"{family:10} {side:12}", *(f"{number[outcome]:>4} {outcome}" for outcome in OUTCOMES))


def print_worse(outcomes: Outcomes) -> bool:
    """Print the tests that hf_deberta fails or that only in-tree passes, by reason; return whether there are any."""
    worse: dict[str, list[str]] = defaultdict(list)
    for family in FAMILIES:
        in_tree, ours = (outcomes.of_case(case_name(family, side)) for side in SIDES)
        for test in sorted(in_tree | ours):
            theirs = in_tree.get(test, ("not run", ""))[0]
            outcome, reason = ours.get(test, ("not run", ""))
            if outcome == "failed" or (outcome != "passed" and theirs == "passed"):
                worse[f"{outcome}: {reason}"].append(f"{family} {test} (in-tree: {theirs})")
    print(f"\nhf_deberta fails or only in-tree passes: {sum(map(len, worse.values()))}")
    for reason, tests in worse.items():
        print(f"  {reason}", *tests, sep="\n      ")
    return bool(worse)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--sdist", type=Path, help="source distribution of Transformers, instead of a download")
    add("--workers", type=int, default=1, help="number of processes; more than one needs pytest-xdist (%(default)s)")
    add("--tb", default="no", help="pytest's --tb; short or long prints tracebacks (%(default)s)")
    add("-k", dest="keyword", default="", help="pytest's -k: run only matching tests")
    return parser.parse_args()


def main() -> int:
    import pytest

    arguments = parse_arguments()
    release = version("transformers")
    sdist = (arguments.sdist or download_sdist(release)).resolve()
    command = ["-q", "--no-header", "-rN", f"--tb={arguments.tb}", "-k", arguments.keyword]
    if arguments.workers > 1:
        command += ["-n", str(arguments.workers)]
    outcomes, here = Outcomes(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        copy_tests(sdist, release, Path(folder))
        work_in(Path(folder))
        status = pytest.main([*command, f"{PACKAGE}/test_deberta.py"], plugins=[outcomes])
        os.chdir(here)
    if not outcomes.reports or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ran no tests or stopped early ({status!r}); --tb short prints the errors")
    print_counts(outcomes)
    return int(print_worse(outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
