"""Documentation is checked: snippets run, commands parse, links resolve, numbers are those of benchmarks/results."""

import csv
import inspect
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from tokenizer_files import write_bpe

import hf_deberta
from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.pretraining.arguments import MaskingArguments, PretrainingArguments
from hf_deberta.pretraining.corpus import CorpusArguments
from hf_deberta.training.command_line import ScriptParser
from hf_deberta_command import SCRIPTS, import_command

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
SNIPPETS_ELSEWHERE = ("export.md", "sift.md")  # run by tests/export/test_files.py and tests/fine_tuning/test_sift.py
GUIDES = [
    page
    for page in sorted((ROOT / "docs").glob("*.md"))
    if page.name not in SNIPPETS_ELSEWHERE and "```python" in page.read_text(encoding="utf-8")
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
HUB_IDS = ("microsoft/deberta-base", "microsoft/deberta-v3-base", "cross-encoder/nli-deberta-v3-base")
HUB_IDS += ("mixedbread-ai/mxbai-rerank-base-v1",)


def released_v1(folder: Path) -> Path:
    """Write a tiny checkpoint with the files and the fused weights of a released v1."""
    from hf_deberta.transformers_format import to_v1_layout

    folder.mkdir()
    size = write_bpe(folder, ["Paris is the capital of France. A good, very bad store."] * 4)
    fields = {"vocab_size": size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"intermediate_size": 64, "relative_attention": True, "pos_att_type": "c2p|p2c"}
    fields |= {"position_biased_input": False, "model_type": "deberta"}
    (folder / "config.json").write_text(json.dumps(fields))
    model = HfDebertaForMaskedLM(HfDebertaConfig.from_dict(fields))
    weights = {name: value.clone() for name, value in model.state_dict().items() if ".decoder." not in name}
    torch.save(to_v1_layout(weights, 4), folder / "pytorch_model.bin")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Stands in for every checkpoint of the Hub."""
    return released_v1(tmp_path_factory.mktemp("released") / "deberta-base")


def run_snippets(page: Path, checkpoint: Path) -> list[str]:
    """Run a page's Python snippets in order, in one namespace; return them."""
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict = {}
    try:
        for snippet in snippets:
            code = snippet
            for hub_id in HUB_IDS:
                code = code.replace(f'"{hub_id}"', repr(str(checkpoint)))
            exec(compile(code, page.name, "exec"), names)
    finally:
        hf_deberta.disable()
    return snippets


def test_readme_snippets_run_and_print_what_they_say(checkpoint, tmp_path, monkeypatch, capsys):
    """Scores and labels are those of another checkpoint."""
    monkeypatch.chdir(tmp_path)
    (snippet,) = run_snippets(ROOT / "README.md", checkpoint)
    shown = re.findall(r"^# (.*)$", snippet, flags=re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert len(shown) == len(printed) == 2
    for line, expected in zip(printed, shown, strict=True):
        assert re.fullmatch(r"[01]\.\d{3} \S+ +" + re.escape(expected[23:]), line)


def rows_of(result_file: str) -> list[dict[str, str]]:
    with (ROOT / "benchmarks" / "results" / result_file).open(newline="") as file:
        return list(csv.DictReader(file))


def shown_output(page: Path) -> str:
    """The output that a page shows: comments on the lines after a print, or after training, which prints too."""
    shown = re.findall(r"^ *(?:print|Trainer)\(.*\n((?:#.*\n)*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert all(shown), f"{page.name}: show the output of each print in a comment below it"
    return re.sub(r"^# ?", "", "".join(shown), flags=re.MULTILINE)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_snippets_run_and_print_what_they_show(page, checkpoint, tmp_path, monkeypatch, capsys):
    """`...` stands for what depends on the checkpoint."""
    monkeypatch.chdir(tmp_path)
    assert run_snippets(page, checkpoint)
    pattern = re.escape(shown_output(page)).replace(re.escape("..."), ".*?")
    printed = capsys.readouterr().out
    assert re.fullmatch(pattern, printed, flags=re.DOTALL), printed
    if page.name == "load.md":
        assert (tmp_path / "my-deberta" / "modeling_hf_deberta.py").exists()
        assert json.loads((tmp_path / "my-deberta-v2" / "config.json").read_text())["model_type"] == "deberta"
    if page.name == "use.md":
        assert {path.name for path in tmp_path.iterdir()} >= {"attention.png", "positions.png", "attention.html"}


def test_readme_is_short_and_narrow():
    assert len(README.split()) <= 700
    assert not [line for line in README.splitlines() if len(line) > 120 and not line.startswith("|")]


def test_tables_of_times_come_from_the_results(load):
    table = load("table")
    assert table.readme_table() in README, "README.md: replace the table by the output of python benchmarks/table.py"
    assert table.size_table() in (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    assert table.consumer_table() in (ROOT / "docs" / "load.md").read_text(encoding="utf-8")
    evidence = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    by_type = [table.ratio_table(dtype) for dtype in table.DTYPES]
    for expected in (*by_type, table.full_table(), table.label_table(), table.gpu_table()):
        assert expected in BENCHMARKS + evidence, "replace the table by that of benchmarks/table.py"


def test_figures_of_the_readme_come_from_the_results():
    """The seconds of the first screen, and the ranges on a GPU by kind of work."""
    scores = {row["peer"]: row for row in rows_of("scoring.csv") if row["machine"].endswith("1 threads")}
    without, with_it = (
        int(scores[f"pipeline{line}, batches of 1"]["documents"])
        / float(scores[f"pipeline{line}, batches of 1"]["documents_per_second"])
        for line in ("", " and enable()")
    )
    text = " ".join(README.split())
    assert f"in {without:.1f} s without the line and {with_it:.1f} s with it" in text
    times = {
        (row["mode"], row["case"], row["peer"]): float(row["milliseconds"])
        for row in rows_of("encoder.csv")
        if (row["device"], row["dtype"], row["preset"]) == ("cuda", "bfloat16", "v3-base")
    }

    def ratio_range(mode: str, cases: tuple[str, ...]) -> str:
        ours = {case: times.get((mode, case, "ours triton"), times[mode, case, "ours sdpa"]) for case in cases}
        ratios = [times[mode, case, "in-tree"] / time for case, time in ours.items()]
        return f"{min(ratios):.1f} to {max(ratios):.1f}"

    assert f"inference {ratio_range('forward', ('32x512', '4x2048'))} times" in text
    assert f"inference {ratio_range('forward', ('8x128', 'mnli'))}" in text
    assert ratio_range("training", ("8x128", "mnli")) == "1.0 to 1.0", "README.md: training gained nothing"
    steps = {row["peer"]: float(row["milliseconds"]) for row in rows_of("pretraining.csv") if row["device"] == "cuda"}
    slowest, fastest = ratio_range("training", ("32x512",)).split(" to ")
    pretraining = steps["mlm in-tree"] / steps["mlm ours triton"]
    assert slowest == fastest and f"training {slowest} to {pretraining:.1f}" in text


def test_exactness_comes_from_the_results():
    rows = rows_of("exactness.csv")
    for against in ("official", "in-tree"):
        largest = max(
            float(row["max_abs_difference"])
            for row in rows
            if row["against"] == against and "past the table" not in row["shape"]
        )
        assert f"{largest:.1e}" in BENCHMARKS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_make_targets_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name) if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}, and {linked.name} has no such heading"
    targets = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    known = {name for names in targets for name in names.split()}
    for target in re.findall(r"(?:^|`)make ([a-z][a-z-]+)", text, flags=re.MULTILINE):
        assert target in known, f"{page.name} names `make {target}`"


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_make_map_lists_every_file():
    listed = subprocess.run(
        ["make", "--no-print-directory", "map"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "hf_deberta").rglob("*.py"))
    assert [line.split()[0] for line in listed] == files
    assert all(len(line.split()) > 2 for line in listed), "a file without a docstring"


def commands_of(page: Path) -> list[tuple[str, str]]:
    """(task, flags) of each command, with or without a launcher; `...` stands for a value or for more flags."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "").replace("$MODEL", "microsoft/deberta-v3-base")
    commands = re.findall(
        r"(?:^|`|python |    |accelerate launch[^`\n]*? )"
        r"(?:run_(\w+)\.py|hf-deberta (\w+)|-m hf_deberta (\w+)) ([^`\n]*)",
        text,
        flags=re.MULTILINE,
    )
    commands = [("".join(names), re.sub(r"(--\w+) \.\.\.", r"\1 value", flags)) for *names, flags in commands]
    return [(task, re.sub(r"\.\.\.|[\[\]]", "", flags)) for task, flags in commands if task in SCRIPTS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_flags_of_their_scripts(page):
    """Each command parses; those of the README are complete. What the scripts do is tested by tests/test_run_*.py."""
    commands = commands_of(page)
    if page == ROOT / "README.md":
        assert {f"run_{task}.py" for task, _ in commands} == {path.name for path in ROOT.glob("run_*.py")}
    for task, flags in commands:
        if "--demo" in flags:
            continue
        main = vars(import_command(task))
        if task in ("mlm", "rtd"):
            kinds = (main.get("ModelArguments") or main["PairArguments"], CorpusArguments, MaskingArguments)
            kinds += (PretrainingArguments,)
        else:
            classes = (kind for kind in main.values() if inspect.isclass(kind) and kind is not DataArguments)
            (task_arguments,) = (kind for kind in classes if issubclass(kind, DataArguments))
            kinds = (ModelArguments, task_arguments, SiftArguments, FineTuningArguments)
        parser, words = ScriptParser(kinds), shlex.split(flags, comments=True)
        parser.parse_args_into_dataclasses(words) if page == ROOT / "README.md" else parser.parse_args(words)
